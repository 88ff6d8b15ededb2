#!/usr/bin/env python
"""GPT-2 on this package's kernels: generate, run a workload through the host pipeline, or measure.

    python scripts/gpt2.py generate --checkpoint FOLDER --prompt "Hopper's copy engine" --tokens 40
    python scripts/gpt2.py batches --output timelines
    python scripts/gpt2.py retrieval --output timelines
    python scripts/gpt2.py measure --json docs/results/h200_gpt2.json

Without a GPU a small model runs in the simulator, and the times of the workloads are those of a model of the engines.

FOLDER is a Hugging Face checkpoint (config.json, model.safetensors, tokenizer.json). Without one weights are random,
and what is generated means nothing. `measure` needs a Hopper GPU and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from numba_tma import driver, launch, suite
from numba_tma.gpt2 import benchmark, workloads
from numba_tma.gpt2.config import Config, UnsupportedModel
from numba_tma.gpt2.model import RESIDUALS, Model, PromptError, Session
from numba_tma.gpt2.tokenizer import Tokenizer
from numba_tma.gpt2.weights import random_weights
from numba_tma.overlap import MODES

SMALL = Config(n_layer=1, n_head=2, n_embd=64, n_positions=64, vocab_size=211)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line: each command has options of its own, and refuses the others'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)

    made = commands.add_parser("generate", help="continue prompts")
    made.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="by default weights and prompts are random")
    made.add_argument(
        "--prompt", action="append", metavar="TEXT", help="needs --checkpoint; several are continued at once"
    )
    made.add_argument("--tokens", type=positive, default=16, metavar="N", help="to generate (default %(default)s)")
    _residual(made)

    for name, words in (
        ("batches", "prompts in, logits out"),
        ("retrieval", "search (takes numba-tma[gpt2]), fetch, generate, give back"),
    ):
        made = commands.add_parser(name, help=f"random weights through the host pipeline: {words}")
        made.add_argument("--mode", choices=tuple(MODES), default="producer", help="(default %(default)s)")
        made.add_argument("--batches", type=positive, default=8, metavar="N", help="how many (default %(default)s)")
        made.add_argument("--output", type=Path, metavar="FOLDER", help="for the timeline, as .svg and .json")
        _residual(made)

    made = commands.add_parser("measure", help="beside PyTorch, on a Hopper GPU")
    made.add_argument(
        "--parts",
        nargs="+",
        choices=tuple(benchmark.PARTS),
        default=list(benchmark.PARTS),
        help="of what is measured (default all)",
    )
    made.add_argument("--no-compile", action="store_true", help="without torch.compile")
    made.add_argument("--output", type=Path, metavar="FOLDER", help="for timelines of the workloads")
    made.add_argument("--json", type=Path, metavar="FILE", help="write what was measured; other parts stay")
    return parser.parse_args(arguments)


def _residual(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--residual", choices=tuple(RESIDUALS), default="bfloat16", help="(default %(default)s)")


def positive(text: str) -> int:
    """A number of things, 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number expected, 1 or more")
    return int(text)


def generate(options: argparse.Namespace) -> None:
    """Print a continuation of each prompt.

    Raises:
        PromptError: text without a checkpoint, whose tokenizer it takes.
    """
    if options.prompt and not options.checkpoint:
        raise PromptError(
            f"--prompt needs --checkpoint: {options.prompt[0]!r} is text, and random weights have no tokenizer; give "
            f"--checkpoint FOLDER, or leave --prompt out, and random tokens are continued"
        )
    if options.checkpoint:
        model = Model.from_folder(options.checkpoint, residual=options.residual)
        tokenizer = Tokenizer(options.checkpoint)
        prompts = [tokenizer.encode(text) for text in options.prompt or ["Hello"]]
    else:
        model = Model(random_weights(SMALL if no_gpu() else Config()), residual=options.residual)
        prompts = [np.random.default_rng(i).integers(0, model.config.vocab_size, 12 - i) for i in range(3)]
    session = Session(model, len(prompts), prompt=max(map(len, prompts)))
    begin = time.perf_counter()
    answers = session.generate(prompts, options.tokens)
    seconds = time.perf_counter() - begin
    for prompt, answer in zip(prompts, answers, strict=True):
        if options.checkpoint:
            print(tokenizer.decode([*prompt, *answer]), "\n")
        else:
            print("tokens", *prompt, "->", *answer)
    print(f"{sum(map(len, answers))} tokens in {seconds:.3f} s, compiling included")


def no_gpu() -> bool:
    """Whether kernels run in the simulator."""
    return launch.backend() == "sim" or launch.gpu_refusal() is not None


def run_workload(options: argparse.Namespace) -> None:
    """Send batches through, and say how busy the engines were."""
    workload = workloads.WORKLOADS[options.what]
    model = Model(random_weights(SMALL if no_gpu() else Config()), residual=options.residual)
    with workload(model, small=no_gpu(), mode=options.mode) as (pipeline, batches):
        report = workloads.report(pipeline, batches, options.batches)
        print(report.text(workloads.alone(pipeline, batches)))
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            for suffix in ("svg", "json"):
                pipeline.save_timeline(options.output / f"gpt2_{options.what}.{suffix}")


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a measurement failed, 2 for what cannot be run, with the reason."""
    options = parse(arguments)
    try:
        if options.what == "generate":
            generate(options)
            return 0
        if options.what in workloads.WORKLOADS:
            run_workload(options)
            return 0
        found = {}
        if options.json and options.json.exists():  # what is not measured now stays
            found = json.loads(options.json.read_text())
        found["circumstances"] = suite.circumstances()
        begin = time.perf_counter()
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
        how = benchmark.Options(compiled=not options.no_compile, pictures=options.output)
        for name, rows in benchmark.measure(options.parts, how):
            found[name] = rows
            print(f"{time.perf_counter() - begin:.0f} s:", name, json.dumps(rows, indent=1), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
        if any(isinstance(rows, dict) and "failed" in rows for rows in found.values()):
            return 1
    except (UnsupportedModel, PromptError, FileNotFoundError, ImportError, driver.LaunchError) as error:
        print(f"gpt2: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
