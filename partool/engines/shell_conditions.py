"""Conditions of shell scripts: true, false, or None where only running the script could tell."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partool.engines.shell_tokens import CLOSED, OPENED

_WHOLE = re.compile(r"-?[0-9]{1,18}")
"""Whole numbers that a shell can compare."""
_LONGEST = 400
"""Letters of an expression that is calculated; no script of a run has longer ones."""
Part = tuple[str, bool, bool]
"""A word's text, whether nobody knows it, and whether it is an unset variable."""
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
_SUMS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip


@dataclass
class Branch:
    """A condition that the script is in."""

    taken: bool | None
    """Whether the commands that follow are run; None: nobody knows."""
    before: bool | None = False
    """Whether an earlier branch is run."""
    case: Part | None = None
    """What the patterns of ``case`` are compared with."""

    def other(self, truth: bool | None) -> None:
        """Go on to the next branch, whose own condition is ``truth``."""
        self.before = (
            True if True in (self.before, self.taken) else None if None in (self.before, self.taken) else False
        )
        self.taken = False if self.before is True or truth is False else None if self.before is None else truth


def truth(words: Sequence[Part], signs: Sequence[str]) -> bool | None:
    """Return whether a chain of tests holds; ``signs`` has ``&&`` or ``||`` before each word, or nothing."""
    value: bool | None = True
    sign, test = "&&", list[Part]()
    for part, joined in [*zip(words, signs, strict=True), (("", False, False), "&&")]:
        if joined and test:
            value = _joined(value, sign, _test(test))
            sign, test = joined, []
        test.append(part)
    return value


def _joined(left: bool | None, sign: str, right: bool | None) -> bool | None:
    if sign == "&&":
        return False if False in (left, right) else None if None in (left, right) else True
    return True if True in (left, right) else None if None in (left, right) else False


def _test(parts: Sequence[Part]) -> bool | None:
    parts = [part for part in parts if part[0] not in ("[", "]", "[[", "]]", "test")]
    signs = next((place for place, part in enumerate(parts) if part[0] != "!"), len(parts))
    inner = _plain_test(parts[signs:])
    return inner if inner is None or signs % 2 == 0 else not inner


def _plain_test(parts: Sequence[Part]) -> bool | None:
    """Return whether a test without ``!`` before it and without brackets holds."""
    if [part[0] for part in parts] in (["true"], ["false"]):
        return parts[0][0] == "true"
    if len(parts) == 2 and parts[0][0] in ("-z", "-n"):
        (word, unknown, unset) = parts[1]
        return None if unknown and not unset else (unset or not word) == (parts[0][0] == "-z")
    if len(parts) == 1 and parts[0][0] in ("-z", "-n"):
        return parts[0][0] == "-z"
    if len(parts) != 3 or parts[0][1] or parts[2][1]:
        return None
    left, sign, right = (part[0] for part in parts)
    if sign in _NUMBERS:
        both = _WHOLE.fullmatch(left) and _WHOLE.fullmatch(right)
        return _NUMBERS[sign](int(left), int(right)) if both else None
    if sign not in ("=", "==", "!=") or any(letter in right for letter in "*?["):
        return None
    return (left == right) == (sign != "!=")


def matches(value: Part, patterns: Sequence[str]) -> bool | None:
    """Return whether a ``case`` with this value takes the branch with these patterns."""
    if "*" in patterns:
        return True
    if value[1] or any(letter in pattern for pattern in patterns for letter in "*?["):
        return None
    return value[0] in patterns


def calculated(text: str) -> str | None:
    """Return the value of an expression of whole numbers; None for anything else."""
    text = text.replace(OPENED, "(").replace(CLOSED, ")").strip()
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9\s+*/%()<>=!?:-]+", text):
        return None
    if "?" in text:
        test, _, rest = text.partition("?")
        value, (yes, _, no) = calculated(test), rest.partition(":")
        return None if value is None else calculated(no if value == "0" else yes)
    try:
        number = _value(ast.parse(text.replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    # A shell's numbers have 64 bits, and larger ones become others there.
    return str(number) if abs(number) < 2**63 else None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return _SUMS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        return int(_COMPARED[type(node.ops[0])](_value(node.left), _value(node.comparators[0])))
    raise ValueError(ast.dump(node))
