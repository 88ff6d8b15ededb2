"""What docs/attention_decode.md tells of `decode`'s speed: scripts/measure.py runs these, on a GPU with PyTorch.

Times are medians in seconds of launches in CUDA graphs, the candidates in turn. Caches that would stay in L2 from one
launch to the next take turns with others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import bench
from ..driver import LaunchError
from ..kernels.attention.decoding import bind_decode
from .timing import Record

_L2_BYTES = 60 << 20
_SECONDS = 2e-3  # of a graph, about


class Case(NamedTuple):
    """Extents; `page_size` is 0 for a contiguous cache, and `filled` the part of the capacity that sequences have."""

    batch: int
    capacity: int
    kv_heads: int
    group: int
    head_dim: int
    sq: int = 1
    page_size: int = 0
    filled: float = 1.0

    @property
    def nbytes(self) -> int:
        """Of the keys and values that are read."""
        return int(4 * self.batch * self.capacity * self.kv_heads * self.head_dim * self.filled)


CASES = (
    Case(16, 4096, 8, 4, 128),
    Case(16, 16384, 8, 4, 128),
    Case(16, 65536, 8, 4, 128),
    Case(32, 8192, 8, 4, 128),
    Case(64, 8192, 8, 4, 128),
    Case(128, 4096, 8, 4, 128),
    Case(1, 4096, 8, 4, 128),
    Case(1, 16384, 8, 4, 128),
    Case(1, 65536, 8, 4, 128),
    Case(1, 131072, 8, 8, 128),
    Case(4, 16384, 8, 4, 128),
    Case(16, 8192, 8, 8, 64),
    Case(16, 8192, 16, 1, 64),
    Case(16, 8192, 4, 8, 256),
    Case(16, 8192, 8, 4, 128, 4),
    Case(16, 8192, 8, 4, 128, 1, 16),
    Case(16, 8192, 8, 4, 128, 1, 64),
    Case(16, 8192, 8, 4, 128, 1, 128),
    Case(16, 8192, 8, 4, 128, 1, 0, 0.25),
    Case(8, 1024, 12, 1, 64),
)


def speed(repeats: int = 9) -> list[Record]:
    """`decode` of bfloat16 at `CASES`, beside torch's scaled_dot_product_attention where it can do the same."""
    records = []
    for case in CASES:
        sets = _arrays(case)
        candidates: dict[str, Callable[[int], object]] = {"decode": _ours(sets)}
        if not case.page_size and case.filled == 1 and case.sq == 1:
            candidates |= {
                "FlashAttention-2": _torch(sets, "FLASH_ATTENTION"),
                "cuDNN": _torch(sets, "CUDNN_ATTENTION"),
            }
        candidates = {name: launch for name, launch in candidates.items() if name == "decode" or _works(launch)}
        launches = max(1, round(_SECONDS / (case.nbytes / 4e12 + 5e-6) / len(sets))) * len(sets)
        timings = bench.time_graphs(candidates, launches=launches, repeats=repeats)
        seconds = {name: timing.median for name, timing in timings.items()}
        records.append({**case._asdict(), "bytes": case.nbytes, "seconds": seconds})
    return records


def read_rate(nbytes: int = 1 << 32) -> list[Record]:
    """Bytes a second at which the memory is read, by torch's sum and maximum of a large array."""
    import torch

    words = torch.ones(nbytes // 4, dtype=torch.float32, device="cuda")
    out = torch.empty((), device="cuda")

    def on(stream: int, reduce: Callable[..., object]) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            reduce()

    candidates = {
        "sum": lambda stream: on(stream, lambda: torch.sum(words, (0,), out=out)),
        "amax": lambda stream: on(stream, lambda: torch.amax(words, 0, out=out)),
    }
    timings = bench.time_graphs(candidates, launches=3, repeats=7)
    return [{"what": name, "bytes": nbytes, "seconds": timing.median} for name, timing in timings.items()]


def promotion(repeats: int = 9) -> list[Record]:
    """`decode` with tensor maps that have L2 fetch more than is asked for, or no more."""
    records = []
    for case in (Case(64, 8192, 8, 4, 128), Case(16, 8192, 16, 1, 64)):
        sets = _arrays(case)
        candidates = {name: _ours(sets, l2_promotion=name) for name in ("none", "64B", "128B", "256B")}
        timings = bench.time_graphs(candidates, launches=4 * len(sets), repeats=repeats)
        seconds = {name: timing.median for name, timing in timings.items()}
        records.append({**case._asdict(), "bytes": case.nbytes, "seconds": seconds})
    return records


def _arrays(case: Case) -> list[dict[str, Any]]:
    """Sets of arrays, more than the L2 cache holds."""
    import torch

    batch, capacity, kv_heads, group, head_dim, sq, page_size, filled = case
    copies = max(1, -(-3 * _L2_BYTES // case.nbytes))
    found = []
    for _ in range(copies):
        shape = (batch, capacity, kv_heads, head_dim)
        table = None
        if page_size:
            pages = batch * capacity // page_size
            table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
            shape = (pages, page_size, kv_heads, head_dim)
        q = torch.randn(batch, sq, kv_heads * group, head_dim, device="cuda", dtype=torch.bfloat16)
        cache = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        lengths = torch.full((batch,), int(capacity * filled), device="cuda", dtype=torch.int32)
        found.append({"q": q, "k": cache[0], "v": cache[1], "lengths": lengths, "table": table})
        found[-1]["out"] = torch.empty_like(q)
    return found


def _ours(sets: list[dict[str, Any]], **options: Any) -> Callable[[int], object]:
    bound: dict[int, itertools.cycle] = {}

    def launch(stream: int) -> None:
        if stream not in bound:
            common = {"stream": stream, **options}
            bound[stream] = itertools.cycle(
                [
                    bind_decode(*(x[n] for n in ("q", "k", "v", "lengths", "out")), page_table=x["table"], **common)
                    for x in sets
                ]
            )
        next(bound[stream])()

    return launch


def _torch(sets: list[dict[str, Any]], backend: str) -> Callable[[int], object]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention, turn = torch.nn.functional.scaled_dot_product_attention, itertools.cycle(sets)

    def launch(stream: int) -> None:
        x = next(turn)
        q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)), sdpa_kernel(getattr(SDPBackend, backend)):
            attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return launch


def _works(launch: Callable[[int], object]) -> bool:
    """Whether the library has a kernel for these operands, which can be captured into a graph."""
    try:
        bench.time_graph(launch, launches=1, repeats=1)
    except (RuntimeError, LaunchError):
        return False
    return True
