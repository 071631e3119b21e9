"""Named sets and prompts beside experts, adapters, models of transformers and pairs of answers, in float64.

Of each model, one process computes the figures from the weights in its last checkpoint, without the trainer: the loss
from logits, pairs by the formulas of the papers, texts one token after the other. Every layout has the same figures.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _adapter_worker import noise, train_adapter
from _hf_models import MODELS, plan_of
from _jobs import Jobs
from _preference_reference import log_probabilities, pair_loss, started
from _ranks import Pools
from _tensor_plans import FIVE, HALVES, LENGTH, ONE, tensor_plan
from often import often
from test_experts import SHORT
from test_preferences import LENGTH as PAIR_LENGTH
from test_preferences import VOCAB, write_pairs
from torch.nn import functional

from partool.layout.adapters import frozen_beside
from partool.layout.parameters import parameters
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.adapter import AdapterSpec
from partool.spec.data import DataSpec, ValidationSet
from partool.spec.model import Weights
from partool.spec.objective import ObjectiveSpec
from partool.spec.training import Validation
from partool_runtime.data import open_data
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.tokens.prompts import PromptTokens
from partool_runtime.weights import materialise

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from _chat_case import folder as write_tokenizer

STEPS, NEW = 2, 3
PROMPTS = ["a cat", "9 is 3 by 3; "]
LORA = AdapterSpec(rank=3, alpha=5.0)
TWO, CUT, PIPE = Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2)
Case = tuple[str, Mesh, dict[str, Any]]
ALONE: dict[str, Case] = {name: (name, ONE, {}) for name in ("experts", "adapter", "transformers", "pairs")}
LAYOUTS: dict[str, Case] = {
    "experts ZeRO-3": ("experts", TWO, {"expert": 2, "zero": 3}),
    "experts ZeRO-1": ("experts", TWO, {"expert": 2, "zero": 1}),
    "experts of two and tensor": ("experts", Mesh(dp_shard=2, tp=2), {"expert": 2, "sequence_norms": True}),
    "experts pipeline": ("experts", Mesh(dp_shard=2, pp=2), {"expert": 2, "stages": ((0, 1), (1, 3))}),
    "adapter ZeRO-3": ("adapter", TWO, {"zero": 3}),
    "adapter tensor": ("adapter", CUT, {"zero": 0}),
    "adapter pipeline": ("adapter", PIPE, {"stages": HALVES}),
    "transformers ZeRO-3": ("transformers", TWO, {"zero": 3}),
    "transformers tensor": ("transformers", CUT, {"zero": 0}),
    "transformers pipeline": ("transformers", PIPE, {"stages": HALVES, "schedule": "1f1b"}),
    "pairs ZeRO-3": ("pairs", TWO, {"zero": 3}),
    "pairs tensor": ("pairs", CUT, {"zero": 0}),
    "pairs ring": ("pairs", Mesh(cp=2), {"sequence_method": "ring"}),
    "pairs pipeline": ("pairs", PIPE, {"stages": HALVES}),
}
OFTEN = ["pairs ZeRO-3"]


def validated_plan(folder: Path, kind: str, mesh: Mesh, *, zero: int = 1, **layout: Any) -> Plan:
    """Return a plan of two steps that validates two sets, and continues prompts, after the last one."""
    model = {"experts": SHORT, "adapter": FIVE | {"adapter": LORA.form}, "pairs": {"vocab": VOCAB}}.get(kind, FIVE)
    pairs = kind == "pairs"
    training: dict[str, Any] = {"sequence_length": PAIR_LENGTH if pairs else LENGTH}
    training["validation"] = Validation(samples=64, prompts=PROMPTS, new_tokens=NEW)
    if pairs:
        training["objective"] = ObjectiveSpec(kind="dpo", beta=0.7)
    settings = {"steps": STEPS, "zero": zero}
    of_base = {"stages": layout["stages"]} if kind == "transformers" and "stages" in layout else layout
    plan = tensor_plan(folder / "text", mesh, model=model, training=training, settings=settings, **of_base)
    if kind == "adapter":
        frozen = frozen_beside([info.name for info in parameters(plan.model)], LORA.train)
        plan = plan.model_copy(update={"adapter": LORA, "frozen": frozen})
    elif kind == "transformers":
        path = folder / "phi3"
        fields = {"micro_batch": plan.layout.micro_batch, "accumulation": plan.layout.derived.accumulation}
        plan = plan_of(plan, path, mesh, zero=zero, recompute=("none",) * 4, **fields, **layout)
        plan = plan.model_copy(update={"weights": Weights(source="hf", path=str(path))})
    suffix, resolved = ("jsonl", {"records": "preference", "attend": "document"}) if pairs else ("txt", {})
    names = ("first", "second")
    sets = {
        name: ValidationSet.model_validate({"source": str(folder / f"{name}.{suffix}")} | resolved) for name in names
    }
    data = plan.data.model_copy(update={"validation": 0.0, "validation_sets": sets})
    if pairs:
        data = DataSpec(
            source=str(folder / "pairs.jsonl"), records="preference", tokenizer=str(folder / "tokenizer"),
            attend="document", cache=str(folder / "cache"), validation_sets=sets,
        )  # fmt: skip
    return plan.model_copy(update={"data": data})


class Ran:
    """Runs of cases, each made when it is first asked for."""

    def __init__(self, folder: Path, pools: Pools) -> None:
        self.folder = folder
        self.jobs, self.of_adapters = Jobs(folder, pools), Jobs(folder, pools, train_adapter)
        self.run = cache(self._run)
        self.expected = cache(self._expected)

    def plan(self, name: str) -> Plan:
        kind, mesh, layout = (LAYOUTS | ALONE)[name]
        if kind == "transformers" and not (self.folder / "phi3").exists():
            write_phi3(self.folder / "phi3")
        return validated_plan(self.folder, kind, mesh, **layout)

    def _run(self, name: str) -> dict[str, Any]:
        """Return the event of the last validation of a run."""
        jobs = self.of_adapters if name.startswith("adapter") else self.jobs
        jobs.train(name, self.plan(name), run=name)
        assert jobs.ended(name) == "done"
        return jobs.events(name, "validation")[-1]

    def _expected(self, kind: str) -> tuple[dict[str, dict[str, float]], list[tuple[int, str]]]:
        """Return the figures of each set, and number of tokens and text of each prompt, from the last checkpoint."""
        self.run(kind)
        plan, model = self.plan(kind), model_after(self.jobs, self.plan(kind), kind)
        with open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None) as data, torch.no_grad(), KeepWide():
            of_set = (pair_figures if kind == "pairs" else token_figures)(plan, model, data)
            return of_set, [continued(plan, model, prompt) for prompt in PROMPTS]


def write_phi3(path: Path) -> None:
    import transformers

    common = {
        "num_hidden_layers": 4, "vocab_size": 257, "initializer_range": 0.2, "max_position_embeddings": 16,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING["phi3"](**MODELS["phi3"] | common)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(path)


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("models")
    (folder / "text").mkdir()
    squares = "".join(f"{number * number} is the square of {number}; " for number in range(40))
    (folder / "text" / "squares.txt").write_text(squares)
    (folder / "first.txt").write_text(squares[:101])
    (folder / "second.txt").write_text("a cat sat on a mat, and the mat was flat. " * 2)
    lines = write_pairs(folder / "pairs.jsonl").read_text().splitlines(keepends=True)
    (folder / "first.jsonl").write_text("".join(lines[:5]))
    (folder / "second.jsonl").write_text("".join(lines[5:18]))
    write_tokenizer(folder / "tokenizer")
    return Ran(folder, pools)


def model_after(jobs: Jobs, plan: Plan, run: str) -> Any:
    """Return the model of one process with the weights of a run's last checkpoint; frozen ones stay the first."""
    if plan.hf is not None:
        from partool_runtime.hf.model import HfDecoder

        model: Any = HfDecoder(plan.hf, plan.model, wide=True).double()
        materialise(model, "cpu")
    else:
        model = started(plan, noise(plan.training.seed))
    state = {name.removeprefix("model."): x for name, x in jobs.state(run, STEPS).items() if name.startswith("model.")}
    assert state.keys() <= model.state_dict().keys()
    frozen = model.state_dict().keys() - state.keys()
    assert bool(frozen) == (plan.adapter is not None)
    model.load_state_dict(state, strict=False)
    return model.eval()


def token_figures(plan: Plan, model: Any, data: Any) -> dict[str, dict[str, float]]:
    figures = {}
    for name in data.sets:
        total, count = 0.0, 0
        for micro in data.validation(name):
            logits = model.logits(micro.tokens_BS)
            total += float(functional.cross_entropy(logits.flatten(0, 1), micro.labels_BS.flatten(), reduction="sum"))
            count += int((micro.labels_BS != -100).sum())
        figures[name] = {"loss": total / count}
    return figures


def pair_figures(plan: Plan, model: Any, data: Any) -> dict[str, dict[str, float]]:
    """Return the mean loss, and the share of pairs whose chosen answer has the higher reward, of each set."""
    reference, figures = started(plan), {}
    for name in data.sets:
        samples, documents = data._sets[name], []
        for number in range(samples.count):
            row, loss, owners = (
                torch.from_numpy(x) for x in (samples.row(number), samples.loss(number), samples.documents(number))
            )
            inside = [(row >= 0) & (owners == document) for document in range(int(owners.max()) + 1)]
            documents += [(row[mask], loss[mask]) for mask in inside]
        now, before = (log_probabilities(each, documents) for each in (model, reference))
        pairs = [
            pair_loss(plan.training.objective, now[at], now[at + 1], (float(before[at][0]), float(before[at + 1][0])))
            for at in range(0, len(documents), 2)
        ]
        losses, right = zip(*pairs, strict=True)
        figures[name] = {
            "loss": float(sum(losses)) / len(pairs),
            "accuracy": sum(right) / len(pairs),
            "pairs": len(pairs),
        }
    return figures


def continued(plan: Plan, model: Any, prompt: str) -> tuple[int, str]:
    """Return how many tokens the model adds, without padding and one sequence at a time, and their text."""
    maker = PromptTokens(plan.data)
    ids = maker.encode(prompt)
    first = len(ids)
    while len(ids) < min(first + NEW, plan.training.sequence_length):
        token = int(model.logits(torch.tensor([ids]))[0, -1].argmax())
        if token in maker.ends:
            break
        ids.append(token)
    return len(ids) - first, maker.decode(ids[first:])


def check(event: dict[str, Any], expected: tuple[dict[str, dict[str, float]], list[tuple[int, str]]]) -> None:
    """Raise AssertionError unless a validation has the expected figures and texts."""
    figures, texts = expected
    assert event["sets"].keys() == figures.keys()
    for name, of_set in figures.items():
        measured = event["sets"][name]
        assert measured["loss"] == pytest.approx(of_set["loss"], abs=1e-10), name
        for figure in of_set.keys() - {"loss"}:
            assert measured["preferences"][figure] == pytest.approx(of_set[figure], abs=1e-12), (name, figure)
    counts = {name: of_set.get("pairs", event["sets"][name]["tokens"]) for name, of_set in figures.items()}
    total = sum(of_set["loss"] * counts[name] for name, of_set in figures.items()) / sum(counts.values())
    assert event["loss"] == pytest.approx(total, abs=1e-10)
    assert [(each["tokens"], each["text"]) for each in event["samples"]] == texts


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", often(list(ALONE), [name.split()[0] for name in OFTEN]))
def test_one_process_has_the_figures_of_its_checkpoint(ran: Ran, kind: str) -> None:
    event, (figures, texts) = ran.run(kind), ran.expected(kind)
    check(event, (figures, texts))
    assert figures["first"] != figures["second"]
    assert all(count > 0 for count, _ in texts)
    if kind == "adapter":
        plan = ran.plan(kind)
        plain = started(plan.model_copy(update={"model": plan.model.model_copy(update={"adapter": None})}))
        with open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None) as data, torch.no_grad():
            without = token_figures(plan, plain, data)
        assert abs(without["first"]["loss"] - figures["first"]["loss"]) > 1e-3, "the adapter is on"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", often(LAYOUTS, OFTEN))
def test_every_layout_equals_one_process(ran: Ran, name: str) -> None:
    check(ran.run(name), ran.expected(LAYOUTS[name][0]))
