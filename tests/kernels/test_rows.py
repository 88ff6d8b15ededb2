"""softmax and rmsnorm: hard rows, rows that start anywhere, splits over clusters, and wrong arguments."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_tma import driver, dtypes, launch, pitched, sim, use_backend
from numba_tma.device_array import DeviceArray
from numba_tma.kernels.rows import binding, rmsnorm, row, softmax
from numba_tma.kernels.rows.operands import operands
from numba_tma.measurements import rows as measurement

VARIANTS = [variant.name for variant in softmax.PROBLEM.variants]


def softmaxed(x, variant=None, out=None, **options):
    out = np.full(x.shape, np.nan, x.dtype) if out is None else out
    softmax.softmax(x, out, variant=variant, **options)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_hard_rows(variant, in_simulator):
    x = np.zeros((8, 64), np.float32)
    x[0] = 1e30 * np.arange(64)  # the largest wins, far away
    x[1] = -np.finfo(np.float32).max  # uniform, though the exponents' product with log2(e) overflows
    x[2, 3:] = -np.inf  # three elements
    x[3] = -np.inf
    x[4, 5] = np.nan
    x[5, 6] = np.inf
    x[6] = 88.0 + np.arange(64)  # e^88 alone nearly overflows
    out = softmaxed(x, variant)
    np.testing.assert_allclose(out[0], np.eye(64)[63], atol=1e-30)
    np.testing.assert_allclose(out[1], 1 / 64, rtol=1e-6)
    np.testing.assert_allclose(out[2], np.r_[np.full(3, 1 / 3), np.zeros(61)], rtol=1e-6)
    assert np.isnan(out[3:6]).all()
    np.testing.assert_allclose(out[6:].astype(np.float64), softmax.reference(x[6:]), rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_matrix_of_nothing_and_of_one(variant, in_simulator):
    for shape in ((0, 8), (8, 0), (0, 0)):
        assert softmaxed(np.zeros(shape, np.float32), variant).shape == shape
    np.testing.assert_array_equal(softmaxed(pitched((1, 1), np.float32), variant), [[1]])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_that_start_anywhere(dtype, rng, in_simulator):
    whole = rng.standard_normal((6, 2 * 331), np.float32).astype(dtype)
    tolerance = softmax.TOLERANCES[np.dtype(dtype).name]
    for x in (np.ascontiguousarray(whole[:, :331]), whole[:, ::2]):
        expected = softmax.reference(x)
        got = softmaxed(x).astype(np.float64)
        assert np.abs(got - expected).max() <= tolerance * expected.max()
        weight = rng.standard_normal(x.shape[1]).astype(dtype)
        out = np.full(x.shape, np.nan, dtype)
        rmsnorm.rmsnorm(x, weight, out, epsilon=0.5)
        expected = rmsnorm.reference(x, weight, 0.5)
        assert np.abs(out.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_place(variant, rng, in_simulator):
    x = rng.standard_normal((3, 260), np.float32)
    expected = softmax.reference(x)
    softmaxed(x, variant, out=x)
    np.testing.assert_allclose(x, expected, rtol=1e-5)


@pytest.mark.parametrize(("cluster", "columns"), [(16, 5), (16, 1000)])
def test_clusters_with_blocks_that_have_nothing(cluster, columns, rng, in_simulator):
    x = pitched((3, columns), np.float32)
    x[...] = rng.standard_normal(x.shape, np.float32)
    out = pitched(x.shape, np.float32)
    softmaxed(x, "cluster", out, parts=cluster, threads=32)
    np.testing.assert_allclose(out, softmax.reference(x), rtol=1e-5)
    softmaxed(x, "ring", out, cluster=cluster, threads=32, clusters=2, stages=2)
    np.testing.assert_allclose(out, softmax.reference(x), rtol=1e-5)


@pytest.mark.parametrize("variant", ["online", "registers", "bulk", "cluster", "grid"])
def test_cache_hints_change_no_result(variant, rng, in_simulator):
    x = rng.standard_normal((3, 264), np.float32)
    np.testing.assert_allclose(softmaxed(x, variant, keep=True), softmax.reference(x), rtol=1e-5)


def test_a_row_taken_twice_from_shared_memory(rng, in_simulator):
    x, out = rng.standard_normal((2, 1028), np.float32), np.empty((2, 1028), np.float32)
    kernel = row.make_row("softmax", "float32", 32, 2, held=False, part_bytes=2064, cluster=2)
    kernel[4](x, out)
    np.testing.assert_allclose(out, softmax.reference(x), rtol=1e-5)


@pytest.mark.parametrize(("cluster", "rows", "ahead", "columns"), [(1, 2, 2, 1025), (2, 2, 1, 1030), (4, 1, 3, 2047)])
def test_rows_at_once_and_weights_ahead(cluster, rows, ahead, columns, rng):
    # Three pieces of a part or more, elements behind the last vector, and rows that are no multiple of those at once.
    x, out = pitched((3, columns), ml_dtypes.bfloat16), pitched((3, columns), ml_dtypes.bfloat16)
    x[...] = rng.standard_normal(x.shape, np.float32)
    weight = rng.standard_normal(columns).astype(x.dtype)
    part_bytes = -(-columns // (8 * cluster)) * 16
    options = {"cluster": cluster, "rows": rows, "ahead": ahead, "held": False, "part_bytes": part_bytes}
    expected = rmsnorm.reference(x, weight)
    kernel = row.make_row("rmsnorm", "bfloat16", 32, 1, **options)
    for schedule in sim.schedules(random=1):
        out[...] = np.nan
        with use_backend("sim", **schedule):
            report = kernel[-(-3 // rows) * cluster](
                x, weight, out, np.float32(1 / columns), np.float32(rmsnorm.EPSILON)
            )
        assert not report.hazards, sim.named(schedule)
        assert np.abs(out.astype(np.float64) - expected).max() <= 5e-3 * np.abs(expected).max(), sim.named(schedule)


# What is chosen, at lengths that end behind the last whole vector, with an odd number of rows.
CHOSEN = [
    ("softmax", "float32", 4097, "registers", {"threads": 512}),
    ("softmax", "float32", 16383, "registers", {"min_blocks": 2}),
    ("softmax", "bfloat16", 65533, "cluster", {}),
    ("rmsnorm", "float32", 32767, "cluster", {"parts": 4, "threads": 256, "ahead": 2, "min_blocks": 4}),
    ("rmsnorm", "float32", 131071, "cluster", {"rows": 2, "ahead": 4, "threads": 256}),
    ("rmsnorm", "bfloat16", 8191, "registers", {"threads": 256, "min_blocks": 4}),
    ("rmsnorm", "bfloat16", 16379, "cluster", {}),
    ("rmsnorm", "float16", 33003, "cluster", {"rows": 2, "parts": 8, "threads": 256, "ahead": 2, "min_blocks": 4}),
    ("rmsnorm", "bfloat16", 65543, "cluster", {"rows": 2, "ahead": 4, "threads": 256}),
    ("rmsnorm", "float32", 260_001, "cluster", {}),
    ("rmsnorm", "float16", 300_001, "cluster", {"ahead": 3, "threads": 256}),
]


@pytest.mark.parametrize(("operation", "dtype", "columns", "variant", "options"), CHOSEN)
def test_what_is_chosen(operation, dtype, columns, variant, options, rng):
    problem = {"softmax": softmax, "rmsnorm": rmsnorm}[operation]
    kind = dtypes.lookup(dtype).numpy
    given = {"x": pitched((3, columns), kind), "out": pitched((3, columns), kind)}
    given["x"][...] = rng.standard_normal((3, columns), np.float32)
    epsilon, inputs = {}, [given["x"]]
    if operation == "rmsnorm":
        given["weight"], epsilon = rng.standard_normal(columns).astype(kind), {"epsilon": rmsnorm.EPSILON}
        inputs.append(given["weight"])
    assert binding.choose(operands(given)) == (variant, {**options, "keep": True})
    expected = problem.reference(*inputs)
    with use_backend("sim"):
        report = binding.bind(operation, variant)(given, **options, keep=True, **epsilon)()
    assert not report.hazards
    error = np.abs(given["out"].astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error <= problem.TOLERANCES[dtype]


@pytest.mark.parametrize(("operation", "dtype", "columns", "variant", "options"), CHOSEN)
def test_what_is_chosen_keeps_all_in_registers(operation, dtype, columns, variant, options):
    kind = dtypes.lookup(dtype).numpy
    given = {"x": pitched((3, columns), kind), "out": pitched((3, columns), kind)}
    if operation == "rmsnorm":
        given["weight"] = np.zeros(columns, kind)
    with launch.recording() as recorded:
        binding.bind(operation, variant)(given, **options, keep=True)()
    (made,) = recorded.launches
    assert made.compiled.resources.spill_store_bytes == 0


def test_two_rows_at_once_of_a_softmax(rng, in_simulator):
    x, out = rng.standard_normal((3, 516), np.float32), np.empty((3, 516), np.float32)
    softmaxed(x, "cluster", out, rows=2, parts=2, threads=32, vectors=1)
    np.testing.assert_allclose(out, softmax.reference(x), rtol=1e-5)


def test_what_several_rows_and_pieces_ahead_need():
    with pytest.raises(ValueError, match="rows=2: several at once are taken from shared memory twice"):
        row.make_row("softmax", "float32", rows=2)
    with pytest.raises(ValueError, match="ahead=2: a part that is held is one piece"):
        row.make_row("softmax", "float32", ahead=2)


def test_splits_fit_and_say_where_they_do_not():
    for vectors in (1, 31, 32, 33, 1000, 4096, 4097, 65536):
        itemsize = (2, 4)[vectors % 2]
        cluster, threads, passes = binding.split(vectors, itemsize)
        assert threads % 32 == 0 and threads <= 1024
        assert passes * binding.VECTOR <= binding.HELD_ELEMENTS * itemsize
        assert cluster * threads * passes >= vectors
        assert passes * threads * binding.VECTOR <= binding.PART_BYTES
    with pytest.raises(ValueError, match=r"16 are the most: take a larger cluster \(up to 16\), or variant 'online'"):
        binding.split(1 << 20, 4)


def test_more_parts_than_there_is_room_for(in_simulator):
    x = np.zeros((1, 133 * 16), np.float32)
    with pytest.raises(ValueError, match=r"133 parts: the GPU holds 132 such blocks at once.*take variant 'online'"):
        softmax.softmax(x, x, variant="grid", parts=133)


def test_wrong_arguments_are_named(in_simulator):
    x = np.zeros((4, 64), np.float32)
    for arguments, options, error, message in (
        (([1.0], x), {}, TypeError, "x is a list"),
        ((x, x[:2]), {}, ValueError, "softmax: out is float32"),
        ((x.astype(np.float64), x), {}, ValueError, "x is float64; float32, float16, bfloat16 are what there is"),
        ((x[0], x[0]), {}, ValueError, r"x has the shape \(64,\); a matrix"),
        ((x, x), {"variant": "fast"}, KeyError, "has no variant 'fast'"),
        ((x, x), {"variant": "bulk", "cluster": 2}, TypeError, "has no option 'cluster'; it has threads, min_blocks"),
        ((x[:, 1:], x[:, 1:].copy()), {"variant": "bulk"}, ValueError, "must be contiguous and start on a multiple"),
    ):
        with pytest.raises(error, match=message):
            softmax.softmax(*arguments, **options)
    with pytest.raises(ValueError, match=r"rmsnorm: weight is float32 \(63,\); float32 \(64,\) expected"):
        rmsnorm.rmsnorm(x, x[0, 1:], x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", measurement.DTYPES)
@pytest.mark.parametrize("operation", measurement.OPERATIONS)
def test_all_that_is_measured_is_right(operation, dtype, rng):
    # 37 rows are no multiple of those that a block takes at once, and too few for each SM to have one.
    kind, some = dtypes.lookup(dtype).numpy, [0, 17, 36]
    problem = {"softmax": softmax, "rmsnorm": rmsnorm}[operation]
    epsilon = measurement.epsilon_of(operation)
    for columns in measurement.ROW_LENGTHS:
        numbers = rng.standard_normal(37 * columns, np.float32).astype(kind)
        flat, target = DeviceArray(numbers), DeviceArray.empty(numbers.shape, kind)
        given = measurement.arrays_of(operation, columns, flat, target)
        inputs = [numbers.reshape(37, columns)[some]] + [numbers[:columns]] * (operation == "rmsnorm")
        expected = problem.reference(*inputs)
        for name, (variant, options) in measurement.candidates(given).items():
            target.poison()
            with use_backend("gpu"):
                binding.bind(operation, variant)(given, **options, **epsilon)()
            found = target.to_host().reshape(37, columns)
            assert np.isfinite(found).all(), (columns, name)
            error = np.abs(found[some].astype(np.float64) - expected).max() / np.abs(expected).max()
            assert error <= problem.TOLERANCES[dtype], (columns, name)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows, columns = 32769, 65536
    free, _ = driver.memory()
    if free < 5 * rows * columns:
        pytest.skip(f"{free >> 30} GiB of free memory are too few")
    x, out = DeviceArray.empty((rows, columns), np.float16), DeviceArray.empty((rows, columns), np.float16)
    driver.check(driver._driver().cuMemsetD16(x.__cuda_array_interface__["data"][0], 0x3C00, rows * columns), "memset")
    with use_backend("gpu"):
        for variant in ("online", "cluster", "ring"):
            out.poison()
            softmax.softmax(x, out, variant=variant)
            last = out.__cuda_array_interface__["data"][0] + 2 * (rows - 1) * columns
            found = driver.copy_to_host(last, 2 * columns).view(np.float16)
            np.testing.assert_array_equal(found, np.float16(1 / columns))
