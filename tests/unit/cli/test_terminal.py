"""Output to terminals and to pipes: partool's own messages, reports, and the output of ranks."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from _terminal import Terminal, obeyed, on_a_terminal

from partool.cli._runs import show_lines
from partool.launch.store import Run
from partool.launch.target import LogLine
from partool.plan.terminal import open_console, say, tame

PRINTED = (
    b"\x1b[31mred\x1b[0m \rprogress 50%\r\x1b[2K\x1b[1Aup \x1b]0;owned\x07title "
    b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1bP1$r\x1b\\dcs \x1bc\xc2\x9b2J\xc2\x9d0;x \x9b \x07\x08 "
    b"\xe2\x9c\x93 \t\x1b]0;never ended\nnext\n"
)
TAMED = (
    b"\x1b[31mred\x1b[0m \rprogress 50%\rup title link dcs 2J0;x   \xe2\x9c\x93 \t\nnext\n"
)  # fmt: skip

SEARCHING = re.compile(r"\r(partool: \d+ s, searching [^\r\x1b]*)?\x1b\[K")
"""What a terminal gets of a search that takes a while, as on a machine with other work."""


def test_ranks_keep_colours_and_carriage_returns_on_a_terminal_and_everything_in_a_pipe(tmp_path: Path) -> None:
    assert tame(PRINTED) == TAMED
    assert tame("naïve-名前 ✓".encode()) == "naïve-名前 ✓".encode()
    assert tame(b"\xff\xfe") == b"\xff\xfe"
    lines = [LogLine(0, False, PRINTED), LogLine(0, True, PRINTED)]
    terminal = Terminal()
    with redirect_stdout(terminal), redirect_stderr(terminal):
        show_lines(Run(tmp_path), lines, 0)
    assert terminal.bytes.getvalue() == TAMED * 2
    piped = io.TextIOWrapper(io.BytesIO())
    with redirect_stdout(piped), redirect_stderr(piped):
        show_lines(Run(tmp_path), lines, 0)
    piped.flush()
    assert piped.buffer.getvalue() == PRINTED * 2  # type: ignore[attr-defined]


def test_results_are_shown_on_a_terminal_and_untouched_in_a_pipe() -> None:
    terminal, piped = Terminal(), io.StringIO()
    for stream in (terminal, piped):
        with redirect_stdout(stream):
            say("echo '\x1b[2J\u202e'")
    assert terminal.text == "echo '�[2J�'\n"
    assert piped.getvalue() == "echo '\x1b[2J\u202e'\n"


def test_reports_read_no_markup_and_no_control_characters_in_texts() -> None:
    file = io.StringIO()
    open_console(file=file, force_terminal=True, color_system=None, width=80).print(
        "a\x1b]0;x\x07 [link=http://x]b[/link] [bold]c :smile:"
    )
    assert file.getvalue().strip() == "a�]0;x [link=http://x]b[/link] [bold]c :smile:"


@pytest.mark.timeout(60)
def test_on_a_real_terminal(tmp_path: Path) -> None:
    spec = 'model: "\\e]0;owned\\a\\x9b2J\\u202e"\ndata: python-stdlib\n'
    (tmp_path / "mine.yaml").write_text(spec, encoding="utf-8")
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "partool", "plan", "mine.yaml"]
    done = subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    read = b""
    try:
        while chunk := os.read(mine, 4096):
            read += chunk
    except OSError:  # the other end is closed
        pass
    assert done.wait() == 1
    text = read.decode().replace("\r\n", "\n")
    assert "PT250" in text or "there is no model preset" in text, text
    assert not obeyed(text)
    assert "\x1b[1;31m" in text


def test_variables_may_hold_anything_and_a_dry_run_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu, per_node: 1}\n"
        'data: python-stdlib\nlaunch: {env: {PS1: "\\e]0;owned\\a"}}\n'
    )
    text, code = on_a_terminal(["launch", "--dry-run", "mine.yaml"], monkeypatch)
    assert code == 0
    assert "PS1='�]0;owned�'" in text
    assert not obeyed(SEARCHING.sub("", text))
