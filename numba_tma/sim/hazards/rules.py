"""The hazards by name: how bad, what the rule is, what to do.

`error`: the kernel is wrong, whether or not this run showed it. `warning`: the manual and common practice part, or the
result depends on what else is done with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One kind of hazard. `section` names the part of the PTX ISA manual that the rule comes from."""

    severity: str
    rule: str
    remedy: str
    section: str


_ASYNC = "Data Movement and Conversion Instructions: Asynchronous copy"
_MODEL = "Memory Consistency Model"
_PROXY = "Memory Consistency Model: Proxies; membar, fence"
_MBARRIER = "Parallel Synchronization and Communication Instructions: mbarrier"
_TX = "mbarrier: Tracking asynchronous operations"
_BULK_WAIT = "cp.async.bulk.wait_group"
_WGMMA = "Asynchronous Warpgroup Level Matrix Instructions"

RULES: dict[str, Rule] = {
    "shared-memory-race": Rule(
        "error",
        "two threads use the same bytes, one of them writes, and nothing orders the two",
        "put a block barrier (cuda.syncthreads; cuda.syncwarp within a warp) between them",
        _MODEL,
    ),
    "tile-used-before-wait": Rule(
        "error",
        "what the copy engine writes is there for a thread once it has waited on the copy's mbarrier, or is ordered "
        "after a thread that has",
        "wait on the mbarrier before the first use of the tile",
        f"{_TX}; {_ASYNC}",
    ),
    "wait-on-wrong-parity": Rule(
        "error",
        "the wait names the phase by its parity, and the preceding phase has the other parity: it counts as complete, "
        "so the wait passes at once",
        "wait with parity (use // stages) & 1: 0 for a barrier's first phase, then 1, 0, …",
        "mbarrier.test_wait, mbarrier.try_wait",
    ),
    "refill-before-consumers-done": Rule(
        "error",
        "a copy into a buffer may begin only when every thread that reads the old contents is done",
        "let the consumers arrive at an 'empty' barrier (or a block barrier) and wait for it before the copy",
        _MODEL,
    ),
    "buffer-released-early": Rule(
        "error",
        "a consumer hands a buffer back by arriving; what it reads after that is no longer protected",
        "arrive after the last read of the buffer; what the next copy brings has a wait of its own",
        "mbarrier.arrive",
    ),
    "copy-before-writers-done": Rule(
        "error",
        "a copy out of shared memory must be ordered after every thread that writes what it copies",
        "fence.proxy.async in the writing threads, then a barrier, then the copy",
        _MODEL,
    ),
    "missing-proxy-fence": Rule(
        "error",
        "ordinary stores and the copy engine reach shared memory by different proxies; a barrier alone does not order "
        "the two",
        "fence.proxy.async in the threads that wrote, before the barrier",
        _PROXY,
    ),
    "async-write-without-proxy-fence": Rule(
        "warning",
        "ordinary accesses and the copy engine's writes are of different proxies: the manual wants a proxy fence "
        "beside the barrier, common practice often leaves it out after a read",
        "fence.proxy.async in the threads that accessed the buffer, before the barrier",
        _PROXY,
    ),
    "source-overwritten-while-read": Rule(
        "error",
        "the source of a bulk or tensor store may be overwritten once the group has been waited for: all but the "
        "newest N groups are read after wait_group.read N",
        "wait for the group of this very buffer: wait_group.read with a smaller number, or more stages",
        _BULK_WAIT,
    ),
    "wait-group-by-one-thread": Rule(
        "error",
        "wait_group holds up the thread that executes it and nobody else",
        "a block barrier after the wait, before other threads use the buffer",
        _BULK_WAIT,
    ),
    "wait-group-without-copies": Rule(
        "error",
        "groups belong to the thread that issued the copies: to another thread commit_group and wait_group mean its "
        "own groups, which are empty",
        "let the thread that issues the copies commit and wait, then a block barrier",
        f"cp.async.bulk.commit_group; {_BULK_WAIT}",
    ),
    "cp-async-not-waited": Rule(
        "error",
        "what cp.async writes is there once the issuing thread has waited for its group; other threads need a barrier "
        "after that",
        "cp.async.wait_group in every thread that copied, then a block barrier",
        "cp.async.wait_group",
    ),
    "uninitialised-shared-read": Rule(
        "error",
        "shared memory holds anything until it is written",
        "write it before, or do not read there",
        "State Spaces: Shared State Space",
    ),
    "more-bytes-than-expected": Rule(
        "error",
        "a phase completes when as many bytes have come as were promised; with fewer promised it completes too early, "
        "or never",
        "promise the bytes of all the copies of the phase: expect_tx(map.box_bytes) for each",
        _TX,
    ),
    "copy-without-expect-tx": Rule(
        "error",
        "a phase waits for the bytes that were promised before its last arrival, for no others: with none promised it "
        "is over when all have arrived, whether or not the copy is",
        "promise the bytes with the arrival or before it: mbarrier.arrive.expect_tx(bar, map.box_bytes) in place of "
        "mbarrier.arrive",
        f"{_TX}; mbarrier.arrive",
    ),
    "fewer-bytes-than-expected": Rule(
        "error",
        "a phase completes when as many bytes have come as were promised",
        "promise what the copies deliver: expect_tx(map.box_bytes) for each",
        _TX,
    ),
    "expect-tx-without-arrive": Rule(
        "error",
        "expect_tx promises bytes and is no arrival: the phase waits for its arrivals as well",
        "mbarrier.arrive.expect_tx in place of mbarrier.expect_tx",
        "mbarrier.expect_tx; mbarrier.arrive",
    ),
    "too-many-arrivals": Rule(
        "error",
        "a phase takes as many arrivals as mbarrier.init was told; one more counts for the next phase, which nobody "
        "has asked for yet",
        "initialise for all threads that arrive, or let one of them arrive",
        "mbarrier.init; mbarrier.arrive",
    ),
    "copy-issued-by-every-lane": Rule(
        "error",
        "an asynchronous copy is issued once for each thread that executes it",
        "let one thread issue it: if threadIdx.x == 0, or elect.sync",
        _ASYNC,
    ),
    "phase-missed": Rule(
        "error",
        "a wait names a phase by parity, so a thread must not fall two phases behind: it would take one for the other",
        "let the barrier's next phase complete only after every waiter has seen this one (its arrival should follow "
        "the wait)",
        "mbarrier.test_wait, mbarrier.try_wait",
    ),
    "barrier-used-before-init": Rule(
        "error",
        "an mbarrier can be used by threads that are ordered after its mbarrier.init",
        "a block barrier (cluster barrier for a peer's) between mbarrier.init and the first use",
        "mbarrier.init",
    ),
    "barrier-reinitialised-in-use": Rule(
        "error",
        "mbarrier.init on a barrier that is in use forgets its arrivals and bytes",
        "initialise once; to use the memory anew, wait for everybody, mbarrier.inval, then init",
        "mbarrier.init; mbarrier.inval",
    ),
    "mbarrier-init-not-fenced": Rule(
        "error",
        "mbarrier.init is an ordinary store: the copy engine and the cluster's other blocks see it after a fence",
        "fence.mbarrier_init (or, for this block's own copies, fence.proxy.async) after mbarrier.init",
        "membar, fence: fence.mbarrier_init",
    ),
    "divergent-barrier": Rule(
        "error",
        "bar.sync counts all threads of the block, and the threads of a warp must come to the same one together",
        "take the barrier out of the branch",
        "bar, barrier",
    ),
    "bulk-size-not-multiple-of-16": Rule(
        "error", "bulk copies move multiples of 16 bytes", "pad the buffer to 16 bytes", "cp.async.bulk"
    ),
    "shared-out-of-bounds": Rule(
        "error",
        "an access must lie within the block's shared memory",
        "ask for more at launch, or correct the index",
        "State Spaces: Shared State Space",
    ),
    "shared-misaligned": Rule(
        "error",
        "an address must be a multiple of what the instruction asks for",
        "align the buffer (Tiles are aligned)",
        "Instruction Operands: Addresses as Operands; Asynchronous copy",
    ),
    "swizzled-tile-misaligned": Rule(
        "warning",
        "the engine swizzles by bits of the absolute shared address: a tile that does not begin where the pattern "
        "begins is laid out differently from what its own offsets say",
        "align the tile to the pattern: 1024 B for 128-byte swizzle, 512 for 64, 256 for 32",
        "Tensor: Swizzling Modes",
    ),
    "register-pool-overrun": Rule(
        "error",
        "the warps of a block share the registers it was launched with; setmaxnreg.inc waits until there are enough",
        "let other warps give up as many before: the sum must not exceed threads × registers at launch",
        "setmaxnreg",
    ),
    "tensor-map-not-acquired": Rule(
        "warning",
        "a tensor map in global memory is read by a proxy of its own: every block acquires it before its first copy",
        "pass it as a kernel argument, or fence.proxy.tensormap::generic.acquire on its address",
        "membar, fence: fence.proxy.tensormap",
    ),
    "tensor-map-changed-without-fence": Rule(
        "error",
        "a changed tensor map must be released by the thread that changed it and acquired before the next copy",
        "fence.proxy.tensormap::generic.release, a barrier, then …acquire on its address",
        "tensormap.replace; membar, fence: fence.proxy.tensormap",
    ),
    "tma-store-overhang": Rule(
        "warning",
        "a tensor store writes whole 16-byte chunks: where a row ends within one, it writes beyond the row",
        "make rows a multiple of 16 bytes; or keep nothing behind them, as in an array that pitched made, and say so: "
        'TensorMap(…, store="padding")',
        "cp.async.bulk.tensor",
    ),
    "exit-with-copies-in-flight": Rule(
        "error",
        "a block's shared memory goes to another block when it exits: no copy may still use it",
        "wait for the mbarrier, or wait_group.read 0 in the thread that issued the stores, before the exit",
        _ASYNC,
    ),
    "peer-exited-before-remote-access": Rule(
        "error",
        "another block's shared memory, its barriers too, can be used while that block runs",
        "a cluster barrier (arrive and wait) at the end of the kernel",
        "barrier.cluster; Distributed shared memory",
    ),
    "multicast-without-receiver-barrier": Rule(
        "error",
        "a multicast copy signals the mbarrier at the same offset in every receiving block",
        "initialise the barrier and expect the bytes in each of them, then a cluster barrier before the copy",
        "cp.async.bulk.tensor: .multicast::cluster",
    ),
    "blocks-write-same-bytes": Rule(
        "error",
        "blocks run in any order: what two of them write to the same place is left to chance",
        "give each block its own part, or use atomics",
        _MODEL,
    ),
    "stores-write-same-bytes": Rule(
        "error",
        "stores of one group write in any order; groups of a thread complete one after the other, but no rule makes "
        "the writes of the second wait for those of the first, and other threads' groups know nothing of them: what "
        "two stores write to the same bytes is in order only if the first was waited for",
        "give each store bytes of its own: a box, or a size, no larger than the step to the next one; or a wait_group "
        "without .read between the two",
        f"Async-group mechanism; cp.async.bulk.commit_group; {_BULK_WAIT}",
    ),
    "remote-access-before-peer-starts": Rule(
        "error",
        "another block's shared memory can be used once that block runs",
        "a cluster barrier (arrive and wait) before the first use of a peer's shared memory",
        "barrier.cluster; Distributed shared memory",
    ),
    "cp-async-in-flight-at-exit": Rule(
        "warning",
        "a thread's cp.async copies are over once somebody has waited for them: its group, or the mbarrier that they "
        "arrive at",
        "a cp.async.wait_all before the exit; or start no copies that nobody uses",
        "cp.async.wait_group",
    ),
    "wgmma-operands-not-fenced": Rule(
        "error",
        "shared memory is read by wgmma through the copy engine's proxy: what threads stored there needs a proxy fence",
        "a fence.proxy.async in the threads that wrote, then a block barrier, then wgmma",
        f"{_WGMMA}; Async proxy",
    ),
    "wgmma-tile-not-waited": Rule(
        "error",
        "each warp of the warpgroup must know that a tile has arrived before it multiplies it",
        "wait on the tile's mbarrier in all threads of the warpgroup before wgmma",
        f"{_WGMMA}; {_TX}",
    ),
    "wgmma-registers-before-wait": Rule(
        "error",
        "accumulators, and A in registers, are the instruction's own until its group has been waited for",
        "commit the group, and wait_group with a number small enough before their next use; the wait names the "
        "accumulators, or the compiler moves their use before it",
        "wgmma.wait_group",
    ),
    "wgmma-fence-missing": Rule(
        "error",
        "registers are ordered between ordinary instructions and wgmma by wgmma.fence: before the first wgmma, and "
        "whenever accumulators or A have been used otherwise; accumulators of wgmma of one shape in sequence need none",
        "a wgmma.fence after the last use of the registers and before wgmma; where the compiler moves a computation "
        "behind the fence, name its result in a wait before it",
        "wgmma.fence",
    ),
    "wgmma-operands-overwritten": Rule(
        "error",
        "operands in shared memory are read at some time until the group of the wgmma has been waited for",
        "wait for that group in the warpgroup (wgmma.wait_group), then an arrival that the writer waits for",
        "wgmma.wait_group",
    ),
    "global-memory-race": Rule(
        "error",
        "two threads of a block use the same bytes of global memory, one of them writes, and nothing orders the two",
        "put a block barrier between them",
        _MODEL,
    ),
    "blocks-read-unordered": Rule(
        "error",
        "one block reads what another writes: the writer must release it and the reader acquire that, through a flag "
        "or counter",
        "a fence.acq_rel.gpu (threadfence) before the flag is set and after it was seen, or st.release and "
        "ld.acquire; or two launches",
        "Memory Consistency Model: Release and Acquire Patterns",
    ),
    "global-proxy-fence-missing": Rule(
        "error",
        "ordinary stores and the copy engine reach global memory by different proxies too",
        "a fence.proxy.async (or .global) after the stores, before the barrier or flag that orders the copy after them",
        _PROXY,
    ),
    "store-not-waited": Rule(
        "error",
        "what a bulk or tensor store writes to global memory is there once its thread has waited for the group; "
        "wait_group.read waits for the reading alone",
        "a wait_group without .read in the thread that issued the store, then a barrier",
        _BULK_WAIT,
    ),
}
