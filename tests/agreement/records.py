"""Results of copies as they are kept: digests for the tests, all changed bytes for looking into differences."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from configurations import Configuration
from execution import Result

FOLDER = Path(__file__).parent / "recorded"
COPIES, EXPERIMENTS = "copies.json", "experiments.json"


def digest(result: Result) -> str:
    """Sixteen hexadecimal digits that stand for all that is compared of a result, or 'refused'."""
    if result.refused:
        return "refused"
    head = f"{result.complete} {result.missing} {result.clean} {len(result.shared)}\n".encode()
    return hashlib.blake2b(head + result.shared + result.tensor, digest_size=8).hexdigest()


def fingerprint(configurations: Sequence[Configuration]) -> str:
    """Changes with any of the configurations: results recorded for others are no use."""
    return hashlib.blake2b(repr(list(configurations)).encode(), digest_size=8).hexdigest()


def _bytes(result: Result, sizes: tuple[int, int]) -> np.ndarray:
    parts = (result.shared.ljust(sizes[0], b"\0"), result.tensor.ljust(sizes[1], b"\0"))
    return np.frombuffer(b"".join(parts), np.uint8)


def pack(before: Result, result: Result) -> dict[str, Any]:
    """A result as plain values; its bytes as what changed since `before`, compressed."""
    sizes = (len(result.shared), len(result.tensor))
    start = Result(before.shared[: sizes[0]], before.tensor[: sizes[1]])
    changes = _bytes(result, sizes) ^ _bytes(start, sizes)
    return {
        "complete": result.complete,
        "missing": result.missing,
        "clean": result.clean,
        "refused": result.refused,
        "note": result.note,
        "sizes": sizes,
        "changes": base64.b85encode(zlib.compress(changes.tobytes(), 6)).decode(),
    }


def unpack(before: Result, packed: dict[str, Any]) -> Result:
    """The result that `pack` was given."""
    sizes = tuple(packed["sizes"])
    start = Result(before.shared[: sizes[0]], before.tensor[: sizes[1]])
    changes = np.frombuffer(zlib.decompress(base64.b85decode(packed["changes"])), np.uint8)
    raw = (changes ^ _bytes(start, sizes)).tobytes()
    names = ("complete", "missing", "clean", "refused", "note")
    return Result(raw[: sizes[0]], raw[sizes[0] :], **{name: packed[name] for name in names})


def differences(
    configurations: Sequence[Configuration], hardware: Sequence[Result], simulator: Sequence[Result]
) -> list[tuple[Configuration, str]]:
    """The configurations in which the sides differ, with what differs first (the hardware's, then the simulator's)."""
    found = []
    for configuration, real, simulated in zip(configurations, hardware, simulator, strict=True):
        difference = real.difference(simulated)
        if difference:
            found.append((configuration, difference))
    return found


def report(configurations: Sequence[Configuration], found: Sequence[tuple[Configuration, str]], most: int) -> list[str]:
    """Lines about differences: how many by tag, and the first of each kind of tags."""
    lines = [f"{len(configurations)} configurations, {len(found)} differ"]
    total = Counter(tag for configuration in configurations for tag in configuration.tags)
    wrong = Counter(tag for configuration, _ in found for tag in configuration.tags)
    lines += [
        f"  {wrong[tag]:5} of {total[tag]:5} with '{tag}'"
        for tag in sorted(wrong, key=lambda tag: -wrong[tag] / total[tag])
    ]
    shown: set[frozenset[str]] = set()
    for configuration, difference in found:
        kind = frozenset(tag for tag in configuration.tags if not tag.startswith("rank"))
        if kind not in shown and len(shown) < most:
            shown.add(kind)
            lines += [f"  {configuration}", f"    hardware and simulator: {difference}"]
    return lines


def load(name: str) -> dict[str, Any] | None:
    """A record by its file's name, or None where there is none yet."""
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else None
