"""`matmul`: right at any shape, for every kind of operand; and refusals that say what would fit."""

from __future__ import annotations

import json
import os
import random

import ml_dtypes
import numpy as np
import pytest

from numba_tma import driver, dtypes, pitched_copy, use_backend
from numba_tma.kernels.gemm import choice, tuning
from numba_tma.kernels.gemm.choice import Configuration, Shape, Types
from numba_tma.kernels.gemm.epilogue import activation_reference
from numba_tma.kernels.gemm.matmul import MatmulError, matmul
from numba_tma.launch import recording
from numba_tma.machine_code import main_loop

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
# Relative to the largest result: rounding of the output's type; tf32 has 10 bits of fraction, cut off.
ROUNDING = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8}


def tolerance(dtype, out_dtype):
    return ROUNDING[np.dtype(out_dtype).name] * 1.1 + (2e-3 if np.dtype(dtype) == np.float32 else 1e-5)


def expected(a, b, bias=None, activation="none"):
    product = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)
    return activation_reference(activation, product if bias is None else product + np.asarray(bias, np.float64))


def check(found, reference, dtype):
    error = np.abs(np.asarray(found).astype(np.float64) - reference).max() / np.abs(reference).max()
    assert error <= tolerance(dtype, found.dtype), error


@pytest.fixture(autouse=True)
def simulator(request):
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with use_backend("sim"):
            yield


def slow(*values):
    """Parameters for a test of kernels that take long to compile, of a kind that another one stands for."""
    return pytest.param(*values, marks=pytest.mark.full)


SMALL = Configuration(1, 64, 1, "m", 2)  # for what does not depend on the tile
CONFIGURATIONS = [
    SMALL,
    Configuration(2, 64, 2, "m", 8),
    Configuration(2, 64, 4, "n", 16),
    Configuration(1, 64, splits=4),
    slow(Configuration(2, 256, 2, "m", 8)),
    slow(Configuration(2, 192, 1, "m", 16)),
    slow(Configuration(1, 256, 1, "m", 16)),
    slow(Configuration(1, 128, 1, "m", 2)),
    slow(Configuration(2, 128, splits=4)),
    slow(Configuration(1, 64, splits=8)),
]


@pytest.mark.filterwarnings("error")  # a hazard
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_every_kernel_and_its_edges(rng, configuration, monkeypatch):
    """On four SMs, so that blocks that stay have several tiles."""
    monkeypatch.setattr(choice, "multiprocessors", lambda: 4)
    m, n, k = int(rng.integers(65, 300)), int(rng.integers(65, 400)), int(rng.integers(1, 700))
    n = n // 8 * 8 if rng.random() < 0.7 else n  # results by TMA
    a = rng.standard_normal((m, k)).astype(np.float16)
    weight = pitched_copy(rng.standard_normal((n, k)).astype(np.float16))
    bias = 8 * rng.standard_normal(n).astype(np.float32)
    check(matmul(a, weight.T, bias=bias, configuration=configuration), expected(a, weight.T, bias), np.float16)


@pytest.mark.parametrize(
    "configuration",
    [c if c in (SMALL, CONFIGURATIONS[3]) else slow(c) for c in (SMALL, CONFIGURATIONS[3], *choice.candidates())],
    ids=str,
)
def test_products_wait_for_nothing(configuration):
    """The assembler has no warning such as C7510, that wgmma are serialised, and spills nothing that the loop needs.

    With bias and GELU up to four addresses are kept in memory for the end of a tile, where they are read once.
    """
    a, w = np.zeros((64, 64), BF16), np.zeros((64, 64), BF16)
    with recording("sm_90a") as recorded:
        matmul(a, w.T, configuration=configuration, activation="gelu", bias=np.zeros(64, np.float32))
    compiled = recorded.launches[0].compiled
    assert not compiled.resources.warnings
    assert compiled.resources.spill_store_bytes <= 16
    assert not [mnemonic for mnemonic in main_loop(compiled.sass) if mnemonic.startswith(("LDL", "STL"))]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [BF16, np.float32, E4M3, slow(np.float16)], ids=str)
def test_types_and_orders(rng, dtype):
    """Row-major and transposed operands, of which some have to be copied first."""
    a = rng.standard_normal((70, 37)).astype(dtype)
    b = rng.standard_normal((37, 51)).astype(dtype)
    reference = expected(a, b)
    for left, right in (
        (a, b),
        (a, np.ascontiguousarray(b.T).T),
        (np.asfortranarray(a), b),
        (np.tile(a, (2, 2))[:70, :37], np.repeat(b, 2, axis=1)[:, ::2]),
    ):
        check(matmul(left, right), reference, dtype)


def test_the_other_8_bit_type(rng):
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.float8_e5m2) for shape in ((9, 140), (140, 16)))
    check(matmul(a, b), expected(a, b), a.dtype)


@pytest.mark.parametrize(
    ("activation", "out_dtype"),
    [
        ("gelu", "float32"),
        ("silu", "bfloat16"),
        *(slow(*pair) for pair in (("none", "bfloat16"), ("relu", "float32"), ("gelu", "bfloat16"))),
    ],
)
def test_bias_activation_and_output(rng, activation, out_dtype):
    a, b = rng.standard_normal((66, 40)).astype(BF16), rng.standard_normal((40, 72)).astype(BF16)
    bias = rng.standard_normal(72).astype(np.float32)
    found = matmul(a, b, bias=bias, activation=activation, out_dtype=out_dtype)
    assert found.dtype == dtypes.lookup(out_dtype).numpy
    check(found, expected(a, b, bias, activation), BF16)


@pytest.mark.parametrize(
    ("shapes", "configuration"),
    [
        (((3, 65, 24), (24, 40)), SMALL),
        (((1, 9, 24), (3, 24, 40)), SMALL),
        (((3, 65, 24), (3, 24, 40)), SMALL),
        (((3, 65, 24), (3, 24, 40)), Configuration(1, 64, splits=2)),
    ],
)
def test_batches(rng, shapes, configuration):
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    check(matmul(a, b, configuration=configuration), expected(a, b), np.float16)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("columns", "out_dtype", "configuration"),
    [
        (72, BF16, SMALL),
        slow(72, np.float32, SMALL),
        slow(51, BF16, SMALL),
        (72, BF16, Configuration(1, 64, splits=2)),
    ],
    ids=["tma", "tma_wide", "registers", "split"],
)
def test_adding_to_what_is_there(rng, columns, out_dtype, configuration):
    """By the copy engine the product is rounded before the sum is, so that the error is up to one rounding more."""
    a, b = rng.standard_normal((70, 40)).astype(BF16), rng.standard_normal((40, columns)).astype(BF16)
    bias = rng.standard_normal(columns).astype(np.float32)
    out = pitched_copy((10 * rng.standard_normal((70, columns))).astype(out_dtype))
    reference = expected(a, b, bias, "relu") + np.asarray(out, np.float64)
    matmul(a, b, bias=bias, activation="relu", out=out, accumulate=True, configuration=configuration)
    error = np.abs(np.asarray(out, np.float64) - reference).max() / np.abs(reference).max()
    assert error <= 2 * tolerance(BF16, out_dtype)


def test_adding_needs_something_to_add_to():
    a = np.ones((8, 8), BF16)
    with pytest.raises(MatmulError, match="give `out`"):
        matmul(a, a, accumulate=True)


def test_output_of_ones_own(rng):
    a, b = rng.standard_normal((20, 24)).astype(np.float16), rng.standard_normal((24, 30)).astype(np.float16)
    room = np.full((20, 40), 7, np.float16)
    out = room[:, :30]
    assert matmul(a, b, out=out) is out
    check(out, expected(a, b), np.float16)
    assert (room[:, 30:] == 7).all()


@pytest.mark.parametrize("extents", [(1, 1, 1), (1, 7, 300), (300, 1, 3)])
def test_vectors(rng, extents):
    m, n, k = extents
    a, b = rng.standard_normal((m, k)).astype(BF16), rng.standard_normal((k, n)).astype(BF16)
    check(matmul(a, b, configuration=SMALL), expected(a, b), BF16)


@pytest.mark.parametrize("shapes", [((3, 9, 1), (3, 1, 1)), ((3, 1, 1), (3, 1, 9)), ((3, 1, 1), (3, 1, 1))])
def test_batches_of_single_elements(rng, shapes):
    """Elements of neighbouring products lie as close together as those of a row."""
    a, b = (rng.standard_normal(shape).astype(BF16) for shape in shapes)
    check(matmul(a, b, configuration=SMALL), expected(a, b), BF16)


def test_nothing_to_compute():
    assert matmul(np.zeros((0, 8), np.float16), np.zeros((8, 5), np.float16)).shape == (0, 5)


def test_refusals():
    a, b = np.zeros((4, 8), np.float16), np.zeros((8, 16), np.float16)
    for arguments, options, error, message in (
        ((a, b.astype(BF16)), {}, TypeError, "one type for both"),
        ((a.astype(np.int32), b.astype(np.int32)), {}, TypeError, "expected one type for both, of float16"),
        (([[1.0]], b), {}, TypeError, "list is not an array"),
        ((a, a), {}, MatmulError, "8 columns, .* 4 rows"),
        ((a[0], b), {}, MatmulError, "two dimensions, or three"),
        ((np.zeros((2, 4, 8), np.float16), np.zeros((3, 8, 16), np.float16)), {}, MatmulError, "different sizes"),
        ((a, b), {"out": np.zeros((4, 15), np.float16)}, MatmulError, r"expected float16 of shape \(4, 16\)"),
        ((a, b), {"out": np.zeros((16, 4), np.float16).T}, MatmulError, "rows must be contiguous"),
        ((a, b), {"out_dtype": np.int32}, TypeError, "output of int32"),
        ((a, b), {"bias": np.zeros(4, np.float32)}, MatmulError, r"of shape \(16,\)"),
        ((a, b), {"activation": "tanh"}, ValueError, "choose one of"),
        ((np.zeros((4, 0), np.float16), np.zeros((0, 3), np.float16)), {}, MatmulError, "K is 0"),
        ((a, b), {"configuration": Configuration(2, 96)}, MatmulError, "does not fit"),
    ):
        with pytest.raises(error, match=message):
            matmul(*arguments, **options)


def test_the_table_covers_every_kind_of_product():
    costs, fastest = choice.table()
    assert set(choice.candidates()) <= set(costs)
    assert len(fastest) >= 24
    for b_major in "kn":
        for by_tma in (True, False):
            types = Types("float16", "float16", b_major, by_tma)
            for shape in (Shape(1, 1, 1, 1), Shape(1, 8192, 8192, 8192), Shape(64, 128, 128, 128)):
                assert choice.choose(types, shape).fits(types)


def random_products(seed: int, count: int) -> list[tuple[Shape, str, str, str, str, bool]]:
    """Shapes of up to 300, with type, B's order, the output's type, activation and whether there is a bias."""
    r = random.Random(seed)
    kinds = (
        ("bfloat16", "k", "bfloat16", "none", False),
        ("float16", "n", "float16", "none", False),
        ("float16", "k", "float32", "gelu", True),
        ("bfloat16", "n", "float32", "none", False),
        ("float32", "k", "float32", "none", False),
        ("float8_e4m3fn", "k", "bfloat16", "none", False),
    )
    return [
        (Shape(r.choice((1, 1, 1, 3)), *(r.randint(1, 300) for _ in range(3))), *r.choice(kinds)) for _ in range(count)
    ]


@pytest.mark.gpu
def test_random_products_on_the_gpu(seed):
    torch = pytest.importorskip("torch")
    sms = driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())
    products = random_products(seed, 500)
    kernels = set()
    for shape, dtype, b_major, out_dtype, activation, has_bias in products:
        types = Types(dtype, out_dtype, b_major, shape.n * dtypes.lookup(out_dtype).size % 16 == 0)
        kernels.add((choice.choose(types, shape, sms), types, activation, has_bias))
    tuning.compile_all(kernels, os.cpu_count())
    generator = torch.Generator("cuda").manual_seed(seed)
    wrong = []
    for shape, dtype, b_major, out_dtype, activation, has_bias in products:
        z, m, n, k = shape.batch, shape.m, shape.n, shape.k

        def random(*extents, dtype=dtype):
            return torch.randn(*extents, generator=generator, device="cuda").to(getattr(torch, dtype))

        # Rows at multiples of 16 bytes, so that nothing is copied; K and N themselves may be anything.
        a = random(z, m, -(-k // 16) * 16)[:, :, :k]
        if b_major == "k":
            b = random(z, n, -(-k // 16) * 16)[:, :, :k].transpose(1, 2)
        else:
            b = random(z, k, -(-n // 16) * 16)[:, :, :n]
        bias = random(n, dtype="float32") if has_bias else None
        out = torch.full((z, m, n), float("nan"), device="cuda", dtype=getattr(torch, out_dtype))
        matmul(a, b, out=out, bias=bias, activation=activation)
        reference = a.double() @ b.double()
        if has_bias:
            reference += bias.double()
        if activation == "gelu":
            reference = torch.nn.functional.gelu(reference, approximate="tanh")
        error = ((out.double() - reference).abs().max() / reference.abs().max()).item()
        # The tensor core adds 8-bit products with some 13 bits below the largest.
        allowed = 2e-3 if dtype == "float32" else 1e-3 if dtype.startswith("float8") else 1e-5
        if not error <= ROUNDING[out_dtype] * 1.1 + allowed:
            wrong.append((shape, dtype, b_major, out_dtype, activation, error))
    assert not wrong


def test_the_table_has_a_configuration_for_each_shape(tmp_path, monkeypatch):
    """Of B by rows along K: what was measured of another order or type is not what `choice` is asked for."""
    shapes = [(entry["itemsize"], *entry["shape"].values()) for entry in json.loads(choice.TABLE.read_text())["shapes"]]
    assert len(set(shapes)) == len(shapes) > 20
    monkeypatch.setattr(choice, "TABLE", tmp_path / "tuned.json")
    shape = {"batch": 1, "m": 64, "n": 64, "k": 64}
    kinds = [("bfloat16", "k"), ("bfloat16", "n"), ("float16", "k"), ("float32", "k")]
    measured = [
        {"dtype": dtype, "b_major": major, "shape": shape, "configuration": {"columns": columns}}
        for columns, (dtype, major) in enumerate(kinds)
    ]
    tuning.write_table([], measured, {})
    assert json.loads(choice.TABLE.read_text())["shapes"] == [
        {"itemsize": 2, "shape": shape, "configuration": {"columns": 0}}
    ]
