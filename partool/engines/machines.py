"""How many machines a run has, and how many devices each: what its files say beside what the user says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.engines.settings import Setting, shown, whole_of

FIELDS = {"nodes": "how many machines there are", "per_node": "how many devices a machine has"}
"""Fields of ``hardware``, and what is missing without them."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A number that a file states."""

    number: int
    name: str
    """Who says it, as a finding names it."""
    span: Span | None = None
    default: bool = False
    """Whether it is a launcher's default rather than written."""


@dataclass
class Machines:
    """What the files of a run say of its machines."""

    launcher: dict[str, Stated] = field(default_factory=dict)
    """What the options of torchrun, accelerate or deepspeed say, by the field of ``hardware``."""
    scheduler: dict[str, Stated] = field(default_factory=dict)
    """What a batch script asks its scheduler for."""
    open: list[Diagnostic] = field(default_factory=list)
    """Findings about options whose numbers only running the script would tell."""

    def option(self, setting: Setting, target: str) -> None:
        """Take in an option of a launcher that states the field ``target`` of ``hardware``."""
        number = whole_of(setting.value)
        if number is not None and number > 0:
            self.launcher[target] = Stated(number, str(setting.name), setting.span)
            return
        message = f"{setting.name} is {shown(setting.value)}, and a number is needed"
        path = ("hardware", target)
        self.open.append(Diagnostic("PT822", message, path=path, span=setting.span, help=_way_out(target)))

    def default(self, target: str, number: int, name: str, span: Span | None) -> None:
        """Take in what a launcher does where its options do not say it."""
        opened = any(each.path == ("hardware", target) for each in self.open)
        if target not in self.launcher and not opened:
            self.launcher[target] = Stated(number, name, span, default=True)

    def of_files(self, target: str) -> Stated | None:
        """Return what the files say: a launcher starts the ranks, and a scheduler only gives it machines."""
        written, asked = self.launcher.get(target), self.scheduler.get(target)
        return asked if written is None else written

    def settled(
        self, options: Mapping[str, int | None], overrides: Mapping[str, Any]
    ) -> tuple[dict[str, int], list[Diagnostic]]:
        """Return the fields of ``hardware`` that are known, and findings about contradictions and about what is not.

        ``options`` are the command's own for these fields, which must agree with the files. ``overrides`` are values by
        their paths in the spec, which count over the files.
        """
        hardware, findings = dict[str, int](), list[Diagnostic]()
        for target, what in FIELDS.items():
            path = f"hardware.{target}"
            stated, option = self.of_files(target), options.get(target)
            findings += self._disagreements(target) if path not in overrides else ()
            if path in overrides:
                override = overrides[path]
                if isinstance(override, int):
                    hardware[target] = override
                if stated is not None and stated.number != override:
                    message = f"{stated.name} is {stated.number}, and --set {path}={shown(override)} counts"
                    findings.append(Diagnostic("PT824", message, "note", span=stated.span, help="no change is needed"))
            elif stated is not None and option is not None and stated.number != option:
                hardware[target] = stated.number
                findings.append(_contradiction(stated, option, target))
            elif stated is not None:
                hardware[target] = stated.number
            elif option is not None:
                hardware[target] = option
            else:
                opened = [each for each in self.open if each.path == ("hardware", target)]
                missing = Diagnostic(
                    "PT822", f"the files do not say {what}", path=("hardware", target), help=_way_out(target)
                )
                findings += opened or [missing]
        return hardware, findings

    def _disagreements(self, target: str) -> Iterator[Diagnostic]:
        """Yield findings about a launcher and a scheduler that say different numbers."""
        written, asked = self.launcher.get(target), self.scheduler.get(target)
        if written is None or asked is None or written.number == asked.number:
            return
        message = f"{asked.name} is {asked.number}, and {written.name} is {written.number}"
        fix = f"mend the one that is wrong, or --set hardware.{target}=NUMBER"
        if written.default:
            fix = f"--{'nnodes' if target == 'nodes' else 'nproc_per_node'} {asked.number} in the script, or {fix}"
        severity: Any = "error" if written.default or written.number > asked.number else "warning"
        path = ("hardware", target)
        yield Diagnostic("PT821", message, severity, path=path, help=fix, span=written.span or asked.span)


def _contradiction(stated: Stated, option: int, target: str) -> Diagnostic:
    name = f"--{target.replace('_', '-')}"
    fix = f"remove {name}, or --set hardware.{target}={option} to price it on other machines than the files say"
    message = f"{stated.name} is {stated.number}, and {name} is {option}"
    return Diagnostic("PT821", message, path=("hardware", target), help=fix, span=stated.span)


def _way_out(target: str) -> str:
    return f"add --set hardware.{target}=VALUE, or --{target.replace('_', '-')} NUMBER of partool import"
