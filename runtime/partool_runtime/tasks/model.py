"""The model that lm-evaluation-harness asks: it hands rows of tokens to the ranks and waits for their scores.

How contexts and answers become rows follows ``lm_eval.models.huggingface.HFLM``: an answer gets the spaces before it,
rows are cut on the left to the length of a sequence, and long texts become windows that predict each token once. This
module imports lm_eval, so only the process of the tasks imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from partool_runtime.errors import ConfigurationError
from partool_runtime.tasks.messages import Scores, Windows
from partool_runtime.tasks.tokens import TaskTokenizer

Ask = Callable[[Windows], Scores]
"""Function that has the ranks score rows."""
_Row = tuple[Any, list[int], list[int]]


class RankModel(TemplateLM):  # type: ignore[misc]
    """The model of all ranks, as one model of lm-evaluation-harness."""

    def __init__(self, tokenizer: TaskTokenizer, sequence_length: int, ask: Ask) -> None:
        super().__init__()
        self._tokens, self._length, self._ask = tokenizer, sequence_length, ask
        self.requests: list[dict[str, Any]] = []
        """The log-likelihood of each request, of documents of tasks, since the list was emptied."""

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text; it is read in place of a prefix alone."""
        return self._tokens.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text."""
        return self._tokens.encode(string, add_special_tokens)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return of each (context, answer) the answer's log-likelihood, and whether it is the model's own answer."""
        for request in requests:
            if not request.args[1]:
                self._refuse(request, "an empty answer")
        results: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        for request, (value, greedy) in zip(requests, results, strict=True):
            self._note(request, value, greedy=greedy)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return of each text the log-likelihood of all its tokens, each of which is predicted once."""
        windows: list[_Row] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self._tokens.prefix,
                max_seq_len=self._length,
                context_len=1,
            )
            rows = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += rows
            owners += [index] * len(rows)
        totals = [0.0] * len(requests)
        for index, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += value
        for request, total in zip(requests, totals, strict=True):
            self._note(request, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> NoReturn:
        """Raise ConfigurationError PT639."""
        raise generation_error(str(requests[0].task_name))

    def _loglikelihood_tokens(self, requests: Sequence[_Row], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return the scores of (names, context's tokens, answer's tokens); raises ConfigurationError PT640."""
        rows = []
        for names, context, answer in requests:
            if not 0 < len(answer) <= self._length:
                what = "" if names is None else f" {str(names[1])[:60]!r}"
                message = f"the answer{what} has {len(answer):,} tokens, and a sequence {self._length:,}"
                raise ConfigurationError(
                    "PT640", message, "answers have a token at least; see training.sequence_length"
                )
            rows.append((context + answer)[-(self._length + 1) :])
        if not rows:
            return []
        # The longest first: rows that share a micro-batch have about the same length.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        scores = self._ask(Windows.of([rows[index] for index in order], [len(requests[index][2]) for index in order]))
        results = [(0.0, False)] * len(rows)
        for index, value, greedy in zip(order, scores.log_likelihoods.tolist(), scores.greedy.tolist(), strict=True):
            results[index] = (value, greedy)
        return results

    def _note(self, request: Any, value: float, *, greedy: bool | None = None) -> None:
        row = {"task": request.task_name, "document": request.doc_id, "request": request.idx, "log_likelihood": value}
        self.requests.append(row if greedy is None else row | {"greedy": greedy})

    def _refuse(self, request: Any, what: str) -> NoReturn:
        message = f"task {request.task_name}, document {request.doc_id}: {what} has no log-likelihood"
        raise ConfigurationError("PT640", message, "an answer has at least one token")


def generation_error(task: str) -> ConfigurationError:
    """Return the error for a task whose answers are generated."""
    message = f"task {task} lets the model generate text, and partool computes log-likelihoods only"
    help = "use tasks of output_type loglikelihood, multiple_choice or loglikelihood_rolling"
    return ConfigurationError("PT639", message, help)
