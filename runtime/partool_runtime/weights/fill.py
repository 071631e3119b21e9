"""Fills a model's parameters from any source; each rank fills the blocks that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from partool.layout.adapters import is_adapter
from partool.spec.model import Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.grown import GrownVocabulary
from partool_runtime.hf.load import HfFiles
from partool_runtime.hf.model import HfPart
from partool_runtime.hf.peft import open_adapter
from partool_runtime.hf.reader import open_folder
from partool_runtime.model import AnyDecoder
from partool_runtime.weights.blocks import fill_from
from partool_runtime.weights.draw import BlockSource, adapter_source, dummy_source, init_source
from partool_runtime.weights.from_checkpoint import load_model, load_upcycled
from partool_runtime.weights.magnitudes import fill_magnitudes
from partool_runtime.weights.upcycle import dense, dense_shapes, upcycled


def fill(
    model: AnyDecoder,
    weights: Weights,
    *,
    seed: int,
    masters: Mapping[str, torch.Tensor] | None = None,
    adapter: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[str, ...]:
    """Fill all parameters, or the ``masters`` in their place, from ``weights.source``; return notes for the user.

    ``init`` draws from the seed, ``dummy`` is for trials, ``hf`` and ``checkpoint`` read a folder; with ``upcycle``
    it is that of a dense model. The matrices of an adapter are drawn, or read from the folder ``adapter`` in PEFT's
    format.

    The model, or a pipeline rank's part of it, must be materialised. Parameters may be whole, cut over tensor ranks, or
    sharded by rows over data-parallel ranks. The call is a collective of all ranks for ``checkpoint``, and one of the
    ranks of ``group`` where DoRA's magnitudes are norms of rows; ``group`` None means one rank. Raises
    ConfigurationError PT620 for a folder that cannot be read, PT621 where names or shapes do not match.
    """
    notes = _fill_base(model, weights, seed=seed, masters=masters)
    if model.config.adapter is not None:
        with _adapters(model, seed, adapter) as source:
            fill_from(model, source, masters, is_adapter)
        if model.config.adapter.kind == "dora" and adapter is None:
            fill_magnitudes(model, masters, group)
    return notes


@contextmanager
def _adapters(model: AnyDecoder, seed: int, folder: str | None) -> Iterator[BlockSource]:
    """Yield the source of an adapter's matrices."""
    if folder is None:
        yield adapter_source(seed)
        return
    with open_adapter(Path(folder), model.config, transformers=isinstance(model, HfPart)) as peft:
        peft.check(model.whole_shapes())
        yield peft.block


def _is_base(name: str) -> bool:
    return not is_adapter(name)


def _fill_base(
    model: AnyDecoder, weights: Weights, *, seed: int, masters: Mapping[str, torch.Tensor] | None
) -> tuple[str, ...]:
    """Fill all parameters but those of an adapter."""
    hf = model if isinstance(model, HfPart) else None
    if weights.source in ("init", "dummy"):
        drawn = init_source(model.config, seed) if weights.source == "init" else dummy_source(model.config)
        fill_from(model, drawn if hf is None else hf.first_values(drawn), masters, _is_base)
    elif weights.source == "hf":
        path = _path(weights)
        if weights.upcycle:
            with open_folder(path, dense(model.config)) as folder:
                unused = folder.check(dense_shapes(model.config))
                fill_from(model, upcycled(model.config, folder.block, seed), masters, _is_base)
        else:
            with _open(path, model) as source:
                unused = source.check({name: shape for name, shape in model.whole_shapes().items() if _is_base(name)})
                fill_from(model, source.block, masters, _is_base)
        if unused:
            return (f"{len(unused)} tensors of {path} are not used (multi-token prediction): {', '.join(unused)}",)
    elif weights.upcycle:
        load_upcycled(model, _path(weights), masters, seed=seed)
    else:
        load_model(model, _path(weights), masters)
    return ()


@contextmanager
def _open(path: Path, model: AnyDecoder) -> Iterator[GrownVocabulary | HfFiles]:
    """Open a folder of weights, by the names of the model's parameters."""
    if isinstance(model, HfPart):
        with model.open_weights(path) as files:
            yield files
    else:
        with open_folder(path, model.config) as folder:
            yield GrownVocabulary(folder)


def _path(weights: Weights) -> Path:
    if weights.path is None:
        message = f"model.weights: the source {weights.source} needs a path"
        raise ConfigurationError("PT620", message, "Set model.weights.path to the folder.")
    return Path(weights.path).expanduser()
