"""Run jobs in processes of their own, each with a time limit: one that faults or hangs takes no other along."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait


@dataclass(frozen=True)
class Outcome:
    """What a job returned, or how it failed."""

    value: object = None
    failure: str = ""


def _driver_is_initialised() -> bool:
    """Whether this process has called cuInit; a forked child could then not use the GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialised = 3
    return cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialised


def _child(pipe: Connection, function: Callable, arguments: tuple) -> None:
    try:
        pipe.send(Outcome(value=function(*arguments)))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send(Outcome(failure=f"{text} (in {where.name}, {where.filename.rsplit('/', 1)[-1]}:{where.lineno})"))
    pipe.close()


def run(jobs: Mapping[str, tuple[Callable, tuple]], limit_s: float, workers: int) -> dict[str, Outcome]:
    """Call every job's function with its arguments in a process of its own, `workers` at once; outcomes by name.

    Functions must be importable and arguments and values picklable. The processes are forked, so that what is
    imported and compiled already serves all of them, unless this process uses the GPU itself.
    """
    context = multiprocessing.get_context("spawn" if _driver_is_initialised() else "fork")
    waiting = list(jobs.items())[::-1]
    running: dict[Connection, tuple[str, multiprocessing.Process, float]] = {}
    leaving: list[tuple[multiprocessing.Process, float]] = []
    outcomes: dict[str, Outcome] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name, (function, arguments) = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, function, arguments), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic() + limit_s)
        for pipe in wait(list(running), timeout=0.2):
            name, process, _ = running.pop(pipe)
            try:
                outcomes[name] = pipe.recv()
            except EOFError:
                process.join(5)
                outcomes[name] = Outcome(failure=f"the process died with exit code {process.exitcode}")
            leaving.append((process, time.monotonic() + 5))
        for pipe, (name, process, end) in list(running.items()):
            if time.monotonic() > end:
                del running[pipe]
                process.kill()
                outcomes[name] = Outcome(failure=f"no answer within {limit_s:g} s")
    for process, end in leaving:  # one may hang in the driver's clean-up after a fault
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
    return {name: outcomes[name] for name in jobs}
