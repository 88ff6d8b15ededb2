"""The command-line checker on Python kernels and on PTX files, good, bad and hostile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numba_tma import check

DATA = Path(__file__).parent / "data"
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "check.py")
KERNEL = """
import numpy as np
from numba import cuda
from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, ptx
from numba_tma.pipeline import mbarrier_wait

smem = Shared(tile=Tiles(1, (8, 32), np.float32), full=Barriers(1))


@kernel(threads=32, shared=smem)
def first_row(x_map, out):
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes + EXTRA)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
    cuda.syncthreads()
    mbarrier_wait(smem.full[0], 0)
    out[cuda.threadIdx.x] = smem.tile[0][0, cuda.threadIdx.x]


def arguments():
    return 1, (TensorMap(np.ones((8, 32), np.float32), smem.tile), np.empty(32, np.float32))
"""
PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry add(.param .u64 x, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    setp.ge.u32 %p, %r2, %r1;
    @%p ret;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.u32 %r3, [%rd3];
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd3], %r3;
    ret;
}
"""


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def described(n: int, length: int) -> dict:
    array = {"array": {"shape": [length], "dtype": "uint32", "fill": "arange"}, "name": "x"}
    return {"block": [64], "params": [array, {"u32": n}]}


def test_a_clean_python_kernel(tmp_path):
    file = tmp_path / "clean.py"
    file.write_text(KERNEL.replace("EXTRA", "0"))
    done = run(file, "--schedules", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings under 5 schedules" in done.stdout


def test_a_warning_of_python_is_given_once(tmp_path):
    file = tmp_path / "warns.py"
    file.write_text(
        KERNEL.replace("EXTRA", "0").replace("np.ones((8, 32), np.float32)", "np.ones((8, 36), np.float32)[:, :35]")
    )
    done = run(file, "--schedules", 4)
    assert done.returncode == 0 and done.stderr.count("StoreOverrunWarning") == 1, done.stdout + done.stderr


def test_a_python_kernel_that_hangs(tmp_path):
    file = tmp_path / "hangs.py"
    file.write_text(KERNEL.replace("EXTRA", "16"))
    done = run(f"{file}:first_row", "--schedules", 2, "--json", tmp_path / "findings.json")
    assert done.returncode == 1 and "16 bytes missing" in done.stdout
    line = 1 + KERNEL.splitlines().index("    mbarrier_wait(smem.full[0], 0)")
    assert f"hangs.py:{line}" in done.stdout
    findings = json.loads((tmp_path / "findings.json").read_text())
    assert findings[0]["identifier"] == "deadlock" and findings[0]["severity"] == "error"


def test_ptx_with_a_description(tmp_path):
    file, launch = tmp_path / "add.ptx", tmp_path / "launch.json"
    file.write_text(PTX)
    launch.write_text(json.dumps(described(50, 50)))
    assert run(file, "--launch", launch).returncode == 0
    launch.write_text(json.dumps(described(60, 50)))
    done = run(file, "--launch", launch, "--json", "-")
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)
    assert finding["identifier"] == "out-of-bounds" and "past the end of x" in finding["message"]


def test_ptx_tensor_maps_in_descriptions(tmp_path):
    params = [
        {"array": {"shape": [64, 64], "dtype": "float16"}, "name": "x"},
        {"tensor_map": {"of": "x", "box": [8, 64], "swizzle": "128B"}},
        {"f32": 0.5},
        {"bytes": "00ff"},
    ]
    packed = check._parameters(params, check._Arrays(np.random.default_rng(0), tmp_path))
    assert [len(p) for p in packed] == [8, 128, 4, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": None}, "block is None"),
        ({"grid": [1, 2, 3, 4]}, "one to three positive integers"),
        ({"grd": [1]}, "unknown fields grd"),
        ({"params": {}}, "'params' must be a list"),
        ({"params": [{"array": {"shape": [1 << 40], "dtype": "float32"}}, {"u32": 1}]}, "beyond"),
        ({"params": [{"array": {"shape": [4], "dtype": "float33"}}, {"u32": 1}]}, "params\\[0\\]"),
        ({"params": [{"u32": "five"}]}, "params\\[0\\]"),
        ({"params": [{"u32": 1, "u64": 2}]}, "one of array"),
        ({"params": [{"tensor_map": {"of": "y", "box": [1]}}]}, "no array 'y'"),
        ({"params": [{"bytes": "zz"}]}, "params\\[0\\]"),
        ({"params": [{"array": "y"}]}, "params\\[0\\]: there is no array 'y'"),
        ({"arrays": []}, "'arrays' must be an object"),
        ({"arrays": {"y": {"file": "missing.npy"}}}, "arrays\\['y'\\].*missing.npy"),
        ({"arrays": {"y": {"shape": [4]}}}, "arrays\\['y'\\]: missing or unknown 'dtype'"),
        ({"expect": {"y": {"shape": [4], "dtype": "uint32"}}}, "expect\\['y'\\]: there is no array 'y'"),
        ({"expect": {"x": {"shape": [5], "dtype": "uint32"}}}, r"expect\['x'\]: shape \(5,\); the array's is \(4,\)"),
    ],
)
def test_descriptions_are_checked(change, message, tmp_path):
    file, launch = tmp_path / "add.ptx", tmp_path / "launch.json"
    file.write_text(PTX)
    launch.write_text(json.dumps({**described(4, 4), **change}))
    with pytest.raises(check.CheckError, match=message):
        check.ptx_launch(file, launch)()


@pytest.mark.parametrize("text", ["", "not ptx", PTX[:-30], PTX.replace("add.u32", "frobnicate.u32"), "\x00\xff"])
def test_hostile_files_end_in_a_named_error(text, tmp_path):
    file, launch = tmp_path / "bad.ptx", tmp_path / "launch.json"
    file.write_text(text)
    launch.write_text(json.dumps(described(4, 4)))
    done = run(file, "--launch", launch)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert "bad.ptx" in done.stderr or "frobnicate" in done.stdout or "kernel" in done.stdout


def test_usage_errors(tmp_path):
    assert run(tmp_path / "missing.py").returncode == 2
    assert "needs --launch" in run(tmp_path / "add.ptx").stderr
    file = tmp_path / "empty.py"
    file.write_text("")
    assert "has 0 kernels" in run(file).stderr
    file.write_text("raise RuntimeError('no')")
    done = run(file)
    assert done.returncode == 2 and "RuntimeError while importing" in done.stderr


def test_numbers_are_compared_with_files(tmp_path, rng):
    file, launch = tmp_path / "add.ptx", tmp_path / "launch.json"
    file.write_text(PTX)
    x = rng.integers(0, 1000, 50).astype(np.uint32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "sum.npy", x + 1)
    description = {"block": [64], "arrays": {"x": {"file": "x.npy"}}, "params": [{"array": "x"}, {"u32": 50}]}
    description["expect"] = {"x": {"file": "sum.npy"}}
    launch.write_text(json.dumps(description))
    assert run(file, "--launch", launch).returncode == 0
    wanted = x + 1
    wanted[7] += 2
    np.save(tmp_path / "sum.npy", wanted)
    (finding,) = check.check(check.ptx_launch(file, launch), 3)
    assert (finding.identifier, finding.severity) == ("wrong-numbers", "error")
    assert (
        f"x: 1 of 50 elements are not as expected, the first at (7,): {x[7] + 1} instead of {x[7] + 3}"
        in finding.message
    )
    description["expect"]["x"]["atol"] = 2
    launch.write_text(json.dumps(description))
    assert check.check(check.ptx_launch(file, launch), 3) == []


def test_hazards_of_a_launch_that_fails_are_findings(tmp_path):
    file = tmp_path / "hangs.py"
    file.write_text(KERNEL.replace("EXTRA", "16").replace("        ptx.fence_mbarrier_init()\n", ""))
    findings = check.check(check.python_launch(file, None, "arguments"), 1)
    assert [f.identifier for f in findings][:1] == ["deadlock"]
    assert "mbarrier-init-not-fenced" in [f.identifier for f in findings][1:]
    assert "mbarrier-init-not-fenced" not in findings[0].message


TRITON = {
    "double_tiles": lambda x, y: {"y": 2 * x},
    "row_sums": lambda x, out, scratch: {"out": x.astype(float).sum(axis=1)},
    "matmul": lambda a, b, c: {"c": a.astype(float) @ b.astype(float).T},
    "matmul_specialized": lambda a, b, c: {"c": a.astype(float) @ b.astype(float).T},
}


def described_triton(name, folder, rng):
    """The launch description with random arrays and what must come of them, in files; its path."""
    fields = json.loads((DATA / f"triton_{name}.json").read_text())
    arrays = {key: rng.standard_normal(item["shape"]).astype(item["dtype"]) for key, item in fields["arrays"].items()}
    for key, item in fields["arrays"].items():
        if item["fill"] == "random":
            np.save(folder / f"{key}.npy", arrays[key])
            fields["arrays"][key] = {"file": f"{key}.npy"}
    fields["expect"] = {}
    for key, values in TRITON[name](**arrays).items():
        np.save(folder / f"expected_{key}.npy", values)
        fields["expect"][key] = {"file": f"expected_{key}.npy", "rtol": 2e-3, "atol": 2e-2}
    path = folder / "launch.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels(name, tmp_path, rng, seed):
    """Tensor descriptors, a map made on the GPU, wgmma, warps that only copy: another compiler's PTX."""
    launch = check.ptx_launch(DATA / f"triton_{name}.ptx", described_triton(name, tmp_path, rng))
    findings = check.check(launch, 5, seed)
    # Triton puts no fence between mbarrier.init and the copy that signals it, unless it makes the map as well. And to
    # tell the other warps what to do, it lets four warps store the same word.
    known = {"mbarrier-init-not-fenced"} | ({"shared-memory-race"} if name == "matmul_specialized" else set())
    assert {f.identifier for f in findings} <= known, [f.message for f in findings]
    assert all("triton_tiles.py" in f.message for f in findings)


def test_a_triton_kernel_with_a_mistake(tmp_path, rng):
    """A broken wait: what is read too early is found, and said with the line of the Triton source."""
    launch = described_triton("double_tiles", tmp_path, rng)
    text = (DATA / "triton_double_tiles.ptx").read_text()
    wait = text[text.index("waitLoop:") : text.index("@!complete bra.uni waitLoop;") + 28]
    assert "try_wait" in wait
    file = tmp_path / "broken.ptx"
    file.write_text(text.replace(wait, ""))
    done = run(file, "--launch", launch, "--schedules", 3, "--json", "-")
    assert done.returncode == 1
    findings = {f["identifier"]: f["message"] for f in json.loads(done.stdout)}
    assert "triton_tiles.py:2" in findings["tile-used-before-wait"]
