"""What the device's system provides to kernels: vprintf, assertions, a heap.

Source: CUDA Programming Guide, "Formatted Output", "Assertion", "Dynamic Global Memory Allocation"; PTX
interoperability: the system calls vprintf, __assertfail, malloc, free.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from .errors import OutOfBounds, Trap
from .memory import LOCAL_WINDOW, POISON

if TYPE_CHECKING:
    from .fragment import Fragment
    from .machine import Machine

HEAP_BYTES = 8 << 20
MAX_OUTPUT = 1 << 24
_CONVERSION = re.compile(rb"%([-+ #0]*)(\d*)(?:\.(\d+))?(hh|h|ll|l|j|z|t)?([diouxXeEfFgGaAcsp%])")
_LONG = frozenset((b"ll", b"l", b"j", b"z", b"t"))


class Output:
    """Text that kernels print, kept and passed on."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0
        self.echo = None

    def write(self, text: str) -> None:
        """Append text."""
        self._size += len(text)
        if self._size > MAX_OUTPUT:
            raise OutOfBounds(f"the kernel printed more than {MAX_OUTPUT} characters")
        self._parts.append(text)
        if self.echo is not None:
            self.echo.write(text)

    def text(self) -> str:
        """Everything printed so far."""
        return "".join(self._parts)


def _string(machine: Machine, address: int, slot: int, thread: int) -> bytes:
    if address >> 32 != LOCAL_WINDOW >> 32:
        return machine.memory.read_string(address)
    text = bytearray()
    while (byte := machine.read_generic(address + len(text), 1, slot, thread, "string").item()) != 0:
        text.append(byte)
    return bytes(text)


def format_text(template: bytes, fetch: object, string: object) -> str:
    """printf: `fetch(size)` gives the next argument's bytes, `string(address)` the text a %s points to."""
    position = 0
    out: list[str] = []
    for match in _CONVERSION.finditer(template):
        out.append(template[position : match.start()].decode("utf-8", "replace"))
        position = match.end()
        flags, width, precision, length, kind = match.groups()
        if kind == b"%":
            out.append("%")
            continue
        spec = "%" + flags.decode() + width.decode() + (f".{precision.decode()}" if precision is not None else "")
        if kind in b"eEfFgGaA":
            value = fetch(8).view(np.float64).item()
            out.append(float.hex(value) if kind in b"aA" else (spec + kind.decode()) % value)
        elif kind == b"s":
            out.append((spec + "s") % string(int(fetch(8).view(np.uint64).item())).decode("utf-8", "replace"))
        elif kind == b"p":
            out.append((spec + "s") % hex(fetch(8).view(np.uint64).item()))
        elif kind == b"c":
            out.append((spec + "c") % (fetch(4).view(np.uint32).item() & 0xFF))
        else:
            size = 8 if length in _LONG else 4
            signed = kind in b"di"
            value = fetch(size).view(f"{'i' if signed else 'u'}{size}").item()
            if length in (b"h", b"hh"):
                bits = 16 if length == b"h" else 8
                value &= (1 << bits) - 1
                value -= (1 << bits) * (signed and value >> (bits - 1))
            out.append((spec + ("d" if kind in b"iu" else kind.decode())) % value)
    out.append(template[position:].decode("utf-8", "replace"))
    return "".join(out)


def _vprintf(machine: Machine, fragment: Fragment, arguments: list[np.ndarray]) -> np.ndarray:
    formats, lists = arguments
    counts = np.empty(fragment.n, np.int32)
    templates: dict[int, bytes] = {}
    lanes = zip(formats.tolist(), lists.tolist(), fragment.slot.tolist(), fragment.thread.tolist(), strict=True)
    for lane, (address, place, slot, thread) in enumerate(lanes):
        template = templates.get(address)
        if template is None:
            template = templates[address] = _string(machine, address, slot, thread)
        used = 0

        def fetch(size: int, place: int = place, slot: int = slot, thread: int = thread) -> np.ndarray:
            nonlocal used
            used = -(-used // size) * size
            data = machine.read_generic(place + used, size, slot, thread, "argument of printf").copy()
            used += size
            return data

        text = format_text(template, fetch, lambda a, s=slot, t=thread: _string(machine, a, s, t))
        machine.output.write(text)
        counts[lane] = len(_CONVERSION.findall(template))
    return counts


def _assertfail(machine: Machine, fragment: Fragment, arguments: list[np.ndarray]) -> None:
    slot, thread = int(fragment.slot[0]), int(fragment.thread[0])
    message, file, line, function = (int(a[0]) for a in arguments[:4])
    texts = [_string(machine, a, slot, thread).decode("utf-8", "replace") for a in (message, file, function)]
    raise Trap(f"device assertion failed: {texts[0]} ({texts[1]}:{line}, {texts[2]}); {machine.lane_name(fragment, 0)}")


def _malloc(machine: Machine, fragment: Fragment, arguments: list[np.ndarray]) -> np.ndarray:
    addresses = np.zeros(fragment.n, np.uint64)
    for lane, size in enumerate(arguments[0].tolist()):
        if sum(machine.heap.values()) + size <= HEAP_BYTES:
            address = machine.memory.map(np.full(size, POISON, np.uint8), "heap allocation")
            machine.heap[address] = size
            machine.mapped.append(address)
            addresses[lane] = address
    return addresses


def _free(machine: Machine, fragment: Fragment, arguments: list[np.ndarray]) -> None:
    for address in arguments[0].tolist():
        if address == 0:
            continue
        if address not in machine.heap:
            raise OutOfBounds(f"free of {address:#x}, which malloc did not give or which was freed before")
        del machine.heap[address]
        machine.mapped.remove(address)
        machine.memory.unmap(address)


EXTERNALS = {"vprintf": _vprintf, "__assertfail": _assertfail, "malloc": _malloc, "free": _free}
