"""The cache must notice every edit that changes the code, and never give back a damaged file."""

import io
import types

import pytest

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
