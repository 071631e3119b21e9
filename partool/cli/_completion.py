"""Completion of partool's commands, options and files in bash, zsh and fish, by typer's scripts."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence

import typer
from typer.completion import get_completion_script, install  # type: ignore[attr-defined]  # re-exported by import

from partool.plan.terminal import say

_SHELLS = ("bash", "zsh", "fish")
_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Environment variables in which the scripts for bash and for the other shells pass the command line."""


def complete(commands: Mapping[str, tuple[str, str]], words: Sequence[str], variable: str) -> None:
    """Answer the shell's script, or print or install the script; ends the process.

    ``commands`` maps names to (module, help), ``words`` is ``--show-completion`` or ``--install-completion`` with or
    without a shell's name; the default is the shell that runs the command. ``variable`` is the environment variable by
    which the script asks. Only the module of the command on the line is imported: an answer takes as long as its help.
    """
    if variable not in os.environ and len(words) > 1:
        _of_shell(words[0], words[1], variable)
        return
    line = next((os.environ[name] for name in _LINES if name in os.environ), "").split()
    app = typer.Typer(add_completion=True, pretty_exceptions_enable=False)
    for name, (module, help) in commands.items():
        function = importlib.import_module(module).command if line[1:2] == [name] else _other()
        app.command(name, help=help)(function)
    app(args=list(words), prog_name="partool")


def _of_shell(option: str, shell: str, variable: str) -> None:
    """Print or install the script for a shell that the user names."""
    if shell not in _SHELLS:
        say(f"error: there is no completion for {shell!r}\n  help: one of {', '.join(_SHELLS)}", err=True)
        raise SystemExit(2)
    if option == "--show-completion":
        say(get_completion_script(prog_name="partool", complete_var=variable, shell=shell))
    else:
        _, path = install(shell=shell, prog_name="partool", complete_var=variable)
        say(f"partool: {path} completes commands in new shells", err=True)
    raise SystemExit(0)


def _other() -> Callable[[], None]:
    """Return a command without options, for the commands that the line does not name."""

    def command() -> None:
        """Do nothing."""

    return command
