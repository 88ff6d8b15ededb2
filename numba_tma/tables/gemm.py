"""Tables of docs/gemm.md: the ladder, its machine code, and `matmul` beside cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ..kernels.gemm.choice import SMS, Configuration, Shape, blocks_per_sm
from ..report import markdown, seconds
from .records import Record, load, load_records, runs

MATMUL = "h200_gemm.json"
MEASUREMENTS = "h200_gemm_measurements.json"
_AHEAD = 0.98  # of cuBLAS' speed; what is within 2 % of it counts as equal
_FLOPS_A_BYTE = 989 / 4.8  # of an H200: tensor cores over memory
_SHORT = 15e-6


def ladder(records: Sequence[Record]) -> str:
    """TFLOP/s of each step at each size, beside cuBLAS in the same run."""
    groups: dict[tuple, dict[str, Record]] = {}
    for record in records:
        if record["tflop_per_s"]:
            groups.setdefault((*record["shape"], record["dtype"]), {})[record["variant"]] = record
    headers = ["step"]
    for *shape, dtype in groups:
        size = f"{shape[0]}³" if len(set(shape)) == 1 else "×".join(map(str, shape))
        headers += [f"{size} {dtype}, TFLOP/s", "of cuBLAS"]
    rows = []
    for variant in max(groups.values(), key=len):
        row = [f"`{variant}`"]
        for group in groups.values():
            record = group.get(variant)
            row.append(f"{record['tflop_per_s']:,.0f}" if record else "")
            row.append(f"{record['ratio_to_peer']:.0%}" if record and record["ratio_to_peer"] else "")
        rows.append(row)
    return markdown(rows, headers)


def code(results: Path) -> str:
    """What each step's kernel takes, and what its main loop consists of."""
    rows = []
    for r in _measurements(results)["gemm_code"]:
        lent = f", then {' and '.join(map(str, r['lent_registers']))}" if r["lent_registers"] else ""
        rows.append(
            [
                f"`{r['variant']}`",
                r["threads"],
                f"{r['registers']}{lent}",
                f"{r['shared_bytes'] / 1024:.0f} KB" if r["shared_bytes"] else "",
                r["loop"],
                f"{r['products'].split()[0]} `{r['products'].split()[1]}`",
                ", ".join(f"`{mnemonic}`" for mnemonic in r["special"]),
            ]
        )
    loop = ["main loop, instructions", "of them products"]
    return markdown(rows, ["step", "threads", "registers a thread", "shared memory", *loop, "elsewhere"])


def matmul(results: Path) -> str:
    """All products that were measured, and the kernels that they got."""
    rows = []
    for r in products(results):
        rate = flops(r) / 1e12
        rows.append(
            [
                r["name"],
                "×".join(str(r["shape"][key]) for key in "mnk"),
                kind(r),
                kernel_in_words(Configuration(**r["configuration"])),
                seconds(r["seconds"]),
                f"{rate / r['seconds']:.0f}",
                f"{rate / r['cublas_seconds']:.0f}",
                f"{r['cublas_seconds'] / r['seconds']:.2f}×",
            ]
        )
    headers = ["product", "M×N×K", "type", "kernel", "time", "TFLOP/s", "cuBLAS", "vs cuBLAS"]
    return markdown(rows, headers)


def behind(results: Path) -> str:
    """The products at which cuBLAS is faster, with what is known of why."""
    slower = [r for r in products(results) if r["cublas_seconds"] < _AHEAD * r["seconds"]]
    rows = []
    for r in sorted(slower, key=lambda r: r["cublas_seconds"] / r["seconds"]):
        configuration, shape = Configuration(**r["configuration"]), Shape(**r["shape"])
        rows.append(
            [
                r["name"],
                f"{r['cublas_seconds'] / r['seconds']:.2f}×",
                kernel_in_words(configuration),
                f"{waves(configuration, shape):.2f}",
                f"{moved(r) / r['seconds'] / 1e12:.1f}",
                reason(r),
            ]
        )
    return markdown(rows, ["product", "vs cuBLAS", "kernel", "waves", "TB/s", "why"])


def early_start(results: Path) -> str:
    """Kernels that may start before the one in front of them has ended, and kernels that may not."""
    rows = [
        [r["name"], r["blocks"], seconds(r["seconds"]), seconds(r["seconds_early"])]
        for r in _measurements(results)["gemm_early_start"]
    ]
    return markdown(rows, ["product", "blocks", "one after the other", "early start"])


def host_overhead(results: Path) -> str:
    """What a call costs the host."""
    rows = [[f"`{r['what']}`", f"{r['seconds'] * 1e6:.1f} µs"] for r in _measurements(results)["gemm_host_overhead"]]
    return markdown(rows, ["256³, back to back", "host time"])


def headline(results: Path) -> list[list[str]]:
    """`matmul` in a line for the front page, and beside cuBLAS at all shapes in another."""
    measured = [r for r in products(results) if kind(r) == "bfloat16"]
    large = next(r for r in measured if r["name"] == "8192 cubed")
    ratios = sorted(r["cublas_seconds"] / r["seconds"] for r in measured)
    rate = flops(large) / large["seconds"] / 1e12
    ahead = sum(ratio > 1 / _AHEAD for ratio in ratios)
    equal = sum(_AHEAD <= ratio <= 1 / _AHEAD for ratio in ratios)
    return [
        [
            "`matmul` of bfloat16 at 8192³, in a graph",
            f"{rate:.0f} TFLOP/s, {large['cublas_seconds'] / large['seconds']:.2f} × cuBLAS",
        ],
        [
            f"`matmul` beside cuBLAS at {len(ratios)} shapes",
            f"faster at {ahead}, equal within 2% at {equal}, {ratios[0]:.2f} × at the worst",
        ],
    ]


def products(results: Path) -> list[Record]:
    """What scripts/tune_gemm.py measured."""
    return load(results, MATMUL)["shapes"]


def flops(record: Record) -> float:
    """Flops of a product."""
    return 2.0 * math.prod(record["shape"].values())


def moved(record: Record) -> float:
    """Bytes of a product's operands and its result, each counted once."""
    shape = Shape(**record["shape"])
    size = {"float32": 4, "float16": 2, "bfloat16": 2}.get(record["dtype"], 1)
    read = size * (shape.m * shape.k + shape.n * shape.k)
    return shape.batch * (read + max(size, 2) * shape.m * shape.n)


def kind(record: Record) -> str:
    """Element type, and the order of B where its rows run along N."""
    return record["dtype"] + (", B row-major" if record["b_major"] == "n" else "")


def kernel_in_words(configuration: Configuration) -> str:
    """Tile of a block, and what its cluster does."""
    tile = f"{configuration.rows}×{configuration.columns}"
    if configuration.splits > 1:
        return f"{tile}, K in {configuration.splits}"
    shared = {"m": "B", "n": "A"}[configuration.across]
    return f"{tile}, {configuration.cluster} share {shared}" if configuration.cluster > 1 else tile


def waves(configuration: Configuration, shape: Shape) -> float:
    """How many times over the tiles fill the GPU."""
    slots = SMS * blocks_per_sm(configuration.consumers, configuration.columns) // configuration.cluster
    if configuration.splits > 1:
        slots = SMS // configuration.splits
    return math.prod(configuration.tiles(shape)) * shape.batch / slots


def reason(record: Record) -> str:
    """Why a product is slower than it might be, by its numbers alone."""
    configuration, shape = Configuration(**record["configuration"]), Shape(**record["shape"])

    def busy(candidate: Configuration) -> float:
        count = waves(candidate, shape)
        return count / math.ceil(count)

    if flops(record) / moved(record) < _FLOPS_A_BYTE:
        return f"a matter of bytes, which {configuration.grid(shape)} blocks ask for"
    if busy(configuration) < 0.95:
        return f"{1 - busy(configuration):.0%} of the SMs' time has no tile"
    if record["seconds"] < _SHORT:
        return "short: starting and filling the ring count"
    largest = Configuration(2, 256)
    if configuration.rows * configuration.columns < largest.rows * largest.columns and busy(largest) < 0.95:
        return f"128×256 would leave {1 - busy(largest):.0%} idle; smaller tiles ask more of L2"
    return "not known"


TABLES: dict[str, Callable[[Path], str]] = {
    "gemm ladder": lambda results: ladder(runs(load_records(results))["gemm"]),
    "gemm code": code,
    "gemm matmul": matmul,
    "gemm behind": behind,
    "gemm early start": early_start,
    "gemm host overhead": host_overhead,
}


def _measurements(results: Path) -> Record:
    return load(results, MEASUREMENTS)
