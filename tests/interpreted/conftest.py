"""Triton kernels in its interpreter on CPU tensors; importing Triton selects it, so these tests run by themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests where the interpreter is not selected."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if item.path.parent.name == "interpreted":
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
