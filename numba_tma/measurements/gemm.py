"""What docs/gemm.md tells of beyond `run_all` and scripts/tune_gemm.py: scripts/measure.py runs these.

All but `code` need a GPU and PyTorch. Times are medians in seconds; what is compared runs in turn.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from .. import bench
from ..kernels.gemm import choice, tuning
from ..kernels.gemm.choice import Shape
from ..kernels.gemm.ladder import PROBLEM
from ..kernels.gemm.matmul import matmul
from ..kernels.problem import Case
from ..launch import recording
from ..machine_code import main_loop, mnemonics
from .timing import Record

_ARITHMETIC = ("HGMMA", "HMMA", "FFMA")
_SPECIAL = ("LDGSTS", "LDSM", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG", "ACQBULK")


def code() -> list[Record]:
    """For each step's kernel for bfloat16 at 8192³: threads and shared memory of a block, registers of a thread, and
    its main loop: instructions, those that multiply, and what of TMA and tensor cores is anywhere in it.

    Compiles, and runs nothing.
    """
    arrays = PROBLEM.inputs(Case((256, 256, 128), "bfloat16"), np.random.default_rng(0))
    large = Shape(1, 8192, 8192, 8192)
    chosen = {"tuned": {"configuration": choice.choose(tuning.types_of("bfloat16", large), large)}}
    records = []
    for variant in PROBLEM.variants:
        with recording("sm_90a") as recorded:
            variant.bind(arrays, **chosen.get(variant.name, {}))()
        kernel, compiled = recorded.launches[0].kernel, recorded.launches[0].compiled
        loop = main_loop(compiled.sass)
        multiplying = [mnemonic for mnemonic in loop if mnemonic.startswith(_ARITHMETIC)]
        records.append(
            {
                "variant": variant.name,
                "threads": int(np.prod(kernel.threads)),
                "shared_bytes": kernel.shared_bytes + compiled.resources.shared_bytes,
                "registers": compiled.resources.registers,
                "lent_registers": [int(n) for n in re.findall(r"setmaxnreg\.\w+\S* +(\d+)", compiled.ptx)],
                "loop": len(loop),
                "products": f"{len(multiplying)} {multiplying[0]}",
                "special": sorted({m for m in mnemonics(compiled.sass) if m.startswith(_SPECIAL)}),
            }
        )
    return records


def host_overhead() -> list[Record]:
    """Host time of a call of `matmul` and of `torch.mm` on 256³, back to back."""
    import torch

    a, w = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls = {
        "matmul, out=": lambda: matmul(a, w.T, out=out),
        "torch.mm, out=": lambda: torch.mm(a, w.T, out=out),
        "matmul": lambda: matmul(a, w.T),
        "torch.mm": lambda: torch.mm(a, w.T),
    }
    records = []
    for name, call in calls.items():
        call()
        records.append({"what": name, "seconds": bench.host_overhead(call).median})
    return records


_EARLY = ("GPT-2 qkv", "1000 cubed", "Llama-3 70B qkv, 128 rows")


def early_start() -> list[Record]:
    """`matmul` in a graph of many launches, whose kernels may start before the one in front has ended, or may not."""
    records = []
    for name in _EARLY:
        shape = tuning.SHAPES[name]
        types = tuning.types_of("bfloat16", shape)
        chosen = choice.choose(types, shape)
        configurations = {key: replace(chosen, programmatic=key == "early") for key in ("early", "late")}
        seconds = tuning.in_turn(shape, types, configurations, repeats=15)
        records.append(
            {
                "name": name,
                "blocks": chosen.grid(shape),
                "seconds": seconds["late"],
                "seconds_early": seconds["early"],
            }
        )
    return records
