"""Rules of ``launch.k8s`` that need nothing but the section."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.launch import LABEL_DOMAIN, K8sSpec, LaunchSpec
from partool.spec.launch_units import quantity

_PATH = ("launch", "k8s")
_OWN_KEYS = (
    f"{LABEL_DOMAIN}/",
    "kueue.x-k8s.io/queue-name",
    "kueue.x-k8s.io/priority-class",
    "app.kubernetes.io/managed-by",
)


def pods(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Refuse fields that contradict each other or that the kind of object does not have."""
    if launch.target != "k8s":
        return
    k8s = launch.k8s
    if k8s.memory and k8s.shared_memory and quantity(k8s.shared_memory) >= quantity(k8s.memory):
        message = f"shared_memory: {k8s.shared_memory} counts against memory: {k8s.memory}, and leaves nothing of it"
        help = "raise memory, or drop it: partool then adds the two up"
        yield Diagnostic("PT528", message, path=(*_PATH, "shared_memory"), help=help)
    if k8s.topology and (k8s.queue is None or k8s.kind == "volcano"):
        message = "topology is Kueue's, which places the pods only where queue: names its LocalQueue"
        help = "add queue: NAME" if k8s.kind != "volcano" else "use another kind, or drop topology"
        yield Diagnostic("PT528", message, path=(*_PATH, "topology"), help=help)
    if k8s.kind != "trainjob" and k8s.runtime != K8sSpec().runtime:
        message = f"runtime: {k8s.runtime} belongs to kind: trainjob, not to {k8s.kind}"
        yield Diagnostic("PT528", message, path=(*_PATH, "runtime"), help="set kind: trainjob, or drop it")
    if k8s.network_policy and k8s.host_network:
        message = "network_policy holds for the pods' own network, and host_network: true takes them out of it"
        help = "drop one of the two; the nodes' firewall is what keeps others away there"
        yield Diagnostic("PT528", message, path=(*_PATH, "network_policy"), help=help)
    for section in ("labels", "annotations"):
        for key in getattr(k8s, section):
            if key.startswith(_OWN_KEYS):
                help = "write launch.k8s.queue and launch.k8s.priority" if key.startswith("kueue") else "drop it"
                message = f"{key} is written by partool"
                yield Diagnostic("PT528", message, path=(*_PATH, section, key), help=help)


def risks(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Warn of what clusters refuse, or what costs the run's checkpoints."""
    if launch.target != "k8s":
        return
    if launch.k8s.user == 0:
        message = "user: 0 runs the ranks as root, which clusters with the restricted pod security standard refuse"
        yield Diagnostic("PT528", message, severity="warning", path=(*_PATH, "user"), help="use 1000, say")
    if launch.k8s.storage is None:
        message = "without storage: checkpoints and logs are in the pod, and are gone when it is replaced"
        help = "add launch: {k8s: {storage: 'pvc:CLAIM'}}"
        yield Diagnostic("PT528", message, severity="warning", path=(*_PATH, "storage"), help=help)
