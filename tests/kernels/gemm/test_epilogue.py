"""The epilogue's pairs: rounded once, guarded at both edges, bias before activation, one store where it is aligned."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import uint32

from numba_tma import kernel, pitched
from numba_tma.kernels.gemm.epilogue import (
    ACTIVATIONS,
    activation_reference,
    make_activation,
    make_activation_of_two,
    make_direct_store,
    make_pack,
)

pytestmark = pytest.mark.usefixtures("in_simulator")

# One unit in the last place of the output's type; for float32, what the fast exponential and quotient cost.
PRECISION = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


def make_kernel(out_dtype, activation, has_bias):
    """One warp a row stores x, two columns a lane, one row and one pair more than there are."""
    store_pair = make_direct_store(out_dtype, activation, has_bias)

    @kernel(threads=32)
    def stores(x, out, bias):
        row = uint32(cuda.blockIdx.x)
        column = uint32(2) * uint32(cuda.threadIdx.x)
        store_pair(out, row, column, x[row, column], x[row, column + 1], bias)

    return stores


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", NUMPY)
def test_pairs(out_dtype, activation, rng):
    dtype = NUMPY[out_dtype]
    for has_bias, bias_dtype in ((False, np.dtype(np.float32)), (True, np.dtype(np.float32)), (True, dtype)):
        stores = make_kernel(out_dtype, activation, has_bias)
        for columns, allocate in ((1, np.empty), (37, np.empty), (48, np.empty), (51, pitched)):
            rows = int(rng.integers(1, 5))
            x = (4 * rng.standard_normal((rows + 1, 64))).astype(np.float32)
            bias = rng.standard_normal(columns).astype(bias_dtype)
            out = allocate((rows, columns), dtype)
            out[...] = np.nan
            report = stores[rows + 1](x, out, bias)
            assert not report.hazards
            plain = x[:rows, :columns].astype(np.float64) + (bias.astype(np.float64) if has_bias else 0)
            expected = activation_reference(activation, plain)
            np.testing.assert_allclose(out.astype(np.float64), expected, rtol=PRECISION[out_dtype], atol=1e-5)


def make_applied(activation):
    activate = make_activation(activation)

    @kernel(threads=9)
    def applied(x, y):
        y[cuda.threadIdx.x] = activate(x[cuda.threadIdx.x])

    return applied


def make_applied_to_two(activation):
    activate = make_activation_of_two(activation)

    @kernel(threads=9)
    def applied_to_two(x, others, y, z):
        i = cuda.threadIdx.x
        y[i], z[i] = activate(x[i], others[i])

    return applied_to_two


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_at_once_do_not_disturb_each_other(activation, rng):
    x = np.array([-200.0, -30.0, -1.0, -0.0, 0.5, 30.0, 200.0, np.inf, np.nan], np.float32)
    others = rng.permutation(x)
    expected, other_expected = (activation_reference(activation, values) for values in (x, others))
    y, z = np.empty_like(x), np.empty_like(x)
    make_applied_to_two(activation)[1](x, others, y, z)
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-14)
    np.testing.assert_allclose(z, other_expected, rtol=2e-6, atol=1e-14)


def test_activations_at_their_ends():
    x = np.array([-np.inf, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, np.inf, np.nan], np.float32)
    ends = {
        "none": x,
        "relu": [0, 0, 0, 0, 0, 90, 200, np.inf, np.nan],
        "gelu": [np.nan, 0, 0, 0, 0, 90, 200, np.inf, np.nan],
        "silu": [np.nan, 0, 0, 0, 0, 90, 200, np.inf, np.nan],
    }
    for name, expected in ends.items():
        y = np.empty_like(x)
        make_applied(name)[1](x, y)
        np.testing.assert_allclose(y, expected, atol=1e-30)


@pytest.mark.parametrize(
    ("out_dtype", "store"), [("float16", "STG.E "), ("bfloat16", "STG.E "), ("float32", "STG.E.64")]
)
def test_one_store_a_pair_where_it_is_aligned(out_dtype, store):
    out = np.zeros((4, 64), NUMPY[out_dtype])
    compiled = make_kernel(out_dtype, "none", False).compile(np.zeros((4, 64), np.float32), out, out[0], arch="sm_80")
    assert store in compiled.sass
    assert compiled.resources.spill_store_bytes == compiled.resources.local_bytes == 0


def test_what_there_is_not():
    with pytest.raises(ValueError, match="activation 'tanh': choose one of 'none', 'relu', 'gelu', 'silu'"):
        make_direct_store("float16", "tanh")
    with pytest.raises(ValueError, match="float32 is no 16-bit floating-point type"):
        make_pack("float32")
