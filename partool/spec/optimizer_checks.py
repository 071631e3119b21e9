"""Rules about the optimizer and its groups that a spec can break by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.spec.training import OptimizerGroup, OptimizerName, OptimizerSpec
from partool.strategies.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from partool.spec.spec import Spec

Path = tuple[str | int, ...]
_SETTINGS = ("betas", "momentum", "eps")
"""Those that not every optimizer reads."""


def check_optimizer(spec: Spec) -> Iterator[Diagnostic]:
    """Find weights of moments out of range, and settings that the optimizer does not read."""
    optimizer = spec.optimizer
    yield from _settings(optimizer.name, optimizer, ("optimizer",))
    for pattern, group in optimizer.groups.items():
        yield from _settings(optimizer.name, group, ("optimizer", "groups", pattern))


def _settings(name: OptimizerName, settings: OptimizerSpec | OptimizerGroup, path: Path) -> Iterator[Diagnostic]:
    yield from _betas(settings.betas, (*path, "betas"))
    yield from _unread(name, settings, path)


def _betas(betas: list[float] | None, path: Path) -> Iterator[Diagnostic]:
    for index, beta in enumerate(betas or ()):
        if not 0.0 <= beta < 1.0:
            message = f"betas[{index}] is {beta}, and must lie in [0, 1)"
            yield Diagnostic("PT216", message, path=(*path, index), help="the usual pair is [0.9, 0.95]")


def _unread(name: OptimizerName, settings: OptimizerSpec | OptimizerGroup, path: Path) -> Iterator[Diagnostic]:
    for setting in _SETTINGS:
        default = type(settings).model_fields[setting].default
        if setting not in OPTIMIZERS[name].reads and getattr(settings, setting) != default:
            reads = " and ".join(OPTIMIZERS[name].reads)
            readers = " or ".join(other for other, record in OPTIMIZERS.items() if setting in record.reads)
            message = f"{setting} is a setting of {readers}; {name} reads {reads}"
            yield Diagnostic("PT226", message, path=(*path, setting), help=f"drop {setting}, or set {reads}")
