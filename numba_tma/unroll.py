"""`unroll()` in a loop, as `#pragma unroll` before one.

Registers have no index: an accumulator stays in them only if every loop over its elements is unrolled, so that each
access has a constant one. NVVM unrolls what it deems small enough; this asks it to.

Numba has no word for it. So the call leaves a mark in the LLVM code, and the compiler of this package turns the mark
into the loop metadata that NVVM heeds. In a plain `@cuda.jit` kernel the mark does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llvmlite import ir
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.extending import intrinsic

_MARK = "// unroll "
_KEEP = f'  call void asm sideeffect "{_MARK}kept", ""()\n'
_KEPT = re.compile(rf"^[^\n]*// begin inline asm[^\n]*\n[^\n]*{_MARK}kept[^\n]*\n[^\n]*// end inline asm[^\n]*\n", re.M)
_FUNCTION = re.compile(r"^define .*?^\}$", re.M | re.S)
_BLOCK = re.compile(r"^(?:\"([^\"]+)\"|([\w.$-]+)):[^\n]*$", re.M)
_TARGET = re.compile(r"label %(?:\"([^\"]+)\"|([\w.$-]+))")
_CALL = re.compile(r"^\s*call void asm sideeffect \"" + _MARK + r"(\d+)\".*$", re.M)
_FIRST_NODE = 1_000_000  # above all metadata that Numba numbers


@intrinsic
def unroll(typing_context, count=None):
    """Have the innermost loop around this call unrolled: wholly, or `count` (a literal) times; 1 forbids it.

    Whole unrolling needs a trip count that the compiler knows.
    """
    if count in (None, types.none) or isinstance(count, types.Omitted):
        times = 0
    elif isinstance(count, types.IntegerLiteral) and 1 <= count.literal_value <= 4096:
        times = count.literal_value
    else:
        raise TypingError(f"unroll: the count must be a literal from 1 to 4096, or left out; got {count}")

    def lower(context, builder, signature, arguments):
        mark = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), f"{_MARK}{times}", "", side_effect=True)
        builder.call(mark, [])
        return context.get_dummy_value()

    return types.void(types.none if count is None else count), lower


def apply_marks(text: str) -> str:
    """The LLVM module with its marks taken out and their loops' branches annotated."""
    if _MARK not in text:
        return text
    nodes: list[str] = []
    text = _FUNCTION.sub(lambda found: _annotate(found.group(), nodes), text)
    return "\n".join([text, *nodes, ""])


def without_marks(text: str) -> str:
    """The PTX without what `apply_marks` left there."""
    return _KEPT.sub("", text)


def _annotate(function: str, nodes: list[str]) -> str:
    if _MARK not in function:
        return function
    blocks = _blocks(function)
    edges = {name: [a or b for a, b in _TARGET.findall(body.rstrip().rsplit("\n", 1)[-1])] for name, body in blocks}
    bodies = dict(blocks)
    loops = sorted(_loops(blocks[0][0], edges), key=lambda loop: len(loop[2]))
    for name, body in blocks:
        for mark in _CALL.finditer(body):
            latches = [(latch, header) for latch, header, inside in loops if name in inside]
            if not latches:
                raise ValueError("unroll() stands in no loop; call it in the body of the loop that it is for")
            # A loop has as many latches as it has `continue`s; all of them lead to one header.
            for latch, _ in [pair for pair in latches if pair[1] == latches[0][1]]:
                number = _FIRST_NODE + 2 * len(nodes)
                nodes += [f"!{number} = distinct !{{!{number}, !{number + 1}}}", f"!{number + 1} = {_request(mark)}"]
                block, branch = bodies[latch].rstrip().rsplit("\n", 1)
                # An empty block would be merged into others before the loop is looked at, and the request lost.
                bodies[latch] = f"{block}\n{_KEEP}{branch}, !llvm.loop !{number}\n"
        bodies[name] = _CALL.sub("", bodies[name])
    start = function.index(blocks[0][1])
    return function[:start] + "".join(bodies[name] for name, _ in blocks) + "}"


def _request(mark: re.Match) -> str:
    times = int(mark.group(1))
    if times == 0:
        return '!{!"llvm.loop.unroll.full"}'
    if times == 1:
        return '!{!"llvm.loop.unroll.disable"}'
    return f'!{{!"llvm.loop.unroll.count", i32 {times}}}'


def _blocks(function: str) -> list[tuple[str, str]]:
    """Names and texts of a function's basic blocks, each from its label to the next one."""
    labels = list(_BLOCK.finditer(function))
    ends = [label.start() for label in labels[1:]] + [len(function) - 1]
    return [(a.group(1) or a.group(2), function[a.start() : end]) for a, end in zip(labels, ends, strict=True)]


def _loops(entry: str, edges: dict[str, list[str]]) -> Iterator[tuple[str, str, set[str]]]:
    """Latch, header and blocks of every natural loop; Numba's control flow has no others."""
    sources: dict[str, list[str]] = {name: [] for name in edges}
    for name, targets in edges.items():
        for target in targets:
            sources[target].append(name)
    for latch, header in _back_edges(entry, edges):
        inside, pending = {header, latch}, [latch]
        while pending:
            name = pending.pop()
            if name != header:
                pending += [source for source in sources[name] if source not in inside]
                inside.update(sources[name])
        yield latch, header, inside


def _back_edges(entry: str, edges: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Edges to a block that is on the depth-first path to them."""
    path, seen = {entry}, {entry}
    stack = [(entry, iter(edges[entry]))]
    while stack:
        name, targets = stack[-1]
        for target in targets:
            if target in path:
                yield name, target
            elif target not in seen:
                path.add(target)
                seen.add(target)
                stack.append((target, iter(edges[target])))
                break
        else:
            path.discard(name)
            stack.pop()
