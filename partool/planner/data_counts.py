"""What the data of a spec hold, as far as planning can tell: tokens, samples and rows, and the steps of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from partool.diagnostics.record import Diagnostic
from partool.plan.packing import arrange, drawn
from partool.plan.token_cache import PreparedTokens, prepared
from partool.planner.rules.data_size import UncountedError, count_tokens
from partool.planner.token_estimate import estimate_tokens
from partool.spec.checks import check_steps
from partool.spec.data import DataSpec
from partool.spec.numbers import MOST_STEPS
from partool.spec.spec import Spec
from partool.spec.training import TrainingSpec
from partool.strategies.jobs import JOBS


@dataclass(frozen=True, slots=True)
class DataCounts:
    """The data of a job, without what is held out for another."""

    tokens: int | None
    """None where they cannot be counted without being tokenised."""
    rows: int | None = None
    """Sequences of one pass over the data; None where they are unknown."""
    samples: int = 0
    """Conversations, prompts with completions, or pairs of preferences, in the rows; 0 for texts."""
    documents: int = 0
    """Documents of all sources, also those that are held out or in no row; 0 where they are not counted."""
    truncated: int = 0
    """Samples that are longer than a sequence and lose a part."""
    left_out: int = 0
    """Samples that are longer than a sequence, or have no token to train on, and are in no row."""
    unknown: str = ""
    """Why the tokens are not counted, and what would tell."""


def counts_of(spec: Spec, data: DataSpec) -> DataCounts:
    """Return the counts of what a spec's job reads of its ``data`` section with absolute paths."""
    trains = JOBS[spec.job].backward
    if spec.evaluation.tasks and not trains:
        return DataCounts(None, unknown="the tasks make the requests, which a run counts once it has loaded them")
    return count_data(data, spec.training.sequence_length, trains=trains)


def count_data(data: DataSpec, sequence_length: int, *, trains: bool) -> DataCounts:
    """Return the counts of a ``data`` section with absolute paths.

    Training reads what is not held out for validation, other jobs what is, or all.
    """
    if not trains and data.validation_sets:
        return _validated(data, sequence_length)
    if not trains and data.held_out is not None:
        return _count(data.held_out, sequence_length, trains=True)
    counts = [_count(part, sequence_length, trains=trains) for part in data.parts]
    if not data.mix:
        return counts[0]
    unknown = next((each.unknown for each in counts if each.unknown), "")
    rows = [each.rows for each in counts if each.rows]
    if unknown or len(rows) < len(counts):
        return DataCounts(None, unknown=unknown or "a source of the mixture has no sequence")
    draws = drawn(rows, data.mix)
    return DataCounts(
        tokens=round(sum((each.tokens or 0) * n / row for each, n, row in zip(counts, draws, rows, strict=True))),
        rows=sum(draws),
        samples=round(sum(each.samples * n / row for each, n, row in zip(counts, draws, rows, strict=True))),
        documents=sum(each.documents for each in counts),
        truncated=sum(each.truncated for each in counts),
        left_out=sum(each.left_out for each in counts),
    )


def _validated(data: DataSpec, sequence_length: int) -> DataCounts:
    """Return the counts of all data for validation together, those without a name and the named sets."""
    counts = [_count(part, sequence_length, trains=True) for part in data.named.values()]
    if data.holds_out:
        unnamed = data.model_copy(update={"validation_sets": {}})
        counts.append(count_data(unnamed, sequence_length, trains=False))
    if unknown := next((each.unknown for each in counts if each.unknown), ""):
        return DataCounts(None, unknown=unknown)
    rows = [each.rows for each in counts if each.rows is not None]
    return DataCounts(
        tokens=sum(each.tokens or 0 for each in counts),
        rows=sum(rows) if len(rows) == len(counts) else None,
        samples=sum(each.samples for each in counts),
        truncated=sum(each.truncated for each in counts),
        left_out=sum(each.left_out for each in counts),
    )


def _count(data: DataSpec, sequence_length: int, *, trains: bool) -> DataCounts:
    """Return the counts of the only source of a section."""
    if not data.is_text:
        ready = prepared(data)
        if ready is None:
            return DataCounts(None, unknown=_estimated(data))
        return _arranged(ready, data, sequence_length, trains=trains)
    try:
        tokens = count_tokens(data)
    except UncountedError as error:
        ready = prepared(data)
        if ready is None:
            return DataCounts(None, unknown=str(error) if data.tokenizer == "bytes" else _estimated(data, str(error)))
        tokens = ready.sidecar.count
    tokens = round(tokens * (1.0 - data.validation if trains else data.validation or 1.0))
    return DataCounts(tokens, max(tokens - 1, 0) // sequence_length if data.pack else None)


def _estimated(data: DataSpec, otherwise: str = "") -> str:
    """Return why the tokens are not counted, with an estimate of their number where there is one."""
    tokens = estimate_tokens(data)
    if tokens is None:
        return otherwise or "not tokenised yet: partool data prepare SPEC counts it"
    rounded = round(tokens, 2 - len(str(tokens)))
    return f"about {rounded:,} by the files' beginnings: partool data prepare SPEC counts them"


def _arranged(ready: PreparedTokens, data: DataSpec, sequence_length: int, *, trains: bool) -> DataCounts:
    arranged = arrange(
        ready.lengths,
        sequence_length,
        truncate=data.truncate,
        pack=data.pack,
        validation=data.validation,
        pairs=data.is_preference,
    )
    rows = arranged.train if trains or not arranged.validation.count else arranged.validation
    cut = ready.lengths.tokens[rows.documents] > arranged.kept[rows.documents]
    return DataCounts(
        tokens=int(arranged.kept[rows.documents].sum()),
        rows=rows.count,
        samples=len(rows.documents) // arranged.per_sample,
        documents=len(ready.lengths.tokens),
        truncated=int(cut.reshape(-1, arranged.per_sample).any(1).sum()),
        left_out=arranged.dropped + arranged.untrained,
    )


def with_steps(spec: Spec) -> tuple[Spec, list[Diagnostic]]:
    """Return the spec with the steps that ``epochs`` or ``tokens``, and ``warmup_ratio``, come to, and findings.

    Its ``data`` section has absolute paths.
    """
    training, findings = spec.training, list[Diagnostic]()
    if training.tokens is not None:
        training = _of_steps(training, ceil(training.tokens / (training.global_batch * training.sequence_length)))
    elif training.epochs is not None:
        counts = count_data(spec.data, training.sequence_length, trains=True)
        if not counts.rows:
            return spec, [_uncounted(training, counts)]
        training = _of_steps(training, ceil(training.epochs * counts.rows / training.global_batch))
    counted = spec if training is spec.training else spec.model_copy(update={"training": training})
    if (ratio := spec.optimizer.schedule.warmup_ratio) is not None:
        warmup = {"warmup_steps": round(ratio * training.steps), "warmup_ratio": None}
        schedule = spec.optimizer.schedule.model_copy(update=warmup)
        optimizer = spec.optimizer.model_copy(update={"schedule": schedule})
        counted = counted.model_copy(update={"optimizer": optimizer})
    if spec.training.counts_later:
        findings += check_steps(counted)
    return counted, findings


def _of_steps(training: TrainingSpec, steps: int) -> TrainingSpec:
    return training.model_copy(update={"steps": min(max(steps, 1), MOST_STEPS)})


def _uncounted(training: TrainingSpec, counts: DataCounts) -> Diagnostic:
    """Return the finding about epochs of data without a number of rows."""
    why = counts.unknown or f"the data have no sequence of {training.sequence_length} tokens"
    if counts.rows is None and counts.tokens is not None:
        why = "with pack: false the number of documents is not counted"
    message = f"epochs: {training.epochs:g} cannot be turned into steps: {why}"
    help = "run partool data prepare SPEC where the data are, or write training.steps"
    return Diagnostic("PT663", message, path=("training", "epochs"), help=help)


def left_out(counts: DataCounts, data: DataSpec) -> Iterator[Diagnostic]:
    """Yield what conversations lose to the length of a sequence."""
    if not (counts.truncated or counts.left_out):
        return
    parts = []
    if counts.truncated:
        side = "end" if data.truncate == "right" else "beginning"
        parts.append(f"{counts.truncated:,} lose their {side}, as they are longer than a sequence")
    if counts.left_out:
        parts.append(f"{counts.left_out:,} are left out, as they are longer or have no token to train on")
    message = f"of {counts.samples + counts.left_out:,} samples, {' and '.join(parts)}"
    help = "a longer training.sequence_length keeps them; partool data stats SPEC shows all lengths"
    yield Diagnostic("PT661", message, "note", ("data",), help=help)
