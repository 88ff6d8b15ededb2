"""What a kernel takes, in words: for the head of the page and of the text."""

from __future__ import annotations

from .explanation import Explanation


def figures(explanation: Explanation) -> list[tuple[str, str, str]]:
    """(name, value, note) of the kernel's registers, memory and instructions.

    Raises:
        CompileError: the assembler refused the PTX, or nvdisasm is not installed.
    """
    found, kernel = explanation.compiled.resources, explanation.kernel
    plan = kernel.shared
    members = [f"{name}: {m.nbytes:,} B at {plan.offsets[name]:,}" for name, m in plan.members.items()] if plan else []
    spilled = found.spill_store_bytes + found.spill_load_bytes
    result = [
        ("architecture", explanation.compiled.arch, "what it was compiled for"),
        ("registers", str(found.registers), "32-bit registers of one thread"),
        ("spills", f"{spilled:,} B" if spilled else "none", "bytes of registers put into local memory and read back"),
        (
            "shared memory",
            f"{found.shared_bytes + kernel.shared_bytes:,} B",
            "; ".join(members) or "static shared memory of one block",
        ),
    ]
    if found.stack_bytes:
        result.append(("stack", f"{found.stack_bytes:,} B", "local memory of one thread: arrays that are no registers"))
    if kernel.threads:
        extents = " × ".join(str(extent) for extent in kernel.threads if extent > 1)
        result.append(("threads", extents or "1", "of one block, at most"))
    if kernel.cluster != (1, 1, 1):
        result.append(("cluster", " × ".join(map(str, kernel.cluster)), "blocks of one cluster"))
    linked = explanation.coverage
    note = f"{linked.named} linked to Python by the compiler, {linked.by_use} by the use of their result"
    result.append(("PTX", f"{linked.instructions:,} instructions", note))
    count = sum(len(listing.instructions) for listing in explanation.sass)
    result.append(("SASS", f"{count:,} instructions", "machine instructions, 16 bytes each"))
    return result
