"""The model of time in its parts: banks and sectors, which blocks an SM gets, what instructions are, what queues."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from simulate import HEADER

from numba_tma import sim
from numba_tma.sim.timing import MachineInstruction, banks, default_device, device
from numba_tma.sim.timing.occupancy import plan, resident_blocks
from numba_tma.sim.timing.ops import Costs, kind_of, reads_and_writes
from numba_tma.sim.timing.parts import Memory, Scheduler, Server, Timeline
from numba_tma.sim.timing.record import Trace
from numba_tma.sim.timing.regions import Regions

DEVICE = default_device()


def wavefronts_of_one(offsets: list[int], nbytes: int) -> int:
    """Part after part of the warp: the most different words that one bank has to give."""
    parts = max(nbytes // 4, 1)
    total = 0
    for part in range(parts):
        lanes = offsets[part * 32 // parts : (part + 1) * 32 // parts]
        words = {offset // 4 + k for offset in lanes for k in range(parts)}
        total += max(sum(word % 32 == bank for word in words) for bank in range(32))
    return total


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])
def test_wavefronts_of_any_addresses(rng, nbytes):
    offsets = rng.integers(0, 256, (40, 32)) * nbytes
    expected = [wavefronts_of_one(row, nbytes) for row in offsets.tolist()]
    assert banks.wavefronts(offsets, nbytes).tolist() == expected


@pytest.mark.parametrize(
    ("stride", "nbytes", "expected"),
    [
        (4, 4, 1),
        (0, 4, 1),
        (8, 4, 2),
        (128, 4, 32),
        (132, 4, 1),
        (2, 2, 1),
        (1, 1, 1),
        (8, 8, 2),
        (16, 16, 4),
        (32, 16, 8),
    ],
)
def test_wavefronts_known(stride, nbytes, expected):
    offsets = 1024 + np.arange(32)[None] * stride
    assert banks.wavefronts(offsets, nbytes).tolist() == [expected]


def test_lanes_at_one_place(rng):
    offsets = rng.integers(0, 12, (30, 32)) * 4
    expected = [max(row.count(x) for x in row) for row in offsets.tolist()]
    assert banks.most_at_one_place(offsets).tolist() == expected


def test_distinct_units(rng):
    units = rng.integers(0, 20, (25, 32))
    ordered, new = banks.distinct(units)
    for row, mask, given in zip(ordered, new, units, strict=True):
        assert row[mask].tolist() == sorted(set(given.tolist()))


# Known from the CUDA occupancy calculator for compute capability 9.0.
@pytest.mark.parametrize(
    ("threads", "shared", "registers", "expected"),
    [(128, 0, 32, 16), (128, 16384, 0, 13), (1024, 0, 32, 2), (1024, 0, 64, 1), (32, 0, 32, 32), (384, 230000, 168, 1)]
    + [(256, 49152, 0, 4), (160, 65664, 48, 3), (128, 0, 255, 2)],
)
def test_resident_blocks(threads, shared, registers, expected):
    assert resident_blocks(DEVICE, threads, shared, registers) == expected


def test_blocks_go_to_each_sm_in_turn():
    made, total = plan(DEVICE, 300, 1, 2, 64)
    assert made.blocks == [0, 132, 264] and total == 3
    assert made.resident == 2 and made.share == 2 / 264 and made.active == 1
    made, total = plan(DEVICE, 64, 1, 8, 64)
    assert made.blocks == [0] and total == 1 and made.share == 1 / 64 and made.active == 64 / 132
    made, total = plan(DEVICE, 400, 4, 1, 64)
    assert made.units == ((0, 1, 2, 3), (132, 133, 134, 135), (264, 265, 266, 267), (396, 397, 398, 399))
    assert total == 4 and made.share == 1 / 132
    made, total = plan(DEVICE, 132 * 500, 1, 4, 10)
    assert len(made.blocks) == 10 and total == 500


def instruction(text: str) -> sim.parse:
    module = sim.parse(
        HEADER
        + ".visible .entry k(){ .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .f32 %f<9>; .shared .b64 bar;"
        + f"{text}; DONE: ret; }}"
    )
    return module.entries["k"].body[0]


@pytest.mark.parametrize(
    ("text", "kind", "reads", "writes"),
    [
        ("add.u32 %r0, %r1, %r2", "run", "%r1 %r2", "%r0"),
        ("@%p1 add.u32 %r0, %r1, 5", "run", "%r1 %p1", "%r0"),
        ("mov.u32 %r0, %tid.x", "free", "", "%r0"),
        ("mov.u64 %rd0, %clock64", "clock", "", "%rd0"),
        ("ld.global.v2.u32 {%r0, %r1}, [%rd0+8]", "load", "%rd0", "%r0 %r1"),
        ("st.shared.u32 [%r0], %r1", "store", "%r0 %r1", ""),
        ("atom.global.add.u32 %r0, [%rd0], %r1", "atomic", "%rd0 %r1", "%r0"),
        ("red.global.add.u32 [%rd0], %r1", "reduction", "%rd0 %r1", ""),
        ("shfl.sync.bfly.b32 %r0|%p0, %r1, 1, 31, -1", "long", "%r1", "%r0 %p0"),
        ("ex2.approx.f32 %f0, %f1", "long", "%f1", "%f0"),
        ("setp.lt.u32 %p0, %r1, %r2", "run", "%r1 %r2", "%p0"),
        ("@%p0 bra DONE", "run", "%p0", ""),
        ("bar.sync 0", "block barrier", "", ""),
        ("barrier.cluster.arrive.aligned", "cluster arrive", "", ""),
        ("barrier.cluster.wait.aligned", "cluster wait", "", ""),
        ("bar.warp.sync -1", "warp barrier", "", ""),
        ("mbarrier.init.shared.b64 [bar], 1", "mbarrier", "", ""),
        ("mbarrier.arrive.shared.b64 %rd0, [%r1]", "mbarrier arrive", "%r1", "%rd0"),
        ("mbarrier.try_wait.parity.shared.b64 %p0, [%r1], %r2", "mbarrier wait", "%r1 %r2", "%p0"),
        ("cp.async.ca.shared.global [%r0], [%rd0], 16", "cp.async", "%r0 %rd0", ""),
        ("cp.async.commit_group", "cp.async commit", "", ""),
        ("cp.async.wait_all", "cp.async wait", "", ""),
        ("cp.async.bulk.commit_group", "bulk commit", "", ""),
        ("cp.async.bulk.wait_group.read 1", "bulk wait", "", ""),
        ("fence.proxy.async.shared::cta", "fence", "", ""),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%r0], [%rd0, {%r1, %r2}], [%r3]",
            "copy",
            "%r0 %rd0 %r1 %r2 %r3",
            "",
        ),
    ],
)
def test_what_an_instruction_is(text, kind, reads, writes):
    found = instruction(text)
    assert kind_of(found) == kind
    assert reads_and_writes(found) == (tuple(reads.split()), tuple(writes.split()))


def test_servers_serve_in_turn():
    timeline = Timeline(DEVICE, 10)
    server = Server(timeline, "part")
    assert [server.serve(t, 10) for t in (0, 5, 50, 51)] == [10, 20, 60, 70]
    server.flush()
    assert server.busy == 40
    assert [(i.row, round(i.start * DEVICE.clock_mhz / 1e3), i.kind) for i in timeline.intervals] == [
        ("part", 0, "busy"),
        ("part", 50, "busy"),
    ]


def test_a_scheduler_issues_one_a_cycle():
    scheduler = Scheduler(Timeline(DEVICE, 10), "scheduler")
    # Two warps whose instructions depend on each other fit into each other's gaps; four saturate it.
    ends = [scheduler.run(0.0, 100, 400, ()) for _ in range(8)]
    assert ends[:4] == [400] * 4 and ends[4:] == [500, 600, 700, 800]
    pipe = Scheduler(Timeline(DEVICE, 10), "scheduler")
    assert [pipe.run(0.0, 10, 40, ((2, 60.0),)) for _ in range(2)] == [60, 120]


def test_memory_is_shared_and_has_a_knee():
    flat = replace(DEVICE, memory_knee=((0.0, 0.0),))
    alone = Memory(flat, 1.0, 1 / 132, 1.0, Timeline(flat, 10), "SM")
    among_all = Memory(flat, 1 / 132, 1.0, 1.0, Timeline(flat, 10), "SM")
    l2, memory = flat.latencies["l2"], flat.latencies["memory"]
    nbytes = 1 << 20
    assert alone.load(0.0, nbytes, 0.0, l2) == pytest.approx(nbytes / flat.l2_port + l2)
    assert alone.load(1e6, 32, 1.0, l2) == pytest.approx(1e6 + memory, abs=2)
    assert among_all.load(0.0, nbytes, 1.0, l2) == pytest.approx(nbytes / flat.memory_total * 132 + memory)
    steep = replace(DEVICE, memory_knee=((0.0, 0.0), (1000.0, 100.0), (2000.0, 1000.0)))
    busy = Memory(steep, 1 / 132, 1.0, 1.0, Timeline(steep, 10), "SM")
    first = busy.load(0.0, 500, 1.0, l2)
    second = busy.load(0.0, 1000, 1.0, l2)
    assert first == pytest.approx(memory + 50) and second == pytest.approx(memory + 550)


def test_stores_hold_up_when_too_many_are_under_way():
    memory = Memory(DEVICE, 1.0, 1 / 132, 1.0, Timeline(DEVICE, 10), "SM")
    go_on, written = memory.store(0.0, 320, 0.0)
    assert go_on == 0.0 and written == pytest.approx(320 / DEVICE.store_port)
    go_on, written = memory.store(0.0, 4 * DEVICE.store_buffer, 0.0)
    assert go_on > 2 * DEVICE.store_buffer / DEVICE.store_port and written > go_on


def block_of(text: str) -> sim.parse:
    """The first block of code of a kernel, decoded as for a launch."""
    from numba_tma.sim.machine import Machine

    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .b16 %h<9>;"
    module = sim.parse(f"{HEADER}.visible .entry k()\n{{ {registers}\n{text}\nret;\n}}")
    function = module.entries["k"]
    machine = Machine(module, function, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, [], sim.GlobalMemory())
    return machine.program.instance(function, 0).blocks[0]


def test_costs_from_the_machine_code():
    """An unrolled loop's lines have copies; what left no trace costs nothing; one wide load stands for several."""
    block = block_of("""
        ld.shared.u16 %h0, [%r1];
        ld.shared.u16 %h1, [%r1+2];
        cvt.u64.u32 %rd0, %r2;
        mad.lo.u32 %r3, %r2, %r2, %r2;
    """)  # fmt: skip
    lines = [i.line for i in block.instructions]
    code = [
        MachineInstruction(lines[0], "LDS.U16.64", 2, 0),
        MachineInstruction(lines[3], "IMAD", 4, 0),
        MachineInstruction(lines[3], "IADD3", 5, 0),
        MachineInstruction(lines[0], "LDS.U16.64", 2, 1),
        MachineInstruction(lines[3], "IMAD", 4, 1),
        MachineInstruction(lines[3], "IADD3", 5, 1),
    ]
    load, joined, moved, mad = Costs(DEVICE, code).of_block(block)[:4]
    assert (load.kind, load.slots, load.cycles, load.place, load.width) == ("load", 1, 2, (0, 0), 8)
    assert load.writes == ("%h0", "%h1") and joined.kind == "free" and joined.writes == ()
    assert (moved.kind, moved.slots, moved.cycles) == ("free", 0, 0)
    assert (mad.slots, mad.cycles, mad.place) == (2, 9, (0, 2))
    assert dict(mad.pipes) == {1: DEVICE.pipes["imad"], 2: DEVICE.pipes["alu"]}


def test_a_group_has_what_was_put_into_it():
    """Its end is no instruction of the machine code; what stands before it in the PTX may stand anywhere there."""
    block = block_of("""
        cp.async.ca.shared.global [%r1], [%rd1], 4;
        cp.async.ca.shared.global [%r1+4], [%rd1+4], 4;
        add.u32 %r3, %r2, %r2;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r1+8], [%rd1+8], 4;
        add.u32 %r4, %r2, %r2;
        cp.async.commit_group;
    """)  # fmt: skip
    lines = [i.line for i in block.instructions]
    names = {5: "IADD3", 2: "IADD3", 4: "LDGSTS", 0: "LDGSTS", 1: "LDGSTS"}
    code = [MachineInstruction(lines[i], name, 1, 0) for i, name in names.items()]
    ((region, _),) = Regions(Costs(DEVICE, code), [block]).of(Trace(0, 0, [(block, None)]))
    performed = [operation.op.instruction.line for operation in region.operations]
    order = [lines.index(line) for line in performed if line in lines]
    assert sorted(order) == [0, 1, 3, 4, 6]
    assert max(order.index(0), order.index(1)) < order.index(3) < order.index(4) < order.index(6)


def test_the_constants_are_complete(tmp_path):
    assert device.read(device.DEFAULT) == DEVICE
    values = json.loads(device.DEFAULT.read_text())
    del values["l2_port"]
    values["l3_port"] = 1
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="missing or unknown: l2_port, l3_port"):
        device.read(file)
