"""Folders of adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names are those of transformers. Where transformers joins matrices that partool keeps apart (the queries, keys and
values of GPT-2), PEFT has one A and one B for them all. Adapters of the parts are written as one of as many times the
rank, whose B is zero outside of the blocks of the parts: the sum is the same, and so is its scale by the patterns of
``adapter_config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from partool.layout.adapters import A, B, is_adapter
from partool.spec.adapter import LowRank
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.families import Family, family_of, place_of
from partool_runtime.hf.places import ParameterPlace
from partool_runtime.hf.stored import row_order
from partool_runtime.hf.writer import to_hf

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = ("q", "k", "v")
_ENDINGS = {A: "lora_A.weight", B: "lora_B.weight"}


class _Stored(NamedTuple):
    """Where a folder holds A or B of a projection."""

    module: str
    """Name of transformers' module."""
    place: ParameterPlace
    ending: str


def write_adapter(state: Mapping[str, torch.Tensor], config: ModelConfig, path: Path, *, base: str) -> int:
    """Write the trained parameters of a model with an adapter into ``path``; return the number of files' tensors.

    ``state`` holds whole parameters by partool's names: A and B, and those that were trained in full; ``base`` is the
    folder of the base model, or empty. Raises ConfigurationError PT624 where PEFT's format cannot hold the adapter.
    """
    from safetensors.torch import save_file

    adapter = _adapter_of(config)
    family = family_of(config.model_copy(update={"adapter": None}))
    tensors: dict[str, torch.Tensor] = {}
    joined: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
    modules: dict[str, None] = {}
    for name in (each for each in state if each.endswith(f".{A}")):
        projection = name.removesuffix(f".{A}")
        stored = _stored(family, name)
        pair = state[name], _in_their_order(state[f"{projection}.{B}"], stored, config)
        modules[stored.module] = None
        if stored.place.part:
            joined.setdefault(stored.module, {})[stored.place.part] = pair
        else:
            tensors |= _named(stored.module, *pair)
    for module, parts in joined.items():
        tensors |= _named(module, *_blocks(parts, config))
    full = to_hf({name: tensor for name, tensor in state.items() if not is_adapter(name)}, family, config)
    tensors |= {_PREFIX + name: tensor for name, tensor in full.items()}
    saved = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in full})
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS, {"format": "pt"})
    settings = _settings(adapter, list(modules), list(joined), saved, family) | {"base_model_name_or_path": base}
    (path / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return len(tensors)


def _adapter_of(config: ModelConfig) -> LowRank:
    assert config.adapter is not None, "a model without an adapter"
    return config.adapter


def _stored(family: Family, name: str) -> _Stored:
    """Return where PEFT holds A or B; raises ConfigurationError PT624 for matrices of experts."""
    projection, _, ending = name.rpartition(".")
    place = place_of(family, f"{projection}.weight")
    assert place is not None, f"{projection} has no place in {family.model_type}"
    if "{e}" in place.name:
        message = f"PEFT's format has one A for the matrices of all experts that transformers joins; {name} has its own"
        raise ConfigurationError("PT624", message, "partool export --merge writes the model with the adapter's sum.")
    return _Stored(place.name.removesuffix(".weight"), place, _ENDINGS[ending])


def _named(module: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{_PREFIX}{module}.{_ENDINGS[A]}": a, f"{_PREFIX}{module}.{_ENDINGS[B]}": b}


def _in_their_order(b: torch.Tensor, stored: _Stored, config: ModelConfig) -> torch.Tensor:
    """Return B with its rows in the order of transformers."""
    if stored.place.rotated and config.mla is not None:
        return b[row_order(config.mla, stored.place.rotated, len(b)).argsort()]
    return b


def _blocks(
    parts: Mapping[str, tuple[torch.Tensor, torch.Tensor]], config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one A and B of joined matrices; a part without an adapter has a block of zeros."""
    rank = _adapter_of(config).rank
    some_a, some_b = next(iter(parts.values()))
    empty_a = some_a.new_zeros(rank, some_a.shape[1])
    rows = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    pairs = [parts.get(part, (empty_a, some_b.new_zeros(rows[part] * config.head_dim, rank))) for part in _PARTS]
    joined_b, first = some_b.new_zeros(sum(len(b) for _, b in pairs), len(_PARTS) * rank), 0
    for number, (_, b) in enumerate(pairs):
        joined_b[first : first + len(b), number * rank : (number + 1) * rank] = b
        first += len(b)
    return torch.cat([a for a, _ in pairs]), joined_b


def _settings(
    adapter: LowRank, modules: list[str], joined: list[str], saved: list[str], family: Family
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``."""
    parts = len(_PARTS)
    wider = adapter.alpha * (parts**0.5 if adapter.rslora else parts)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": family.model_type == "gpt2",
        "init_lora_weights": True,
        "target_modules": sorted(modules),
        "modules_to_save": saved or None,
        "rank_pattern": dict.fromkeys(joined, parts * adapter.rank),
        "alpha_pattern": dict.fromkeys(joined, wider),
    }


class PeftFolder:
    """An open folder; see :func:`open_adapter`."""

    def __init__(self, path: Path, config: ModelConfig, handle: Any) -> None:
        self._path, self._config, self._handle = path, config, handle
        self._family = family_of(config.model_copy(update={"adapter": None}))
        self._names = set(handle.keys())
        self._rank = _adapter_of(config).rank

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the folder with a model's parameters; raises ConfigurationError PT621 with the differences."""
        problems, used = [], set()
        for name, shape in shapes.items():
            if not is_adapter(name):
                continue
            stored = _stored(self._family, name)
            key = f"{_PREFIX}{stored.module}.{stored.ending}"
            used.add(key)
            if key not in self._names:
                problems.append(f"missing {name} ({key})")
            elif not self._fits(key, stored, name, shape):
                saved = list(self._handle.get_slice(key).get_shape())
                problems.append(f"{name} has shape {list(shape)} in the model and {saved} in the folder")
        problems += [f"unexpected {name}" for name in sorted(self._names - used)]
        if problems:
            shown = problems[:12] + ([f"… and {len(problems) - 12} more"] if len(problems) > 12 else [])
            message = f"the adapter in {self._path} does not fit the model:\n  " + "\n  ".join(shown)
            raise ConfigurationError("PT621", message, "adapter.targets and adapter.rank say which matrices it has.")

    def _fits(self, key: str, stored: _Stored, name: str, shape: tuple[int, ...]) -> bool:
        rows, columns = self._handle.get_slice(key).get_shape()
        if not stored.place.part:
            return (rows, columns) == shape
        if name.endswith(A):
            return rows in (shape[0], len(_PARTS) * shape[0]) and columns == shape[1]
        return rows == sum(size for _, size in self._rows.values()) and columns in (shape[1], len(_PARTS) * shape[1])

    @property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """First row and number of rows of each part of joined queries, keys and values."""
        config, first, rows = self._config, 0, {}
        for part, heads in zip(_PARTS, (config.heads, config.kv_heads, config.kv_heads), strict=True):
            rows[part] = (first, heads * config.head_dim)
            first += heads * config.head_dim
        return rows

    def block(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the block at ``offsets`` of A or B."""
        stored = _stored(self._family, name)
        stored_values: torch.Tensor = self._handle.get_tensor(f"{_PREFIX}{stored.module}.{stored.ending}")
        if stored.place.part:
            stored_values = self._part(stored_values, stored)
        elif stored.ending == _ENDINGS[B] and stored.place.rotated and self._config.mla is not None:
            stored_values = stored_values[row_order(self._config.mla, stored.place.rotated, shape[0])]
        return stored_values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]

    def _part(self, stored_values: torch.Tensor, stored: _Stored) -> torch.Tensor:
        """Return A or B of one of joined matrices, which share A unless B has blocks."""
        low = _PARTS.index(stored.place.part) * self._rank
        if stored.ending == _ENDINGS[A]:
            return stored_values if len(stored_values) == self._rank else stored_values[low : low + self._rank]
        first, count = self._rows[stored.place.part]
        rows = stored_values[first : first + count]
        return rows if rows.shape[1] == self._rank else rows[:, low : low + self._rank]


@contextmanager
def open_adapter(path: Path, config: ModelConfig) -> Iterator[PeftFolder]:
    """Open a folder that PEFT or :func:`write_adapter` wrote, of an adapter for ``config``.

    Raises ConfigurationError PT620 for a folder that cannot be read, PT621 for an adapter of another kind or scale.
    """
    from safetensors import SafetensorError, safe_open

    settings = _read_settings(path)
    _check_settings(path, settings, _adapter_of(config))
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(safe_open(path / WEIGHTS, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ConfigurationError("PT620", f"{path / WEIGHTS} cannot be read: {error}") from error
        yield PeftFolder(path, config, handle)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"adapter.weights: {path / CONFIG} cannot be read: {error}"
        raise ConfigurationError("PT620", message, "Give a folder that PEFT or partool export wrote.") from error
    return content if isinstance(content, dict) else {}


def _check_settings(path: Path, settings: Mapping[str, Any], adapter: LowRank) -> None:
    wanted = {
        "peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.rslora,
        "use_dora": False, "bias": "none",
    }  # fmt: skip
    absent = {"use_rslora": False, "use_dora": False, "bias": "none"}
    saved = {name: settings.get(name, absent.get(name)) for name in wanted}
    problems = [
        f"{name} is {saved[name]} there and {value} here" for name, value in wanted.items() if saved[name] != value
    ]
    if settings.get("modules_to_save"):
        problems.append(f"it holds whole matrices of {', '.join(settings['modules_to_save'])}, which are not read")
    if problems:
        names = "adapter.rank, adapter.alpha and adapter.rslora are r, lora_alpha and use_rslora"
        raise ConfigurationError("PT621", f"the adapter in {path} is another: {'; '.join(problems)}", f"{names}.")
