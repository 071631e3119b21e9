"""The agent's exit codes in the words of a Job's pod failure policy.

A pod that is evicted, preempted or drained has the condition DisruptionTarget
(https://kubernetes.io/docs/tasks/job/pod-failure-policy/).
"""

from __future__ import annotations

from typing import Any

from partool.render.k8s.objects import NODE

EXIT_PREEMPTED = 75
EXIT_CONFIGURATION = 78
"""As in :mod:`partool_runtime.errors`, which this package does not import."""


def exit_code_rule(action: str, code: int) -> dict[str, Any]:
    """Return a rule for a pod whose agent ended with a code."""
    return {"action": action, "onExitCodes": {"containerName": NODE, "operator": "In", "values": [code]}}


def disruption_rule(action: str) -> dict[str, Any]:
    """Return a rule for a pod that the cluster has taken away."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
