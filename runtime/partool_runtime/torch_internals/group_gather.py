"""Replacement of the gathers of FSDP2's units, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from partool_runtime.torch_internals.collectives import gather_into
from partool_runtime.torch_internals.fsdp import own_groups
from partool_runtime.torch_internals.tensors import unseen_writes


class GroupGather:
    """Gathers one FSDP2 unit's parameters; it replaces the unit's own gathers.

    FSDP2 gathers a unit as one message and then copies every parameter out of it, so the message and the copies exist
    at once. With ``apart`` every parameter is a separate message, received directly into the storage that FSDP2
    computes with: shards are rows, padded at the end, and are stored there in the order of the ranks, as an all-gather
    delivers them. Parameters of at most ``most_kept`` elements keep their storage once gathered; after :meth:`expire`
    they are gathered again. With ``in_turn`` a message starts when the previous one has arrived: some backends make
    copies of messages in flight.

    There is no public alternative: ``set_custom_all_gather`` replaces the collective, not the copies around it.
    """

    def __init__(self, group: Any, *, apart: bool, in_turn: bool, most_kept: int) -> None:
        self._group, self._apart, self._in_turn = group, apart, in_turn
        self._all = group.fsdp_params
        self.kept = [p for p in self._all if 0 < p._orig_size.numel() <= most_kept]
        """Parameters whose gathered values are kept between gathers."""
        kept = {id(parameter) for parameter in self.kept}
        self._others = [p for p in self._all if id(p) not in kept]
        self._missing: list[Any] = []
        self._fresh = False
        self._gather, self._wait = group.unshard, group.wait_for_unshard
        group.unshard, group.wait_for_unshard = self._unshard, self._wait_for_unshard
        for parameter in self.kept:
            parameter.free_unsharded_param = lambda: None

    @property
    def ranks(self) -> Any:
        """The process group that shares the unit's parameters."""
        return self._group._all_gather_process_group

    def expire(self) -> None:
        """Mark kept parameters as outdated: the next gather updates them."""
        self._fresh = False

    def refresh(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a pair per kept parameter: this rank's shard, and the storage for the shards of all ranks, in order.

        The caller all-gathers the shards before the unit's next gather. The list is empty before the first gather,
        which gathers all parameters.
        """
        if not all(parameter.all_gather_outputs for parameter in self.kept):
            return []
        self._fresh = True
        pairs = [(p, p._sharded_param_data, p.all_gather_outputs[0]) for p in self.kept]
        # Shards may be in host memory.
        return [(shard.to(full.device, p.param_dtype or shard.dtype), full) for p, shard, full in pairs]

    @torch.no_grad()
    def _unshard(self, async_op: bool = False) -> None:
        group = self._group
        busy = group._all_gather_result is not None or group.is_unsharded
        if busy or (not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"):
            return
        self._missing = self._others if self._fresh else self._all
        if self._missing and not self._apart:
            with self._only(self._missing):
                self._gather(async_op)
        else:
            works = _Works()
            for parameter in self._missing:
                self._start(parameter, works)
            group._all_gather_result = _OnTheWay(works)

    def _start(self, parameter: Any, works: _Works) -> None:
        (shard,) = parameter.all_gather_inputs
        parameter.init_all_gather_outputs([shard.numel()], [shard.dtype], self.ranks.size(), shard.device)
        parameter.alloc_all_gather_outputs()
        if shard.numel() > 0:
            works.start(shard, parameter.all_gather_outputs[0], self.ranks)
        if self._in_turn:
            works.wait()

    @torch.no_grad()
    def _wait_for_unshard(self) -> None:
        group = self._group
        if group._all_gather_result is None:
            return
        if isinstance(group._all_gather_result, _OnTheWay):
            group._all_gather_result.all_gather_work.wait()
            group._all_gather_result = None
            for parameter in self._all:
                parameter.init_unsharded_param()
            group._to_unsharded()
        else:
            with self._only(self._missing):
                self._wait()
            for parameter in self.kept if self._missing is self._others else ():
                parameter.init_unsharded_param()
                parameter.to_unsharded()
        self._fresh = True

    @contextmanager
    def _only(self, parameters: list[Any]) -> Iterator[None]:
        """Within the context, make FSDP2 see only ``parameters`` as the parameters of the unit."""
        self._group.fsdp_params = parameters
        try:
            yield
        finally:
            self._group.fsdp_params = self._all


class _Works(torch.distributed.Work):
    """One handle for several gathers."""

    def __init__(self) -> None:
        super().__init__()
        self._started: list[tuple[Any, torch.Tensor]] = []
        self._unseen = ExitStack()

    def start(self, shard: torch.Tensor, full: torch.Tensor, ranks: Any) -> None:
        """Start to all-gather shards; ``shard``, possibly a cast copy, is kept alive until it is sent."""
        # Some backends increment the version counter when they write, after this call has returned.
        self._unseen.enter_context(unseen_writes([full]))
        self._started.append((gather_into(full, shard, ranks, asynchronous=True), shard))

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all gathers."""
        for work, _ in self._started:
            work.wait()
        self._started.clear()
        self._unseen.close()
        return True


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """The fields of a started gather, as FSDP2 reads them."""

    all_gather_work: _Works
    all_gather_event: None = None


def gather_otherwise(module: FSDPModule, *, apart: bool, in_turn: bool, most_kept: int) -> list[GroupGather]:
    """Replace the gathers of a module's own units and return the replacements; units of one rank stay unchanged."""
    groups = [group for group in own_groups(module) if group._all_gather_process_group.size() > 1]
    return [GroupGather(group, apart=apart, in_turn=in_turn, most_kept=most_kept) for group in groups]
