"""Every kernel of the suite: right in the simulator at odd sizes, compiled to the instructions it claims, no spills."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from numba_tma import TensorMap, driver, suite
from numba_tma.im2col import Im2colMap
from numba_tma.kernels import PROBLEMS, attention, copy, gemm, kv_stream, multicast, select, stencil3d, transpose
from numba_tma.kernels.attention import plain as attention_plain
from numba_tma.kernels.attention import warp_mma as attention_mma
from numba_tma.kernels.attention import warpgroup as attention_warpgroup
from numba_tma.kernels.attention.masks import Kind
from numba_tma.kernels.gather import paged, patches
from numba_tma.kernels.gemm import choice, persistent, plain, warp_mma, warpgroup
from numba_tma.kernels.problem import Case
from numba_tma.kernels.reductions import column_sums, histogram, scatter_add
from numba_tma.kernels.rows import binding, rmsnorm, row, softmax
from numba_tma.kernels.rows import plain as plain_rows
from numba_tma.kernels.rows.ring import make_ring

ALL = [(problem, variant) for problem in PROBLEMS for variant in problem.variants]
NAMES = [f"{problem.name}.{variant.name}" for problem, variant in ALL]

# Sizes with a reason each: smaller than a tile, one row, one column, prime, exactly tiles, one more than a tile.
SIZES = [(3, 5), (1, 70), (65, 1), (61, 127), (64, 128), (65, 129)]
SLOW = {(1, 70), (64, 128)}  # of all variants together


def cases(problem, rows, columns):
    if problem is copy.PROBLEM:
        for dtype in ("float32", "uint8"):
            itemsize = np.dtype(dtype).itemsize
            yield Case((rows, -(-columns * itemsize // 16) * 16 // itemsize), dtype)
    elif problem is gemm.PROBLEM:
        yield Case((rows, columns, (rows + columns) % 31 * 8 + 8), "float16")
    elif problem is attention.PROBLEM:
        small = attention.PROBLEM.cases[("quick", "sim")][0].tuned
        yield Case((1, rows, columns, 1, 1, 32), "bfloat16", {"causal": rows < columns}, small)  # groups in their tests
    elif problem is transpose.PROBLEM:
        yield Case((rows, columns), "float16")  # other sizes of elements in test_transpose.py
    elif problem is stencil3d.PROBLEM:
        yield Case((rows % 5 + 1, min(rows, 40), columns), "float32", {"points": 27})
    elif problem is multicast.PROBLEM:
        yield Case((rows % 7 + 1, rows, columns), "float32")
    elif problem is column_sums.PROBLEM:
        yield Case((rows, -(-columns // 4) * 4), "float32", tuned=column_sums.SMALL)
    elif problem is histogram.PROBLEM:
        yield Case((rows * columns, 256), "uint8")
    elif problem is scatter_add.PROBLEM:
        yield Case((rows, -(-columns // 4) * 4, 5), "float32")
    elif problem is patches.PROBLEM:
        yield Case((rows % 3 + 1, rows % 5 + 3, columns % 7 + 2, columns % 3 * 4 + 4), "float32", {"padding": (1, 2)})
    elif problem is paged.PROBLEM:
        yield Case((rows % 3 + 1, columns % 4 + 1, rows % 9 + 1, columns % 5 + 1, 8), "float16")
    elif problem is softmax.PROBLEM:
        yield Case((rows, columns), "float32", tuned=binding.SMALL)
    elif problem is rmsnorm.PROBLEM:
        yield Case((rows, columns), "bfloat16", {"epsilon": rmsnorm.EPSILON}, binding.SMALL)
    else:
        yield Case((rows, columns), "float16", {"work": 1, "splits": 1})
        yield Case((rows, columns), "float16", {"work": 3, "splits": 2})


@pytest.mark.parametrize(("problem", "variant"), ALL, ids=NAMES)
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.full if size in SLOW else ()) for size in SIZES], ids=str
)
def test_right_at_odd_sizes(problem, variant, size, seed):
    for case in cases(problem, *size):
        (record,) = suite.run_case(problem, case, [variant], "sim", seed=seed)
        assert record.ok, f"{case}: {record.reason}"
        assert not record.hazards


@pytest.mark.parametrize(("problem", "variant"), ALL, ids=NAMES)
def test_right_whatever_the_order_of_copies_and_warps(problem, variant, seed):
    case = problem.cases[("quick", "sim")][0]
    # `run_all.py --schedules` goes through as many as one likes; gemm's rings through many turns in gemm/test_steps.py.
    schedules = 3 if problem in (gemm.PROBLEM, attention.PROBLEM) else 5
    (record,) = suite.run_case(problem, case, [variant], "sim", seed=seed, schedules=schedules)
    assert record.ok, record.reason
    assert not record.hazards


@pytest.mark.parametrize("dtype", ["int8", "int16", "float16", "bfloat16", "float32", "int64", "float64"])
def test_copy_of_every_type(dtype, seed):
    case = Case((19, 48), dtype)
    for record in suite.run_case(copy.PROBLEM, case, copy.PROBLEM.variants, "sim", seed=seed):
        assert record.ok, f"{record.variant}: {record.reason}"


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("tile", [(16, 64), (32, 128), (8, 256), (64, 16)])
def test_kv_stream_tiles_and_stages(stages, tile, seed):
    case = Case((77, 300), "float16", {"tile": tile, "stages": stages, "splits": 2, "work": 2})
    wanted = [kv_stream.PROBLEM.variant(name) for name in ("cp_async", "tma", "tma_ring")]
    for record in suite.run_case(kv_stream.PROBLEM, case, wanted, "sim", seed=seed):
        assert record.ok, f"{record.variant}: {record.reason}"


MATRIX = np.zeros((64, 256), np.float16)
OUT = np.zeros((1, 64), np.float32)
BYTES = np.zeros(4096, np.uint8)
FLOATS = np.zeros((64, 64), np.float32)
TILES = np.uint32(4)
NO_BIAS = np.float32(0)


def kv_maps():
    return TensorMap(MATRIX, (64, 64)), TensorMap(MATRIX, (64, 64)), OUT, TILES


BY_TMA = choice.Types("float16", "float16", "k", True)


def gemm_maps(columns):
    return tuple(TensorMap(MATRIX, (rows, 64), swizzle="128B") for rows in (128, columns))


def tuned_maps(columns):
    return tuple(TensorMap(MATRIX[None], (1, rows, 64), swizzle="128B") for rows in (128, columns, 64))


HEADS = np.zeros((1, 256, 2, 128), np.float16)
LSE = np.zeros((1, 2, 256), np.float32)
CAUSAL = Kind(False, True)
SCORES = (np.int32(0), np.int32(0), np.float32(1), np.float32(0))  # diagonals, factors


def heads_map(rows):
    return TensorMap(HEADS, (1, rows, 1, 64), swizzle="128B")


def attention_by_wgmma(make, *, present=(), **cut):
    """An entry of `COMPILED` for one of the steps with a producer."""
    counter = np.zeros(1, np.uint32)
    maps = (64, cut.get("keys", 128), cut.get("keys", 128), 64)
    return (
        lambda: make(128, "float16", CAUSAL, **cut),
        lambda: (*map(heads_map, maps), LSE, *[counter] * 3, *[TILES] * 2, *SCORES[:2], *[TILES] * 5, *SCORES[2:]),
        "sm_90a",
        ("HGMMA.64x128x16.F32", "UTMALDG.4D", "UTMASTG.4D", "STSM.16.M88.4", "USETMAXREG", "SYNCS", *present),
        ("HMMA", "LDSM", "LDGSTS", "LDL", "STL"),
    )


COUNTS = np.zeros((1, 256), np.uint32)
INDEX = np.zeros(64, np.int32)
IMAGES = np.zeros((2, 8, 8, 16), np.float32)
WINDOW = patches.Convolution()

BY_ENGINE = ("UBLKCP.S.G", "SYNCS", "LDS.128")
# What blocks that meet in global memory have besides.
MEETING = {"grid": (np.zeros((64, 4, 2), np.float32), np.zeros(65, np.uint32), TILES)}
# Steps of softmax and rmsnorm: options, and what else is in the machine code or must not be.
ROWS = [
    ("registers", row.make_row, {"threads": 512, "vectors": 8}, ("LDG.E.128",), ("UBLKCP", "UCGABAR")),
    ("bulk", row.make_row, {"threads": 512, "vectors": 8, "part_bytes": 65536}, BY_ENGINE, ("UCGABAR",)),
    (
        "cluster",
        row.make_row,
        {"threads": 512, "vectors": 2, "part_bytes": 65536, "held": False, "cluster": 16, "min_blocks": 3},
        (*BY_ENGINE, "UCGABAR"),
        (),
    ),
    ("ring", make_ring, {"threads": 512, "passes": 8, "cluster": 16}, (*BY_ENGINE, "UCGABAR"), ()),
    (
        "grid",
        row.make_row,
        {"threads": 512, "vectors": 2, "part_bytes": 65536, "held": False, "grid": True, "min_blocks": 3},
        (*BY_ENGINE, "ATOMG"),
        ("UCGABAR",),
    ),
]

# A grid and weights of a stencil; a transpose's matrices by their bits, and where its tiles are.
GRID = np.zeros((8, 32, 64), np.float32)
DEPTH, WEIGHTS = np.uint32(8), (np.float32(1),) * 4
BITS = MATRIX.view(np.uint16)
OF_SQUARES = ("UTMALDG.2D", "SYNCS", "LDS.128", "PRMT", "STG.E.128")


def square_map(rows=128):
    return TensorMap(BITS, (rows, 64), swizzle="128B")


def plane_map():
    return TensorMap(GRID, (1, *stencil3d.tile_shape((16, 128))), store=False)


def rows_maps(cluster):
    return TensorMap(FLOATS, (16 // cluster, 256), store=False), TensorMap(FLOATS, (1, 16), store=False), FLOATS, TILES


COMPILED = {
    "transpose.naive": (
        lambda: transpose.make_naive(2),
        lambda: (BITS, BITS, TILES),
        "sm_80",
        ("LDG.E.U16", "STG.E.U16"),
        (),
    ),
    "transpose.padded": (
        lambda: transpose.make_padded(2),
        lambda: (BITS, BITS, TILES),
        "sm_80",
        ("LDG.E.U16", "STS.U16", "LDS.U16", "STG.E.U16"),
        ("LDS.128",),
    ),
    **{
        f"transpose.{name}": (
            functools.partial(transpose.make_by_columns, 2, swizzle),
            lambda swizzle=swizzle: (TensorMap(BITS, (64, 64), swizzle=swizzle), BITS, TILES),
            "sm_90a",
            ("UTMALDG.2D", "SYNCS", "LDS.U16", "STG.E.U16"),
            ("LDG", "STS", "LDS.128"),
        )
        for name, swizzle in (("tma", "none"), ("swizzle", "128B"))
    },
    "transpose.vector": (
        lambda: transpose.make_vector(2),
        lambda: (square_map(), BITS, TILES),
        "sm_90a",
        OF_SQUARES,
        ("LDG", "STS", "UTMASTG"),
    ),
    "transpose.ring": (
        lambda: transpose.make_ring(2),
        lambda: (square_map(), BITS, TILES, TILES),
        "sm_90a",
        OF_SQUARES,
        ("LDG", "STS", "UTMASTG"),
    ),
    "transpose.store": (
        lambda: transpose.make_store(2),
        lambda: (square_map(), square_map(64), TILES),
        "sm_90a",
        ("UTMALDG.2D", "SYNCS", "LDS.128", "PRMT", "STS.128", "UTMASTG.2D"),
        ("LDG", "STG"),
    ),
    "stencil3d.plain": (
        lambda: stencil3d.make_plain(27),
        lambda: (GRID, GRID, np.float32(0), *WEIGHTS),
        "sm_80",
        ("LDG.E", "STG.E"),
        ("LDS", "STS"),
    ),
    "stencil3d.shared": (
        lambda: stencil3d.make_shared(27),
        lambda: (GRID, GRID, DEPTH, np.float32(0), *WEIGHTS),
        "sm_80",
        ("LDG.E", "STS", "LDS.128", "STG.E.128"),
        (),
    ),
    **{
        f"stencil3d.{name}": (
            functools.partial(make, 27, stages=stages),
            lambda: (plane_map(), GRID, DEPTH, *WEIGHTS),
            "sm_90a",
            ("UTMALDG.3D", "SYNCS", "LDS.128", "STG.E.128"),
            ("LDG", "STS"),
        )
        for name, make, stages in (
            ("tma", stencil3d.make_stages, 1),
            ("stages", stencil3d.make_stages, 2),
            ("ring", stencil3d.make_ring, 2),
        )
    },
    "multicast.plain": (multicast.make_plain, lambda: (FLOATS, FLOATS, FLOATS), "sm_80", ("LDG.E", "STG.E"), ("LDS",)),
    "multicast.tma": (
        multicast.make_tma,
        lambda: rows_maps(1),
        "sm_90a",
        ("UTMALDG.2D", "SYNCS", "LDS.128"),
        ("LDG", "STS", "UTMALDG.2D.MULTICAST", "UCGABAR"),
    ),
    "multicast.multicast": (
        multicast.make_multicast,
        lambda: rows_maps(4),
        "sm_90a",
        ("UTMALDG.2D.MULTICAST", "SYNCS", "LDS.128", "UCGABAR"),
        ("LDG", "STS"),
    ),
    "copy.plain": (copy.make_plain, lambda: (FLOATS.ravel(), FLOATS.ravel()), "sm_80", ("LDG.E", "STG.E"), ()),
    "copy.vector": (copy.make_vector, lambda: (BYTES, BYTES), "sm_80", ("LDG.E.128", "STG.E.128"), ()),
    "copy.cp_async": (copy.make_cp_async, lambda: (BYTES, BYTES), "sm_80", ("LDGSTS.E.BYPASS.128", "LDS.128"), ()),
    "copy.bulk": (copy.make_bulk, lambda: (BYTES, BYTES), "sm_90a", ("UBLKCP.S.G", "UBLKCP.G.S", "SYNCS"), ("LDS",)),
    "copy.tensor": (
        lambda: copy.make_tensor((16, 64), "float32"),
        lambda: (TensorMap(FLOATS, (16, 64)), TensorMap(FLOATS, (16, 64))),
        "sm_90a",
        ("UTMALDG.2D", "UTMASTG.2D", "SYNCS"),
        ("LDS", "LDG", "STG"),
    ),
    "kv_stream.plain": (kv_stream.make_plain, lambda: (MATRIX, MATRIX, OUT, TILES), "sm_80", ("LDG.E.U16", "STS"), ()),
    "kv_stream.plain_vector": (
        kv_stream.make_plain_vector,
        lambda: (MATRIX.view(np.uint64), MATRIX.view(np.uint64), OUT, TILES, TILES),
        "sm_80",
        ("LDG.E.64", "STS.64"),
        (),
    ),
    "kv_stream.cp_async": (
        kv_stream.make_cp_async,
        lambda: (MATRIX, MATRIX, OUT, TILES),
        "sm_80",
        ("LDGSTS.E.BYPASS.128", "LDS.128"),
        ("STS",),
    ),
    "kv_stream.tma": (kv_stream.make_tma, kv_maps, "sm_90a", ("UTMALDG.2D", "SYNCS", "LDS.128"), ("LDG", "STS")),
    "kv_stream.tma_ring": (
        kv_stream.make_tma_ring,
        kv_maps,
        "sm_90a",
        ("UTMALDG.2D", "SYNCS", "LDS.128"),
        ("LDG", "STS"),
    ),
    "softmax.plain": (plain_rows.make_plain_softmax, lambda: (FLOATS, FLOATS), "sm_80", ("LDG.E", "STG.E", "LDS"), ()),
    "softmax.online": (
        lambda: row.make_row("softmax", "float32", held=False),
        lambda: (FLOATS, FLOATS),
        "sm_80",
        ("LDG.E.128", "STG.E.128", "MUFU.EX2", "SHFL"),
        (),
    ),
    **{
        f"softmax.{name}": (
            functools.partial(make, "softmax", "float32", **options),
            lambda name=name: (FLOATS, FLOATS, *MEETING.get(name, ())),
            "sm_90a",
            ("STG.E.128", "MUFU.EX2", *also),
            never,
        )
        for name, make, options, also, never in ROWS
    },
    "rmsnorm.plain": (
        plain_rows.make_plain_rmsnorm,
        lambda: (FLOATS, FLOATS[0], FLOATS, NO_BIAS, NO_BIAS),
        "sm_80",
        ("LDG.E", "STG.E", "LDS"),
        (),
    ),
    "rmsnorm.online": (
        lambda: row.make_row("rmsnorm", "float32", held=False),
        lambda: (FLOATS, FLOATS[0], FLOATS, NO_BIAS, NO_BIAS),
        "sm_80",
        ("LDG.E.128", "STG.E.128", "MUFU.RSQ", "SHFL"),
        (),
    ),
    **{
        f"rmsnorm.{name}": (
            functools.partial(make, "rmsnorm", "float32", **options),
            lambda name=name: (FLOATS, FLOATS[0], FLOATS, NO_BIAS, NO_BIAS, *MEETING.get(name, ())),
            "sm_90a",
            ("STG.E.128", "MUFU.RSQ", "LDG.E.128", *also),
            never,
        )
        for name, make, options, also, never in ROWS
    },
    "column_sums.plain": (
        column_sums.make_plain,
        lambda: (FLOATS, FLOATS, TILES),
        "sm_80",
        ("LDG.E",),
        ("RED", "ATOM"),
    ),
    "column_sums.strips": (
        column_sums.make_strips,
        lambda: (FLOATS, FLOATS, TILES),
        "sm_80",
        ("LDG.E", "ATOMG.E.ADD"),
        (),
    ),
    "column_sums.bulk": (
        column_sums.make_bulk,
        lambda: (FLOATS, FLOATS, TILES),
        "sm_90a",
        ("UBLKCP.S.G", "UBLKRED.G.S.ADD", "SYNCS", "LDS.128", "STS.128"),
        ("LDG", "RED", "ATOM"),
    ),
    "column_sums.engine": (
        column_sums.make_engine,
        lambda: (FLOATS, FLOATS, TILES),
        "sm_90a",
        ("UBLKCP.S.G", "UBLKRED.G.S.ADD", "SYNCS"),
        ("LDG", "LDS", "STS", "RED", "ATOM", "FADD"),
    ),
    "histogram.plain": (
        histogram.make_plain,
        lambda: (BYTES, COUNTS),
        "sm_80",
        ("LDG.E.U8", "ATOMG.E.ADD"),
        ("ATOMS",),
    ),
    "histogram.shared": (
        lambda: histogram.make_shared(256),
        lambda: (BYTES, COUNTS),
        "sm_80",
        ("LDG.E.U8", "ATOMS.POPC.INC", "ATOMG.E.ADD"),
        (),
    ),
    "histogram.vector": (
        lambda: histogram.make_vector(256, "uint8"),
        lambda: (BYTES, COUNTS),
        "sm_80",
        ("LDG.E.128", "ATOMS.POPC.INC", "ATOMG.E.ADD"),
        (),
    ),
    "histogram.bulk": (
        lambda: histogram.make_bulk(256, "uint8"),
        lambda: (BYTES, COUNTS),
        "sm_90a",
        ("UBLKCP.S.G", "LDS.128", "ATOMS.POPC.INC", "UBLKRED.G.S.ADD"),
        ("LDG.E.128", "RED", "ATOMG"),
    ),
    "scatter_add.plain": (
        scatter_add.make_plain,
        lambda: (FLOATS, INDEX, FLOATS),
        "sm_80",
        ("LDG.E", "ATOMG.E.ADD"),
        (),
    ),
    "scatter_add.vector": (
        scatter_add.make_vector,
        lambda: (FLOATS, INDEX, FLOATS),
        "sm_90a",
        ("LDG.E.128", "REDG.E.ADD.F32x4"),
        (),
    ),
    "scatter_add.bulk": (
        lambda: scatter_add.make_bulk("float32", 1024, 32),
        lambda: (FLOATS, INDEX, FLOATS, TILES),
        "sm_90a",
        ("UBLKCP.S.G", "UBLKRED.G.S.ADD", "SYNCS"),
        ("LDS", "STS", "LDG.E.128", "RED", "ATOM"),
    ),
    "scatter_add.tensor": (
        lambda: scatter_add.make_tensor("float32", 64, 32),
        lambda: (TensorMap(FLOATS, (1, 64)), INDEX, TensorMap(FLOATS, (1, 64))),
        "sm_90a",
        ("UTMALDG.2D", "UTMAREDG.2D.ADD", "SYNCS"),
        ("LDS", "STS", "LDG.E.128", "RED", "ATOM"),
    ),
    "patches.plain": (
        lambda: patches.make_plain(WINDOW),
        lambda: (IMAGES, FLOATS, 8, 8),
        "sm_80",
        ("LDG.E", "STG.E"),
        (),
    ),
    "patches.vector": (
        lambda: patches.make_vector(WINDOW),
        lambda: (IMAGES.view(np.uint8), FLOATS.view(np.uint8), 8, 8),
        "sm_80",
        ("LDG.E.128", "STG.E.128"),
        (),
    ),
    "patches.window": (
        lambda: patches.make_window(WINDOW, (4, 4, 16), "float32"),
        lambda: (TensorMap(IMAGES, (1, 4, 4, 16)), TensorMap(IMAGES[None], (1, 1, 4, 4, 16)), 2, 2),
        "sm_90a",
        ("UTMALDG.4D", "UTMASTG.5D", "SYNCS"),
        ("LDG", "STG", "LDS", "STS"),
    ),
    "patches.im2col": (
        lambda: patches.make_im2col(WINDOW, (32, 16), "float32"),
        lambda: (
            Im2colMap(IMAGES, (32, 16), lower=(-1, -1), upper=(-1, -1)),
            TensorMap(IMAGES[0], (4, 4, 16)),
            8,
            8,
        ),
        "sm_90a",
        ("UTMALDG.4D.IM2COL", "UTMASTG.3D", "SYNCS"),
        ("LDG", "STG", "LDS", "STS"),
    ),
    "paged.plain": (paged.make_plain, lambda: (IMAGES, INDEX[None], IMAGES), "sm_80", ("LDG.E", "STG.E"), ()),
    "paged.vector": (
        paged.make_vector,
        lambda: (IMAGES.view(np.uint8), INDEX[None], IMAGES.view(np.uint8)),
        "sm_80",
        ("LDG.E.128", "STG.E.128"),
        (),
    ),
    "paged.tensor": (
        lambda: paged.make_tensor(8, 16, 8, "float32"),
        lambda: (TensorMap(IMAGES, (1, 8, 1, 16)), INDEX[None], TensorMap(IMAGES, (1, 1, 8, 16)), TILES),
        "sm_90a",
        ("UTMALDG.4D", "UTMASTG.4D", "SYNCS"),
        ("STG", "LDS", "STS"),
    ),
    "gemm.naive": (plain.make_naive, lambda: (MATRIX, MATRIX, MATRIX, NO_BIAS), "sm_80", ("LDG.E.U16", "FFMA"), ()),
    "gemm.tiled": (plain.make_tiled, lambda: (MATRIX, MATRIX, MATRIX, NO_BIAS), "sm_80", ("LDS.128", "FFMA"), ()),
    "gemm.mma_cp_async": (
        lambda: warp_mma.make_mma_cp_async("float16", "float16"),
        lambda: (MATRIX, MATRIX, MATRIX, NO_BIAS),
        "sm_80",
        ("LDGSTS.E.BYPASS.LTC128B.128", "LDSM.16.M88.4", "HMMA.16816.F32"),
        ("LDG.E", "STS"),
    ),
    "gemm.mma_tma": (
        lambda: warp_mma.make_mma_tma("float16", "float16"),
        lambda: (*gemm_maps(256), MATRIX, NO_BIAS, TILES),
        "sm_90a",
        ("UTMALDG.2D", "SYNCS", "LDSM.16.M88.4", "HMMA.16816.F32"),
        ("LDG", "STS"),
    ),
    "gemm.wgmma": (
        lambda: warpgroup.make_wgmma("float16", "float16"),
        lambda: (*gemm_maps(128), MATRIX, NO_BIAS, TILES),
        "sm_90a",
        ("HGMMA.64x128x16.F32", "UTMALDG.2D", "SYNCS"),
        ("HMMA", "LDSM", "LDG", "LDS", "STS", "USETMAXREG", "UTMASTG"),
    ),
    "gemm.ring": (
        lambda: warpgroup.make_ring("float16", "float16"),
        lambda: (*gemm_maps(128), MATRIX, NO_BIAS, TILES),
        "sm_90a",
        ("HGMMA.64x128x16.F32", "UTMALDG.2D", "SYNCS"),
        ("HMMA", "LDSM", "LDG", "LDS", "STS", "USETMAXREG", "UTMASTG"),
    ),
    "gemm.warpgroups": (
        lambda: warpgroup.make_warpgroups("float16", "float16"),
        lambda: (*gemm_maps(256), MATRIX, NO_BIAS, TILES),
        "sm_90a",
        ("HGMMA.64x256x16.F32", "UTMALDG.2D", "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC"),
        ("HMMA", "LDSM", "LDG", "LDS", "STS", "UTMASTG"),
    ),
    "gemm.persistent": (
        lambda: persistent.make_persistent("float16", "float16"),
        lambda: (*gemm_maps(256), MATRIX, NO_BIAS, *[TILES] * 3),
        "sm_90a",
        ("HGMMA.64x256x16.F32", "UTMALDG.2D", "USETMAXREG"),
        ("HMMA", "LDSM", "LDG", "LDS", "STS", "UTMASTG", "UCGABAR", "SYNCS.ARRIVE.TRANS64.RED"),
    ),
    "gemm.multicast": (
        lambda: persistent.make_multicast("float16", "float16"),
        lambda: (*gemm_maps(128), MATRIX, NO_BIAS, *[TILES] * 3),
        "sm_90a",
        ("HGMMA.64x256x16.F32", "UTMALDG.2D.MULTICAST", "USETMAXREG", "UCGABAR", "SYNCS.ARRIVE.TRANS64.RED"),
        ("HMMA", "LDSM", "LDG", "LDS", "STS", "UTMASTG"),
    ),
    "gemm.store": (
        lambda: persistent.make_store_by_tma("float16", "float16"),
        lambda: (*gemm_maps(128), TensorMap(MATRIX, (64, 64), swizzle="128B"), NO_BIAS, *[TILES] * 4),
        "sm_90a",
        ("HGMMA.64x256x16.F32", "UTMALDG.2D.MULTICAST", "UTMASTG.2D", "STSM.16.M88.4", "USETMAXREG"),
        ("HMMA", "LDSM", "LDG", "LDS", "STG"),
    ),
    "gemm.tuned": (
        lambda: choice.Configuration(2, 256, 2).kernel(BY_TMA, "none", False),
        lambda: (*tuned_maps(128), TILES, *[TILES] * 7),
        "sm_90a",
        ("HGMMA.64x256x16.F32", "UTMALDG.3D.MULTICAST", "UTMASTG.3D", "STSM.16.M88.4", "USETMAXREG", "ACQBULK"),
        ("HMMA", "LDSM", "LDG", "LDS", "STG"),
    ),
    "attention.three_kernels": (
        lambda: attention_plain.make_scores(CAUSAL, False),
        lambda: (HEADS, HEADS, np.zeros((1, 2, 256, 256), np.float32), TILES, *SCORES),
        "sm_80",
        ("LDG.E.U16", "FFMA", "STG.E"),
        ("HMMA",),
    ),
    "attention.online": (
        lambda: attention_plain.make_online("float16", 128, CAUSAL, False),
        lambda: (*[HEADS] * 4, LSE, TILES, *SCORES),
        "sm_80",
        ("LDS.128", "FFMA", "MUFU.EX2"),
        ("HMMA",),
    ),
    "attention.mma_cp_async": (
        lambda: attention_mma.make_mma_cp_async("float16", CAUSAL, False, attention_mma.tiling_for(128, None, None, 2)),
        lambda: (*[HEADS] * 4, LSE, TILES, *SCORES),
        "sm_80",
        ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E", "MUFU.EX2"),
        (),
    ),
    "attention.mma_tma": (
        lambda: attention_mma.make_mma_tma("float16", CAUSAL, False, attention_mma.tiling_for(128, None, None, 2)),
        lambda: (*map(heads_map, (64, 64, 64)), HEADS, LSE, *[TILES] * 2, *SCORES),
        "sm_90a",
        ("HMMA.16816.F32", "LDSM.16.M88.4", "UTMALDG.4D", "SYNCS", "MUFU.EX2"),
        ("LDGSTS", "HGMMA"),
    ),
    "attention.wgmma": attention_by_wgmma(attention_warpgroup.make_warpgroups, consumers=1),
    "attention.warpgroups": attention_by_wgmma(attention_warpgroup.make_warpgroups),
    "attention.overlapped": attention_by_wgmma(attention_warpgroup.make_overlapped),
    "attention.ping_pong": attention_by_wgmma(
        attention_warpgroup.make_overlapped, ping_pong=True, present=("BAR.ARV", "BAR.SYNC")
    ),
    "attention.persistent": attention_by_wgmma(attention_warpgroup.make_overlapped, present=("ATOMG.E.INC",)),
}


def test_every_variant_is_compiled_here():
    assert sorted(COMPILED) == sorted(NAMES)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_to_what_it_claims(name):
    make, arguments, arch, present, absent = COMPILED[name]
    compiled = make().compile(*arguments(), arch=arch)
    mnemonics = set(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", compiled.sass))
    for mnemonic in present:
        assert any(m.startswith(mnemonic) for m in mnemonics), f"{mnemonic} is not in {sorted(mnemonics)}"
    for mnemonic in absent:
        assert not any(m.startswith(mnemonic) for m in mnemonics), f"{mnemonic} is there"
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert not resources.warnings  # such as C7510: products that wait for each other
    assert compiled.requirement.capability <= (90 if arch == "sm_90a" else 80)


def test_kv_stream_function_checks_its_arguments():
    k, out = np.zeros((64, 128), np.float16), np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="two matrices of one shape"):
        kv_stream.kv_stream(k, k[:32], out)
    with pytest.raises(ValueError, match="float32 of shape"):
        kv_stream.kv_stream(k, k, out[:, :32])
    with pytest.raises(ValueError, match="float16 expected"):
        kv_stream.kv_stream(k.astype(np.float32), k, out)
    odd = np.zeros((64, 129), np.float16)
    with pytest.raises(ValueError, match="pitched_copy"):
        kv_stream.kv_stream(odd, odd, out)
    with pytest.raises(ValueError, match="columns must be"):
        kv_stream.make_tma(tile=(64, 48))
    with pytest.raises(ValueError, match="do not divide among"):
        kv_stream.make_tma(tile=(3, 64))


def test_copy_function_checks_its_arguments():
    a = np.zeros((8, 64), np.float32)
    with pytest.raises(ValueError, match="one shape and dtype"):
        copy.copy(a, a[:4])
    with pytest.raises(ValueError, match="row-major contiguous"):
        copy.copy(a.T, a.copy().T, variant="bulk")
    wide = np.zeros((8, 64), np.float32)
    with pytest.raises(ValueError, match="rows of 13 × float32 end within 16 B"):
        copy.copy(a[:, :13], wide[:, :13], variant="tensor")
    long, other = (np.lib.stride_tricks.as_strided(array, (1, 1 << 31), (0, 4)) for array in (a, wide))
    with pytest.raises(ValueError, match=r"copy.tensor: source has the shape \(1, 2147483648\); an extent above"):
        copy.copy(long, other, variant="tensor")


def test_copy_chooses_by_the_layout(rng, in_simulator):
    numbers = rng.integers(0, 256, 2 * 8 * 64 + 1).astype(np.uint8)
    whole, shifted = numbers[:512].reshape(8, 64), numbers[1:513].reshape(8, 64)
    for source in (whole, shifted, whole[:, :48], whole[:5, 16:32]):
        wide = np.zeros((8, 64), np.uint8)[: source.shape[0], : source.shape[1]]
        for target in (np.zeros(source.shape, np.uint8), wide):
            copy.copy(source, target)
            np.testing.assert_array_equal(target, source)
    with pytest.raises(ValueError, match="runs backwards"):
        copy.copy(whole[::-1], np.zeros((8, 64), np.uint8))


def test_kv_stream_function_names_wrong_options():
    k, out = np.zeros((64, 128), np.float16), np.zeros((1, 64), np.float32)
    for options, error, message in (
        ({"splits": 2}, TypeError, "splits is the first extent of `out`"),
        ({"stage": 2}, TypeError, "has no option 'stage'; it has threads, stages, strict, l2_promotion, stream"),
        ({"variant": "plain", "stages": 2}, TypeError, "'plain' has no option 'stages'"),
        ({"variant": "fast"}, KeyError, "has no variant 'fast'"),
        ({"work": -1}, ValueError, "work -1; expected an integer of 0 or more"),
        ({"work": 1.0}, ValueError, "work 1.0"),
    ):
        with pytest.raises(error, match=message):
            kv_stream.kv_stream(k, k, out, **options)
    with pytest.raises(TypeError, match="v is a list; an array is expected"):
        kv_stream.kv_stream(k, [1.0], out)
    with pytest.raises(ValueError, match="nothing to stream or to write"):
        kv_stream.kv_stream(k, k, out[:0])
    with pytest.raises(ValueError, match="nothing to stream or to write"):
        kv_stream.kv_stream(k[:0], k[:0], out[:, :0])


def test_copy_function_names_wrong_options(in_simulator):
    a = np.zeros((8, 64), np.float32)
    for options, error, message in (
        ({"stage": 2, "variant": "bulk"}, TypeError, "no option 'stage'; it has stage_bytes, stages, lag, per_multi"),
        ({"variant": "tensor", "threads": 32}, TypeError, "'tensor' has no option 'threads'"),
        ({"variant": "bulk", "stages": 4, "lag": 4}, ValueError, "lag 4 of 4 stages: it must be 0 to 3"),
        ({"variant": "bulk", "stage_bytes": 100}, ValueError, "stage_bytes 100: the copy engine moves multiples of 16"),
        ({"variant": "vector", "unroll": -1}, ValueError, "unroll -1 of variant 'vector': an integer of 1 or more"),
        ({"variant": "bulk", "lag": -1}, ValueError, "lag -1 of variant 'bulk': an integer of 0 or more"),
        ({"variant": "bulk", "stages": "a"}, ValueError, "stages 'a' of variant 'bulk'"),
    ):
        with pytest.raises(error, match=message):
            copy.copy(a, a.copy(), **options)
    with pytest.raises(TypeError, match="copy of a list to a ndarray"):
        copy.copy([1], a)


@pytest.mark.parametrize("variant", [v.name for v in copy.PROBLEM.variants])
def test_copy_of_nothing(variant, in_simulator):
    copy.copy(np.zeros((0, 64), np.float32), np.zeros((0, 64), np.float32), variant=variant)
    copy.copy(np.zeros((8, 0), np.float32), np.zeros((8, 0), np.float32), variant=variant)


def test_select():
    rows, others = ["softmax", "rmsnorm"], ["column_sums", "histogram", "scatter_add", "patches", "paged"]
    movement = ["copy", "kv_stream", "transpose", "stencil3d", "multicast"]
    assert [p.name for p, _ in select(None)] == [*movement, *rows, *others, "gemm", "attention"]
    assert [(p.name, [v.name for v in vs]) for p, vs in select(["copy.bulk", "copy.plain", "copy.bulk"])] == [
        ("copy", ["bulk", "plain"])
    ]
    with pytest.raises(KeyError, match="no problem 'sort'"):
        select(["sort"])
    with pytest.raises(KeyError) as caught:
        select(["copy.fast"])
    assert str(caught.value).startswith("copy has no variant 'fast'; it has plain, vector,")  # in no quotes


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_right_on_the_gpu(problem, seed):
    assert driver.device_count()
    for size in [*SIZES, (1000, 3333)]:
        for case in cases(problem, *size):
            for record in suite.run_case(problem, case, problem.variants, "gpu", seed=seed, measure=False):
                assert record.ok, f"{record.variant} {case}: {record.reason}"
