"""The smallest kernel with each hazard, and its mended twin: one text for both.

A line that ends in ``#-`` is in the bad kernel only, one that ends in ``#+`` in the mended one only. Each program
defines `run()`, which launches the kernel and returns the report. The pages in docs/hazards are made from these.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`happens` says what the hazard does on a GPU; `program` has both kernels."""

    title: str
    happens: str
    program: str

    def source(self, mended: bool) -> str:
        """The program of one of the twins."""
        drop, keep = ("#-", "#+") if mended else ("#+", "#-")
        lines = [line for line in self.program.splitlines() if not line.endswith(drop)]
        return "\n".join(line.removesuffix(keep).rstrip() for line in lines).strip() + "\n"


_HEAD = """
import numpy as np
from numba import cuda, float32, uint32

from numba_tma import Barriers, Buffer, Shared, TensorMap, Tiles, kernel, ptx, sim, use_backend
from numba_tma.pipeline import mbarrier_wait
from numba_tma.warpgroup import matrix_descriptor
"""


def _program(plan: str, options: str, parameters: str, body: str, run: str) -> str:
    head = _HEAD
    for name in ("Barriers", "Buffer", "TensorMap", "Tiles", "ptx", "Shared"):
        if name + ("." if name == "ptx" else "(") not in plan + body + run:
            head = head.replace(f" {name},", "")
    for name in ("float32", "uint32"):
        if f"{name}" not in (plan + body).replace("np." + name, ""):
            head = head.replace(f", {name}", "")
    if "mbarrier_wait(" not in body:
        head = head.replace("from numba_tma.pipeline import mbarrier_wait\n", "")
    if "matrix_descriptor(" not in body:
        head = head.replace("from numba_tma.warpgroup import matrix_descriptor\n", "")
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    run = textwrap.indent(textwrap.dedent(run).strip(), "    ")
    plan = f"smem = {plan}\n" if plan else ""
    return f"{head}\n{plan}\n\n@kernel({options})\ndef k({parameters}):\n{body}\n\n\ndef run():\n{run}\n"


_TILE = "Shared(tile=Tiles(1, (16, 32), float32), full=Barriers(1))"
_RUN_TILE = """
x = np.ones((16, 32), np.float32)
return k[1](TensorMap(x, (16, 32)), np.zeros(32, np.float32))
"""
_RUN_OUT = "return k[1](np.zeros(64, np.float32))"


def _load(body: str) -> str:
    return _program(_TILE, "threads=32, shared=smem", "x_map, out", body, _RUN_TILE)


def _store(body: str, floats: int = 64) -> str:
    """64 threads store a tile of 64 elements to `out` of `floats`."""
    plan = "Shared(tile=Tiles(1, (64,), float32))"
    run = _RUN_OUT.replace("64", str(floats))
    return _program(plan, "threads=64, shared=smem", "out", body, run)


_MAP_IN_MEMORY = '''
import numpy as np

from numba_tma import sim, use_backend
from numba_tma.sim import descriptor

BODY = """
.version 8.3
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 map)
{
    .shared .align 128 .b8 tile[1024];
    .shared .align 8 .b64 bar;
    .reg .b64 %map;
    .reg .b32 %tile, %bar, %zero;
    .reg .pred %done;
    ld.param.u64 %map, [map];
    mov.u32 %tile, tile;
    mov.u32 %bar, bar;
    mov.u32 %zero, 0;
    mbarrier.init.shared.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    CHANGE
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 1024;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%tile], [%map, {%zero, %zero}], [%bar];
    WAIT: mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;
    @!%done bra WAIT;
    ret;
}
"""


def run(**schedule):
    memory = sim.GlobalMemory()
    x = memory.map(np.ones((8, 32), np.float32))
    kind = descriptor.DataType.FLOAT32
    box = descriptor.Descriptor(
        dtype=kind, address=x, sizes=(32, 8), strides=(128,), box=(32, 8), element_strides=(1, 1)
    )
    address = memory.map(np.frombuffer(bytearray(descriptor.encode(box)), np.uint8))
    params = [address.to_bytes(8, "little")]
    return sim.launch(BODY, grid=1, block=1, params=params, memory=memory, **schedule)
'''
_ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"
_REPLACE = "tensormap.replace.tile.global_dim.global.b1024.b32 [%map], 1, 4;"

_OPERANDS = (
    'Shared(a=Tiles(1, (64, 64), np.float16, swizzle="128B"), b=Tiles(1, (8, 64), np.float16, swizzle="128B"), '
    "full=Barriers(1))"
)
_RUN_PRODUCT = """
a, b = np.ones((64, 64), np.float16), np.ones((8, 64), np.float16)
maps = TensorMap(a, (64, 64), swizzle="128B"), TensorMap(b, (8, 64), swizzle="128B")
return k[1](*maps, np.zeros(128, np.float32))
"""
_FETCH = """
thread = cuda.threadIdx.x
a, b = smem.a[0], smem.b[0]
nbytes = a_map.box_bytes + b_map.box_bytes
if thread == 0:
    ptx.mbarrier_init(smem.full[0], 1)
    ptx.fence_mbarrier_init()
    ptx.mbarrier_arrive_expect_tx(smem.full[0], nbytes)
    ptx.cp_async_bulk_tensor_2d_shared_global(a, a_map, 0, 0, smem.full[0])
    ptx.cp_async_bulk_tensor_2d_shared_global(b, b_map, 0, 0, smem.full[0])
cuda.syncthreads()
acc = cuda.local.array(4, float32)
da = matrix_descriptor(ptx.shared_address(a), 16, 1024)
db = matrix_descriptor(ptx.shared_address(b), 16, 1024)
"""
_MULTIPLY = """
ptx.wgmma_fence()
ptx.wgmma_mma_async_m64n8k16_f32_f16_f16(acc, da, db, False, 0, 0)
ptx.wgmma_commit_group()
"""
_AFTER = """
ptx.wgmma_wait_group_m64n8_f32(acc, 0)
out[thread] = acc[0]
"""


def _product(body: str) -> str:
    """A warpgroup multiplies what tensor copies fetched; `body` comes after the copies."""
    body = _FETCH.strip() + "\n" + textwrap.dedent(body).strip()
    return _program(_OPERANDS, "threads=128, shared=smem", "a_map, b_map, out", body, _RUN_PRODUCT)


CASES: dict[str, Case] = {
    "shared-memory-race": Case(
        "Two threads, the same bytes, no order",
        "Which of the two comes first depends on the warps' scheduling: the reader sees the old or the new value. "
        "Within one warp it often works, until the compiler or the next GPU schedules the lanes apart.",
        _program(
            "Shared(a=Buffer((64,), float32))",
            "threads=64, shared=smem",
            "out",
            """
            i = cuda.threadIdx.x
            smem.a[i] = float32(i)
            cuda.syncthreads()  #+
            out[i] = smem.a[63 - i]
            """,
            _RUN_OUT,
        ),
    ),
    "tile-used-before-wait": Case(
        "A tile is read before its barrier was waited on",
        "The copy engine is still writing: some of the tile is new, some is what was there before, and how much "
        "changes from run to run.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)  #+
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "wait-on-wrong-parity": Case(
        "The wait asks for the wrong phase",
        "A fresh barrier is in phase 0, and the phase before it counts as complete: a wait with parity 1 passes at "
        "once and stale data is read. If the copy was quicker, the same wait hangs instead.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 1)  #-
            mbarrier_wait(smem.full[0], 0)  #+
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "refill-before-consumers-done": Case(
        "A buffer is refilled while others still read it",
        "The producer's own reads are done, those of the other threads perhaps not: they get parts of the next tile.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
            cuda.syncthreads()
            for step in range(2):
                if lane == 0:
                    ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
                mbarrier_wait(smem.full[0], step)
                out[lane] = smem.tile[0][lane // 2, lane]
                ptx.fence_proxy_async_shared_cta()
                cuda.syncthreads()  #+
        """),
    ),
    "buffer-released-early": Case(
        "The consumers hand a buffer back and then read it",
        "The producer takes the arrival for the end of the reading and starts the next copy into the buffer: the read "
        "races with it.",
        _program(
            "Shared(tile=Tiles(1, (16, 32), float32), full=Barriers(1), empty=Barriers(1))",
            "threads=64, shared=smem",
            "x_map, out",
            """
            thread = cuda.threadIdx.x
            if thread == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.mbarrier_init(smem.empty[0], 32)
                ptx.fence_mbarrier_init()
            cuda.syncthreads()
            if thread == 0:
                for step in range(3):
                    mbarrier_wait(smem.empty[0], (step & 1) ^ 1)
                    ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            elif thread >= 32:
                total = float32(0)
                for step in range(3):
                    mbarrier_wait(smem.full[0], step & 1)
                    ptx.mbarrier_arrive(smem.empty[0])  #-
                    total += smem.tile[0][15, thread - 32]
                    ptx.fence_proxy_async_shared_cta()
                    ptx.mbarrier_arrive(smem.empty[0])  #+
                out[thread - 32] = total
            """,
            _RUN_TILE,
        ),
    ),
    "copy-before-writers-done": Case(
        "A copy out of shared memory starts before all threads have written",
        "The engine stores whatever is there: parts of the tile that other warps have not written yet are old.",
        _store(
            """
            thread = cuda.threadIdx.x
            smem.tile[0][thread] = float32(thread)
            ptx.fence_proxy_async_shared_cta()
            cuda.syncthreads()  #+
            if thread == 0:
                ptx.cp_async_bulk_global_shared(ptx.global_address(out), smem.tile[0], 256)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)
            """,
        ),
    ),
    "missing-proxy-fence": Case(
        "Written by threads, stored by the copy engine, no proxy fence",
        "The barrier orders the threads, but the engine reads by another path and may not see their stores yet: stale "
        "data is stored, now and then.",
        _store(
            """
            thread = cuda.threadIdx.x
            smem.tile[0][thread] = float32(thread)
            ptx.fence_proxy_async_shared_cta()  #+
            cuda.syncthreads()
            if thread == 0:
                ptx.cp_async_bulk_global_shared(ptx.global_address(out), smem.tile[0], 256)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)
            """,
        ),
    ),
    "async-write-without-proxy-fence": Case(
        "Read by threads, refilled by the copy engine, no proxy fence",
        "The manual orders the two proxies by a fence only. Much code leaves it out here, and no failure is known; so "
        "this is a warning. (After ordinary *writes* the order matters more.)",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
            cuda.syncthreads()
            for step in range(2):
                if lane == 0:
                    ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
                mbarrier_wait(smem.full[0], step)
                out[lane] = smem.tile[0][lane // 2, lane]
                ptx.fence_proxy_async_shared_cta()  #+
                cuda.syncthreads()
        """),
    ),
    "source-overwritten-while-read": Case(
        "The source of a store is overwritten too soon",
        "`wait_group.read N` leaves the newest N groups unfinished: the engine may still be reading the buffer that is "
        "written next, and stores a mixture.",
        _store(
            """
            thread = cuda.threadIdx.x
            for step in range(2):
                smem.tile[0][thread] = float32(step)
                ptx.fence_proxy_async_shared_cta()
                cuda.syncthreads()
                if thread == 0:
                    ptx.cp_async_bulk_global_shared(ptx.global_address(out) + 256 * step, smem.tile[0], 256)
                    ptx.cp_async_bulk_commit_group()
                    ptx.cp_async_bulk_wait_group_read(1)  #-
                    ptx.cp_async_bulk_wait_group_read(0)  #+
                cuda.syncthreads()
            if thread == 0:
                ptx.cp_async_bulk_wait_group(0)
            """,
            128,
        ),
    ),
    "wait-group-by-one-thread": Case(
        "One thread waits for the store, the others go on",
        "`wait_group` holds up the thread that executes it. Without a block barrier after it the other threads "
        "overwrite the buffer while the engine reads it.",
        _store(
            """
            thread = cuda.threadIdx.x
            for step in range(2):
                smem.tile[0][thread] = float32(step)
                ptx.fence_proxy_async_shared_cta()
                cuda.syncthreads()
                if thread == 0:
                    ptx.cp_async_bulk_global_shared(ptx.global_address(out) + 256 * step, smem.tile[0], 256)
                    ptx.cp_async_bulk_commit_group()
                    ptx.cp_async_bulk_wait_group_read(0)
                cuda.syncthreads()  #+
            """,
            128,
        ),
    ),
    "wait-group-without-copies": Case(
        "The thread that waits has issued nothing",
        "Groups belong to the thread that issued the copies. Another thread's commit_group closes an empty group of "
        "its own, and its wait_group returns at once.",
        _store(
            """
            thread = cuda.threadIdx.x
            for step in range(2):
                smem.tile[0][thread] = float32(step)
                ptx.fence_proxy_async_shared_cta()
                cuda.syncthreads()
                if thread == 0:
                    ptx.cp_async_bulk_global_shared(ptx.global_address(out) + 256 * step, smem.tile[0], 256)
                if thread == 32:  #-
                if thread == 0:  #+
                    ptx.cp_async_bulk_commit_group()
                    ptx.cp_async_bulk_wait_group_read(0)
                cuda.syncthreads()
            """,
            128,
        ),
    ),
    "cp-async-not-waited": Case(
        "What cp.async copied is used before the wait",
        "A block barrier does not wait for cp.async: the reader sees the old bytes, or some of the new ones.",
        _program(
            "Shared(a=Buffer((128,), float32))",
            "threads=32, shared=smem",
            "x, out",
            """
            lane = uint32(cuda.threadIdx.x)
            ptx.cp_async_cg_16(smem.a.address_of(uint32(4) * lane), ptx.global_address(x) + 16 * lane)
            ptx.cp_async_wait_all()  #+
            cuda.syncthreads()
            out[lane] = smem.a[127 - lane]
            """,
            "return k[1](np.ones(128, np.float32), np.zeros(32, np.float32))",
        ),
    ),
    "uninitialised-shared-read": Case(
        "Shared memory is read that nobody has written",
        "It holds what the block before it on the same SM left there: often zeros on a fresh GPU, anything later.",
        _program(
            "Shared(a=Buffer((64,), float32))",
            "threads=64, shared=smem",
            "out",
            """
            i = cuda.threadIdx.x
            smem.a[i] = float32(0)  #+
            smem.a[i] += float32(1)
            out[i] = smem.a[i]
            """,
            _RUN_OUT,
        ),
    ),
    "more-bytes-than-expected": Case(
        "The barrier expects fewer bytes than the copies deliver",
        "The phase completes when the promised bytes are there, before the rest of the tile is; or the count passes "
        "zero between two looks and the phase never completes.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes // 2)  #-
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)  #+
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "copy-without-expect-tx": Case(
        "A copy's bytes are not promised in time, or not at all",
        "The arrival completes the phase while the copy is still under way: the wait passes, and what was in the tile "
        "before is read. The same comes of a promise after the last arrival, which counts for the next phase.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive(smem.full[0])  #-
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)  #+
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "fewer-bytes-than-expected": Case(
        "The barrier expects more bytes than the copies deliver",
        "The phase never completes: every thread that waits for it hangs.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], 2 * x_map.box_bytes)  #-
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)  #+
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "expect-tx-without-arrive": Case(
        "Bytes are promised, but nobody arrives",
        "expect_tx changes the byte count alone. The phase waits for its arrival for ever.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_expect_tx(smem.full[0], x_map.box_bytes)  #-
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)  #+
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "too-many-arrivals": Case(
        "More threads arrive than the barrier was told of",
        "Each arrival beyond the count completes a phase too early or counts for the next one: the phases run ahead of "
        "those who wait, who then read wrong data or hang.",
        _program(
            "Shared(full=Barriers(1))",
            "threads=32, shared=smem",
            "out",
            """
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)  #-
                ptx.mbarrier_init(smem.full[0], 32)  #+
            cuda.syncthreads()
            ptx.mbarrier_arrive(smem.full[0])
            mbarrier_wait(smem.full[0], 0)
            out[lane] = float32(lane)
            """,
            _RUN_OUT,
        ),
    ),
    "copy-issued-by-every-lane": Case(
        "Every lane of the warp issues the copy",
        "Each thread that executes the instruction starts a copy of its own: 32 times the bytes arrive at a barrier "
        "that expects them once, and its phases run ahead.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
            cuda.syncthreads()
            if lane < 32:  #-
            if lane == 0:  #+
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "phase-missed": Case(
        "A waiter may fall two phases behind",
        "The barrier completes its next phase before a slow warp has looked at this one. Parity cannot tell them "
        "apart: the warp waits for a phase that is over, and hangs.",
        _program(
            "Shared(full=Barriers(1))",
            "threads=64, shared=smem",
            "out",
            """
            thread = cuda.threadIdx.x
            if thread == 0:
                ptx.mbarrier_init(smem.full[0], 1)
            cuda.syncthreads()
            for step in range(2):
                if thread == 0:
                    ptx.mbarrier_arrive(smem.full[0])
                mbarrier_wait(smem.full[0], step)
                cuda.syncthreads()  #+
            out[thread] = float32(thread)
            """,
            _RUN_OUT,
        ),
    ),
    "barrier-used-before-init": Case(
        "A barrier is used before it is initialised",
        "The arrival or the wait works on whatever bytes are there: a fault, a hang, or a phase that seems complete.",
        _program(
            "Shared(full=Barriers(1))",
            "threads=64, shared=smem",
            "out",
            """
            thread = cuda.threadIdx.x
            if thread == 0:
                ptx.mbarrier_init(smem.full[0], 64)
            cuda.syncthreads()  #+
            ptx.mbarrier_arrive(smem.full[0])
            mbarrier_wait(smem.full[0], 0)
            out[thread] = float32(thread)
            """,
            _RUN_OUT,
        ),
    ),
    "barrier-reinitialised-in-use": Case(
        "A barrier is initialised again while it is in use",
        "Who still waits for the old phase finds a barrier in its first phase and waits for ever.",
        _program(
            "Shared(full=Barriers(1))",
            "threads=64, shared=smem",
            "out",
            """
            thread = cuda.threadIdx.x
            if thread == 0:  #+
                ptx.mbarrier_init(smem.full[0], 64)  #+
            cuda.syncthreads()  #+
            for step in range(2):
                if thread == 0:  #-
                    ptx.mbarrier_init(smem.full[0], 64)  #-
                cuda.syncthreads()  #-
                ptx.mbarrier_arrive(smem.full[0])
                mbarrier_wait(smem.full[0], 0)  #-
                mbarrier_wait(smem.full[0], step)  #+
            out[thread] = float32(thread)
            """,
            _RUN_OUT,
        ),
    ),
    "mbarrier-init-not-fenced": Case(
        "The copy engine may not see the barrier's initialisation",
        "mbarrier.init is an ordinary store. Without a fence the engine's signal may come to a barrier that is not "
        "there yet: the bytes are not counted and the wait hangs. For a block's own barrier this has not been seen to "
        "fail (a warning); for a peer's it is an error.",
        _load("""
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()  #+
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][15, lane]
        """),
    ),
    "divergent-barrier": Case(
        "A block barrier in a branch that a warp does not take together",
        "The lanes of a warp come to the barrier at different places. Depending on the GPU the block hangs, or the "
        "barrier lets threads pass that have not met.",
        _program(
            "Shared(a=Buffer((64,), float32))",
            "threads=64, shared=smem",
            "out",
            """
            i = cuda.threadIdx.x
            if i < 48:  #-
                smem.a[i] = float32(i)  #-
                cuda.syncthreads()  #-
            else:  #-
                smem.a[i] = float32(-i)  #-
                cuda.syncthreads()  #-
            smem.a[i] = float32(i if i < 48 else -i)  #+
            cuda.syncthreads()  #+
            out[i] = smem.a[63 - i]
            """,
            _RUN_OUT,
        ),
    ),
    "bulk-size-not-multiple-of-16": Case(
        "A bulk copy of 508 bytes",
        "The engine moves 16 bytes at a time: another size is a fault, or a phase that never completes.",
        _program(
            "Shared(tile=Tiles(1, (128,), float32), full=Barriers(1))",
            "threads=32, shared=smem",
            "x, out",
            """
            lane = cuda.threadIdx.x
            nbytes = 127 * 4  #-
            nbytes = 128 * 4  #+
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], nbytes)
                ptx.cp_async_bulk_shared_global(smem.tile[0], ptx.global_address(x), nbytes, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][lane]
            """,
            "return k[1](np.ones(128, np.float32), np.zeros(32, np.float32))",
        ),
    ),
    "shared-out-of-bounds": Case(
        "An access beyond the block's shared memory",
        "A fault that ends the kernel and every later launch of the process, or another variable's bytes.",
        _program(
            "Shared(a=Buffer((64,), float32))",
            "threads=64, shared=smem",
            "out",
            """
            i = cuda.threadIdx.x
            smem.a[i + 64] = float32(i)  #-
            smem.a[i] = float32(i)  #+
            out[i] = float32(i)
            """,
            _RUN_OUT,
        ),
    ),
    "shared-misaligned": Case(
        "A 16-byte access at an address that is no multiple of 16",
        "A misaligned address fault, which ends the kernel and every later launch of the process.",
        _program(
            "Shared(a=Buffer((256,), float32))",
            "threads=32, shared=smem",
            "out",
            """
            lane = uint32(cuda.threadIdx.x)
            first = uint32(4) * lane + uint32(1)  #-
            first = uint32(4) * lane + uint32(4)  #+
            ptx.st_shared_v4_u32(smem.a.address_of(first), lane, lane, lane, lane)
            out[lane] = float32(lane)
            """,
            _RUN_OUT,
        ),
    ),
    "swizzled-tile-misaligned": Case(
        "A swizzled tile that does not begin where the pattern begins",
        "The engine swizzles bits of the absolute shared address. A reader that computes the swizzle from the tile's "
        "first byte finds other elements than it looks for.",
        _program(
            "Shared(room=Buffer((1024,), float32), full=Barriers(1))",
            "threads=32, shared=smem",
            "x_map, out",
            """
            lane = cuda.threadIdx.x
            tile = smem.room.address_of(32)  #-
            tile = smem.room.address_of(0)  #+
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
                ptx.cp_async_bulk_tensor_2d_shared_global(tile, x_map, 0, 0, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.room[64 + lane]
            """,
            """
            x = np.ones((16, 32), np.float32)
            return k[1](TensorMap(x, (16, 32), swizzle="128B"), np.zeros(32, np.float32))
            """,
        ),
    ),
    "register-pool-overrun": Case(
        "setmaxnreg asks for more registers than the block has",
        "The warps that ask last wait for registers that nobody gives up: a hang.",
        _program(
            "",
            "threads=384",
            "out",
            """
            thread = cuda.threadIdx.x
            if thread < 128:
                ptx.setmaxnreg_dec(40)  #-
                ptx.setmaxnreg_dec(24)  #+
            else:
                ptx.setmaxnreg_inc(248)  #-
                ptx.setmaxnreg_inc(240)  #+
            out[thread] = float32(thread)
            """,
            "return k[1](np.zeros(384, np.float32))",
        ),
    ),
    "tensor-map-not-acquired": Case(
        "A tensor map in global memory is used without its fence",
        "Tensor maps are read by a path and a cache of their own: the copy may use what was at that address before the "
        "host or another kernel wrote the map. Kernel arguments need no fence.",
        _MAP_IN_MEMORY.replace("    CHANGE\n", f"    {_ACQUIRE} #+\n"),
    ),
    "tensor-map-changed-without-fence": Case(
        "A tensor map is changed and used without a fence between",
        "The copy may still see the old map: another size, another address.",
        _MAP_IN_MEMORY.replace("    CHANGE\n", f"    {_ACQUIRE}\n    {_REPLACE}\n    {_ACQUIRE} #+\n"),
    ),
    "tma-store-overhang": Case(
        "A store writes beyond the rows of the tensor",
        "Rows of 466 bytes end within a chunk of 16: columns 466 to 479 are overwritten in every row that the box "
        "reaches, which is somebody else's data if the array is a view.",
        _program(
            "Shared(tile=Tiles(1, (8, 16), uint8))",
            "threads=128, shared=smem",
            "x_map",
            """
            thread = cuda.threadIdx.x
            smem.tile[0][thread // 16, thread % 16] = 1
            ptx.fence_proxy_async_shared_cta()
            cuda.syncthreads()
            if thread == 0:
                ptx.cp_async_bulk_tensor_2d_global_shared(x_map, 464, 0, smem.tile[0])
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)
            """,
            """
            x = np.zeros((8, 512), np.uint8)
            x = x[:, :466]  #-
            return k[1](TensorMap(x, (8, 16)))
            """,
        ).replace("from numba import cuda\n", "from numba import cuda, uint8\n"),
    ),
    "exit-with-copies-in-flight": Case(
        "A block exits while the engine still reads its shared memory",
        "The next block on the SM writes its own data there: the store carries away a mixture.",
        _store(
            """
            thread = cuda.threadIdx.x
            smem.tile[0][thread] = float32(thread)
            ptx.fence_proxy_async_shared_cta()
            cuda.syncthreads()
            if thread == 0:
                ptx.cp_async_bulk_global_shared(ptx.global_address(out), smem.tile[0], 256)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)  #+
            """,
        ),
    ),
    "peer-exited-before-remote-access": Case(
        "A peer's shared memory is used after the peer has exited",
        "A block that is done gives its shared memory away. A remote arrival or store that comes later is a fault, or "
        "lands in another block's data.",
        _program(
            "Shared(full=Barriers(1))",
            "threads=32, shared=smem, cluster=2",
            "out",
            """
            lane = cuda.threadIdx.x
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
            if lane == 0:
                peer = ptx.cluster_ctarank() ^ uint32(1)
                ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(smem.full[0], peer))
            out[cuda.grid(1)] = float32(lane)
            ptx.barrier_cluster_arrive()  #+
            ptx.barrier_cluster_wait()  #+
            """,
            "return k[2](np.zeros(64, np.float32))",
        ),
    ),
    "multicast-without-receiver-barrier": Case(
        "A multicast to a block that has no barrier there",
        "Every receiver's barrier at the same offset is signalled. Where none was initialised the bytes count for "
        "nothing, or damage what is there.",
        _program(
            _TILE,
            "threads=32, shared=smem, cluster=2",
            "x_map, out",
            """
            lane = cuda.threadIdx.x
            rank = ptx.cluster_ctarank()
            if lane == 0 and rank == 0:  #-
            if lane == 0:  #+
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
            if lane == 0 and rank == 0:
                ptx.cp_async_bulk_tensor_2d_shared_global_multicast(smem.tile[0], x_map, 0, 0, smem.full[0], 3)
            mbarrier_wait(smem.full[0], 0)
            out[rank * uint32(32) + lane] = smem.tile[0][15, lane]
            """,
            """
            x = np.ones((16, 32), np.float32)
            return k[2](TensorMap(x, (16, 32)), np.zeros(64, np.float32))
            """,
        ),
    ),
    "blocks-write-same-bytes": Case(
        "Two blocks write the same place",
        "Blocks run in any order and at the same time: whichever comes last wins, and that changes from run to run.",
        _program(
            "",
            "threads=32",
            "out",
            """
            out[cuda.threadIdx.x] = float32(cuda.blockIdx.x)  #-
            out[cuda.grid(1)] = float32(cuda.blockIdx.x)  #+
            """,
            "return k[2](np.zeros(64, np.float32))",
        ),
    ),
    "stores-write-same-bytes": Case(
        "Two stores of a thread write the same place",
        "The engine may write the second store before the first: the place holds either, or some of both. A box wider "
        "than the step from one to the next does it too, at the edge. (Reductions of one kind may meet: they commute.)",
        _program(
            "Shared(tile=Tiles(2, (64,), float32))",
            "threads=64, shared=smem",
            "out",
            """
            thread = cuda.threadIdx.x
            for step in range(2):
                smem.tile[step][thread] = float32(step)
            ptx.fence_proxy_async_shared_cta()
            cuda.syncthreads()
            if thread == 0:
                for step in range(2):
                    ptx.cp_async_bulk_global_shared(ptx.global_address(out) + 128 * step, smem.tile[step], 256)  #-
                    ptx.cp_async_bulk_global_shared(ptx.global_address(out) + 256 * step, smem.tile[step], 256)  #+
                    ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group(0)
            """,
            "return k[1](np.zeros(128, np.float32))",
        ),
    ),
    "remote-access-before-peer-starts": Case(
        "A peer's shared memory is used before the peer has started",
        "Nothing says that the other block of the cluster runs already: the access is a fault, or reaches shared "
        "memory that still is another block's.",
        _program(
            "Shared(a=Buffer((4,), float32))",
            "threads=32, shared=smem, cluster=2",
            "out",
            """
            lane = cuda.threadIdx.x
            if lane < 4:
                smem.a[lane] = float32(lane)
            ptx.barrier_cluster_arrive()  #+
            ptx.barrier_cluster_wait()  #+
            peer = ptx.cluster_ctarank() ^ uint32(1)
            first, _, _, last = ptx.ld_shared_cluster_v4_f32(ptx.mapa_shared_cluster(smem.a.address_of(0), peer))
            out[cuda.grid(1)] = first + last
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
            """,
            "return k[2](np.zeros(64, np.float32))",
        ),
    ),
    "cp-async-in-flight-at-exit": Case(
        "A thread exits with a cp.async in flight",
        "The block's shared memory goes to the next block while the copy still writes to it. No failure is known, and "
        "no manual promises that there will be none.",
        _program(
            "Shared(a=Buffer((128,), float32))",
            "threads=32, shared=smem",
            "x, out",
            """
            lane = uint32(cuda.threadIdx.x)
            ptx.cp_async_cg_16(smem.a.address_of(uint32(4) * lane), ptx.global_address(x) + 16 * lane)
            ptx.cp_async_wait_all()  #+
            out[lane] = x[lane]
            """,
            "return k[1](np.ones(128, np.float32), np.zeros(32, np.float32))",
        ),
    ),
    "wgmma-operands-not-fenced": Case(
        "Written by threads, multiplied by wgmma, no proxy fence",
        "wgmma reads shared memory by the copy engine's path: it may multiply what was there before the threads' "
        "stores.",
        _program(
            _OPERANDS,
            "threads=128, shared=smem",
            "a_map, b_map, out",
            """
            thread = cuda.threadIdx.x
            a, b = smem.a[0], smem.b[0]
            for column in range(64):
                if thread < 64:
                    a[thread, column] = np.float16(1)
                if thread < 8:
                    b[thread, column] = np.float16(1)
            ptx.fence_proxy_async_shared_cta()  #+
            cuda.syncthreads()
            acc = cuda.local.array(4, float32)
            da = matrix_descriptor(ptx.shared_address(a), 16, 1024)
            db = matrix_descriptor(ptx.shared_address(b), 16, 1024)
            """.rstrip()
            + textwrap.indent(_MULTIPLY + _AFTER.lstrip(), " " * 12),
            _RUN_PRODUCT,
        ),
    ),
    "wgmma-tile-not-waited": Case(
        "wgmma reads a tile that has not arrived",
        "The copy engine is still writing: the product is of some new and some old elements.",
        _product("mbarrier_wait(smem.full[0], 0)  #+" + _MULTIPLY + _AFTER.lstrip()),
    ),
    "wgmma-registers-before-wait": Case(
        "Accumulators are read before the product is done",
        "`wait_group 1` lets the newest group go on, here the only one: the registers hold old values, or some of "
        "each.",
        _product(
            "mbarrier_wait(smem.full[0], 0)"
            + _MULTIPLY
            + """
ptx.wgmma_wait_group_m64n8_f32(acc, 1)  #-
ptx.wgmma_wait_group_m64n8_f32(acc, 0)  #+
out[thread] = acc[0]
ptx.wgmma_wait_group_m64n8_f32(acc, 0)
""".lstrip()
        ),
    ),
    "wgmma-fence-missing": Case(
        "wgmma without wgmma.fence",
        "The instruction may take its registers before, or while, the threads' last writes to them arrive.",
        _product(
            "mbarrier_wait(smem.full[0], 0)" + _MULTIPLY.replace("fence()", "fence()  #+") + _AFTER.lstrip(),
        ),
    ),
    "wgmma-operands-overwritten": Case(
        "A stage is refilled while wgmma still reads it",
        "`wait_group 1` covers all products but the newest: that one still reads the tile that the copy overwrites.",
        _product(
            """
mbarrier_wait(smem.full[0], 0)
ptx.wgmma_fence()
ptx.wgmma_mma_async_m64n8k16_f32_f16_f16(acc, da, db, False, 0, 0)
ptx.wgmma_commit_group()
ptx.wgmma_wait_group_m64n8_f32(acc, 1)  #-
ptx.wgmma_wait_group_m64n8_f32(acc, 0)  #+
cuda.syncthreads()
if thread == 0:
    ptx.mbarrier_arrive_expect_tx(smem.full[0], nbytes)
    ptx.cp_async_bulk_tensor_2d_shared_global(a, a_map, 0, 0, smem.full[0])
    ptx.cp_async_bulk_tensor_2d_shared_global(b, b_map, 0, 0, smem.full[0])
mbarrier_wait(smem.full[0], 1)
ptx.wgmma_mma_async_m64n8k16_f32_f16_f16(acc, da, db, True, 0, 0)
ptx.wgmma_commit_group()
ptx.wgmma_wait_group_m64n8_f32(acc, 0)
out[thread] = acc[0]
"""
        ),
    ),
    "global-memory-race": Case(
        "Two threads of a block, the same bytes of global memory, no order",
        "Which of the two comes first depends on the warps' scheduling, as in shared memory.",
        _program(
            "",
            "threads=64",
            "scratch, out",
            """
            i = cuda.threadIdx.x
            scratch[i] = float32(i)
            cuda.syncthreads()  #+
            out[i] = scratch[63 - i]
            """,
            "return k[1](np.zeros(64, np.float32), np.zeros(64, np.float32))",
        ),
    ),
    "blocks-read-unordered": Case(
        "A block reads what another one writes, and nothing was released",
        "The flag may be seen before the data: a relaxed atomic operation orders nothing but itself. The reader gets "
        "old data now and then.",
        _program(
            "",
            "threads=32",
            "data, flag, out",
            """
            lane = cuda.threadIdx.x
            if cuda.blockIdx.x == 0:
                data[lane] = float32(lane)
                cuda.syncwarp()
                if lane == 0:
                    cuda.atomic.exch(flag, 0, 1)  #-
                    ptx.st_release_gpu_global_u32(ptx.global_address(flag), 1)  #+
            else:
                while ptx.ld_acquire_gpu_global_u32(ptx.global_address(flag)) == 0:
                    pass
                out[lane] = data[31 - lane]
            """,
            """
            flag = np.zeros(1, np.uint32)
            return k[2](np.zeros(32, np.float32), flag, np.zeros(32, np.float32))
            """,
        ),
    ),
    "global-proxy-fence-missing": Case(
        "Written to global memory by threads, loaded by the copy engine, no proxy fence",
        "The barrier orders the threads; the engine reads by another path and may get what was there before their "
        "stores.",
        _program(
            "Shared(tile=Tiles(1, (32,), float32), full=Barriers(1))",
            "threads=32, shared=smem",
            "x, out",
            """
            lane = cuda.threadIdx.x
            x[lane] = float32(lane)
            ptx.fence_proxy_async_global()  #+
            cuda.syncthreads()
            if lane == 0:
                ptx.mbarrier_init(smem.full[0], 1)
                ptx.fence_mbarrier_init()
                ptx.mbarrier_arrive_expect_tx(smem.full[0], 128)
                ptx.cp_async_bulk_shared_global(smem.tile[0], ptx.global_address(x), 128, smem.full[0])
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)
            out[lane] = smem.tile[0][31 - lane]
            """,
            "return k[1](np.zeros(32, np.float32), np.zeros(32, np.float32))",
        ),
    ),
    "store-not-waited": Case(
        "What a bulk store writes is read before the store is done",
        "`wait_group.read` waits until shared memory has been read. The bytes may be on their way to global memory "
        "yet, and a load gets what was there before.",
        _program(
            "Shared(tile=Tiles(1, (64,), float32))",
            "threads=64, shared=smem",
            "x, out",
            """
            thread = cuda.threadIdx.x
            smem.tile[0][thread] = float32(thread)
            ptx.fence_proxy_async_shared_cta()
            cuda.syncthreads()
            if thread == 0:
                ptx.cp_async_bulk_global_shared(ptx.global_address(x), smem.tile[0], 256)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)  #-
                ptx.cp_async_bulk_wait_group(0)  #+
            cuda.syncthreads()
            out[thread] = x[63 - thread]
            """,
            "return k[1](np.zeros(64, np.float32), np.zeros(64, np.float32))",
        ),
    ),
}
