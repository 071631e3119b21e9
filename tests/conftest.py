"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE
from sharing import begin
from thinned import thin

pytest_plugins = ["processes"]
LONGEST = (
    "test_slurm_cluster.py", "test_adapters.py", "test_sequence_compiled.py", "test_sequence_trainer.py",
    "test_experts.py", "test_agent_signals.py", "test_offload.py", "test_preferences.py", "test_pipeline_trainer.py",
    "test_tensor_trainer.py",
    "test_agent_exit.py", "test_agent_nodes.py", "test_evaluation.py", "test_one_bit_trainer.py", "test_trainer.py",
    "test_sequence_hf.py", "test_dry_collectives.py", "test_model_code.py", "test_tensor_hf.py",
    "test_zero_controls_ranks.py", "test_zero.py", "test_fused_parts.py", "test_pipeline_engine.py",
    "test_kill_resume.py", "test_sequence_dsp.py", "test_fp8.py", "test_lamb_trainer.py", "test_muon_trainer.py",
    "test_sequence_layers.py", "test_tiles.py", "test_agent_stops.py", "test_agent_hangs.py", "test_numa.py",
    "test_tensor_state.py", "test_agent_trainer.py", "test_several_nodes.py", "test_install.py", "test_dry_repeat.py",
    "test_verify_matching.py", "test_verify_plan.py", "test_dry_terms.py", "test_dry.py", "test_planner_score.py",
    "test_host_kernels_builds.py", "test_graph_windows.py",
)  # fmt: skip
"""Files that take longest: where several processes test, one that began last would leave the others idle."""
SHIMS = Path(__file__).parents[1] / "build" / "dry"
"""Where libraries that stand in for CUDA are kept: by their source and torch's version, as compiling takes seconds."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not run each time, begin with the longest files, and let tests that share cores take longer.

    Marks are set before pytest selects by them.
    """
    thin(items, config.args)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        own = item.get_closest_marker("timeout")
        seconds = float(own.args[0] if own is not None else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to note what a test shares with others, before fixtures are made for it."""
    begin(item)


def pytest_configure() -> None:
    """Collect garbage rarely: with all modules of the tests in memory it took a twelfth of their time."""
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    """Leave out of collections what lives until the end: modules and tests."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the process end as usual; libraries count what it leaves."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep plans independent of a machine calibration that happens to be in the working folder of the tests."""
    home = tmp_path_factory.mktemp("home")
    libraries = home / "dry"
    libraries.mkdir(mode=0o700)  # a link is refused
    SHIMS.mkdir(parents=True, exist_ok=True)
    _copy(SHIMS, libraries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTOOL_HOME", str(home))
        yield
    _copy(libraries, SHIMS)


def _copy(source: Path, target: Path) -> None:
    """Copy the libraries that are missing; other processes may do the same at the same time."""
    for file in source.glob("*.so"):
        if not (target / file.name).exists():
            partial = target / f"{file.name}.{os.getpid()}"
            shutil.copy2(file, partial)
            partial.replace(target / file.name)
