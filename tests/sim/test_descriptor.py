"""The simulator's tensor map: encoding and back, every rule of the driver, tensormap.replace."""

import dataclasses

import numpy as np
import pytest

from numba_tma.sim import descriptor
from numba_tma.sim.descriptor import DataType, Descriptor, Fill, L2Promotion, Swizzle, TensorMapError

PLAIN = Descriptor(
    dtype=DataType.FLOAT16,
    address=0x10_0000_0100,
    sizes=(1000, 700, 9),
    strides=(2048, 2048 * 704),
    box=(64, 32, 2),
    element_strides=(1, 2, 1),
    swizzle=Swizzle.B128,
    l2_promotion=L2Promotion.B256,
    fill=Fill.NAN,
)


def random_descriptor(rng: np.random.Generator) -> Descriptor:
    dtype = DataType(int(rng.integers(13)))
    rank = int(rng.integers(1, 6))
    swizzle = Swizzle(int(rng.integers(4)))
    widest = swizzle.span if swizzle else min(256 * dtype.nbytes, 2048)
    row = 16 * int(rng.integers(1, widest // 16 + 1))
    return Descriptor(
        dtype=dtype,
        address=16 * int(rng.integers(2**40)),
        sizes=tuple(int(n) for n in rng.integers(1, 2**32, rank, endpoint=True)),
        strides=tuple(16 * int(n) for n in rng.integers(0, 2**36, rank - 1)),
        box=(row // dtype.nbytes, *(int(n) for n in rng.integers(1, 257, rank - 1))),
        element_strides=tuple(int(n) for n in rng.integers(1, 9, rank)),
        swizzle=swizzle,
        l2_promotion=L2Promotion(int(rng.integers(4))),
        fill=Fill(int(rng.integers(2))) if dtype.is_float else Fill.ZERO,
    )


def test_round_trip():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(300):
        desc = random_descriptor(rng)
        data = descriptor.encode(desc)
        assert len(data) == 128
        assert descriptor.decode(data) == desc


def test_encoding_is_as_documented():
    data = descriptor.encode(PLAIN)
    assert data[:8] == b"NUMBATMA"
    assert int.from_bytes(data[8:10], "little") == 1
    assert list(data[10:16]) == [6, 2, 0, 3, 3, 1]
    assert int.from_bytes(data[16:24], "little") == PLAIN.address
    assert np.frombuffer(data, "<u8", 5, 24).tolist() == [1000, 700, 9, 0, 0]
    assert np.frombuffer(data, "<u8", 4, 64).tolist() == [2048, 2048 * 704, 0, 0]
    assert np.frombuffer(data, "<u2", 5, 96).tolist() == [64, 32, 2, 0, 0]
    assert list(data[106:111]) == [1, 2, 1, 0, 0]
    assert not any(data[111:])


def test_element_strides_default_to_one():
    assert Descriptor(DataType.UINT8, 0, (64, 64), (64,), (16, 16)).element_strides == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": 13}, "element type 13"),
        ({"sizes": (8,) * 6, "strides": (128,) * 5, "box": (64,) * 6, "element_strides": (1,) * 6}, "rank 6"),
        ({"box": (64, 32)}, "rank 3 needs 2 strides, 3 box extents and 3 element strides; got 2, 2 and 3"),
        ({"strides": (2048,)}, "got 1, 3 and 3"),
        ({"interleave": 1}, "interleave 1 is not modelled"),
        ({"swizzle": 4}, "swizzle 4"),
        ({"l2_promotion": 4}, "L2 promotion 4"),
        ({"fill": 2}, "fill 2"),
        ({"dtype": DataType.UINT16}, "NaN fill is for floating-point elements, not UINT16"),
        ({"address": 0x1008}, "0x1008 is not a multiple of 16"),
        ({"sizes": (1000, 0, 9)}, "size 0 of dimension 1"),
        ({"sizes": (2**32 + 1, 700, 9)}, "of dimension 0 is not in 1 to 2\\*\\*32"),
        ({"strides": (2008, 2048 * 704)}, "stride 2008 B of dimension 1 is not a multiple of 16 B"),
        ({"strides": (2048, 2**40)}, "of dimension 2 .* below 2\\*\\*40"),
        ({"box": (64, 257, 2)}, "box extent 257 of dimension 1"),
        ({"box": (64, 32, 0)}, "box extent 0 of dimension 2"),
        ({"element_strides": (1, 9, 1)}, "element stride 9 of dimension 1"),
        ({"element_strides": (1, 0, 1)}, "element stride 0 of dimension 1"),
        ({"box": (12, 32, 2)}, "12 elements = 24 B wide, not a multiple of 16 B"),
        ({"box": (72, 32, 2)}, "144 B wide, more than the 128 B of its swizzle"),
        ({"swizzle": Swizzle.B32, "box": (48, 8, 1)}, "96 B wide, more than the 32 B of its swizzle"),
    ],
)
def test_rules(changes, message):
    desc = dataclasses.replace(PLAIN, **changes)
    with pytest.raises(TensorMapError, match=message):
        descriptor.encode(desc)


def test_decoding_what_is_no_tensor_map():
    with pytest.raises(TensorMapError, match="no tensor map of the simulator"):
        descriptor.decode(bytes(range(128)))
    with pytest.raises(TensorMapError, match="128 bytes, not 64"):
        descriptor.decode(descriptor.encode(PLAIN)[:64])
    newer = bytearray(descriptor.encode(PLAIN))
    newer[8] = 2
    with pytest.raises(TensorMapError, match="layout version 2"):
        descriptor.decode(bytes(newer))


def test_decoding_checks_the_rules():
    data = descriptor.replace(descriptor.encode(PLAIN), "global_stride", 0, 2040)
    with pytest.raises(TensorMapError, match="stride 2040 B of dimension 1"):
        descriptor.decode(data)


@pytest.mark.parametrize(
    ("field", "ordinal", "value", "expected"),
    [
        ("global_address", None, 0xABCD00, {"address": 0xABCD00}),
        ("box_dim", 1, 7, {"box": (64, 7, 2)}),
        ("global_dim", 2, 2**32 - 1, {"sizes": (1000, 700, 2**32 - 1)}),
        ("global_stride", 0, 4096, {"strides": (4096, 2048 * 704)}),
        ("global_stride", 1, 2**30, {"strides": (2048, 2**30)}),
        ("element_stride", 2, 8, {"element_strides": (1, 2, 8)}),
        ("swizzle_mode", None, 0, {"swizzle": Swizzle.NONE}),
        ("fill_mode", None, 0, {"fill": Fill.ZERO}),
        ("interleave_layout", None, 0, {}),
        # The rank is coded as one less; the dimensions that drop out are forgotten.
        (
            "rank",
            None,
            1,
            {"sizes": (1000, 700), "strides": (2048,), "box": (64, 32), "element_strides": (1, 2)},
        ),
    ],
)
def test_replace(field, ordinal, value, expected):
    data = descriptor.replace(descriptor.encode(PLAIN), field, ordinal, value)
    assert descriptor.decode(data) == dataclasses.replace(PLAIN, **expected)


# PTX numbers the types otherwise than the driver: 8 is f32.ftz and not f64, and so on.
@pytest.mark.parametrize(
    ("code", "dtype"),
    [(0, "UINT8"), (1, "UINT16"), (2, "UINT32"), (3, "INT32"), (4, "UINT64"), (5, "INT64"), (6, "FLOAT16")]
    + [(7, "FLOAT32"), (8, "FLOAT32_FTZ"), (9, "FLOAT64"), (10, "BFLOAT16"), (11, "TFLOAT32")]
    + [(12, "TFLOAT32_FTZ")],
)
def test_replace_element_type(code, dtype):
    whole = dataclasses.replace(PLAIN, fill=Fill.ZERO, swizzle=Swizzle.NONE)
    data = descriptor.replace(descriptor.encode(whole), "elemtype", None, code)
    assert descriptor.decode(data).dtype == DataType[dtype]


def test_a_map_built_from_zero_bytes():
    data = bytes(128)
    for field, ordinal, value in [
        ("global_address", None, PLAIN.address),
        ("rank", None, 1),
        ("box_dim", 0, 64),
        ("box_dim", 1, 32),
        ("global_dim", 0, 1000),
        ("global_dim", 1, 700),
        ("global_stride", 0, 2048),
        ("element_stride", 0, 1),
        ("element_stride", 1, 1),
        ("elemtype", None, 10),
        ("interleave_layout", None, 0),
        ("swizzle_mode", None, 3),
        ("fill_mode", None, 0),
    ]:
        data = descriptor.replace(data, field, ordinal, value)
    assert descriptor.decode(data) == Descriptor(
        DataType.BFLOAT16, PLAIN.address, (1000, 700), (2048,), (64, 32), swizzle=Swizzle.B128
    )


@pytest.mark.parametrize(
    ("field", "ordinal", "value", "message"),
    [
        ("box", None, 1, "no field .box; there are global_address"),
        ("box_dim", 5, 1, "ordinal 5 is not in 0 to 4"),
        ("box_dim", None, 1, "ordinal None"),
        ("global_stride", 4, 16, "ordinal 4 is not in 0 to 3"),
        ("rank", 0, 1, "takes no ordinal, got 0"),
        ("rank", None, 5, "value 5 is not in 0 to 4"),
        ("elemtype", None, 13, "value 13 is not in 0 to 12"),
        ("swizzle_mode", None, 4, "value 4 is not in 0 to 3"),
        ("box_dim", 0, 257, "value 257"),
    ],
)
def test_replace_refuses(field, ordinal, value, message):
    with pytest.raises(TensorMapError, match=message):
        descriptor.replace(descriptor.encode(PLAIN), field, ordinal, value)


def test_replace_needs_a_tensor_map():
    with pytest.raises(TensorMapError, match="no tensor map"):
        descriptor.replace(b"\xff" * 128, "rank", None, 1)
