"""The files of weights in a folder of Hugging Face's or of a run; planning and the run report equal errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_STEP = re.compile(r"step-\d{8,}")


class WeightsError(ValueError):
    """A folder whose weights cannot be read; ``help`` says how to fix it, where that is known."""

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__(message)
        self.help = help


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, as its index names them; raises WeightsError if there are none."""
    index = folder / _INDEX
    if index.exists():
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise WeightsError(f"{index} cannot be read: {error}") from error
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise WeightsError(f"{index}: no weight_map of names to files")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    elif (folder / _SINGLE).exists():
        files = [folder / _SINGLE]
    else:
        message = f"{folder} holds neither {_SINGLE} nor {_INDEX}"
        names = sorted(file.name for file in folder.iterdir())[:8]
        raise WeightsError(message, f"It holds {', '.join(names) or 'nothing'}.")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsError(f"{folder}: the index names files that are missing: {', '.join(missing)}")
    return files


def check_weight_file(file: Path) -> None:
    """Raise WeightsError if a file is no safetensors file: its first 8 bytes are the length of a header of JSON.

    https://huggingface.co/docs/safetensors/index#format
    """
    try:
        with file.open("rb") as opened:
            head, size = opened.read(len(_POINTER)), file.stat().st_size
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from error
    if head == _POINTER:
        raise WeightsError(f"{file} is a pointer of Git LFS, not the file itself", "git lfs pull")
    if len(head) < 8 or int.from_bytes(head[:8], "little") > size - 8:
        raise WeightsError(f"{file} cannot be read: its {size} bytes are no safetensors file", "download it again")


def holds_checkpoint(path: Path) -> bool:
    """Return True if a path is a folder of a checkpoint, or a run's folder with one."""
    if path.name.startswith("step-"):
        return path.is_dir() and any(path.iterdir())
    folders = [folder for folder in (path, path / "checkpoints") if folder.is_dir()]
    return any(_STEP.fullmatch(entry.name) and entry.is_dir() for folder in folders for entry in folder.iterdir())
