"""Rules of ``parallel.sequence`` and of packed documents that need neither the model nor the machines."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.parallel import Sequence
from partool.spec.spec import Spec
from partool.strategies.sequence import ANY_ORDER, METHODS, ON_GRIDS, OWNERS

_PATH = ("parallel", "sequence")


def methods_of(sequence: Sequence) -> tuple[str, ...]:
    """Return the names of the methods that a spec's ``sequence`` fields allow, in the order of ``METHODS``."""
    methods = tuple(METHODS) if sequence.method == "auto" else (sequence.method,)
    for name, owners in OWNERS.items():
        if getattr(sequence, name) != "auto":
            methods = tuple(method for method in methods if method in owners)
    if sequence.order == "zigzag":
        methods = tuple(method for method in methods if method in ANY_ORDER)
    elif sequence.order == "contiguous":
        methods = tuple(method for method in methods if method not in ON_GRIDS)
    return methods


def check_sequence(spec: Spec) -> Iterator[Diagnostic]:
    """Yield findings about fields that the method does not read, and about documents that are not packed."""
    sequence = spec.parallel.sequence
    if not methods_of(sequence):
        yield from _foreign(sequence)
    elif sequence.degree == 1:
        yield from _unread(sequence)
    if spec.data.attend == "document" and not spec.data.pack and not spec.data.is_preference:
        message = "attend: document separates documents that share a sequence; with pack: false none do"
        yield Diagnostic("PT472", message, path=("data", "attend"), help="set pack: true, or drop attend")


def _unread(sequence: Sequence) -> Iterator[Diagnostic]:
    """Yield one finding for all fields that are not read because each sequence is on one rank."""
    given = [name for name in ("method", *OWNERS, "order") if getattr(sequence, name) != "auto"]
    if not given:
        return
    read = "is" if len(given) == 1 else "are"
    message = f"degree: 1 leaves each sequence on one rank; {_listed(tuple(given))} {read} not read"
    help = "drop them, or set degree: auto or a number of ranks"
    yield Diagnostic("PT465", message, severity="warning", path=(*_PATH, given[0]), help=help)


def _foreign(sequence: Sequence) -> Iterator[Diagnostic]:
    """Yield one finding about the first field that no method reads together with all fields before it."""
    given = [name for name in (*OWNERS, "order") if getattr(sequence, name) != "auto"]
    alone = sequence.model_copy(update=dict.fromkeys(given, "auto"))
    for name in given:
        alone = alone.model_copy(update={name: getattr(sequence, name)})
        if methods_of(alone):
            continue
        value = getattr(sequence, name)
        owners = OWNERS.get(name) or (ANY_ORDER if value == "zigzag" else ("any method but dsp",))
        message = f"{name}: {value} belongs to {_listed(owners)}"
        message += f", not to {sequence.method}" if sequence.method != "auto" else f", and {given[0]} to another method"
        help = f"drop {name}" + ("" if owners[0].startswith("any") else f", or set method: {owners[0]}")
        yield Diagnostic("PT465", message, path=(*_PATH, name), help=help)
        return


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
