"""Tables of the documentation, made from the data in docs/results/: each page's in the module of its name.

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between them is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import (
    attention,
    attention_decode,
    attention_fp8,
    claims,
    copy,
    gemm,
    gpt2,
    headline,
    kv_stream,
    launches,
    multicast,
    overlap,
    rows,
    simulator,
    stencil3d,
    suite,
    tile_sweep,
    timelines,
    transpose,
    watchdog,
)

_REGION = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)

TABLES: dict[str, Callable[[Path], str]] = {
    **attention.TABLES,
    **attention_decode.TABLES,
    **attention_fp8.TABLES,
    **claims.TABLES,
    **copy.TABLES,
    **gemm.TABLES,
    **gpt2.TABLES,
    **headline.TABLES,
    **kv_stream.TABLES,
    **launches.TABLES,
    **multicast.TABLES,
    **overlap.TABLES,
    **rows.TABLES,
    **simulator.TABLES,
    **stencil3d.TABLES,
    **suite.TABLES,
    **tile_sweep.TABLES,
    **timelines.TABLES,
    **transpose.TABLES,
    **watchdog.TABLES,
}


def update(text: str, results: Path) -> str:
    """`text` with its tables made anew from the JSON files in `results`.

    Raises:
        KeyError: the page asks for a table that does not exist.
    """

    def fill(match: re.Match) -> str:
        table = TABLES[match[2]](results)
        return f"{match[1]}\n{table}\n\n{match[3]}"

    return _REGION.sub(fill, text)
