"""What a release needs: one version, a changelog that begins with it, licences of code and data, readable subjects."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from partool.cli.main import run
from partool.version import __version__

ROOT = Path(__file__).parents[3]
LONGEST_SUBJECT = 72


def test_one_version_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.metadata.version("partool") == __version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    sections = re.findall(
        r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M
    )
    assert sections[0][0] == __version__
    assert all(date != "unreleased" for _, date in sections[1:])
    with pytest.raises(SystemExit) as ended:
        run(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"partool {__version__}\n")


def test_the_package_says_its_licence_and_authors() -> None:
    metadata = importlib.metadata.metadata("partool")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert metadata["Author"] == "The partool authors"
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_notice_names_all_data_of_others() -> None:
    notice = (ROOT / "NOTICE").read_text("utf-8")
    made_here = {"README.md", "before-scores", "old-form", "innocent_variables.txt", "quantised"}
    data = [path.name for path in (ROOT / "tests" / "data").iterdir() if path.name not in made_here]
    shipped = [path.name for path in (ROOT / "partool").rglob("*.json") if path.name != "partool.schema.json"]
    assert len(data) > 3
    assert len(shipped) > 6
    assert [name for name in (*data, *shipped) if name not in notice] == []


def too_long(subjects: list[str]) -> list[str]:
    """Return the subjects with more than ``LONGEST_SUBJECT`` characters."""
    return [subject for subject in subjects if len(subject) > LONGEST_SUBJECT]


def test_subjects_of_commits_fit_a_line() -> None:
    """Of the commits that the main branch lacks: those can still be changed."""
    assert too_long(["Fits", "x" * 72, "x" * 73]) == ["x" * 73]
    command = ["git", "-C", str(ROOT), "log", "--format=%s", "main..HEAD"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout by git")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip("git knows no branch main to compare with")
    assert too_long(done.stdout.splitlines()) == []
