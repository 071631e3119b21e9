"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SHIMS = Path(__file__).parents[1] / "build" / "dry"
"""Where libraries that stand in for CUDA are kept: by their source and torch's version, as compiling takes seconds."""


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep plans independent of a machine calibration that happens to be in the working folder of the tests."""
    home = tmp_path_factory.mktemp("home")
    SHIMS.mkdir(parents=True, exist_ok=True)
    (home / "dry").symlink_to(SHIMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTOOL_HOME", str(home))
        yield
