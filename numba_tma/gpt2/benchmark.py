"""GPT-2 on a GPU beside PyTorch on the same weights: agreement, prefill, decoding. See docs/gpt2.md."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import bench, driver
from ..launch import gpu_refusal
from ..overlap import Alone, Pipeline, ideal
from ..overlap.rates import stages_alone
from . import memory
from .batches import BatchInference
from .config import Config
from .demonstration import OfDocuments
from .launches import Launches
from .model import BFLOAT16, Model, Session
from .peers import TorchGpt2, transformers_model
from .retrieval import Request, Retrieval, Store, make_index
from .weights import Weights, random_weights

Seconds = dict[str, float]
_LENGTHS, _WIDTHS = (2, 18), (64, 512)  # of answers, and candidates of a search, that times are measured for


def compiler_missing() -> str | None:
    """Why torch.compile cannot work here, or None."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "torch.compile needs a C compiler, and there is none"
    return None


def agreement(
    model: Model, weights: Weights, seed: int, *, batch: int = 4, length: int = 200, count: int = 32
) -> dict[str, Any]:
    """Errors of logits against transformers' model in float32, of ours and of transformers' own in bfloat16.

    `tokens_wrong` counts the generated tokens that are not float32's likeliest although its two best are further apart
    than twice our largest error; `tokens_close` those where they are not.
    """
    import torch

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, weights.config.vocab_size, length - 7 * i) for i in range(batch)]
    session = Session(model, batch, positions=length + count)
    answers = session.generate(prompts, count)
    ours = session.prompt_logits(prompts)
    exact_model, half_model = (transformers_model(weights, dtype) for dtype in ("float32", "bfloat16"))
    errors, half_errors, spread, wrong, close = [], [], [], 0, 0
    with torch.inference_mode():
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            whole = torch.from_numpy(np.concatenate([prompt, answer]))[None].cuda()
            exact = exact_model(whole).logits[0].double().cpu().numpy()
            half = half_model(whole).logits[0].double().cpu().numpy()
            n = len(prompt)
            errors.append(np.abs(ours[i, :n] - exact[:n]).max())
            half_errors.append(np.abs(half[:n] - exact[:n]).max())
            spread.append(exact[:n].std())
            for j, token in enumerate(answer):
                row = exact[n - 1 + j]
                second, first = np.partition(row, -2)[-2:]
                sure = first - second > 2 * errors[i]
                wrong += int(sure and token != row.argmax())
                close += int(not sure)
    return {
        "largest error of a logit": max(errors),
        "the same of transformers in bfloat16": max(half_errors),
        "standard deviation of logits": float(np.mean(spread)),
        "tokens": batch * count,
        "tokens_wrong": wrong,
        "tokens_close": close,
    }


def prefill_seconds(
    model: Model, weights: Weights, batch: int, length: int, *, compiled: bool = True, repeats: int = 20
) -> Seconds:
    """Seconds of a prefill of `batch` prompts of `length` tokens: ours and PyTorch's, last logits and all of them."""
    import torch

    session = Session(model, batch, prompt=length)
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, weights.config.vocab_size, (batch, length))
    session.prefill(prompts)
    context = session.context_launches(session.sequence, session.lengths, length)
    every = memory.empty((batch, length, session.model.vocabulary), BFLOAT16)
    last = Launches([*context, session.head_launch(session.logits), session.choose_launch()], session.own_stream)
    whole = Launches([*context, *session.every_head_launches(length, every)], session.own_stream)
    candidates: dict[str, Callable[[], Any]] = {"ours, last logits": last, "ours, all logits": whole}

    tokens = torch.from_numpy(prompts).cuda()
    peer = TorchGpt2(weights, batch, length)
    hugging = transformers_model(weights, "bfloat16")
    candidates["torch, last logits"] = lambda: peer.prefill(tokens, False)
    candidates["torch, all logits"] = lambda: peer.prefill(tokens, True)
    candidates["transformers, last logits"] = lambda: hugging(tokens, use_cache=True, logits_to_keep=1)
    candidates["transformers, all logits"] = lambda: hugging(tokens, use_cache=True)
    if compiled and not compiler_missing():
        faster = torch.compile(peer.prefill, dynamic=False)
        candidates["torch.compile, last logits"] = lambda: faster(tokens, False)
        candidates["torch.compile, all logits"] = lambda: faster(tokens, True)
    return _timed(candidates, session.stream, repeats)


def decode_seconds(
    model: Model,
    weights: Weights,
    batch: int,
    positions: int,
    start: int,
    *,
    steps: int = 8,
    compiled: bool = True,
    rounds: int = 12,
) -> Seconds:
    """Seconds of a step with a cache of `positions`, from `start` tokens on: ours and PyTorch's, as CUDA graphs."""
    import torch

    session = Session(model, batch, positions=positions, prompt=start)
    prompts = np.random.default_rng(2).integers(0, weights.config.vocab_size, (batch, start))
    session.prefill(prompts)
    session.decode(2)
    candidates: dict[str, Callable[[], Any]] = {"ours": lambda: session.decode(steps)}
    stream = torch.cuda.ExternalStream(session.stream)
    kinds = {"torch": lambda peer: peer.step}
    if compiled and not compiler_missing():
        kinds["torch.compile"] = lambda peer: torch.compile(peer.step, dynamic=False)
    keep = []
    for name, make in kinds.items():
        peer = TorchGpt2(weights, batch, positions)
        step = make(peer)
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):
                step()
            graph = torch.cuda.CUDAGraph()
            peer.length.fill_(start)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                step()
        keep.append((peer, graph))

        def replay(graph: Any = graph) -> None:
            for _ in range(steps):
                graph.replay()

        candidates[f"{name}, CUDA graph"] = replay
    if start + 2 + (rounds + 2) * steps > positions:
        raise ValueError(f"{rounds} rounds of {steps} steps from {start} do not fit into {positions} positions")
    found = _timed(candidates, session.stream, rounds, warm_up=2)
    return {name: seconds / steps for name, seconds in found.items()}


def launch_seconds(model: Model, batch: int, length: int) -> dict[str, Seconds]:
    """Seconds of each launch of a prefill of `batch` prompts of `length` tokens, and of a decoding step behind all but
    32 of them: each kind's of all layers one behind the other, in a graph, so that they overlap as alike ones do."""
    session = Session(model, batch, prompt=length)
    session.prefill(np.random.default_rng(1).integers(0, model.config.vocab_size, (batch, length - 32)))
    found = {}
    context = session.context_launches(session.sequence, session.lengths, length)
    decode = session.decode_launches()
    names = ("normalise 1", "c_attn", "attention", "c_proj", "normalise 2", "c_fc", "mlp_proj")
    few = ("c_attn", "attention", "c_proj", "c_fc", "mlp_proj")
    for name, launches, of_layer in (("prefill", context, names), ("decode", decode, few)):
        layers = launches[1 : 1 + len(of_layer) * model.config.n_layer]
        groups = {part: layers[i :: len(of_layer)] for i, part in enumerate(of_layer)}
        groups["embed"] = launches[:1] * model.config.n_layer
        groups["a layer"] = layers
        groups["head"] = [session.head_launch(session.logits)] * model.config.n_layer
        runs = {part: Launches(group, session.own_stream) for part, group in groups.items()}
        for run in runs.values():
            run()
            run()
        timings = bench.time_launches(runs, repeats=15, flush=False, stream=session.stream)
        found[name] = {
            part: timings[part].median / (model.config.n_layer if part == "a layer" else len(group))
            for part, group in groups.items()
        }
    return found


def _timed(candidates: dict[str, Callable[[], Any]], stream: int, repeats: int, warm_up: int = 3) -> Seconds:
    """Medians, in turn, everything on one stream."""
    import torch

    with torch.inference_mode(), torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        for launch in candidates.values():  # compiles, and captures graphs
            if warm_up > 2:
                launch()
                launch()
        timings = bench.time_launches(candidates, repeats=repeats, warm_up=warm_up, stream=stream)
    return {name: timing.median for name, timing in timings.items()}


def runs_beside_ideal(
    pipeline: Pipeline, batches: Sequence[Any], counts: Sequence[int], repeats: int = 3
) -> list[dict[str, Any]]:
    """The middle one of `repeats` runs for each number of batches: seconds, share of the ideal, use of the engines.

    A model of the engines says the same each time, and is asked once.
    """
    runs = 1 if pipeline.engines.modelled else repeats + 1
    alone = stages_alone(pipeline, batches[0])
    rows = []
    for count in counts:
        found = []
        for _ in range(runs):
            for result in pipeline.run((batches[i % len(batches)] for i in range(count)), copy=False):
                result.release()
            found.append(pipeline.report)
        counted = sorted(found[-repeats:], key=lambda report: report.seconds)
        report = counted[len(counted) // 2]
        stages = {stage: alone.of(stage) for stage in ("prepare", "H2D", "compute", "D2H")}
        longest = max(stages.values())
        rows.append(
            {
                "batches": count,
                "seconds": report.seconds,
                "share_of_ideal": ideal(alone, count) / report.seconds,
                "alone_seconds": stages,
                "busy_of_longest": {k: busy / (count * longest) for k, busy in report.busy().items()},
                "utilisation": report.utilisation(),
            }
        )
    return rows


def batches_beside_ideal(
    model: Model, batch: int, length: int, every: int, counts: Sequence[int] = (4, 8, 32), /, **options: Any
) -> dict[str, list[dict[str, Any]]]:
    """Batches of prompts in each mode. `options` are the pipeline's."""
    rng = np.random.default_rng(4)
    batches = [rng.integers(0, model.config.vocab_size, (batch, length)) for _ in range(4)]
    found = {}
    for mode in ("serial_pageable", "serial_pinned", "three_streams", "producer"):
        with BatchInference(model, batch, length, every=every, mode=mode, record=True, **options) as inference:
            found[mode] = runs_beside_ideal(inference.pipeline, batches, counts)
    return found


def retrieval_beside_ideal(
    model: Model,
    batch: int,
    document: int,
    question: int,
    /,
    *,
    documents: int = 16,
    vectors: int = 20_000,
    dimensions: int = 128,
    counts: Sequence[int] = (8, 32),
    **options: Any,
) -> dict[str, Any]:
    """Retrieval, serial and with all four stages at once, in balance: answers are so long, and the search so thorough,
    that computing and searching take as long as the copies. `options` are the pipeline's.

    Of `vectors` in the index each belongs to a document, several to one.
    """
    rng = np.random.default_rng(5)
    points = rng.standard_normal((vectors, dimensions)).astype(np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    index = OfDocuments(make_index(points), documents, _WIDTHS[0])
    vocabulary = model.config.vocab_size
    store = Store(model, rng.integers(0, vocabulary, (documents, document)), index)
    batches = [
        [Request(points[rng.integers(vectors)], rng.integers(0, vocabulary, question)) for _ in range(batch)]
        for _ in range(4)
    ]

    def alone(count: int) -> Alone:
        with Retrieval(store, batch, question, count, **options | {"mode": "serial_pinned", "depth": 1}) as retrieval:
            return stages_alone(retrieval.pipeline, batches[0])

    few, many = (alone(count) for count in _LENGTHS)
    longest = max(few.h2d, few.d2h)
    room = model.config.n_positions - document - question
    count = _fitted(_LENGTHS, (few.compute, many.compute), longest, min(room, 200))
    index.width = _WIDTHS[1]
    wide = alone(_LENGTHS[0])
    index.width = _fitted(_WIDTHS, (few.prepare, wide.prepare), longest, vectors)
    found: dict[str, Any] = {"document": document, "question": question, "answer": count, "search width": index.width}
    for mode in ("serial_pinned", "producer"):
        with Retrieval(store, batch, question, count, record=True, **options | {"mode": mode}) as retrieval:
            found[mode] = runs_beside_ideal(retrieval.pipeline, batches, counts)
    return found


def _fitted(at: tuple[int, int], seconds: tuple[float, float], wanted: float, most: int) -> int:
    """Where a straight line through two times reaches the time wanted; from the first to `most`."""
    slope = (seconds[1] - seconds[0]) / (at[1] - at[0])
    there = at[0] + (wanted - seconds[0]) / slope if slope > 0 else at[0]
    return int(np.clip(round(there), at[0], most))


Part = Callable[[Model, Weights, bool], Any]


def _named(name: str, seconds: Callable[..., Seconds], *extents: int) -> Part:
    def part(model: Model, weights: Weights, compiled: bool) -> dict[str, Any]:
        return {"what": name, "seconds": seconds(model, weights, *extents, compiled=compiled)}

    return part


PARTS: dict[str, Part] = {
    "agreement": lambda model, weights, _: agreement(model, weights, 0),
    "prefill": _named("8 x 1024 tokens", prefill_seconds, 8, 1024),
    "decode_1024": _named("8 sequences, 1024 positions", decode_seconds, 8, 1024, 800),
    "decode_256": _named("8 sequences, 256 positions", decode_seconds, 8, 256, 128),
    "launches": lambda model, *_: launch_seconds(model, 8, 1024),
    "batches": lambda model, *_: batches_beside_ideal(model, 8, 1024, 256),
    "retrieval": lambda model, *_: retrieval_beside_ideal(model, 8, 768, 32),
}


def measure(
    parts: Sequence[str] | None = None, *, config: Config | None = None, compiled: bool = True
) -> Iterator[tuple[str, Any]]:
    """What docs/gpt2.md shows, part by part by name, for a model with random weights (the 124M by default).

    Raises:
        LaunchError: there is no Hopper GPU.
        ImportError: PyTorch or transformers is not installed.
    """
    refusal = gpu_refusal()
    if refusal:
        raise driver.LaunchError(f"{refusal}; these are measurements")
    weights = random_weights(config or Config())
    if compiled and compiler_missing():
        yield "no torch.compile", compiler_missing()
    model = Model(weights)
    for name in parts or PARTS:
        yield name, PARTS[name](model, weights, compiled)
