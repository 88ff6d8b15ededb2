"""An observer sees accesses and synchronisation in order."""

from __future__ import annotations

import numpy as np
from simulate import run_ptx

from numba_tma.sim.access import GLOBAL, SHARED
from numba_tma.sim.observer import Observer


class Recorder(Observer):
    """Writes down what it sees."""

    def __init__(self) -> None:
        self.seen = []

    def wave(self, machine, blocks):
        self.seen.append(("wave", blocks))

    def access(self, fragment, instruction, kind, view, index, count, action, values=()):
        self.seen.append((action, kind, np.broadcast_to(index, fragment.n).tolist(), view.itemsize * count))

    def barrier_passed(self, fragment, barrier):
        self.seen.append(("barrier", barrier, fragment.n))

    def mbarrier(self, fragment, instruction, index, value=None):
        self.seen.append((instruction.modifiers[0], np.broadcast_to(index, fragment.n).tolist()))

    def phase_completed(self, index):
        self.seen.append(("phase", index))

    def copy_issued(self, fragment, instruction):
        self.seen.append(("copy", fragment.thread.tolist()))


def test_what_an_observer_sees():
    body = """
        .shared .align 8 .b64 bar; .shared .align 16 .b8 tile[16];
        .reg .b32 %r<6>; .reg .b64 %rd<3>; .reg .pred %p<3>;
        ld.param.u64 %rd0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r1, bar; mov.u32 %r2, tile;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r1], 1;
        bar.sync 0;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
        @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 16, [%r1];
        TRY: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
        @!%p1 bra TRY;
        mad.lo.u32 %r3, %r0, 8, %r2;
        ld.shared.v2.u32 {%r4, %r5}, [%r3];
        mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
        st.global.u32 [%rd0], %r5;
        ret;
    """
    data = np.arange(4, dtype=np.uint32)
    recorder = Recorder()
    run_ptx(body, 1, 2, data, observer=recorder)
    assert data.tolist() == [1, 3, 2, 3]
    assert recorder.seen == [
        ("wave", 1),
        ("init", [128]),
        ("barrier", 0, 2),
        ("arrive", [128]),
        ("copy", [0]),
        ("phase", 128),
        ("try_wait", [128, 128]),
        ("read", SHARED, [260, 262], 8),
        ("write", GLOBAL, [0, 1], 4),
    ]
