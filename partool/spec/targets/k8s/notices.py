"""Labels by which clouds mark machines that they take back, and the time that pods get before that."""

from __future__ import annotations

from typing import NamedTuple

from partool.spec.targets.k8s.section import K8sSpec


class _Cloud(NamedTuple):
    value: str
    """Value of the label on such machines."""
    seconds: int
    where: str


class SpotNotice(NamedTuple):
    """Machines that the pods may run on and that a cloud takes back at short notice."""

    path: tuple[str | int, ...]
    """Keys below ``launch.k8s`` that select or tolerate these machines."""
    label: str
    seconds: int
    """Shortest time between the notice and the pods' end."""
    where: str
    """The cloud, and how the time can differ."""


_GOOGLE = "Google's default; a node pool can allow up to 120 s"
_LABELS = {
    "cloud.google.com/gke-spot": _Cloud("true", 15, _GOOGLE),
    "cloud.google.com/gke-preemptible": _Cloud("true", 15, _GOOGLE),
    "eks.amazonaws.com/capacityType": _Cloud("SPOT", 120, "AWS"),
    "karpenter.sh/capacity-type": _Cloud("spot", 30, "Azure; 120 s on AWS"),
    "kubernetes.azure.com/scalesetpriority": _Cloud("spot", 30, "Azure"),
}
"""Sources: https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms (30 s, of which pods that are not
critical get the first 15); https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html;
https://learn.microsoft.com/en-us/azure/aks/spot-node-pool; https://karpenter.sh/docs/concepts/scheduling."""


def notice(k8s: K8sSpec) -> SpotNotice | None:
    """Return the shortest notice of machines that ``node_selector`` or ``tolerations`` name; None without any."""
    named: list[tuple[tuple[str | int, ...], str, str | None]] = [
        (("node_selector", label), label, value) for label, value in k8s.node_selector.items()
    ]
    named += [(("tolerations", index), each.key, each.value) for index, each in enumerate(k8s.tolerations)]
    notices = [
        SpotNotice(path, label, _LABELS[label].seconds, _LABELS[label].where)
        for path, label, value in named
        if label in _LABELS and value in (None, _LABELS[label].value)
    ]
    return min(notices, key=lambda each: each.seconds, default=None)
