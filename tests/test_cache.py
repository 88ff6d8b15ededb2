"""The cache must notice every edit that changes the code, and never give back a damaged file."""

import collections
import enum
import io
import os
import types

import numpy as np
import pytest
from numba import cuda
from numba.cuda.extending import overload

from numba_tma import cache

SOURCE = """
CONSTANT = {constant}
def helper(x):
    return x + {added}
def kernel(x):
    return helper(x) * CONSTANT
"""


def build(constant=3, added=1):
    module = types.ModuleType("made")
    exec(compile(SOURCE.format(constant=constant, added=added), "made.py", "exec"), module.__dict__)
    return module.kernel


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TMA_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_same_source_same_fingerprint():
    assert cache.fingerprint(build()) == cache.fingerprint(build())


def test_edits_are_noticed():
    assert cache.fingerprint(build()) != cache.fingerprint(build(constant=4))
    # An edit in a function that the kernel merely calls, which Numba's own cache misses when it is in another file.
    assert cache.fingerprint(build()) != cache.fingerprint(build(added=2))


def test_closures_are_part_of_it():
    def make(tile):
        def kernel(x):
            return x * tile

        return kernel

    assert cache.fingerprint(make(2)) == cache.fingerprint(make(2))
    assert cache.fingerprint(make(2)) != cache.fingerprint(make(4))


def test_what_cannot_be_described_is_not_cached():
    stream = io.StringIO()

    def kernel(x):
        return stream.tell() + x

    with pytest.raises(cache.Uncacheable, match="StringIO"):
        cache.fingerprint(kernel)


def test_recursive_functions_end():
    def outer(x):
        return inner(x)

    def inner(x):
        return outer(x - 1) if x else 0

    assert cache.fingerprint(outer) == cache.fingerprint(outer)


def test_files_round_trip_and_damage_is_noticed(folder):
    cache.write("key", ".x", b"contents")
    assert cache.read("key", ".x") == b"contents"
    assert cache.read("other", ".x") is None
    path = folder / "key.x"
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.read("key", ".x") is None


def test_no_folder_no_cache(monkeypatch):
    monkeypatch.setenv("NUMBA_TMA_CACHE_DIR", "")
    cache.write("key", ".x", b"contents")
    assert cache.read("key", ".x") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("NUMBA_TMA_CACHE_DIR", str(blocker / "cache"))
    cache.write("key", ".x", b"contents")
    assert cache.read("key", ".x") is None


def namespace(source, **given):
    made = types.ModuleType("made")
    made.__dict__.update(given)
    exec(compile(source, "made.py", "exec"), made.__dict__)
    return made


def module(name="settings", **members):
    made = types.ModuleType(name)
    made.__dict__.update(members)
    return made


def kernel_of(source, **given):
    return cache.fingerprint(namespace(f"def kernel(x):\n    return {source}", **given).kernel)


@pytest.mark.parametrize(
    "one, other",
    [(1, 2), (None, 0), ((1, 2), (1, 3)), (np.arange(3), np.arange(3) + 1), (np.float32(1), np.float32(2))],
)
def test_constants_of_modules_are_part_of_it(one, other):
    def through(value):
        return kernel_of("settings.A", settings=module(A=value))

    def through_submodule(value):
        return kernel_of("settings.sub.A", settings=module(sub=module("settings.sub", A=value)))

    for described in (through, through_submodule):
        assert described(one) == described(one)
        assert described(one) != described(other)


def test_each_function_has_its_own_names_of_a_module():
    source = "def helper(x):\n    return settings.B\ndef kernel(x):\n    return helper(x) + settings.A"

    def described(value):
        return cache.fingerprint(namespace(source, settings=module(A=1, B=value)).kernel)

    assert described(1) == described(1)
    assert described(1) != described(2)


def test_an_alias_says_of_what():
    one, other = [1, 2], [3, 4]

    def described(third):
        return kernel_of("A[0] + B[0] + C[0]", A=one, B=other, C=third)

    assert described(one) == described(one)
    assert described(one) != described(other)
    # Two equal tuples may be one object or two.
    assert kernel_of("A + B", A=(1, 2), B=tuple(i for i in (1, 2))) == kernel_of("A + B", **dict.fromkeys("AB", (1, 2)))


def test_enums_and_named_tuples():
    def colours(value, kind):
        return kind("Colour", {"RED": value})

    for kind in (enum.Enum, enum.IntEnum):
        assert kernel_of("E.RED", E=colours(1, kind)) == kernel_of("E.RED", E=colours(1, kind))
        assert kernel_of("E.RED", E=colours(1, kind)) != kernel_of("E.RED", E=colours(2, kind))
        assert kernel_of("E", E=colours(1, kind).RED) != kernel_of("E", E=colours(2, kind).RED)
    pair, swapped = collections.namedtuple("Pair", "a b"), collections.namedtuple("Pair", "b a")
    assert kernel_of("P.a", P=pair(1, 2)) != kernel_of("P.a", P=swapped(1, 2))
    assert kernel_of("P(1, 2).a", P=pair) != kernel_of("P(1, 2).a", P=swapped)


def test_options_and_defaults_of_device_functions():
    def quotient(a, b):
        return a / b

    plain, fast = cuda.jit(device=True)(quotient), cuda.jit(device=True, fastmath=True)(quotient)
    assert kernel_of("f(x, x)", f=plain) == kernel_of("f(x, x)", f=cuda.jit(device=True)(quotient))
    assert kernel_of("f(x, x)", f=plain) != kernel_of("f(x, x)", f=fast)

    def with_default(value):
        def shifted(a, *, b=value):
            return a + b

        return cuda.jit(device=True)(shifted)

    assert kernel_of("f(x)", f=with_default(1)) != kernel_of("f(x)", f=with_default(2))


def test_overloads_are_part_of_it():
    def described(added):
        def helper(a):
            raise NotImplementedError

        @overload(helper, target="cuda")
        def helper_on_gpu(a):
            def implementation(a):
                return a + added

            return implementation

        return kernel_of("helper(x)", helper=helper)

    before = kernel_of("x + 1")
    assert described(1) != described(2)
    assert kernel_of("x + 1") == before, "an overload that the kernel cannot name"


def test_functions_of_a_nameless_namespace_are_described():
    def described(added):
        names = {}
        exec(f"def helper(x):\n    return x + {added}", names)
        return kernel_of("helper(x)", helper=names["helper"])

    assert described(1) != described(2)


def test_the_folder_may_be_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_TMA_CACHE_DIR", "~/kernels")
    cache.write("key", ".x", b"contents")
    assert (tmp_path / "kernels" / "key.x").exists() and cache.read("key", ".x") == b"contents"


def test_nothing_is_left_behind_by_a_failed_write(folder):
    (folder / "key.x").mkdir()
    cache.write("key", ".x", b"contents")
    assert os.listdir(folder) == ["key.x"]
