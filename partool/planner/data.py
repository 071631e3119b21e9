"""The ``data`` section with absolute paths, and what of it can be checked before anything runs."""

from __future__ import annotations

import glob
import json
from pathlib import Path

from partool.diagnostics.record import Diagnostic, Severity
from partool.spec.spec import Spec
from partool.spec.training import DataSpec

STDLIB = "python-stdlib"
BYTES_VOCAB = 256


def resolve_data(spec: Spec, base_dir: Path) -> tuple[DataSpec, int | None, list[Diagnostic]]:
    """Return the section with absolute paths, the tokenizer's vocabulary (None if unknown), and findings.

    Missing files are errors where training runs on this machine, and warnings for a catalog accelerator: planning then
    happens elsewhere than training.
    """
    data = spec.data
    severity: Severity = "error" if spec.hardware.accelerator in ("auto", "cpu") else "warning"
    sources = [data.source] if isinstance(data.source, str) else data.source
    absolute = [source if source == STDLIB else str(base_dir / source) for source in sources]
    found = []
    for index, (written, path) in enumerate(zip(sources, absolute, strict=True)):
        if written != STDLIB and not _exists(path):
            place = ("data", "source") if isinstance(data.source, str) else ("data", "source", index)
            message = f"there are no files at {path}"
            if severity == "warning":
                message += " on this machine"
            found.append(Diagnostic("PT601", message, severity=severity, path=place, help=_HELP))
    vocab, wrong = _vocab(data.tokenizer, base_dir, severity)
    update = {
        "source": absolute[0] if isinstance(data.source, str) else absolute,
        "tokenizer": data.tokenizer if data.tokenizer == "bytes" else str(base_dir / data.tokenizer),
        "cache": str(base_dir / data.cache) if data.cache else None,
    }
    return data.model_copy(update=update), vocab, found + wrong


_HELP = "a file, a folder, a glob such as data/**/*.txt, or python-stdlib"


def _exists(pattern: str) -> bool:
    if glob.has_magic(pattern):
        return next(glob.iglob(pattern, recursive=True), None) is not None
    return Path(pattern).exists()


def _vocab(tokenizer: str, base_dir: Path, severity: Severity) -> tuple[int | None, list[Diagnostic]]:
    if tokenizer == "bytes":
        return BYTES_VOCAB, []
    file = base_dir / tokenizer / "tokenizer.json"
    try:
        content = json.loads(file.read_bytes())
        added = [int(token["id"]) for token in content.get("added_tokens", [])]
        words = content["model"]["vocab"]
        ids = words.values() if isinstance(words, dict) else range(len(words))
        return max([*ids, *added]) + 1, []
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"{file} is no tokenizer file"
    help = "`bytes`, or a folder with a tokenizer.json"
    return None, [Diagnostic("PT603", message, severity=severity, path=("data", "tokenizer"), help=help)]
