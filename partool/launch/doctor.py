"""Checks whether this machine can run a plan."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from partool.catalog.machine import available_cores, this_machine
from partool.launch.store import RunStore
from partool.launch.target import Check
from partool.plan.types import Plan
from partool.process import python_command
from partool.strategies.targets import HERE, SCHEDULERS
from partool.strategies.trackers import TRACKERS
from partool.version import __version__

_LEAST_TORCH = (2, 11)
_LEAST_FREE_BYTES = 1 << 30


def checks(plan: Plan | None) -> Iterator[Check]:
    """Yield checks of this machine and, if ``plan`` is given, checks whether it can run the plan. Imports no torch."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("partool", "ok", f"{__version__} on Python {version}")
    yield _torch()
    yield from _packages(plan)
    yield _kernels()
    yield _compiler()
    yield from _devices(plan)
    yield _run_folder()
    yield _shared_memory()


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        text = "not installed; plans can be made, nothing can be trained here"
        return Check("torch", "failed", text, "pip install 'partool[train]'")
    version = importlib.metadata.version("torch")
    number = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    if number < _LEAST_TORCH:
        wanted = ".".join(map(str, _LEAST_TORCH))
        return Check("torch", "failed", f"{version} is older than {wanted}", f"pip install 'torch>={wanted}'")
    return Check("torch", "ok", version)


def _packages(plan: Plan | None) -> Iterator[Check]:
    needed = {
        "transformers": plan is not None and (plan.weights.source == "hf" or plan.data.tokenizer != "bytes"),
        "lm_eval": plan is not None and bool(plan.evaluation.tasks),
        **{TRACKERS[each.name].package: True for each in (plan.telemetry.trackers if plan is not None else ())},
    }
    trackers = [(record.package, name) for name, record in TRACKERS.items()]
    for package, extra in (("transformers", "hf"), ("lm_eval", "eval"), *trackers, ("kubernetes", "k8s")):
        if importlib.util.find_spec(package) is not None:
            yield Check(package, "ok", _version(package))
        elif needed.get(package):
            yield Check(package, "failed", "not installed, and the plan needs it", f"pip install 'partool[{extra}]'")
        else:
            yield Check(package, "skipped", f"not installed (extra {extra})")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # mlflow-skinny brings the package mlflow
        return "installed"


def _kernels() -> Check:
    # Run in another process, so that this process does not load the extension.
    command = python_command("partool_kernels._native")
    asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    if asked.returncode != 0:
        said = asked.stderr.strip().rpartition("\n")[2]
        return Check("kernels", "failed", said, "unset PARTOOL_ISA, or name one that is here")
    used, *have = asked.stdout.split()
    if have:
        others = ", ".join(name for name in have if name != used)
        return Check(
            "kernels", "ok", f"compiled, for {used}" + (f" (PARTOOL_ISA could say {others})" if others else "")
        )
    text = "not compiled: optimizers in host memory step by torch's fused AdamW, with more passes over memory"
    return Check("kernels", "warning", text, "reinstall with a C++ compiler")


def _compiler() -> Check:
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return Check("compiler", "ok", path)
    help = "install g++; torch.compile on a CPU and partool's kernels use it"
    return Check("compiler", "warning", "there is no C++ compiler", help)


def _devices(plan: Plan | None) -> Iterator[Check]:
    machine = this_machine()
    have = f"{machine.devices} x {machine.accelerator}" if machine.accelerator != "cpu" else "no accelerator"
    yield Check("devices", "ok", f"{have}, {available_cores()} cores")
    if plan is None or plan.launch.target != HERE:
        return
    wanted = plan.devices
    if wanted.backend == "cpu":
        if wanted.per_node > available_cores():
            text = f"{wanted.per_node} ranks share {available_cores()} cores"
            yield Check("plan", "warning", text, "write a smaller hardware.per_node")
    elif wanted.accelerator != machine.accelerator or wanted.per_node > machine.devices:
        text = f"the plan wants {wanted.per_node} x {wanted.accelerator}; here is {have}"
        yield Check("plan", "failed", text, f"launch where these devices are: --target {' or '.join(SCHEDULERS)}")


def _run_folder() -> Check:
    root = RunStore().root
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        return Check("runs", "failed", f"{place} cannot be written", "set PARTOOL_HOME to a folder that can")
    free = shutil.disk_usage(place).free
    text = f"{root}, {free / 2**30:.0f} GiB free"
    if free < _LEAST_FREE_BYTES:
        return Check("runs", "warning", text, "checkpoints need room: set PARTOOL_HOME or checkpoint.dir")
    return Check("runs", "ok", text)


def _shared_memory() -> Check:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Check("shared memory", "skipped", "there is no /dev/shm")
    text = f"/dev/shm holds {size / 2**30:.1f} GiB"
    if size < _LEAST_FREE_BYTES:
        help = "NCCL wants more: --shm-size=8g for docker; launch.k8s.shared_memory on Kubernetes"
        return Check("shared memory", "warning", text, help)
    return Check("shared memory", "ok", text)
