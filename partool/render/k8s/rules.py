"""What only shows as a job is written for Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partool.diagnostics.record import Diagnostic
from partool.render.job import Job

Rule = Callable[[Job], Iterator[Diagnostic]]

_MOST_PLAN_BYTES = 900_000
"""An object of Kubernetes has room for 1 MiB, metadata included (etcd's default limit is 1.5 MiB)."""


def findings(job: Job) -> list[Diagnostic]:
    """Return what stands in the way of a job, or is otherwise than its spec may seem to say."""
    return [finding for rule in _RULES for finding in rule(job)]


def _size(job: Job) -> Iterator[Diagnostic]:
    size = len(job.plan.to_json())
    if size > _MOST_PLAN_BYTES:
        message = f"the plan has {size:,} bytes; a ConfigMap takes {_MOST_PLAN_BYTES:,}"
        help = "most of it is alternatives and the model's layers: fix more of parallel:, or use the target slurm"
        yield Diagnostic("PT561", message, help=help)


_RULES: tuple[Rule, ...] = (_size,)
