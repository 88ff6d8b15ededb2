#!/usr/bin/env python
"""Show what a kernel of the suite does when, and how much of its copying is hidden under its computation."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from pathlib import Path

from numba_tma import launch, sim
from numba_tma.kernels import PROBLEMS, Case, select
from numba_tma.timeline import variants
from numba_tma.timeline.model import Timeline
from numba_tma.trace import Trace


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(problem.name for problem in PROBLEMS)
    parser.add_argument("name", metavar="PROBLEM[.VARIANT]", nargs="+", help=f"what to run; problems are {names}")
    parser.add_argument("--backend", choices=launch.BACKENDS, default=None, help="where to run (default: auto)")
    parser.add_argument("--case", type=int, default=0, metavar="N", help="which of the problem's sizes (default: 0)")
    parser.add_argument("--shape", metavar="A,B,…", help="another size for that case, such as 4096,4096")
    parser.add_argument(
        "--set",
        nargs=2,
        action="append",
        default=[],
        metavar=("OPTION", "VALUE"),
        help="an option of the kernels, such as stages 1",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="FILE.svg (one block), FILE.json (for ui.perfetto.dev), or a folder for both of each variant",
    )
    parser.add_argument(
        "--block", type=int, default=None, metavar="N", help="block in the picture (default: the middle)"
    )
    parser.add_argument(
        "--whole", action="store_true", help="in a .json, all blocks: not just those of that block's SM"
    )
    parser.add_argument("--between", metavar="NS:NS", help="in the picture: from and to, in nanoseconds")
    parser.add_argument("--capacity", type=int, default=4096, metavar="N", help="records a warp keeps (default: 4096)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="on a GPU: trace every N-th SM only")
    parser.add_argument(
        "--overhead", action="store_true", help="on a GPU: also time each variant with and without stamps"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status is 2 for what cannot be run, with the reason."""
    options = parse(arguments)
    refusal = launch.gpu_refusal()
    try:
        chosen = select(options.name)
        wanted = options.backend or launch.backend()
        backend = "sim" if wanted == "sim" or (wanted == "auto" and refusal) else "gpu"
        if backend == "gpu" and refusal:
            raise ValueError(f"--backend gpu: {refusal}; use --backend sim")
        if options.overhead and backend == "sim":
            raise ValueError("--overhead: the simulator's time says nothing about a kernel's; it needs a GPU")
        if options.every < 1:
            raise ValueError(f"--every {options.every}: 1 or more")
        if options.output and not options.output.suffix and options.output.is_file():
            raise ValueError(
                f"--output {options.output}: a folder is expected there, or a name that ends in .svg or .json"
            )
        if options.output and options.output.suffix and sum(len(found) for _, found in chosen) > 1:
            raise ValueError(f"--output {options.output}: several variants are chosen; name a folder")
        between = _between(options.between)
        settings = {name: _value(name, text) for name, text in options.set}
        plan = Trace(options.capacity, multiprocessors=range(0, 4096, options.every) if options.every > 1 else None)
        for problem, found in chosen:
            case = variants.with_options(_case(problem.cases["default", backend], options), settings)
            arrays = variants.inputs(problem, case, backend)
            shown: list[tuple[str, Timeline]] = []
            for variant in found:
                name = f"{problem.name}.{variant.name}"
                timeline = variants.timeline_of(problem, variant, case, backend, arrays, plan)
                shown.append((name, timeline))
                block = timeline.block(options.block) if options.block is not None else None
                for path in _paths(options.output, name):
                    if path.suffix == ".json" and not options.whole:
                        number = (block or timeline.middle_block()).multiprocessor
                        timeline.of([b for b in timeline.blocks if b.multiprocessor == number]).save(path)
                    else:
                        timeline.save(path, block=block, start=between[0], end=between[1])
            where = shown[0][1].device
            print(f"{problem.name} {'×'.join(map(str, case.shape))} {case.dtype}, {where}: copy time that is hidden\n")
            print(variants.table(shown))
            for name, timeline in shown:
                for note in timeline.notes:
                    print(f"{name}: {note}")
            if options.overhead:
                print("\nmedian times of a launch\n")
                print(variants.overhead_table(variants.overheads(found, case, arrays, plan)))
            print(flush=True)
    except (ImportError, KeyError, TypeError, ValueError, launch.LaunchError, sim.SimError) as error:
        print(f"timeline: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2
    return 0


def _case(cases: list[Case], options: argparse.Namespace) -> Case:
    if not 0 <= options.case < len(cases):
        known = "; ".join(f"{i}: {'×'.join(map(str, case.shape))} {dict(case.options)}" for i, case in enumerate(cases))
        raise ValueError(f"--case {options.case}: there are {known}")
    case = cases[options.case]
    if options.shape is None:
        return case
    try:
        shape = tuple(int(extent) for extent in options.shape.split(","))
    except ValueError:
        shape = ()
    if len(shape) != len(case.shape) or min(shape) < 1:
        expected = ",".join(map(str, case.shape))
        raise ValueError(f"--shape {options.shape}: expected {len(case.shape)} positive numbers, such as {expected}")
    return dataclasses.replace(case, shape=shape)


def _between(text: str | None) -> tuple[float | None, float | None]:
    if text is None:
        return None, None
    start, _, end = text.partition(":")
    try:
        return float(start), float(end)
    except ValueError:
        raise ValueError(f"--between {text}: expected two numbers of nanoseconds, such as 1000:5000") from None


def _value(name: str, text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise ValueError(f"--set {name} {text}: expected a value such as 1 or '(16, 128)'") from None


def _paths(output: Path | None, name: str) -> list[Path]:
    """The files to write for one variant."""
    if output is None:
        return []
    if not output.suffix:
        output.mkdir(parents=True, exist_ok=True)
        return [output / f"{name}.svg", output / f"{name}.json"]
    output.parent.mkdir(parents=True, exist_ok=True)
    return [output]


if __name__ == "__main__":
    sys.exit(main())
