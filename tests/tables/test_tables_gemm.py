"""Tables of matrix products: the ladder beside its peer, and why a product is slower than cuBLAS'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cells import row

from numba_tma.kernels.gemm import PROBLEM
from numba_tma.kernels.gemm.choice import Configuration, Shape
from numba_tma.tables import gemm as tables_gemm

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def measured(variant, shape, tflop_per_s, ratio_to_peer, dtype="float16"):
    return {
        "variant": variant,
        "shape": list(shape),
        "dtype": dtype,
        "tflop_per_s": tflop_per_s,
        "ratio_to_peer": ratio_to_peer,
    }


def test_ladder():
    made = tables_gemm.ladder(
        [
            measured("slow", (4096,) * 3, 31.26, None),
            measured("fast", (4096,) * 3, 702.4, 1.021),
            measured("failed", (4096,) * 3, None, None),
            measured("first", (10, 20, 30), 0.1, 0.04, "bfloat16"),
            measured("slow", (10, 20, 30), 0.6, 0.2, "bfloat16"),
            measured("fast", (10, 20, 30), 1.4, 0.5, "bfloat16"),
        ]
    )
    assert row(made, "step") == [
        "step",
        "4096³ float16, TFLOP/s",
        "of cuBLAS",
        "10×20×30 bfloat16, TFLOP/s",
        "of cuBLAS",
    ]
    assert [line.split("|")[1].strip() for line in made.splitlines()[2:]] == ["`first`", "`slow`", "`fast`"]
    assert row(made, "`first`") == ["`first`", "", "", "0", "4%"]
    assert row(made, "`slow`") == ["`slow`", "31", "", "1", "20%"]
    assert row(made, "`fast`") == ["`fast`", "702", "102%", "1", "50%"]


def test_code_is_there_for_every_step():
    made = tables_gemm.code(RESULTS)
    for variant in PROBLEM.variants:
        assert f"| `{variant.name}` " in made, "python scripts/measure.py --only gemm_code"


# Tiles and places counted by hand, 132 SMs.
@pytest.mark.parametrize(
    ("configuration", "shape", "expected"),
    [
        (Configuration(2, 256), Shape(1, 8192, 8192, 64), 64 * 32 / 132),
        (Configuration(2, 256, 2, "m"), Shape(1, 3000, 5000, 64), 12 * 20 / 66),
        (Configuration(2, 64, 4, "n"), Shape(2, 128, 512, 64), 2 * 2 / 33),
        (Configuration(1, 128), Shape(1, 64, 256, 64), 2 / 264),
        (Configuration(2, 128, splits=8), Shape(1, 256, 256, 64), 4 / 16),
    ],
)
def test_waves(configuration, shape, expected):
    assert tables_gemm.waves(configuration, shape) == pytest.approx(expected)


def product(configuration, m, n, k, seconds, cublas_seconds=1e-9, name="a product"):
    return {
        "name": name,
        "dtype": "bfloat16",
        "b_major": "k",
        "shape": {"batch": 1, "m": m, "n": n, "k": k},
        "configuration": {
            "consumers": configuration.consumers,
            "columns": configuration.columns,
            "cluster": configuration.cluster,
            "across": configuration.across,
            "band": configuration.band,
            "splits": configuration.splits,
        },
        "seconds": seconds,
        "cublas_seconds": cublas_seconds,
    }


@pytest.mark.parametrize(
    ("configuration", "extents", "seconds", "expected"),
    [
        (Configuration(2, 128), (128, 10240, 8192), 6e-5, "a matter of bytes, which 80 blocks ask for"),
        (Configuration(2, 256, 2), (3000, 5000, 7000), 3e-4, "9% of the SMs' time has no tile"),
        (Configuration(2, 64, 2, "n"), (1000, 1000, 1000), 9e-6, "short: starting and filling the ring count"),
        (Configuration(2, 128), (512, 28672, 4096), 2e-4, "128×256 would leave 15% idle; smaller tiles ask more of L2"),
        (Configuration(2, 256), (1024, 57344, 8192), 1e-3, "not known"),
    ],
)
def test_reasons(configuration, extents, seconds, expected):
    assert tables_gemm.reason(product(configuration, *extents, seconds)) == expected


def test_beside_cublas(tmp_path):
    products = [
        product(Configuration(2, 256), 4096, 4096, 4096, 2e-4, 1.97e-4, "equal"),
        product(Configuration(2, 192, 2), 8192, 8192, 8192, 2e-3, 4e-3, "twice as fast"),
        product(Configuration(1, 64, splits=4), 64, 512, 1024, 2e-5, 1e-5, "half as fast"),
        product(Configuration(2, 64, 4, "n"), 1024, 512, 1024, 2e-5, 1.9e-5, "a little slower"),
    ]
    (tmp_path / tables_gemm.MATMUL).write_text(json.dumps({"shapes": products}))
    made = tables_gemm.matmul(tmp_path)
    assert row(made, "twice") == [
        "twice as fast", "8192×8192×8192", "bfloat16", "128×192, 2 share B", "2 ms", "550", "275", "2.00×",
    ]  # fmt: skip
    assert row(made, "half")[3] == "64×64, K in 4" and row(made, "a little")[3] == "128×64, 4 share A"
    slower = tables_gemm.behind(tmp_path)
    assert [line.split("|")[1].strip() for line in slower.splitlines()[2:]] == ["half as fast", "a little slower"]
