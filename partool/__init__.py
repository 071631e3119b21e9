"""partool: plan, launch and run distributed training from one YAML file.

The names below are the Python face (docs/guide/python.md). Importing it is cheap and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Two functions have the names of packages. Python binds a package's name as it imports it, so the packages come first.
import partool.plan
import partool.render  # noqa: F401
from partool.api import SpecError, check, load, plan, render
from partool.version import __version__

if TYPE_CHECKING:
    from partool.diagnostics.record import Diagnostic
    from partool.plan.types import Plan
    from partool.render.job import Rendered
    from partool.spec.loader import Loaded

__all__ = [
    "Diagnostic", "Loaded", "Plan", "Rendered", "SpecError", "__version__", "check", "load", "plan", "render"
]  # fmt: skip
_TYPES = {
    "Diagnostic": "partool.diagnostics.record",
    "Loaded": "partool.spec.loader",
    "Plan": "partool.plan.types",
    "Rendered": "partool.render.job",
}
"""Types whose modules take long to import, and the modules."""


def __getattr__(name: str) -> Any:
    if name not in _TYPES:
        raise AttributeError(f"module 'partool' has no attribute {name!r}")
    return getattr(importlib.import_module(_TYPES[name]), name)
