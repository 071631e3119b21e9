"""Findings as printed for people and for programs."""

from __future__ import annotations

import io
import json
import re

import pytest

from partool.diagnostics.machine import as_dict, render_github, render_sarif
from partool.diagnostics.record import Diagnostic, Label, Span
from partool.diagnostics.text import columns_of, render_text, summary, wants_colour

LINES = {"a.yaml": ["parallel:", "  tensor: 6", "\tx: 漢字  # ü", "name: \x1b[31mred"]}
PLAIN = Diagnostic("PT204", "heads: 7", span=Span("a.yaml", 2, 11, 2, 12), label="here", help="use 8")


def test_text() -> None:
    assert render_text([PLAIN], LINES).splitlines()[:8] == [
        "error[PT204]: heads: 7",
        "  ┌─ a.yaml:2:11",
        "  │",
        "1 │ parallel:",
        "2 │   tensor: 6",
        "  │           ^ here",
        "  = help: use 8",
        "  = see: partool explain PT204",
    ]


def test_messages_and_helps_are_wrapped_for_a_terminal() -> None:
    words = "no layout fits: " + "ZeRO-3 over 2 ranks, " * 12
    long = Diagnostic("PT301", words, span=PLAIN.span, label="here", help="hardware.nodes: 16 or more; " * 6)
    lines = render_text([long], LINES, columns=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert [line for line in lines if line.startswith(("  ZeRO-3", "  ranks"))]
    helps = lines[next(at for at, line in enumerate(lines) if " = help: " in line) :]
    assert all(line.startswith(" " * 10) for line in helps[1:3])
    joined = " ".join(render_text([long], LINES, columns=60).split())
    assert joined == " ".join(render_text([long], LINES).split())
    assert render_text([PLAIN], LINES, columns=80) == render_text([PLAIN], LINES)
    coloured = render_text([long], LINES, columns=60, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_text([long], LINES, columns=60)
    assert columns_of(io.StringIO()) == 0


def test_carets_stand_under_wide_characters_and_tabs() -> None:
    text = render_text([Diagnostic("PT101", "m", span=Span("a.yaml", 3, 5, 3, 7))], LINES).splitlines()
    source = next(line for line in text if "漢字" in line)
    carets = next(line for line in text if "^" in line)
    assert carets.count("^") == 4
    assert carets.index("^") == source.index("漢")


def test_nothing_in_a_file_reaches_the_terminal_as_a_command() -> None:
    assert "\x1b" not in render_text([Diagnostic("PT101", "m", span=Span("a.yaml", 4, 1, 4, 5))], LINES)
    assert "\x1b[" in render_text([PLAIN], LINES, colour=True)


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


def test_github_escapes() -> None:
    found = Diagnostic("PT101", "100%\nbad", "warning", span=Span("a,b:c.yaml", 2, 3, 2, 5))
    (line,) = render_github([found]).splitlines()
    assert line.startswith("::warning file=a%2Cb%3Ac.yaml,line=2")
    assert line.endswith("::100%25%0Abad")


def test_json_and_sarif() -> None:
    related = Diagnostic("PT008", "twice", span=PLAIN.span, related=(Label(Span("a.yaml", 1, 1, 1, 9), "first"),))
    assert [as_dict(each)["code"] for each in (PLAIN, related)] == ["PT204", "PT008"]
    log = json.loads(render_sarif([PLAIN, related], LINES, "1.2"))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    first, second = run["results"]
    assert first["ruleId"] == "PT204"
    region = first["locations"][0]["physicalLocation"]
    assert region["artifactLocation"]["uri"] == "a.yaml"
    assert (region["region"]["startLine"], region["region"]["startColumn"]) == (2, 11)
    assert first["partialFingerprints"] != second["partialFingerprints"]
    moved = Diagnostic("PT204", "heads: 7", span=Span("a.yaml", 3, 11, 3, 12))
    lines = {"a.yaml": ["# new", *LINES["a.yaml"]]}
    again = json.loads(render_sarif([moved], lines, "1.2"))["runs"][0]["results"][0]
    assert again["partialFingerprints"] == first["partialFingerprints"]


def test_summary() -> None:
    warning = Diagnostic("PT1", "m", "warning")
    assert "1 error, 2 warnings" in summary([PLAIN, warning, warning])
