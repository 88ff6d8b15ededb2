"""Tensor maps: what they describe, every rule just kept and just broken, encodings and the Numba type."""

import math
import random
import re
import warnings

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, types
from numba.core import errors
from numba.cuda.core import errors as cuda_errors

from numba_tma import StoreOverrunWarning, dtypes, pitched
from numba_tma.shared import SWIZZLES, Shared, Tiles
from numba_tma.sim import descriptor
from numba_tma.tensor_map import TensorMap, TensorMapError, TensorMapType

TypingError = (errors.TypingError, cuda_errors.TypingError)


class Device:
    """An array in GPU memory as far as its description goes; nothing here follows the pointer."""

    def __init__(self, shape, typestr="<f4", strides=None, pointer=1 << 20, dtype=None):
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": typestr,
            "strides": strides,
            "data": (pointer, False),
            "version": 3,
        }
        if dtype is not None:
            self.dtype = dtype


def refused(rule, *arguments, match=None, **options):
    with pytest.raises(TensorMapError, match=match) as error:
        TensorMap(*arguments, **options)
    assert error.value.rule == rule
    return str(error.value)


# What a map describes


def test_the_spec_is_in_hardware_order():
    k = np.zeros((6, 40, 72), np.float16)
    made = TensorMap(k, (2, 8, 64), swizzle="128B", element_strides=(1, 2, 1), l2_promotion="64B", fill="nan")
    spec = made.spec
    assert (spec.dtype, spec.rank) == (6, 3)
    assert spec.sizes == (72, 40, 6)
    assert spec.strides == (144, 5760)
    assert spec.box == (64, 8, 2)
    assert spec.element_strides == (1, 2, 1)
    assert (spec.interleave, spec.swizzle, spec.l2_promotion, spec.fill) == (0, 3, 1, 1)
    assert made.tile_shape == (2, 4, 64)
    assert made.box_bytes == 2 * 4 * 64 * 2
    assert made.array is k
    for piece in ("float16", "6 × 40 × 72", "(2, 8, 64)", "element_strides=(1, 2, 1)", "128B", "1024 B"):
        assert piece in repr(made)


def test_the_drivers_enumerations():
    driver = pytest.importorskip("cuda.bindings.driver")
    a = np.zeros((32, 32), np.float32)
    for name, code in (("NONE", "none"), ("32B", "32B"), ("64B", "64B"), ("128B", "128B")):
        value = int(getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{name}"))
        assert TensorMap(a, (8, 8), swizzle=code).spec.swizzle == value
    for name, code in (("NONE", "none"), ("L2_64B", "64B"), ("L2_128B", "128B"), ("L2_256B", "256B")):
        value = int(getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{name}"))
        assert TensorMap(a, (8, 8), l2_promotion=code).spec.l2_promotion == value
    fills = driver.CUtensorMapFloatOOBfill
    assert TensorMap(a, (8, 8)).spec.fill == int(fills.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    nan = int(fills.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)
    assert TensorMap(a, (8, 8), fill="nan").spec.fill == nan
    assert TensorMap(a, (8, 8)).spec.interleave == int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE)


@pytest.mark.parametrize("entry", dtypes.TABLE, ids=str)
def test_every_element_type(entry):
    made = TensorMap(np.zeros((8, 32), entry.numpy), (4, 16), dtype=entry)
    assert made.spec.dtype == entry.tensor_map_code
    assert made.box_bytes == 64 * entry.size


def test_device_arrays():
    made = TensorMap(Device((128, 64)), (64, 32))
    assert made.view.pointer == 1 << 20 and not made.view.host
    assert made.spec.sizes == (64, 128) and made.spec.strides == (256,)
    pitched = TensorMap(Device((128, 60), strides=(256, 4)), (64, 32), store=False)
    assert pitched.spec.sizes == (60, 128) and pitched.spec.strides == (256,)
    # CuPy's bfloat16 travels as two opaque bytes and keeps its own dtype beside them.
    as_bytes = Device((8, 64), typestr="<V2", dtype=np.dtype(ml_dtypes.bfloat16))
    assert TensorMap(as_bytes, (8, 64)).element is dtypes.bfloat16


def test_dlpack_arrays():
    class OnlyDlpack:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    a = np.zeros((16, 32), np.float32)
    made = TensorMap(OnlyDlpack(a), (8, 32))
    assert made.view.pointer == a.ctypes.data and made.spec.sizes == (32, 16)


def test_another_element_type_of_the_same_size():
    a = np.zeros((8, 32), np.float32)
    assert TensorMap(a, (8, 32), dtype="tfloat32").spec.dtype == 11
    assert TensorMap(a.view(np.uint32), (8, 32), dtype="float32_ftz").spec.dtype == 10
    refused("element type", a, (8, 32), dtype="float16", match="float16 has 2 B.* float32 has 4 B.*same size")
    with pytest.raises(TypeError, match="choose one of uint8"):
        TensorMap(np.zeros((8, 32), np.complex64), (8, 32))
    with pytest.raises(TypeError, match="list.*NumPy array"):
        TensorMap([[1.0]], (1, 1))


def test_the_box_of_a_plans_tiles():
    smem = Shared(k=Tiles(2, (8, 64), "float16", swizzle="128B"))
    made = TensorMap(np.zeros((16, 128), np.float16), smem.k)
    assert made.box == (8, 64) and made.swizzle == "128B" and made.box_bytes == smem.k.tile_bytes
    assert TensorMap(np.zeros((3, 16, 128), np.float16), smem.k).box == (1, 8, 64)
    assert TensorMap(np.zeros((16, 128), np.float16), smem.k, swizzle="128B").swizzle == "128B"
    refused("swizzle", np.zeros((16, 128), np.float16), smem.k, swizzle="64B", match="leave it out")
    refused("element type", np.zeros((16, 128), np.int16), smem.k, match="int16.*same type")
    refused("box rank", np.zeros(128, np.float16), smem.k, match=r"\(8, 64\) has 2 dimensions, the tensor 1")


# Rules: (rule, just legal, just illegal, what the message must say)

BOX = (8, 32)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def half(*shape):
    return zeros(*shape, dtype=np.float16)


def strided(shape, *strides):
    return Device(shape, strides=strides)


def at(pointer):
    return Device((8, 32), pointer=pointer)


def map_of(array, box=BOX, **options):
    """Arguments of TensorMap."""
    return array, box, options


RULES = [
    (
        "rank",
        map_of(zeros(2, 2, 2, 2, 4), (1, 1, 1, 1, 4)),
        map_of(zeros(2, 2, 2, 2, 2, 4), (1, 1, 1, 1, 1, 4)),
        "6 dimensions.*1 to 5",
    ),
    ("rank", map_of(zeros(4), (4,)), map_of(zeros(), ()), "0 dimensions"),
    (
        "base address",
        map_of(at(0x1010)),
        map_of(at(0x1018)),
        "0x1018 is 8 B past a multiple of 16 B.*coordinates",
    ),
    ("base address", map_of(at(0x10)), map_of(at(0)), "null"),
    ("tensor size", map_of(zeros(1, 32)), map_of(zeros(0, 32)), "dimension 0 has 0 elements.*empty"),
    (
        "tensor size",
        map_of(Device((1 << 32,), "|u1"), (16,)),
        map_of(Device(((1 << 32) + 1,), "|u1"), (16,)),
        r"4294967297 elements.*1 to 2\^32",
    ),
    ("stride sign", map_of(zeros(8, 32)), map_of(zeros(8, 32)[::-1]), "backwards.*-128 B.*unflipped"),
    (
        "stride alignment",
        map_of(zeros(128, 1736)),
        map_of(zeros(128, 1733)),
        "row stride 6932 B is not a multiple of 16 B; pad the last dimension from 1733 to 1736",
    ),
    ("stride alignment", map_of(half(64, 40)), map_of(half(64, 36)), "72 B.*from 36 to 40"),
    (
        "stride alignment",
        map_of(strided((4, 8, 32), 1040, 128, 4), (1, 8, 32)),
        map_of(strided((4, 8, 32), 1032, 128, 4), (1, 8, 32)),
        "stride of dimension 0, 1032 B",
    ),
    (
        "stride limit",
        map_of(strided((2, 32), (1 << 40) - 16, 4)),
        map_of(strided((2, 32), 1 << 40, 4)),
        r"1,099,511,627,776 B.*below 2\^40",
    ),
    (
        "overlapping strides",
        map_of(strided((8, 32), 128, 4)),
        map_of(strided((8, 32), 112, 4)),
        "dimension 0 has a stride of 112 B, less than the 128 B.*overlap=True",
    ),
    (
        "overlapping strides",
        map_of(strided((4, 8, 32), 1024, 128, 4), (1, 8, 32)),
        map_of(strided((4, 8, 32), 1008, 128, 4), (1, 8, 32)),
        "dimension 0 has a stride of 1008 B",
    ),
    (
        "overlapping strides",
        map_of(np.broadcast_to(zeros(1, 32), (1, 32))),
        map_of(np.broadcast_to(zeros(1, 32), (8, 32))),
        "stride of 0 B",
    ),
    (
        "inner stride",
        map_of(zeros(32, 64)[:, ::1]),
        map_of(zeros(32, 64)[:, ::2]),
        "8 B apart instead of 4 B.*row-major",
    ),
    ("inner stride", map_of(zeros(32, 32)), map_of(zeros(32, 32).T), "column-major: transpose=True"),
    ("box rank", map_of(zeros(32, 32)), map_of(zeros(32, 32), (1, 8, 32)), "3 dimensions, the tensor 2"),
    ("box extent", map_of(zeros(960), (256,)), map_of(zeros(960), (512,)), "512 along dimension 0.*1 to 256"),
    ("box extent", map_of(zeros(512, 8), (256, 4)), map_of(zeros(512, 8), (257, 4)), "257 along dimension 0"),
    ("box extent", map_of(zeros(32, 32), (1, 4)), map_of(zeros(32, 32), (0, 4)), "0 along dimension 0"),
    (
        "inner box bytes",
        map_of(zeros(32, 32), (4, 8)),
        map_of(zeros(32, 32), (4, 6)),
        "6 × float32 = 24 B are not a multiple of 16 B; take 8",
    ),
    (
        "inner box and swizzle",
        map_of(half(8, 64), (8, 16), swizzle="32B"),
        map_of(half(8, 64), (8, 48), swizzle="32B"),
        "48 × float16 = 96 B do not fit.*at most 16 elements, or swizzle='128B'",
    ),
    (
        "inner box and swizzle",
        map_of(half(8, 64), (8, 32), swizzle="64B"),
        map_of(half(8, 64), (8, 40), swizzle="64B"),
        "80 B",
    ),
    (
        "inner box and swizzle",
        map_of(half(8, 128), (8, 64), swizzle="128B"),
        map_of(half(8, 128), (8, 72), swizzle="128B"),
        "144 B.*or no swizzle",
    ),
    (
        "box size",
        map_of(zeros(256, 256), (227, 256)),
        map_of(zeros(256, 256), (228, 256)),
        "233,472 B.*232,448 B.*smaller",
    ),
    (
        "element strides",
        map_of(zeros(32, 32), element_strides=(8, 1)),
        map_of(zeros(32, 32), element_strides=(9, 1)),
        "9 along dimension 0.*1 to 8",
    ),
    (
        "element strides",
        map_of(zeros(32, 32), element_strides=(1, 1)),
        map_of(zeros(32, 32), element_strides=(0, 1)),
        "0 along dimension 0",
    ),
    (
        "element strides",
        map_of(zeros(32, 32), element_strides=[2, 1]),
        map_of(zeros(32, 32), element_strides=(2,)),
        "1 entries, the tensor 2 dimensions",
    ),
    (
        "inner element stride",
        map_of(zeros(32, 32), element_strides=(2, 1)),
        map_of(zeros(32, 32), element_strides=(1, 2)),
        "2 along the last dimension.*ignores",
    ),
    (
        "NaN fill",
        map_of(zeros(32, 32), fill="nan"),
        map_of(zeros(32, 32, dtype=np.int32), fill="nan"),
        "int32.*fill='zero'",
    ),
    (
        "NaN fill",
        map_of(zeros(32, 32, dtype=ml_dtypes.bfloat16), fill="nan"),
        map_of(zeros(32, 32, dtype=ml_dtypes.float8_e5m2), fill="nan"),
        "float8_e5m2",
    ),
    (
        "interleave",
        map_of(zeros(32, 32), interleave="none"),
        map_of(zeros(32, 32), interleave="16B"),
        "'16B' is not supported.*'none'",
    ),
    (
        "swizzle",
        map_of(zeros(32, 32), swizzle="128B"),
        map_of(zeros(32, 32), swizzle="256B"),
        "choose one of 'none', '32B', '64B', '128B'",
    ),
    (
        "L2 promotion",
        map_of(zeros(32, 32), l2_promotion="none"),
        map_of(zeros(32, 32), l2_promotion="512B"),
        "choose one of 'none', '64B'",
    ),
    (
        "fill",
        map_of(zeros(32, 32), fill="zero"),
        map_of(zeros(32, 32), fill=0),
        "choose one of 'zero', 'nan'",
    ),
    ("box", map_of(zeros(32, 32), [8, np.int64(32)]), map_of(zeros(32, 32), (8, 32.0)), "not a sequence of"),
]


@pytest.mark.parametrize(
    ("rule", "legal", "illegal", "message"),
    RULES,
    ids=[f"{number}-{case[0].replace(' ', '-')}" for number, case in enumerate(RULES)],
)
def test_rule(rule, legal, illegal, message):
    array, box, options = legal
    assert len(TensorMap(array, box, **options).encode_sim(1 << 20)) == 128
    array, box, options = illegal
    refused(rule, array, box, match=message, **options)


def test_a_dimension_of_one_element_may_have_any_stride():
    # 1733 float32 in one row: the row stride of 6932 B is never used.
    made = TensorMap(np.zeros((1, 1733), np.float32), (8, 32), store=False)
    assert made.spec.strides[0] % 16 == 0 and made.spec.strides[0] >= 6932
    flipped = TensorMap(Device((4, 1, 32), strides=(128, -7, 4)), (1, 1, 32))
    assert all(s % 16 == 0 and s > 0 for s in flipped.spec.strides)
    largest = TensorMap(Device((1, 2, 32), strides=(5, (1 << 40) - 16, 4)), (1, 1, 32))
    assert largest.spec.strides[1] < 1 << 40


def test_permuted_dimensions_are_as_good():
    # Batch, heads, sequence, depth seen from a batch, sequence, heads, depth tensor, as attention kernels do.
    a = np.zeros((2, 96, 4, 64), np.float16)
    made = TensorMap(a.transpose(0, 2, 1, 3), (1, 1, 64, 64), swizzle="128B")
    assert made.spec.sizes == (64, 96, 4, 2)
    assert made.spec.strides == (4 * 64 * 2, 64 * 2, 96 * 4 * 64 * 2)


def test_column_major_only_when_asked_for():
    a = np.zeros((40, 24), np.float32, order="F")
    made = TensorMap(a, (8, 32), transpose=True)
    assert made.view.shape == (24, 40) and made.spec.sizes == (40, 24) and made.spec.strides == (160,)
    row_major = np.zeros((40, 24), np.float32)
    refused(
        "inner stride",
        row_major,
        (8, 8),
        transpose=True,
        match="row-major as it is: leave transpose=True out",
    )


def test_overlap_when_asked_for():
    row = np.arange(64, dtype=np.float32)
    broadcast = TensorMap(np.broadcast_to(row, (8, 64)), (8, 64), overlap=True)
    assert broadcast.spec.strides == (0,)
    windows = np.lib.stride_tricks.as_strided(row, (13, 16), (16, 4))
    assert TensorMap(windows, (4, 16), overlap=True).spec.strides == (16,)
    refused("stride alignment", np.lib.stride_tricks.as_strided(row, (8, 16), (4, 4)), (4, 16), overlap=True)


def test_stores_past_the_row_are_warned_of():
    sliced = np.zeros((64, 512), np.int8)[:, :466]
    with pytest.warns(StoreOverrunWarning, match=r"466 × int8 = 466 B .*bytes 466 to 479 of each row.*store='padding'"):
        TensorMap(sliced, (16, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TensorMap(sliced, (16, 64), store=False)
        TensorMap(sliced, (16, 64), store="padding")
        TensorMap(pitched((3, 5, 21), np.float32), (1, 5, 16), store="padding")
        TensorMap(np.zeros((64, 512), np.int8), (16, 64), store="padding")
        TensorMap(np.zeros((64, 512), np.int8)[:, :464], (16, 64))
        readonly = sliced.view()
        readonly.flags.writeable = False
        TensorMap(readonly, (16, 64))


def test_padding_that_is_not_there(rng):
    """Between rows it always is; behind the last one it must be the array's."""
    columns = 4 * int(rng.integers(1, 50)) + int(rng.integers(1, 4))
    with pytest.raises(
        TensorMapError, match=r"store padding: the last row's padding.*past the array's memory.*pitched"
    ):
        TensorMap(np.zeros(columns, np.float32), (16,), store="padding")
    bare = np.zeros(3 * 512 + 466, np.int8)
    refused("store padding", np.ndarray((4, 466), np.int8, bare, strides=(512, 1)), (4, 64), store="padding")
    TensorMap(pitched((columns,), np.float32), (16,), store="padding")
    TensorMap(Device((4, 466), strides=(512, 1), typestr="|i1"), (4, 64), store="padding")
    with pytest.raises(ValueError, match="store='yes': expected True, False or 'padding'"):
        TensorMap(np.zeros((8, 16), np.float32), (8, 16), store="yes")


def test_it_keeps_its_array_alive():
    import weakref

    array = Device((8, 32))
    alive = weakref.ref(array)
    made = TensorMap(array, (8, 32))
    del array
    assert alive() is made.array


# Encoding


def random_map(rng):
    entry = rng.choice(dtypes.TABLE)
    rank = rng.randint(1, 5)
    swizzle = rng.choice(list(SWIZZLES))
    granule = 16 // entry.size
    largest = (SWIZZLES[swizzle].span or 128) // entry.size
    inner = granule * rng.randint(1, largest // granule)
    outer = []
    budget = 1700  # elements beside the row's 128 B: all fits shared memory
    for _ in range(rank - 1):
        outer.append(rng.randint(1, max(1, min(256, budget))))
        budget //= outer[-1]
    box = (*outer, inner)
    sizes = tuple(rng.randint(1, 300) for _ in range(rank))
    strides, step = [entry.size], sizes[-1] * entry.size
    for size in sizes[-2::-1]:
        step = -(-step // 16) * 16 + 16 * rng.randint(0, 3)
        strides.append(step)
        step *= size
    typestr = f"|V{entry.size}"  # the dtype beside it tells more
    array = Device(sizes, typestr, tuple(reversed(strides)), 16 * rng.randint(1, 1 << 40), entry.numpy)
    steps = (*[rng.randint(1, 8) for _ in range(rank - 1)], 1)
    fill = rng.choice(["zero", "nan"]) if entry.floating else "zero"
    options = {"dtype": entry, "swizzle": swizzle, "element_strides": steps, "fill": fill, "store": False}
    return array, box, options | {"l2_promotion": rng.choice(["none", "64B", "128B", "256B"])}


def test_random_legal_maps_come_back_from_the_simulators_encoding():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        array, box, options = random_map(rng)
        made = TensorMap(array, box, **options)
        decoded = descriptor.decode(made.encode_sim())
        interface = array.__cuda_array_interface__
        assert decoded.address == interface["data"][0]
        assert decoded.sizes == interface["shape"][::-1]
        assert decoded.box == box[::-1]
        assert decoded.element_strides == options["element_strides"][::-1]
        for size, stride, given in zip(decoded.sizes[1:], decoded.strides, interface["strides"][-2::-1], strict=True):
            assert stride == given or size == 1
        assert (decoded.dtype, decoded.swizzle) == (
            options["dtype"].tensor_map_code,
            SWIZZLES[made.swizzle].code,
        )
        assert (decoded.fill, decoded.l2_promotion) == (made.spec.fill, made.spec.l2_promotion)
        tile = [math.ceil(b / s) for b, s in zip(box, options["element_strides"], strict=True)]
        assert made.tile_shape == tuple(tile) and made.box_bytes == math.prod(tile) * made.element.size


def test_another_address():
    made = TensorMap(np.zeros((8, 32), np.float32), (8, 32))
    assert descriptor.decode(made.encode_sim(0x1230)).address == 0x1230
    assert descriptor.decode(made.encode_sim()).address == made.view.pointer


@pytest.mark.gpu
def test_the_driver_takes_every_legal_map():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        array, box, options = random_map(rng)
        made = TensorMap(array, box, **options)
        assert len(made.encode()) == 128
        assert made.encode() is made.encode()
        assert made.encode() != made.encode(made.view.pointer + 16)


@pytest.mark.gpu
def test_the_driver_takes_permuted_overlapping_and_just_legal_maps():
    views = [
        (Device((2, 4, 96, 64), "<f2", (49152, 128, 512, 2)), (1, 1, 64, 64)),
        (Device((8, 32), strides=(0, 4)), (8, 32)),
        (Device((13, 16), strides=(16, 4)), (4, 16)),
        (Device((1 << 32,), "|u1"), (16,)),
        (Device((2, 32), strides=((1 << 40) - 16, 4)), (8, 32)),
        (Device((4, 8, 32), strides=(1040, 128, 4)), (1, 8, 32)),
        (Device((3, 3)), (64, 32)),
    ]
    for array, box in views[:-1]:
        assert len(TensorMap(array, box, overlap=True).encode()) == 128
    refused("stride alignment", *views[-1])


@pytest.mark.gpu
def test_the_drivers_refusal_is_named():
    made = TensorMap(Device((8, 32)), (8, 32))
    with pytest.raises(TensorMapError, match="cuTensorMapEncodeTiled refused .*INVALID_VALUE"):
        made.encode(0x1008)


def test_without_a_driver_encoding_says_so():
    try:
        TensorMap(Device((8, 32)), (8, 32)).encode()
    except TensorMapError as error:
        assert error.rule == "driver" and "simulator" in str(error)
    else:
        pytest.skip("there is a driver here")


# In a kernel


def ptx_of(function, *argument_types):
    text, _ = cuda.compile(function, types.void(*argument_types), cc=(9, 0, "a"), device=False, abi="numba")
    return re.sub(r"[ \t]+", " ", text)


def test_constants_and_address_in_a_kernel():
    made = TensorMap(np.zeros((64, 96), np.float16), (16, 64), element_strides=(2, 1), swizzle="128B")

    def k(tensor, out):
        out[0] = tensor.box_bytes
        out[1] = tensor.box[0] * 1000 + tensor.tile_shape[0]
        out[2] = tensor.rank
        out[3] = tensor.address

    text = ptx_of(k, made.numba_type, types.uint64[::1])
    constants = dict(re.findall(r"mov\.u64 (%rd\d+), (\d+);", text))
    stored = [constants.get(r) for r in re.findall(r"st\.global\.u64 \[.*?\], (%rd\d+);", text)]
    assert stored[:3] == ["1024", "16008", "2"] and stored[3] is None
    assert ".local" not in text


def test_the_type_leaves_sizes_and_addresses_out():
    def made(rows, box=(16, 64), swizzle="128B", dtype=np.float16):
        return TensorMap(np.zeros((rows, 128), dtype), box, swizzle=swizzle).numba_type

    assert made(64) == made(1000) and hash(made(64)) == hash(made(1000))
    assert len({made(64), made(64, box=(8, 64)), made(64, swizzle="none"), made(64, dtype=np.int16)}) == 4
    assert isinstance(made(64), TensorMapType)
    assert str(made(64)) == "TensorMap(float16, box=(16, 64), swizzle='128B')"


def test_an_unknown_attribute_lists_those_there_are():
    made = TensorMap(np.zeros((8, 32), np.float32), (8, 32))

    def k(tensor, out):
        out[0] = tensor.shape

    with pytest.raises(TypingError, match="no attribute 'shape'; it has rank, box, tile_shape, box_bytes, address"):
        ptx_of(k, made.numba_type, types.uint64[::1])
