// Adds one to an array, 1024 ints a block, in and out by the copy engine, with libcu++'s barrier and PTX wrappers.
#include <cuda/barrier>
#include <cuda/ptx>
using barrier = cuda::barrier<cuda::thread_scope_block>;
namespace ptx = cuda::ptx;

extern "C" __global__ void bulk_add(int *data, size_t count)
{
    constexpr int length = 1024;
    __shared__ alignas(128) int tile[length];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ barrier bar;
    const size_t offset = size_t(blockIdx.x) * length;
    if (threadIdx.x == 0) {
        init(&bar, blockDim.x);
        ptx::fence_proxy_async(ptx::space_shared);
    }
    __syncthreads();
    barrier::arrival_token token;
    if (threadIdx.x == 0) {
        cuda::memcpy_async(tile, data + offset, cuda::aligned_size_t<16>(sizeof(tile)), bar);
        token = cuda::device::barrier_arrive_tx(bar, 1, 0);
    } else {
        token = bar.arrive();
    }
    bar.wait(std::move(token));
    for (int i = threadIdx.x; i < length; i += blockDim.x)
        tile[i] += 1;
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, data + offset, tile, sizeof(tile));
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
    }
}
