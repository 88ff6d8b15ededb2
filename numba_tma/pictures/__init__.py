"""The documentation's pictures, drawn from the simulator and from measured results.

Every picture is an SVG made from data alone, the same each time: `scripts/make_pictures.py` writes them into
docs/pictures, and a test compares them with what would be made.
"""

from __future__ import annotations

from pathlib import Path

from . import attention_blocks, attention_registers, attention_turns, fill, matmul, ragged, results, ring, swizzle

__all__ = ["pictures"]


def pictures(folder: Path) -> dict[str, str]:
    """All pictures as SVG by file name; `folder` is that of the measured results (docs/results)."""
    return {
        "swizzle.svg": swizzle.draw(),
        "fill.svg": fill.draw(),
        "ring.svg": ring.draw(),
        "matmul.svg": matmul.draw(folder),
        "attention_blocks.svg": attention_blocks.draw(),
        "attention_turns.svg": attention_turns.draw(folder),
        "attention_registers.svg": attention_registers.draw(),
        "ragged.svg": ragged.draw(),
        **results.draw(folder),
    }
