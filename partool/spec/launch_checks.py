"""Rules that a ``launch`` section can break by itself.

Those that need the machines are in :mod:`partool.planner.checks.launching`, which runs these again: a plan may be sent
to another target than the one it was made for.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec import _launch_env
from partool.spec.launch import LABEL_DOMAIN, K8sSpec, LaunchSpec
from partool.spec.launch_units import quantity
from partool.spec.targets.slurm import rules as _launch_slurm

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


__all__ = [
    "ERRORS",
    "POD_SCRATCH",
    "POD_STORAGE",
    "WARNINGS",
    "LaunchRule",
    "check_errors",
    "check_warnings",
    "contained",
    "is_image_file",
    "mounted",
    "within",
]

LaunchRule = Callable[[LaunchSpec], Iterator[Diagnostic]]

_IMAGE_FILES = (".sif", ".img", ".sqsh")
POD_STORAGE = "/partool"
"""Where runs are kept in a pod: ``launch.k8s.storage``, or a folder that goes with the pod."""
POD_SCRATCH = "/tmp"
"""Where ranks can write in any pod; what is there goes with it."""
_POD_FOLDERS = (POD_STORAGE, "/etc/partool", "/dev/shm", "/dev/termination-log")
"""Mounted by partool, or written by the agent for Kubernetes."""


def contained(launch: LaunchSpec) -> bool:
    """Return True if the ranks run in a container."""
    return launch.target == "k8s" or (launch.target == "slurm" and launch.slurm.container != "none")


def within(path: str, folder: str) -> bool:
    """Return True for a path that is the folder or lies below it."""
    return f"{posixpath.normpath(path)}/".startswith(f"{posixpath.normpath(folder).rstrip('/')}/")


def mounted(launch: LaunchSpec, path: str) -> str | None:
    """Return what is mounted into the ranks' container where a path lies; None where nothing is."""
    if not contained(launch):
        return None
    sources = {mount.target: mount.source for mount in launch.mounts}
    if launch.target == "k8s" and launch.k8s.storage is not None:
        sources[POD_STORAGE] = launch.k8s.storage
    return next((source for target, source in sources.items() if within(path, target)), None)


def is_image_file(image: str) -> bool:
    """Return True for an image that is a file on the nodes, not a name in a registry."""
    return image.startswith("/") or image.endswith(_IMAGE_FILES)


def _image(launch: LaunchSpec) -> Iterator[Diagnostic]:
    path = ("launch", "image")
    if launch.target == "k8s" and launch.image is None:
        help = "build one from a Dockerfile in deploy/, push it, and write launch: {image: REGISTRY/NAME:TAG}"
        yield Diagnostic("PT523", "pods need an image with partool in it, and none is named", path=path, help=help)
    elif launch.target == "k8s" and is_image_file(launch.image or ""):
        message = f"{launch.image} is a file, and Kubernetes takes images from a registry"
        yield Diagnostic("PT523", message, path=path, help="write launch: {image: REGISTRY/NAME:TAG}")
    elif launch.target == "slurm" and launch.slurm.container != "none" and launch.image is None:
        message = f"container: {launch.slurm.container} has no image to start"
        help = "add launch: {image: REGISTRY/NAME:TAG}, or an absolute path of an image file"
        yield Diagnostic("PT523", message, path=("launch", "slurm", "container"), help=help)
    elif launch.target == "slurm" and launch.slurm.container == "none" and launch.image is not None:
        message = "an image is named, and nothing starts it: container is none"
        help = "set launch.slurm.container to pyxis or apptainer, or drop the image"
        yield Diagnostic("PT523", message, path=path, help=help)
    elif launch.target in ("local", "torchrun") and launch.image is not None:
        message = f"the target {launch.target} starts no containers, and an image is named"
        help = "drop it (--set launch.image=), or use the target slurm or k8s"
        yield Diagnostic("PT523", message, path=path, help=help)


def _mounts(launch: LaunchSpec) -> Iterator[Diagnostic]:
    seen: dict[str, int] = {}
    for index, mount in enumerate(launch.mounts):
        path = ("launch", "mounts", index)
        target = posixpath.normpath(mount.target)
        if not contained(launch):
            help = "drop the mounts, or start a container: launch.slurm.container, or the target k8s"
            message = f"the ranks run in no container, so nothing can be mounted at {mount.target}"
            yield Diagnostic("PT526", message, path=path, help=help)
        elif mount.source.startswith("pvc:") and launch.target != "k8s":
            message = f"{mount.source} is a Kubernetes volume claim, and the target is {launch.target}"
            yield Diagnostic("PT526", message, path=(*path, "source"), help="name a folder of the nodes")
        elif target in seen:
            message = f"two mounts are at {target}"
            help = "give each a folder of its own"
            yield Diagnostic("PT526", message, path=(*path, "target"), help=help)
        elif target == "/" or (launch.target == "k8s" and _hides(target)):
            message = f"a mount at {target} would hide what partool or the image needs there"
            help = "use another folder" + (", or launch.k8s.storage, launch.k8s.shared_memory" if target != "/" else "")
            yield Diagnostic("PT526", message, path=(*path, "target"), help=help)
        seen.setdefault(target, index)


def _hides(target: str) -> bool:
    return any(f"{own}/".startswith(f"{target}/") or target.startswith(f"{own}/") for own in _POD_FOLDERS)


def _few_nodes(launch: LaunchSpec) -> Iterator[Diagnostic]:
    if launch.min_nodes is None or launch.target == "slurm":
        return
    why = {
        "k8s": "a JobSet of changing size is behind an alpha gate that is off by default (JobSet 0.12)",
        "torchrun": "whoever starts the nodes decides how many there are",
        "local": "one machine has one node",
    }[launch.target]
    help = "drop it, or use the target slurm"
    message = f"min_nodes is for Slurm: {why}"
    yield Diagnostic("PT524", message, path=("launch", "min_nodes"), help=help)


def _paths(launch: LaunchSpec) -> Iterator[Diagnostic]:
    python, inside = launch.python, contained(launch)
    if python is not None and "/" in python and not python.startswith("/") and (inside or not python.startswith("~")):
        message = f"python: {python} is relative, and the ranks start in another folder"
        help = "write an absolute path, or a bare name such as python3"
        yield Diagnostic("PT529", message, path=("launch", "python"), help=help)
    for path, file in _files(launch):
        if path[1] == "secrets" and inside and not file.startswith("/"):
            message = f"{file} is relative, and is read inside the container"
            help = "write an absolute path, and mount its folder (launch.mounts)"
            yield Diagnostic("PT529", message, path=path, help=help)
        elif file.startswith("~") and not file.startswith("~/"):
            message = f"{file} begins with the home of another user"
            yield Diagnostic("PT529", message, path=path, help="write the absolute path")


def _files(launch: LaunchSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every path that the section gives, with its place."""
    for name, secret in launch.secrets.items():
        if secret.file is not None:
            yield ("launch", "secrets", name, "file"), secret.file
    slurm = launch.slurm
    for path, file in (
        (("python",), launch.python),
        (("slurm", "setup"), slurm.setup),
        (("slurm", "profile"), slurm.profile),
    ):
        if file is not None:
            yield ("launch", *path), file


ERRORS: tuple[LaunchRule, ...] = (
    _launch_env.owned,
    _launch_env.secret_values,
    _launch_env.secret_references,
    _launch_env.contradictions,
    _image,
    _mounts,
    _few_nodes,
    _paths,
    _launch_slurm.options,
    _launch_slurm.times,
    pods,
)
"""Rules that refuse; they run as a spec is read."""
WARNINGS: tuple[LaunchRule, ...] = (_launch_env.doubtful, risks)
"""Rules that warn; their findings travel with the plan."""


def check_errors(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield the findings of all rules that refuse."""
    for rule in ERRORS:
        yield from rule(launch)


def check_warnings(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield the findings of all rules that warn."""
    for rule in WARNINGS:
        yield from rule(launch)
