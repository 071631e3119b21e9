"""Samples of output in README.md and docs are what their commands print now: ``make samples`` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _samples import KINDS, ROOT, Sample, excerpt, files_of, made, pages, printed, recorded, rewrite, samples
from often import often

from partool.cli.main import COMMANDS, run

SAMPLES = {f"{page.relative_to(ROOT)}:{sample.start}": sample for page in pages() for sample in samples(page)}
CHEAP = [name for name, sample in SAMPLES.items() if sample.kind == "sample"]
MADE = [name for name, sample in SAMPLES.items() if sample.kind != "recorded sample"]


@pytest.mark.parametrize("name", often(MADE, CHEAP))
def test_a_sample_is_what_its_command_prints(name: str) -> None:
    sample = SAMPLES[name]
    assert made(sample) == sample.body, f"{sample.command}: run make samples"


def test_every_command_and_option_of_a_sample_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SAMPLES) > 10
    helps: dict[str, str] = {}
    for sample in SAMPLES.values():
        assert sample.kind in KINDS
        program, name, *words = sample.command.split()
        assert program == "partool"
        assert name in COMMANDS, sample.command
        if name not in helps:
            with pytest.raises(SystemExit):
                run([name, "--help"])
            helps[name] = capsys.readouterr().out
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert {option for option in options if not re.search(rf"{option}\b", helps[name])} == set(), sample.command
        assert max(map(len, sample.body.splitlines())) <= 120


def test_a_page_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    text = (
        "<!-- file: mine.yaml -->\n```yaml\nmodel: gpt2\ndata: python-stdlib\nmodell: 3\n```\n"
        "text\n\n<!-- sample: partool plan mine.yaml --check 2>&1 -->\n```text\nstale\n```\n"
        "<!-- sample: partool explain gathered :: gathered (memory .. gathered (x -->\n```text\n```\n"
        "<!-- recorded sample: partool launch mine.yaml -->\n```text\nkept\n```\n```text\nplain\n```\n"
    )
    page.write_text(text)
    assert files_of(page) == (("mine.yaml", "model: gpt2\ndata: python-stdlib\nmodell: 3\n"),)
    assert [sample.kind for sample in samples(page)] == ["sample", "sample", "recorded sample"]
    assert rewrite(page, KINDS[:2])
    new = page.read_text()
    assert "error[PT101]: there is no `modell`" in new
    assert "mine.yaml: not sound" in new
    assert "gathered (memory per rank, bytes): parameters as passes read them" in new
    assert "stale" not in new
    assert "kept\n```\n```text\nplain\n```\n" in new
    assert not rewrite(page, KINDS[:2])


def test_a_recorded_command_runs_in_a_shell_with_the_pages_files() -> None:
    files = (("mine.yaml", "model: gpt2\ndata: python-stdlib\nmodell: 3\n"),)
    command = "partool plan mine.yaml --check 2>&1"
    assert recorded(f"{command} || true", files) == printed(command, files)


def test_parts_of_an_output() -> None:
    output = "a 1\nb 2  \n\nc 3\nd 4\n\n"
    assert excerpt(output, "") == "a 1\nb 2\n\nc 3\nd 4\n"
    assert excerpt(output, "b .. d") == "b 2\n\nc 3\n"
    assert excerpt(output, "a .. b; d ..") == "a 1\nd 4\n"
    assert excerpt(output, "c .. ") == "c 3\nd 4\n"
    assert excerpt(output, "/^[ad]/") == "a 1\n...\nd 4\n"
    for shown in ("x .. y", "/z/"):
        with pytest.raises(ValueError, match=r"no line begins|nothing is shown"):
            excerpt(output, shown)
    assert Sample(ROOT, "sample", "partool", "", "", 0).kind in KINDS
