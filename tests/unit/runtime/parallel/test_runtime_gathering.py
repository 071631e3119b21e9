"""The order in which layers are prefetched."""

from __future__ import annotations

from typing import cast

import pytest
from torch.distributed.fsdp import FSDPModule

from partool_runtime.parallel.zero import prefetch


class Unit:
    """Stand-in for an FSDP unit that records the units it prefetches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.forward: list[str] = []
        self.backward: list[str] = []

    def set_modules_to_forward_prefetch(self, units: list[Unit]) -> None:
        self.forward = [unit.name for unit in units]

    def set_modules_to_backward_prefetch(self, units: list[Unit]) -> None:
        self.backward = [unit.name for unit in units]


AHEAD = {
    0: {"a": ([], ["a"]), "b": ([], ["b"]), "c": ([], ["c"]), "root": ([], ["root"])},
    1: {"a": (["b"], ["a"]), "b": (["c"], ["a"]), "c": ([], ["b"]), "root": (["a"], ["c"])},
    2: {"a": (["b", "c"], ["a"]), "b": (["c"], ["a"]), "c": ([], ["b", "a"]), "root": (["a", "b"], ["c", "b"])},
}
"""Units prefetched by each unit in forward and in backward passes, by depth; its own name stands for none."""


@pytest.mark.parametrize("depth", AHEAD)
def test_so_many_layers_are_gathered_ahead(depth: int) -> None:
    units = [Unit(name) for name in ("a", "b", "c", "root")]
    *layers, root = (cast(FSDPModule, unit) for unit in units)
    prefetch([[layer] for layer in layers], root, depth)
    assert {unit.name: (unit.forward, unit.backward) for unit in units} == AHEAD[depth]
