"""Each kernel by itself against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_tma.gpt2 import linear
from numba_tma.gpt2.attend import VARIANTS, make_decode
from numba_tma.gpt2.kernels import ROWS, gpt2_append, make_embed, make_normalise_rows
from numba_tma.gpt2.linear import Shape, grid, make_linear
from numba_tma.kernels.gemm.epilogue import activation_reference

BF16 = np.dtype(ml_dtypes.bfloat16)
EPSILON = 1e-5
HALF = 2.0**-8  # half a unit in a bfloat16's last place, relative: its rounding error at most
pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.filterwarnings("error")]


def slow(*values):
    """A case that costs a compile of its own, of a kind that another one stands for."""
    return pytest.param(*values, marks=pytest.mark.full)


def normalised(x):
    x = x.astype(np.float64)
    x = x - x.mean(axis=1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPSILON)


@pytest.mark.parametrize(("columns", "residual"), [(64, "bfloat16"), slow(64, "float32"), slow(1600, "bfloat16")])
def test_normalise(rng, columns, residual):
    """With a mean a hundred times as large as what varies."""
    rows = 2 * ROWS + 3
    x = (100 + rng.standard_normal((rows, columns))).astype(BF16 if residual == "bfloat16" else residual)
    y = np.full((rows + 1, columns), 7, BF16)
    make_normalise_rows(columns, EPSILON, residual)[3](x, y, np.uint32(rows))
    expected = normalised(x)
    assert (np.abs(y[:rows] - expected) <= HALF * np.abs(expected) + 1e-4).all()
    assert (y[rows] == 7).all()


@pytest.mark.parametrize("at_length", [False, True])
def test_embed(rng, at_length):
    columns, vocabulary, positions, batch = 64, 211, 48, 2
    wte = rng.standard_normal((vocabulary, columns)).astype(BF16)
    wpe = rng.standard_normal((positions, columns)).astype(BF16)
    tokens = rng.integers(0, vocabulary, (batch, 30)).astype(np.int32)
    lengths = np.array([9, 14], np.int32)
    first, rows = (0, 1) if at_length else (3, 11)
    x, picked = np.zeros((batch * rows, columns), BF16), np.full(batch, -5, np.int32)
    arguments = (wte, wpe, x, picked, np.uint32(first), np.uint32(rows), np.int32(vocabulary))
    embed = make_embed(columns, "bfloat16", at_length)[(-(-rows // ROWS), batch), None]
    embed(tokens, lengths, *arguments)
    where = lengths[:, None] if at_length else np.arange(first, first + rows)[None].repeat(batch, 0)
    expected = wte[np.take_along_axis(tokens, where, 1)].astype(np.float32) + wpe[where].astype(np.float32)
    np.testing.assert_array_equal(x.reshape(expected.shape), expected.astype(BF16))
    assert picked.tolist() == ([-5, -5] if at_length else [9 - 3 - 1, 11 + 14 - 3 - 1])
    tokens[1, lengths[1]] = vocabulary
    embed(tokens, lengths, *arguments)
    assert np.isnan(x.astype(np.float32)).any(axis=1).sum() == int(at_length or first <= lengths[1] < first + rows)


def test_append(rng):
    best = np.array([5 << 32 | 0xFFFFFFFF - 210, 1 << 63 | 0xFFFFFFFF, 7 << 32 | 0xFFFFFFFF - 3], np.uint64)
    sequence, lengths = np.zeros((3, 9), np.int32), np.array([3, 5, 1], np.int32)
    gpt2_append[1](best, sequence, lengths, np.uint32(3), np.uint32(1))
    assert lengths.tolist() == [4, 6, 2]
    assert (sequence[0, 4], sequence[1, 6], sequence[2, 2]) == (210, 0, 3)
    assert np.count_nonzero(sequence) == 2 and not best.any()


@pytest.mark.parametrize(
    ("columns", "depth", "rows", "norm", "activation", "to"),
    [
        (256, 64, 3, True, "gelu", "out"),
        (192, 64, 8, True, "none", "cache"),
        (64, 256, 3, False, "none", "residual"),
        (211, 64, 3, True, "none", "chosen"),
        slow(51, 520, 20, False, "none", "out"),
        slow(1003, 64, 20, True, "none", "chosen"),
        slow(200, 768, 16, True, "none", "out"),
        slow(40, 3072, 8, False, "none", "residual"),
    ],
)
def test_linear(rng, monkeypatch, columns, depth, rows, norm, activation, to):
    """Rows have a mean as large as what varies. With `chosen` a block has several turns."""
    monkeypatch.setattr(linear, "_SMS", 2 if to == "chosen" else 132)
    shape = Shape.of_head(depth) if to == "chosen" else Shape.of(columns, depth)
    x = (1 + rng.standard_normal((rows + 3, depth))).astype(BF16)
    weight = (rng.standard_normal((columns, depth)) / np.sqrt(depth)).astype(BF16)
    sums, bias = weight.astype(np.float32).sum(axis=1), rng.standard_normal(columns).astype(np.float32)
    picked = rng.permutation(rows + 3)[:rows].astype(np.int32)
    lengths = rng.integers(0, 4, rows).astype(np.int32)
    best = np.zeros(rows, np.uint64)
    dtype = np.float32 if to == "chosen" else BF16
    before = rng.standard_normal((rows, 4, columns) if to == "cache" else (rows, columns)).astype(dtype)
    y = before.copy()
    options = {"norm": EPSILON} if norm else {}
    names = {"residual": "accumulate", "cache": "at_length", "chosen": "choose"}
    options |= {names[to]: True} if to in names else {}
    made = make_linear(shape, rows_16=rows > 8, activation=activation, **options)
    blocks = grid(shape, columns, rows)
    made[blocks, None](x, weight, sums, bias, y, picked, lengths, best, np.uint32(rows))
    taken = normalised(x[picked]) if norm else x[picked].astype(np.float64)
    expected = activation_reference(activation, taken @ weight.astype(np.float64).T + bias)
    found = y
    if to == "residual":
        expected = expected + before.astype(np.float64)
    elif to == "cache":
        found = y[np.arange(rows), lengths]
        y[np.arange(rows), lengths] = before[np.arange(rows), lengths]
        np.testing.assert_array_equal(y, before)
    tolerance = 1e-5 if to == "chosen" else HALF
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    if to == "chosen":
        assert (~best.astype(np.uint32)).tolist() == y.argmax(axis=1).tolist()
        assert blocks[0] * shape.columns < columns
    else:
        assert not best.any()


def test_order_of_numbers_and_the_first_of_equal_ones(simulated):
    """Through the head's kernel: one-hot rows give each column a number of its own."""
    values = np.array([-3.5, -1e-30, 0.0, 2.0, 2.0, -7.0], np.float32)
    weight = np.zeros((6, 64), BF16)
    weight[:, 0] = values
    x = np.zeros((3, 64), BF16)
    x[0, 0], x[1, 0], x[2, 0] = 1, -1, 0
    best, y, zeros = np.zeros(3, np.uint64), np.zeros((3, 128), np.float32), np.zeros(6, np.float32)
    made = make_linear(Shape.of_head(64), rows_16=False, choose=True, norm=EPSILON)
    each = np.arange(3, dtype=np.int32)
    made[1](x, weight, weight.astype(np.float32).sum(1), zeros, y, each, each, best, np.uint32(3))
    assert (~best.astype(np.uint32)).tolist() == [3, 5, 0]


def test_how_weights_are_cut():
    """Blocks for all SMs where there are columns for them; all of the 124M's fit into registers."""
    for columns, depth in ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50304, 768), (4800, 1600)):
        shape = Shape.of(columns, depth)
        assert shape.steps * shape.tiles <= 16
        assert shape.steps * shape.warps * 32 >= depth
        assert columns // shape.columns >= min(132, columns // 8)
        assert 32 * shape.warps <= 512


@pytest.mark.parametrize(
    ("head_dim", "variant"),
    [
        (32, {}),
        (32, {"warps": 4, "ahead": 2, "blocks": 2}),
        *(slow(head_dim, variant) for head_dim in (64, 128) for variant in VARIANTS),
    ],
)
def test_decode_attention(rng, head_dim, variant):
    batch, positions, heads = 3, 600, 2
    qkv = rng.standard_normal((batch, positions, 3, heads, head_dim)).astype(BF16)
    lengths = np.array([0, positions - 1, int(rng.integers(1, positions))], np.int32)
    for b, last in enumerate(lengths):
        qkv[b, last + 1 :] = np.nan  # what is not there yet
    out = np.zeros((batch, heads, head_dim), BF16)
    made = make_decode(head_dim, **variant)
    made[(heads * made.cluster[0], batch), None](qkv, lengths, out)
    for b, h in np.ndindex(batch, heads):
        q, k, v = qkv[b, : lengths[b] + 1, :, h].astype(np.float64).transpose(1, 0, 2)
        scores = k @ q[-1] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        expected = weights @ v / weights.sum()
        assert np.abs(out[b, h] - expected).max() <= HALF * np.abs(expected).max()
