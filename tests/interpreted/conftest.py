"""Triton kernels in its interpreter on CPU tensors; it is chosen as Triton is imported, hence a run of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all where the interpreter was not asked for."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if item.path.parent.name == "interpreted":
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
