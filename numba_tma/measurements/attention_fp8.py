"""What docs/attention_fp8.md tells of attention in 8 bits: scripts/measure.py runs these, on a GPU with PyTorch.

How is said in attention.py. FlashAttention-3 has a kernel of 8 bits too, with a scale for each batch and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..kernels.attention import peers
from ..kernels.attention.forward import bind_attention
from ..kernels.attention.fp8 import CONFIGURATIONS, Quantised, bind_attend, bind_quantise
from ..kernels.attention.fp8_quantise import CHUNK, KEY_ORDER, LARGEST
from .attention import COLUMNS, TOKENS, add_outliers, exact_attention, in_turn, random_inputs, rates
from .timing import Record

OURS, OURS_16 = "numba-tma, 8 bits", "numba-tma, bfloat16"
ONE = "numba-tma, 8 bits, one accumulator"
FA3_8, FA3_16 = "FlashAttention-3, 8 bits", "FlashAttention-3, bfloat16"
_ERROR_ROWS = 512
# The fastest kernel that adds up everything in one accumulator, where there is a choice; D is 128.
ONE_ACCUMULATOR = {"promote": False, "keys": 192, "ping_pong": True}


def _fa3(q: Any, k: Any, v: Any, scales: Sequence[Any], causal: bool) -> Callable[[], Any] | None:
    """FlashAttention-3 on tensors of e4m3, each with one scale."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return None
    names = ("q_descale", "k_descale", "v_descale")
    descale = {name: x.expand(k.shape[0], k.shape[2]).contiguous() for name, x in zip(names, scales, strict=True)}
    return lambda: flash_attn_func(q, k, v, causal=causal, **descale)


def _by_tensor(x: Any) -> tuple[Any, Any]:
    """A tensor in e4m3 with one scale."""
    import torch

    scale = x.abs().max().float() / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def _quantised_by_tensor(q: Any, k: Any, v: Any) -> Quantised:
    """What `Quantised` would be with one scale for each tensor: the plain way, to compare errors with."""
    import torch

    made = Quantised.empty(q, k)
    for x, x8, scales in ((q, made.q, made.q_scale), (k, made.k, made.k_scale)):
        numbers, scale = _by_tensor(x)
        x8.copy_(numbers)
        scales.fill_(scale)
    numbers, scale = _by_tensor(v)
    made.v_scale.fill_(scale)
    batch, s, heads, head_dim = v.shape
    chunks = made.v.shape[2]
    padded = torch.zeros(batch, chunks * CHUNK, heads, head_dim, device=v.device, dtype=torch.uint8)
    padded[:, :s] = numbers.view(torch.uint8)
    ordered = padded.view(batch, chunks, CHUNK, heads, head_dim)[:, :, list(KEY_ORDER)].permute(0, 3, 1, 4, 2)
    made.v.view(torch.uint8).copy_(ordered.reshape(made.v.shape))
    return made


def forward(
    cases: Sequence[tuple[int, int]] = ((128, 1024), (128, 4096), (128, 16384), (64, 4096), (256, 4096)),
) -> list[Record]:
    """16384 tokens and 2048 columns of all heads, causal and not: both halves, and the peers; `cases` are (D, S)."""
    import torch

    records = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for head_dim, s in cases:
            for causal in (False, True):
                q, k, v = random_inputs(TOKENS // s, s, COLUMNS // head_dim, head_dim)
                o, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], s, device="cuda")
                made = Quantised.empty(q, k)
                eights = [_by_tensor(x) for x in (q, k, v)]
                launches = {
                    "quantise": bind_quantise(q, k, v, made, stream.cuda_stream),
                    OURS: bind_attend(made, o, lse, causal=causal, stream=stream.cuda_stream),
                    FA3_8: _fa3(*(x for x, _ in eights), [scale for _, scale in eights], causal),
                    OURS_16: bind_attention(q, k, v, torch.empty_like(q), lse.clone(), causal=causal),
                    FA3_16: peers.flash_attention_3(q, k, v, causal),
                }
                if head_dim == 128:
                    launches[ONE] = bind_attend(made, o, lse, causal=causal, configuration=ONE_ACCUMULATOR)
                launches["quantise"]()
                found = in_turn({name: launch for name, launch in launches.items() if launch is not None}, rounds=5)
                record = rates(found, s, causal, head_dim=head_dim)
                del record["tflop_per_s"]["quantise"]
                records.append(record)
    return records


def errors(lengths: Sequence[int] = (4096, 16384), heads: int = 4, head_dim: int = 128) -> list[Record]:
    """Deviation from float64, root of the mean square and largest, both over the root mean square of O.

    Inputs are normal; normal with one number in a thousand ten times as far out; or normal with values of mean 1.
    """
    import torch

    records = []
    for s in lengths:
        for inputs in ("normal", "outliers", "values of mean 1"):
            q, k, v = random_inputs(1, s, heads, head_dim)
            if inputs == "outliers":
                add_outliers(q, k, v)
            elif inputs == "values of mean 1":
                v += 1
            rows = torch.arange(0, s, s // _ERROR_ROWS, device="cuda")
            exact = exact_attention(q[:, rows], k, v, False)
            scale = exact.square().mean().sqrt()
            o, lse = torch.empty_like(q), torch.empty(1, heads, s, device="cuda")
            blocks = Quantised.empty(q, k)
            bind_quantise(q, k, v, blocks)()
            tensors = _quantised_by_tensor(q, k, v)
            eights = [_by_tensor(x) for x in (q, k, v)]
            candidates = {
                "scales of blocks": bind_attend(blocks, o, lse),
                "scales of blocks, one accumulator": bind_attend(blocks, o, lse, configuration={"promote": False}),
                "scales of tensors": bind_attend(tensors, o, lse),
                FA3_8: _fa3(*(x for x, _ in eights), [scale for _, scale in eights], False),
                FA3_16: peers.flash_attention_3(q, k, v),
            }
            for name, launch in candidates.items():
                if launch is None:
                    continue
                torch.cuda.synchronize()
                result = launch()
                torch.cuda.synchronize()
                result = result[0] if isinstance(result, tuple) else o if result is None else result
                off = result[:, rows].double() - exact
                rms, largest = float(off.square().mean().sqrt() / scale), float(off.abs().max() / scale)
                records.append({"name": name, "length": s, "inputs": inputs, "rms": rms, "largest": largest})
    return records


_CONFIGURATIONS: dict[int, tuple[dict[str, Any], ...]] = {
    128: ({}, ONE_ACCUMULATOR, {"promote": False, "keys": 96, "consumers": 3}),
    64: ({}, {"keys": 96, "consumers": 3}),
}


def configurations(cases: Sequence[tuple[int, int]] = ((128, 4096), (128, 16384), (64, 4096))) -> list[Record]:
    """The kernel's speed by how it is cut, causal and not; `cases` are (D, S)."""
    import torch

    records = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for head_dim, s in cases:
            for causal in (False, True):
                q, k, v = random_inputs(TOKENS // s, s, COLUMNS // head_dim, head_dim)
                o, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], s, device="cuda")
                made = Quantised.empty(q, k)
                bind_quantise(q, k, v, made)()
                asked = _CONFIGURATIONS[head_dim]
                launches = {
                    str(i): bind_attend(made, o, lse, causal=causal, configuration=c) for i, c in enumerate(asked)
                }
                flops = 4 * TOKENS * s * COLUMNS // (2 if causal else 1)
                for i, seconds in in_turn(launches, rounds=3).items():
                    cut = {"promote": True, "ping_pong": False, "consumers": 2} | CONFIGURATIONS[head_dim]
                    record = {"head_dim": head_dim, "length": s, "causal": causal, **cut, **asked[int(i)]}
                    records.append(record | {"tflop_per_s": flops / seconds / 1e12})
    return records
