"""A plain ``pip install .`` into an empty environment, outside the repository, must give a working planner."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from patience import PATIENCE

from partool.plan.types import PLAN_VERSION
from partool.version import __version__

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))[::5]
"""Some of the examples: planning all of them is tested elsewhere."""
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without this environment's Python settings and return its result."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))} | environment
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=150 * PATIENCE
    )


def build_wheel(folder: Path, *settings: str, **environment: str) -> Path:
    """Build the wheel with this environment's build tools, and settings of theirs; return its path."""
    arguments = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    # A separate build folder leaves the checkout and concurrent builds untouched.
    for setting in (f"build-dir={folder / 'build'}", *settings):
        arguments += ["--config-settings", setting]
    done = run(sys.executable, *PIP, *arguments, cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("partool-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of a fresh environment that contains only partool's core."""
    folder = tmp_path_factory.mktemp("install")
    wheel = build_wheel(folder)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    done = run(python, *PIP, "install", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return python.parent


@pytest.mark.timeout(180)
def test_core_install_plans_examples_without_torch(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "partool", "--version", cwd=tmp_path).stdout == f"partool {__version__}\n"
    absent = run(installed / "python", "-c", "import torch", cwd=tmp_path)
    assert "No module named 'torch'" in absent.stderr
    assert SPECS
    for spec in SPECS:
        done = run(installed / "partool", "plan", spec, "--output", "json", cwd=tmp_path)
        assert done.returncode == 0, f"{spec.name}: {done.stderr}"
        assert json.loads(done.stdout)["plan_version"] == PLAN_VERSION
    refused = run(installed / "partool", "launch", ROOT / "specs" / "quickstart.yaml", cwd=tmp_path)
    assert refused.returncode == 3
    assert "partool[train]" in refused.stderr
    data = "import partool.templates, partool.specs, pathlib; print(*pathlib.Path(partool.specs.__path__[0]).iterdir())"
    assert "quickstart.yaml" in run(installed / "python", "-c", data, cwd=tmp_path).stdout
    face = f"from partool import plan, render; print(render(plan({str(ROOT / 'specs/quickstart.yaml')!r})).text)"
    assert "partool_runtime.agent" in run(installed / "python", "-c", face, cwd=tmp_path).stdout


@pytest.mark.timeout(120)
def test_a_wheel_made_without_a_compiler_installs_and_plans(tmp_path: Path) -> None:
    """The environment of the tests lends the dependencies; ``-S`` keeps its editable install of partool out."""
    wheel = build_wheel(tmp_path, CXX="/nonexistent/c++")
    check_files(wheel)
    folder = tmp_path / "installed"
    done = run(sys.executable, *PIP, "install", "--no-deps", "--no-compile", "--target", folder, wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_plans(folder, tmp_path)


def test_a_wheel_of_the_settings_without_a_compiler_plans(tmp_path: Path) -> None:
    """Without the attempt to compile, and without pip's install, which both take long."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    assert settings["overrides"] == [{"if": {"failed": True}, "wheel": {"cmake": False, "platlib": True}}]
    wheel = build_wheel(tmp_path, "wheel.cmake=false", "wheel.platlib=true")
    check_files(wheel)
    folder = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(folder)
    check_plans(folder, tmp_path)


def check_files(wheel: Path) -> None:
    """Check that a wheel without compiled code has all else that belongs to it."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in names if name.endswith(".so") or name.startswith("tests/")]
    assert {f"partool-{__version__}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= names
    assert {f"{package}/py.typed" for package in ("partool", "partool_runtime", "partool_kernels")} <= names


def check_plans(folder: Path, cwd: Path) -> None:
    """Check that partool in a folder plans a spec without torch."""
    code = "import sys, partool; print(partool.__file__, partool.plan(sys.argv[1]).to_json(), 'torch' in sys.modules)"
    paths = os.pathsep.join((str(folder), *site.getsitepackages()))
    done = run(sys.executable, "-S", "-c", code, ROOT / "specs/quickstart.yaml", cwd=cwd, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{folder / 'partool' / '__init__.py'} ")
    assert f'"partool_version": "{__version__}"' in done.stdout
    assert done.stdout.endswith(" False\n")


def test_importing_the_cli_stays_light() -> None:
    done = run(sys.executable, "-X", "importtime", "-c", "import partool, partool.cli.main", cwd=ROOT)
    assert done.returncode == 0
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "partool" in loaded
    assert not loaded & {"torch", "kubernetes", "jinja2", "numpy", "transformers"}
