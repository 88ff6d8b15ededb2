"""The asynchronous copy engine: cp.async, bulk copies, tensor copies (TMA), bulk reductions and their groups.

The machine calls an ``issue_*`` method for each asynchronous instruction, with operands already decoded to
integers; the engine checks the rules (named errors at issue), and moves the bytes later, when ``pump`` says so.

**Threads and blocks.** Blocks that are resident at once have a *slot* (row of the shared-memory array). A
thread is one integer, ``slot * threads_per_block + index in the block``. Where an argument is called
``threads`` it is an int64 array of distinct threads; where it is called ``thread`` it is an int.

**Addresses.** A shared address is a byte offset into the slot's shared memory, that is the shared::cta address
with the window's base taken off. Where data goes to another block of the cluster the machine decodes
shared::cluster addresses to (slot, offset). Global addresses are the simulator's 64-bit addresses.

**What the machine provides** (constructor, all keywords)::

    shared             uint8 array (slots, bytes of shared memory); bytes a multiple of 128
    threads_per_block  int
    memory             global_view(address, nbytes, what) -> writable uint8 view; raises OutOfBounds naming `what`
                       gather(addresses: uint64 array, nbytes, what) -> uint8 array (n, nbytes), a copy; raises
                       OutOfBounds naming `what` if a range is not mapped (used by cp.async)
    barriers           complete_tx(slot, address, nbytes): bytes arrived
                       arrive(slot, address, count): `count` pending arrivals done (cp.async.mbarrier.arrive)
                       add_pending(slot, address, count): `count` more arrivals wanted (… without .noinc)
    report             report(identifier, message, origin): a hazard beside which execution goes on
    policy             "fifo" (default), "early", "late" or "random"
    rng                numpy.random.Generator, for "random"

``origin`` of the issue methods is whatever the machine wants to get back in reports (its instruction).

**Instructions to methods**

==================================================================  =========================================
cp.async.bulk.shared::cluster.global.mbarrier…                      issue_bulk_load
cp.async.bulk.global.shared::cta.bulk_group                         issue_bulk_store
cp.async.bulk.shared::cluster.shared::cta.mbarrier…                 issue_bulk_to_cluster
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier….op.type  issue_bulk_to_cluster(…, op, dtype)
cp.reduce.async.bulk.global.shared::cta.bulk_group.op.type          issue_bulk_reduce
cp.async.bulk.prefetch.L2.global                                    issue_bulk_prefetch
cp.async.bulk.tensor.Nd.shared::cluster.global.mbarrier…            issue_tensor_load
cp.async.bulk.tensor.Nd.global.shared::cta.bulk_group               issue_tensor_store
cp.reduce.async.bulk.tensor.Nd.global.shared::cta.op.bulk_group     issue_tensor_reduce
cp.async.bulk.prefetch.tensor.Nd.L2.global                          issue_tensor_prefetch
cp.async.bulk.commit_group                                          bulk_commit_group(threads)
cp.async.bulk.wait_group N / .read N                                bulk_wait_ready(threads, n, read) -> mask
cp.async.{ca,cg}.shared.global                                      issue_cp_async (one call for many lanes)
cp.async.commit_group                                               cp_async_commit_group(threads)
cp.async.wait_group N                                               cp_async_wait_ready(threads, n) -> mask
cp.async.wait_all                                                   cp_async_wait_ready(threads, None) -> mask
cp.async.mbarrier.arrive{.noinc}                                    cp_async_mbarrier_arrive
==================================================================  =========================================

Multicast and peers: ``targets`` of the loads is the sequence of slots that receive the data, each at offset
`dst` and with its own mbarrier at offset `bar`; default is the issuing thread's block alone.

**Time.** The machine calls ``pump()`` once a scheduling round, and ``pump(stalled=True)`` when no thread can
run. Both return whether anything moved; a stalled machine for which it returns False is deadlocked. An
operation takes effect in pieces; a load's piece is read and written at once and credits the mbarrier with its
bytes; a store's bytes are read first (``wait_group.read``) and written in a later pump (``wait_group``).

======  =============================================================================================
fifo    in order of issue, `latency` pumps after issue; when stalled, at once
early   everything at issue
late    nothing until the machine is stalled, then one piece
random  each pump moves some pieces of randomly chosen operations, also out of order
======  =============================================================================================

**Ends.** ``retire_block(slot)`` when a block has exited and before its slot is used again: finishes what still
reads or writes its shared memory and returns a line of text for each such operation (bytes in flight at exit).
``drain()`` at the end of the kernel finishes everything. ``outstanding(slot)`` describes what is in flight, for
the deadlock report. ``bytes`` counts bytes moved by kind, keys as in Report.bytes: tma_load, tma_store,
tma_reduce, bulk_load, bulk_store, bulk_reduce, cp_async.

Sources: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy" and its sections on cp.async,
cp.async.bulk, cp.reduce.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, "Async proxy".
"""
