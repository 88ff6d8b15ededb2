// c = a b^T in bfloat16, a block for each 64 x 64 tile: tensor copies in two stages, cuda::ptx's wrappers, wgmma by hand.
#include <cuda.h>
#include <cuda/ptx>
#include <cstdint>
namespace ptx = cuda::ptx;

constexpr int tile = 64, stages = 2;
constexpr uint32_t tile_bytes = tile * tile * 2;

// K-major rows of 128 bytes under the 128-byte swizzle; eight of them take 1024 bytes.
__device__ uint64_t descriptor(const void *matrix)
{
    const uint32_t address = uint32_t(__cvta_generic_to_shared(matrix));
    return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(128) wgmma_product(
    const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float *c, int n, int steps)
{
    __shared__ alignas(1024) char a_tiles[stages][tile_bytes];
    __shared__ alignas(1024) char b_tiles[stages][tile_bytes];
    __shared__ uint64_t full[stages];
    const bool leader = threadIdx.x == 0;
    if (leader) {
        for (auto &barrier : full)
            ptx::mbarrier_init(&barrier, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();
    auto fetch = [&](int step) {
        const int stage = step % stages;
        const int32_t of_a[2] = {step * tile, int32_t(blockIdx.x) * tile};
        const int32_t of_b[2] = {step * tile, int32_t(blockIdx.y) * tile};
        ptx::mbarrier_arrive_expect_tx(
            ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[stage], 2 * tile_bytes);
        ptx::cp_async_bulk_tensor(
            ptx::space_cluster, ptx::space_global, a_tiles[stage], &a_map, of_a, &full[stage]);
        ptx::cp_async_bulk_tensor(
            ptx::space_cluster, ptx::space_global, b_tiles[stage], &b_map, of_b, &full[stage]);
    };
    if (leader)
        for (int step = 0; step < min(stages, steps); step++)
            fetch(step);
    float d[32] = {};
    for (int step = 0; step < steps; step++) {
        const int stage = step % stages;
        while (!ptx::mbarrier_try_wait_parity(&full[stage], step / stages & 1))
            ;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < 4; k++)
            multiply(d, descriptor(a_tiles[stage] + 32 * k), descriptor(b_tiles[stage] + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncthreads();
        if (leader && step + stages < steps)
            fetch(step + stages);
    }
    const int row = blockIdx.x * tile + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const int column = blockIdx.y * tile + threadIdx.x % 4 * 2;
    for (int j = 0; j < 8; j++) {
        float *at = c + row * n + column + 8 * j;
        at[0] = d[4 * j], at[1] = d[4 * j + 1];
        at[8 * n] = d[4 * j + 2], at[8 * n + 1] = d[4 * j + 3];
    }
}
