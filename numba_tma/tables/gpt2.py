"""Tables of docs/gpt2.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..report import markdown, seconds
from .records import load

RESULTS = "h200_gpt2.json"
_PEERS = {
    "transformers": "transformers, eager",
    "torch": "PyTorch, eager",
    "torch, CUDA graph": "PyTorch, eager, as a CUDA graph",
    "torch.compile": "torch.compile",
    "torch.compile, CUDA graph": "torch.compile, as a CUDA graph",
    "ours": "this package",
}
_STAGES = {
    "prepare": "search busy",
    "H2D": "copy in busy",
    "compute": "compute busy",
    "D2H": "copy out busy",
}
_MODES = {
    "serial_pageable": "serial, pageable memory",
    "serial_pinned": "serial, pinned memory",
    "three_streams": "three streams",
    "producer": "three streams and a producer thread",
}


def _prefill(results: Path) -> str:
    found = load(results, RESULTS)["prefill"]["seconds"]
    rows = []
    for name, words in _PEERS.items():
        if f"{name}, last logits" in found:
            row = [words]
            for which in ("last", "all"):
                took = found.get(f"{name}, {which} logits")
                row += [seconds(took), f"{took / found[f'ours, {which} logits']:.2f}×"] if took else ["", ""]
            rows.append(row)
    return markdown(rows, ["8 × 1024 tokens", "last logits", "to ours", "all logits", "to ours"])


def _decode(results: Path) -> str:
    data = load(results, RESULTS)
    found = {words: data[name]["seconds"] for name, words in (("decode_1024", "1024"), ("decode_256", "256"))}
    rows = []
    for name, words in _PEERS.items():
        row = [words]
        for times in found.values():
            row += [seconds(times[name]), f"{times[name] / times['ours']:.2f}×"] if name in times else ["", ""]
        if any(row[1:]):
            rows.append(row)
    headers = [word for positions in found for word in (f"cache of {positions}", "to ours")]
    return markdown(rows, ["a step of 8 sequences", *headers])


def _launches(results: Path) -> str:
    found = load(results, RESULTS)["launches"]
    parts = dict.fromkeys([*found["prefill"], *found["decode"]])
    rows = [
        [part, *(seconds(found[which][part]) if part in found[which] else "" for which in ("prefill", "decode"))]
        for part in parts
    ]
    return markdown(rows, ["a launch of", "prefill, 8 × 1024", "decode, 8"])


_EARLY = {"nothing": "nothing", "prefetch": "all brought to L2", "load": "the first sets loaded"}


def _attention(results: Path) -> str:
    rows = [
        [
            run["blocks"],
            run["warps"],
            run["ahead"],
            _EARLY[run["early"]],
            seconds(run["alone_seconds"]),
            seconds(run["layers_seconds"]),
        ]
        for run in sorted(load(results, RESULTS)["decode_attention"], key=lambda run: run["layers_seconds"])
    ]
    return markdown(
        rows, ["blocks a head", "warps", "sets ahead", "early", "attention by itself", "all layers of a step"]
    )


_KINDS = {  # parts of names of PyTorch's kernels, and of launches
    "products": (("nvjet", "gemm"), ("c_attn", "c_proj", "c_fc", "mlp_proj", "head")),
    "attention": (("sdpa", "flash"), ("attention",)),
    "normalisations": (("layer_nor",), ("normalise",)),
    "embedding, residual sums, GELU, copies": (("elementwise", "Memset", "gather"), ("embed",)),
}


def _shares(results: Path) -> str:
    data = load(results, RESULTS)
    layers, ours = data["launches"]["layers"], data["launches"]["prefill"]
    rows = []
    for kind, (kernels, launches) in _KINDS.items():
        torch = sum(
            kernel["seconds"]
            for kernel in data["torch_kernels"]["prefill"]
            if any(word in kernel["name"] for word in kernels)
        )
        times = {name: 1 if name in ("embed", "head") else layers for name in ours}
        mine = sum(times[name] * took for name, took in ours.items() if name.startswith(launches))
        rows.append([kind, seconds(torch), seconds(mine)])
    return markdown(rows, ["kernels of a prefill", "PyTorch, eager", "this package"])


def _agreement(results: Path) -> str:
    found = load(results, RESULTS)["agreement"]
    spread = found["standard deviation of logits"]
    rows = [
        [words, f"{found[name]:.4f}", f"{found[name] / spread:.3f}"]
        for name, words in (
            ("largest error of a logit", "this package"),
            ("the same of transformers in bfloat16", "transformers in bfloat16"),
        )
    ]
    rows.append(
        ["tokens of another choice, where float32 is sure", f"{found['tokens_wrong']} of {found['tokens']}", ""]
    )
    return markdown(rows, ["against transformers in float32", "largest error", "in standard deviations"])


def _batches(results: Path) -> str:
    found = load(results, RESULTS)["batches"]
    serial = {run["batches"]: run["seconds"] for run in found["serial_pinned"]}
    rows = []
    for mode, words in _MODES.items():
        for run in found[mode]:
            use = [f"{run['utilisation'][stage]:.0%}" for stage in ("compute", "D2H")]
            gain = f"{serial[run['batches']] / run['seconds']:.2f}×"
            rows.append([words, run["batches"], seconds(run["seconds"]), gain, f"{run['share_of_ideal']:.0%}", *use])
    return markdown(rows, ["", "batches", "time", "vs serial, pinned", "of ideal", "compute busy", "copy out busy"])


def _retrieval(results: Path) -> str:
    found = load(results, RESULTS)["retrieval"]
    serial = {run["batches"]: run["seconds"] for run in found["serial_pinned"]}
    rows = []
    for mode in ("serial_pinned", "producer"):
        for run in found[mode]:
            gain = f"{serial[run['batches']] / run['seconds']:.2f}×"
            busy = [f"{run['busy_of_longest'][stage]:.0%}" for stage in _STAGES]
            rows.append(
                [_MODES[mode], run["batches"], seconds(run["seconds"]), gain, f"{run['share_of_ideal']:.0%}", *busy]
            )
    return markdown(rows, ["", "batches", "time", "vs serial", "of ideal", *_STAGES.values()])


def _gain(row: Mapping[str, float]) -> float:
    return row["serial_pinned"] / row["three_streams"] - 1


def _logits_back(results: Path) -> str:
    rows = []
    for row in load(results, RESULTS)["logits_back"]:
        alone = row["alone_seconds"]
        share = row["bytes_out"] / 1e6
        rows.append(
            [
                row["every"] or "the last alone",
                f"{share:.3g} MB",
                seconds(alone["compute"]),
                seconds(alone["D2H"]),
                seconds(row["serial_pinned"]),
                seconds(row["three_streams"]),
                f"{_gain(row):.0%}",
            ]
        )
    return markdown(rows, ["positions", "logits", "compute", "D2H", "serial", "three streams", "more throughput"])


def claims(results: Path) -> list[list[str]]:
    """Rows for the table of docs/claims.md."""
    found = load(results, RESULTS)["batches"]
    serial, three = ({run["batches"]: run for run in found[mode]} for mode in ("serial_pinned", "three_streams"))
    back = load(results, RESULTS)["logits_back"]
    more = [_gain(row) for row in back]
    retrieval = load(results, RESULTS)["retrieval"]["producer"][-1]
    use = retrieval["utilisation"]["compute"]
    return [
        [
            "20",
            f"GPT-2, {back[0]['tokens']} tokens a batch, logits of one position to all: more throughput",
            f"{min(more):.0%} to {max(more):.0%}",
        ],
        [
            "21",
            "GPT-2, 8,192 tokens, logits of 224 of 1,024 positions, three streams beside serial, 4 and 8 batches",
            " and ".join(f"{serial[n]['seconds'] / three[n]['seconds']:.2f} ×" for n in (4, 8)),
        ],
        ["23", f"retrieval with GPT-2, {retrieval['batches']} batches: computing, of all the time", f"{use:.0%}"],
    ]


def headline(results: Path) -> list[list[str]]:
    """Rows for the README."""
    data = load(results, RESULTS)
    prefill, step = data["prefill"]["seconds"], data["decode_1024"]["seconds"]
    rows = [("prefill of 8 × 1024 tokens", prefill, ", last logits"), ("a decoding step of 8 sequences", step, "")]
    found = []
    for what, took, suffix in rows:
        ours = took[f"ours{suffix}"]
        words = (("torch", "PyTorch's CUDA graph"), ("torch.compile", "with torch.compile"))
        peers = [f"{took[f'{name}, CUDA graph{suffix}'] / ours:.2f} × {peer}" for name, peer in words]
        found.append([f"GPT-2 124M, {what}", ", ".join([seconds(ours), *peers])])
    return found


TABLES: dict[str, Callable[[Path], str]] = {
    "gpt2 prefill": _prefill,
    "gpt2 attention": _attention,
    "gpt2 decode": _decode,
    "gpt2 launches": _launches,
    "gpt2 shares": _shares,
    "gpt2 agreement": _agreement,
    "gpt2 batches": _batches,
    "gpt2 logits back": _logits_back,
    "gpt2 retrieval": _retrieval,
}
