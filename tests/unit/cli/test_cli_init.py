"""``partool init``: the spec it writes loads and has the editor's schema line; no file is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from partool.cli.main import run
from partool.spec import load


def init(*arguments: str) -> int:
    try:
        run(["init", *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


@pytest.mark.parametrize("preset", [[], ["--preset", "llama3-8b"]])
def test_what_is_written_loads(tmp_path: Path, preset: list[str]) -> None:
    path = tmp_path / "new.yaml"
    assert init(str(path), *preset) == 0
    assert "yaml-language-server: $schema=" in path.read_text()
    loaded = load(path)
    assert loaded.diagnostics == []
    assert loaded.spec is not None


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert init(str(path)) == 2
    assert path.read_text() == "mine"
    assert init(str(path), "--force") == 0
    assert path.read_text() != "mine"
    assert init(str(tmp_path / "x.yaml"), "--preset", "lama3-8b") == 2
    assert "llama3-8b" in capsys.readouterr().err
