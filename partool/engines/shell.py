"""Reads shell scripts without running them: variables, arrays, quotes, continuations, defaults and sourced files.

Conditions whose values the script itself has are decided; of others, all branches are read. What only a shell could
tell (a command's output, an unset variable, a value that depends on such a condition) stays in a word as its own text
and is named in :attr:`Word.unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partool.engines.budget import Budget, UnreadableFileError
from partool.engines.shell_conditions import Branch, Part, calculated, matches, truth
from partool.engines.shell_tokens import CLOSED, JOINED, OPENED, ShellToken, tokens

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REFERENCE = re.compile(
    r"\$\(\((?P<sum>[^()]*)\)\)|\$\((?P<command>[^()]*)\)|`(?P<old>[^`]*)`|"
    r"\$\{(?P<list>[A-Za-z_]\w*)\[[@*]\]\}|\$\{(?P<name>\w+)(?::?-(?P<default>[^{}]*)|:?\?[^{}]*)?\}|"
    r"\$(?P<plain>\w+|[@*#?])"
)
_NESTED = re.compile(r"\$\{\w+:?-")
_LOOPS = frozenset({"for", "while", "until"})
_ENDS = frozenset({"fi", "done", "esac"})
_SKIPPED = frozenset({"then", "else", "do", "{", "}", "!"})
_DECLARES = frozenset({"export", "local", "readonly", "declare", "typeset"})
_SHELLS = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_OPERATORS = 8
"""Operators in a row that are remembered; two decide."""
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


@dataclass
class ShellScript:
    """Commands of a script and of the files that it sources, as far as ``budget`` allows to read them."""

    budget: Budget = field(default_factory=Budget)
    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, list[Word]] = field(default_factory=dict)
    """Values by name: one word, or those of an array."""
    missing: list[Word] = field(default_factory=list)
    """Sourced files that cannot be read."""
    outside: list[Word] = field(default_factory=list)
    """Sourced files that are not read: they lie outside of the script's folder and of those that the user allows."""
    _root: Path = Path()
    """Folder of the script that the user gave."""
    _depends: set[str] = field(default_factory=set)
    """Variables with different values under different conditions."""
    _unset: set[str] = field(default_factory=set)
    """Variables that are set only where the script does not go."""
    _branches: list[Branch] = field(default_factory=list)
    _at: tuple[Path, int] = (Path(), 1)
    """File and line of the word that is being expanded."""
    _tests: list[tuple[Part, str]] | None = None
    """Words of the condition that is being read, each with the sign before it."""
    _patterns: list[str] | None = None
    """Patterns of ``case`` that are being read."""
    _between: str = ""
    """The last operators before the command that is read."""

    def read(self, path: Path, text: str, depth: int = 0) -> None:
        """Read a script's text; relative files that it sources are looked for beside it.

        Raises:
            OverBudgetError: the script, what its variables stand for, or the files that it sources are too large.
        """
        self._root = path.parent if depth == 0 else self._root
        command = list[ShellToken]()
        stream = [*self._charged(path, tokens(text)), ShellToken("\n", 0, operator=True)]
        place = 0
        while place < len(stream):
            token = stream[place]
            place += 1
            if not token.operator:
                end = self._array(path, command, stream, place)
                if end == place:
                    command.append(token)
                place = end
                continue
            if command and not self._pattern(command, token.text):
                self._run(path, command, depth)
                self._between = ""
            command = []
            self._between = (self._between + token.text)[-_OPERATORS:]
            if self._between.endswith(";;") and self._branches and self._branches[-1].case:
                self._patterns = []

    def _charged(self, path: Path, stream: Iterator[ShellToken]) -> Iterator[ShellToken]:
        for token in stream:
            self.budget.word(path, token.line)
            yield token

    def _array(self, path: Path, command: Sequence[ShellToken], stream: Sequence[ShellToken], place: int) -> int:
        """Take in ``NAME=( )`` whose name ends at ``place``; return the place behind it, or ``place``."""
        token = stream[place - 1]
        named = _ASSIGNED.match(token.text) if not token.quote else None
        if not (named and token.text == named[0] and place < len(stream) and stream[place].text == "("):
            return place
        if not all(_ASSIGNED.match(each.text) or each.text in _DECLARES | _SKIPPED for each in command):
            return place
        end = next(at for at in range(place, len(stream)) if stream[at].text == ")" or at + 1 == len(stream))
        if not self._active:
            self._unset.add(named[1])
        else:
            values = [each for each in stream[place + 1 : end] if not each.operator]
            words = [word for each in values for word in self._expanded(path, each)]
            self._assign(named[1], words, more=bool(named[2]))
        return end + 1

    @property
    def _active(self) -> bool:
        return all(branch.taken is not False for branch in self._branches)

    def _pattern(self, command: Sequence[ShellToken], operator: str) -> bool:
        """Take in a pattern of ``case``; return False if the command is none."""
        if self._patterns is None or command[0].text == "esac":
            return False
        self._patterns += [each.text for each in command]
        branch = self._branches[-1]
        if operator == ")" and branch.case is not None:
            branch.other(matches(branch.case, self._patterns))
            self._patterns = None
        return True

    def _run(self, path: Path, command: list[ShellToken], depth: int) -> None:
        """Take in one command, and words before it that control others."""
        while command:
            command = self._rest(path, command, depth)

    def _rest(self, path: Path, command: list[ShellToken], depth: int) -> list[ShellToken]:
        """Take in one command, or a word that controls others; return what stands behind such a word."""
        first = command[0].text if not command[0].quote else ""
        if self._tests is not None and first != "then":
            self._test(path, command)
            return []
        if first == "then" and self._tests is not None:
            holds = truth([part for part, _ in self._tests], [sign for _, sign in self._tests])
            self._tests = None
            if self._branches:
                self._branches[-1].other(holds)
        elif first in ("if", "elif"):
            self._branches += [Branch(False)] if first == "if" else []
            self._tests, self._between = [], ""
            self._test(path, command[1:])
            return []
        elif first == "else" and self._branches:
            self._branches[-1].other(True)
        elif first in _LOOPS or first == "case":
            part = self._part(path, command[1]) if first == "case" and len(command) > 1 else None
            self._branches.append(Branch(None if part is None else False, False, part))
            self._patterns = None if part is None else []
            return []
        elif first in _ENDS:
            self._branches, self._patterns = self._branches[:-1], None
            return []
        if first in ("then", "else", "do"):
            return command[1:]
        if self._active:
            self._plain_command(path, command, depth)
        else:
            self._unset |= {named[1] for token in command if (named := _ASSIGNED.match(token.text))}
        return []

    def _test(self, path: Path, command: Sequence[ShellToken]) -> None:
        """Take in a part of a condition."""
        assert self._tests is not None
        sign = "||" if self._between.endswith("||") else "&&"
        clear = self._between in ("", "&&", "||")
        parts = [self._part(path, token) for token in command] if clear else [("", True, False)]
        self._tests += [(part, sign if place == 0 else "") for place, part in enumerate(parts)]

    def _part(self, path: Path, token: ShellToken) -> Part:
        words = self._expanded(path, token)
        unset = _REFERENCE.fullmatch(token.text) if token.quote != "'" else None
        name = (unset["name"] or unset["plain"]) if unset else None
        is_set = name is None or name in self.variables or unset is None or unset["default"] is not None
        return " ".join(word.text for word in words), any(word.unknown for word in words), not is_set

    def _plain_command(self, path: Path, command: list[ShellToken], depth: int) -> None:
        start = 0
        while start < len(command) and command[start].text in _SKIPPED | _DECLARES:
            start += 1
        command = command[start:]
        while command and not command[0].quote and (named := _ASSIGNED.match(command[0].text)):
            rest = command[0].text[named.end() :]
            quote = rest[0] if rest[:1] in ("'", '"') and rest[-1:] == rest[:1] and len(rest) > 1 else ""
            value = ShellToken(rest[1:-1] if quote else rest, command[0].line, quote or '"')
            self._assign(named[1], self._expanded(path, value), more=bool(named[2]))
            command = command[1:]
        shell = next((place for place, token in enumerate(command) if token.text in _SHELLS), len(command))
        words = list[Word]()
        for place, token in enumerate(command):
            script = place > shell and command[place - 1].text.lstrip("-") == "c"
            words += self._expanded(path, ShellToken(token.text, token.line, '"') if script else token)
        if words and words[0].text in ("source", ".") and len(words) > 1:
            self._source(path, words[1], depth)
        elif words:
            self.commands.append(words)

    def _source(self, path: Path, name: Word, depth: int) -> None:
        source = path.parent / name.text
        if name.unknown or depth >= _DEPTH:
            self.missing.append(name)
        elif not self.budget.allows(source, self._root):
            self.outside.append(name)
        else:
            try:
                text = self.budget.read(source)
            except UnreadableFileError:
                self.missing.append(name)
            else:
                self.read(source, text, depth + 1)

    def _assign(self, name: str, words: list[Word], *, more: bool) -> None:
        if name not in self.variables and [word.text for word in words] in ([f"${{{name}}}"], [f"${name}"]):
            return  # it is what it was
        before = self.variables.get(name)
        inside = any(branch.taken is None for branch in self._branches)
        if more and before is not None:
            words = [*before, *words]
            self._charge(Path(words[-1].file if words else ""), words[-1].line if words else 1, before)
        elif inside and before is not None and [each.text for each in before] != [each.text for each in words]:
            self._depends.add(name)
        if not inside and not more:
            self._depends.discard(name)
        self.variables[name] = words

    def _expanded(self, path: Path, token: ShellToken) -> list[Word]:
        """Return the words that a token stands for."""
        if token.quote == "'":
            return [Word(_shown(token.text.replace(JOINED, "")), str(path), token.line)]
        if token.text in ("$@", "$*"):
            return []  # what the script is given on its command line is not in its text
        reference = _REFERENCE.fullmatch(token.text)
        if reference and (name := reference["list"]) and name in self.variables and name not in self._depends:
            parts = self.variables[name]
            self._charge(path, token.line, parts)
            return list(parts) if token.quote else [word for part in parts for word in split(part)]
        if reference and not token.quote and (name := reference["name"] or reference["plain"] or ""):
            words = self.variables.get(name)
            if words is not None and name not in self._depends:
                self._charge(path, token.line, words)
                return [part for word in words for part in split(word)]
        unknown: list[str] = []
        self._at = (path, token.line)
        text = _REFERENCE.sub(lambda match: self._value(match, unknown), token.text)
        if _NESTED.search(text):
            text = _REFERENCE.sub(lambda match: self._value(match, unknown), text)
        self.budget.expand(text.count(" ") * len(unknown), path, token.line)
        word = Word(_shown(text), str(path), token.line, tuple(dict.fromkeys(map(_shown, unknown))))
        return [word] if token.quote else self._pieces(path, word)

    def _pieces(self, path: Path, word: Word) -> list[Word]:
        """Return the parts of a word that has no quotes."""
        pieces = list[Word]()
        for each in split(word):
            if pieces:
                self.budget.expand(0, path, word.line, words=1)
            pieces += [each] if each.text else []
        return pieces

    def _charge(self, path: Path, line: int, words: Sequence[Word]) -> None:
        """Charge the words that a variable stands for."""
        self.budget.expand(sum(len(word.text) + len(word.unknown) for word in words), path, line, len(words))

    def _value(self, match: re.Match[str], unknown: list[str]) -> str:
        if (sum_ := match["sum"]) is not None:
            inner = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda each: self._plain(each[1], None, each[0], []), sum_)
            return calculated(inner) or _unknown(match[0], unknown)
        if match["command"] is not None or match["old"] is not None:
            return _unknown(match[0], unknown)
        if match["plain"] in ("@", "*") and match["plain"] not in self.variables:
            return ""
        return self._plain(match["list"] or match["name"] or match["plain"], match["default"], match[0], unknown)

    def _plain(self, name: str, default: str | None, reference: str, unknown: list[str]) -> str:
        words = self.variables.get(name)
        if words is None and default is not None:
            self.budget.expand(len(default), *self._at)
            return _REFERENCE.sub(lambda match: self._value(match, unknown), default.strip("\"'"))
        if words is None and name in self._unset:
            return ""
        if words is None or name in self._depends:
            return _unknown(reference, unknown)
        unknown += [each for word in words for each in word.unknown]
        # Lines are counted where the value is written, not where it is used.
        text = re.sub(rf"[{JOINED}\n]+", " ", " ".join(word.text for word in words))
        self.budget.expand(len(text) + len(unknown), *self._at)
        return text


def _shown(text: str) -> str:
    return text.replace(OPENED, "(").replace(CLOSED, ")")


def _unknown(reference: str, unknown: list[str]) -> str:
    """Note a reference that nobody can resolve; return it as text that is not split at blanks."""
    text = _NO_BREAK.join(reference.split())
    unknown.append(text)
    return text


def split(word: Word) -> Iterator[Word]:
    """Split a word at blanks, as a shell does outside of quotes, and keep count of lines."""
    line = word.line
    for part in re.split(r"([ \t\n]+)", word.text):
        if part.strip(" \t\n" + JOINED):
            unknown = tuple(each for each in word.unknown if each in part)
            before = len(part) - len(part.lstrip(JOINED))
            yield Word(part.replace(JOINED, "").strip("\"'"), word.file, line + before, unknown)
        line += part.count("\n") + part.count(JOINED)
