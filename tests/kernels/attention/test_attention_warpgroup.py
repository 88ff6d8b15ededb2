"""Attention on wgmma: right and free of hazards, in registers, and never made to wait by the assembler."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from numba_tma import TensorMap, use_backend
from numba_tma.kernels.attention import choice, warpgroup
from numba_tma.kernels.attention.ladder import reference
from numba_tma.kernels.attention.masks import Kind
from numba_tma.kernels.attention.operands import operands
from numba_tma.ragged import RaggedMap

pytestmark = pytest.mark.filterwarnings("error::numba_tma.launch.HazardWarning")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUNDING = {np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}

# How it is made, dtype, extents (B, Sq, Skv, Hq, Hkv, D), what is asked, and the kernel's options.
CASES = {
    "overlapped, causal": ("overlapped", BFLOAT16, (1, 150, 270, 2, 1, 128), {"causal": True}, {"ping_pong": True}),
    "overlapped, D 256": (
        "overlapped",
        np.dtype(np.float16),
        (1, 70, 100, 1, 1, 256),
        {},
        {"keys": 80, "o_over_q": True},
    ),
    "overlapped, in clusters": (
        *("overlapped", BFLOAT16, (1, 250, 130, 2, 1, 128)),
        *({}, {"consumers": 1, "keys": 48, "cluster": 2}),
    ),
    "warpgroups, a window": (
        *("warpgroups", BFLOAT16, (2, 130, 200, 2, 2, 64)),
        *({"window": (40, 10), "soft_cap": 5.0}, {"keys": 64, "stages": 3}),
    ),
    "warpgroups, more queries than keys": ("warpgroups", BFLOAT16, (1, 200, 90, 1, 1, 64), {"causal": True}, {}),
}


def bound(rng, step, dtype, extents, asked, options):
    """Arrays, the kernel, its grid (two blocks for all tiles) and arguments."""
    batch, sq, skv, heads, kv_heads, head_dim = extents
    shapes = {"q": (batch, sq, heads), "k": (batch, skv, kv_heads), "v": (batch, skv, kv_heads)}
    given = {name: rng.standard_normal((*shape, head_dim)).astype(dtype) for name, shape in shapes.items()}
    given["o"] = np.full(given["q"].shape, np.nan, dtype)
    given["lse"] = np.full((batch, heads, sq), np.nan, np.float32)
    found = operands(given, **asked)
    keys, consumers = options.get("keys", 128), options.get("consumers", 2)
    make = getattr(warpgroup, f"make_{step}")
    kernel = make(head_dim, dtype.name, found.band.kind, found.scores.capped, **options)
    maps = [
        TensorMap(given[name], (1, rows, 1, 64), swizzle="128B", store=False)
        for name, rows in (("q", 64), ("k", keys), ("v", keys), ("o", 64))
    ]
    tiles_m = -(-sq // (64 * consumers))
    counts = (np.uint32(n) for n in (tiles_m, heads, heads * batch, 3, found.group))
    counter = np.zeros(1, np.uint32)
    arguments = (
        *(*maps, given["lse"], counter, counter, counter),  # as starts, which are not looked at, too
        *(np.uint32(sq), np.uint32(skv), *found.diagonals),
        *(*counts, found.scores.factor, found.scores.inner),
    )
    return given, kernel, min(2, tiles_m * heads * batch), arguments


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", [{}, {"policy": "late", "warp_order": "random", "seed": 3}], ids=["fifo", "late"])
def test_numbers(rng, name, schedule):
    given, kernel, grid, arguments = bound(rng, *CASES[name])
    with use_backend("sim", **schedule):
        kernel[grid](*arguments)
    o, lse = reference(given["q"], given["k"], given["v"], **CASES[name][3])
    limit = 2 * ROUNDING[given["q"].dtype] * float(np.abs(given["v"].astype(np.float64)).max())
    np.testing.assert_allclose(given["o"].astype(np.float64), o, rtol=0, atol=limit)
    np.testing.assert_allclose(given["lse"], lse, rtol=1e-6, atol=1e-4)
    assert not given["o"][np.isneginf(lse).swapaxes(1, 2)].any()


@pytest.mark.parametrize(
    ("head_dim", "kind", "packed"),
    [(128, Kind(False, True), False), (128, Kind(False, False), True), (64, Kind(False, False), False)],
    ids=["masked", "packed", "one box"],
)
def test_a_cluster_that_has_nothing_to_share_is_refused(head_dim, kind, packed):
    with pytest.raises(ValueError, match="take cluster=1"):
        warpgroup.make_overlapped(head_dim, "bfloat16", kind, packed=packed, cluster=2)


@pytest.mark.parametrize(
    "name", ["overlapped, causal", "overlapped, in clusters", "warpgroups, more queries than keys"]
)
def test_machine_code(rng, name):
    _, kernel, _, arguments = bound(rng, *CASES[name])
    compiled = kernel.compile(*arguments)
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.stack_bytes == 0
    assert not [warning for warning in resources.warnings if "C75" in warning]
    opcodes = set(re.findall(r"\b(HGMMA|UTMALDG|UTMASTG|STSM|USETMAXREG|LDL|STL)\b", compiled.sass))
    assert opcodes == {"HGMMA", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG"}
    assert ("UTMALDG.4D.MULTICAST" in compiled.sass) == ("cluster" in CASES[name][4])


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", [Kind(False, False), Kind(False, True), Kind(True, True)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("skv", [1000, 4096, 1 << 17])
def test_machine_code_of_what_is_chosen(skv, head_dim, kind, packed):
    q = np.zeros((1, 256, 2, head_dim), BFLOAT16)
    chosen = choice.choose(head_dim, kind, skv, None if packed else 256)
    rows = (64, chosen.keys, chosen.keys, 64)
    if packed:
        maps = [RaggedMap(q[0], (n, 1, 64), swizzle="128B") for n in rows]
    else:
        maps = [TensorMap(q, (1, n, 1, 64), swizzle="128B", store=False) for n in rows]
    made = warpgroup.make_overlapped(head_dim, "bfloat16", kind, packed=packed, **chosen.cut())
    starts, count, number = np.zeros(2, np.int32), np.uint32(1), np.float32(1)
    lse = np.zeros((1, 2, 256), np.float32)
    compiled = made.compile(
        *(*maps, lse, np.zeros(1, np.uint32), starts, starts),
        *(count, count, np.int32(0), np.int32(0), *[count] * 5, number, number),
    )
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.stack_bytes == 0
    assert not [warning for warning in resources.warnings if "C75" in warning]
