"""Kinds of optimizers and groups of parameters: on the device, in host memory, in checkpoints and in specs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _by_torch import ByTorch
from pydantic import ValidationError
from torch import nn

from partool.planner import make_plan
from partool.spec import load_text
from partool.spec.training import OptimizerGroup, OptimizerSpec
from partool_kernels import isa
from partool_kernels.host import MOMENTS, Part, UpdatePass, update
from partool_runtime.errors import ConfigurationError
from partool_runtime.jobs.train.saving import Saver
from partool_runtime.optim import steps
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.groups import grouped
from partool_runtime.torch_internals import foreach

SHAPES = {"embed.weight": (7, 3), "layers.0.w": (5, 3), "layers.0.norm": (5,), "layers.1.w": (3, 5), "none": (0, 3)}
GROUPS = {
    "embed.*": {"lr_factor": 0.25, "weight_decay": 0.0},
    "layers.1.*": {"lr_factor": 3.0},
    "*norm": {"weight_decay": 0.5},
}
KINDS = tuple(steps.STEPS)
ON_HOST = tuple(MOMENTS)
STEPS = 6


def spec_of(kind: str, **fields: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"name": kind, "lr": 0.05, "weight_decay": 0.2} | fields)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradients(dtype: torch.dtype, seed: int) -> Iterator[tuple[float, float, dict[str, torch.Tensor]]]:
    """Yield learning rate, factor and gradients of every step."""
    draws = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        values = {
            name: torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
        }
        yield 0.05 / (step + 1), 1.0 if step % 2 else 0.5, values


def trained(optimizer: DeviceOptimizer, named: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
    for lr, scale, values in gradients(dtype, 1):
        optimizer.begin(lr, scale)
        for name, parameter in named.items():
            parameter.grad = values[name].clone()
        optimizer.step(lr, scale)


@pytest.mark.parametrize(("kind", "kernels"), list(product(KINDS, ("torch", "native"))))
def test_steps_are_those_of_torch_by_group(kind: str, kernels: str) -> None:
    if kernels == "native" and isa() is None:
        pytest.skip("without the compiled library")
    spec = spec_of(kind, groups=GROUPS)
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    optimizer = DeviceOptimizer(ours, spec, kernels=kernels)
    trained(optimizer, ours, torch.float64)
    optimizer.close()
    groups = grouped(spec, {name: p.ndim for name, p in ours.items()})
    reference = {name: ByTorch(kind, p, groups.groups[groups.of[name]]) for name, p in theirs.items() if p.numel()}
    for lr, scale, values in gradients(torch.float64, 1):
        for name, one in reference.items():
            one.step(lr, values[name] * scale)
    for name in reference:
        torch.testing.assert_close(ours[name].detach(), theirs[name].detach(), rtol=1e-13, atol=1e-13)
        assert not torch.equal(ours[name], parameters(torch.float64)[name])


@pytest.mark.parametrize(("kind", "dtype"), list(product(ON_HOST, (torch.float32, torch.float64))))
def test_the_pass_for_host_memory_steps_the_same(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit in every build, except for adamw, where torch's own kernel orders the arithmetic differently."""
    spec = spec_of(kind, groups=GROUPS)
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = DeviceOptimizer(ours, spec)
    trained(optimizer, ours, dtype)
    groups = grouped(spec, {name: p.ndim for name, p in theirs.items()})
    held = {name: p.detach().view(-1) for name, p in theirs.items() if p.numel()}
    parts = [Part(p, tuple(torch.zeros_like(p) for _ in groups.moments), groups.of[name]) for name, p in held.items()]
    for step, (lr, scale, values) in enumerate(gradients(dtype, 1), 1):
        update(
            parts,
            step=UpdatePass([values[name].view(-1) for name in held], groups.rules(lr, step, scale)),
            mode="torch",
        )
    for name in held:
        if kind == "adamw":
            torch.testing.assert_close(ours[name].detach(), theirs[name].detach(), rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", ["lion", "adagrad"])
def test_pieces_change_no_bit_and_bound_the_memory_beside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = parameters(torch.float32), parameters(torch.float32)
    cut["layers.1.w"] = nn.Parameter(cut["layers.1.w"].detach().t().contiguous().t())  # stored by columns
    trained(DeviceOptimizer(whole, spec_of(kind, groups=GROUPS)), whole, torch.float32)
    monkeypatch.setattr(steps, "PIECE_ELEMENTS", 6)
    sizes: list[int] = []
    name = "sqrt" if kind == "adagrad" else "mul"
    operator = getattr(foreach, name)

    def noted(tensors: list[torch.Tensor], *others: Any) -> Any:
        sizes.append(sum(tensor.numel() for tensor in tensors if tensor.is_contiguous()))
        return operator(tensors, *others)

    monkeypatch.setattr(foreach, name, noted)
    trained(DeviceOptimizer(cut, spec_of(kind, groups=GROUPS)), cut, torch.float32)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert max(sizes) == 6


def test_every_group_steps_by_its_own_settings() -> None:
    groups = {
        "embed.*": {"weight_decay": 0.0, "eps": 0.5},
        "layers.1.*": {"betas": [0.5, 0.6]},
        "layers.*": {"lr_factor": 0.0},
    }
    named, start = parameters(torch.float64), parameters(torch.float64)
    trained(DeviceOptimizer(named, spec_of("adamw", groups=groups)), named, torch.float64)
    plain = parameters(torch.float64)
    trained(DeviceOptimizer(plain, spec_of("adamw")), plain, torch.float64)
    for name in ("layers.0.w", "layers.0.norm"):
        assert torch.equal(named[name], start[name]), name
    for name in ("embed.weight", "layers.1.w"):
        assert not torch.equal(named[name], plain[name]), name


def test_the_first_pattern_counts_and_only_matrices_decay_by_themselves() -> None:
    spec = spec_of("sgd", momentum=0.5, groups={"a.*": {}, "*.w": {"weight_decay": 0.3, "momentum": 0.1}})
    groups = grouped(spec, {"a.w": 2, "b.w": 1, "c.b": 1, "c.experts": 3})
    found = {name: groups.groups[place] for name, place in groups.of.items()}
    assert {name: (group.weight_decay, group.beta1) for name, group in found.items()} == {
        "a.w": (0.2, 0.5), "b.w": (0.3, 0.1), "c.b": (0.0, 0.5), "c.experts": (0.2, 0.5),
    }  # fmt: skip
    assert groups.of["a.w"] == groups.of["c.experts"]  # equal settings: one group
    # A rank that holds only some of the names has the same groups.
    assert grouped(spec, {"c.b": 1}).groups == groups.groups
    (rule,) = {groups.rules(0.5, 3, 0.25)[groups.of["b.w"]]}
    assert (rule.kind, rule.lr, rule.step, rule.scale) == ("sgd", 0.5, 3, 0.25)


def test_one_launch_updates_groups_that_differ_in_whether_they_decay() -> None:
    launches = DeviceOptimizer(parameters(torch.float32), spec_of("adamw"))._launches
    assert [len(places) for places in launches] == [2]
    launches = DeviceOptimizer(parameters(torch.float32), spec_of("adamw", groups=GROUPS))._launches
    # Groups: learning rate x 0.25; learning rate x 3; matrices with decay 0.2; vectors with decay 0.5.
    assert sorted(len(places) for places in launches) == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_state_has_the_names_that_host_memory_gives_it(kind: str) -> None:
    named = parameters(torch.float32)
    state = DeviceOptimizer(named, spec_of(kind)).state()
    assert set(state) == {f"{moment}.{name}" for moment in MOMENTS[kind] for name in named}  # type: ignore[index]


def test_plans_keep_the_order_of_groups() -> None:
    spec = OptimizerSpec(groups={"z.*": OptimizerGroup(lr_factor=0.5), "*": OptimizerGroup(betas=[0.1, 0.2])})
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    assert list(OptimizerSpec.model_validate_json(text).groups.items()) == list(spec.groups.items())
    with pytest.raises(ValidationError):
        OptimizerSpec.model_validate({"groups": {"": {}}})


SPEC = """
model: {layers: 2, hidden: 64, heads: 4, vocab: 256, frozen: ["embed.*"]}
hardware: {accelerator: cpu, per_node: 1}
data: python-stdlib
optimizer: OPTIMIZER
"""


@pytest.mark.parametrize(
    ("optimizer", "code", "path", "words"),
    [
        ("{name: lion, eps: 1.0e-6}", "PT226", ("optimizer", "eps"), "lion reads betas"),
        ("{groups: {'*': {momentum: 0.5}}}", "PT226", ("optimizer", "groups", "*", "momentum"), "setting of sgd"),
        ("{groups: {'*': {betas: [0.5, 1.0]}}}", "PT216", ("optimizer", "groups", "*", "betas", 1), "1.0"),
        ("{groups: {'layer.*': {}}}", "PT225", ("optimizer", "groups", "layer.*"), "matches no parameter"),
        ("{groups: {'embed.*': {}}}", "PT225", ("optimizer", "groups", "embed.*"), "model.frozen"),
        ("{groups: {'*': {}, 'head.*': {}}}", "PT225", ("optimizer", "groups", "head.*"), "earlier"),
        ("{groups: {'*': {lr: 0.1}}}", "PT101", ("optimizer", "groups", "*", "lr"), "lr"),
    ],
)
def test_findings(optimizer: str, code: str, path: tuple[str | int, ...], words: str, tmp_path: Path) -> None:
    loaded = load_text(SPEC.replace("OPTIMIZER", optimizer))
    found = list(loaded.diagnostics)
    if loaded.spec is not None:
        found += make_plan(loaded.spec, base_dir=tmp_path, default_name="x").diagnostics
    errors = [d for d in found if d.severity == "error"]
    assert [(d.code, d.path) for d in errors] == [(code, path)]
    assert words in errors[0].message


def test_the_second_name_of_a_tied_matrix_is_told_apart(tmp_path: Path) -> None:
    text = SPEC.replace("OPTIMIZER", "{groups: {'head.*': {lr_factor: 0.5}}}").replace(
        'frozen: ["embed.*"]', "tied_embeddings: true"
    )
    spec = load_text(text).spec
    assert spec is not None
    (found,) = [d for d in make_plan(spec, base_dir=tmp_path, default_name="x").diagnostics if d.code == "PT225"]
    assert "embed.weight" in found.message


@pytest.mark.parametrize(("saved", "name"), [("adamw", "lion"), ("sgd", "adamw"), (None, "adagrad")])
def test_a_checkpoint_of_another_optimizer_is_refused(saved: str | None, name: str) -> None:
    saver = Saver.__new__(Saver)
    saver._base = ""
    saver._plan = SimpleNamespace(optimizer=spec_of(name))  # type: ignore[assignment]
    with pytest.raises(ConfigurationError) as raised:
        saver._accept(4, {} if saved is None else {"optimizer": saved})
    assert raised.value.code == "PT679"
    assert (saved or "adamw") in raised.value.message
    saver._accept(4, {"optimizer": name})
