"""The functions of ptx/ in kernels: inlined and linked, arguments, immediates, results, accepted types."""

from __future__ import annotations

import collections
import importlib.util
import linecache
import pickle
import re
import shutil
import subprocess
import sys
import types as python_types
from pathlib import Path

import numpy as np
import pytest
from llvmlite import ir
from numba import cuda, types
from numba.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numba_tma import Barriers, Buffer, Shared, TensorMap, Tiles, ptx, ptx_files
from numba_tma import kernel as numba_tma_kernel
from numba_tma.compile import CompileError, disassemble, link
from numba_tma.ptx import mbarrier_init

FUNCTIONS = ptx.functions()
CC = (9, 0, "a")


def to_ptx(function, *argument_types, **options):
    text, _ = cuda.compile(function, types.void(*argument_types), cc=CC, device=False, abi="numba", **options)
    return text


# ----------------------------------------------------------------------------------------------------
# Every function, inlined and linked
# ----------------------------------------------------------------------------------------------------

_ARGUMENT = {"u32": "u", "b32": "u", "s32": "s", "u64": "w", "b64": "w", "s64": "w", "f32": "f", "f64": "d"}
_BATCH = 80

# What surrounds an instruction rather than being it: moves between register files, address arithmetic, loops
# over the lanes of a warp, returns. HFMA2 is also how ptxas moves a constant.
_SCAFFOLD = set(
    re.split(
        r"\s+",
        """NOP BRA RET EXIT CALL MOV UMOV IMAD LDC ULDC R2UR PLOP3 PRMT UPRMT SHF USHF LOP3 ULOP3 IADD3
        UIADD3 VIADD LEA ULEA SEL FSEL USEL ISETP UISETP WARPSYNC YIELD BSSY BSYNC ENDCOLLECTIVE REDUX
        HFMA2 I2F I2FP F2F F2I VOTEU S2R S2UR CS2R DADD DSEL""",
    )
)
# Register arithmetic, for which ptxas picks one of several sequences by the code around it: the pure
# functions; and fence_mbarrier_init, which leaves an order and no instruction.
_NO_TRACE = {"fence_mbarrier_init"} | {name for name, f in FUNCTIONS.items() if f.effect == "pure"}
# What a kernel does once for many: the fence after mbarrier.init, reading the lane's number for a copy, where shared
# memory lies among generic addresses.
_ONCE = {"FENCE.VIEW.ASYNC.S", "SR_LANEID", "SR_SWINHI"}
# A linked function's last operands come by the stack if there are many.
_ON_THE_STACK = {"LDL.U16"}
_SHARED_WITHIN_A_KERNEL = ("mbarrier_init", "tensormap_cp_fenceproxy", "ld_shared_cluster", "st_shared_cluster")


def _kernel(names, *, linked):
    """A kernel that calls each function once, on a line of its own, and which line that is."""
    lines, where, results = ["def kernel(out, u, w, s, f, d, p):"], {}, 0
    for number, name in enumerate(names):
        function = FUNCTIONS[name]
        arguments = []
        for operand in function.operands:
            if operand.kind == "immediate":
                arguments.append(str(operand.values[-1]))
            elif operand.kind == "predicate":
                arguments.append("p")
            elif operand.kind == "number":
                arguments.append(_ARGUMENT[operand.type])
            else:  # an address of its own, or ptxas would merge the loads of different functions
                arguments.append(f"{_ARGUMENT[operand.type]} + {4096 * number}")
        call = f"ptx.{'linked.' if linked else ''}{name}({', '.join(arguments)})"
        count = len(function.results)
        lines.append(f"    r = {call}" if count else f"    {call}")
        where[len(lines)] = name
        for i in range(count):
            lines.append(f"    out[{results}] = r{f'[{i}]' if count > 1 else ''}")
            results += 1
    source, file = "\n".join(lines), f"<kernel of {names[0]} …, {'linked' if linked else 'inlined'}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    namespace = {"ptx": ptx}
    exec(compile(source, file, "exec"), namespace)
    return namespace["kernel"], where


def _compile(names, *, linked):
    kernel, where = _kernel(names, linked=linked)
    arguments = (
        types.float64[::1],
        types.uint32,
        types.uint64,
        types.int32,
        types.float32,
        types.float64,
        types.boolean,
    )
    text = to_ptx(kernel, *arguments, lineinfo=True)
    cubin, _ = link([("kernel", text), *ptx.link_files(text)], "sm_90a")
    return text, disassemble(cubin), where


_SASS = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[\dT]\w*\s+)?([A-Z][\w.]*)(.*)")


def _instructions(line):
    """The opcode of a line of SASS and the special registers it names, without scaffolding."""
    match = _SASS.match(line)
    if match is None or "@!PT" in line:  # @!PT: never executed, spacing for the hardware
        return set()
    found = {match[1]} if match[1].split(".")[0] not in _SCAFFOLD else set()
    return found | set(re.findall(r"SR_\w+", match[2]))


def _by_line(sass, where):
    found, current = collections.defaultdict(set), None
    for line in sass.splitlines():
        if marker := re.search(r'//## File "[^"]*", line (\d+)', line):
            current = where.get(int(marker[1]))
        elif current:
            found[current] |= _instructions(line)
    return found


def _by_function(sass):
    found, current = collections.defaultdict(set), None
    for line in sass.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([\w$]+)", line):
            current = section[1].split("$")[0]
        elif current:
            found[current] |= _instructions(line)
    return found


_NAMES = [name for name, function in FUNCTIONS.items() if not function.inline_only]


@pytest.mark.parametrize("start", range(0, len(_NAMES), _BATCH))
def test_every_function_gives_the_same_instruction_inlined_and_linked(start):
    names = _NAMES[start : start + _BATCH]
    inlined_ptx, inlined_sass, where = _compile(names, linked=False)
    linked_ptx, linked_sass, _ = _compile(names, linked=True)
    inlined, linked = _by_line(inlined_sass, where), _by_function(linked_sass)
    assert ".extern .func" not in inlined_ptx
    assert "inline asm" not in linked_ptx
    for name in names:
        if name in _NO_TRACE:
            assert name in linked, f"{name} is not in the linked cubin"
            continue
        once = _ONCE if name.startswith(_SHARED_WITHIN_A_KERNEL) else set()
        assert inlined[name] - once, f"{name}: nothing but moves"
        assert inlined[name] - once == linked[name] - once - _ON_THE_STACK, name


def _ptxas():
    """ptxas of the CUDA toolkit's wheel or on the PATH, or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else []:
        for found in Path(root).glob("**/bin/ptxas"):
            return str(found)
    return shutil.which("ptxas")


_INLINE_ONLY = [name for name in FUNCTIONS if name.startswith("setmaxnreg")]


@pytest.mark.parametrize("name", _INLINE_ONLY)
def test_inline_only_functions_refuse_to_be_linked(name):
    inlined, called = getattr(ptx, name), getattr(ptx.linked, name)

    def kernel():
        inlined(40)

    def calls():
        called(40)

    assert f"{name.replace('_', '.')}.sync.aligned.u32 40;" in to_ptx(kernel, launch_bounds=(384, 1))
    with pytest.raises(TypingError, match=f"ptx.linked.{name}: {name} works only inlined, as ptx.{name}: linked"):
        to_ptx(calls)
    assert name not in dir(ptx.linked)


@pytest.mark.skipif(_ptxas() is None, reason="no ptxas: nvJitLink assembles for linking, which drops setmaxnreg")
def test_setmaxnreg_reaches_the_sass_of_a_kernel_assembled_as_a_whole(tmp_path):
    def kernel(out):
        if cuda.threadIdx.x < 128:
            ptx.setmaxnreg_dec(40)
            out[0] = 1
        else:
            ptx.setmaxnreg_inc(232)
            out[1] = 1

    text = to_ptx(kernel, types.uint32[::1], launch_bounds=(384, 1))
    file, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    file.write_text(re.sub(r"^\.version .*$", ".version 8.0", text, flags=re.M))  # an older ptxas will do
    subprocess.run([_ptxas(), "-arch=sm_90a", str(file), "-o", str(cubin)], check=True)
    sass = disassemble(cubin.read_bytes())
    assert re.search(r"USETMAXREG\.DEALLOC\S* 0x28", sass)
    assert re.search(r"USETMAXREG\.TRY_ALLOC\S* \w+, 0xe8", sass)


def test_names_of_operands_survive_into_the_ptx():
    def kernel(bar, count):
        ptx.mbarrier_init(bar, count)

    text = to_ptx(kernel, types.uint32, types.uint32)
    assert "mbarrier.init.shared::cta.b64 [%addr], %count;" in text


def test_pure_functions_are_merged_and_others_are_not():
    def kernel(out):
        out[0] = ptx.laneid() + ptx.laneid()
        out[1] = ptx.clock64() - ptx.clock64()

    text = to_ptx(kernel, types.uint64[::1])
    assert text.count("%laneid;") == 1
    assert text.count("%clock64;") == 2


def test_loads_are_not_moved_across_a_wait():
    def kernel(out, bar, address):
        before = ptx.ld_shared_u32(address)
        while not ptx.mbarrier_try_wait_parity(bar, 0):
            pass
        out[0] = before
        out[1] = ptx.ld_shared_u32(address)

    text = to_ptx(kernel, types.uint32[::1], types.uint32, types.uint32)
    order = [m[0] for m in re.finditer(r"ld\.shared\.u32|mbarrier\.try_wait", text)]
    assert order[0] == order[-1] == "ld.shared.u32"
    assert "mbarrier.try_wait" in order[1:-1]


def test_a_shared_array_becomes_its_address_in_the_shared_window():
    def kernel(out):
        bar = cuda.shared.array(2, types.uint64)
        ptx.mbarrier_init(bar, 1)
        out[0] = ptx.shared_address(bar)

    text = to_ptx(kernel, types.uint32[::1])
    assert re.search(r"cvt\.u32\.u64\s+(%r\d+), (%rd\d+);", text), text
    assert "cvta.shared" not in text, "the generic address is not needed"


def test_a_device_array_becomes_the_address_of_its_first_element():
    def kernel(source, target):
        a, b, c, d = ptx.ld_global_nc_v4_u32(source)
        ptx.st_global_v4_u32(ptx.global_address(target) + 16, a, b, c, d)

    text = to_ptx(kernel, types.uint32[::1], types.uint32[::1])
    assert "ld.global.nc.v4.u32 {%d0, %d1, %d2, %d3}, [%a];" in text
    assert "st.global.v4.u32 [%a], {%b0, %b1, %b2, %b3};" in text


# ----------------------------------------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------------------------------------


def test_integers_of_any_width_and_sign_are_accepted():
    def kernel(a, b, c, d):
        ptx.mbarrier_init(a, b)
        ptx.mbarrier_init(c, d)
        ptx.mbarrier_init(a + b, 1)

    to_ptx(kernel, types.uint32, types.uint32, types.int64, types.int8)


def test_a_predicate_takes_a_bool():
    def kernel(dst, src, limit):
        ptx.cp_async_cg_16_ignore_src(dst, src, cuda.threadIdx.x >= limit)
        ptx.linked.cp_async_cg_16_ignore_src(dst, src, True)

    text = to_ptx(kernel, types.uint32, types.uint64, types.int32)
    assert "cp.async.cg.shared.global [%dst], [%src], 16, %ignore_src;" in text
    link([("kernel", text), *ptx.link_files(text)], "sm_90a")


def test_arguments_may_be_named():
    def named(bar, count):
        ptx.mbarrier_init(count=count, addr=bar)

    def placed(bar, count):
        ptx.mbarrier_init(bar, count)

    def body(function):
        text = to_ptx(function, types.uint32, types.uint32)
        return re.sub(r"_Z\w+", "", text[text.index("{\n") :])

    assert body(named) == body(placed)


def _float_address(x):
    ptx.mbarrier_init(x, 1)


def _float_number(x):
    ptx.mbarrier_init(0, x)


def _bool_number(x):
    ptx.mbarrier_init(0, True)


def _integer_fraction(x):
    ptx.createpolicy_fractional_l2_evict_first(1)


def _integer_predicate(x):
    ptx.cp_async_ca_16_ignore_src(0, 0, 1)


def _too_few(x):
    ptx.mbarrier_init(0)


def _too_many(x):
    ptx.mbarrier_init(0, 1, 2)


def _unknown_name(x):
    ptx.mbarrier_init(bar=0, count=1)


def _array_number(x):
    ptx.mbarrier_expect_tx(0, cuda.shared.array(1, types.uint64))


def _linked_float(x):
    ptx.linked.mbarrier_init(x, 1)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (
            _float_address,
            r"ptx\.mbarrier_init: argument 1, 'addr', must be a shared address: .*; found float32",
        ),
        (
            _float_number,
            r"ptx\.mbarrier_init: argument 2, 'count', must be an integer \(u32\); found float32",
        ),
        (_bool_number, r"ptx\.mbarrier_init: argument 2, 'count', must be an integer \(u32\); found .*bool"),
        (_integer_fraction, r"'fraction', must be a floating-point number \(f32\); found .*int"),
        (_integer_predicate, r"argument 3, 'ignore_src', must be a bool; found .*int"),
        (_too_few, r"ptx\.mbarrier_init\(addr, count\): missing a required argument: 'count'"),
        (_too_many, r"ptx\.mbarrier_init\(addr, count\): too many positional arguments"),
        (_unknown_name, r"ptx\.mbarrier_init\(addr, count\): missing a required argument: 'addr'|unexpected"),
        (
            _array_number,
            r"ptx\.mbarrier_expect_tx: argument 2, 'txCount', must be an integer \(u32\); found array",
        ),
        (_linked_float, r"ptx\.mbarrier_init: argument 1, 'addr', must be a shared address"),
    ],
)
def test_a_wrong_argument_is_a_typing_error_that_names_it(kernel, message):
    with pytest.raises(TypingError, match=message):
        to_ptx(kernel, types.float32)


def test_the_error_points_to_the_ptx_file():
    with pytest.raises(TypingError, match=r"ptx/mbarrier\.ptx: Line \d+"):
        to_ptx(_float_address, types.float32)


GROUPS = 3


def test_an_immediate_may_be_a_literal_a_global_or_a_closure_constant():
    stages = 5

    def kernel():
        ptx.cp_async_bulk_wait_group(2)
        ptx.cp_async_bulk_wait_group_read(GROUPS)
        ptx.cp_async_wait_group(stages)
        ptx.linked.cp_async_wait_group(stages)

    text = to_ptx(kernel)
    assert "cp.async.bulk.wait_group 2;" in text
    assert "cp.async.bulk.wait_group.read 3;" in text
    assert "cp.async.wait_group 5;" in text
    ((name, module),) = ptx.link_files(text)
    assert name == "cp_async.ptx:cp_async_wait_group$5"
    assert "cp.async.wait_group 5;" in module


def _variable(n):
    ptx.cp_async_wait_group(n)


def _expression(n):
    ptx.cp_async_wait_group(GROUPS - 1)


def _out_of_range(n):
    ptx.cp_async_wait_group(64)


def _negative(n):
    ptx.cp_async_wait_group(-1)


def _no_multiple_of_8(n):
    ptx.setmaxnreg_inc(100)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (_variable, r"'N', must be a constant .*immediate 0 to 63; found int64"),
        (_expression, r"'N', must be a constant .*no expression.*; found int64"),
        (_out_of_range, r"'N', is an immediate: 64 is not in 0 to 63"),
        (_negative, r"'N', (must be a constant .*immediate 0 to 63; found|is an immediate: -1 is not in 0 to 63)"),
        (
            _no_multiple_of_8,
            r"'imm_reg_count', is an immediate: 100 is not in 24 to 256 in steps of 8",
        ),
    ],
)
def test_a_wrong_immediate_is_a_typing_error_that_names_it(kernel, message):
    with pytest.raises(TypingError, match=message):
        to_ptx(kernel, types.int64)


def _too_many_arrivals():
    ptx.mbarrier_init(0, 1 << 32)


def _coordinate_of_33_bits(descriptor):
    ptx.cp_async_bulk_tensor_1d_shared_global(0, descriptor, 4294967295, 0)


def _address_of_33_bits():
    ptx.mbarrier_inval(1 << 32)


@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        (_too_many_arrivals, (), "'count', is a u32: 4294967296 is not in -2147483648 to 4294967295"),
        (_coordinate_of_33_bits, (types.uint64,), "'c0', is a s32: 4294967295 is not in -2147483648 to 2147483647"),
        (_address_of_33_bits, (), "'addr', is a u32: 4294967296 is not in"),
    ],
)
@pytest.mark.parametrize("linked", [False, True], ids=["inlined", "linked"])
def test_a_literal_that_does_not_fit_is_a_typing_error(kernel, arguments, message, linked):
    source = kernel
    if linked:
        source = python_types.FunctionType(kernel.__code__, {"ptx": ptx.linked}, kernel.__name__)
    with pytest.raises(TypingError, match=message):
        to_ptx(source, *arguments)


def test_literals_that_just_fit():
    def kernel(descriptor):
        ptx.cp_async_bulk_tensor_2d_shared_global(4294967295, descriptor, -2147483648, 2147483647, 8)

    text = to_ptx(kernel, types.uint64)
    assert "2147483648" in text and "2147483647" in text


# ----------------------------------------------------------------------------------------------------
# Maps and tiles
# ----------------------------------------------------------------------------------------------------


PLAN = Shared(
    t=Tiles(2, (32, 32), "float32"),
    swizzled=Tiles(1, (32, 32), "float32", swizzle="128B"),
    small=Tiles(1, (16, 32), "float32"),
    words=Tiles(1, (32, 32), "int32"),
    scratch=Buffer((32, 32), "float32"),
    bars=Barriers(1),
)


def _map(box=(32, 32), **options):
    return TensorMap(np.zeros((64, 64), np.float32), box, **options)


@pytest.mark.parametrize(
    ("member", "tensor_map", "message"),
    [
        ("swizzled", _map, "the swizzle is none in the map and 128B in shared memory"),
        ("t", lambda: _map(swizzle="128B"), "the swizzle is 128B in the map and none in shared memory"),
        ("words", _map, "the element type is float32 in the map and int32 in shared memory"),
        ("small", _map, "one box is 4,096 B, the tile 2,048 B"),
    ],
)
@pytest.mark.parametrize("direction", ["load", "store", "reduce"])
def test_a_map_that_does_not_fit_its_tile_is_a_typing_error(member, tensor_map, message, direction):
    with pytest.raises(TypingError, match=message):
        _copy_kernel(member, direction, 2).compile(tensor_map())


@pytest.mark.parametrize("direction", ["load", "store", "reduce"])
def test_a_map_of_another_rank_is_a_typing_error(direction):
    with pytest.raises(TypingError, match="is for maps of 3 dimensions; found TensorMap.* of 2"):
        _copy_kernel("t", direction, 3).compile(_map())


@pytest.mark.parametrize("direction", ["load", "store", "reduce"])
def test_maps_that_fit(direction):
    for member, tensor_map in (
        ("t", _map()),
        ("t", _map((16, 32))),
        ("scratch", _map()),
        ("t", _map(dtype="tfloat32")),
        ("swizzled", TensorMap(np.zeros((64, 64), np.float32), PLAN.swizzled)),
    ):
        _copy_kernel(member, direction, 2).compile(tensor_map)


def _copy_kernel(member, direction, rank):
    index = "" if member == "scratch" else "[0]"
    tile, coordinates = f"PLAN.{member}{index}", ", ".join("0" * rank)
    call = {
        "load": f"cp_async_bulk_tensor_{rank}d_shared_global({tile}, tensor_map, {coordinates}, PLAN.bars[0])",
        "store": f"cp_async_bulk_tensor_{rank}d_global_shared(tensor_map, {coordinates}, {tile})",
        "reduce": f"cp_reduce_async_bulk_tensor_{rank}d_add(tensor_map, {coordinates}, {tile})",
    }[direction]
    namespace = {"ptx": ptx, "PLAN": PLAN}
    exec(f"def copy_box(tensor_map):\n    ptx.{call}\n", namespace)
    return numba_tma_kernel(namespace["copy_box"], threads=32, shared=PLAN)


def test_all_barriers_in_place_of_one_is_advised_upon():
    def copy_box(x):
        ptx.mbarrier_init(PLAN.bars, 1)

    def tiles(x):
        ptx.mbarrier_init(PLAN.t, 1)

    with pytest.raises(TypingError, match=r"found Barriers\(1\)@\d+: take one of them: full\[0\]"):
        numba_tma_kernel(copy_box, threads=32, shared=PLAN).compile(np.zeros(1))
    with pytest.raises(TypingError, match=r"take one of them: tiles\[0\]"):
        numba_tma_kernel(tiles, threads=32, shared=PLAN).compile(np.zeros(1))


# ----------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [ptx, ptx.linked], ids=["inlined", "linked"])
def test_several_results_come_back_as_a_tuple(where):
    vector, pair = where.ld_shared_v4_u32, where.cvt_f32_f16x2

    def kernel(integers, floats, address):
        r = vector(address)
        integers[0] = len(r)
        integers[1] = r[3]
        low, high = pair(r[0])
        floats[0] = low
        floats[1] = high

    text = to_ptx(kernel, types.uint32[::1], types.float32[::1], types.uint32)
    assert re.search(r"(st\.global|mov)\.u32.*, 4;", text), "the length of the tuple is a constant"
    assert "ld.shared.v4.u32" in text + "".join(module for _, module in ptx.link_files(text))


@pytest.mark.parametrize("where", [ptx, ptx.linked], ids=["inlined", "linked"])
def test_a_predicate_result_is_a_bool(where):
    try_wait = where.mbarrier_try_wait_parity

    def kernel(out, bar):
        done = try_wait(bar, 0)
        out[0] = not done

    text = to_ptx(kernel, types.boolean[::1], types.uint32)
    assert "setp" in text


# ----------------------------------------------------------------------------------------------------
# The accept protocol
# ----------------------------------------------------------------------------------------------------


class _Slot(types.Type):
    """A Numba type that stands for one fixed shared address."""

    def __init__(self):
        super().__init__("Slot")


class _LargeSlot(_Slot):
    pass


@pytest.fixture
def slot():
    from numba.cuda.datamodel.models import OpaqueModel
    from numba.cuda.extending import register_model

    register_model(_Slot)(OpaqueModel)
    register_model(_LargeSlot)(OpaqueModel)
    ptx.accept("shared", _Slot, lambda context, builder, numba_type, value: ir.IntType(32)(4711))

    def make(numba_type):
        @intrinsic
        def slot(typingctx):
            return numba_type(), lambda context, builder, sig, args: context.get_dummy_value()

        return slot

    yield make
    del ptx._accepted["shared"][_Slot]


def test_a_registered_type_and_its_subclasses_stand_for_an_address(slot):
    plain, large = slot(_Slot()), slot(_LargeSlot())

    def kernel(out):
        ptx.mbarrier_init(plain(), 1)
        ptx.mbarrier_arrive_shared_cluster(large())
        out[0] = ptx.shared_address(plain())

    text = to_ptx(kernel, types.uint32[::1])
    (register,) = re.findall(r"mov\.u32\s+(%r\d+), 4711;", text)
    assert text.count(f"mov.u32 %addr, {register};") == 2
    assert re.search(rf"st\.global\.u32\s+\[%rd\d+\], {register};", text)


def test_a_registered_type_is_refused_where_another_kind_is_asked_for(slot):
    plain = slot(_Slot())

    def kernel():
        ptx.prefetch_tensormap(plain())

    with pytest.raises(TypingError, match="'tensorMap', must be a tensor map address"):
        to_ptx(kernel)


def test_accept_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="kind 'local': expected one of 'shared', 'global', 'tensor_map'"):
        ptx.accept("local", _Slot, lambda *_: None)


# ----------------------------------------------------------------------------------------------------
# From Python
# ----------------------------------------------------------------------------------------------------


def test_calling_a_function_outside_a_kernel_says_so():
    with pytest.raises(TypeError, match=r"ptx\.mbarrier_init is a PTX instruction and works only inside a kernel"):
        mbarrier_init(0, 1)


def test_an_unknown_name_suggests_similar_ones():
    with pytest.raises(AttributeError, match="did you mean mbarrier_init"):
        ptx.mbarrier_innit  # noqa: B018
    with pytest.raises(AttributeError, match=r"ptx\.linked has no function 'mbarrier_innit'; did you mean"):
        ptx.linked.mbarrier_innit  # noqa: B018


def test_functions_are_listed_documented_and_picklable():
    assert set(FUNCTIONS) <= set(dir(ptx))
    assert ptx.mbarrier_init is mbarrier_init
    assert str(ptx.mbarrier_init.__signature__) == "(addr, count)"
    assert "mbarrier.init" in ptx.mbarrier_init.__doc__
    assert pickle.loads(pickle.dumps(mbarrier_init)) is mbarrier_init
    assert ptx.linked.mbarrier_init is not mbarrier_init
    assert ptx.linked.mbarrier_init.key() != mbarrier_init.key()


def test_import_is_quick():
    """Beyond numba.cuda's own import: no function is read before it is asked for."""
    code = (
        "import time, numba.cuda.extending, numba.cuda.cudadrv.linkable_code, llvmlite.ir\n"
        "import sys, types\n"
        "package = types.ModuleType('numba_tma')\n"
        f"package.__path__ = [{str(ptx_files.folder().parent / 'numba_tma')!r}]\n"
        "sys.modules['numba_tma'] = package\n"
        "start = time.process_time()\n"
        "import numba_tma.ptx\n"
        "print(time.process_time() - start)\n"
    )
    seconds = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    assert seconds < 0.05


# ----------------------------------------------------------------------------------------------------
# Kernels that Numba itself compiles and links
# ----------------------------------------------------------------------------------------------------


def test_numba_is_given_the_modules_of_linked_functions():
    def kernel(bar):
        ptx.linked.mbarrier_init(bar, 1)
        ptx.linked.mbarrier_inval(bar)
        ptx.linked.cp_async_bulk_tensor_2d_shared_global(bar, 0, 0, 0, bar)

    codes, _ = cuda.compile_all(kernel, types.void(types.uint32), cc=CC, device=False, abi="numba", output="ptx")
    modules = {code.name: code.data.decode() for code in codes[1:]}
    assert modules == dict(ptx.link_files(codes[0]))
    assert set(modules) == {"mbarrier.ptx", "tma.ptx:cp_async_bulk_tensor_2d_shared_global"}
    assert modules["mbarrier.ptx"] == (ptx.folder() / "mbarrier.ptx").read_text(encoding="utf-8")
    link([("kernel", codes[0]), *modules.items()], "sm_90a")


def test_a_linked_kernel_without_its_modules_does_not_link():
    def kernel(bar):
        ptx.linked.mbarrier_init(bar, 1)

    text = to_ptx(kernel, types.uint32)
    with pytest.raises(CompileError, match="mbarrier_init"):
        link([("kernel", text)], "sm_90a")


def test_device_functions_and_loops_over_random_counts_type_check():
    """The functions inside a device function and a loop, as any `@cuda.jit` kernel would have them."""
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print(f"seed {seed}")
    count = int(np.random.default_rng(seed).integers(1, 20))

    def arrive(bars, number):
        for i in range(number):
            ptx.mbarrier_arrive(ptx.shared_address(bars) + 8 * i)

    arrive = cuda.jit(device=True)(arrive)

    def kernel(out):
        bars = cuda.shared.array(20, types.uint64)
        for i in range(count):
            ptx.mbarrier_init(ptx.shared_address(bars) + 8 * i, count)
        ptx.fence_mbarrier_init()
        cuda.syncthreads()
        arrive(bars, out.size)

    from numba_tma.compile import _compiling_for

    with _compiling_for(CC, False):
        text = to_ptx(kernel, types.uint32[::1])
    assert "mbarrier.arrive.shared::cta.b64" in text
    assert "fence.mbarrier_init.release.cluster" in text
