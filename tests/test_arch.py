"""Which GPU an instruction needs, and what is said to one that does not fit."""

import pytest

from numba_tma import arch


@pytest.mark.parametrize(
    ("instruction", "capability", "only_90a"),
    [
        ("add.s32 %r1, %r2, %r3;", 70, False),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", 80, False),
        ("@%p1 cp.async.wait_group 1;", 80, False),
        ("mbarrier.init.shared::cta.b64 [%r1], %r2;", 80, False),
        ("mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;", 90, False),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], …",
            90,
            False,
        ),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], %r2;", 90, False),
        ("wgmma.fence.sync.aligned;", 90, True),
        ("{ setmaxnreg.inc.sync.aligned.u32 232;", 90, False),
    ],
)
def test_requirement(instruction, capability, only_90a):
    text = f"ld.param.u64 %rd1, [a];\n\t{instruction.removeprefix('{ ')}\nret;"
    found = arch.requirement(text)
    assert (found.capability, found.only_90a) == (capability, only_90a)
    if capability > 70:
        assert found.line == 2


def test_the_most_demanding_instruction_counts():
    text = "cp.async.wait_all;\nwgmma.fence.sync.aligned;\ncp.async.bulk.commit_group;"
    found = arch.requirement(text)
    assert found.mnemonic == "wgmma.fence.sync.aligned"
    assert found.refusal((9, 0)) is None
    assert "needs sm_90a, this GPU is sm_80" in found.refusal((8, 0))
    assert "tcgen05" in found.refusal((10, 0))


def test_tma_runs_on_newer_gpus_and_not_on_older_ones():
    found = arch.requirement("cp.async.bulk.commit_group;")
    assert found.refusal((10, 0)) is None
    assert "cp.async.bulk.commit_group (PTX line 1) needs sm_90" in found.refusal((8, 9))


def test_names():
    assert arch.parse("sm_90a") == (9, 0, "a")
    assert arch.parse("sm_80") == (8, 0)
    assert arch.parse("sm_120") == (12, 0)
    assert arch.name((9, 0)) == "sm_90a"
    assert arch.name((8, 9)) == "sm_89"
    with pytest.raises(ValueError, match="expected a name such as"):
        arch.parse("hopper")
