"""Renders Dockerfiles of images that plans run in: each adds partool to a vendor's torch image."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from partool.render.shell import UnsafeValueError, template

Architecture = Literal["amd64", "arm64"]

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]*")
_FOLDER_OR_WHEEL = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_./+-]*")
_RELEASE = re.compile(r"partool(==[0-9][A-Za-z0-9.!+]*)?")


@dataclass(frozen=True, slots=True)
class BaseImage:
    """An image that contains torch."""

    name: str
    source: str
    """URL of the list of the image's tags."""
    as_of: str
    """Month in which this tag of the image was in use."""


BASE_IMAGES: dict[tuple[str, str], BaseImage] = {
    ("cuda", "amd64"): BaseImage(
        "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime", "https://hub.docker.com/r/pytorch/pytorch/tags", "2026-11"
    ),
    ("cuda", "arm64"): BaseImage(
        "nvcr.io/nvidia/pytorch:26.08-py3", "https://catalog.ngc.nvidia.com/orgs/nvidia/containers/pytorch", "2026-11"
    ),
    ("rocm", "amd64"): BaseImage(
        "rocm/pytorch:rocm7.14_ubuntu24.04_py3.12_pytorch_release_2.12.0",
        "https://hub.docker.com/r/rocm/pytorch/tags",
        "2026-11",
    ),
}
"""(Backend, architecture) → image that its vendor publishes. CUDA on arm64 serves GH200 and GB200."""


def dockerfile(
    backend: str, architecture: Architecture, base_image: str | None = None, partool_source: str = "."
) -> str:
    """Return a Dockerfile for a backend (``cuda``, ``rocm``) and an architecture.

    ``partool_source`` is a folder or a wheel of the build context, or ``partool`` or ``partool==VERSION`` from the
    package index. There is no ENTRYPOINT: manifests name the command. Raises UnsafeValueError for a value that could be
    read as several words, and ValueError if ``base_image`` is None and no base image is known.
    """
    base = BASE_IMAGES.get((backend, architecture))
    if base_image is None:
        if base is None:
            raise ValueError(f"no known base image for {backend} on {architecture}: name one")
        base_image = base.name
    release = _RELEASE.fullmatch(partool_source) is not None
    _check(_IMAGE, base_image, "base image")
    if not release:
        _check(_FOLDER_OR_WHEEL, partool_source, "source of partool")
        if ".." in partool_source.split("/"):
            raise UnsafeValueError(f"source of partool: {partool_source!r} lies outside of the build context")
    return template("Dockerfile.jinja").render(
        backend={"cuda": "CUDA", "rocm": "ROCm"}[backend],
        architecture=architecture,
        image=base_image,
        origin=f"{base.source} ({base.as_of})" if base and base_image == base.name else "",
        source=partool_source,
        release=release,
        wheel=partool_source.endswith(".whl"),
    )


def _check(pattern: re.Pattern[str], value: str, what: str) -> None:
    if len(value) > 1024 or not pattern.fullmatch(value):
        raise UnsafeValueError(f"{what}: {value!r} cannot be written into a Dockerfile")
