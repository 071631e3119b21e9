"""A broken spec: the sections that differ from a sound one, and the finding that a user must see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SOUND = {
    "model": "{layers: 8, hidden: 512, heads: 8, vocab: 32000, max_position: 4096}",
    "hardware": "{accelerator: h100-sxm, per_node: 8}",
    "data": "python-stdlib",
}
"""Sections of a sound spec for eight GPUs; a case replaces some of them and adds others."""
CPU = {
    "model": "{layers: 2, hidden: 64, heads: 4, vocab: 256, max_position: 128}",
    "hardware": "{accelerator: cpu, per_node: 2}",
    "training": "{sequence_length: 128, global_batch: 8, precision: fp32}",
}
"""Sections of a sound spec for two ranks on this machine, where files of the data and of the model must exist."""


Files = Mapping[str, str]


class Broken(NamedTuple):
    """A spec that people bring to other tools, with the finding that partool gives."""

    thread: str
    """Project and number of the GitHub thread, and what happened there."""
    code: str
    at: str
    """Path in the spec that the finding points to."""
    says: str
    """Part of the message or of the help with the numbers, or with what to write instead."""
    text: str
    severity: str
    files: Files
    """Files beside the spec, by relative path."""


_NONE: Files = {}


def broken(
    thread: str,
    code: str,
    at: str,
    says: str,
    *,
    warns: bool = False,
    files: Files = _NONE,
    **sections: str,
) -> Broken:
    """Return a case made from a sound spec for GPUs; ``sections`` hold YAML."""
    return Broken(thread, code, at, says, spec(SOUND | sections), "warning" if warns else "error", files)


def broken_here(thread: str, code: str, at: str, says: str, *, files: Files = _NONE, **sections: str) -> Broken:
    """Return a case made from a sound spec for this machine; ``sections`` hold YAML."""
    return Broken(thread, code, at, says, spec(SOUND | CPU | sections), "error", files)


def spec(sections: Mapping[str, str]) -> str:
    """Return a spec's text, with one section per line."""
    return "".join(f"{name}: {text}\n" for name, text in sections.items())
