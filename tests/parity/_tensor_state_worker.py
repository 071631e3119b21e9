"""Ranks of test_tensor_state.py: checkpoints that every layout saves and every other loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from _ranks import forget_meshes

from partool.plan.types import Plan
from partool_runtime.checkpoint import Checkpointer
from partool_runtime.jobs.train.saving import state_of
from partool_runtime.mesh import close_ranks, open_ranks
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.pieces import Placed, TensorBlock, Value, pieces
from partool_runtime.preparation import prepare


def values(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Return what a checkpoint holds under a name: other bits for every step, name and element."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def blocks(state: dict[str, Value]) -> Iterator[tuple[str, tuple[int, ...], TensorBlock]]:
    """Yield (name, whole shape, block of it) of everything that this rank holds."""
    for name, value in state.items():
        for piece in value.pieces() if isinstance(value, Placed) else pieces(value, None):
            yield name, tuple(value.shape), piece


def of_whole(name: str, shape: tuple[int, ...], piece: TensorBlock, step: int) -> torch.Tensor:
    place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))
    return values(name, shape, step)[place]


def save_and_load(
    plan: Plan, layout: str, mode: Literal["sync", "async"], folder: Path, save: int, load: list[int]
) -> None:
    """Save the layout's state as a step, and load the steps that others saved; all bits are those of the whole."""
    forget_meshes()
    ranks = open_ranks(plan)
    model = prepare(plan, ranks, lambda done, sent: None).model
    state = state_of(model, DeviceOptimizer(trained_parameters(model), plan.optimizer, model.copies))
    place = {"rank": ranks.rank, "world_size": ranks.world_size}
    checkpointer = Checkpointer(folder / "crossed", keep=99, mode=mode, timeout_s=60, **place)
    if save:
        for name, shape, piece in blocks(state):
            piece.tensor.copy_(of_whole(name, shape, piece, save))
        checkpointer.save(save, state, {"layout": layout})
        for _, _, piece in blocks(state):
            piece.tensor.fill_(-1.0)  # training goes on
    for step in load:
        for _, _, piece in blocks(state):
            piece.tensor.fill_(99.0)
        checkpointer.load(step, state)
        for name, shape, piece in blocks(state):
            assert torch.equal(piece.tensor, of_whole(name, shape, piece, step)), (layout, step, name)
    checkpointer.close()
    close_ranks()
