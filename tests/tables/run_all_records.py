"""Made-up records of `run_all`."""

from __future__ import annotations

CIRCUMSTANCES = {
    "date": "2026-01-02",
    "device": "GPU",
    "driver_cuda": 12080,
    "numba": "1",
    "numba-cuda": "2",
    "cuda-bindings": "3",
}


def measured(problem: str = "product", device: str = "GPU", **changes) -> dict:
    return {
        "problem": problem,
        "variant": "naive",
        "device": device,
        "shape": [8, 8],
        "dtype": "float16",
        "options": {},
        "ok": True,
        "reason": "",
        "error": 0.0,
        "seconds": 1e-3,
        "gb_per_s": 100.0,
        "tflop_per_s": 0.0,
        "share_of_device_copy": 0.5,
        "ratio_to_baseline": 1.0,
        "peer": None,
        "ratio_to_peer": None,
        "circumstances": CIRCUMSTANCES,
        **changes,
    }
