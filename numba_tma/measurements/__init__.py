"""Benchmarks behind the documentation's figures, beyond what `run_all` times; each gives plain records.

A page's benchmarks are in the module of its name. All but `gemm_code` need a GPU. Times are medians in seconds;
candidates that are compared run in turn in one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import (
    attention,
    attention_decode,
    attention_fp8,
    copy,
    gemm,
    kv_stream,
    launches,
    multicast,
    rows,
    stencil3d,
    tile_sweep,
    transpose,
    watchdog,
)
from .timing import Record

ALL: dict[str, Callable[[], Iterable[Record]]] = {
    "launch_overhead": launches.launch_overhead,
    "overlap": kv_stream.overlap,
    "tile_sweep_4096": lambda: kv_stream.tile_sweep(4096),
    "tile_sweep_16384": lambda: kv_stream.tile_sweep(16384),
    "small_in_a_graph": kv_stream.small_in_a_graph,
    "descriptor_place": launches.descriptor_place,
    "watchdog_cost": watchdog.cost,
    "fence_cost": kv_stream.fence_cost,
    "rows": rows.rows,
    "copy_types": copy.copy_types,
    "bytes_in_flight": tile_sweep.bytes_in_flight,
    "tile_sizes": tile_sweep.tile_sizes,
    "tile_shapes": tile_sweep.tile_shapes,
    "transpose_tiles": transpose.transpose_tiles,
    "stencil3d_tiles": stencil3d.stencil3d_tiles,
    "l2_promotion": tile_sweep.l2_promotion,
    "l2_promotion_of_boxes": tile_sweep.l2_promotion_of_boxes,
    "bank_conflicts": transpose.bank_conflicts,
    "multicast_traffic": multicast.multicast_traffic,
    "gemm_host_overhead": gemm.host_overhead,
    "gemm_early_start": gemm.early_start,
    "gemm_code": gemm.code,
    "attention_forward": attention.forward,
    "attention_steps": attention.steps,
    "attention_long": attention.long_context,
    "attention_errors": attention.errors,
    "attention_packed": attention.packed,
    "attention_host_overhead": attention.host_overhead,
    "decode_read_rate": attention_decode.read_rate,
    "decode_speed": attention_decode.speed,
    "decode_promotion": attention_decode.promotion,
    "attention_fp8_forward": attention_fp8.forward,
    "attention_fp8_errors": attention_fp8.errors,
    "attention_fp8_configurations": attention_fp8.configurations,
}
