"""Folders of adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names are those of transformers. :mod:`partool_runtime.hf.peft_places` says what PEFT holds for matrices that
transformers joins; an adapter of several times the rank gets its scale by the patterns of ``adapter_config.json``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from partool.layout.adapters import B, is_adapter
from partool.layout.parameters import parameters
from partool.spec.adapter import LowRank
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.families import Family, family_of
from partool_runtime.hf.peft_places import PEFT_ENDINGS, PREFIX, PeftPlace, PeftPlaces
from partool_runtime.hf.writer import to_hf

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    state: Mapping[str, torch.Tensor], config: ModelConfig, path: Path, *, base: str, transformers: bool = False
) -> int:
    """Write the trained parameters of a model with an adapter into ``path``; return the number of files' tensors.

    ``state`` holds whole parameters by partool's names, or with ``transformers`` by those of its modules: A and B, and
    those that were trained in full; ``base`` is the folder of the base model, or empty. Raises ConfigurationError PT624
    where PEFT's format cannot hold the adapter.
    """
    from safetensors.torch import save_file

    adapter = _adapter_of(config)
    family = None if transformers else family_of(config.model_copy(update={"adapter": None}))
    adapters: dict[str, dict[str, torch.Tensor]] = {}
    full = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for name in state.keys() - full.keys():
        projection, _, ending = name.rpartition(".")
        adapters.setdefault(projection, {})[ending] = state[name]
    places = _places(config, family, {name: len(parts[B]) for name, parts in sorted(adapters.items())})
    tensors = {
        name: tensor for place in places for name, tensor in place.joined(adapters, adapter.rank).items()
    }  # fmt: skip
    stored = full if family is None else to_hf(full, family, config)
    tensors |= {PREFIX + name: tensor for name, tensor in stored.items()}
    saved = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in stored})
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS, {"format": "pt"})
    settings = _settings(adapter, places, saved, family) | {"base_model_name_or_path": base}
    (path / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return len(tensors)


def _adapter_of(config: ModelConfig) -> LowRank:
    assert config.adapter is not None, "a model without an adapter"
    return config.adapter


def _places(config: ModelConfig, family: Family | None, rows: Mapping[str, int]) -> list[PeftPlace]:
    """Return each place of PEFT's once, of projections with the numbers of their matrices' rows."""
    places = PeftPlaces(config, family, rows)
    return list({place.target: place for name, count in rows.items() for place in [places.of(name, count)]}.values())


def _settings(adapter: LowRank, places: Sequence[PeftPlace], saved: list[str], family: Family | None) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``."""
    numbers = {place.target: len(place.parts) for place in places if len(place.parts) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": family is not None and family.model_type == "gpt2",
        "init_lora_weights": True,
        "target_modules": sorted(place.target for place in places if not place.experts),
        "target_parameters": sorted(place.target for place in places if place.experts) or None,
        "modules_to_save": saved or None,
        "rank_pattern": {target: number * adapter.rank for target, number in numbers.items()},
        "alpha_pattern": {
            target: adapter.alpha * (number**0.5 if adapter.rslora else number) for target, number in numbers.items()
        },
    }


class PeftFolder:
    """An open folder; see :func:`open_adapter`."""

    def __init__(self, path: Path, config: ModelConfig, handle: Any, settings: Mapping[str, Any], family: Any) -> None:
        self._path, self._config, self._handle, self._settings = path, config, handle, settings
        self._family: Family | None = family
        self._names = set(handle.keys())
        self._rank = _adapter_of(config).rank
        rows = self._rows()
        places = PeftPlaces(config, family, rows)
        self._places = {name: places.of(name, count) for name, count in rows.items()}

    def _rows(self) -> dict[str, int]:
        """Return the rows of each matrix with an adapter; of a model of transformers, what the folder says."""
        if self._family is not None:
            shapes = {info.name: info.shape for info in parameters(self._config)}
            return {name.removesuffix(f".{B}"): shape[0] for name, shape in shapes.items() if name.endswith(f".{B}")}
        ending = f".{PEFT_ENDINGS[B]}"
        keys = (name for name in self._names if name.endswith(ending))
        return {name.removeprefix(PREFIX).removesuffix(ending): self._shape(name)[0] for name in keys}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the folder with a model's parameters; raises ConfigurationError PT621 with the differences."""
        problems, used = [], set()
        for name, shape in shapes.items():
            if not is_adapter(name):
                continue
            projection, _, ending = name.rpartition(".")
            place = self._places.get(projection) or PeftPlace(projection, projection, (projection,), (0,))
            key = place.key(ending)
            used.add(key)
            if key not in self._names:
                problems.append(f"missing {name} ({key})")
            elif (saved := self._shape(key)) not in place.shapes(ending, shape, self._rank):
                problems.append(f"{name} has shape {list(shape)} in the model and {list(saved)} in the folder")
        problems += [f"unexpected {name}" for name in sorted(self._names - used)]
        problems += _scales(self._settings, _adapter_of(self._config), self._places.values())
        if problems:
            shown = problems[:12] + ([f"… and {len(problems) - 12} more"] if len(problems) > 12 else [])
            message = f"the adapter in {self._path} does not fit the model:\n  " + "\n  ".join(shown)
            raise ConfigurationError("PT621", message, "adapter.targets and adapter.rank say which matrices it has.")

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(key).get_shape())

    def block(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the block at ``offsets`` of A, B or the magnitudes."""
        del shape
        projection, _, ending = name.rpartition(".")
        place = self._places[projection]
        values = place.part(self._handle.get_tensor(place.key(ending)), projection, ending, self._rank)
        return values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def _scales(settings: Mapping[str, Any], adapter: LowRank, places: Any) -> Iterator[str]:
    """Yield the modules to which the patterns of a folder give another scale than the adapter's."""
    for target in dict.fromkeys(place.target for place in places):
        rank, alpha = (
            next((value for key, value in (settings.get(name) or {}).items() if _matches(key, target)), default)
            for name, default in (("rank_pattern", adapter.rank), ("alpha_pattern", adapter.alpha))
        )
        scale = alpha / (math.sqrt(rank) if adapter.rslora else rank)
        if not math.isclose(scale, adapter.scale, rel_tol=1e-6):
            yield f"{target} has the scale {scale:g} in the folder and {adapter.scale:g} in the model"


def _matches(pattern: str, target: str) -> bool:
    """Return whether a key of ``rank_pattern`` is of a module: PEFT reads it as an expression at the name's end."""
    return re.match(rf"(.*\.)?({pattern})$", target) is not None


@contextmanager
def open_adapter(path: Path, config: ModelConfig, *, transformers: bool = False) -> Iterator[PeftFolder]:
    """Open a folder that PEFT or :func:`write_adapter` wrote, of an adapter for ``config``.

    Raises ConfigurationError PT620 for a folder that cannot be read, PT621 for an adapter of another kind or scale.
    """
    from safetensors import SafetensorError, safe_open

    settings = _read_settings(path)
    _check_settings(path, settings, _adapter_of(config))
    family = None if transformers else family_of(config.model_copy(update={"adapter": None}))
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(safe_open(path / WEIGHTS, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ConfigurationError("PT620", f"{path / WEIGHTS} cannot be read: {error}") from error
        yield PeftFolder(path, config, handle, settings, family)


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
        "use_dora": adapter.kind == "dora", "bias": "none",
    }  # fmt: skip
    absent = {"use_rslora": False, "use_dora": False, "bias": "none"}
    saved = {name: settings.get(name, absent.get(name)) for name in wanted}
    problems = [
        f"{name} is {saved[name]} there and {value} here" for name, value in wanted.items() if saved[name] != value
    ]
    if settings.get("modules_to_save"):
        problems.append(f"it holds whole matrices of {', '.join(settings['modules_to_save'])}, which are not read")
    if problems:
        names = "adapter.kind is use_dora, adapter.rank, adapter.alpha and adapter.rslora are r, lora_alpha, use_rslora"
        raise ConfigurationError("PT621", f"the adapter in {path} is another: {'; '.join(problems)}", f"{names}.")
