"""Prompts that the model continues: as tokens, and the tokens that it adds as text."""

from __future__ import annotations

from collections.abc import Sequence

from partool.plan.conversations import Conversation
from partool.spec.data import DataSpec
from partool.spec.training import Prompt
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.tokenizers import BytesTokenizer


class PromptTokens:
    """Turns prompts into tokens as the data are, and tokens into text.

    A text begins as the data's texts do: behind a beginning-of-sequence token where completions are trained on and the
    tokenizer puts one there. Raises ConfigurationError PT603 or PT606 for a tokenizer or template that cannot be used.
    """

    def __init__(self, data: DataSpec) -> None:
        self._begins = not data.is_text
        self.ends = frozenset({BytesTokenizer.separator} - {None})
        """Tokens that end a text or an answer."""
        self._encoder = None
        if data.tokenizer != "bytes":
            from partool_runtime.chat import Encoder  # bytes need neither a tokenizer's library nor templates

            self._encoder = Encoder.of_data(data)
            self.ends = self._encoder.ends()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; messages end where the assistant begins."""
        if self._encoder is not None:
            return self._encoder.prompt(_sample(prompt), begins=self._begins)
        if not isinstance(prompt, str):
            raise ConfigurationError("PT606", "bytes has no chat template", "set data.tokenizer, or write a text")
        return list(prompt.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        if self._encoder is not None:
            return self._encoder.decode(ids)
        return bytes(token for token in ids if token < BytesTokenizer.vocab).decode(errors="replace")


def prompt_tokens(
    prompts: Sequence[Prompt], data: DataSpec, *, length: int, vocab: int
) -> tuple[PromptTokens, list[list[int]]]:
    """Return the tokeniser of prompts, and each prompt's tokens.

    ``length`` is that of a sequence, ``vocab`` that of the model. Raises ConfigurationError PT637 for a prompt without
    tokens, or without room for one more, and PT605 for a token that the model does not have.
    """
    maker = PromptTokens(data)
    encoded = [maker.encode(prompt) for prompt in prompts]
    for number, ids in enumerate(encoded, 1):
        if not 0 < len(ids) < length:
            message = f"prompt {number} has {len(ids)} tokens, a sequence {length}"
            raise ConfigurationError("PT637", message, f"use 1 to {length - 1} tokens per prompt")
        if max(ids) >= vocab:
            message = f"prompt {number} has the token {max(ids)}, the model's vocabulary is {vocab}"
            raise ConfigurationError("PT605", message, f"set model.vocab to {max(ids) + 1}")
    return maker, encoded


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as people read it: a text, or a line per message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)


def _sample(prompt: Prompt) -> str | Conversation:
    if isinstance(prompt, str):
        return prompt
    messages = tuple({"role": each.role, "content": each.content} for each in prompt)
    return Conversation(messages, (1,) * len(messages), origin="a prompt of training.validation.prompts")
