"""Words and operators of shell scripts, with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

JOINED = "\v"
"""Stands for a backslash at the end of a line: nothing, but lines are counted by it."""
OPENED, CLOSED = "\x01", "\x02"
"""Stand for parentheses inside of a substitution."""
_PIECE = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|`[^`]*`|\$\{[^{}]*\}|\\.|[^\s;|&()<>#'\"`\\$]+|[#$]", re.S)
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_RUNS = re.compile(r"^\s*(sbatch|bash|sh)\b")


@dataclass(frozen=True, slots=True)
class ShellToken:
    """A word as it is written, or an operator."""

    text: str
    line: int
    quote: str = ""
    """Quotes around the whole word, if one pair is."""
    operator: bool = False


def tokens(text: str) -> Iterator[ShellToken]:
    """Yield the words and operators of a script; comments, and documents for other programs, are left out."""
    text = re.sub(r"\\\r?\n", JOINED, _nested(_without_documents(text)))
    place, line = 0, 1
    last = {end: text.rfind(end) for end in ("))", ")")}  # nothing is looked for behind the last one
    while place < len(text):
        letter = text[place]
        if letter in " \t\r" + JOINED:
            line += letter == JOINED
            place += 1
        elif letter == "#":
            place = next((at for at in range(place, len(text)) if text[at] in "\n" + JOINED), len(text))
            if text[place : place + 1] == JOINED:  # remarks end with their line
                yield ShellToken("\n", line, operator=True)
        elif letter in "\n;|&()<>":
            yield ShellToken(letter, line, operator=True)
            line += letter == "\n"
            place += 1
        else:
            start = place
            while place < len(text) and (end := _piece(text, place, last)) > place:
                place = end
            place += place == start  # a quote that nobody closes
            if not (text[start:place].isdigit() and text[place : place + 1] in ("<", ">")):
                yield _token(text[start:place], line)  # the number of a stream, as in 2>&1, is no word
            line += text[start:place].count("\n") + text[start:place].count(JOINED)


def _piece(text: str, place: int, last: Mapping[str, int]) -> int:
    """Return the end of the piece of a word that begins at ``place``; ``place`` if none does."""
    if text.startswith("$(", place):
        close = "))" if text.startswith("$((", place) else ")"
        if place < last[close]:
            return text.find(close, place) + len(close)
    match = _PIECE.match(text, place)
    return match.end() if match else place


def _nested(text: str) -> str:
    """Replace the parentheses inside of ``$( )`` and ``$(( ))``, so that each substitution ends at its first one."""
    closed, opened = dict[int, int](), list[int]()
    for bracket in re.finditer(r"[()]", text):
        if bracket[0] == "(":
            opened.append(bracket.start())
        elif opened:
            closed[opened.pop()] = bracket.start()
    letters, place = list(text), 0
    while (start := text.find("$(", place)) >= 0:
        inner = start + (3 if text.startswith("$((", start) else 2)
        place = closed.get(inner - 1, inner)
        for at in range(inner, place):
            if text[at] in "()":
                letters[at] = OPENED if text[at] == "(" else CLOSED
    return "".join(letters)


def _without_documents(text: str) -> str:
    """Remove the lines of ``<<END`` documents, unless a shell reads them; the count of lines stays."""
    kept, end, reads = list[str](), "", False
    for line in text.split("\n"):
        if end:
            over = line.strip() == end
            kept.append(line if reads and not over else "")
            end = "" if over else end
            continue
        marker = _HERE.search(line) if "<<<" not in line and not line.lstrip().startswith("#") else None
        if marker:
            end, reads = marker[2], bool(_RUNS.match(line))
        kept.append(line[: marker.start()] + line[marker.end() :] if marker else line)
    return "\n".join(kept)


def _token(raw: str, line: int) -> ShellToken:
    for quote in "'\"":
        if len(raw) > 1 and raw[0] == raw[-1] == quote and quote not in raw[1:-1].replace("\\" + quote, ""):
            return ShellToken(raw[1:-1], line, quote)
    return ShellToken(raw, line)
