"""Options, image names and mounts with which pyxis and apptainer start a container under Slurm."""

from __future__ import annotations

import posixpath
import re

from partool.plan.types import Plan
from partool.render.job import Job
from partool.render.shell import UnsafeValueError
from partool.spec.launch import Mount
from partool.spec.patterns import within

_GLOB = re.compile(r"[*?\[]")
_DEVICES = {"cuda": ["--nv"], "rocm": ["--rocm"], "cpu": []}
"""Options that let the container see the node's devices and driver."""


def mounts(job: Job) -> list[Mount]:
    """Return the user's mounts, then the paths that the run needs, mounted at the same path as on the node.

    A path that a mount of the user already provides is left out.
    """
    mounts = list(job.plan.launch.mounts)
    writable = [str(job.run_dir), *(path for plan in _plans(job) for path in writable_folders(plan))]
    readable = [path for plan in _plans(job) for path in _read_paths(plan)]
    for paths, read_only in ((writable, False), (readable, True)):
        for path in dict.fromkeys(paths):
            if not any(within(path, mount.target) for mount in mounts):
                mounts.append(_same_path(path, read_only))
    return mounts


def writable_folders(plan: Plan) -> list[str]:
    """Return the folders that a run writes to in addition to the run's folder."""
    return [path for path in (plan.checkpoint.dir, plan.data.cache) if path is not None]


def pyxis(job: Job) -> list[str]:
    """Return the options of srun that start the image; the user's home is not mounted.

    In the batch script's header, these options would move the script itself into the container (pyxis issue 107).
    """
    shown = ",".join(_bind(mount) for mount in mounts(job))
    return [
        f"--container-image={_enroot_name(_image(job))}",
        f"--container-mounts={shown}",
        "--no-container-mount-home",
    ]


def apptainer(job: Job) -> list[str]:
    """Return the shell words that start apptainer; the home is mounted, but its Python packages are not used."""
    image = _image(job)
    source = image if _is_file(image) else "docker://" + image.replace("#", "/", 1)
    binds = [word for mount in mounts(job) for word in ("-B", _bind(mount))]
    devices = _DEVICES[job.plan.devices.backend]
    return ["apptainer", "exec", *devices, "--env", "PYTHONNOUSERSITE=1", *binds, source]


def _plans(job: Job) -> list[Plan]:
    return [job.plan, *job.tasks, *job.sizes.values()]


def _read_paths(plan: Plan) -> list[str]:
    folders = [_folder(source) for source in plan.data.every_source]
    weights = (plan.weights, *(() if plan.teacher is None else (plan.teacher.weights,)))
    folders += [path for path in (plan.data.tokenizer, *(each.path for each in weights)) if path is not None]
    files = [secret.file for secret in plan.launch.secrets.values() if secret.file is not None]
    if plan.launch.slurm.container == "pyxis" and plan.launch.slurm.setup:
        files.append(plan.launch.slurm.setup)  # pyxis starts the task inside the container
    return [path for path in [*folders, *files] if path.startswith("/")]


def _folder(source: str) -> str:
    """Return ``source`` if it is a folder; for a file or a glob pattern, the folder that holds the file or the files.

    The whole folder is mounted, because it also holds each file's index or sidecar.
    """
    match = _GLOB.search(source)
    if match:
        return posixpath.dirname(source[: match.start()])
    return posixpath.dirname(source) if posixpath.splitext(source)[1] else source


def _same_path(path: str, read_only: bool) -> Mount:
    if re.search(r"[\x00-\x1f\x7f:,]", path):
        raise UnsafeValueError(f"{path!r} cannot be mounted: a colon, a comma or a control character is in its name")
    return Mount(source=path, target=path, read_only=read_only)


def _bind(mount: Mount) -> str:
    return f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")


def _image(job: Job) -> str:
    if job.plan.launch.image is None:
        raise UnsafeValueError("a container is to be started, and launch.image names none")
    return job.plan.launch.image


def _is_file(image: str) -> bool:
    return image.startswith("/") or image.endswith((".sif", ".img", ".sqsh"))


def _enroot_name(image: str) -> str:
    """Return an image's name with ``#`` after the registry, as enroot expects; the default registry is Docker Hub."""
    registry, slash, rest = image.partition("/")
    if _is_file(image) or "#" in image or not slash:
        return image
    is_host = "." in registry or ":" in registry or registry == "localhost"
    return f"{registry}#{rest}" if is_host else image
