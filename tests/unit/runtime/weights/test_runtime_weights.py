"""Filling, freezing, loading and exporting weights: every layout gets the same bits."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _telemetry import small_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from partool.plan.types import Generation
from partool.spec.data import DataSpec
from partool.spec.experts import Moe
from partool.spec.model import ModelConfig, Weights
from partool.spec.training import CheckpointSpec
from partool_runtime.checkpoint import Checkpointer, step_folder
from partool_runtime.errors import ConfigurationError
from partool_runtime.export import export, main
from partool_runtime.hf import open_folder, write_folder
from partool_runtime.model import Decoder
from partool_runtime.pieces import local_part, local_rows, split_rows
from partool_runtime.weights import build, fill, freeze, materialise, post_load
from partool_runtime.weights.draw import BLOCK_ELEMENTS, block_rows, dummy_source, init_source

CONFIG = ModelConfig(
    layers=2, hidden=33, ffn_hidden=50, heads=3, kv_heads=1, head_dim=10, vocab=4001, qkv_bias=True, init_std=0.03
)
SMALL = CONFIG.model_copy(update={"vocab": 19})


INIT = Weights()


def full(config: ModelConfig = SMALL, weights: Weights = INIT, seed: int = 7, dtype=torch.float64) -> Decoder:
    model = build(config)
    materialise(model, "cpu", dtype)
    fill(model, weights, seed=seed)
    post_load(model)
    return model


@contextmanager
def pretended_rank(rank: int, size: int) -> Iterator[None]:
    """Join a group of ``size`` ranks as its only member: enough for code without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(config: ModelConfig, mesh_shape: tuple[int, ...]) -> Decoder:
    names = ("dp_replicate", "dp_shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = build(config).double()
    for group in model.groups()[:-1]:
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialise(model, "cpu")
    return model


def assert_parts(model: Decoder, whole: Decoder) -> set[str]:
    """Compare this rank's shards with the same rows of the whole model; returns the names of empty shards."""
    empty = set()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        rows = local_rows(parameter)
        assert torch.equal(local_part(parameter), expected[rows.start : rows.stop]), name
        empty |= set() if rows else {name}
    return empty


@pytest.mark.parametrize("source", ["init", "dummy", "hf"])
def test_every_layout_has_the_same_bits(source, tmp_path):
    weights = Weights(source=source, path=str(tmp_path))
    if source == "hf":
        write_folder(full(CONFIG).state_dict(), CONFIG, tmp_path)
    whole = full(CONFIG, weights)
    assert block_rows((CONFIG.vocab, CONFIG.hidden)) * 2 < CONFIG.vocab  # ranks begin and end within blocks
    empty = set()
    # torch caches a two-dimensional mesh of the process's first rank, so each such mesh is tested on one rank only.
    for shape, ranks in (
        ((1,), [0]),
        ((2,), [0, 1]),
        ((3,), [1, 2]),
        ((20,), [0, 9, 19]),
        ((2, 3), [5]),
        ((3, 2), [2]),
    ):
        for rank in ranks:
            with pretended_rank(rank, math.prod(shape)):
                model = sharded(CONFIG, shape)
                fill(model, weights, seed=7)
                post_load(model)
                empty |= assert_parts(model, whole)
    assert "layers.0.attention.k.bias" in empty  # 10 rows on 20 ranks: some hold none


def test_split_rows_is_torch_chunk():
    for rows, ranks in ((7, 4), (10, 3), (3, 5), (1, 2), (12, 4), (0, 3), (9, 6)):
        parts = [split_rows(range(rows), rank, ranks) for rank in range(ranks)]
        chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)] if rows else []
        assert [list(part) for part in parts if part] == chunks
        assert sum(map(len, parts)) == rows


def test_init_scheme():
    model = dict(full(CONFIG).named_parameters())
    for name, std in (
        ("embed.weight", 0.03),
        ("head.weight", 0.03),
        ("layers.1.ffn.gate.weight", 0.03),
        ("layers.1.ffn.down.weight", 0.015),
        ("layers.0.attention.o.weight", 0.015),
    ):
        values = model[name].detach()
        assert abs(values.mean()) < 5 * std / math.sqrt(values.numel())
        assert abs(values.std() / std - 1) < 5 / math.sqrt(2 * values.numel()), name
        assert torch.equal(values, values.float().double())  # drawn in float32, whatever the model's type
    assert torch.equal(model["final_norm.weight"], torch.ones(33, dtype=torch.float64))
    assert not model["layers.1.attention.q.bias"].any()
    assert not torch.equal(model["layers.0.ffn.up.weight"], model["layers.1.ffn.up.weight"])
    assert not torch.equal(model["layers.0.ffn.up.weight"], model["layers.0.ffn.gate.weight"])
    other = dict(full(CONFIG, seed=8).named_parameters())
    assert not torch.equal(model["embed.weight"], other["embed.weight"])
    blocks = model["embed.weight"][: 2 * block_rows((4001, 33))].chunk(2)
    assert not torch.equal(*blocks)
    assert blocks[0].numel() <= BLOCK_ELEMENTS
    bf16 = dict(full(CONFIG, dtype=torch.bfloat16).named_parameters())
    assert torch.equal(bf16["embed.weight"], model["embed.weight"].bfloat16())


def test_blocks_are_drawn_alone():
    for source in (init_source(CONFIG, 7), dummy_source(CONFIG)):
        whole = source("embed.weight", (4001, 33), (0, 0), (4001, 33))
        for start, stop in ((0, 1), (1980, 1990), (1985, 4001), (4000, 4001), (17, 17)):
            for left, right in ((0, 33), (0, 1), (7, 20), (32, 33), (5, 5)):
                block = source("embed.weight", (4001, 33), (start, left), (stop - start, right - left))
                assert torch.equal(block, whole[start:stop, left:right])


def test_dummy_weights_train():
    model = full(SMALL, Weights(source="dummy"))
    assert torch.equal(model.embed.weight, full(SMALL, Weights(source="dummy"), seed=8).embed.weight)
    tokens_BS = torch.arange(14).reshape(2, 7)
    model(tokens_BS, tokens_BS + 1).backward()
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if not n.endswith("k.bias"))
    assert model.embed.weight.unique().numel() > 0.99 * model.embed.weight.numel()


def test_dummy_weights_are_a_hash_of_names_and_indices():
    def mixed(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    source = dummy_source(CONFIG)
    shape, at = (200_003, 5, 70_001), (199_998, 2, 69_990)
    for name in ("layers.0.ffn.up.weight", "layers.1.attention.o.weight"):
        digest = hashlib.sha256(name.encode()).digest()
        salts = [int.from_bytes(digest[4 * dim : 4 * dim + 4], "little") for dim in range(3)]
        found = source(name, shape, at, (5, 3, 11))
        std = 0.015 if ".o." in name else 0.03
        for place in itertools.product(range(5), range(3), range(11)):
            keys = [mixed((first + each) ^ salt) for first, each, salt in zip(at, place, salts, strict=True)]
            value = mixed(keys[0] ^ keys[1] ^ keys[2])
            expected = (value - 2**32 * (value >> 31)) / 2**31 * math.sqrt(3) * std
            assert abs(found[place].item() - expected) < 1e-6 * std


def test_dummy_weights_are_noise():
    source = dummy_source(CONFIG)
    first = source("layers.0.ffn.up.weight", (300, 257), (0, 0), (300, 257)).double() / 0.03
    other = source("layers.1.ffn.up.weight", (300, 257), (0, 0), (300, 257)).double() / 0.03
    assert abs(first.mean()) < 5 / math.sqrt(first.numel())
    assert abs(first.var() - 1) < 5 / math.sqrt(first.numel())
    # The singular values of such a matrix lie between √300 ∓ √257 (Marchenko and Pastur).
    values = torch.linalg.svdvals(first)
    assert values[0] < 1.1 * (math.sqrt(300) + math.sqrt(257))
    assert values[-1] > 0.5
    for one, two in ((first, other), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        assert abs((one * two).mean()) < 5 / math.sqrt(one.numel())


def test_dummy_weights_route_and_guess_as_first_weights_do():
    moe = Moe(experts=16, top_k=2, ffn_hidden=20)
    config = CONFIG.model_copy(update={"vocab": 501, "moe": moe})
    tokens_BS = torch.arange(500).reshape(5, 100)
    chosen: dict[str, list[int]] = {}
    for source in ("init", "dummy"):
        model = full(config, Weights(source=source))
        logits = model.embed(tokens_BS).flatten(0, 1)
        router = dict(model.named_parameters())["layers.0.moe.router.weight"]
        counts = (logits @ router.T).topk(2, dim=-1).indices.flatten().bincount(minlength=16)
        chosen[source] = counts.tolist()
        loss = model(tokens_BS, tokens_BS + 1) / tokens_BS.numel()
        assert abs(loss.item() / math.log(501) - 1) < 0.02
    # 1,000 choices are 62 or 63 per expert on average.
    assert min(min(counts) for counts in chosen.values()) > 15, chosen


def test_freeze():
    model = full()
    assert freeze(model, []) == []
    assert freeze(model, ["embed.*", "layers.0.*norm.weight"]) == [
        "embed.weight",
        "layers.0.attention_norm.weight",
        "layers.0.ffn_norm.weight",
    ]
    assert not model.embed.weight.requires_grad
    assert model.layers[1].ffn_norm.weight.requires_grad
    model(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)).backward()
    assert model.embed.weight.grad is None
    with pytest.raises(ConfigurationError, match=r"PT623.*'embd\.\*' matches no parameter"):
        freeze(model, ["head.*", "embd.*"])
    with pytest.raises(ConfigurationError, match=r"PT623.*nothing would be trained"):
        freeze(model, ["*"])


def test_post_load_finds_what_is_wrong():
    with pytest.raises(RuntimeError, match=r"embed\.weight has no memory"):
        post_load(build(SMALL))
    model = full()
    with torch.no_grad():
        model.layers[1].ffn.up.weight[3, 4] = math.nan
    with pytest.raises(ConfigurationError, match=r"PT622.*layers\.1\.ffn\.up\.weight"):
        post_load(model)


# --- checkpoints and export ---


def save(folder: Path, model: Decoder, step: int = 5) -> None:
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state |= {f"exp_avg.{name}": torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    writer = Checkpointer(folder, keep=3, mode="sync", rank=0, world_size=1)
    writer.save(step, state, {"step": step}, wait=True)
    writer.close()


def test_weights_of_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    save(run / "checkpoints", full(seed=1), step=5)
    save(run / "checkpoints", full(seed=2), step=10)
    for path, seed in (
        (run, 2),
        (run / "checkpoints", 2),
        (step_folder(run / "checkpoints", 5), 1),
    ):
        for dtype in (torch.float64, torch.float32):
            loaded = full(SMALL, Weights(source="checkpoint", path=str(path)), dtype=dtype)
            assert all(
                torch.equal(a, b.to(dtype))
                for a, b in zip(loaded.parameters(), full(seed=seed).parameters(), strict=True)
            )


def test_unusable_checkpoints(tmp_path):
    save(tmp_path / "checkpoints", full())
    (tmp_path / "empty").mkdir()

    def load(config: ModelConfig, path: Path) -> None:
        full(config, Weights(source="checkpoint", path=str(path)))

    with pytest.raises(ConfigurationError, match=r"PT620.*no folder"):
        load(SMALL, tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"PT620.*holds no checkpoint"):
        load(SMALL, tmp_path / "empty")
    with pytest.raises(ConfigurationError, match=r"PT610"):
        load(SMALL, tmp_path / "checkpoints" / "step-00000077")
    with pytest.raises(ConfigurationError) as error:
        load(SMALL.model_copy(update={"tied_embeddings": True, "vocab": 20, "out_bias": True}), tmp_path)
    assert error.value.code == "PT621"
    assert "unexpected head.weight" in error.value.message
    assert "missing layers.0.attention.o.bias" in error.value.message
    assert "embed.weight has shape [20, 33] in the model and [19, 33] in the checkpoint" in error.value.message


def plan_json(config: ModelConfig = SMALL, tokenizer: str = "bytes", folder: str | None = None) -> str:
    data = DataSpec(source="python-stdlib", tokenizer=tokenizer)
    return small_plan(model=config, data=data, checkpoint=CheckpointSpec(dir=folder)).to_json()


def make_run(folder: Path, tokenizer: str = "bytes") -> Decoder:
    """Write a run's plan and two checkpoints; return the newest model."""
    model = full(SMALL, dtype=torch.float32)
    save(folder / "checkpoints", full(SMALL, seed=9, dtype=torch.float32), step=3)
    save(folder / "checkpoints", model, step=12)
    (folder / "plan.json").write_text(plan_json(SMALL, tokenizer))
    return model


def read(folder: Path) -> Decoder:
    return full(SMALL, Weights(source="hf", path=str(folder)), dtype=torch.float32)


def same(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_export(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "deep" / "out"
    model = make_run(run)
    assert main([str(run), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "step-00000012" in shown
    assert "qwen2" in shown
    assert "there are no tokenizer files" in shown
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert list(out.parent.iterdir()) == [out]
    assert same(read(out), model)
    mask = os.umask(0o077)
    os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o666 & ~mask}
    assert main([str(run), "--out", str(out), "--step", "3"]) == 78
    assert "PT625" in capsys.readouterr().err
    assert same(read(out), model)
    assert main([str(run), "--out", str(out), "--step", "3", "--force", "--dtype", "bf16"]) == 0
    assert list(out.parent.iterdir()) == [out]
    with open_folder(out, SMALL) as source:
        assert source.block("embed.weight", (19, 33), (0, 0), (1, 33)).dtype == torch.bfloat16
    assert main([str(run), "--out", str(tmp_path / "x"), "--step", "4"]) == 78
    assert "steps 3, 12" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_export_refusals(tmp_path, capsys):
    run = tmp_path / "run"
    make_run(run)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    assert main([str(run), "--out", str(mine), "--force"]) == 78
    assert "something other than an exported model" in capsys.readouterr().err
    assert main([str(run), "--out", str(mine / "thesis.tex")]) == 78
    assert main([str(tmp_path), "--out", str(tmp_path / "new")]) == 78
    assert "is no run" in capsys.readouterr().err
    (run / "plan.json").write_text(plan_json(SMALL.model_copy(update={"position": "none"})))
    assert main([str(run), "--out", str(tmp_path / "new")]) == 78
    assert "PT624" in capsys.readouterr().err
    (run / "plan.json").write_text("{}")
    assert main([str(run), "--out", str(tmp_path / "new")]) == 78
    assert not (tmp_path / "new").exists()


def test_export_takes_the_tokenizer_along(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(json.dumps({}))
    (tokenizer / "model.safetensors").write_text("not ours")
    make_run(tmp_path / "run", tokenizer=str(tokenizer))
    assert "tokenizer.json" in export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 100
    (tokenizer / "tokenizer.json").unlink()
    assert "no tokenizer files found" in export(tmp_path / "run", tmp_path / "out2")


IDS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}


@pytest.mark.parametrize(
    ("fields", "expected", "settings"),
    [
        ({"generation": Generation(token_ids=IDS, settings={"eos_token_id": 2, "top_p": 0.5})}, IDS, {"top_p": 0.5}),
        ({"data": DataSpec(source="python-stdlib")}, {"bos_token_id": None, "eos_token_id": 0}, None),
        ({"data": DataSpec(source=["a.bin"])}, {"eos_token_id": None}, None),
        ({"data": DataSpec(source="python-stdlib", tokenizer="/gone")}, {"eos_token_id": None}, None),
    ],
)
def test_export_says_which_token_ends_a_text(tmp_path, fields, expected, settings):
    """It comes from the folder of ``model.config``, or else from the tokenizer that ended the training documents."""
    transformers = pytest.importorskip("transformers")
    make_run(tmp_path / "run")
    data = {"data": DataSpec(source="python-stdlib")}
    (tmp_path / "run" / "plan.json").write_text(small_plan(model=SMALL, **data | fields).to_json())
    export(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config.get(key) for key in expected} == expected
    assert (tmp_path / "out" / "generation_config.json").exists() == (settings is not None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert loaded.eos_token_id == (2 if settings else expected["eos_token_id"])
    assert loaded.top_p == (0.5 if settings else None)


def test_export_of_checkpoints_kept_elsewhere(tmp_path):
    run = tmp_path / "run"
    model = make_run(run)
    (run / "checkpoints").rename(tmp_path / "far")
    (tmp_path / "disk").mkdir()
    (tmp_path / "far").rename(tmp_path / "disk" / "run")
    (run / "plan.json").write_text(plan_json(folder=str(tmp_path / "disk")))
    export(run, tmp_path / "out")
    assert same(read(tmp_path / "out"), model)
