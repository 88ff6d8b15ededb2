#!/usr/bin/env python
"""Time one plain shared-memory kernel in this project's simulator and in Numba's own (NUMBA_ENABLE_CUDASIM=1).

Each runs in a process of its own on the same kernel, size and machine; both results are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

TILE = 64


def kv_sum(k, v, out):
    """out[r] = sum over c of k[r, c] * v[r, c]; one block of 64 threads a strip of 64 rows, tile by tile."""
    from_k = cuda.shared.array((TILE, TILE), np.float16)
    from_v = cuda.shared.array((TILE, TILE), np.float16)
    thread = cuda.threadIdx.x
    first = cuda.blockIdx.x * TILE
    total = np.float32(0)
    for step in range(k.shape[1] // TILE):
        for r in range(TILE):
            from_k[r, thread] = k[first + r, step * TILE + thread]
            from_v[r, thread] = v[first + r, step * TILE + thread]
        cuda.syncthreads()
        for c in range(TILE):
            total += np.float32(from_k[thread, c]) * np.float32(from_v[thread, c])
        cuda.syncthreads()
    out[first + thread] = total


def one(simulator: str, size: int) -> float:
    """Seconds of the second run (the first compiles), checked against float64."""
    global cuda
    from numba import cuda

    rng = np.random.default_rng(size)
    k, v = (rng.standard_normal((size, size)).astype(np.float16) for _ in range(2))
    out = np.full(size, np.nan, np.float32)
    if simulator == "numba":
        launch = cuda.jit(kv_sum)[size // TILE, TILE]
    else:
        from numba_tma import kernel, use_backend

        launcher = kernel(kv_sum, threads=TILE)[size // TILE]

        def launch(*arguments):
            with use_backend("sim"):
                launcher(*arguments)

        launch(k[:TILE], v[:TILE], out[:TILE]) if size == TILE else launch(k, v, out)
        out[:] = np.nan
    started = time.perf_counter()
    launch(k, v, out)
    spent = time.perf_counter() - started
    expected = (k.astype(np.float64) * v.astype(np.float64)).sum(axis=1)
    error = np.max(np.abs(out - expected)) / np.max(np.abs(expected))
    if not error < 1e-4:
        raise SystemExit(f"{simulator}: error {error}")
    return spent


def main() -> int:
    """Compare, and show or write the two times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns, a multiple of 64 (default 1024)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--one", choices=["numba", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(one(options.one, options.size))
        return 0
    seconds = {}
    for simulator in ("ours", "numba"):
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1" if simulator == "numba" else "0"}
        command = [sys.executable, __file__, "--one", simulator, "--size", str(options.size)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        seconds[simulator] = float(done.stdout)
        print(f"{simulator}: {seconds[simulator]:.2f} s", flush=True)
    print(f"{seconds['numba'] / seconds['ours']:.0f} times faster")
    if options.json:
        record = {
            "kernel": "kv_sum, 64 × 64 tiles in shared memory",
            "shape": [options.size, options.size],
            "dtype": "float16",
            "seconds": seconds,
            "date": time.strftime("%Y-%m-%d"),
            "processors": os.cpu_count(),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
