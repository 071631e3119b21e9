"""A pickle read as data: its calls are recorded instead of executed.

A pickle is a program for a small stack machine (the opcodes are described in Python's ``pickletools``), which may call
any function of any module. This reader runs the program with symbols in place of functions: a call becomes a
:class:`PickledCall` with its arguments. A global that is not on the caller's list, or an opcode that checkpoints'
pickles do not need, is an error.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

_MARK = object()


class PickleError(Exception):
    """The pickle is malformed, or holds more than data; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A global of a module; the module is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class PickledCall:
    """A global with the arguments of its call, and the state that unpickling would set on the result."""

    name: GlobalName
    arguments: tuple[Any, ...]
    state: Any = None


MEMBERS = frozenset({GlobalName("builtins", "getattr"), GlobalName("__builtin__", "getattr")})
"""How Python before 3.11.4 pickles the member of an enumeration: as an attribute of its class. Pickles of protocol 2
have the second name."""


@dataclass(eq=False, slots=True)
class Pairs:
    """The key-value pairs of a pickled dictionary, whose keys may be unhashable."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


def read(data: bytes, allowed: Collection[GlobalName]) -> Any:
    """Return the data that a pickle describes.

    The data are plain values, tuples, lists, :class:`Pairs`, :class:`GlobalName` and :class:`PickledCall`.

    Raises :class:`PickleError`.
    """
    machine = _Machine(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, pickle.UnpicklingError) as error:
        raise PickleError(f"it is malformed: {type(error).__name__}: {error}") from error
    raise PickleError("it has no end")


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    def __init__(self, allowed: Collection[GlobalName]) -> None:
        self._allowed = frozenset(allowed)
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._others: dict[str, Callable[[], None]] = {
            "MARK": lambda: self._stack.append(_MARK),
            "EMPTY_DICT": lambda: self._stack.append(Pairs()),
            "EMPTY_LIST": lambda: self._stack.append([]),
            "TUPLE": lambda: self._stack.append(tuple(self._marked())),
            "MEMOIZE": lambda: self._memo.__setitem__(len(self._memo), self._top()),
            "APPEND": lambda: self._extend([self.pop()]),
            "APPENDS": lambda: self._extend(self._marked()),
            "SETITEM": lambda: self._set([self.pop(), self.pop()][::-1]),
            "SETITEMS": lambda: self._set(self._marked()),
            "STACK_GLOBAL": self._stack_global,
            "REDUCE": self._call,
            "NEWOBJ": self._call,
            "BUILD": self._build,
        }

    def step(self, name: str, argument: Any) -> None:
        """Run one opcode."""
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            values = [self.pop() for _ in range(_TUPLES[name])]
            self._stack.append(tuple(reversed(values)))
        elif name in _GET:
            self._stack.append(self._memo[int(argument)])
        elif name in _PUT:
            self._memo[int(argument)] = self._top()
        elif name == "GLOBAL":
            module, _, class_name = argument.partition(" ")
            self._global(module, class_name)
        elif name in self._others:
            self._others[name]()
        elif name not in ("PROTO", "FRAME"):
            raise PickleError(f"it uses the opcode {name}, which plain data do not need")

    def pop(self) -> Any:
        """Take the value on top of the stack."""
        if self._top() is _MARK:
            raise PickleError("it is malformed: a mark in the place of a value")
        return self._stack.pop()

    def _top(self) -> Any:
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        """Take all values above the stack's last mark."""
        values = []
        while self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        self._stack.pop()
        return values[::-1]

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise PickleError("it appends to a value that is no list")
        target += values

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, Pairs) or len(values) % 2:
            raise PickleError("it sets items of a value that is no dictionary")
        target.items += zip(values[::2], values[1::2], strict=True)

    def _stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickleError("it is malformed: a global without a name")
        self._global(module, name)

    def _global(self, module: str, name: str) -> None:
        global_name = GlobalName(module, name)
        if global_name not in self._allowed:
            raise PickleError(f"it names {str(global_name)[:200]!r}, which no checkpoint needs")
        self._stack.append(global_name)

    def _call(self) -> None:
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, GlobalName) or not isinstance(arguments, tuple):
            raise PickleError("it calls a value that is no global")
        if name in MEMBERS:  # recorded as a call of the class, as newer versions of Python pickle a member
            if len(arguments) != 2 or not isinstance(arguments[0], GlobalName) or not isinstance(arguments[1], str):
                raise PickleError("it reads an attribute of a value that is no class")
            name, arguments = arguments[0], arguments[1:]
        self._stack.append(PickledCall(name, arguments))

    def _build(self) -> None:
        state, target = self.pop(), self._top()
        if not isinstance(target, PickledCall) or target.state is not None:
            raise PickleError("it gives a state to an object without one")
        target.state = state
