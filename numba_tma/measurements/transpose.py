"""Benchmarks of transpose for docs/transpose.md: its steps over tiles, and what the GPU's counters say of banks."""

from __future__ import annotations

import numpy as np

from .. import counters, launch
from ..device_array import DeviceArray
from ..kernels import Case, transpose
from .timing import Record, timed

# Spans of 128 bytes each way, and threads.
_TILES = (((1, 1), 64), ((2, 1), 128), ((1, 2), 128), ((2, 2), 256), ((2, 2), 128))


def transpose_tiles(side: int = 16384) -> list[Record]:
    """Each step of transpose for three element types, over tiles; PyTorch's copy of the transposed view beside them."""
    problem = transpose.PROBLEM
    records = []
    for dtype in ("float32", "float16", "int8"):
        case = Case((side, side), dtype)
        arrays = {name: DeviceArray.empty(case.shape, np.dtype(dtype)) for name in ("source", "target")}
        tiled = [{"tile": tile, "threads": threads} for tile, threads in _TILES]
        options = {"vector": tiled, "ring": tiled, "store": tiled}
        rows = [(v, o) for v in problem.variants for o in options.get(v.name, [{}])]
        launches = {str(number): variant.bind(arrays, **chosen) for number, (variant, chosen) in enumerate(rows)}
        named = [(variant.name, chosen) for variant, chosen in rows]
        peer = problem.peers["torch"](arrays)
        if peer is not None:
            launches[str(len(rows))] = peer
            named.append(("torch", {}))
        records += timed(launches, named, {"shape": list(case.shape), "dtype": dtype}, problem.bytes_moved(case))
    return records


_BANKS = {
    "ld_shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "st_shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}


def bank_conflicts(size: int = 512) -> list[Record]:
    """Wavefronts of shared memory that each step of transpose takes: the simulator's beside the GPU's."""
    problem = transpose.PROBLEM
    targets = [
        counters.Target(problem.name, variant.name, (size, size), dtype)
        for dtype in ("float32", "float16", "int8")
        for variant in problem.variants
    ]
    records = []
    for target, found in zip(targets, counters.read(targets, list(_BANKS.values())), strict=True):
        host = problem.inputs(Case(target.shape, target.dtype), np.random.default_rng(0))
        with launch.use_backend("sim", banks=True, hazards=False):
            report = problem.variant(target.variant).bind(host)()
        record: Record = {"variant": target.variant, "shape": list(target.shape), "dtype": target.dtype}
        for direction, metric in _BANKS.items():
            use = report.banks[direction]
            record[direction] = {"gpu": found[metric], "simulator": use.wavefronts, "least": use.least}
        records.append(record)
    return records
