"""Detect which tool wrote the user's files and folders of configurations, and load them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partool_kernels.registry import aiter, aiter_csv, tables, vllm

if TYPE_CHECKING:
    from partool_kernels.registry.tables import Table
    from partool_kernels.registry.types import Reader

_WITHIN = (".", "configs", "ops/triton/configs", "aiter/ops/triton/configs", "aiter/configs")
"""Subfolders in which an aiter folder may keep its configurations."""


def load(paths: list[Path], expert_width: int | None = None) -> tuple[list[tuple[str, Table]], list[Reader]]:
    """Return partool's tables under ``paths``, each with its file, and the readers of other tools' files.

    A path is a partool table, a folder of partool tables (``<kernel>/<architecture>.json``), aiter's folder ``configs``
    or a folder above it, an aiter CSV file, or a vLLM file or a folder of vLLM files. vLLM's files are used only for
    experts of width ``expert_width``, if it is given. Raises :class:`TableError` for any other path.
    """
    loaded: list[tuple[str, Table]] = []
    readers: list[Reader] = []
    for path in paths:
        more_tables, more_readers = _file(path, expert_width) if path.is_file() else _folder(path, expert_width)
        if not more_tables and not more_readers:
            raise tables.TableError(path, _nothing(path) if path.is_dir() else "does not exist")
        loaded += more_tables
        readers += more_readers
    return loaded, readers


def _nothing(path: Path) -> str:
    """Return why no configurations were found in a folder, and which files are expected."""
    from partool_kernels.registry.kernels import KERNELS

    form = "<kernel>/<architecture>.json"
    if path.name in KERNELS and any(path.glob("*.json")):
        return f"it is one kernel's; tables are {form}: name the folder above, {path.parent}"
    default = next((aiter.default_name(file.name) for file in sorted(path.rglob("gfx*.json"))), None)
    if default:
        return f"files of aiter count beside their default file, configs/gemm/{default}, in a folder of that form"
    others = sorted(file.name for file in path.glob("*.json"))
    seen = f"; {others[0]} is named like none of them" if others else "" if any(path.iterdir()) else "; it is empty"
    return f"no tables of partool ({form}), aiter (configs/gemm/gfx*.json) or vLLM (E=*,N=*,device_name=*.json){seen}"


def _file(path: Path, expert_width: int | None) -> tuple[list[tuple[str, Table]], list[Reader]]:
    if path.suffix == ".csv":
        return [], [aiter_csv.AiterTimes([path])]
    if vllm.parse_name(path.name):
        vllm.read(path)
        return [], [vllm.VllmConfigs([path], expert_width)]
    return [(str(path), tables.read(path))], []


def _folder(path: Path, expert_width: int | None) -> tuple[list[tuple[str, Table]], list[Reader]]:
    ours = [(str(file), tables.read(file)) for file in sorted(path.glob("*/*.json")) if _ours(file)]
    readers: list[Reader] = []
    for place in (path / each for each in _WITHIN):
        if aiter.holds(place):
            readers.append(aiter.AiterConfigs(place))
        timed = [file for file in sorted(place.glob("*.csv")) if aiter_csv.kernel_of(file)]
        if timed:
            readers.append(aiter_csv.AiterTimes(timed))
        experts = [file for file in sorted(place.glob("E=*.json")) if vllm.parse_name(file.name)]
        if experts:
            readers.append(vllm.VllmConfigs(experts, expert_width))
    return ours, readers


def _ours(file: Path) -> bool:
    """Return whether a path is named like a partool table, unlike the JSON files in other tools' folders."""
    from partool_kernels.registry.architectures import ARCHITECTURES
    from partool_kernels.registry.kernels import KERNELS

    return file.stem in ARCHITECTURES and file.parent.name in KERNELS
