"""The weights that an export may take: of the best checkpoint, a moving average, a mean of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _telemetry import small_plan
from safetensors.torch import load_file

from partool.plan.validations import Validations, write_validations
from partool.spec.judging import BestSpec
from partool.spec.model import ModelConfig
from partool.spec.training import CheckpointSpec
from partool_runtime.checkpoint import Checkpointer
from partool_runtime.errors import ConfigurationError
from partool_runtime.export import export, main
from partool_runtime.model import Decoder
from partool_runtime.weights.chosen import WeightsChoice, choose

SMALL = ModelConfig(layers=2, hidden=15, ffn_hidden=20, heads=3, kv_heads=3, head_dim=5, vocab=17, max_position=8)
STEPS = (3, 7, 11)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints of other weights each, of which the second has an average, too."""
    folder = tmp_path / "run"
    folder.mkdir()
    plan = small_plan(model=SMALL, checkpoint=CheckpointSpec(best=BestSpec(metric="accuracy")))
    (folder / "plan.json").write_text(plan.to_json())
    checkpointer = Checkpointer(folder / "checkpoints", keep=9, mode="sync", rank=0, world_size=1)
    for step in STEPS:
        state = {f"model.{name}": weight for name, weight in weights(step).items()}
        if step == 7:
            state |= {f"ema.{name}": -weight for name, weight in weights(step).items() if not name.startswith("embed")}
        checkpointer.save(step, state, {})  # type: ignore[typeddict-item]
    checkpointer.close()
    return folder


def weights(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {name: p.detach().double() for name, p in Decoder(SMALL).named_parameters()}


def exported(run: Path, choice: WeightsChoice, what: Callable[[int, str], torch.Tensor], **more: Any) -> str:
    """Export, compare a folder's tensors with those that ``what`` gives by checkpoint and name; return the message."""
    out = run.parent / "out"
    text = export(run, out, choice=choice, dtype="fp64", force=True, **more)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], what(0, "embed.weight"))
    assert torch.equal(tensors["model.norm.weight"], what(0, "final_norm.weight"))
    assert torch.equal(tensors["lm_head.weight"], what(0, "head.weight"))
    return text


def test_an_export_takes_what_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step-00000011" in exported(run, WeightsChoice(), lambda _, name: weights(11)[name])
    mean = lambda steps: lambda _, name: sum(weights(s)[name] for s in reversed(steps)) / len(steps)  # noqa: E731
    text = exported(run, WeightsChoice(mean_of=2), mean([7, 11]))
    assert "wrote the mean of step-00000007, step-00000011" in text
    assert exported(run, WeightsChoice(step=7, mean_of=2), mean([3, 7]))
    ema = lambda _, name: weights(7)[name] * (1 if name.startswith("embed") else -1)  # noqa: E731
    assert "the moving average of step-00000007" in exported(run, WeightsChoice(step=7, ema=True), ema)
    figures = {3: 0.5, 7: 0.7, 11: 0.2, 15: 0.9}  # step 15 has no checkpoint
    record = Validations()
    for step, value in figures.items():
        record = record.noted(step, {"accuracy": value, "loss": value})
    write_validations(run / "checkpoints", record)
    assert exported(run, WeightsChoice(best=True), lambda _, name: weights(7)[name])
    assert main([str(run), "--out", str(run.parent / "new"), "--average", "4"]) == 78
    assert "there are those of steps 3, 7, 11" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        (WeightsChoice(best=True), "PT626"),
        (WeightsChoice(step=3, mean_of=2), "PT628"),
        (WeightsChoice(ema=True), "PT627"),
    ],
)
def test_what_there_is_not(run: Path, choice: WeightsChoice, code: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        export(run, run.parent / "out", choice=choice)
    assert error.value.code == code
    assert not (run.parent / "out").exists()


def test_a_damaged_record_names_its_field(run: Path) -> None:
    (run / "checkpoints" / "validations.json").write_text('{"rows": [{"step": -1, "figures": {}}]}')
    with pytest.raises(ConfigurationError, match=r"rows\[0\].step") as error:
        choose(small_plan(), run / "checkpoints", WeightsChoice(best=True))
    assert error.value.code == "PT626"
