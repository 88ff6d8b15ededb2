"""GPT-2 on a GPU beside PyTorch on the same weights: agreement, prefill, decoding. See docs/gpt2.md."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from .. import bench, driver
from ..launch import gpu_refusal
from . import benchmark_workloads, memory
from .attend import VARIANTS, make_decode
from .config import Config
from .launches import Launches
from .model import BFLOAT16, Model, Session
from .peers import TorchGpt2, compiler_missing, prefill_calls, step_call, transformers_model, warm_compiler
from .precompile import compile_all
from .weights import Weights, random_weights

Seconds = dict[str, float]
BATCH, LENGTH = 8, 1024
_CACHES = ((1024, 800), (256, 128))  # positions, and how many are full before decoding is timed
_EVERY = 224  # positions whose logits come back: as long as computing takes, on an H200
_DOCUMENT, _QUESTION = 896, 16
_IN_SHARES = (0, 64, 256, 1024)  # the same of 4 prompts of 1024 tokens, 4096 in all
# Prefills of all parts, for `compile_all`.
_CONTEXTS = (
    (BATCH, LENGTH, 0, LENGTH),
    (BATCH, LENGTH, 0, _EVERY),
    (BATCH, LENGTH - 32, 0, 0),
    *((BATCH, start, 0, 0) for _, start in _CACHES),
    *((4, 1024, 0, every) for every in _IN_SHARES),
    (4, 200, 0, 200),
    (BATCH, _DOCUMENT, 0, 0),
    (BATCH, _QUESTION, _DOCUMENT, 0),
)


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

    stream = torch.cuda.ExternalStream(session.stream)
    tokens = torch.from_numpy(prompts).cuda()
    peer = TorchGpt2(weights, batch, length)
    for kind in ("torch", "torch.compile") if compiled and not compiler_missing() else ("torch",):
        for which, call in prefill_calls(peer, tokens, kind == "torch.compile").items():
            candidates[f"{kind}, {which} logits"] = call
            candidates[f"{kind}, CUDA graph, {which} logits"] = _captured(call, stream)
    hugging = transformers_model(weights, "bfloat16")
    candidates["transformers, last logits"] = lambda: hugging(tokens, use_cache=True, logits_to_keep=1)
    candidates["transformers, all logits"] = lambda: hugging(tokens, use_cache=True)
    return _timed(candidates, session.stream, repeats)


def _captured(call: Callable[[], Any], stream: Any, ready: Callable[[], Any] = lambda: None) -> Callable[[], None]:
    """PyTorch's work as a CUDA graph, captured on its stream; `ready` is called before that."""
    import torch

    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            call()
        ready()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    return graph.replay


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
    peers = []
    for name in ("torch", "torch.compile") if compiled and not compiler_missing() else ("torch",):
        peer = TorchGpt2(weights, batch, positions)
        peers.append(peer)  # a graph keeps no tensor alive
        step = step_call(peer, name == "torch.compile")
        replay = _captured(step, stream, lambda peer=peer: peer.length.fill_(start))

        def steps_of(replay: Callable[[], None] = replay) -> None:
            for _ in range(steps):
                replay()

        candidates[f"{name}, CUDA graph"] = steps_of
    if start + 2 + (rounds + 2) * steps > positions:
        raise ValueError(f"{rounds} rounds of {steps} steps from {start} do not fit into {positions} positions")
    found = _timed(candidates, session.stream, rounds, warm_up=2)
    return {name: seconds / steps for name, seconds in found.items()}


def launch_seconds(model: Model, batch: int, length: int) -> dict[str, Any]:
    """Seconds of each launch of a prefill of `batch` prompts of `length` tokens, and of a decoding step behind all but
    32 of them: each kind's of all layers one behind the other, in a graph, so that they overlap as alike ones do."""
    session = Session(model, batch, prompt=length)
    session.prefill(np.random.default_rng(1).integers(0, model.config.vocab_size, (batch, length - 32)))
    found: dict[str, Any] = {"layers": model.config.n_layer}
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


def decode_attention_seconds(model: Model, batch: int, positions: int, start: int) -> list[dict[str, Any]]:
    """Seconds of decoding's attention with each of `VARIANTS`, behind `start` tokens: a launch among others like it,
    and all layers of a step with it."""
    session = Session(model, batch, positions=positions)
    session.prefill(np.random.default_rng(1).integers(0, model.config.vocab_size, (batch, start)))
    layers = model.config.n_layer
    runs = {}
    for number, variant in enumerate(VARIANTS):
        launches = session.decode_launches(make_decode(model.config.head_dim, **variant))[1:]
        whole = launches[: 5 * layers]
        runs[number, "alone_seconds"] = Launches(whole[1::5], session.own_stream)
        runs[number, "layers_seconds"] = Launches(whole, session.own_stream)
    for run in runs.values():
        run()
        run()
    timings = bench.time_launches(
        {str(key): run for key, run in runs.items()}, repeats=15, flush=False, stream=session.stream
    )
    took = {key: timings[str(key)].median for key in runs}
    return [
        variant
        | {"alone_seconds": took[number, "alone_seconds"] / layers, "layers_seconds": took[number, "layers_seconds"]}
        for number, variant in enumerate(VARIANTS)
    ]


def torch_kernel_seconds(weights: Weights, batch: int, length: int) -> dict[str, list[dict[str, Any]]]:
    """PyTorch's kernels in a prefill and in a decoding step, by its profiler: names, how many, seconds of all."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    peer = TorchGpt2(weights, batch, length)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, weights.config.vocab_size, (batch, length))).cuda()
    found = {}
    with torch.inference_mode():
        for name, call in (("prefill", lambda: peer.prefill(tokens, False)), ("step", peer.step)):
            peer.length.fill_(length - 32)
            call()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                call()
                torch.cuda.synchronize()
            kernels = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
            found[name] = [
                {"name": event.key[:80], "count": event.count, "seconds": event.self_device_time_total * 1e-6}
                for event in sorted(kernels, key=lambda event: -event.self_device_time_total)
            ]
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


@dataclass(frozen=True)
class Options:
    """How to measure: beside torch.compile as well, and with timelines into a folder."""

    compiled: bool = True
    pictures: Path | None = None


Part = Callable[[Model, Weights, Options], Any]


def _named(name: str, seconds: Callable[..., Seconds], *extents: int) -> Part:
    def part(model: Model, weights: Weights, options: Options) -> dict[str, Any]:
        return {"what": name, "seconds": seconds(model, weights, *extents, compiled=options.compiled)}

    return part


PARTS: dict[str, Part] = {
    "prefill": _named(f"{BATCH} x {LENGTH} tokens", prefill_seconds, BATCH, LENGTH),
    **{
        f"decode_{positions}": _named(
            f"{BATCH} sequences, {positions} positions", decode_seconds, BATCH, positions, start
        )
        for positions, start in _CACHES
    },
    "launches": lambda model, *_: launch_seconds(model, BATCH, LENGTH),
    "decode_attention": lambda model, *_: decode_attention_seconds(model, BATCH, *_CACHES[0]),
    "batches": lambda model, _, options: benchmark_workloads.batches_beside_ideal(
        model, BATCH, LENGTH, _EVERY, pictures=options.pictures
    ),
    "retrieval": lambda model, _, options: benchmark_workloads.retrieval_beside_ideal(
        model, BATCH, _DOCUMENT, _QUESTION, pictures=options.pictures
    ),
    "logits_back": lambda model, *_: benchmark_workloads.gains(model, 4, 1024, _IN_SHARES),
    "torch_kernels": lambda _, weights, __: torch_kernel_seconds(weights, BATCH, LENGTH),
    "agreement": lambda model, weights, _: agreement(model, weights, 0),
}


def _prepared(config: Config, parts: Sequence[str], compiled: bool) -> tuple[Weights, Model]:
    """The model. Meanwhile many processes compile what the parts need, so that measuring does not wait for one kernel
    after the other: this package's kernels into its cache, and those of torch.compile into PyTorch's."""
    calls = []
    if compiled and not compiler_missing():
        if "prefill" in parts:
            calls += [(BATCH, LENGTH, which) for which in ("last", "all")]
        calls += [(BATCH, positions, "step") for positions, _ in _CACHES if f"decode_{positions}" in parts]
    workers = max(1, (os.cpu_count() or 1) - len(calls))
    with ProcessPoolExecutor(max(1, len(calls)), mp_context=get_context("spawn")) as pool, ThreadPoolExecutor(1) as own:
        waiting = [pool.submit(warm_compiler, config, *call) for call in calls]
        waiting.append(own.submit(compile_all, config, _CONTEXTS, workers))
        weights = random_weights(config)
        model = Model(weights)
        for compiling in waiting:
            compiling.result()
    return weights, model


def measure(
    parts: Sequence[str], options: Options | None = None, *, config: Config | None = None
) -> Iterator[tuple[str, Any]]:
    """What docs/gpt2.md shows, part by part by name, for a model with random weights (the 124M by default).

    A part that fails does not keep the others from being measured: it gives {"failed": how}.

    Raises:
        LaunchError: there is no Hopper GPU.
        ImportError: PyTorch or transformers is not installed.
    """
    refusal = gpu_refusal()
    if refusal:
        raise driver.LaunchError(f"{refusal}; these are measurements")
    import transformers  # noqa: F401

    config, options = config or Config(), options or Options()
    begin = time.perf_counter()
    weights, model = _prepared(config, parts, options.compiled)
    yield "seconds_to_compile", time.perf_counter() - begin
    if options.compiled and compiler_missing():
        yield "no torch.compile", compiler_missing()
    for name in parts:
        try:
            found = PARTS[name](model, weights, options)
        except Exception:
            found = {"failed": traceback.format_exc()}
        yield name, found
