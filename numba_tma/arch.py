"""Which GPU an instruction needs, by the PTX ISA's 'Target ISA Notes' of the instructions used here."""

from __future__ import annotations

import re
from dataclasses import dataclass

# First match wins, so the longer mnemonics stand first. Architecture 90 with `specific` set is sm_90a alone:
# those instructions exist on no other architecture, not even a newer one.
_RULES = (
    (re.compile(r"wgmma\."), 90, True),
    (re.compile(r"setmaxnreg\."), 90, False),
    (re.compile(r"tensormap\.replace"), 90, False),
    (re.compile(r"cp\.(reduce\.)?async\.bulk"), 90, False),
    (re.compile(r"mbarrier\.(try_wait|expect_tx|complete_tx)|mbarrier\.arrive\.expect_tx"), 90, False),
    (re.compile(r"barrier\.cluster|mapa\.|getctarank|fence\.mbarrier_init|fence\.proxy\.async"), 90, False),
    (re.compile(r"elect\.sync|griddepcontrol|st\.async|red\.async|fence\.proxy\.tensormap"), 90, False),
    (re.compile(r"cp\.async\.|mbarrier\.|createpolicy\.|redux\.sync"), 80, False),
    (re.compile(r"ldmatrix|movmatrix"), 75, False),
)
_INSTRUCTION = re.compile(r"^\s*(?:@!?%?\w+\s+)?([a-z]\w*(?:[.:]+\w+)+)")
_NAME = re.compile(r"sm_(\d+)(a|f)?$")


@dataclass(frozen=True)
class Requirement:
    """The most demanding instruction of a kernel: what it needs and where it stands in the PTX."""

    capability: int
    only_90a: bool
    mnemonic: str
    line: int

    def refusal(self, capability: tuple[int, int]) -> str | None:
        """Why a GPU of this compute capability cannot run the kernel, or None if it can."""
        device = capability[0] * 10 + capability[1]
        if device < self.capability:
            return (
                f"{self.mnemonic} (PTX line {self.line}) needs sm_{self.capability}"
                f"{'a' if self.only_90a else ''}, this GPU is sm_{device}"
            )
        if self.only_90a and device != 90:
            return (
                f"{self.mnemonic} (PTX line {self.line}) exists on sm_90a (Hopper) only and this GPU is sm_{device}; "
                f"Blackwell's tensor cores are programmed with tcgen05 instead of wgmma"
            )
        return None


def requirement(ptx: str) -> Requirement:
    """The most demanding instruction in `ptx`; capability 70 (this project's floor) where nothing asks for more."""
    worst = Requirement(70, False, "the kernel", 0)
    for number, line in enumerate(ptx.splitlines(), 1):
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        for rule, capability, only_90a in _RULES:
            if rule.match(match[1]):
                if (capability, only_90a) > (worst.capability, worst.only_90a):
                    worst = Requirement(capability, only_90a, match[1], number)
                break
    return worst


def parse(name: str) -> tuple[int, ...] | tuple[int, int, str]:
    """'sm_90a' as (9, 0, 'a'), the form that numba-cuda's `cc` takes.

    Raises:
        ValueError: the name is not of the form sm_NN, sm_NNa or sm_NNf.
    """
    match = _NAME.match(name)
    if not match:
        raise ValueError(f"architecture {name!r}: expected a name such as 'sm_80' or 'sm_90a'")
    number = int(match[1])
    return (number // 10, number % 10) + ((match[2],) if match[2] else ())


def name(capability: tuple[int, int]) -> str:
    """The architecture to compile for on a GPU: Hopper's own sm_90a, elsewhere the plain name."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability >= (9, 0) else "")
