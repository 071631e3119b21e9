"""Reads torchtitan's job configurations, as TOML and as arguments of a command, into settings with one set of names.

Names and defaults are those of ``torchtitan/config_manager.py`` (0.0 to 0.1) and ``torchtitan/config/job_config.py``
(0.1 to 0.2) of https://github.com/pytorch/torchtitan. Names of older versions are read as the newest ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.engines.commands import options, span_of, unknown_value
from partool.engines.documents import toml
from partool.engines.settings import Setting
from partool.engines.shell import Word

_PARALLEL = (
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
    "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_split_points",
    "pipeline_parallel_microbatches", "pipeline_parallel_schedule_csv", "context_parallel_degree",
    "context_parallel_rotate_method", "enable_async_tensor_parallel", "enable_compiled_autograd",
)  # fmt: skip
_RENAMED: dict[str, str] = {
    **{f"{section}.{name}": f"parallelism.{name}" for section in ("training", "experimental") for name in _PARALLEL},
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "validation.enabled": "validation.enable",
    "validator.enable": "validation.enable",
    "validator.freq": "validation.freq",
    "validator.steps": "validation.steps",
    "float8.enable_float8_linear": "model.enable_float8_linear",
    "model.use_flex_attn": "model.use_flex_attn",
}
_QUANTIZE = (
    ("quantize.linear.float8.", "float8."), ("quantize.dense.float8.", "float8."), ("quantize.linear.fp8.", "float8."),
    ("quantize.linear.mx.", "mx."),
    ("quantize.dense.mx.", "mx."), ("quantize.moe.", "quantize.grouped_mm."),
)  # fmt: skip
_SECTION = re.compile(r"\s*\[\[?\s*([\w.\"' -]+?)\s*\]")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")


def canonical(name: str) -> str:
    """Return the newest name of a setting."""
    for old, new in _QUANTIZE:
        if name.startswith(old):
            name = new + name[len(old) :]
    return _RENAMED.get(name, name)


def settings(path: Path, text: str) -> tuple[dict[str, Setting], list[Diagnostic]]:
    """Return the keys of a TOML file under their newest names, with their lines; findings if it is no TOML."""
    root, problem = toml(text)
    if problem:
        match = re.search(r"at line (\d+)", problem)
        line = int(match[1]) if match else 1
        where = Span(str(path), line, 1, line, 1)
        return {}, [Diagnostic("PT820", f"{path} is no TOML: {problem}", span=where, help="mend the file")]
    if root and not any(True for _ in _leaves(root, "")):
        return {}, [Diagnostic("PT820", f"{path} has no settings", help="give the file that the run reads")]
    lines = _lines(text)
    leaves = {name: Setting(name, value, str(path), _line_of(name, lines)) for name, value in _leaves(root, "")}
    return renamed(leaves), []


def renamed(leaves: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return settings under their newest names; where a file has both, the old one stays as it is."""
    return {(new if (new := canonical(name)) not in leaves else name): one for name, one in leaves.items()}


_DEPTH = 12
"""Tables within tables that are read one by one; torchtitan's own are half as deep."""


def _leaves(table: Mapping[str, Any], before: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and depth < _DEPTH:
            yield from _leaves(value, f"{before}{key}.", depth + 1)
        else:
            yield f"{before}{key}", value


def _lines(text: str) -> dict[str, int]:
    """Return the line of each key, by a scan for sections and for equals signs."""
    section, lines = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if named := _SECTION.match(line):
            section = re.sub(r"[\"' ]", "", named[1]) + "."
            lines.setdefault(section[:-1], number)
        elif key := _KEY.match(line):
            lines.setdefault(section + re.sub(r"[\"']", "", key[1]), number)
    return lines


def _line_of(name: str, lines: Mapping[str, int]) -> int:
    while name and name not in lines:
        name = name.rpartition(".")[0]
    return lines.get(name, 1)


def arguments(words: Sequence[Word], no_effect: Mapping[str, str]) -> tuple[dict[str, Setting], list[Diagnostic]]:
    """Return the options of a command under their newest names, and findings for words that nobody can tell.

    ``--section.key value`` and ``--section.key=value`` set a value, ``--section.key`` switches a flag on and
    ``--section.no_key`` off. Options without a section are the launcher's.
    """
    settings, findings = dict[str, Setting](), list[Diagnostic]()
    values = set[int]()
    for name, given, word, after in options(words):
        section, _, key = name.replace("-", "_").rpartition(".")
        flag = after is not word and bool(_PROGRAM.search(after.text))
        value = True if flag else given
        if after is not word and not flag:
            values.add(id(after))
        off = bool(section) and key.startswith("no_") and value is True
        full_key = f"{section}.{key.removeprefix('no_') if off else key}" if section else key
        if after.unknown and value is not True and canonical(full_key) not in no_effect and full_key not in LAUNCHER:
            findings.append(unknown_value(name, after))
        else:
            settings[full_key] = Setting(name, False if off else value, word.file, word.line)
    findings += [_open(word) for word in words if word.unknown and word.text[:1] == "$" and id(word) not in values]
    return renamed(settings), findings


_PROGRAM = re.compile(r"\.(py|sh)$|^torchtitan\.")
LAUNCHER = {"nproc_per_node": "per_node", "nnodes": "nodes"}
"""Options of torchrun → fields of ``hardware``."""


def _open(word: Word) -> Diagnostic:
    """Return a finding for a word that stands for options which the script does not know itself."""
    message = f"the command has more options in {word.text}, which only running the script would tell"
    help = "write them into the script if they change memory or time"
    return Diagnostic("PT825", message, "note", span=span_of(word), help=help)


def listed(value: Any) -> list[str]:
    """Return the entries of a list, or of text with commas."""
    entries = value if isinstance(value, (list, tuple)) else re.split(r"[,\s]+", str(value).strip("[]() "))
    return [str(each).strip("\"' ") for each in entries if str(each).strip("\"' ")]
