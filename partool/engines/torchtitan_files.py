"""Gathers a run of torchtitan from its files: a TOML, a script with options over it, a module of configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.engines import slurm, torchtitan, torchtitan_python
from partool.engines.budget import Budget
from partool.engines.commands import (
    File,
    Gathered,
    default_nodes,
    launcher_without_nodes,
    named_file,
    not_found,
    script_of,
    training_command,
)
from partool.engines.kinds import kind_of
from partool.engines.settings import Setting
from partool.engines.shell import ShellScript, Word
from partool.engines.torchtitan_keys import NO_EFFECT

_MARKS = (
    r"--job\.config_file|torchtitan\.train|run_(llama_)?train\.sh|--module\s\S+\s--config\s|"
    r"--(training|parallelism|compile|model)\.\w"
)


def gather(files: Sequence[File], defined: Mapping[str, str], budget: Budget) -> Gathered:
    """Return the settings of all files: those of commands count over those of the TOML or the function that they name.

    ``defined`` has variables by name; CONFIG and MODULE name a function and a model where no command does.
    """
    gathered = Gathered(budget)
    tomls = [file for file in files if kind_of(file[1]) == "toml"]
    scripts = [file for file in files if kind_of(file[1]) == "script"]
    for path, text in files:
        if kind_of(text) in ("json", "yaml"):
            message = f"{path} is no TOML, no script and no module of configurations"
            gathered.findings.append(Diagnostic("PT825", message, help="name another file"))
    over: dict[str, Setting] = {}
    for path, text in scripts:
        script, unread = script_of(path, text, gathered.budget)
        gathered.findings += unread
        gathered.machines.scheduler |= slurm.machines(path, text)
        command = training_command(script, least=1, marks=_MARKS)
        if not command:
            nothing = f"{path} has no command with torchtitan's options"
            gathered.findings.append(Diagnostic("PT825", nothing, help="name another file"))
            continue
        arguments, notes = torchtitan.arguments(command, NO_EFFECT)
        gathered.findings += notes
        _environment(script, arguments)
        for name, target in torchtitan.LAUNCHER.items():
            if name in arguments:
                gathered.machines.option(arguments.pop(name), target)
        _default_nodes(command, gathered)
        if not tomls:
            tomls = _named(arguments, files, gathered)
        over |= arguments
    for path, text in tomls[:1]:
        settings, wrong = torchtitan.settings(path, text)
        gathered.settings |= settings
        gathered.findings += wrong
    for path, _ in tomls[1:]:
        gathered.findings.append(Diagnostic("PT825", f"{path} is a second configuration", help="name one of them"))
    _registry(files, over, defined, gathered, alone=not tomls)
    gathered.settings |= over
    return gathered


def _registry(
    files: Sequence[File], over: Mapping[str, Setting], defined: Mapping[str, str], gathered: Gathered, *, alone: bool
) -> None:
    """Take in the function of a module of configurations."""
    pythons = [file for file in files if kind_of(file[1]) == "python"]
    config, module = torchtitan_python.chosen(over, defined)
    for path, text in pythons[:1]:
        settings, wrong = torchtitan_python.settings(path, text, config, module, gathered.budget)
        gathered.settings |= settings
        gathered.findings += wrong
    if not pythons and alone and (option := over.get("config")) is not None:
        gathered.findings.append(
            Diagnostic(
                "PT825", f"{option.value} is a function of torchtitan's config_registry.py, which is not here",
                span=option.span, help="give that file as another FILE",
            )
        )  # fmt: skip


def _default_nodes(command: Sequence[Word], gathered: Gathered) -> None:
    """Take in that torchrun, and torchtitan's own script that calls it, start one node unless they are told more."""
    script = next((word for word in command if _OWN_SCRIPT.search(word.text)), None)
    default_nodes(gathered.machines, launcher_without_nodes(command) or script)


_OWN_SCRIPT = re.compile(r"run_(llama_)?train\.sh$")
_VARIABLES = (
    ("CONFIG_FILE", "job.config_file"), ("NGPU", "nproc_per_node"), ("CONFIG", "config"), ("MODULE", "module"),
)  # fmt: skip


def _environment(script: ShellScript, arguments: dict[str, Setting]) -> None:
    """Take the variables that torchtitan's own ``run_train.sh`` reads, where a command starts that script."""
    for variable, name in _VARIABLES:
        words: list[Word] = script.variables.get(variable, [])
        if name not in arguments and len(words) == 1:
            arguments[name] = Setting(variable, words[0].text, words[0].file, words[0].line)


def _named(arguments: dict[str, Setting], files: Sequence[File], gathered: Gathered) -> list[File]:
    setting = arguments.get("job.config_file")
    if setting is None or setting.value is True:
        return []
    file = named_file(str(setting.value), setting.file, files, gathered.budget)
    if file is None:
        gathered.findings.append(not_found(setting))
        return []
    if kind_of(file[1]) != "toml":
        message = f"{Path(file[0]).name} is no TOML"
        gathered.findings.append(Diagnostic("PT820", message, help="name a job configuration", span=setting.span))
        return []
    gathered.texts[str(file[0])] = file[1]
    return [file]
