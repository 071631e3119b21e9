"""Rules about prompts that validations continue: something has to be validated, and something makes them tokens."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.data import DataSpec
from partool.spec.spec import Spec
from partool.spec.training import TrainingSpec

_PATH = ("training", "validation", "prompts")


def check_prompts(spec: Spec) -> Iterator[Diagnostic]:
    """Yield an error for prompts in a training without validations."""
    if spec.training.validation.prompts and not spec.data.validates and spec.job == "train":
        message = "prompts are continued at validations, and no data is held out for one"
        help = "set data.validation, such as 0.01, or data.validation_sets"
        yield Diagnostic("PT425", message, path=_PATH, help=help)


def check_prompt_tokens(
    training: TrainingSpec, data: DataSpec, *, of_tokens: bool, template: bool
) -> Iterator[Diagnostic]:
    """Yield errors for prompts that nothing makes tokens of, or that fill a sequence.

    ``of_tokens`` says that all data are files of tokens, which need no tokenizer, ``template`` that there is a chat
    template.
    """
    plain = data.tokenizer == "bytes"
    help = "set data.tokenizer to the Hugging Face folder with the tokenizer of the model"
    for index, prompt in enumerate(training.validation.prompts):
        path = (*_PATH, index)
        if plain and of_tokens:
            message = "prompts are text, the data are tokens, and data.tokenizer names no tokenizer"
            yield Diagnostic("PT426", message, path=path, help=help)
        elif not isinstance(prompt, str) and (plain or not template):
            message = "a prompt of messages needs a chat template, and data.tokenizer has none"
            help = f"{help} that has a template, or data.template; or write the prompt as one text"
            yield Diagnostic("PT426", message, path=path, help=help)
        elif plain and isinstance(prompt, str) and len(prompt.encode()) >= training.sequence_length:
            message = f"the prompt has {len(prompt.encode())} tokens, a sequence {training.sequence_length}"
            help = f"use at most {training.sequence_length - 1}: the model continues it in the same sequence"
            yield Diagnostic("PT637", message, path=path, help=help)
