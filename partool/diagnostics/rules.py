"""Documentation of all rules: the meaning of each code, an example that breaks the rule, and the corrected example."""

from __future__ import annotations

import difflib

from partool.diagnostics import (
    _texts_chat,
    _texts_engines,
    _texts_files,
    _texts_hf,
    _texts_k8s,
    _texts_keeping,
    _texts_kernels,
    _texts_launch,
    _texts_machines,
    _texts_offload,
    _texts_parallel,
    _texts_partition,
    _texts_planner,
    _texts_planner_predictions,
    _texts_run,
    _texts_slurm,
    _texts_spec,
    _texts_tasks,
    _texts_verify,
)
from partool.diagnostics.record import Rule

_TABLES = (
    _texts_files, _texts_spec, _texts_planner, _texts_parallel, _texts_launch, _texts_machines, _texts_slurm,
    _texts_k8s, _texts_run, _texts_hf, _texts_partition,
    _texts_kernels, _texts_offload, _texts_verify, _texts_engines, _texts_chat, _texts_keeping, _texts_tasks,
    _texts_planner_predictions,
)  # fmt: skip
RULES: dict[str, Rule] = {
    rule.code: rule for rule in sorted((rule for table in _TABLES for rule in table.RULES), key=lambda rule: rule.code)
}
"""Every rule by its code, in the order of the codes."""


def nearest(code: str) -> list[str]:
    """Return existing rule codes for which ``code`` may be a typing mistake."""
    wanted = code.strip().upper()
    wanted = wanted if wanted.startswith("PT") else f"PT{wanted}"
    return difflib.get_close_matches(wanted, RULES, n=3, cutoff=0.7)


__all__ = ["RULES", "Rule", "nearest"]
