"""The inner loops of hazard tracking: is each lane ordered after those who used its bytes before?

They are ufuncs (native.py) of three operands: for each lane the element of memory that it accesses and the thread that
it is, and the address of a `Context`, which says where the tracker's arrays are. They give true for lanes that
something is wrong with, and keep the shadow of memory up to date. What is wrong, the tracker finds out by NumPy: it is
rare.

Stamps of shared memory are those of shadow.py, stamps of global memory those of global_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from ..native import ufunc

_I8, _I32, _I64, _BOOL = (ir.IntType(bits) for bits in (8, 32, 64, 1))
_POINTER = ir.PointerType()

# Stamps of shared memory: column (20 bits), value (28), instruction (16).
COLUMN_SHIFT, VALUE_SHIFT = 44, 16
VALUE_MASK, INSTRUCTION_MASK = (1 << 28) - 1, 0xFFFF
# Stamps of global memory: copy or thread (1 bit), thread of the grid (26), value (24), instruction (12).
GRID_COPY, GRID_THREAD_SHIFT, GRID_VALUE_SHIFT = 1 << 62, 36, 12
GRID_VALUE_MASK, GRID_INSTRUCTION_MASK = (1 << 24) - 1, (1 << 12) - 1

# Kinds of columns (clocks.py) whose accesses are ordinary ones: the copy engine's need a proxy fence after them.
STEPS, BULK_READ, BULK_WRITTEN, CP_ASYNC, WGMMA, PHASES = range(6)
ORDINARY = (STEPS, CP_ASYNC)

# Of clocks: rows of `width` numbers; each thread's row, column, and step (`own`, a row of `lanes` for each kind of
# column); each column's kind and owner; each thread's number in the grid and that of its cluster's first thread;
# threads of a cluster.
CLOCKS = ("table", "known", "column", "own", "kind", "owner", "thread", "first", "width", "lanes", "cluster")
# Of a memory: its clocks; stamps of the last writes and of the latest reads; more rows of `count` stamps of reads each,
# and which of them is for which column (`row`). `used` has 1 for each such row that anything is in, `active` the
# numbers of the first `rows` of them. Of an access: log2 of the bytes of an element and of a piece, pieces that it
# covers, its instruction. `fence` is how much further in a clock's row the part before a proxy fence begins (0: none).
MEMORY = (
    *("clocks", "written", "read", "more", "count", "row", "used", "active", "rows"),
    *("element", "piece", "each", "instruction", "fence"),
)


class Context:
    """Numbers, and addresses of arrays, by name. The arrays are kept alive."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = {name: i for i, name in enumerate(names)}
        self._values = np.zeros(len(names), np.int64)
        self._arrays: dict[str, np.ndarray] = {}
        self.address = np.uint64(self._values.ctypes.data)

    def set(self, **fields: Any) -> None:
        """Give fields their values."""
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                self._arrays[name] = value
                value = value.ctypes.data
            self._values[self._names[name]] = value


class _Code:
    """Writes the body of one function, for one lane."""

    def __init__(self, b: ir.IRBuilder, thread: Any, context: Any) -> None:
        self.b = b
        self.thread = thread
        # All numbers of the contexts, read once: what is not needed is dropped when this is compiled.
        self._fields: dict[str, Any] = {}
        for names in (MEMORY, CLOCKS):
            base = b.inttoptr(context if names is MEMORY else self._fields["clocks"], _POINTER)
            for i, name in enumerate(names):
                self._fields[name] = b.load(b.gep(base, [_I64(i)], source_etype=_I64), typ=_I64)
        self.wrong = b.alloca(_BOOL)
        b.store(_BOOL(0), self.wrong)
        # Where the thread's clock begins in the table.
        self._row = b.mul(self.load("known", thread), self.field("width"))

    def field(self, name: str) -> Any:
        """A number of the contexts."""
        return self._fields[name]

    def place(self, name: str, index: Any, kind: Any = _I64) -> Any:
        """The address of an array's element."""
        return self.b.gep(self.b.inttoptr(self.field(name), _POINTER), [index], source_etype=kind)

    def load(self, name: str, index: Any, kind: Any = _I64) -> Any:
        """An array's element, as 64 bits."""
        value = self.b.load(self.place(name, index, kind), typ=kind)
        return value if kind is _I64 else self.b.sext(value, _I64)

    def blame(self, unordered: Any) -> None:
        """Something is wrong with the lane if that holds."""
        self.b.store(self.b.or_(self.b.load(self.wrong, typ=_BOOL), unordered), self.wrong)

    def loop(self, times: Any, body: Callable[[Any], None]) -> None:
        """`body(i)` for i from 0 up to `times`, which is 1 at least."""
        b, before = self.b, self.b.block
        top, after = b.append_basic_block("top"), b.append_basic_block("after")
        b.branch(top)
        b.position_at_end(top)
        i = b.phi(_I64)
        i.add_incoming(_I64(0), before)
        body(i)
        following = b.add(i, _I64(1))
        i.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, times), top, after)
        b.position_at_end(after)

    def pieces(self, index: Any, body: Callable[[Any], None]) -> None:
        """`body(piece)` for the pieces of the access to the element `index`."""
        first = self.b.lshr(self.b.shl(index, self.field("element")), self.field("piece"))
        self.loop(self.field("each"), lambda i: body(self.b.add(first, i)))

    def readers(self, at: Any, body: Callable[[Any, Any], None]) -> None:
        """`body(stamp, place)` for each stamp of a read of the piece `at`."""
        b = self.b

        def look(place: Any) -> None:
            stamp = b.load(place, typ=_I64)
            with b.if_then(is_(b, stamp)):
                body(stamp, place)

        def row(i: Any) -> None:
            look(self.place("more", b.add(b.mul(self.load("active", i), self.field("count")), at)))

        look(self.place("read", at))
        with b.if_then(is_(b, self.field("rows"))):
            self.loop(self.field("rows"), row)

    def reached(self, column: Any, value: Any) -> Any:
        """Whether the thread's clock has come to `value` in `column`."""
        b = self.b
        return b.icmp_signed(">=", self.load("table", b.add(self._row, column), _I32), value)


def is_(b: ir.IRBuilder, stamp: Any) -> Any:
    """Whether there is anything."""
    return b.icmp_signed("!=", stamp, stamp.type(0))


class _Shared(_Code):
    """Stamps of shared memory."""

    instruction_mask = INSTRUCTION_MASK

    def stamp(self) -> Any:
        """Of what the thread does now."""
        b = self.b
        value = b.shl(self.load("own", self.thread, _I32), _I64(VALUE_SHIFT))
        column = b.shl(self.load("column", self.thread), _I64(COLUMN_SHIFT))
        return b.or_(b.or_(column, value), self.field("instruction"))

    def same(self, stamp: Any) -> Any:
        """Whether it is of the thread itself."""
        return self.b.icmp_signed("==", self.b.lshr(stamp, _I64(COLUMN_SHIFT)), self.load("column", self.thread))

    def row(self, stamp: Any) -> Any:
        """The row of more reads that a stamp goes to."""
        return self.load("row", self.b.lshr(stamp, _I64(COLUMN_SHIFT)), _I8)

    def unordered(self, stamp: Any) -> Any:
        """Whether its access is not ordered before what the thread does now."""
        b = self.b
        column = b.lshr(stamp, _I64(COLUMN_SHIFT))
        value = b.and_(b.lshr(stamp, _I64(VALUE_SHIFT)), _I64(VALUE_MASK))
        start, good = b.block, self.reached(column, value)
        with b.if_then(b.not_(good)):
            # A thread's own columns are not in its row. Kind 0 is its steps: always in order.
            kind = self.load("kind", column, _I8)
            mine = b.icmp_signed("==", self.load("owner", column, _I32), self.load("column", self.thread))
            own = self.load("own", b.add(b.mul(kind, self.field("lanes")), self.thread), _I32)
            done = b.or_(b.icmp_signed("==", kind, _I64(0)), b.icmp_signed(">=", own, value))
            bad, inside = b.not_(b.and_(mine, done)), b.block
        result = b.phi(_BOOL)
        result.add_incoming(_BOOL(0), start)
        result.add_incoming(bad, inside)
        return result


class _Global(_Code):
    """Stamps of global memory. Of copies and of other clusters' threads NumPy decides: here they are unordered."""

    instruction_mask = GRID_INSTRUCTION_MASK

    def stamp(self) -> Any:
        """Of what the thread does now."""
        b = self.b
        value = b.shl(self.load("own", self.thread, _I32), _I64(GRID_VALUE_SHIFT))
        by = b.shl(self.load("thread", self.thread), _I64(GRID_THREAD_SHIFT))
        return b.or_(b.or_(by, value), self.field("instruction"))

    def same(self, stamp: Any) -> Any:
        """Whether it is of the thread itself."""
        return self.b.icmp_signed("==", self.b.lshr(stamp, _I64(GRID_THREAD_SHIFT)), self.load("thread", self.thread))

    def row(self, stamp: Any) -> Any:
        """The row of more reads that a stamp goes to."""
        return _I64(0)

    def unordered(self, stamp: Any) -> Any:
        """Whether its access may not be ordered before what the thread does now."""
        b = self.b
        other = b.not_(self.same(stamp))
        start = b.block
        with b.if_then(other):
            column = b.sub(b.lshr(stamp, _I64(GRID_THREAD_SHIFT)), self.load("first", self.thread))
            local = b.icmp_unsigned("<", column, self.field("cluster"))
            value = b.and_(b.lshr(stamp, _I64(GRID_VALUE_SHIFT)), _I64(GRID_VALUE_MASK))
            # A column of another cluster's thread is looked up in vain: in column 0.
            column = b.select(local, column, _I64(0))
            bad, inside = b.not_(b.and_(local, self.reached(column, value))), b.block
        result = b.phi(_BOOL)
        result.add_incoming(_BOOL(0), start)
        result.add_incoming(bad, inside)
        return result


def _note_read(c: Any, at: Any, stamp: Any) -> None:
    """The latest read of a piece. An earlier one by somebody not ordered before is kept: a write must mind both."""
    b = c.b
    place = c.place("read", at)
    before = b.load(place, typ=_I64)
    with b.if_then(b.and_(is_(b, before), b.not_(c.same(before)))), b.if_then(c.unordered(before)):
        row = c.row(before)
        b.store(before, c.place("more", b.add(b.mul(row, c.field("count")), at)))
        b.store(_I8(1), c.place("used", row, _I8))
    b.store(stamp, place)


def _read_shared(c: _Shared, index: Any) -> None:
    stamp = c.stamp()

    def piece(at: Any) -> None:
        written = c.load("written", at)
        c.blame(c.b.or_(c.b.not_(is_(c.b, written)), c.unordered(written)))
        _note_read(c, at, stamp)

    c.pieces(index, piece)


def _read_global(c: _Global, index: Any) -> None:
    stamp = c.stamp()

    def piece(at: Any) -> None:
        written = c.load("written", at)
        with c.b.if_then(is_(c.b, written)):
            c.blame(c.unordered(written))
        _note_read(c, at, stamp)

    c.pieces(index, piece)


def _check_write(c: Any, index: Any) -> None:
    def piece(at: Any) -> None:
        written = c.load("written", at)
        with c.b.if_then(is_(c.b, written)):
            c.blame(c.unordered(written))
        c.readers(at, lambda stamp, place: c.blame(c.unordered(stamp)))

    c.pieces(index, piece)


def _write(c: Any, index: Any) -> None:
    stamp = c.stamp()

    def piece(at: Any) -> None:
        place = c.place("written", at)
        before = c.b.load(place, typ=_I64)
        # Who wrote here with another instruction, `check_write` has looked at.
        number = c.b.and_(before, _I64(c.instruction_mask))
        with c.b.if_then(c.b.and_(is_(c.b, before), c.b.icmp_signed("==", number, c.field("instruction")))):
            c.blame(c.unordered(before))
        c.b.store(stamp, place)
        c.readers(at, lambda read, place: c.b.store(_I64(0), place))

    c.pieces(index, piece)


def _check_copy(c: _Shared, stamp: Any) -> None:
    b = c.b
    with b.if_then(is_(b, stamp)):
        column = b.lshr(stamp, _I64(COLUMN_SHIFT))
        value = b.and_(b.lshr(stamp, _I64(VALUE_SHIFT)), _I64(VALUE_MASK))
        kind = c.load("kind", column, _I8)
        ordinary = b.or_(*(b.icmp_signed("==", kind, _I64(each)) for each in ORDINARY))
        # Ordinary accesses must lie before a fence; a value of 0 is known to everybody.
        ordinary = b.and_(ordinary, is_(b, value))
        fence = b.select(ordinary, c.field("fence"), _I64(0))
        good = b.and_(c.reached(b.add(column, fence), value), b.or_(b.not_(ordinary), is_(b, c.field("fence"))))
        c.blame(b.not_(good))


_FUNCTIONS: dict[str, tuple[type, Callable[[Any, Any], None]]] = {
    # Wrong: bytes that nobody has written, or that somebody not ordered before has.
    "read_shared": (_Shared, _read_shared),
    "read_global": (_Global, _read_global),
    # Wrong: bytes that somebody not ordered before has written or read. Changes nothing.
    "check_write_shared": (_Shared, _check_write),
    "check_write_global": (_Global, _check_write),
    # After `check_write`. Wrong: bytes that another lane, not ordered before, has written.
    "write_shared": (_Shared, _write),
    "write_global": (_Global, _write),
    # Of stamps in place of elements, for a copy by one thread. Wrong: not ordered before it, or not fenced.
    "check_copy": (_Shared, _check_copy),
}


@cache
def scan(name: str) -> np.ufunc:
    """One of the functions: (index, thread, context's address) -> whether something is wrong."""
    kind, write = _FUNCTIONS[name]
    function = ir.Function(ir.Module(), ir.FunctionType(_I8, [_I64, _I64, _I64]), "scalar")
    for i, argument in enumerate(function.args):
        argument.name = f"x{i}"
    b = ir.IRBuilder(function.append_basic_block("start"))
    index, thread, context = function.args
    code = kind(b, thread, context)
    write(code, index)
    b.ret(b.zext(b.load(code.wrong, typ=_BOOL), _I8))
    text = str(function)
    body = text[text.index("{") + 1 : text.rindex("}")]
    return ufunc(name, ("s64", "s64", "u64"), "pred", body)
