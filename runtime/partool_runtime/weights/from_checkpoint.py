"""Weights from a partool checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from partool.layout.adapters import is_adapter
from partool.layout.parameters import is_selection_bias
from partool_runtime.checkpoint import VerifiedFolder, load_folder, newest_step, step_folder, tensor_shapes
from partool_runtime.checkpoint._agreement import SavingRanks
from partool_runtime.errors import ConfigurationError
from partool_runtime.model import AnyDecoder
from partool_runtime.pieces import placed
from partool_runtime.weights.blocks import fill_from, targets
from partool_runtime.weights.upcycle import WholeTensors, dense_shapes, upcycled

_MODEL = "model."
_TIMEOUT_S = 1800.0


def load_model(model: AnyDecoder, path: Path, masters: Mapping[str, torch.Tensor] | None = None) -> None:
    """Fill a model, or a part of one, from the model part of a checkpoint; collective with several ranks.

    ``masters`` are filled instead of their parameters. ``path`` is a ``step-…`` folder, a folder of ``step-…`` folders,
    or a run's folder; of several steps the newest is taken. Raises ConfigurationError PT620 without a checkpoint, PT621
    where names or shapes differ, and the checkpoint's own codes where it is damaged.
    """
    folder = find_checkpoint(path)
    check_shapes(folder, {name: shape for name, shape in model.whole_shapes().items() if not is_adapter(name)})
    if model.stored:  # codes are made of whole rows
        with _all_ranks() as ranks:
            source = WholeTensors(VerifiedFolder(folder, ranks), _MODEL)
        fill_from(model, source.block, masters, lambda name: not is_adapter(name))
        return
    state = {
        _MODEL + name: placed(tensor.detach(), model.placements.get(name))
        for name, tensor in targets(model, masters).items()
        if not is_adapter(name)
    }
    with _all_ranks() as ranks:
        load_folder(folder, state, ranks, cast=True)


def load_upcycled(
    model: AnyDecoder, path: Path, masters: Mapping[str, torch.Tensor] | None = None, *, seed: int
) -> None:
    """Fill a model with experts from the checkpoint of a dense model; see :func:`load_model`."""
    folder = find_checkpoint(path)
    check_shapes(folder, dense_shapes(model.config))
    with _all_ranks() as ranks:
        source = WholeTensors(VerifiedFolder(folder, ranks), _MODEL)
    fill_from(model, upcycled(model.config, source.block, seed), masters, lambda name: not is_adapter(name))


@contextmanager
def _all_ranks() -> Iterator[SavingRanks | None]:
    """Yield the ranks that load together; None in a process of its own."""
    ranks = SavingRanks(dist.get_rank(), dist.get_world_size(), _TIMEOUT_S) if dist.is_initialized() else None
    try:
        yield ranks
    finally:
        if ranks is not None:
            ranks.close()


def load_whole(
    path: Path, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of any layout, whole and cast to ``dtype``, by name; no collective.

    Selection biases of routers are at least in float32: they change by less than 16 bits resolve.

    ``shapes`` are the shapes that the model must have, if known. Raises like :func:`load_model`.
    """
    folder = find_checkpoint(path)
    if shapes is not None:
        check_shapes(folder, shapes)
    wide = torch.promote_types(dtype, torch.float32)
    state = {
        name: torch.empty(shape, dtype=wide if is_selection_bias(name) else dtype)
        for name, shape in _saved(folder).items()
    }
    load_folder(folder, {_MODEL + name: tensor for name, tensor in state.items()}, cast=True)
    return state


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path refers to; raises ConfigurationError PT620 if there is none."""
    if path.name.startswith("step-"):
        return path  # if it is missing, reading it lists the existing ones
    if not path.is_dir():
        raise ConfigurationError("PT620", f"model.weights.path: no folder {path}")
    for folder in (path, path / "checkpoints"):
        step = newest_step(folder)
        if step is not None:
            return step_folder(folder, step)
    raise ConfigurationError("PT620", f"{path} holds no checkpoint", "Give a step-… folder, or the folder of a run.")


def _saved(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in a checkpoint."""
    shapes = tensor_shapes(folder).items()
    return {name.removeprefix(_MODEL): shape for name, (shape, _) in shapes if name.startswith(_MODEL)}


def check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a model's parameters with a checkpoint's; raises ConfigurationError PT621 with all differences."""
    saved = _saved(folder)
    problems = [f"missing {name}" for name in shapes if name not in saved]
    problems += [f"unexpected {name}" for name in saved if name not in shapes]
    problems += [
        f"{name} has shape {list(shape)} in the model and {list(saved[name])} in the checkpoint"
        for name, shape in shapes.items()
        if name in saved and shape != tuple(saved[name])
    ]
    if problems:
        shown = problems[:12] + ([f"… and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise ConfigurationError("PT621", f"the weights in {folder} do not fit the model:\n  " + "\n  ".join(shown))
