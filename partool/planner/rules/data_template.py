"""Checks that conversations have a tokenizer and a chat template, before ranks start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from partool.diagnostics.record import Diagnostic, Severity
from partool.plan.records import DataError
from partool.plan.tokenizer_folder import templates_of
from partool.spec.data import DataSpec

_HELP = "data.template names a file with a Jinja template, which a message's tokens are rendered by"


def check_templates(data: DataSpec, place: tuple[Severity, str], *, rendered: bool) -> list[Diagnostic]:
    """Return the findings of :func:`check_template` about the data and each named set for validation, each once.

    ``rendered`` says that there are messages beside the data, which need the template.
    """
    samples = [part for part in data.named.values() if not part.is_text]
    main = data.model_copy(update={"template": None}) if (samples or rendered) and data.is_text else data
    findings: list[Diagnostic] = []
    for part in (main, *samples):
        findings += [each for each in check_template(part, place) if each not in findings]
    return findings


def check_template(data: DataSpec, place: tuple[Severity, str]) -> Iterator[Diagnostic]:
    """Yield a finding if the records need a tokenizer's folder, or conversations a template that is not there.

    ``data`` has absolute paths; ``place`` is the severity of a file that this machine lacks, and the words for it.
    """
    yield from _special_tokens(data)
    if data.is_text:
        if data.template:
            message = "a template renders conversations, and the records are texts"
            yield Diagnostic("PT606", message, path=("data", "template"), help="drop it, or set data.records: chat")
        return
    if data.tokenizer == "bytes":
        message = f"{data.records} data need the tokenizer of the model: bytes has no token that ends an answer"
        help = "set data.tokenizer to a Hugging Face folder with tokenizer.json and tokenizer_config.json"
        yield Diagnostic("PT603", message, path=("data", "tokenizer"), help=help)
        return
    severity, where = place
    if data.template and not os.path.isfile(data.template):
        message = f"there is no template {data.template}{where}"
        yield Diagnostic("PT606", message, severity, ("data", "template"), help=_HELP)
    elif not data.template and data.records == "chat" and lacks_template(Path(data.tokenizer)):
        message = f"{data.tokenizer} has no chat template"
        yield Diagnostic("PT606", message, path=("data", "tokenizer"), help=_HELP)


def _special_tokens(data: DataSpec) -> Iterator[Diagnostic]:
    """Yield a finding for special tokens that cannot be added to the tokenizer."""
    path: tuple[str | int, ...] = ("data", "special_tokens")
    if data.special_tokens and data.tokenizer == "bytes":
        message, help = "bytes has 256 tokens and no others", "set data.tokenizer to a Hugging Face folder"
        yield Diagnostic("PT632", message, path=path, help=help)
    for index, token in enumerate(data.special_tokens):
        if token in data.special_tokens[:index]:
            yield Diagnostic("PT632", f"{token!r} is named twice", path=(*path, index), help="drop one of them")
        elif token != token.strip():
            message = f"{token!r} begins or ends with a space, which a tokenizer may take for a part of the text"
            yield Diagnostic("PT632", message, path=(*path, index), help=f"write {token.strip()!r}")


def lacks_template(folder: Path) -> bool:
    """Return True if a folder that exists on this machine has no chat template."""
    try:
        return folder.is_dir() and not templates_of(folder)
    except DataError:
        return True
