"""Make the paths of a spec's ``data`` section absolute, and check the section before training starts."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from partool.diagnostics.record import Diagnostic, Severity
from partool.plan.data_files import PYTHON_STDLIB, NoFilesError
from partool.plan.records import DataError
from partool.plan.token_cache import TOKENISED
from partool.plan.tokenizer_folder import vocab_of
from partool.planner.rules.data_sample import sample
from partool.planner.rules.data_template import check_templates, lacks_template
from partool.planner.rules.launching import trains_here
from partool.spec.data import DataSpec, Files, RecordKind
from partool.spec.launch import LaunchSpec
from partool.spec.launch_checks import mounted
from partool.spec.prompt_checks import check_prompt_tokens
from partool.spec.spec import Spec

Place = tuple[str | int, ...]
BYTES_VOCAB = 256
_LOOKED_AT = 1000
"""Maximum number of files per source whose kind is checked, so that planning stays fast on large folders."""


@dataclass(frozen=True, slots=True)
class ResolvedData:
    """The ``data`` section with absolute paths, saying what its records are, and what was noticed on the way."""

    data: DataSpec
    vocab: int | None
    """Size of the data's vocabulary; None if unknown."""
    findings: list[Diagnostic]


def resolve_data(spec: Spec, launch: LaunchSpec, base_dir: Path) -> ResolvedData:
    """Return the ``data`` section with absolute paths and nothing left to ``auto`` but the files' formats.

    Missing files are errors if training runs on this machine, and warnings if it runs elsewhere. They are notes if a
    mount of ``launch`` (with the site profile merged in) provides the path inside the ranks' container, because the
    planning machine cannot look into the container. Files that are here and that the ranks could not read are errors,
    wherever training runs, unless such a mount puts other files at their path.
    """
    data = _absolute(spec.data, base_dir)
    look = _look(_sources(spec.data, data), data, spec, launch)
    recorded, findings = look.recorded, [*look.findings, *_mixed(look.kinds, ("data", "source"))]
    data = data.model_copy(update=look.resolved(data.records, data.attend, packed=data.pack))
    for name, written in spec.data.validation_sets.items():
        place: Place = ("data", "validation_sets", name, "source")
        part, each = data.named[name], data.validation_sets[name]
        look = _look(_named(place, written.source, each.source), part, spec, launch)
        recorded += look.recorded
        findings += [*look.findings, *_mixed(look.kinds, place)]
        asked = spec.data.attend if each.attend == "auto" else each.attend
        each = each.model_copy(update=look.resolved(each.records, asked, packed=data.pack))
        data = data.model_copy(update={"validation_sets": data.validation_sets | {name: each}})
    prompts = spec.training.validation.prompts
    reads_text = None in recorded or (bool(prompts) and data.tokenizer != "bytes")
    vocab, wrong = _vocab(spec, launch, base_dir) if reads_text else (None, [])
    vocab = max([vocab or 0, *(number or 0 for number in recorded)]) or None
    findings += wrong
    rendered = any(not isinstance(prompt, str) for prompt in prompts)
    findings += check_templates(data, lies(spec, launch, data.tokenizer), rendered=rendered)
    template = data.template is not None or not lacks_template(Path(data.tokenizer))
    findings += check_prompt_tokens(spec.training, data, of_tokens=None not in recorded, template=template)
    return ResolvedData(data, vocab, findings)


@dataclass(frozen=True, slots=True)
class _Look:
    """What a look into the files of a section shows."""

    kinds: dict[RecordKind, str]
    """Each kind of records, and the first source that holds it."""
    recorded: list[int | None]
    """Of each source, the largest vocabulary recorded for its token files; None for text."""
    findings: list[Diagnostic]

    def resolved(self, records: str, attend: str, *, packed: bool) -> dict[str, str]:
        """Return what the records hold and what a token attends to, of which either may be ``auto``."""
        records = next(iter(self.kinds), "text") if records == "auto" else records
        if attend == "auto":
            apart = records == "preference" or (records != "text" and packed)
            attend = "document" if apart else "sequence"
        return {"records": records, "attend": attend}


def _look(sources: Iterable[tuple[Place, str, str]], data: DataSpec, spec: Spec, launch: LaunchSpec) -> _Look:
    """Look into the sources of a section with absolute paths."""
    look = _Look({}, [], [])
    for place, name, path in sources:
        look.recorded.append(_recorded_vocab(data.format, path))
        severity, where = lies(spec, launch, path)
        if name == PYTHON_STDLIB:
            look.kinds.setdefault("text", name)
        elif not _exists(path):
            what, help = (path, _missing_help(name)) if "://" not in name else (name, _REMOTE)
            message = f"there are no files at {what}{where}"
            look.findings.append(Diagnostic("PT601", message, severity, place, help=help))
        else:
            kind, wrong = _sampled(path, data, of_what_is_here(spec, launch, path), place)
            look.findings.extend(wrong)
            look.kinds.setdefault(kind, name)
    return look


def _sources(written: DataSpec, data: DataSpec) -> Iterator[tuple[Place, str, str]]:
    """Yield the place in the spec, the name as written and the absolute path of each source."""
    lists: list[tuple[Place, Files, Files]] = [
        (("data", "source"), written.source, data.source),
        (("data", "validation_source"), written.validation_source, data.validation_source),
    ]
    for number, (each, resolved) in enumerate(zip(written.mix, data.mix, strict=True)):
        lists.append((("data", "mix", number, "source"), each.source, resolved.source))
    for each_list in lists:
        yield from _named(*each_list)


def _named(place: Place, names: Files, paths: Files) -> Iterator[tuple[Place, str, str]]:
    """Yield the place in the spec, the name as written and the absolute path of each source of one field."""
    if isinstance(names, str) and isinstance(paths, str):
        yield place, names, paths
        return
    for index, (name, path) in enumerate(zip(names, paths, strict=True)):
        yield (*place, index), name, path


def _absolute(data: DataSpec, base_dir: Path) -> DataSpec:
    def path(name: str) -> str:
        return name if name == PYTHON_STDLIB else str(base_dir / name)

    def paths(names: Files) -> Files:
        return path(names) if isinstance(names, str) else [path(each) for each in names]

    update = {
        "source": paths(data.source),
        "mix": [each.model_copy(update={"source": paths(each.source)}) for each in data.mix],
        "validation_source": paths(data.validation_source),
        "validation_sets": {
            name: each.model_copy(update={"source": paths(each.source)}) for name, each in data.validation_sets.items()
        },
        "tokenizer": data.tokenizer if data.tokenizer == "bytes" else path(data.tokenizer),
        "template": path(data.template) if data.template else None,
        "cache": path(data.cache) if data.cache else None,
    }
    return data.model_copy(update=update)


def _mixed(kinds: dict[RecordKind, str], place: Place) -> Iterator[Diagnostic]:
    """Yield a finding if sources hold records of different kinds."""
    if len(kinds) > 1:
        (first, one), (second, other) = list(kinds.items())[:2]
        message = f"{one} holds {first} data and {other} {second} data; one run trains on one kind"
        help = f"train on them one after the other, or set data.records: {first} if {other} holds the same"
        yield Diagnostic("PT665", message, path=place, help=help)


_REMOTE = "data are read from files: copy them to a disk of the nodes, or mount the bucket there"
_ON_A_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z][\w-]*")
_HELP = "a file, a folder, a glob such as data/**/*.txt, or python-stdlib"


def _missing_help(written: str) -> str:
    """Return help for a source without files: a word, or two with a slash, may be a data set's name on a hub."""
    if _ON_A_HUB.fullmatch(written) is None:
        return _HELP
    folder = written.rpartition("/")[2]
    download = f"hf download {written} --repo-type dataset --local-dir {folder}"
    return f"{_HELP}; if it is a data set on the Hugging Face hub: {download}, then source: '{folder}/**/*.parquet'"


def _sampled(
    path: str, data: DataSpec, severity: Severity, place: tuple[str | int, ...]
) -> tuple[RecordKind, list[Diagnostic]]:
    """Return what a source's records hold, and a finding about the first that the ranks would refuse."""
    assumed: RecordKind = "text" if data.records == "auto" else data.records
    try:
        return sample(path, data) or assumed, []
    except NoFilesError as error:
        return assumed, [Diagnostic("PT601", str(error), severity, place, help=_HELP)]
    except DataError as error:
        return assumed, [Diagnostic("PT602", str(error), severity, place, help=error.help)]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return assumed, [Diagnostic("PT601", f"{path} cannot be read: {reason}", severity, place, help=_HELP)]


def lies(spec: Spec, launch: LaunchSpec, path: str) -> tuple[Severity, str]:
    """Return the severity and the end of the message of a finding about a path that is missing on this machine."""
    if trains_here(spec):
        return "error", ""
    if (source := mounted(launch, path)) is not None:
        return "note", f" on this machine; the ranks see {source} there"
    return "warning", " on this machine"


def of_what_is_here(spec: Spec, launch: LaunchSpec, path: str) -> Severity:
    """Return the severity of a finding about files that exist on this machine: error, or note below a mount."""
    return "error" if trains_here(spec) or mounted(launch, path) is None else "note"


def _exists(pattern: str) -> bool:
    if glob.has_magic(pattern):
        return next(glob.iglob(pattern, recursive=True), None) is not None
    return os.path.exists(pattern)  # False for too long a name; Path.exists would raise


def _recorded_vocab(format: str, path: str) -> int | None:
    """Return the largest vocabulary size recorded for the source's token files; 0 if none is recorded, None for text.

    Token files need no tokenizer. A folder counts as text if at least one of its files is not a token file.
    """
    if format in TOKENISED or path == PYTHON_STDLIB:
        return None
    if os.path.isdir(path):
        # Hidden files and folders are skipped, as the ranks do.
        names: Iterator[str] = (
            os.path.join(root, name)
            for root, _, files in os.walk(path)
            for name in files
            if not any(part.startswith(".") for part in os.path.relpath(os.path.join(root, name), path).split(os.sep))
        )
    else:
        names = glob.iglob(path, recursive=True) if glob.has_magic(path) else iter([path])
    tokens, vocab = format != "auto" or path.endswith(".bin"), 0
    for name in islice(names, _LOOKED_AT):
        ending = os.path.splitext(name)[1].lower()
        if ending == ".bin":
            tokens, vocab = True, max(vocab, _vocab_beside(Path(name)))
        elif ending not in (".idx", ".json") and format == "auto":
            return None
    return vocab if tokens else None


def _vocab_beside(file: Path) -> int:
    """Return the vocabulary size recorded in the sidecar of a token file; 0 if there is no sidecar."""
    try:
        return max(0, int(json.loads(file.with_suffix(".json").read_bytes())["vocab"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0


def _vocab(spec: Spec, launch: LaunchSpec, base_dir: Path) -> tuple[int | None, list[Diagnostic]]:
    if spec.data.tokenizer == "bytes":
        return BYTES_VOCAB, []
    folder = base_dir / spec.data.tokenizer
    file = folder / "tokenizer.json"
    severity, where = lies(spec, launch, str(file))
    try:
        return vocab_of(folder, spec.data.special_tokens), []
    except FileNotFoundError as error:
        message = f"{file} cannot be read{where}: {error.strerror}"
    except OSError as error:
        severity = of_what_is_here(spec, launch, str(file))
        message = f"{file} cannot be read: {error.strerror}"
    except DataError as error:
        severity = of_what_is_here(spec, launch, str(file))
        message = str(error)
    help = "`bytes`, or a folder with a tokenizer.json"
    if _ON_A_HUB.fullmatch(spec.data.tokenizer):
        help += f"; from the Hugging Face hub: hf download {spec.data.tokenizer} tokenizer.json --local-dir DIR"
    return None, [Diagnostic("PT603", message, severity=severity, path=("data", "tokenizer"), help=help)]
