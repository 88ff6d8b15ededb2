"""Which blocks an SM gets, and how many of them at a time."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device

_REGISTER_UNIT, _WARP = 256, 32
_SHARED_UNIT = 128


@dataclass(frozen=True)
class Plan:
    """The blocks of the busiest SM, or of the group of SMs that a cluster occupies.

    `units` are those blocks in the order in which they begin: one each, or a cluster's, whose blocks go to one SM each.
    `resident` units at a time; `share` is the part of all memory traffic that one of these SMs has, while all run;
    `active` the part of the GPU's SMs that have blocks.
    """

    units: tuple[tuple[int, ...], ...]
    resident: int
    share: float
    active: float

    @property
    def blocks(self) -> list[int]:
        """All blocks, as linear numbers in the grid."""
        return [block for unit in self.units for block in unit]


def resident_blocks(device: Device, threads: int, shared_bytes: int, registers: int) -> int:
    """How many blocks of a kernel an SM holds at once; at least 1."""
    warps = -(-threads // _WARP)
    limits = [device.max_blocks, device.max_threads // (warps * _WARP)]
    shared = -(-(shared_bytes + device.reserved_shared_bytes) // _SHARED_UNIT) * _SHARED_UNIT
    limits.append(device.shared_bytes // shared)
    if registers:
        warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        limits.append(device.registers // warp // warps)
    return max(min(limits), 1)


def plan(device: Device, blocks: int, cluster: int, per_sm: int, most: int) -> tuple[Plan, int]:
    """The blocks to play, and how many units the busiest SM gets in all.

    Blocks are handed out in order, one to each SM, then the next to each; of what is more than fits at once, an SM gets
    one whenever one of its own has ended, which for blocks that are alike is the same order.
    """
    groups = max(device.multiprocessors // cluster, 1)
    units = blocks // cluster
    mine = range(0, units, groups)
    played = mine[: max(most // cluster, 1)]
    resident = min(per_sm, len(mine))
    everywhere = min(units, groups * per_sm)
    return (
        Plan(
            tuple(tuple(range(unit * cluster, (unit + 1) * cluster)) for unit in played),
            min(resident, len(played)),
            resident / everywhere / cluster,
            min(units, groups) * cluster / device.multiprocessors,
        ),
        len(mine),
    )
