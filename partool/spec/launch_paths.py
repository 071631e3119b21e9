"""Folders and images that a ``launch`` section names."""

from __future__ import annotations

import posixpath

_IMAGE_FILES = (".sif", ".img", ".sqsh")


def within(path: str, folder: str) -> bool:
    """Return True for a path that is the folder or lies below it."""
    return f"{posixpath.normpath(path)}/".startswith(f"{posixpath.normpath(folder).rstrip('/')}/")


def is_image_file(image: str) -> bool:
    """Return True for an image that is a file on the nodes, not a name in a registry."""
    return image.startswith("/") or image.endswith(_IMAGE_FILES)
