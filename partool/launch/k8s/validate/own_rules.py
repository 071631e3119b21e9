"""partool's rules for manifests; these rules are always checked and need no further packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from partool.diagnostics.record import Diagnostic
from partool.launch.k8s.validate import (
    agent_rules,
    field_rules,
    job_rules,
    kind_rules,
    pod_rules,
    reference_rules,
)
from partool.launch.k8s.validate.findings import FieldFault
from partool.launch.k8s.validate.manifest import Manifest

Rule = Callable[[Manifest], Iterator[FieldFault]]

RULES: tuple[tuple[str, Rule], ...] = (
    ("PT568", reference_rules.identities),
    ("PT568", field_rules.forms_of_fields),
    ("PT568", job_rules.pod_names),
    ("PT568", pod_rules.missing_parts),
    ("PT568", pod_rules.annotation_sizes),
    ("PT568", reference_rules.config_map_sizes),
    ("PT569", reference_rules.duplicates),
    ("PT569", reference_rules.objects_once),
    ("PT569", reference_rules.mounts),
    ("PT569", reference_rules.variable_sources),
    ("PT569", reference_rules.config_maps),
    ("PT569", reference_rules.services),
    ("PT570", job_rules.restart_policies),
    ("PT570", job_rules.per_index),
    ("PT570", job_rules.gangs),
    ("PT570", job_rules.selectors),
    ("PT570", job_rules.failure_policies),
    ("PT570", kind_rules.jobset_order),
    ("PT570", kind_rules.jobset_failures),
    ("PT570", kind_rules.pytorchjobs),
    ("PT570", kind_rules.trainjobs),
    ("PT570", kind_rules.volcano_jobs),
    ("PT570", kind_rules.kueue),
    ("PT571", pod_rules.requests_and_limits),
    ("PT571", pod_rules.shared_memory),
    ("PT571", pod_rules.exec_form),
    ("PT571", pod_rules.literal_secrets),
    ("PT571", pod_rules.security),
    ("PT571", pod_rules.token),
    ("PT571", pod_rules.tolerations),
    ("PT571", pod_rules.host_network),
    ("PT571", agent_rules.grace),
    ("PT571", agent_rules.nodes),
    ("PT571", agent_rules.devices),
    ("PT571", agent_rules.hashes),
    ("PT571", agent_rules.meeting_place),
    ("PT571", agent_rules.variables),
    ("PT571", agent_rules.plans),
)
"""Pairs of a diagnostic code and a rule; each rule is a pure function of the manifest."""


def check(manifest: Manifest, rules: Iterable[tuple[str, Rule]] = RULES) -> list[Diagnostic]:
    """Return the findings of partool's rules in a manifest."""
    return [fault.diagnostic(code) for code, rule in rules for fault in rule(manifest)]
