"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep plans apart from a calibration of the machine that happens to lie in the folder the tests start from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTOOL_HOME", str(tmp_path_factory.mktemp("home")))
        yield
