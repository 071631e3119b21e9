"""Gathers a run of torchtitan from its files: a TOML, a script with options over it, a module of configurations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.engines import torchtitan
from partool.engines.commands import (
    File,
    Gathered,
    launched,
    missing_sources,
    named_file,
    not_found,
    training_command,
)
from partool.engines.kinds import kind_of
from partool.engines.settings import Setting
from partool.engines.shell import ShellScript, Word
from partool.engines.torchtitan_keys import NO_EFFECT

_MARKS = r"--job\.config_file|torchtitan\.train|run_(llama_)?train\.sh|--(training|parallelism|compile|model)\.\w"


def gather(files: Sequence[File]) -> Gathered:
    """Return the settings of all files: those of commands count over those of the TOML that they name."""
    found = Gathered()
    tomls = [file for file in files if kind_of(file[1]) == "toml"]
    scripts = [file for file in files if kind_of(file[1]) == "script"]
    over: dict[str, Setting] = {}
    for path, text in scripts:
        script = ShellScript()
        script.read(path, text)
        found.findings += missing_sources(path, script)
        command = training_command(script, least=1, marks=_MARKS)
        if not command:
            nothing = f"{path} has no command with torchtitan's options"
            found.findings.append(Diagnostic("PT825", nothing, help="name another file"))
            continue
        own, notes = torchtitan.arguments(command, NO_EFFECT)
        found.findings += notes
        _environment(script, own)
        launched(own, found, torchtitan.LAUNCHER)
        for name in torchtitan.LAUNCHER:
            own.pop(name, None)
        if not tomls:
            tomls = _named(own, files, found)
        over |= own
    for path, text in tomls[:1]:
        settings, wrong = torchtitan.settings(path, text)
        found.settings |= settings
        found.findings += wrong
    for path, _ in tomls[1:]:
        found.findings.append(Diagnostic("PT825", f"{path} is a second configuration", help="name one of them"))
    found.settings |= over
    return found


def _environment(script: ShellScript, own: dict[str, Setting]) -> None:
    """Take the variables that torchtitan's own ``run_train.sh`` reads, where a command starts that script."""
    for variable, name in (("CONFIG_FILE", "job.config_file"), ("NGPU", "nproc_per_node")):
        words: list[Word] = script.variables.get(variable, [])
        if name not in own and len(words) == 1:
            own[name] = Setting(variable, words[0].text, words[0].file, words[0].line)


def _named(own: dict[str, Setting], files: Sequence[File], found: Gathered) -> list[File]:
    setting = own.get("job.config_file")
    if setting is None or setting.value is True:
        return []
    file = named_file(str(setting.value), setting.file, files)
    if file is None:
        found.findings.append(not_found(setting))
        return []
    if kind_of(file[1]) != "toml":
        message = f"{Path(file[0]).name} is no TOML"
        found.findings.append(Diagnostic("PT820", message, help="name a job configuration", span=setting.span))
        return []
    found.texts[str(file[0])] = file[1]
    return [file]
