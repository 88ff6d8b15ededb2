"""Attention: `attention`, `attention_varlen`, `decode` and `attention_fp8` to use, and the ladder that leads to them.

Read `ladder` first, then plain, warp_mma and warpgroup, in this order. All steps share `operands` (checks), `masks`
(what a query sees) and `softmax`; those with a producer share `tiles`, `rings` (what it fills), `tile_counters` and
`packed` (sequences of different lengths). `forward` is the public side of the last steps, with `choice` (which tiles
for which heads). A few queries against a cache are the work of split_kv, decoding and kv_cache, 8-bit floats that of
the files called fp8. `peers` are what is measured beside.
"""

from .decoding import bind_decode, decode
from .forward import attention, attention_varlen, bind_attention
from .fp8 import attention_fp8
from .kv_cache import append
from .ladder import PROBLEM, attend, reference

__all__ = [
    "PROBLEM",
    "append",
    "attend",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "bind_attention",
    "bind_decode",
    "decode",
    "reference",
]
