"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep plans independent of a machine calibration that happens to be in the working folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTOOL_HOME", str(tmp_path_factory.mktemp("home")))
        yield
