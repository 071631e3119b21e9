"""The whole trainer with layers of experts, on ranks that share experts and all else, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import HALVES, LATENT, ONE, QUARTERS, STEPS, tensor_plan
from layouts import laid
from often import chosen, often
from test_checkpoint import stored_values
from test_tensor_trainer import assert_equal, assert_same_state

from partool.cost.training.traffic import traffic_bytes
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.report.experts import expert_loads
from partool.work.training import TrainingWork
from partool_runtime.checkpoint import step_folder

MIXED: dict[str, Any] = {
    "moe": {
        "experts": 4, "top_k": 2, "ffn_hidden": 13, "shared_experts": 1, "first_dense_layers": 1, "scores": "sigmoid",
        "groups": 2, "top_groups": 2, "scaling_factor": 1.7, "bias_rate": 0.03, "aux_loss": 0.2,
        "aux_scope": "sequence", "z_loss": 0.05, "residual": True,
    }
}  # fmt: skip
"""DeepSeek-V3's router, whose losses do not depend on how sequences are divided over ranks; residual experts."""
LIMITED: dict[str, Any] = {
    "activation": "gelu", "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 13, "capacity": 0.8, "aux_loss": 0.2},
}  # fmt: skip
"""Mixtral's router, without a gate, with losses of micro-batches, and an expert's tokens limited within each."""
SPREAD: dict[str, Any] = {
    "moe": {
        "experts": 4, "top_k": 1, "ffn_hidden": 13, "normalise": False, "aux_loss": 0.2, "aux_scope": "global_batch",
        "bias_rate": 0.0,
    }
}  # fmt: skip
"""One expert per token; the load is counted over all ranks."""
PYRAMID = MIXED | {"moe": MIXED["moe"] | {"layers": {"2": {"experts": 8, "top_k": 1, "ffn_hidden": 11}}}}
"""Another number of experts, of another width, in one layer, of which a token uses one."""
SINKS: dict[str, Any] = {
    "heads": 6, "kv_heads": 3, "head_dim": 4, "sinks": True, "window": 5, "layer_types": ("sliding", "full") * 2,
    "qkv_bias": True, "out_bias": True, "activation": "swiglu_clamped", "swiglu_limit": 0.05,
    "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 13, "bias": True, "aux_loss": 0.2, "aux_scope": "sequence"},
}  # fmt: skip
"""GPT-OSS: sinks, windows in turn with full attention, biases everywhere, and gates that the limit cuts."""
DENSE_SINKS = {name: value for name, value in SINKS.items() if name != "moe"} | {"ffn_bias": True}
GRID_SINKS = DENSE_SINKS | {"window": None, "grid": (3, 5), "layer_types": ("row", "column") * 2}
SHORT = PYRAMID | {"layers": 3}
DEEPSEEK = SHORT | LATENT | {"moe": MIXED["moe"] | {"residual": False}}
"""Latent attention, a dense layer, and layers of experts with a shared one."""
MODELS = {
    "deepseek": DEEPSEEK,
    "mixed": MIXED,
    "pyramid": PYRAMID,
    "short": SHORT,
    "limited": LIMITED | {"layers": 2, "moe": LIMITED["moe"] | {"layers": {"1": {"experts": 8, "ffn_hidden": 11}}}},
    "spread": SPREAD | {"layers": 2},
    "sinks": SINKS,
    "sinks of three heads": SINKS | {"heads": 3},
    "dense sinks": DENSE_SINKS,
    "sinks on a grid": GRID_SINKS,
}
LONG = {"mixed": MIXED, "limited": LIMITED, "spread": SPREAD, "spread twice": SPREAD, "five steps": MIXED}
NORMS = {"sequence_norms": True}
RING = {"sequence_method": "ring", "sequence_order": "zigzag"}
Cases = dict[str, tuple[Plan, str]]
NODE_FIRST = {"node_first": "a token once per node", "node_first_summed": "sums of nodes"}


def on_nodes(plan: Plan, exchange: str) -> Plan:
    """Return a plan whose ranks are on nodes of two, between which tokens travel as ``exchange`` says."""
    world = plan.layout.mesh.world_size
    devices = plan.devices.model_copy(update={"per_node": 2, "nodes": world // 2})
    return plan.model_copy(update={"devices": devices, "layout": laid(plan.layout, expert_exchange=exchange)})


"""Plans by name, each with the run of one process that it must equal."""


@cache
def core_cases(text: Path) -> Cases:
    """Return a few plans that together use everything once; pipelines have more layers than the others."""
    make = partial(tensor_plan, text, model=SHORT, expert=2)
    piped = partial(make, model=PYRAMID)
    limited, spread = MODELS["limited"], MODELS["spread"]
    return {
        "two ranks zero-3": (make(Mesh(dp_shard=2), settings={"zero": 3}, recompute="full"), "short"),
        "four ranks zero-2": (make(Mesh(dp_shard=4), settings={"zero": 2}, expert=4), "short"),
        "tensor ranks share tokens": (
            make(Mesh(dp_shard=2, tp=2), expert_tensor=2, settings={"zero": 3}, **NORMS),
            "short",
        ),
        "widths of experts": (make(Mesh(dp_shard=2, tp=2), expert=1, **NORMS), "short"),
        "zb-v": (piped(Mesh(dp_shard=2, pp=2), schedule="zb-v", stages=QUARTERS), "pyramid"),
        "1f1b of tensor ranks": (
            piped(Mesh(pp=2, tp=2), schedule="1f1b", stages=HALVES, recompute="selective"),
            "pyramid",
        ),
        "limited": (make(Mesh(cp=2, tp=2), model=limited, expert=4, recompute="full", **RING), "limited"),
        "latent attention": (
            make(
                Mesh(cp=2, tp=2), model=DEEPSEEK, expert=4, settings={"zero": 3}, recompute="selective", **RING | NORMS
            ),
            "deepseek",
        ),
        "spread": (make(Mesh(dp_replicate=2, dp_shard=2), model=spread, micro_batches=1), "spread"),
        **sink_cases(text),
        **fixed_cases(text),
        "a token once per node": (
            on_nodes(make(Mesh(cp=2, tp=2), model=limited, expert=4, recompute="selective", **RING), "node_first"),
            "limited",
        ),
        "sums of nodes": (
            on_nodes(
                make(Mesh(dp_shard=2, tp=2), expert_tensor=2, settings={"zero": 3}, recompute="full", **NORMS),
                "node_first_summed",
            ),
            "short",
        ),
    }


def fixed_cases(text: Path) -> Cases:
    """Return plans whose layers of experts do not make the host wait; some are compiled."""
    make = partial(tensor_plan, text, model=SHORT)
    padded = {"expert": 4, "expert_exchange": "padded", "expert_rank_capacity": 4.0}
    compiled, three = {"compile": "block"}, {"settings": {"zero": 3}}
    halves = padded | {"expert": 2, "expert_tensor": 2}
    return {
        "fixed rows": (make(Mesh(dp_shard=2, tp=2), recompute="full", **halves, **three, **NORMS), "short"),
        "fixed rows zero-2": (make(Mesh(dp_shard=4), settings={"zero": 2}, **padded), "short"),
        "fixed rows in a ring": (
            make(Mesh(cp=2, tp=2), model=MODELS["limited"], recompute="selective", **padded, **RING),
            "limited",
        ),
        "fixed rows in zb-v": (
            make(
                Mesh(dp_shard=2, pp=2), model=MIXED, schedule="zb-v", stages=QUARTERS,
                **padded | {"expert": 2, "expert_rank_capacity": 2.0},
            ),
            "mixed",
        ),
        "fixed rows compiled": (make(Mesh(dp_shard=4), **padded, **compiled, **three), "short"),
        "fixed rows compiled on tensor ranks": (
            make(Mesh(dp_shard=2, tp=2), recompute="selective", **halves, **compiled, **NORMS), "short",
        ),
        "experts compiled": (make(Mesh(dp_shard=2), expert=1, recompute="selective", **compiled, **three), "short"),
        "widths of experts compiled": (make(Mesh(dp_shard=2, tp=2), expert=1, **compiled, **NORMS), "short"),
        "spread compiled": (
            make(Mesh(dp_shard=2), model=MODELS["spread"], expert=1, micro_batches=1, **compiled), "spread",
        ),
    }  # fmt: skip


def sink_cases(text: Path) -> Cases:
    """Return plans of GPT-OSS in every layout that cuts sinks, or biases of experts, in another way."""
    make = partial(tensor_plan, text, model=SINKS)
    ulysses, three = {"sequence_method": "ulysses"}, {"settings": {"zero": 3}}
    plans = {
        "sinks on all axes": make(
            Mesh(cp=2, tp=2), expert=2, expert_tensor=2, recompute="selective", **three, **ulysses
        ),
        "sinks zero-3": make(Mesh(dp_shard=2), expert=2, recompute="full", **three),
        "sinks and widths": make(Mesh(tp=2), recompute="attention", **NORMS),
        "sinks on four tensor ranks": make(Mesh(tp=4), recompute="keep_attention"),
        "sinks in a ring": make(Mesh(cp=2, tp=2), **RING | three),
        "sinks in usp": make(Mesh(cp=4), sequence_method="usp", sequence_inner=2, sequence_order="zigzag"),
        "sinks in startrail": make(Mesh(cp=4), sequence_method="startrail", sequence_teams=2, sequence_order="zigzag"),
        "sinks with gathered keys": make(Mesh(cp=2), sequence_method="all_gather", expert=2),
        "sinks for fewer heads than ranks": make(Mesh(cp=4), model=SINKS | {"heads": 3}, **ulysses),
        "sinks in a pipeline": make(Mesh(dp_shard=2, pp=2), expert=2, schedule="zb-v", stages=QUARTERS),
    }
    found = {name: (plan, "sinks of three heads" if "fewer" in name else "sinks") for name, plan in plans.items()}
    dense, grid = partial(tensor_plan, text, model=DENSE_SINKS), partial(tensor_plan, text, model=GRID_SINKS)
    weights = {"settings": {"zero": 0}, "schedule": "weipipe", "stages": QUARTERS, "micro_batches": 4}
    halves = make(Mesh(dp_shard=2, tp=2), expert=2, expert_tensor=2, recompute="full", **three, **NORMS)
    return found | {
        "sinks and sums of nodes": (on_nodes(halves, "node_first_summed"), "sinks"),
        "sinks compiled": (dense(Mesh(dp_shard=2), compile="block", recompute="selective", **three), "dense sinks"),
        "sinks with weights that travel": (dense(Mesh(pp=4), **weights), "dense sinks"),
        "sinks in tiles": (dense(Mesh(tp=2), mlp_tile_tokens=4), "dense sinks"),
        "sinks on rows and columns": (
            grid(Mesh(cp=3), sequence_method="dsp", sequence_order="grid"),
            "sinks on a grid",
        ),
    }


def further_cases(text: Path) -> Cases:
    """Return the rest of the combinations of four ranks."""
    make = partial(tensor_plan, text, model=MIXED)
    found: Cases = {}
    for zero in (1, 2, 3):
        settings = {"zero": zero}
        for title, mesh, fields in (
            ("dp", Mesh(dp_shard=4), {}),
            ("replicas", Mesh(dp_replicate=2, dp_shard=2), {}),
            ("tp", Mesh(dp_shard=2, tp=2), {}),
            ("tp shares", Mesh(dp_shard=2, tp=2), NORMS),
            ("cp", Mesh(dp_shard=2, cp=2), {"sequence_method": "ulysses"}),
            ("ring", Mesh(dp_shard=2, cp=2), RING),
            ("cp tp shares", Mesh(cp=2, tp=2), RING | NORMS),
            ("1f1b", Mesh(dp_shard=2, pp=2), {"schedule": "1f1b", "stages": HALVES}),
            ("interleaved", Mesh(dp_shard=2, pp=2), {"schedule": "interleaved", "stages": QUARTERS}),
            ("zb-v", Mesh(dp_shard=2, pp=2), {"schedule": "zb-v", "stages": QUARTERS}),
            ("zb-h1", Mesh(tp=2, pp=2), {"schedule": "zb-h1", "stages": HALVES} | NORMS),
        ):
            for expert in (1, 2, 4):
                if mesh.dp_shard * mesh.cp * mesh.tp % expert == 0 and expert <= mesh.dp_shard * mesh.cp * mesh.tp:
                    name = f"{title} zero-{zero} expert {expert}"
                    found[name] = (make(mesh, settings=settings, expert=expert, **fields), "mixed")
            if mesh.dp_shard * mesh.cp * mesh.tp == 4:
                halves = make(mesh, settings=settings, expert=2, expert_tensor=2, **fields)
                found[f"{title} zero-{zero} halves of experts"] = (halves, "mixed")
        for expert in (1, 2, 4):
            longer = make(Mesh(dp_shard=4), settings=settings | {"steps": 5}, expert=expert)
            found[f"five steps zero-{zero} expert {expert}"] = (longer, "five steps")
        # Ranks that hold the same halves of experts share their state.
        for title, mesh, fields in (
            ("tp", Mesh(dp_shard=4, tp=2), {}),
            ("replicas", Mesh(dp_replicate=2, dp_shard=2, tp=2), {}),
            ("1f1b tp shares", Mesh(dp_shard=2, pp=2, tp=2), {"schedule": "1f1b", "stages": HALVES} | NORMS),
        ):
            halves = make(mesh, settings=settings, expert=2, expert_tensor=2, **fields)
            found[f"eight {title} zero-{zero} halves of experts"] = (halves, "mixed")
    for policy in ("attention", "selective", "keep_attention", "full"):
        halves = make(Mesh(cp=2, tp=2), expert=2, expert_tensor=2, recompute=policy, **RING)
        found[f"recompute {policy} halves of experts"] = (halves, "mixed")
        found[f"recompute {policy}"] = (make(Mesh(dp_shard=2, tp=2), expert=4, recompute=policy, **NORMS), "mixed")
        found[f"recompute {policy} limited"] = (
            make(Mesh(cp=2, tp=2), model=LIMITED, expert=2, recompute=policy, **RING),
            "limited",
        )
    for expert in (1, 2, 4):
        spread = {"model": SPREAD, "micro_batches": 1, "expert": expert}
        found[f"spread {expert}"] = (make(Mesh(dp_shard=4), **spread), "spread")
        found[f"spread tp {expert}"] = (make(Mesh(dp_shard=2, tp=2), **spread), "spread")
        # The load of the step's earlier micro-batches counts, too.
        twice = make(Mesh(cp=2, tp=2), model=SPREAD, expert=expert, **RING)
        found[f"spread over micro-batches {expert}"] = (twice, "spread twice")
        found[f"limited {expert}"] = (make(Mesh(cp=2, tp=2), model=LIMITED, expert=expert, **RING | NORMS), "limited")
    return found


def node_cases(text: Path) -> Cases:
    """Return the combinations whose expert ranks fill nodes of two, with both exchanges that send by node."""
    return {
        f"{title}, {name}": (on_nodes(plan, exchange), reference)
        for name, (plan, reference) in further_cases(text).items()
        if plan.layout.expert_ranks == 4
        for exchange, title in NODE_FIRST.items()
    }


@cache
def balanced_cases(text: Path) -> dict[str, Plan]:
    """Return plans whose routers take experts in turn, so that the bytes between ranks are known."""
    model = SHORT | {"moe": PYRAMID["moe"] | {"routing": "balanced"}}
    make = partial(tensor_plan, text, model=model, training={"sequence_length": 16})
    once = {"expert": 2, "micro_batches": 1, "recompute": "full"}
    return {
        "balanced": make(Mesh(dp_shard=2, tp=2), expert=4, settings={"steps": 2}, **NORMS),
        "balanced recomputed": make(Mesh(dp_shard=4), settings={"zero": 3, "steps": 2}, **once),
        "balanced fixed rows": make(
            Mesh(dp_shard=2, tp=2),
            settings={"steps": 2},
            **once | {"expert_tensor": 2, "expert_exchange": "padded", "expert_rank_capacity": 1.3},
        ),
        "balanced tensor ranks": make(Mesh(dp_shard=2, tp=2), expert_tensor=2, settings={"steps": 2}, **once),
        "balanced widths": make(
            Mesh(dp_shard=2, tp=2), micro_batches=1, settings={"steps": 2}, recompute="full", **NORMS
        ),
    }


def launch(pools: Pools, folder: Path, cases: Cases, models: dict[str, dict[str, Any]]) -> Jobs:
    """Run the cases, and their references of ``models``."""
    text = folder / "text"
    jobs = Jobs(folder, pools)
    for name, (case, _) in cases.items():
        jobs.train(name, case, run=f"case {name}")
    for name, model in models.items():
        once = 1 if name == "spread" else 2
        steps = {"steps": 5 if name == "five steps" else STEPS}
        one = tensor_plan(text, ONE, model=model, micro_batches=once, settings=steps)
        jobs.train(f"reference {name}", one, run=f"reference {name}")
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    return folder


OFTEN = (
    "two ranks zero-3",
    "tensor ranks share tokens",
    "limited",
    "spread",
    "balanced widths",
    "sinks on all axes",
    *NODE_FIRST.values(),
)
"""Cases that run each time."""


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, folder: Path) -> Jobs:
    """Run the core cases, those whose bytes are known, and one run that goes through three layouts."""
    cases = chosen(request, core_cases(folder / "text"))
    used = {reference for _, reference in cases.values()} | {"mixed"}
    jobs = launch(pools, folder, cases, {name: MODELS[name] for name in MODELS if name in used})
    for name, case in chosen(request, balanced_cases(folder / "text")).items():
        jobs.train(name, case, run=f"case {name}")
    make = partial(tensor_plan, folder / "text", model=MIXED)
    halves = make(Mesh(dp_shard=4), expert=2, expert_tensor=2, settings={"zero": 3})
    jobs.train("stopped", halves, run="crossed", stop_at=1)
    piped = make(Mesh(pp=2, tp=2), expert=2, schedule="1f1b", stages=HALVES, settings={"steps": 2})
    jobs.train("resumed", piped, run="crossed", resume=True)
    jobs.train("alone", make(ONE), run="crossed", resume=True)
    return jobs


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(core_cases(Path("text")), OFTEN))
def test_training_equals_one_process(ran: Jobs, name: str) -> None:
    assert_equal(ran, name, *core_cases(Path("text"))[name])


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(core_cases(Path("text")), OFTEN))
def test_loads_are_those_of_one_process(ran: Jobs, name: str) -> None:
    """Each choice is counted once, whichever rank made it, and however often its layer was computed."""
    run, reference = f"case {name}", f"reference {core_cases(Path('text'))[name][1]}"
    found, wanted = ([layer.model_dump() for layer in expert_loads(ran.folder / each)] for each in (run, reference))
    assert [layer["tokens"] for layer in found] == [layer["tokens"] for layer in wanted]
    for key in ("step", "layer", "dropped", "entropy", "imbalance"):
        assert [layer[key] for layer in found] == pytest.approx([layer[key] for layer in wanted], rel=1e-9), key
    assert all(sum(layer["tokens"]) > 0 for layer in found)


@pytest.mark.timeout(500)
def test_biases_move_and_are_saved(ran: Jobs) -> None:
    state = ran.state("case two ranks zero-3", step=STEPS)
    bias = state["model.layers.2.moe.router.bias"]
    # After an odd number of steps every bias has moved an odd number of times, but where the load was the mean.
    assert bias.count_nonzero() > 0
    assert (bias / 0.03 - (bias / 0.03).round()).abs().max() < 1e-9
    assert not any("router.bias" in name for name in state if not name.startswith("model."))


@pytest.mark.timeout(500)
def test_resume_on_other_ranks_goes_on_as_if_unbroken(ran: Jobs) -> None:
    assert ran.ended("stopped", rank=2) == "Preempted: stopped by SIGTERM after step 1"
    assert ran.ended("resumed", 3) == ran.ended("alone") == "done"
    assert_same_state(ran, "crossed", "reference mixed")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(["tensor ranks share tokens", "spread", "1f1b of tensor ranks"], OFTEN))
def test_what_several_ranks_hold_is_saved_once(ran: Jobs, name: str) -> None:
    stored = stored_values(step_folder(ran.folder / f"case {name}" / "checkpoints", STEPS))
    reference = core_cases(Path("text"))[name][1]
    assert stored == sum(tensor.numel() for tensor in ran.state(f"reference {reference}", step=STEPS).values())


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(balanced_cases(Path("text")), OFTEN))
def test_bytes_between_ranks_with_experts_are_those_of_the_cost_model(ran: Jobs, name: str) -> None:
    case = balanced_cases(Path("text"))[name]
    training = case.training
    job = TrainingWork(
        case.model, case.devices, training.sequence_length, training.precision, global_batch=training.global_batch
    )
    planned = traffic_bytes(job, case.layout)
    summary = next(event for event in ran.events(f"case {name}", "summary") if event["scope"] == "rank")
    measured = summary["measures"]["traffic"]
    for term, ranks in (("expert", case.layout.expert_ranks), ("tensor", case.layout.mesh.tp)):
        assert (planned[term] > 0) == (ranks > 1)
        assert planned[term] == (measured[term]["value"] if ranks > 1 else 0), term
    for term in ("gradient_sync", "parameter_gather"):  # the odd rows of small matrices are padded to whole shards
        assert measured[term]["value"] == pytest.approx(planned[term], rel=0.06), term


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("make", [further_cases, node_cases])
def test_every_combination_equals_one_process(pools: Pools, tmp_path: Path, make: Callable[[Path], Cases]) -> None:
    write_text(tmp_path / "text")
    cases = make(tmp_path / "text")
    jobs = launch(pools, tmp_path, cases, LONG)
    for name, (case, reference) in cases.items():
        assert_equal(jobs, name, case, reference)
