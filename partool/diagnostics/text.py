"""Shows findings as text for people: the line of the file, a caret under the place, and the help."""

from __future__ import annotations

import os
import textwrap
import unicodedata
from collections.abc import Mapping
from typing import TextIO

from partool.diagnostics.record import Diagnostic, Label, Span
from partool.diagnostics.secrets import masked_lines, without_secrets

CONTROL = "�"
"""Replacement of each control character."""


def visible(text: str) -> str:
    """Return a text whose control characters are replaced by ``�``; line ends and tabs stay.

    Control characters are the characters of C0 and C1 (escape sequences begin with such a character), characters that
    reverse or hide text (such as bidirectional controls), separators of lines and paragraphs, and single surrogates:
    the categories Cc, Cf, Cs, Zl and Zp of https://www.unicode.org/reports/tr44/#General_Category_Values.
    """
    if text.isprintable():
        return text
    return "".join(CONTROL if steers(character) else character for character in text)


def steers(character: str) -> bool:
    """Return True for a control character, which steers the terminal instead of being shown."""
    if character.isprintable() or character in "\n\t":
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


_COLOURS = {"error": "1;31", "warning": "1;33", "note": "1;36", "frame": "34", "bold": "1"}
_TAB = "    "
_HANGING = 2
"""Indent of the second and further lines of a message."""


def wants_colour(stream: TextIO) -> bool:
    """Return True for a terminal with colours, unless the user switched them off (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def columns_of(stream: TextIO) -> int:
    """Return the width of a terminal; 0 for other streams, whose lines are not wrapped."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def render_text(
    findings: list[Diagnostic], lines: Mapping[str, list[str]], *, colour: bool = False, columns: int = 0
) -> str:
    """Return the findings as text; ``lines`` maps the name of each source file to the file's lines.

    Messages and helps are wrapped to ``columns``, unless that is 0.
    """
    painter = _Painter({name: masked_lines(texts) for name, texts in lines.items()}, colour, columns)
    return "".join(painter.finding(without_secrets(finding)) + "\n" for finding in findings)


def summary(findings: list[Diagnostic]) -> str:
    """Return the numbers of errors and warnings as text: ``2 errors, 1 warning``."""
    counts = [(kind, sum(finding.severity == kind for finding in findings)) for kind in ("error", "warning")]
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts if count)


class _Painter:
    def __init__(self, lines: Mapping[str, list[str]], colour: bool, columns: int) -> None:
        self._lines = lines
        self._colour = colour
        self._columns = columns

    def finding(self, finding: Diagnostic) -> str:
        head = f"{finding.severity}[{finding.code}]"
        first, *rest = self._wrapped(f"{head}: {visible(finding.message)}", 0, _HANGING)
        out = [self._paint(finding.severity, head) + self._paint("bold", first.removeprefix(head))]
        out += [" " * _HANGING + self._paint("bold", line) for line in rest]
        width = len(str(max([span.line for span in self._spans(finding)], default=0)))
        if finding.span is not None:
            out += self._excerpt(Label(finding.span, finding.label), finding.severity, width, first=True)
        for label in finding.related:
            out += self._excerpt(label, "note", width, first=False)
        if finding.help:
            indent = width + len(" = help: ")
            first, *rest = self._wrapped(visible(finding.help), indent, indent)
            out.append(f"{' ' * width} {self._paint('frame', '=')} help: {first}")
            out += [" " * indent + line for line in rest]
        out.append(f"{' ' * width} {self._paint('frame', '=')} see: partool explain {finding.code}")
        return "\n".join(out) + "\n"

    def _wrapped(self, text: str, first: int, others: int) -> list[str]:
        """Return a text in lines that leave room for their indents: of the first line, and of the others."""
        if not self._columns or "\n" in text:
            return [text]
        lines = textwrap.wrap(
            text,
            max(self._columns, 2 * others),
            initial_indent=" " * first,
            subsequent_indent=" " * others,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [lines[0][first:], *(line[others:] for line in lines[1:])] if lines else [text]

    def _spans(self, finding: Diagnostic) -> list[Span]:
        return [span for span in (finding.span, *(label.span for label in finding.related)) if span]

    def _excerpt(self, label: Label, kind: str, width: int, *, first: bool) -> list[str]:
        span = label.span
        file = visible(span.file)
        place = f"{file}:{span.line}:{span.column}"
        lines = self._lines.get(span.file)
        if lines is None:  # an override, or a file that could not be read
            return [f"{' ' * width} {self._paint('frame', '┌─')} {file if file.startswith('--set') else place}"]
        out = [f"{' ' * width} {self._paint('frame', '┌─' if first else '├─')} {place}"]
        bar = self._paint("frame", "│")
        out.append(f"{' ' * width} {bar}")
        for number in (span.line - 1, span.line):
            text = _cut(lines[number - 1]) if 0 < number <= len(lines) else None
            if text is not None and (number == span.line or text.strip()):
                out.append(f"{self._paint('frame', str(number).rjust(width))} {bar} {_expand(text)}".rstrip())
        if 0 < span.line <= len(lines):
            out.append(f"{' ' * width} {bar} {self._caret(span, _cut(lines[span.line - 1]), label.text, kind)}")
        return out

    def _caret(self, span: Span, line: str, text: str, kind: str) -> str:
        end = span.end_column if span.end_line == span.line else len(line) + 1
        indent = _width(line[: span.column - 1])
        length = max(_width(line[span.column - 1 : end - 1]), 1)  # a masked line may end earlier
        return " " * indent + self._paint(kind, "^" * length + (f" {visible(text)}" if text else ""))

    def _paint(self, kind: str, text: str) -> str:
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self._colour else text


_LONGEST = 1000
"""Letters of a line that are shown: of a file in one line, the rest hides the finding."""


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _expand(text: str) -> str:
    return visible(text).replace("\t", _TAB).replace("\n", CONTROL)


def _width(text: str) -> int:
    """Return the number of columns that a terminal gives to a text."""
    total = 0
    for character in _expand(text):
        if not unicodedata.combining(character):
            total += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return total
