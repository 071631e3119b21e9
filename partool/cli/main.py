"""The command line; a command's module is imported only when the command is called."""

from __future__ import annotations

import functools
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from partool.cli import INTERRUPTED, INTERRUPTED_MESSAGE

COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("partool.cli.init", "Write a spec to start from."),
    "import": ("partool.cli.import_", "Read a run of DeepSpeed or Megatron-LM into a spec."),
    "data": ("partool.cli.data", "Tokenise a spec's data, count them, and show what the model sees."),
    "plan": ("partool.cli.plan", "Check a spec, find the layout, predict memory and time."),
    "render": ("partool.cli.render", "Print what launch would submit."),
    "launch": ("partool.cli.launch", "Plan a spec and train it, here or on a cluster."),
    "status": ("partool.cli.status", "Show how a run is doing."),
    "logs": ("partool.cli.logs", "Show what the ranks of a run printed."),
    "top": ("partool.cli.top", "Follow a run as it trains."),
    "eval": ("partool.cli.eval", "Judge a model: held-out loss, or tasks of lm_eval."),
    "report": ("partool.cli.report", "Show a run: how it ended, its curves, measured beside planned."),
    "compare": ("partool.cli.compare", "Set runs side by side: curves, specs and results."),
    "profile": ("partool.cli.profile", "Profile steps of a running job, and say where their time goes."),
    "list": ("partool.cli.list", "List the runs."),
    "cancel": ("partool.cli.cancel", "Stop a run, with a checkpoint."),
    "doctor": ("partool.cli.doctor", "Check whether runs can be launched, and where not, why."),
    "export": ("partool.cli.export", "Write a run's weights for other tools."),
    "schedule": ("partool.cli.schedule", "Print, draw, check and compare pipeline schedules."),
    "calibrate": ("partool.cli.calibrate", "Measure this machine, or learn from its finished runs."),
    "tune": ("partool.cli.tune", "Measure which configurations of kernels are fastest on this GPU."),
    "explain": ("partool.cli.explain", "Explain a rule such as PT203, or a term such as gathered."),
    "schema": ("partool.cli.schema", "Print the JSON Schema of specs."),
}
"""Name of a command → (module with its function ``command``, one line of help)."""

_JSON = {
    **dict.fromkeys(
        (
            "compare",
            "data",
            "eval",
            "plan",
            "report",
            "profile",
            "status",
            "list",
            "doctor",
            "calibrate",
            "tune",
            "schedule",
        ),
        "write --output json; ",
    ),
    "schema": "it prints JSON without an option; ",
    "top": "partool status RUN --output json; ",
    "render": "partool plan SPEC --out FILE writes the plan as JSON; ",
    "launch": "partool status RUN --output json, once it is launched; ",
    "logs": "the run's folder has them in events/rank-N.jsonl; ",
    "import": "partool plan SPEC --output json, once the spec is written; ",
}
"""Name of a command → what to do in place of the option ``--json``, which other tools have."""
_COMPLETE = "_PARTOOL_COMPLETE"
"""Environment variable by which a shell asks for completions."""
_USAGE = 2
_BROKEN_PIPE = 141


class _ReaderGoneError(Exception):
    """Raised if the program that reads a command's output has closed the pipe."""


def run(arguments: Sequence[str] | None = None, loaded: Callable[[], None] | None = None) -> None:
    """Run the command that ``arguments`` name and exit with its code.

    ``loaded`` is called once the command's modules are loaded, before the command does anything.
    """
    _ready_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or bool(os.environ.get("PARTOOL_DEBUG"))
    words = [word for word in words if word != "--debug"]
    if _COMPLETE in os.environ or words[:1] in (["--install-completion"], ["--show-completion"]):
        from partool.cli._completion import complete

        complete(COMMANDS, words, _COMPLETE)
    if not words or words[0] in ("--help", "-h", "help"):
        _say(_help())
        sys.exit(0 if words else _USAGE)
    if words[0] in ("--version", "-V"):
        from partool.version import __version__

        _say(f"partool {__version__}\n")
        sys.exit(0)
    if words[0] not in COMMANDS:
        _unknown(words[0])
    _guarded(words[0], words[1:], loaded, debug=debug)


def _ready_streams() -> None:
    """End lines alike on every system, and print ``?`` for characters that an output's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            narrow = stream.encoding.lower().replace("_", "-") not in ("utf-8", "utf8")
            stream.reconfigure(newline="\n", errors="replace" if narrow else None)


def _guarded(name: str, words: list[str], loaded: Callable[[], None] | None, *, debug: bool) -> None:
    """Call a command; an internal error of partool is printed as one line or, if ``debug`` is True, as a traceback."""
    try:
        code = _call(name, words, loaded)
        sys.stdout.flush()
    except (BrokenPipeError, _ReaderGoneError):
        # The reader, such as head, has gone. Python would report the broken pipe once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)
    except KeyboardInterrupt:  # within a command, typer handles it
        _interrupted()
    except Exception as error:
        if _by_interrupt(error):
            _interrupted()
        if (usage := _usage(name, error)) is not None:
            _say(usage, err=True)
            sys.exit(_USAGE)
        if debug:
            raise
        text = str(error) or type(error).__name__
        _say(f"error: {text}\n  help: partool --debug {name} ... shows where this comes from\n", err=True)
        sys.exit(1)
    sys.exit(code)


def _interrupted() -> NoReturn:
    _say(INTERRUPTED_MESSAGE, err=True)
    sys.exit(INTERRUPTED)


def _by_interrupt(error: BaseException) -> bool:
    """Return True if an interrupt caused the error: a module that a command loads late may have wrapped it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _usage(name: str, error: Exception) -> str | None:
    """Return the message for an error in the use of a command, in partool's format; None for other kinds of error."""
    if not hasattr(error, "format_message"):  # only typer's errors have this method; their classes are not exported
        return None
    parameter = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and parameter is not None:
        text = f"partool {name} needs {parameter.metavar or parameter.name.upper()}"
    else:
        text = str(error.format_message()).replace("Value error, ", "").rstrip(".")
        text = text[:1].lower() + text[1:]
    first = "partool init writes a spec to start from; " if "SPEC" in text else ""
    if getattr(error, "option_name", "") == "--json":
        text, first = "no such option: --json", _JSON.get(name, "this command has no JSON form; ")
    return f"error: {text}\n  help: {first}partool {name} --help says more\n"


def _call(name: str, words: list[str], loaded: Callable[[], None] | None) -> int:
    # Imported objects live until the process ends; scanning them for garbage takes a tenth of the time of a small plan.
    gc.disable()
    # partool has no plugins of pydantic; looking for some reads the metadata of all installed packages.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    with _one_thread():
        app.command(name)(_heedful(importlib.import_module(COMMANDS[name][0]).command))
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    if loaded is not None:
        loaded()
    code = app(args=words, prog_name=f"partool {name}", standalone_mode=False)
    return code if isinstance(code, int) else 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have numpy start one thread only: its default threads spin at first, which takes a tenth of a small plan's time.

    Processes that partool starts do not inherit the variable, as it would also limit matrix products of training.
    """
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def _heedful(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that click does not handle a broken pipe: it would exit with 1, the code for spec errors."""

    @functools.wraps(command)
    def call(*words: object, **options: object) -> None:
        try:
            command(*words, **options)
        except BrokenPipeError:
            raise _ReaderGoneError from None

    return call


def _unknown(name: str) -> None:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    kind = "option" if name.startswith("-") else "command"
    hint = f"did you mean `{near[0]}`?" if near else "partool --help lists the commands"
    _say(f"error: there is no {kind} {name!r}\n  help: {hint}\n", err=True)
    sys.exit(_USAGE)


def _say(text: str, *, err: bool = False) -> None:
    from partool.plan.terminal import say

    try:
        say(text, err=err, nl=False)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "".join(f"  {name.ljust(width)}  {text}\n" for name, (_, text) in COMMANDS.items())
    return f"""\
Plan, launch and run distributed training from one YAML file.

Usage: partool COMMAND [ARGUMENTS]   (partool COMMAND --help says more)

Commands:
{rows}
Options:
  --version                     Print the version.
  --debug                       Show tracebacks, with any command.
  --install-completion [SHELL]  Complete commands in bash, zsh or fish.
  --show-completion [SHELL]     Print the script that does so.

Documentation: {_documentation()}
  partool explain WORD explains a finding (PT203) or a term (gathered),
  partool schema --markdown lists every field of a spec.
"""


def _documentation() -> str:
    """Return where the documentation is: its page in a checkout, or its place in the repository."""
    page = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "README.md")
    return os.path.realpath(page) if os.path.isfile(page) else "docs/README.md in partool's repository"
