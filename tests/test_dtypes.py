"""The table of element types against the driver's enumeration, NumPy's sizes and Numba's types."""

import ml_dtypes
import numpy as np
import pytest
from numba.cuda import types

from numba_tma import dtypes


@pytest.mark.parametrize("entry", dtypes.TABLE, ids=str)
def test_code_is_the_drivers(entry):
    driver = pytest.importorskip("cuda.bindings.driver")
    member = getattr(driver.CUtensorMapDataType, entry.tensor_map_name)
    assert int(member) == entry.tensor_map_code


@pytest.mark.parametrize("entry", dtypes.TABLE, ids=str)
def test_sizes_agree(entry):
    assert entry.size == entry.numpy.itemsize
    width = getattr(entry.numba_type, "bitwidth", None)
    assert width == 8 * entry.size


def test_every_hopper_type_of_the_engine_is_reached():
    driver = pytest.importorskip("cuda.bindings.driver")
    packed = {13, 14, 15}  # Blackwell's 4- and 6-bit types
    codes = {int(m) for m in driver.CUtensorMapDataType} - packed
    assert {entry.tensor_map_code for entry in dtypes.TABLE} == codes


def test_signed_and_unsigned_travel_as_one():
    for signed, unsigned in (("int8", "uint8"), ("int16", "uint16")):
        assert dtypes.lookup(signed).tensor_map_code == dtypes.lookup(unsigned).tensor_map_code
        assert dtypes.lookup(signed).numba_type != dtypes.lookup(unsigned).numba_type
    for name in ("float8_e4m3fn", "float8_e5m2"):
        assert dtypes.lookup(name).tensor_map_name.endswith("_UINT8")
        assert not dtypes.lookup(name).floating


@pytest.mark.parametrize("entry", dtypes.TABLE, ids=str)
def test_lookup_by_name_and_by_itself(entry):
    assert dtypes.lookup(entry.name) is entry
    assert dtypes.lookup(entry) is entry


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (np.dtype("<f8"), "float64"),
        (np.uint8, "uint8"),
        (np.dtype(np.longlong), "int64"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
        (types.float32, "float32"),
        (types.bfloat16, "bfloat16"),
        (types.int8, "int8"),
    ],
)
def test_lookup_by_dtype(key, name):
    assert dtypes.lookup(key).name == name


def test_lookup_of_torch_dtypes_without_torch():
    class FakeTorchDtype:
        __module__ = "torch"

        def __init__(self, name):
            self.name = name

        def __str__(self):
            return f"torch.{self.name}"

    for name in ("bfloat16", "float16", "int8", "float8_e4m3fn"):
        assert dtypes.lookup(FakeTorchDtype(name)).name == name
    with pytest.raises(TypeError, match="torch.complex64"):
        dtypes.lookup(FakeTorchDtype("complex64"))


@pytest.mark.parametrize(
    "unknown",
    ["float128", np.complex64, np.dtype(bool), np.dtype(">f4"), types.complex64, None, float, 3, object()],
)
def test_unknown_types_are_refused_with_the_list(unknown):
    with pytest.raises(TypeError, match="choose one of uint8, int8, .*tfloat32_ftz, float64"):
        dtypes.lookup(unknown)
