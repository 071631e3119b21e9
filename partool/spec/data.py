"""The ``data`` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from partool.spec._base import Section, shorthand
from partool.spec.numbers import Epochs, Factor
from partool.spec.patterns import FilePath, SetName

DataFormat = Literal["auto", "text", "jsonl", "parquet", "arrow", "tokens", "megatron"]
RecordKind = Literal["text", "chat", "instruct", "preference"]
Trained = Literal["assistant", "last", "all"]
Truncation = Literal["right", "left", "drop"]
Files = FilePath | list[FilePath]

_Key = Annotated[str, Field(min_length=1)]


class MixedSource(Section):
    """A source of a mixture; each keeps its own order, and the mixture draws from them in a fixed one."""

    source: Files
    """Files, globs, folders, or ``python-stdlib``."""
    weight: Factor | None = None
    """Share of the sequences, in relation to the other sources' weights. An epoch of the mixture ends before any
    source would be repeated."""
    epochs: Epochs | None = None
    """Passes over this source in one epoch of the mixture, such as 0.5 or 3; default without weights: 1."""


class ValidationSet(Section):
    """Data for validation alone, whose figures have the set's name; a bare value is the source."""

    source: Files
    """Files, globs, folders, or ``python-stdlib``."""
    format: DataFormat = "auto"
    """Format of the files, as in ``data.format``; auto follows the file's ending."""
    records: RecordKind | Literal["auto"] = "auto"
    """What a record holds, as in ``data.records``; auto: what the keys of the set's own first records say."""
    text_field: str | None = None
    """Key of the text; default: ``data.text_field``."""
    keys: dict[_Key, _Key] | None = None
    """Keys of the records; default: ``data.keys``."""
    roles: dict[_Key, _Key] | None = None
    """Roles by the names that the records give them; default: ``data.roles``."""
    loss: Trained | None = None
    """Messages whose tokens count; default: ``data.loss``."""
    attend: Literal["auto", "sequence", "document"] = "auto"
    """Earlier tokens that a token attends to; auto: as ``data.attend``, and if that is auto by the set's records."""


class DataSpec(Section):
    """Training text, tokens, conversations or preferences (docs/guide/data.md, docs/guide/fine-tuning.md)."""

    source: Files = []
    """Files, globs, folders, or ``python-stdlib`` (the running interpreter's standard library)."""
    mix: list[MixedSource] = []
    """Several sources, in place of ``source``, with a share or a number of passes each."""
    format: DataFormat = "auto"
    """tokens: .bin of uint16/uint32 with a .json sidecar; megatron: .bin with .idx; arrow: a folder that
    ``datasets.save_to_disk`` wrote. auto follows the file's ending."""
    records: RecordKind | Literal["auto"] = "auto"
    """What a record of JSONL, Parquet or Arrow files holds: a text; a conversation (``messages``); a ``prompt`` with
    its ``completion``; a prompt with a ``chosen`` and a ``rejected`` answer. auto: what the keys of the first records
    say."""
    tokenizer: FilePath = "bytes"
    """``bytes``, or the path of a Hugging Face tokenizer folder."""
    special_tokens: list[_Key] = []
    """Tokens that are added to the tokenizer, such as ``<|im_start|>``, if it lacks them; ``model.vocab`` must have
    room for them."""
    text_field: str = "text"
    """Key of the text in JSONL records, or its column in Parquet files."""
    keys: dict[_Key, _Key] = {}
    """Keys of the records by the keys that partool reads: ``{messages: dialogue, role: speaker, content: said}``."""
    roles: dict[_Key, _Key] = {}
    """Roles by the names that the records give them, as in ``{bot: assistant}``; ShareGPT's are read without it."""
    template: FilePath | None = None
    """File of the chat template; default: the template in the tokenizer's folder."""
    loss: Trained = "assistant"
    """Messages whose tokens are trained on: the assistant's, only its last one, or all of the conversation's."""
    truncate: Truncation = "right"
    """What conversations that are longer than a sequence lose: their end, their beginning, or ``drop``: they are left
    out."""
    pack: bool = True
    """True: several documents share a sequence. Texts follow each other without gaps; conversations, and prompts with
    completions, are never cut at the end of a sequence. False: one document per sequence, cut or padded."""
    attend: Literal["auto", "sequence", "document"] = "auto"
    """Earlier tokens that a token attends to: all of its sequence, or with ``pack`` only the tokens of its document.
    auto: sequence for texts, document for everything else."""
    validation: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of documents held out for validation."""
    validation_source: Files = []
    """Files for validation, in place of a share of the documents."""
    validation_sets: dict[SetName, Annotated[ValidationSet, BeforeValidator(shorthand("source", str, list))]] = {}
    """Further data for validation by name, such as ``{code: code.jsonl}``, each with figures of its own:
    ``code/loss``."""
    cache: FilePath | None = None
    """Folder for the token cache; default: the user's cache folder."""

    @property
    def is_text(self) -> bool:
        """Whether records are texts; ``auto`` counts as text where nobody has looked into the files."""
        return self.records in ("auto", "text")

    @property
    def parts(self) -> list[DataSpec]:
        """The section of each source that is trained on: those of the mixture, else this section itself."""
        return [self.model_copy(update={"source": each.source, "mix": []}) for each in self.mix] or [self]

    @property
    def held_out(self) -> DataSpec | None:
        """The section of files that are for validation alone; None without such files."""
        return self._alone({"source": self.validation_source}) if self.validation_source else None

    @property
    def named(self) -> dict[str, DataSpec]:
        """The section of each named set for validation, in the order of the names.

        Where the training's tokens attend to all of their sequence, a document that is to be attended to by itself has
        a sequence of its own.
        """
        sections = {}
        for name, each in sorted(self.validation_sets.items()):
            update = {
                field: value for field in ValidationSet.model_fields if (value := getattr(each, field)) is not None
            }
            update["pack"] = self.pack and (each.attend != "document" or self.separates)
            sections[name] = self._alone(update)
        return sections

    def _alone(self, update: dict[str, Any]) -> DataSpec:
        """Return the section of data for validation alone, which differs from this one in ``update``."""
        nothing: dict[str, Any] = {"mix": [], "validation": 0.0, "validation_source": [], "validation_sets": {}}
        return self.model_copy(update=nothing | update)

    @property
    def every_part(self) -> list[DataSpec]:
        """The sections of all sources: those that are trained on, that of files for validation, and the named sets."""
        return [*self.parts, *([] if self.held_out is None else [self.held_out]), *self.named.values()]

    @property
    def every_source(self) -> list[str]:
        """Every source that is read, as the section names it."""
        sources = [part.source for part in self.every_part]
        return [name for each in sources for name in ([each] if isinstance(each, str) else each)]

    @property
    def holds_out(self) -> bool:
        """Whether data without a name are for validation: a share, or files."""
        return bool(self.validation or self.validation_source)

    @property
    def validations(self) -> int:
        """Number of the sets of data for validation, of which one has no name."""
        return self.holds_out + len(self.validation_sets)

    @property
    def validates(self) -> bool:
        """Whether some data are for validation."""
        return self.validations > 0

    @property
    def separates(self) -> bool:
        """Whether a sequence holds several documents and tokens attend only to tokens of their document."""
        return self.is_preference or (self.pack and self.attend == "document")

    @property
    def is_preference(self) -> bool:
        """Whether each record gives two documents, of which the first is preferred."""
        return self.records == "preference"
