"""TRL's losses of pairs of answers, its figures and its gradients, in float64, are those of partool.

TRL's rows hold one answer each and are padded; partool's hold several, one after the other. In ORPO TRL's first term is
another one: it counts the prompts' tokens, and is a mean over the tokens of all chosen answers. The paper's (equations
3 and 6) is a mean over the answer's tokens, and then over pairs, as partool's. Both are the same for prompts of one
token and chosen answers of one length; elsewhere TRL's other term is compared.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from _peers import environment, needed
from torch.nn import functional as F

from partool.spec.objective import ObjectiveSpec
from partool_runtime.data.batches import IGNORED_LABEL, AnswerPairs, MicroBatch
from partool_runtime.parallel.preferences import PreferenceLoss, means_of

pytestmark = pytest.mark.long
VOCAB = 13
MIXED = [(3, 5), (3, 2), (1, 7), (1, 1), (4, 4), (4, 6)]
"""Tokens of prompt and answer of each document, chosen and rejected in turn."""
SAME = [(1, 6), (1, 2), (1, 6), (1, 4)]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sigmoid": {"kind": "dpo", "beta": 0.3},
    "smoothed": {"kind": "dpo", "beta": 0.3, "smoothing": 0.2},
    "ipo": {"kind": "dpo", "beta": 0.3, "form": "ipo"},
    "hinge": {"kind": "dpo", "beta": 0.3, "form": "hinge"},
    "simpo": {"kind": "simpo", "beta": 1.7, "gamma": 0.6},
    "smoothed simpo": {"kind": "simpo", "beta": 1.7, "gamma": 0.6, "smoothing": 0.1},
    "orpo": {"kind": "orpo", "weight": 0.4},
    "orpo mixed": {"kind": "orpo", "weight": 0.4},
}
FIGURES = {
    "rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/accuracies": "accuracy",
    "rewards/margins": "margin", "logps/chosen": "logps_chosen", "logps/rejected": "logps_rejected",
    "log_odds_chosen": "log_odds",
}  # fmt: skip
NARROW = 2e-6
"""Tolerance where TRL computes in float32: the odds of ORPO."""


class Batch:
    """Documents with tokens, logits and log-probabilities of a reference, all drawn."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.sizes = sizes
        self.ids = [torch.randint(VOCAB, (p + a,), generator=generator) for p, a in sizes]
        self.logits = [torch.randn(p + a, VOCAB, generator=generator, dtype=torch.float64) for p, a in sizes]
        self.reference = -9.0 * torch.rand(len(sizes), generator=generator, dtype=torch.float64) - 2.0

    def padded(self) -> dict[str, torch.Tensor]:
        """Return TRL's rows: all chosen documents, then all rejected ones."""
        order = [*range(0, len(self.sizes), 2), *range(1, len(self.sizes), 2)]
        length = max(map(len, self.ids))

        def rows(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(
                [F.pad(parts[n], (0,) * (2 * parts[n].ndim - 1) + (length - len(parts[n]),)) for n in order]
            )

        answers = [torch.tensor([0] * p + [1] * a) for p, a in self.sizes]
        ones = [torch.ones_like(ids) for ids in self.ids]
        return {
            "ids": rows(self.ids), "attended": rows(ones), "completion": rows(answers), "logits": rows(self.logits),
            "reference": self.reference[order],
        }  # fmt: skip

    def packed(self) -> tuple[MicroBatch, torch.Tensor]:
        """Return rows of several documents, the first pair in a row to itself, and their logits."""
        rows = [[0, 1], [*range(2, len(self.sizes))]]
        length = max(sum(len(self.ids[n]) for n in row) for row in rows)
        shape = (len(rows), length)
        ids_BS, documents_BS = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int32)
        labels_BS = torch.full(shape, IGNORED_LABEL)
        logits_BSV = torch.zeros(*shape, VOCAB, dtype=torch.float64)
        for at, row in enumerate(rows):
            place = 0
            for count, number in enumerate(row):
                stop = place + len(self.ids[number])
                ids_BS[at, place:stop], documents_BS[at, place:] = self.ids[number], count
                logits_BSV[at, place:stop] = self.logits[number]
                prompt = self.sizes[number][0]
                labels_BS[at, place + prompt - 1 : stop - 1] = self.ids[number][prompt:]
                place = stop
        lengths = torch.tensor([answer for _, answer in self.sizes])
        numbers = np.arange(len(self.sizes))
        pairs = AnswerPairs(numbers, torch.tensor([0, 2]), lengths, self.reference)
        return MicroBatch(ids_BS, labels_BS, documents_BS, pairs=pairs), logits_BSV.requires_grad_()


def ours(spec: ObjectiveSpec, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return partool's mean loss, the gradient of the logits by document, and its figures."""
    one = SimpleNamespace(size=1, place=0)
    ranks: Any = SimpleNamespace(cp=one, tp=one, device=torch.device("cpu"))
    preferences, (micro, logits_BSV) = PreferenceLoss(spec, ranks), batch.packed()
    preferences.begin(micro)

    def of_tokens(reduction: str) -> torch.Tensor:
        flat = F.cross_entropy(logits_BSV.flatten(0, 1), micro.labels_BS.flatten(), reduction=reduction)
        return flat.view_as(micro.labels_BS)

    loss = preferences.around(of_tokens)() / (len(batch.sizes) // 2)
    (gradient_BSV,) = torch.autograd.grad(loss, logits_BSV)
    by_row = [gradient_BSV[0], gradient_BSV[1]]
    parts, places = [], [0, 0]
    for number, ids in enumerate(batch.ids):
        row = int(number >= 2)
        parts.append(by_row[row][places[row] : places[row] + len(ids)])
        places[row] += len(ids)
    return loss.detach(), torch.cat(parts), means_of(spec, preferences._sums[True].tolist())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TRL computes of all cases, in one process, which takes 20 s to import it."""
    needed("trl")
    cases = {}
    for name, settings in OBJECTIVES.items():
        spec = ObjectiveSpec(**settings)
        case = vars(batch_of(name)) | batch_of(name).padded()
        case |= {"kind": spec.kind, "form": spec.form, "smoothing": spec.smoothing, "gamma": spec.gamma}
        cases[name] = case | {"beta": spec.weight if spec.kind == "orpo" else spec.scale}
    folder = tmp_path_factory.mktemp("trl")
    torch.save(cases, folder / "cases.pt")
    judge = Path(__file__).with_name("_judge_trl.py")
    run = subprocess.run(
        [sys.executable, str(judge), str(folder / "cases.pt"), str(folder / "verdicts.pt")],
        env=environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    verdicts: dict[str, Any] = torch.load(folder / "verdicts.pt")
    return verdicts


def batch_of(name: str) -> Batch:
    return Batch(SAME if name == "orpo" else MIXED)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_gradients_and_figures_are_those_of_trl(verdicts: dict[str, Any], name: str) -> None:
    spec, batch, verdict = ObjectiveSpec(**OBJECTIVES[name]), batch_of(name), verdicts[name]
    loss, gradient, figures = ours(spec, batch)
    near = NARROW if spec.kind == "orpo" else 1e-12
    for theirs, name_here in FIGURES.items():
        if theirs in verdict["figures"] and (spec.kind == "orpo" or name_here != "log_odds"):
            assert figures[name_here] == pytest.approx(verdict["figures"][theirs], abs=max(near, 1e-6)), theirs
    expected = verdict["loss"]
    if name == "orpo mixed":
        first = -figures["logps_chosen"]
        assert verdict["figures"]["nll_loss"] != pytest.approx(first, abs=0.01), "TRL's first term is another one"
        torch.testing.assert_close(loss - first, expected - verdict["figures"]["nll_loss"], atol=near, rtol=near)
        return
    torch.testing.assert_close(loss, expected.double(), atol=near, rtol=near)
    order = [*range(0, len(batch.sizes), 2), *range(1, len(batch.sizes), 2)]
    wanted = [verdict["gradient"][order.index(n), : len(ids)] for n, ids in enumerate(batch.ids)]
    torch.testing.assert_close(gradient, torch.cat(wanted), atol=near, rtol=near)
