"""Process groups over parts of the world; a rank opens only groups that it is in, and each of them once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Parts = tuple[tuple[int, ...], ...]
"""Disjoint sets of global ranks, each in ascending order; equal on all ranks of the world."""


class Groups:
    """The process groups that this rank has opened beside the group of the world.

    On a GPU every group is a communicator, which takes device memory that torch's allocator does not count. Groups
    are therefore shared: the same parts with the same purpose are one group, and parts that are the whole world are
    the group of the world. Parts of one rank have no group.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        """``in_order`` means that a group's transfers run one after the other, as with NCCL."""
        self.in_order = in_order
        self._opened: dict[tuple[Parts, str], dist.ProcessGroup | None] = {}

    def of(
        self,
        parts: Iterable[Sequence[int]],
        purpose: str = "",
        *,
        timeout: timedelta | None = None,
        most_blocks: int | None = None,
    ) -> dist.ProcessGroup | None:
        """Return the group of the part that contains this rank; None if there is none or it has only this rank.

        A collective of all ranks of the world, which pass the same arguments in the same order. Transfers that must not
        wait for one another need groups of different ``purpose``, which is also the group's description.
        ``timeout`` and ``most_blocks``, the largest number of thread blocks that a transfer of the group may occupy on
        a GPU, are those of the first call.
        """
        key = tuple(tuple(sorted(part)) for part in parts if len(part) > 1), purpose
        if key not in self._opened:
            self._opened[key] = _open(*key, timeout, most_blocks)
        return self._opened[key]

    def close(self) -> None:
        """Destroy the groups, the last one first: all ranks of a group then destroy theirs in one order.

        torch would destroy groups in the order of their names, which differ between the ranks of a group if the ranks
        have opened different numbers of groups before it.
        """
        for group in reversed(list(self._opened.values())):
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._opened.clear()

    def alone(self) -> dist.ProcessGroup:
        """Return a group of this rank only, for interfaces that insist on a group; it has no communicator."""
        key = ((dist.get_rank(),),), ""
        if key not in self._opened:
            world = dist.group.WORLD if dist.get_world_size() == 1 else None
            me = [dist.get_rank()]
            self._opened[key] = world or dist.new_group(me, backend="gloo", use_local_synchronization=True)
        group = self._opened[key]
        assert group is not None
        return group


def _open(parts: Parts, purpose: str, timeout: timedelta | None, most_blocks: int | None) -> dist.ProcessGroup | None:
    if not parts:
        return None
    if len(parts) == 1 and len(parts[0]) == dist.get_world_size() and not purpose:
        return dist.group.WORLD
    if dist.get_backend() == "nccl":
        # One collective of the world opens the groups of all parts, where ``new_group`` needs one for each part.
        return dist.split_group(
            split_ranks=[list(part) for part in parts],
            timeout=timeout,
            pg_options=_options(most_blocks),
            group_desc=purpose or None,
        )
    local_group = None
    for part in parts:
        # Ranks outside of a part take part only in the count of groups, from which the groups get their names.
        group = dist.new_group(list(part), timeout=timeout, group_desc=purpose or None)
        local_group = group if dist.get_rank() in part else local_group
    return local_group


def _options(most_blocks: int | None) -> Any:
    """Return NCCL's options of a group; None means those of the world, but for the timeout."""
    if most_blocks is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most_blocks
    return options
