"""What a consumer's thread has in registers in the configurations of `attention`, and a block in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.attention.choice import Configuration, choose
from ..kernels.attention.masks import Kind
from ..kernels.attention.warpgroup import REGISTERS, make_overlapped
from .svg import Picture

HEAD_DIMS = (64, 128, 192, 256)
_SKV = 4096  # keys; what is drawn does not depend on it
SHARED_KB = 227  # that a block of an H200 may have
_PARTS = {"O": "c4", "S": "c0", "P": "c2", "all else": "c7"}
_TILES = {"Q": "c3", "O": "c4", "K": "c5", "V": "c6"}


@dataclass(frozen=True)
class Budget:
    """Registers of a thread by what they hold, of `total`; bytes of a block's shared memory by what lies there."""

    configuration: Configuration
    registers: dict[str, int]
    total: int
    shared: dict[str, int]


def budget(head_dim: int) -> Budget:
    """What `choice` picks for heads of so many columns, and what that takes."""
    kind = Kind(False, False)
    chosen = choose(head_dim, kind, _SKV)
    total = REGISTERS[chosen.consumers][1]
    # An accumulator of 64 rows has 64 · N / 128 float32 a thread; P is S in pairs of 16 bits.
    held = {"O": head_dim // 2, "S": chosen.keys // 2, "P": chosen.keys // 4}
    held["all else"] = total - sum(held.values())
    shared = make_overlapped(head_dim, "bfloat16", kind, **chosen.cut()).shared
    tiles = {name: shared.members[name.lower()] for name in _TILES if name.lower() in shared.members}
    return Budget(chosen, held, total, {name: tile.nbytes for name, tile in tiles.items()})


def draw() -> str:
    """The picture."""
    left, scale = 286, 1.84
    top, step = 92, 84
    height = top + step * len(HEAD_DIMS) + 6
    picture = Picture(
        860,
        height,
        "Registers of a consumer's thread, and shared memory of its block",
        "For head dimensions of 64, 128, 192 and 256 a bar of the registers for O, S and P and of what is left for all "
        "else, up to 160 or 232, and a bar of the shared memory for Q, O, K and V.",
    )
    picture.text(24, 34, "Where O, the scores and the tiles are", "ink head")
    picture.text(
        24,
        54,
        "Registers of each of a consumer's threads, and KB of shared memory of a block, in the configurations that "
        "attention takes without a mask, up to 64 K keys.",
        "muted",
    )
    picture.legend(left, 78, [(tint, name) for name, tint in (_PARTS | _TILES).items()])
    for number, head_dim in enumerate(HEAD_DIMS):
        _rows(picture, left, top + step * number, scale, head_dim)
    return picture.svg()


def _rows(picture: Picture, left: float, y: float, scale: float, head_dim: int) -> None:
    found = budget(head_dim)
    chosen = found.configuration
    picture.text(24, y + 22, f"D = {head_dim}", "ink head")
    picture.text(24, y + 40, f"{chosen.consumers} consumers, {chosen.rows} queries", "muted")
    over = ", O over Q" if chosen.o_over_q else ""
    picture.text(24, y + 56, f"{chosen.keys} keys, {chosen.stages} stages{over}", "muted")
    picture.text(left - 10, y + 22, "registers", "muted small", "end")
    _bar(picture, left, y + 8, {name: (n, f"{name} {n}") for name, n in found.registers.items()}, _PARTS, scale)
    picture.text(left + found.total * scale + 10, y + 22, f"{found.total} a thread", "ink")
    kilobytes = {name: (n / 1024, f"{name} {n / 1024:.0f}") for name, n in found.shared.items()}
    picture.text(left - 10, y + 54, "shared memory", "muted small", "end")
    _bar(picture, left, y + 40, kilobytes, _TILES, scale)
    used = sum(n for n, _ in kilobytes.values())
    picture.line([(left + SHARED_KB * scale, y + 37), (left + SHARED_KB * scale, y + 63)], "limit")
    picture.text(left + SHARED_KB * scale + 10, y + 54, f"{used:.0f} of {SHARED_KB} KB", "ink")


def _bar(
    picture: Picture, x: float, y: float, parts: dict[str, tuple[float, str]], tints: dict[str, str], scale: float
) -> None:
    for name, (amount, words) in parts.items():
        width = amount * scale
        picture.rect(x, y, width - 1, 20, tints[name], 2)
        if width < 6 * len(words):
            words = f"{amount:.0f}"
        picture.text(x + width / 2, y + 14, words, "ink small", "middle")
        x += width
