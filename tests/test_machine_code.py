"""What is read from a disassembly: mnemonics, and the loop that a kernel spends its time in."""

from __future__ import annotations

import pytest

from numba_tma.machine_code import main_loop, mnemonics


def disassembly(*lines: str) -> str:
    """As nvdisasm writes it: labels, instructions with addresses, and what Python line they come from."""
    written = []
    for i, line in enumerate(lines):
        if line.endswith(":"):
            written.append(line)
        else:
            written += ['\t//## File "kernel.py", line 7', f"        /*{16 * i:04x}*/                   {line} ;"]
    return "\n".join(written)


def test_mnemonics_without_predicates():
    sass = disassembly(
        ".L_x_0:", "@!P0 LDS.128 R4, [R8]", "@UP1 UIADD3 UR4, UR4, 0x1, URZ", "@P0 BRA `(.L_x_0)", "EXIT"
    )
    assert mnemonics(sass) == ["LDS.128", "UIADD3", "BRA", "EXIT"]


def test_the_inner_loop_by_tensor_cores():
    """Before it one with more sums by other units, around it one that has no more products, within it one without."""
    sass = disassembly(
        *(".L_x_0:", "FFMA R0, R1, R2, R3", "FFMA R0, R1, R2, R3", "FFMA R0, R1, R2, R3", "@P0 BRA `(.L_x_0)"),
        *(".L_x_1:", "MOV R0, RZ"),
        *(".L_x_2:", "HMMA.16816.F32 R4, R8, R2, R4", "HMMA.16816.F32 R4, R8, R2, R4", "FFMA R0, R1, R2, R3"),
        *(".L_x_3:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3", "@!P0 BRA `(.L_x_3)"),
        *("@P1 BRA `(.L_x_2)", "@P2 BRA `(.L_x_1)", "BRA `(.L_x_4)", ".L_x_4:", "EXIT"),
    )
    products = ["HMMA.16816.F32", "HMMA.16816.F32", "FFMA"]
    assert main_loop(sass) == [*products, "SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA"]


def test_a_wait_behind_the_loop_is_no_part_of_it():
    """It comes first or last among the branches back, and spans all that lies between."""
    wait = (".L_x_9:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3", "@!P0 BRA `(.L_x_9)", "BRA `(.L_x_1)")
    loop = (".L_x_1:", "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "@!P0 BRA `(.L_x_9)")
    sass = disassembly(*loop, "MUFU.EX2 R0, R1", "@P1 BRA `(.L_x_1)", "EXIT", *wait)
    assert main_loop(sass) == ["QGMMA.64x128x32.F32.E4M3.E4M3", "BRA", "MUFU.EX2"]


@pytest.mark.parametrize("lines", [(), ("FFMA R0, R1, R2, R3", "EXIT"), (".L_x_0:", "MOV R0, R1", "BRA `(.L_x_0)")])
def test_nothing_multiplied_in_a_loop(lines):
    with pytest.raises(ValueError, match="loops multiplies"):
        main_loop(disassembly(*lines))
