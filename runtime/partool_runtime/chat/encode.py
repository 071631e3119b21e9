"""Conversations and completions become token ids, and for each token whether it is trained on."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partool.plan.conversations import Completion, Conversation
from partool.spec.data import DataSpec
from partool_runtime.chat._checks import template_notes, turn_end
from partool_runtime.chat._folder import special_tokens_of
from partool_runtime.chat.spans import Loss, TrainedText, message_ends, trained_text
from partool_runtime.chat.template import DATE, ChatTemplate, Span
from partool_runtime.errors import ConfigurationError
from partool_runtime.fast_tokenizer import open_fast, vocab_of

Sample = Conversation | Completion
TokenIds = npt.NDArray[np.uint32]
LossMask = npt.NDArray[np.uint8]

_VERSION = 1
"""Changes when equal settings give other tokens or masks than before."""
_BATCH = 512
"""Samples that the library tokenises at a time."""
_NAMED = 8
"""Conversations that an error names beside the first, of those in a batch."""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What an encoder is made of; ``template`` is a file that takes the place of the folder's own template."""

    folder: Path
    template: Path | None = None
    loss: Loss = "assistant"
    date: datetime.date = DATE
    special_tokens: tuple[str, ...] = ()
    """Tokens that the folder's tokenizer gets in addition."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a sample."""

    ids: TokenIds
    loss: LossMask
    """1 for each token that is trained on."""
    untrained: tuple[int, ...] = ()
    """Messages of the assistant, counted from 0, that are selected for training and have no trained token."""
    messages: npt.NDArray[np.int32] | None = None
    """For each token its message, counted from 0, or -1 where the template does not show it; only if asked for."""

    @property
    def fault(self) -> str:
        """What makes the sample useless, in words for a count; empty for a good one."""
        if not len(self.ids):
            return "no messages or text"
        return "" if self.loss.any() else "no token to train on"


class Encoder:
    """Encodes samples with the tokenizer and the chat template of a Hugging Face folder.

    Special tokens are those that the template writes, and no others: a beginning-of-sequence token comes once. A
    completion is the tokens of its prompt, those of its text and the end-of-sequence token; a beginning-of-sequence
    token comes first where the tokenizer puts one before plain text.

    ``identity`` differs wherever tokens or masks may differ. ``vocab`` is the exclusive upper bound of ids.
    Raises ConfigurationError: PT603 for a tokenizer, PT606 for a template that cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        template: Path | None = None,
        loss: Loss = "assistant",
        *,
        date: datetime.date = DATE,
        special_tokens: Sequence[str] = (),
    ) -> None:
        self.settings = EncoderSettings(folder, template, loss, date, tuple(special_tokens))
        self._fast, content = open_fast(folder, special_tokens)
        self.vocab = vocab_of(self._fast)
        self._named = special_tokens_of(folder)
        added = self._fast.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)
        self._template: ChatTemplate | None = None
        self._refusal: ConfigurationError | None = None
        try:
            self._template = ChatTemplate.from_folder(folder, template, date=date)
        except ConfigurationError as error:
            if template is not None or error.code != "PT606":
                raise
            self._refusal = error  # prompts with completions need no template
        identity = [_VERSION, content, self._template and self._template.identity, loss, sorted(self._named.items())]
        self.identity = hashlib.sha256(repr(identity).encode()).hexdigest()

    @classmethod
    def of_settings(cls, settings: EncoderSettings) -> Encoder:
        """Return the encoder that ``settings`` describe."""
        date, special_tokens = settings.date, settings.special_tokens
        return cls(settings.folder, settings.template, settings.loss, date=date, special_tokens=special_tokens)

    @classmethod
    def of_data(cls, data: DataSpec) -> Encoder:
        """Return the encoder of a ``data`` section, whose paths are absolute."""
        template = None if data.template is None else Path(data.template)
        return cls(Path(data.tokenizer), template, data.loss, special_tokens=data.special_tokens)

    @property
    def template(self) -> ChatTemplate:
        """The chat template; raises ConfigurationError PT606 if the folder has none that can be used."""
        if self._template is None:
            assert self._refusal is not None
            raise self._refusal
        return self._template

    def notes(self) -> tuple[str, ...]:
        """Return what is doubtful about the template in sentences: ends of turns that are not trained on."""
        return template_notes(self.template, self.special_tokens)

    def turn_end(self) -> int | None:
        """Return the token that ends an answer and is trained on; None if none does.

        Raises ConfigurationError PT606 if there is no template.
        """
        text = turn_end(self.template, self.special_tokens)
        token = None if text is None else self._fast.token_to_id(text)
        return None if token is None else int(token)

    def encode(self, samples: Sequence[Sample], *, messages: bool = False) -> list[Encoded]:
        """Return the tokens of each sample, with the message of each token if ``messages``.

        A conversation without messages has no tokens. Raises ConfigurationError: PT607 if the template refuses a
        conversation, PT608 if the tokens to train on cannot be told.
        """
        encoded: list[Encoded] = []
        for start in range(0, len(samples), _BATCH):
            encoded += self._encode_batch(samples[start : start + _BATCH], messages)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return str(self._fast.decode(list(ids), skip_special_tokens=False))

    def prompt(self, prompt: str | Conversation, *, begins: bool) -> list[int]:
        """Return the tokens of what the model is to continue.

        A conversation ends where the assistant begins. With ``begins`` a text starts as a prompt with a completion
        does. Raises ConfigurationError PT606 or PT607 as :meth:`encode` does.
        """
        text = prompt if isinstance(prompt, str) else self.template.render(prompt, add_generation_prompt=True).text
        ids = [int(token) for token in self._fast.encode(text, add_special_tokens=False).ids]
        prefix = self._prefix() if begins and isinstance(prompt, str) else []
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def ends(self) -> frozenset[int]:
        """Return the tokens that end a text or an answer, as far as the folder and the template tell."""
        eos = self._fast.token_to_id(self._named.get("eos_token", ""))
        try:
            turn = None if self._template is None else self.turn_end()
        except ConfigurationError:  # a template that refuses the question may take the prompts
            turn = None
        return frozenset(token for token in (eos, turn) if token is not None)

    def _trained_texts(self, conversations: Sequence[Conversation]) -> list[TrainedText]:
        """Return the rendered conversations; raises one ConfigurationError that names all that cannot be used."""
        texts: list[TrainedText] = []
        refused: list[tuple[str, ConfigurationError]] = []
        template = self.template if conversations else None  # prompts with completions need none
        for one in conversations:
            assert template is not None
            try:
                texts.append(trained_text(template, one, self.settings.loss, self.special_tokens))
            except ConfigurationError as error:
                refused.append((one.origin, error))
        if refused:
            raise _of_all(refused)
        return texts

    def _encode_batch(self, samples: Sequence[Sample], messages: bool) -> list[Encoded]:
        results: dict[int, Encoded] = {}
        conversations = [(i, one) for i, one in enumerate(samples) if isinstance(one, Conversation) and one.messages]
        texts = self._trained_texts([one for _, one in conversations])
        encodings = self._fast.encode_batch([text.text for text in texts], add_special_tokens=False)
        for (index, one), text, encoding in zip(conversations, texts, encodings, strict=True):
            ends = self._message_ends(one) if messages else None
            results[index] = _encoded_conversation(text, encoding, ends)
        completions = [(i, one) for i, one in enumerate(samples) if isinstance(one, Completion)]
        results.update(self._completions(completions))
        empty = Encoded(np.zeros(0, np.uint32), np.zeros(0, np.uint8))
        return [results.get(index, empty) for index in range(len(samples))]

    def _message_ends(self, conversation: Conversation) -> list[int]:
        try:
            return message_ends(self.template, conversation)
        except ConfigurationError as error:
            if error.code != "PT608":
                raise
            return []

    def _completions(self, completions: list[tuple[int, Completion]]) -> dict[int, Encoded]:
        if not completions:
            return {}
        prefix, eos = self._prefix(), self._eos()
        texts = [one.completion.removesuffix(self._named["eos_token"]) for _, one in completions]
        prompts = self._fast.encode_batch_fast([one.prompt for _, one in completions], add_special_tokens=False)
        joined = [one.prompt + text for (_, one), text in zip(completions, texts, strict=True)]
        together = self._fast.encode_batch(joined, add_special_tokens=False)
        results = {}
        for (index, one), text, prompt, encoding in zip(completions, texts, prompts, together, strict=True):
            ids = list(prompt.ids)
            begun = bool(prefix) and ids[:1] == prefix
            answer = self._answer(len(one.prompt), ids, text, encoding)
            start = [] if begun else prefix
            tokens = [*start, *ids, *answer, eos]
            loss = np.ones(len(tokens), np.uint8)
            loss[: len(start) + len(ids)] = 1 if self.settings.loss == "all" else 0
            results[index] = Encoded(np.asarray(tokens, np.uint32), loss)
        return results

    def _answer(self, border: int, prompt: list[int], text: str, together: Any) -> list[int]:
        """Return the tokens of a completion behind the tokens of its prompt.

        They are those of both texts together if a token ends where the prompt ends and the prompt's tokens are those
        that it has alone, as it is given when the model answers. Otherwise the completion is encoded behind a line
        break, so that a tokenizer that puts a space before a text puts none before it.
        """
        count = len(prompt)
        if together.ids[:count] == prompt and all(start >= border for start, _ in together.offsets[count:]):
            return list(together.ids[count:])
        behind = self._fast.encode("\n" + text, add_special_tokens=False)
        first = next((i for i, (start, _) in enumerate(behind.offsets) if start >= 1), len(behind.ids))
        if all(end <= 1 for _, end in behind.offsets[:first]):
            return list(behind.ids[first:])
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def _prefix(self) -> list[int]:
        """Return the beginning-of-sequence token in a list if the tokenizer puts it before a text, else no token."""
        bos = self._fast.token_to_id(self._named.get("bos_token", ""))
        first = self._fast.encode("", add_special_tokens=True).ids[:1]
        return list(first) if bos is not None and first == [bos] else []

    def _eos(self) -> int:
        text = self._named.get("eos_token")
        token = None if text is None else self._fast.token_to_id(text)
        if token is None:
            what = "names no eos_token" if text is None else f"names eos_token {text!r}, which tokenizer.json lacks"
            message = f"{self.settings.folder / 'tokenizer_config.json'} {what}: the model would never learn to stop"
            raise ConfigurationError("PT603", message, "name the token that ends a text as eos_token")
        return int(token)


def _encoded_conversation(text: TrainedText, encoding: Any, ends: list[int] | None) -> Encoded:
    ids = np.asarray(encoding.ids, np.uint32)
    offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
    span_of_token, loss = _overlaps(offsets, text.spans)
    every = text.spans == ((0, len(text.text)),) and text.messages == (None,)
    trained = {text.messages[span] for span in np.unique(span_of_token[loss])}
    untrained = tuple(i for i in text.selected if i not in trained)
    roles = None if ends is None else _messages(offsets, ends, text, span_of_token, loss)
    return Encoded(ids, np.ones(len(ids), np.uint8) if every else loss.astype(np.uint8), untrained, roles)


def _overlaps(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return for each token the first span that ends behind its start, and whether the token overlaps that span.

    A token is trained on if it has a character of a span: the rule of transformers 5.24
    (``PreTrainedTokenizerBase.apply_chat_template``).
    """
    if not spans:
        return np.zeros(len(offsets), np.int64), np.zeros(len(offsets), bool)
    starts, ends = np.asarray(spans, np.int64).T
    span = np.searchsorted(ends, offsets[:, 0], side="right")
    inside = span < len(spans)
    span = np.minimum(span, len(spans) - 1)
    return span, inside & (offsets[:, 1] > starts[span])


def _messages(
    offsets: npt.NDArray[np.int64], ends: list[int], text: TrainedText, span: npt.NDArray[np.int64], loss: Any
) -> npt.NDArray[np.int32]:
    """Return each token's message; where the ends of messages are unknown, only those of trained tokens."""
    if ends:
        token = np.searchsorted(np.asarray(ends), offsets[:, 0], side="right")
        return np.minimum(token, len(ends) - 1).astype(np.int32)
    owners = np.asarray([-1 if one is None else one for one in text.messages] or [-1], np.int32)
    return np.where(loss, owners[span], -1).astype(np.int32)


def _of_all(refused: Sequence[tuple[str, ConfigurationError]]) -> ConfigurationError:
    """Return the first error, with the places of the others."""
    (_, first), *others = refused
    if not others:
        return first
    places = ", ".join(origin.rpartition("/")[2] for origin, _ in others[:_NAMED])
    more = ", …" if len(others) > _NAMED else ""
    message = f"{first.message}; nor can {len(others):,} of the next samples be used: {places}{more}"
    return ConfigurationError(first.code, message, first.help)
