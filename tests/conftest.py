"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

LONGEST = (
    "test_slurm_cluster.py", "test_kill_resume.py", "test_sequence_trainer.py", "test_offload.py", "test_zero.py",
    "test_experts.py", "test_sequence_hf.py", "test_pipeline_trainer.py", "test_tensor.py", "test_agent_trainer.py",
    "test_dry_repeat.py", "test_several_nodes.py", "test_install.py",
)  # fmt: skip
"""Files that take longest: where several processes test, one that began last would leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep plans independent of a machine calibration that happens to be in the working folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTOOL_HOME", str(tmp_path_factory.mktemp("home")))
        yield
