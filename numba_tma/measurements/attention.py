"""What docs/attention.md tells of `attention`: scripts/measure.py runs these, on a GPU with PyTorch.

Times are medians in seconds; what is compared runs in turn, each for some 10 ms on end, so that clocks are those of
steady work. Near the board's power limit who comes after an idler kernel has a higher clock, so that each comes after
each other equally often. Peers that are not installed are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import bench, driver
from ..kernels.attention import peers
from ..kernels.attention.forward import attention, attention_varlen, bind_attention
from ..kernels.attention.ladder import PROBLEM
from .timing import Record

TOKENS, COLUMNS = 16384, 2048  # B·S and H·D
_SLICE = 12e-3  # seconds that a candidate runs on end
_ROUNDS = 7


def random_inputs(batch: int, s: int, heads: int, head_dim: int, dtype: str = "bfloat16") -> list[Any]:
    """q, k and v, normally distributed."""
    import torch

    made = (torch.randn(batch, s, heads, head_dim, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))
    return list(made)


def add_outliers(*arrays: Any) -> None:
    """One number in a thousand gets another one added that is ten times as far out."""
    import torch

    for x in arrays:
        x += 10 * torch.randn_like(x) * (torch.rand_like(x, dtype=torch.float32) < 1e-3)


def rates(found: Mapping[str, float], s: int, causal: bool, **what: Any) -> Record:
    """A record of seconds by candidate, for `TOKENS` and `COLUMNS` in sequences of `s`."""
    flops = 4 * TOKENS * s * COLUMNS // (2 if causal else 1)
    rate = {name: flops / t / 1e12 for name, t in found.items()}
    return {**what, "causal": causal, "length": s, "seconds": found, "tflop_per_s": rate}


def candidates(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], Any]]:
    """This project's attention and its peers on the same tensors, on the current stream."""
    import torch

    o, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    found = {
        "numba-tma": bind_attention(q, k, v, o, lse, causal=causal),
        "FlashAttention-3": peers.flash_attention_3(q, k, v, causal),
        "cuDNN": peers.cudnn(q, k, v, causal),
        "FlashAttention-2": peers.flash_attention_2({"q": q, "k": k, "v": v}, causal=causal),
    }
    return {name: launch for name, launch in found.items() if launch is not None}


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of so many candidates, in which each comes right after each other one equally often.

    Williams' designs: as many orders as candidates, or twice as many if their number is odd.
    """
    first = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    orders = [[(i + shift) % count for i in first] for shift in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 else orders


def in_turn(launches: Mapping[str, Callable[[], Any]], rounds: int = _ROUNDS) -> dict[str, float]:
    """Median seconds of a launch, each candidate some `_SLICE` on end in every round, of `rounds` or more."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(launch: Callable[[], Any], times: int) -> float:
        begin.record()
        for _ in range(times):
            launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / times

    for launch in launches.values():
        seconds(launch, 2)
    times = {name: max(1, round(_SLICE / seconds(launch, 2))) for name, launch in launches.items()}
    samples: dict[str, list[float]] = {name: [] for name in launches}
    names, orders = list(launches), balanced_orders(len(launches))
    for order in orders * -(-rounds // len(orders)):
        for i in order:
            samples[names[i]].append(seconds(launches[names[i]], times[names[i]]))
    return {name: float(np.median(values)) for name, values in samples.items()}


def forward(
    head_dims: Sequence[int] = (64, 128, 256), lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
) -> list[Record]:
    """bfloat16, 16384 tokens and 2048 columns of all heads, causal and not, beside the peers."""
    import torch

    records = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for head_dim in head_dims:
            for causal in (False, True):
                for s in lengths:
                    heads = COLUMNS // head_dim
                    found = in_turn(candidates(*random_inputs(TOKENS // s, s, heads, head_dim), causal))
                    records.append(rates(found, s, causal, head_dim=head_dim))
    return records


def steps(lengths: Sequence[int] = (1024, 4096, 16384)) -> list[Record]:
    """The ladder's steps from the third on, bfloat16, D = 128, causal and not, beside FlashAttention-2."""
    import torch

    records = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for causal in (False, True):
            for s in lengths:
                q, k, v = random_inputs(TOKENS // s, s, COLUMNS // 128, 128)
                given = {"q": q, "k": k, "v": v, "o": torch.empty_like(q)}
                given["lse"] = torch.empty(q.shape[0], q.shape[2], s, device="cuda")
                launches = {
                    variant.name: variant.bind(given, causal=causal, stream=stream.cuda_stream)
                    for variant in PROBLEM.variants
                    if variant.name not in ("three_kernels", "online")
                }
                launches["FlashAttention-2"] = peers.flash_attention_2(given, causal=causal)
                records.append(rates(in_turn(launches), s, causal))
    return records


def long_context(s: int = 131072, heads: int = 16, head_dim: int = 128, seconds: float = 1.5) -> list[Record]:
    """One sequence of 128 K tokens: seconds and joules of a forward pass, each candidate for `seconds` on end.

    Energy is the whole board's, by NVML's counter.
    """
    import torch

    records = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for causal in (False, True):
            launches = candidates(*random_inputs(1, s, heads, head_dim), causal)
            launches["step 3, cp.async"] = _step("mma_cp_async", *random_inputs(1, s, heads, head_dim), causal)
            for name, launch in launches.items():
                spent, watts = _seconds_and_watts(launch, seconds)
                flops = 4 * heads * s * s * head_dim // (2 if causal else 1)
                records.append(
                    {
                        "name": name,
                        "causal": causal,
                        "length": s,
                        "seconds": spent,
                        "joules": watts * spent,
                        "tflop_per_s": flops / spent / 1e12,
                        "watts": watts,
                    }
                )
    return records


def _seconds_and_watts(launch: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Of a launch, and of the board, while it runs again and again.

    The counter of energy moves every 20 to 100 ms: power is what it gained between two of its moves, over the time
    between these.
    """
    import torch
    from cuda.bindings import nvml

    nvml.init_v2()
    bus = torch.cuda.get_device_properties(0)
    handle = nvml.device_get_handle_by_pci_bus_id_v2(
        f"{bus.pci_domain_id:08x}:{bus.pci_bus_id:02x}:{bus.pci_device_id:02x}.0"
    )
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    launch()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    count = max(2, round(seconds / (begin.elapsed_time(end) * 1e-3)))
    moves, before = [], nvml.device_get_total_energy_consumption(handle)
    begin.record()
    for _ in range(count):
        launch()
    end.record()
    while not end.query():
        energy = nvml.device_get_total_energy_consumption(handle)
        if energy != before:
            moves.append((time.perf_counter(), energy))
            before = energy
    (first, low), (last, high) = moves[0], moves[-1]
    return begin.elapsed_time(end) * 1e-3 / count, (high - low) * 1e-3 / (last - first)


def _step(name: str, q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
    import torch

    given = {"q": q, "k": k, "v": v, "o": torch.empty_like(q)}
    given["lse"] = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    return PROBLEM.variant(name).bind(given, causal=causal, stream=stream)


def errors(s: int = 2048, heads: int = 4) -> list[Record]:
    """Deviation of O from float64 on the same inputs, normal ones and some with one large value in a thousand.

    The root of the mean square, and the largest, both over the root mean square of O.
    """
    records = []
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for outliers in (False, True):
                q, k, v = random_inputs(1, s, heads, head_dim)
                if outliers:
                    add_outliers(q, k, v)
                exact = exact_attention(q, k, v, causal)
                scale = exact.square().mean().sqrt()
                found = {"numba-tma": attention(q, k, v, causal=causal)}
                for name, peer in (("FlashAttention-3", peers.flash_attention_3), ("cuDNN", peers.cudnn)):
                    launch = peer(q, k, v, causal)
                    if launch is not None:
                        o = launch()
                        o = o[0] if isinstance(o, tuple) else o
                        found[name] = o if o.shape == q.shape else o.transpose(1, 2)
                for name, o in found.items():
                    off = o.double() - exact
                    records.append(
                        {
                            "name": name,
                            "head_dim": head_dim,
                            "causal": causal,
                            "outliers": outliers,
                            "rms": float(off.square().mean().sqrt() / scale),
                            "largest": float(off.abs().max() / scale),
                        }
                    )
    return records


def exact_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """O in float64."""
    import torch

    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(s.shape[2:], device=s.device, dtype=torch.bool).triu(1 + s.shape[3] - s.shape[2])
        s = s.masked_fill(hidden, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2)


def packed() -> list[Record]:
    """Sequences of 64 to 4096 tokens, packed, beside the same number of equally long ones; D = 128, causal and not."""
    import torch

    rng = np.random.default_rng(0)
    lengths = rng.integers(64, 4097, 24)
    starts = torch.tensor(np.r_[0, lengths.cumsum()], dtype=torch.int32, device="cuda")
    total, heads, head_dim = int(lengths.sum()), 16, 128
    records = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for causal in (False, True):
            q, k, v = (x[0] for x in random_inputs(1, total, heads, head_dim))
            o = torch.empty_like(q)

            def launch(q: Any = q, k: Any = k, v: Any = v, o: Any = o, causal: bool = causal) -> Any:
                return attention_varlen(q, k, v, starts, starts, int(lengths.max()), causal=causal, out=o)

            (seconds,) = in_turn({"numba-tma": launch}).values()
            flops = 4 * heads * head_dim * int((lengths.astype(np.int64) ** 2).sum()) // (2 if causal else 1)
            records.append({"causal": causal, "seconds": seconds, "tflop_per_s": flops / seconds / 1e12})
    return records


def host_overhead() -> list[Record]:
    """Host time of a call on one small sequence, back to back."""
    q, k, v = random_inputs(1, 128, 4, 64)
    o = q.clone()
    calls = {"attention, out=": lambda: attention(q, k, v, out=o), "attention": lambda: attention(q, k, v)}
    records = []
    for name, call in calls.items():
        call()
        records.append({"what": name, "seconds": bench.host_overhead(call).median})
    driver.synchronize(0)
    return records
