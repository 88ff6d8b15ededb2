#!/usr/bin/env python
"""Copy engines against compute: the copy-kernel-copy exercise through the pipeline in every mode, beside the ideal."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from numba_tma import driver, suite
from numba_tma.overlap import Model, measure, peers, pitfalls, soak, table, timeline
from numba_tma.overlap.rates import measure_peer_rates
from numba_tma.tables import overlap as tables


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    shown = "\n".join(f"  {name:16}{summary(name)}" for name in pitfalls.PITFALLS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"pitfalls, by name:\n{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        nargs="*",
        default=["modes"],
        metavar="WHAT",
        help=f"{', '.join(PARTS)}, or one of the pitfalls named below (default: modes)",
    )
    parser.add_argument(
        "--mib", type=float, default=None, help="MiB of a batch each way (default: 64; a model: 1/1024)"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 32], metavar="N", help="numbers of batches")
    parser.add_argument("--soak-batches", type=int, default=None, metavar="N", help="(default: 10000; a model: 200)")
    parser.add_argument("--model", action="store_true", help="run on the model of the engines also where a GPU is")
    parser.add_argument("--h2d", type=float, default=50, metavar="GB/S", help="the model's rate to the device")
    parser.add_argument("--d2h", type=float, default=50, metavar="GB/S", help="the model's rate from the device")
    parser.add_argument(
        "--compute", type=float, default=None, metavar="MS", help="the model's kernel (default: a copy)"
    )
    parser.add_argument("--output", type=Path, default=None, metavar="FOLDER", help="timelines as .svg and .json")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write what was found")
    return parser.parse_args(arguments)


def summary(name: str) -> str:
    """A pitfall in a line."""
    return pitfalls.PITFALLS[name].__doc__.splitlines()[0]


def show(rows: tables.Rows) -> None:
    """Print a table as the pages of the documentation have it."""
    print(tabulate(*rows, "simple", disable_numparse=True), "\n")


class Session:
    """What the parts run on: the GPU with a balanced kernel, or a model with stated rates."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.gpus = driver.device_count()
        on_model = options.model or not self.gpus
        nbytes = int((options.mib if options.mib is not None else (1 / 1024 if on_model else 64)) * 2**20)
        self.found: dict[str, Any] = {"circumstances": suite.circumstances()}
        if on_model:
            # A simulated batch is small: its copies are given the time that 64 MiB take.
            standing = 64 << 20
            compute = 1e-3 * options.compute if options.compute is not None else standing / (options.h2d * 1e9)
            self.model: Model | None = Model(
                h2d=options.h2d * 1e9, d2h=options.d2h * 1e9, compute=compute, scale=standing / nbytes
            )
            self.words, self.rounds = nbytes // 4, 8
            print(f"no GPU is used; all times are of a {self.model.words()}, never measured\n")
        else:
            self.model = None
            balance = self.found["balance"] = measure.balance(nbytes)
            self.words, self.rounds = balance["words"], balance["rounds"]
            rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in balance["rates"].items())
            print(f"{driver.device_name()}, {balance['copy_engines']} copy engines; GB/s: {rates}")
            print(f"batches of {nbytes / 2**20:g} MiB each way, {self.rounds} rounds a word\n")

    def setting(self) -> pitfalls.Setting:
        """For the demonstrations."""
        return pitfalls.Setting(self.words, self.rounds, model=self.model)

    def modes(self) -> dict[str, Any]:
        """Every mode, beside the ideal."""
        reports, alone = measure.modes(self.words, self.rounds, self.options.batches, model=self.model)
        if self.options.output:
            self.options.output.mkdir(parents=True, exist_ok=True)
            shown = min(self.options.batches, key=lambda count: abs(count - 8))
            for name, by_count in reports.items():
                for suffix in ("svg", "json"):
                    timeline.save(by_count[shown], self.options.output / f"{name}.{suffix}")
        for count in self.options.batches:
            runs = {name: by_count[count] for name, by_count in reports.items()}
            print(table(runs, alone, baseline="serial_pinned"), "\n")
        return measure.as_rows(reports, alone)

    def soak(self) -> dict[str, Any]:
        """Many small batches, checked; then a fault in each stage."""
        count = self.options.soak_batches or (200 if self.model else 10_000)
        words = min(self.words, 1 << 14)
        found: dict[str, Any] = {"runs": [], "faults": []}
        for mode in ("three_streams", "producer"):
            found["runs"].append(soak.soak(count, words, mode=mode, model=self.model))
            with soak.make_pipeline(words, mode=mode, model=self.model) as pipeline:
                found["faults"] += [{"mode": mode, **soak.with_fault(pipeline, stage, 5, 12)} for stage in soak.FAULTS]
        show(tables.soak_rows(found["runs"]))
        if self.model:
            print("(here alone the time is real: what simulating took)\n")
        show(tables.fault_rows(found["faults"]))
        return found

    def pitfall(self, name: str) -> dict[str, Any]:
        """One demonstration."""
        print(f"{name}: {summary(name)}")
        found = pitfalls.PITFALLS[name](self.setting())
        show(tables.PITFALLS[name](found))
        return found

    def pitfalls(self) -> dict[str, Any]:
        """All demonstrations that can run here."""
        names = [name for name in pitfalls.PITFALLS if self.model is None or name not in pitfalls.NEED_GPU]
        return {name: self.pitfall(name) for name in names}

    def peer(self) -> dict[str, Any]:
        """Copies from one GPU to another, and a pipeline whose batches lie there.

        Raises:
            LaunchError: there are no two GPUs.
        """
        self.need("peer: copies from GPU to GPU", 2)
        found: dict[str, Any] = {
            "gpus": [driver.device_name(gpu) for gpu in range(self.gpus)],
            "rates": [rates.as_dict() for rates in measure_peer_rates()],
        }
        show(tables.peer_rows(found["rates"]))
        found["pipeline"] = peers.fed_from(self.words, self.rounds)
        show(tables.fed_rows(found["pipeline"]))
        return found

    def shards(self) -> list[dict[str, Any]]:
        """GPT-2's batches over the GPUs, by Dask.

        Raises:
            LaunchError: there is no GPU.
        """
        from numba_tma.gpt2 import benchmark_shards

        self.need("shards: workers with a GPU each", 1)
        begin = time.perf_counter()
        benchmark_shards.precompile(os.cpu_count() or 1)
        print(f"GPT-2's kernels: {time.perf_counter() - begin:.0f} s", flush=True)
        self.found["circumstances"] |= {
            "distributed": importlib.metadata.version("distributed"),
            "cpu_cores": os.cpu_count(),
        }
        self.found["shards"] = found = []
        for row in benchmark_shards.by_gpus(range(self.gpus)):
            found.append(row)
            print(row, flush=True)
            self.save()
        show(tables.shard_rows(found))
        show(tables.transfer_rows(found))
        return found

    def need(self, what: str, gpus: int) -> None:
        """Refuse a part that measures.

        Raises:
            LaunchError: there are fewer GPUs, or a model was asked for.
        """
        if self.model is not None or self.gpus < gpus:
            here = "none is used" if self.model is not None else f"there is {self.gpus}"
            raise driver.LaunchError(f"{what} need {'a GPU' if gpus == 1 else f'{gpus} GPUs'}, and here {here}")

    def save(self) -> None:
        """Write what has been found, if a file is wanted."""
        if self.options.json:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(self.found, indent=1) + "\n")

    def sweeps(self) -> dict[str, Any]:
        """Shares of kernel and copy, graphs, preparing, depths.

        Raises:
            LaunchError: there is no GPU.
        """
        self.need("sweeps: measurements", 1)
        found = {
            "shares": measure.shares(self.words, self.rounds),
            "depths": measure.depths(self.words, self.rounds),
            "preparing": measure.preparing(self.words, self.rounds),
            "graphs": measure.graphs(),
        }
        for name, rows_of in tables.SWEEPS.items():
            show(rows_of(found[name]))
        return found


PARTS: dict[str, Callable[[Session], Any]] = {
    "modes": Session.modes,
    "soak": Session.soak,
    "pitfalls": Session.pitfalls,
    "sweeps": Session.sweeps,
    "peer": Session.peer,
    "shards": Session.shards,
}


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status is 1 for wrong results, 2 for what cannot be run, with the reason."""
    options = parse(arguments)
    try:
        unknown = [name for name in options.what if name not in PARTS and name not in pitfalls.PITFALLS]
        if unknown:
            known = ", ".join([*PARTS, *pitfalls.PITFALLS])
            raise ValueError(f"{', '.join(unknown)}: choose of {known}")
        if any(count < 1 for count in options.batches):
            raise ValueError(f"--batches {' '.join(map(str, options.batches))}: 1 or more")
        session = Session(options)
        for name in options.what:
            part = PARTS.get(name)
            session.found[name] = part(session) if part else session.pitfall(name)
            sys.stdout.flush()
            session.save()
    except ArithmeticError as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    except (TypeError, ValueError, driver.LaunchError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
