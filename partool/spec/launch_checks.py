"""Rules that need only the ``launch`` section and apply to all targets; each target's package has its further rules.

Rules that need the machines are in :mod:`partool.planner.rules.launching`. That module also runs the rules of this
module again, as a plan may be launched on another target than the target it was made for.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec import _launch_env
from partool.spec.launch import LaunchSpec
from partool.spec.patterns import within
from partool.spec.targets.rules import of_all_sections, rules_of
from partool.strategies.targets import CONTAINERS, RESIZABLE, SECTIONS, TARGETS

LaunchRule = Callable[[LaunchSpec], Iterator[Diagnostic]]


def contained(launch: LaunchSpec) -> bool:
    """Return True if the ranks run in a container."""
    return rules_of(launch.target).contained(launch)


def mounted(launch: LaunchSpec, path: str) -> str | None:
    """Return the source of the mount that contains ``path`` in the ranks' container; None if no mount contains it."""
    if not contained(launch):
        return None
    sources = {mount.target: mount.source for mount in launch.mounts} | rules_of(launch.target).own_mounts(launch)
    return next((source for target, source in sources.items() if within(path, target)), None)


def _image(launch: LaunchSpec) -> Iterator[Diagnostic]:
    if launch.image is not None and launch.target not in CONTAINERS:
        message = f"the target {launch.target} starts no containers, but an image is named"
        help = f"drop it (--set launch.image=), or use the target {' or '.join(CONTAINERS)}"
        yield Diagnostic("PT523", message, path=("launch", "image"), help=help)


def _mounts(launch: LaunchSpec) -> Iterator[Diagnostic]:
    rules, seen = rules_of(launch.target), set[str]()
    for index, mount in enumerate(launch.mounts):
        path = ("launch", "mounts", index)
        target = "/" + posixpath.normpath(mount.target).lstrip("/")  # POSIX leaves two slashes at the front as they are
        if not contained(launch):
            help = f"drop the mounts, or start a container, as the target {' or '.join(CONTAINERS)} can"
            message = f"the ranks run in no container, so nothing can be mounted at {mount.target}"
            yield Diagnostic("PT526", message, path=path, help=help)
        elif mount.source.startswith("pvc:") and TARGETS[launch.target].sees_files:
            message = f"{mount.source} is a Kubernetes volume claim, and the target is {launch.target}"
            yield Diagnostic("PT526", message, path=(*path, "source"), help="name a folder of the nodes")
        elif target in seen:
            message = f"two mounts are at {target}"
            help = "give each a folder of its own"
            yield Diagnostic("PT526", message, path=(*path, "target"), help=help)
        elif target == "/" or rules.hides(target):
            message = f"a mount at {target} would hide what partool or the image needs there"
            help = "use another folder" + (", or launch.k8s.storage, launch.k8s.shared_memory" if target != "/" else "")
            yield Diagnostic("PT526", message, path=(*path, "target"), help=help)
        seen.add(target)


def _few_nodes(launch: LaunchSpec) -> Iterator[Diagnostic]:
    if launch.min_nodes is not None and launch.target not in RESIZABLE:
        names = " or ".join(RESIZABLE)
        message = f"min_nodes is for the target {names}: {TARGETS[launch.target].fixed_nodes}"
        help = f"drop it, or use the target {names}"
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
    """Yield (keys of the field below ``launch``, path in this field) for every file path in the section."""
    for name, secret in launch.secrets.items():
        if secret.file is not None:
            yield ("launch", "secrets", name, "file"), secret.file
    if launch.python is not None:
        yield ("launch", "python"), launch.python
    for name in SECTIONS:
        for path, file in rules_of(name).files(launch):
            yield ("launch", *path), file


def _of_target(launch: LaunchSpec) -> Iterator[Diagnostic]:
    yield from rules_of(launch.target).errors(launch)


ERRORS: tuple[LaunchRule, ...] = (
    _launch_env.owned,
    _launch_env.secret_values,
    _launch_env.secret_references,
    _launch_env.contradictions,
    _launch_env.notified,
    _image,
    _mounts,
    _few_nodes,
    _paths,
    of_all_sections,
    _of_target,
)
"""Rules whose findings are errors; they run while a spec is read."""


def check_warnings(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield the findings of all rules that warn; the plan keeps them."""
    yield from _launch_env.doubtful(launch)
    yield from rules_of(launch.target).warnings(launch)
