"""Reads shell scripts without running them: variables, arrays, quotes, continuations, defaults and sourced files.

What only a shell could tell (a command's output, an unset variable, a value that depends on a condition) stays in a
word as its own text and is named in :attr:`Word.unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REFERENCE = re.compile(
    r"\$\(\((?P<sum>[^()]*)\)\)|\$\((?P<command>[^()]*)\)|`(?P<old>[^`]*)`|"
    r"\$\{(?P<list>[A-Za-z_]\w*)\[[@*]\]\}|\$\{(?P<name>\w+)(?::?-(?P<default>[^{}]*))?\}|\$(?P<plain>\w+|[@*#?])"
)
_BEGINS = frozenset({"if", "for", "while", "until", "case"})
_ENDS = frozenset({"fi", "done", "esac"})
_SKIPPED = frozenset({"then", "else", "elif", "do", "{", "}", "!"})
_DECLARES = frozenset({"export", "local", "readonly", "declare", "typeset"})
_JOINED = "\v"
"""Stands for a backslash at the end of a line: nothing, but lines are counted by it."""
_NO_BREAK = "\u00a0"
_DEPTH = 8
"""Files that may source each other."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command."""

    text: str
    file: str
    line: int
    unknown: tuple[str, ...] = ()
    """References in the text that cannot be resolved."""


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    line: int
    quote: str = ""
    """Quotes around the whole word, if one pair is."""
    operator: bool = False


@dataclass
class ShellScript:
    """Commands of a script and of the files that it sources."""

    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, list[Word]] = field(default_factory=dict)
    """Values by name: one word, or those of an array."""
    missing: list[Word] = field(default_factory=list)
    """Sourced files that cannot be read."""
    _depends: set[str] = field(default_factory=set)
    """Variables with different values under different conditions."""

    def read(self, path: Path, text: str, depth: int = 0) -> None:
        """Read a script's text; relative files that it sources are looked for beside it."""
        inside, command = 0, list[_Token]()
        tokens = [*_tokens(text), _Token("\n", 0, operator=True)]
        place = 0
        while place < len(tokens):
            token = tokens[place]
            place += 1
            if not token.operator:
                named = _ASSIGNED.match(token.text) if not token.quote else None
                bare = all(_ASSIGNED.match(each.text) or each.text in _DECLARES | _SKIPPED for each in command)
                if named and bare and token.text == named[0] and place < len(tokens) and tokens[place].text == "(":
                    end = next(
                        at for at in range(place, len(tokens)) if tokens[at].text == ")" or at + 1 == len(tokens)
                    )
                    values = [each for each in tokens[place + 1 : end] if not each.operator]
                    words = [word for each in values for word in self._expanded(path, each)]
                    self._assign(named[1], words, more=bool(named[2]), inside=inside)
                    place = end + 1
                    continue
                command.append(token)
                continue
            if command:
                inside = max(0, inside + self._run(path, command, inside, depth))
                command = []

    def _run(self, path: Path, command: list[_Token], inside: int, depth: int) -> int:
        """Take in one command; return by how much conditions nest more after it."""
        first = command[0].text
        if first in _BEGINS:
            return 1
        if first in _ENDS:
            return -1
        while command and (command[0].text in _SKIPPED or command[0].text in _DECLARES):
            command = command[1:]
        while command and not command[0].quote and (named := _ASSIGNED.match(command[0].text)):
            rest = command[0].text[named.end() :]
            quote = rest[0] if rest[:1] in ("'", '"') and rest[-1:] == rest[:1] and len(rest) > 1 else ""
            value = _Token(rest[1:-1] if quote else rest, command[0].line, quote or '"')
            self._assign(named[1], self._expanded(path, value), more=bool(named[2]), inside=inside)
            command = command[1:]
        if not command:
            return 0
        words = [word for token in command for word in self._expanded(path, token)]
        if words and words[0].text in ("source", ".") and len(words) > 1:
            self._source(path, words[1], depth)
        elif words:
            self.commands.append(words)
        return 0

    def _source(self, path: Path, name: Word, depth: int) -> None:
        found = path.parent / name.text
        try:
            text = found.read_text(encoding="utf-8") if depth < _DEPTH and not name.unknown else None
        except (OSError, UnicodeDecodeError):
            text = None
        if text is None:
            self.missing.append(name)
        else:
            self.read(found, text, depth + 1)

    def _assign(self, name: str, words: list[Word], *, more: bool, inside: int) -> None:
        before = self.variables.get(name)
        if more and before is not None:
            words = [*before, *words]
        elif inside and before is not None and [each.text for each in before] != [each.text for each in words]:
            self._depends.add(name)
        if not inside and not more:
            self._depends.discard(name)
        self.variables[name] = words

    def _expanded(self, path: Path, token: _Token) -> list[Word]:
        """Return the words that a token stands for."""
        if token.quote == "'":
            return [Word(token.text.replace(_JOINED, ""), str(path), token.line)]
        if token.text in ("$@", "$*"):
            return []  # what the script is given on its command line is not in its text
        whole = _REFERENCE.fullmatch(token.text)
        if whole and whole["list"] and whole["list"] in self.variables and whole["list"] not in self._depends:
            return list(self.variables[whole["list"]])
        if whole and not token.quote and (name := whole["name"] or whole["plain"] or ""):
            found = self.variables.get(name)
            if found is not None and name not in self._depends:
                return [part for word in found for part in split(word)]
        unknown: list[str] = []
        text = _REFERENCE.sub(lambda match: self._value(match, unknown), token.text)
        word = Word(text, str(path), token.line, tuple(unknown))
        return [word] if token.quote else [each for each in split(word) if each.text]

    def _value(self, match: re.Match[str], unknown: list[str]) -> str:
        if (sum_ := match["sum"]) is not None:
            inner = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda each: self._plain(each[1], None, each[0], []), sum_)
            return _calculated(inner) or _unknown(match[0], unknown)
        if match["command"] is not None or match["old"] is not None:
            return _unknown(match[0], unknown)
        return self._plain(match["list"] or match["name"] or match["plain"], match["default"], match[0], unknown)

    def _plain(self, name: str, default: str | None, reference: str, unknown: list[str]) -> str:
        found = self.variables.get(name)
        if found is None and default is not None:
            return _REFERENCE.sub(lambda match: self._value(match, unknown), default.strip("\"'"))
        if found is None or name in self._depends:
            return _unknown(reference, unknown)
        unknown += [each for word in found for each in word.unknown]
        return " ".join(word.text for word in found)


def _unknown(reference: str, unknown: list[str]) -> str:
    """Note a reference that nobody can resolve; return it as text that is not split at blanks."""
    whole = _NO_BREAK.join(reference.split())
    unknown.append(whole)
    return whole


def _calculated(text: str) -> str | None:
    """Return the value of sums, products and quotients of whole numbers; None for anything else."""
    if not re.fullmatch(r"[\d\s+*/()-]+", text):
        return None
    numbers = [int(each) if each.isdigit() else each for each in re.findall(r"\d+|[+*/-]", text)]
    if "(" in text or len(numbers) % 2 == 0 or any(isinstance(each, str) for each in numbers[::2]):
        return None
    terms: list[int] = [int(numbers[0])]
    for sign, number in zip(numbers[1::2], numbers[2::2], strict=True):
        value = int(number)
        if sign in ("*", "/"):
            if sign == "/" and value == 0:
                return None
            terms[-1] = terms[-1] * value if sign == "*" else terms[-1] // value
        else:
            terms.append(value if sign == "+" else -value)
    return str(sum(terms))


def split(word: Word) -> Iterator[Word]:
    """Split a word at blanks, as a shell does outside of quotes, and keep count of lines."""
    line = word.line
    for part in re.split(r"([ \t\n]+)", word.text):
        if part.strip(" \t\n" + _JOINED):
            unknown = tuple(each for each in word.unknown if each in part)
            before = len(part) - len(part.lstrip(_JOINED))
            yield Word(part.replace(_JOINED, "").strip("\"'"), word.file, line + before, unknown)
        line += part.count("\n") + part.count(_JOINED)


_PIECE = re.compile(
    r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^{}]*\}|\\.|[^\s;|&()<>#'\"`\\$]+|[#$]",
    re.S,
)


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the words and operators of a script; comments are left out."""
    text = re.sub(r"\\\r?\n", _JOINED, text)
    place, line = 0, 1
    while place < len(text):
        letter = text[place]
        if letter in " \t\r" + _JOINED:
            line += letter == _JOINED
            place += 1
        elif letter == "#":
            place = (text.find("\n", place) + 1 or len(text) + 1) - 1
        elif letter in "\n;|&()<>":
            yield _Token(letter, line, operator=True)
            line += letter == "\n"
            place += 1
        else:
            start = place
            while place < len(text) and (piece := _PIECE.match(text, place)):
                place = piece.end()
            place += place == start  # a quote that nobody closes
            yield _token(text[start:place], line)
            line += text[start:place].count("\n") + text[start:place].count(_JOINED)


def _token(raw: str, line: int) -> _Token:
    for quote in "'\"":
        if len(raw) > 1 and raw[0] == raw[-1] == quote and quote not in raw[1:-1].replace("\\" + quote, ""):
            return _Token(raw[1:-1], line, quote)
    return _Token(raw, line)
