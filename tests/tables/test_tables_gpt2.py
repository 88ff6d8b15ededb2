"""Tables of docs/gpt2.md from data of known content."""

from __future__ import annotations

import json

import pytest

from numba_tma.tables.gpt2 import RESULTS, TABLES, claims, headline

RUN = {
    "batches": 8,
    "seconds": 0.0215,
    "share_of_ideal": 0.975,
    "busy_of_longest": {"prepare": 0.25, "H2D": 0.5, "compute": 1.0, "D2H": 0.75},
    "alone_seconds": {"prepare": 1e-4, "H2D": 1e-5, "compute": 3e-3, "D2H": 2.5e-3},
    "utilisation": {"prepare": 0.25, "H2D": 0.5, "compute": 0.97, "D2H": 0.75},
}
DATA = {
    "prefill": {
        "seconds": {
            "ours, last logits": 2.12e-3,
            "ours, all logits": 4.24e-3,
            "torch, last logits": 3.18e-3,
            "torch, CUDA graph, last logits": 2.65e-3,
            "torch.compile, CUDA graph, last logits": 2.332e-3,
            "torch, all logits": 5.3e-3,
        }
    },
    "decode_1024": {"seconds": {"ours": 2e-4, "torch, CUDA graph": 5e-4, "torch.compile, CUDA graph": 4e-4}},
    "decode_256": {"seconds": {"ours": 1e-4}},
    "launches": {"layers": 12, "prefill": {"c_attn": 4.05e-5, "a layer": 2.5e-4}, "decode": {"c_attn": 3.21e-6}},
    "decode_attention": [
        {
            "warps": warps,
            "ahead": ahead,
            "early": early,
            "blocks": blocks,
            "alone_seconds": 8.22e-6,
            "layers_seconds": layers_seconds,
        }
        for warps, ahead, early, blocks, layers_seconds in (
            (8, 4, "load", 1, 3.02e-4),
            (16, 2, "nothing", 2, 3.01e-4),
        )
    ],
    "torch_kernels": {
        "prefill": [
            {"name": "nvjet_sm90", "seconds": 1e-3},
            {"name": "cutlass s1688gemm", "seconds": 1e-4},
            {"name": "vectorized_elementwise", "seconds": 2.5e-4},
        ]
    },
    "agreement": {
        "largest error of a logit": 0.03,
        "the same of transformers in bfloat16": 0.04,
        "standard deviation of logits": 0.5,
        "tokens": 128,
        "tokens_wrong": 0,
    },
    "batches": {
        "serial_pageable": [],
        "serial_pinned": [RUN | {"seconds": 0.043}, RUN | {"seconds": 0.03, "batches": 4}],
        "three_streams": [RUN | {"batches": 4}, RUN],
        "producer": [RUN],
    },
    "logits_back": [
        {
            "tokens": 4096,
            "every": every,
            "bytes_out": 2.5e7,
            "alone_seconds": {"compute": 2e-3, "D2H": 5e-4},
            "serial_pinned": 2.5e-3,
            "three_streams": 2e-3,
        }
        for every in (0, 64)
    ],
    "retrieval": {"serial_pinned": [RUN | {"seconds": 0.043}], "producer": [RUN]},
}


def write(folder):
    (folder / RESULTS).write_text(json.dumps(DATA))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gpt2 prefill", ["PyTorch, eager", "3.18 ms", "1.50×", "5.3 ms", "1.25×"]),
        ("gpt2 decode", ["PyTorch, eager, as a CUDA graph", "500 µs", "2.50×", "", ""]),
        ("gpt2 launches", ["c_attn", "40.5 µs", "3.21 µs"]),
        ("gpt2 attention", ["1", "8", "4", "the first sets loaded", "8.22 µs", "302 µs"]),
        ("gpt2 attention", ["2", "16", "2", "nothing", "8.22 µs", "301 µs"]),
        ("gpt2 shares", ["products", "1.1 ms", "486 µs"]),
        ("gpt2 shares", ["embedding, residual sums, GELU, copies", "250 µs", "0 ns"]),
        ("gpt2 agreement", ["this package", "0.0300", "0.060"]),
        ("gpt2 batches", ["three streams and a producer thread", "8", "21.5 ms", "2.00×", "98%", "97%", "75%"]),
        ("gpt2 logits back", ["the last alone", "25 MB", "2 ms", "500 µs", "2.5 ms", "2 ms", "25%"]),
        ("gpt2 retrieval", ["serial, pinned memory", "8", "43 ms", "1.00×", "98%", "25%", "50%", "100%", "75%"]),
        ("gpt2 retrieval", ["three streams and a producer thread", "8", "21.5 ms", "2.00×", "98%", "25%", "50%"]),
    ],
)
def test_tables(tmp_path, name, row):
    write(tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLES[name](tmp_path).splitlines()]
    assert any(found[: len(row)] == row for found in rows), rows


def test_the_best_attention_comes_first(tmp_path):
    write(tmp_path)
    rows = TABLES["gpt2 attention"](tmp_path).splitlines()[2:]
    assert [row.split("|")[-2].strip() for row in rows] == ["301 µs", "302 µs"]


def test_claims(tmp_path):
    write(tmp_path)
    found = {number: words for number, _, words in claims(tmp_path)}
    assert found == {"20": "25% to 25%", "21": "1.40 × and 2.00 ×", "23": "97%"}


def test_headline(tmp_path):
    write(tmp_path)
    assert [row[1] for row in headline(tmp_path)] == [
        "2.12 ms, 1.25 × PyTorch's CUDA graph, 1.10 × with torch.compile",
        "200 µs, 2.50 × PyTorch's CUDA graph, 2.00 × with torch.compile",
    ]
