"""Check that a launch section's container images match the processor and the device vendor of the machines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from partool.catalog.lookup import table
from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import Devices
from partool.spec.launch import LaunchSpec
from partool.spec.launch_checks import contained
from partool.spec.targets.rules import rules_of

_ARM = re.compile(r"(?<![a-z0-9])(arm64|aarch64|arm64v8|sbsa|linuxarm64)(?![a-z0-9])")
_X86 = re.compile(r"(?<![a-z0-9])(x86[-_]64|x86|x64|amd64|linuxamd64)(?![a-z0-9])")
_CUDA = re.compile(r"(?<![a-z0-9])(nvcr\.io|nvidia|cuda|cudnn[0-9]*|cuda[0-9.]+|cu1[0-9]{2})(?![a-z0-9])")
_ROCM = re.compile(r"(?<![a-z0-9])(rocm|rocm[0-9.]+|rccl|migraphx)(?![a-z0-9])")
_VENDORS = {"CUDA": _CUDA, "ROCm": _ROCM}
_FOR_CUDA = ("CUDA", "ROCm", "nvidia/cuda")
_GENERAL = "a Dockerfile for these machines is in deploy/"


def check_hardware(launch: LaunchSpec, devices: Devices) -> list[Diagnostic]:
    """Return errors if a container image cannot run on these machines."""
    return [*_architecture(launch, devices), *_vendor(launch, devices)]


def is_superchip(accelerator: str) -> bool:
    """Return True if the accelerator shares a package with an arm64 processor (GH200, GB200, GB300)."""
    entry = table("accelerators").get(accelerator)
    return entry is not None and table("hosts")[entry["host"]]["architecture"] == "arm64"


def _architecture(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    if devices.accelerator not in table("accelerators"):
        return  # a CPU, or a device that only the spec describes, may belong to either architecture
    arm = is_superchip(devices.accelerator)
    have, other, pattern = ("arm64", "x86-64", _X86) if arm else ("x86-64", "arm64", _ARM)
    where = f"nodes with {devices.accelerator} are {have}"
    image, asked = launch.image, rules_of(launch.target).architecture(launch)
    if contained(launch) and image is not None and pattern.search(image.lower()):
        message = f"{image} is an image for {other}, and {where}: it would end with 'exec format error'"
        help = f"name an image that has a build for linux/{_docker_name(have)}; {_GENERAL}"
        yield Diagnostic("PT533", message, path=("launch", "image"), help=help)
    if asked is not None and asked[1] != _docker_name(have):
        path, named = asked
        message = f"{path[-1]}: {named} asks for nodes of that kind, and {where}"
        yield Diagnostic("PT533", message, path=path, help=f"drop it, or write {_docker_name(have)}")


def _docker_name(architecture: str) -> str:
    return {"x86-64": "amd64"}.get(architecture, architecture)


def _vendor(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    if launch.image is None or devices.backend == "cpu" or not contained(launch):
        return
    needed, other, example = ("ROCm", "CUDA", "rocm/pytorch") if devices.backend == "rocm" else _FOR_CUDA
    image = launch.image.lower()
    if _VENDORS[other].search(image) and not _VENDORS[needed].search(image):
        message = f"{launch.image} is an image for {other}, and {devices.accelerator} needs {needed}"
        help = f"build on one for {needed}, such as {example}; {_GENERAL}"
        yield Diagnostic("PT534", message, path=("launch", "image"), help=help)
