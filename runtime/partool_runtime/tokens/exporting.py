"""Writes a run's tokenizer into the folder of its exported model."""

from __future__ import annotations

import shutil
from pathlib import Path

from partool.plan.tokenizer_folder import FURTHER_TEMPLATES, tokenizer_files
from partool.spec.data import DataSpec
from partool_runtime.fast_tokenizer import open_fast

TEMPLATE_FILE = "chat_template.jinja"


def write_tokenizer(data: DataSpec, target: Path) -> str:
    """Copy the tokenizer's files, and return a sentence about it.

    Tokens of ``data.special_tokens`` are in the copy. A template of the spec takes the place of the folder's templates.
    Raises ConfigurationError PT603 if tokens must be added to a tokenizer that cannot be read.
    """
    if data.tokenizer == "bytes":
        return "the run reads bytes: token numbers are byte values, there are no tokenizer files"
    source = Path(data.tokenizer)
    replaced = data.template is not None and Path(data.template).is_file()
    files = [path for path in tokenizer_files(source) if not (replaced and _is_template(path))]
    for path in files:
        (target / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / path, target / path)
    if not files:
        return f"no tokenizer files found in {source}: add them yourself"
    if data.special_tokens:
        _, content = open_fast(source, data.special_tokens)
        (target / "tokenizer.json").write_text(content, encoding="utf-8")
    if replaced:
        assert data.template is not None
        shutil.copyfile(data.template, target / TEMPLATE_FILE)
    more = f"; with the special tokens {' '.join(data.special_tokens)}" if data.special_tokens else ""
    more += f"; the chat template is {data.template}" if replaced else ""
    return f"tokenizer files copied from {source}: {', '.join(str(path) for path in files)}{more}"


def _is_template(path: Path) -> bool:
    return path.name in (TEMPLATE_FILE, "chat_template.json") or path.parent.name == FURTHER_TEMPLATES
