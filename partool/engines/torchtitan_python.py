"""Reads torchtitan's configuration functions (``config_registry.py``, since 2026) from their source; nothing is run.

A function returns ``Trainer.Config(...)`` with literals in it, or takes another function's configuration and assigns
literals to parts of it: https://github.com/pytorch/torchtitan, ``torchtitan/models/*/config_registry.py``. Anything
else is a finding, and never evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.engines.budget import Budget
from partool.engines.settings import Setting
from partool.engines.torchtitan import renamed
from partool.engines.torchtitan_keys import NO_EFFECT
from partool.engines.torchtitan_models import FLAVOURS

_DEPTH = 8
"""Functions that may take each other's configuration."""


def functions(text: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module that return something, by name; none if it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        and any(isinstance(each, ast.Return) and each.value is not None for each in node.body)
    }  # fmt: skip


def settings(
    path: Path, text: str, name: str | None, model: str | None, budget: Budget
) -> tuple[dict[str, Setting], list[Diagnostic]]:
    """Return the settings of the configuration that the function ``name`` returns, and findings.

    ``model`` is the name of the model, if a command gives it; else the folder's name or the function's name says it.
    """
    defined = functions(text)
    if name is None and len(defined) == 1:
        name = next(iter(defined))
    if name is None or name not in defined:
        what = f"{path} has no configuration {name}" if name else f"{path} has several configurations"
        some = ", ".join(list(defined)[:8])
        help = f"add --define CONFIG=NAME with one of {some}" if some else "name another file"
        return {}, [Diagnostic("PT825", what, help=help)]
    reader = _Reader(path, defined, budget)
    reader.function(defined[name], 0)
    values = reader.values
    if "model.flavor" in values:
        flavour = values["model.flavor"]
        given = model or _model_of(path, name)
        if given:
            values["model.name"] = Setting("model_spec", given, flavour.file, flavour.line)
    return renamed(values), reader.findings


def _model_of(path: Path, name: str) -> str | None:
    if path.absolute().parent.name in FLAVOURS:
        return path.absolute().parent.name
    return next((model for model in FLAVOURS if name.startswith((model, model.replace("_", "")))), None)


@dataclass
class _Reader:
    """Follows one function, and those whose configuration it takes."""

    path: Path
    defined: dict[str, ast.FunctionDef]
    budget: Budget
    values: dict[str, Setting] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)

    def function(self, node: ast.FunctionDef, depth: int) -> None:
        """Take in a function's assignments and the configuration that it returns, in their order."""
        self.budget.call(self.path, node.lineno)
        names, specs = set[str](), dict[str, ast.expr]()
        for line in node.body:
            value = line.value if isinstance(line, (ast.Assign, ast.Return, ast.AnnAssign)) else None
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Call):
                if self._configuration(value, specs, depth):
                    names.add(target.id)
                else:
                    specs[target.id] = value
            elif isinstance(target, ast.Attribute) and value is not None and (place := _place(target)):
                root, _, rest = place.partition(".")
                if root in names:
                    self._value(rest, value, specs)
                else:
                    self._odd(line)
            elif isinstance(line, ast.Return) and isinstance(value, ast.Call):
                if not self._configuration(value, specs, depth):
                    self._odd(line)
            elif not _harmless(line, names):
                self._odd(line)

    def _configuration(self, call: ast.Call, specs: dict[str, ast.expr], depth: int) -> bool:
        """Take in a call that makes a configuration; return whether it is one."""
        called = _place(call.func) or ""
        if called in self.defined and depth < _DEPTH and not call.args and not call.keywords:
            self.function(self.defined[called], depth + 1)
            return True
        if not called.endswith("Trainer.Config"):
            return False
        for each in call.keywords:
            if each.arg is None:
                self._odd(each.value)
            else:
                self._value(each.arg, each.value, specs)
        return True

    def _value(self, name: str, value: ast.expr, specs: dict[str, ast.expr]) -> None:
        """Take in the value of a field, with the fields of a configuration inside."""
        if isinstance(value, ast.Name) and value.id in specs:
            value = specs[value.id]
        if name in ("model_spec", "model_converters", "model_converters.converters"):
            self._model(value)
        elif isinstance(value, ast.Call) and (_place(value.func) or "").endswith("Config"):
            self._inner(name, value, specs)
        else:
            try:
                plain = ast.literal_eval(value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                if not any(key.startswith(name + ".") or key == name for key in NO_EFFECT):
                    self._odd(value, name)
                return
            self._put(name, plain, value)

    def _inner(self, name: str, call: ast.Call, specs: dict[str, ast.expr]) -> None:
        kind = _place(call.func) or ""
        for old in [each for each in self.values if each.startswith(name + ".")]:
            del self.values[old]  # another configuration takes the place of the one before
        if kind.startswith("OptimizersInBackward"):
            self._put("optimizer.early_step_in_backward", True, call)
        words = ("ActivationCheckpointConfig", "Full", "Selective", "MemoryBudget")
        if name == "activation_checkpoint" and (mode := next((word for word in words[1:] if word in kind), None)):
            self._put("activation_checkpoint.mode", {"MemoryBudget": "memory_budget"}.get(mode, mode.lower()), call)
        for each in call.keywords:
            if each.arg is not None:
                self._value(f"{name}.{each.arg}", each.value, specs)
        if call.args:
            self._odd(call, name)

    def _model(self, value: ast.expr) -> None:
        """Take in ``model_registry("8B", ...)``, and converters of the model."""
        for call in [each for each in ast.walk(value) if isinstance(each, ast.Call)]:
            called = _place(call.func) or ""
            if called.endswith("model_registry"):
                given = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "flavor"), None)
                if isinstance(given, ast.Constant):
                    self._put("model.flavor", given.value, given)
                else:
                    self._odd(call)
            elif called.endswith("Converter.Config"):
                name = called.removesuffix(".Config").rpartition(".")[2]
                before = self.values.get("model.converters")
                self._put("model.converters", [*(before.value if before else []), name], call)
                section = "mx" if "MX" in name else "float8"
                for each in call.keywords:
                    if each.arg is not None:
                        self._value(f"{section}.{each.arg}", each.value, {})

    def _put(self, name: str, value: Any, node: ast.expr) -> None:
        self.values[name] = Setting(name, value, str(self.path), node.lineno)

    def _odd(self, node: ast.AST, name: str = "") -> None:
        line = getattr(node, "lineno", 1)
        what = f"{name} is" if name else "a line is"
        self.findings.append(
            Diagnostic(
                "PT825", f"{what} no literal, and only running the function would tell it",
                span=Span(str(self.path), line, 1, line, 1), help="write a literal there",
            )
        )  # fmt: skip


def _place(node: ast.expr) -> str | None:
    """Return a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    inner = _place(node.value) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else None


def _harmless(line: ast.stmt, names: set[str]) -> bool:
    """Return whether a statement leaves configurations as they are."""
    if isinstance(line, ast.Return):
        return isinstance(line.value, ast.Name) and line.value.id in names
    text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return text or isinstance(line, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Pass, ast.Assert))


def chosen(options: Mapping[str, Setting], defined: Mapping[str, str]) -> Iterator[str | None]:
    """Yield the names of the function and of the model that a command, or a definition, gives."""
    for option, variable in (("config", "CONFIG"), ("module", "MODULE")):
        given = options.get(option)
        yield str(given.value) if given is not None and given.value is not True else defined.get(variable)
