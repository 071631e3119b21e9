"""Partition of parameters over tensor ranks: golden tables of ten families, partool's decoder, patterns, refusals."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from math import prod
from typing import Any

import pytest
from _families import FAMILIES, GOLDEN, recorded, structure

from partool.layout.parameters import parameters
from partool.layout.tensor import (
    Decided,
    Partition,
    Structure,
    apply_patterns,
    by_name,
    chunks,
    collapse,
    decide,
    head_ranges,
    own_partition,
)
from partool.spec.experts import Moe
from partool.spec.model import Mla, ModelConfig
from partool.spec.parallel import TensorPattern

SMALL = ModelConfig(
    layers=3, hidden=24, ffn_hidden=22, heads=7, kv_heads=7, head_dim=4, vocab=31, norm="layernorm", position="learned",
    qkv_bias=True, out_bias=True, ffn_bias=True, qk_norm=True,
)  # fmt: skip


def text_of(rows: tuple[Partition, ...], ranks: int) -> str:
    """Return a partition as the lines of a golden table."""
    lines = []
    for row in rows:
        cuts = "; ".join(
            f"{one.dim}: " + ", ".join("+".join(f"{a}-{b}" for a, b in held) or "nothing" for held in one.ranges)
            for one in row.cuts
        )
        summed = " summed" if row.gradients == "summed" else ""
        outputs = f" outputs {row.summed_outputs} summed" if row.summed_outputs else ""
        lines.append(f"{row.name} {list(row.shape)} ×{row.count} {row.style}{summed}{outputs} ({row.rule}) {cuts}")
    return f"{ranks} ranks\n" + "".join(line.rstrip() + "\n" for line in lines)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_tables(family: str) -> None:
    """PARTOOL_GOLDEN=write renews the tables and the structures; look at them before they are committed."""
    write = os.environ.get("PARTOOL_GOLDEN") == "write"
    if write:
        data = recorded(family).model_dump(mode="json", exclude_defaults=True)
        modules = ",\n".join(json.dumps(module) for module in data.pop("modules"))
        text = json.dumps(data)[:-1] + ', "modules": [\n' + modules + "]}\n"
        (GOLDEN / f"{family}.json").write_text(text, encoding="utf-8")
    model = structure(family)
    got = ""
    for ranks in (2, 3, 4):
        found = decide(model, ranks, {})
        got += text_of(found.rows, ranks) + "".join(f"{one.code} {one.message}\n" for one in found.findings)
    file = GOLDEN / f"{family}.txt"
    if write:
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_every_element_is_held(family: str, ranks: int) -> None:
    model = structure(family)
    found = decide(model, ranks, {})
    if not found.findings:
        check_cover(found.rows, model.shapes(), ranks)


def check_cover(rows: tuple[Partition, ...], shapes: dict[str, tuple[int, ...]], ranks: int, axes: int = 1) -> None:
    """Check that every parameter has a row, and every element a rank; only elements marked as shared have two."""
    found = by_name(rows, shapes)
    assert list(found) == list(shapes)
    assert sum(row.count for row in rows) == len(shapes)
    for name, row in found.items():
        assert row.shape == shapes[name]
        copies = [len(row.holders(rank, ranks)) for rank in range(ranks)]
        held = sum(prod(row.local_shape(rank)) / copies[rank] for rank in range(ranks))
        assert held == pytest.approx(prod(row.shape)), name
        for rank in range(ranks):
            for size, ranges in zip(row.shape, row.spans(rank), strict=True):
                assert all(0 <= start < stop <= size for start, stop in ranges)
                assert all(first[1] <= second[0] for first, second in pairwise(ranges))
        if axes == 1 and row.gradients == "whole" and row.style != "replicated" and prod(row.local_shape(0)):
            assert copies[0] == 1, name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "phi", "mixtral", "deepseek_v2"])
def test_the_structure_alone_says_what_the_models_own_plan_says(family: str) -> None:
    model = structure(family)
    bare = model.model_copy(update={"tp_plan": {}})
    assert model.tp_plan
    with_plan, without = decide(model, 3, {}), decide(bare, 3, {})
    strict = {one.message.split(" cannot")[0] for one in without.findings}
    cuts = {row.name: (row.style, row.cuts, row.gradients) for row in without.rows}
    for row in with_plan.rows:
        if row.name not in strict:
            assert cuts[row.name] == (row.style, row.cuts, row.gradients), row.name
    assert strict == ({"model.layers.*.mlp.experts.gate_up_proj"} if model.experts else set())


def test_heads_are_cut_whole() -> None:
    assert head_ranges(7, 7, 3).keys == ((0, 3), (3, 6), (6, 7))
    assert head_ranges(14, 7, 3).queries == ((0, 6), (6, 12), (12, 14))
    idle = head_ranges(5, 5, 4)
    assert idle.queries == ((0, 2), (2, 4), (4, 5), (5, 5))
    assert (idle.idle, idle.shared) == (1, False)
    shared = head_ranges(8, 2, 4)
    assert shared.shared
    assert shared.keys == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert shared.queries == ((0, 2), (2, 4), (4, 6), (6, 8))
    # Five ranks for four heads: one head has two ranks. More ranks than query heads: the last hold nothing at all.
    assert head_ranges(8, 4, 5).keys == ((0, 1), (1, 2), (2, 3), (3, 4), (3, 4))
    assert head_ranges(3, 1, 4).keys == ((0, 1), (0, 1), (0, 1), (0, 0))


@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize("group", range(1, 5))
def test_every_query_head_lies_where_its_keys_do(heads: int, group: int) -> None:
    for ranks in range(1, 17):
        found = head_ranges(heads * group, heads, ranks)
        seen = [head for start, stop in found.queries for head in range(start, stop)]
        assert seen == list(range(heads * group))
        for (start, stop), (first, last) in zip(found.queries, found.keys, strict=True):
            assert sorted({head // group for head in range(start, stop)}) == list(range(first, last))
            # Every key and value head serves the same number of query heads.
            assert last == first or (stop - start) % (last - first) == 0


def test_widths_are_cut_as_torch_chunk_does() -> None:
    torch = pytest.importorskip("torch")
    for size in range(1, 20):
        for ranks in range(1, 9):
            sizes = [len(part) for part in torch.arange(size).chunk(ranks)]
            assert [stop - start for start, stop in chunks(size, ranks)] == sizes + [0] * (ranks - len(sizes))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_own_decoder(ranks: int, norms: bool, tied: bool) -> None:
    grouped = SMALL.model_copy(update={"heads": 6, "kv_heads": 2, "tied_embeddings": tied})
    for config in (SMALL, grouped):
        rows = own_partition(config, ranks, sequence_norms=norms)
        check_cover(rows, {info.name: info.shape for info in parameters(config)}, ranks)
        found = by_name(rows, [info.name for info in parameters(config)])
        expected = "summed" if norms else "whole"
        for name in ("layers.0.attention_norm.weight", "layers.1.attention.o.bias", "position.weight"):
            assert (found[name].style, found[name].gradients) == ("replicated", expected)
        assert found["layers.0.attention.q_norm.weight"].gradients == "summed"
        assert found["layers.0.attention.q.weight"].gradients == "whole"
        shared = config.kv_heads < min(ranks, config.heads)
        assert found["layers.0.attention.k.weight"].gradients == ("summed" if shared else "whole")


@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (1, 4), (4, 2), (2, 4), (1, 8), (8, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_two_axes(outer: int, inner: int, tied: bool) -> None:
    ranks = outer * inner
    sizes: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 2, "hidden": 24, "tied_embeddings": tied}
    config = SMALL.model_copy(update=sizes)
    rows = own_partition(config, ranks, inner)
    check_cover(rows, {info.name: info.shape for info in parameters(config)}, ranks, axes=2)
    found = {row.name: row for row in rows}
    for rank in range(ranks):
        first, second = divmod(rank, inner)
        hidden, heads = 24 // inner, 32 // outer
        wide, columns = ((first * heads, (first + 1) * heads),), ((second * hidden, (second + 1) * hidden),)
        assert found["layers.*.attention.q.weight"].spans(rank) == (wide, columns)
        assert found["layers.*.attention.o.weight"].spans(rank) == (columns, wide)
        assert found["layers.*.ffn_norm.weight"].spans(rank) == (columns,)
        assert found["layers.*.attention.q.bias"].spans(rank) == (((rank * 32 // ranks, (rank + 1) * 32 // ranks),),)
        rows_of_embed = chunks(31, ranks)[rank] if tied else chunks(31, outer)[first]
        assert found["embed.weight"].spans(rank)[0] == (rows_of_embed,)
    assert {row.name for row in rows if row.gradients == "summed"} == {
        "layers.*.attention.q_norm.weight", "layers.*.attention.k_norm.weight",
    }  # fmt: skip


def test_experts_and_latent_attention_are_planned() -> None:
    config = SMALL.model_copy(
        update={
            "heads": 6, "kv_heads": 6, "qk_norm": False,
            "moe": Moe(experts=4, top_k=2, ffn_hidden=10, shared_experts=2, first_dense_layers=1),
            "mla": Mla(q_rank=12, kv_rank=8, nope_head_dim=4, rope_head_dim=2, v_head_dim=3),
        }
    )  # fmt: skip
    rows = own_partition(config, 3)
    check_cover(rows, {info.name: info.shape for info in parameters(config)}, 3)
    found = {row.name: row for row in rows}
    assert found["layers.*.attention.kv_a.weight"].summed_outputs == ((8, 10),)
    assert found["layers.*.attention.q_b.weight"].spans(2)[0] == ((24, 36),)
    assert found["layers.*.attention.o.weight"].spans(0)[1] == ((0, 6),)
    assert found["layers.*.moe.experts.down.weight"].local_shape(0) == (4 * 24, 4)
    assert found["layers.*.moe.experts.up.weight"].local_shape(2) == (4 * 2, 24)
    assert found["layers.*.moe.experts.up.weight"].spans(2)[0] == ((8, 10), (18, 20), (28, 30), (38, 40))
    assert found["layers.*.moe.router.weight"].style == "replicated"


def test_layers_that_differ_keep_their_rows() -> None:
    rows = own_partition(SMALL, 2)
    up = next(row for row in rows if row.name == "layers.*.ffn.up.weight")
    other = up.model_copy(update={"name": "layers.1.ffn.up.weight", "style": "replicated", "cuts": (), "count": 1})
    layers = [up.model_copy(update={"name": f"layers.{n}.ffn.up.weight", "count": 1}) for n in (0, 2)]
    assert [row.name for row in collapse([layers[0], other, layers[1]])] == [
        "layers.0.ffn.up.weight", "layers.1.ffn.up.weight", "layers.2.ffn.up.weight",
    ]  # fmt: skip
    again = collapse(layers)
    assert [(row.name, row.count) for row in again] == [("layers.*.ffn.up.weight", 2)]


def row(decided: Decided, ending: str) -> Partition:
    """Return the row with this name ending."""
    return next(row for row in decided.rows if row.name.endswith(ending))


def only(decided: Decided) -> tuple[str, str, str]:
    """Return code, message and help of the only finding."""
    (finding,) = decided.findings
    return finding.code, finding.message, finding.help


def test_patterns_come_first() -> None:
    model = structure("llama")
    found = decide(
        model, 2, {"*.layers.0.mlp": "replicated", "*.self_attn.?_proj": "column_gathered", "*.o_proj": "row"}
    )
    assert found.findings == ()
    assert {row.style for row in found.rows if ".layers.0.mlp." in row.name} == {"replicated"}
    assert row(found, "layers.1.mlp.up_proj.weight").rule == "tp_plan"
    # The first match counts: o_proj is gathered too, so that its results are whole.
    assert row(found, "o_proj.weight").style == "column_gathered"
    assert row(found, "q_proj.weight").rule == "pattern '*.self_attn.?_proj'"


def test_patterns_say_what_no_rule_knows() -> None:
    model = structure("phi3").model_copy(update={"model_type": "unheard_of", "tp_plan": {}})
    unclear = decide(model, 3, {})
    assert {one.code for one in unclear.findings} == {"PT442"}
    assert [one.message.split(" cannot")[0] for one in unclear.findings] == [
        "model.layers.*.self_attn.qkv_proj", "model.layers.*.mlp.gate_up_proj",
    ]  # fmt: skip
    # The lines suggested by the findings give the same result as the preset.
    patterns = dict(entry(one.help) for one in unclear.findings)
    decided = decide(model, 3, patterns)
    assert decided.findings == ()
    expected = decide(structure("phi3"), 3, {})
    assert [row.cuts for row in decided.rows] == [row.cuts for row in expected.rows]


def entry(help: str) -> tuple[str, TensorPattern | Any]:
    """Return pattern and value of the line that a finding's help shows."""
    import yaml

    shown = yaml.safe_load(help[help.index("parallel") : help.rindex("}") + 1])
    ((pattern, value),) = shown["parallel"]["tensor"]["patterns"].items()
    return pattern, value if isinstance(value, str) else TensorPattern(**value)


UP, LATER = "*.up_proj", "down_proj after it is cut into other parts"
BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"*.mpl.up_proj": "column"}, "PT440", "nearest: model.layers.*.mlp.up_proj"),
    ({"*.down_proj": "replicated"}, "PT441", "no matrix of model.layers.*.mlp is cut by row"),
    ({UP: TensorPattern(style="column", unit=8)}, "PT441", LATER),
    ({UP: TensorPattern(style="column", unit=5)}, "PT441", "56 is no multiple of the unit 5"),
    ({UP: TensorPattern(style="column", parts=[20, 20])}, "PT441", "sum to 40, not to its width of 56"),
    ({"*.k_proj": "column_gathered"}, "PT441", "q_proj stays cut and k_proj beside it is gathered"),
    ({"*.q_proj": "replicated"}, "PT441", "k_proj stays cut and q_proj beside it is whole"),
    ({"*.v_proj": "replicated"}, "PT441", "q_proj stays cut and v_proj beside it is whole"),
    ({"*.gate_proj": "replicated"}, "PT441", "up_proj stays cut and gate_proj beside it is whole"),
    ({"*.gate_proj": "column_gathered"}, "PT441", "up_proj stays cut and gate_proj beside it is gathered"),
    ({"*.q_proj": "row"}, "PT441", "k_proj stays cut and o_proj beside it is cut by row"),
    ({"*.q_proj": TensorPattern(style="column", unit=8)}, "PT441", "o_proj after it is cut into other parts"),
    ({"*.norm": "row"}, "PT441", "which a norm cannot be"),
    ({"*.embed_tokens": "column"}, "PT441", "one of: vocabulary, replicated"),
    ({"lm_head": "column_gathered"}, "PT441", "one of: vocabulary, replicated"),
]


@pytest.mark.parametrize(("patterns", "code", "text"), BROKEN, ids=lambda value: str(value)[:40])
def test_patterns_that_cannot_be(patterns: dict[str, Any], code: str, text: str) -> None:
    found = only(decide(structure("llama"), 2, patterns))
    assert found[0] == code
    assert text in found[1] + found[2]


def test_siblings_that_stay_whole_are_told_one_by_one() -> None:
    found = decide(structure("llama"), 2, {"*.k_proj": "replicated", "*.v_proj": "replicated"}).findings
    assert [one.code for one in found] == ["PT441", "PT441"]
    assert [one.message.rpartition("and ")[2] for one in found] == [
        "k_proj beside it is whole", "v_proj beside it is whole",
    ]  # fmt: skip


@pytest.mark.parametrize("one", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
def test_matrices_of_experts_are_cut_both_or_none(family: str, one: str) -> None:
    found = only(decide(structure(family), 2, {f"*.experts.{one}": "replicated"}))
    assert found[0] == "PT441"
    assert f"experts is cut in part: {'' if one[0] == 'g' else 'gate_up_proj column, '}{one} replicated" in found[1]
    code, message, _ = only(decide(structure(family), 2, {"*.experts.gate_up_proj": "column"}))
    assert (code, "experts is cut into parts that do not fit" in message) == ("PT441", True)
    both = decide(structure(family), 2, {"*.experts": "replicated"})
    assert both.findings == ()
    assert row(both, f"experts.{one}").style == "replicated"


def test_experts_whose_code_has_their_matrices_transposed() -> None:
    """Transposed expert matrices as in Aria and Llama 4."""
    model = structure("mixtral")
    up = TensorPattern(style="row", parts=[56, 56])
    modules = [
        module.model_copy(update={"parameters": {"gate_up_proj": (5, 48, 112), "down_proj": (5, 56, 48)}})
        if module.kind == "experts"
        else module
        for module in model.modules
    ]
    model = model.model_copy(update={"modules": tuple(modules), "tp_plan": {}})
    for ranks in (2, 3):
        found = decide(model, ranks, {"*.experts.gate_up_proj": up, "*.experts.down_proj": "column"})
        assert found.findings == ()
        plain = decide(structure("mixtral"), ranks, {})
        for name, dim in (("gate_up_proj", 2), ("down_proj", 1)):
            (cut,) = row(found, f"experts.{name}").cuts
            assert (cut.dim, cut.ranges) == (dim, row(plain, f"experts.{name}").cuts[0].ranges)


def test_low_rank_is_whole_and_its_rotary_part_summed_where_heads_are_cut() -> None:
    model, kv_a = structure("deepseek_v2"), "kv_a_proj_with_mqa"
    for style in ("column_gathered", "column"):
        first = decide(model, 2, {f"*.{kv_a}": TensorPattern(style=style, unit=1)}).findings[0]
        assert (first.code, "every head reads all of it" in first.message) == ("PT441", True)
    asked = decide(model, 2, {f"*.{kv_a}": "replicated", "*.q_a_proj": "column_gathered"})
    assert asked.findings == ()
    assert row(asked, f"{kv_a}.weight").summed_outputs == ((12, 16),)
    whole = decide(model, 2, {"*.q_b_proj": "column_gathered", "*.kv_b_proj": "column_gathered"})
    assert whole.findings == ()
    assert row(whole, f"{kv_a}.weight").summed_outputs == ()


def changed(model: Structure, ending: str, **update: Any) -> Structure:
    """Return a structure in which the modules with these name endings are replaced."""
    modules = [module.model_copy(update=update) if module.name.endswith(ending) else module for module in model.modules]
    return model.model_copy(update={"modules": tuple(modules), "tp_plan": {}})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_modules_does_not_matter_where_names_and_widths_tell(family: str) -> None:
    model = structure(family)
    turned = model.model_copy(update={"modules": model.modules[::-1], "tp_plan": {}})
    rows = {row.name: row for row in decide(turned, 3, {}).rows}
    for row in decide(model.model_copy(update={"tp_plan": {}}), 3, {}).rows:
        assert rows[row.name] == row


def test_what_leads_back_is_told_by_widths() -> None:
    llama = structure("llama")
    names = {"up_proj": "first", "down_proj": "second", "gate_proj": "third"}
    modules = [
        module.model_copy(update={"name": module.name.replace(old, new)})
        for module in llama.modules
        for old, new in [next((pair for pair in names.items() if module.name.endswith(pair[0])), ("-", "-"))]
    ]
    renamed = llama.model_copy(update={"modules": tuple(modules), "tp_plan": {}})
    assert {row.style for row in decide(renamed, 2, {}).rows if ".second.weight" in row.name} == {"row"}
    # With a square matrix beside it and the output matrix first: still the one that does not start at the hidden size.
    square = changed(renamed, "third", parameters={"weight": (48, 48)})
    turned = square.model_copy(update={"modules": square.modules[::-1]})
    assert only(decide(turned, 2, {}))[1].startswith("model.layers.*.mlp.third cannot be cut: its widths 48 → 48")


def test_what_is_unclear_is_an_error_with_the_line_to_add() -> None:
    llama = structure("llama")
    # A norm over the width of all heads, as in OLMo 2: each rank has a part of it.
    wide = changed(structure("qwen3"), "q_norm", parameters={"weight": (60,)})
    code, message, help = only(decide(wide, 2, {}))
    assert (code, "of which each rank has a part" in message) == ("PT442", True)
    assert '"*.q_proj": column_gathered, "*.k_proj": column_gathered, "*.v_proj": column_gathered' in help
    gathered = dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj"), "column_gathered")
    decided = decide(wide, 2, gathered)  # type: ignore[arg-type]
    assert decided.findings == ()
    assert (row(decided, "q_norm.weight").style, row(decided, "o_proj.weight").style) == ("replicated", "row")
    assert row(decided, "q_norm.weight").gradients == "whole"
    # A width that matches no known size.
    odd = changed(llama, "up_proj", parameters={"weight": (55, 48)})
    code, message, help = only(decide(odd, 2, {}))
    assert message.startswith("model.layers.*.mlp.up_proj cannot be cut: its widths 48 → 55 do not lead")
    assert "where every rank has all of what it reads" in help
    # Parameters of an unknown module.
    unknown = changed(llama, "input_layernorm", kind="other", class_name="Gate", parameters={"scale": (48,)})
    assert "nothing is known of the parameters of a Gate" in only(decide(unknown, 2, {}))[1]


def test_fused_heads_that_ranks_would_share_are_refused() -> None:
    found = decide(structure("phi3"), 4, {})
    code, message, help = only(found)
    assert code == "PT442"
    assert "3 heads of keys and values on 4 ranks" in message
    assert "column_gathered" in help
    gathered = decide(structure("phi3"), 4, {"*.qkv_proj": "column_gathered"})
    assert gathered.findings == ()


def test_a_fused_matrix_of_a_width_that_its_preset_does_not_know() -> None:
    odd = changed(structure("gpt_neox"), "query_key_value", parameters={"weight": (96, 48)})
    assert "is not what the preset of gpt_neox expects" in only(decide(odd, 2, {}))[1]


def test_tied_matrices_have_one_row() -> None:
    found = decide(structure("qwen2"), 2, {"lm_head": "replicated"})
    assert found.findings == ()
    assert row(found, "embed_tokens.weight").style == "replicated"
    assert not [one for one in found.rows if one.name.startswith("lm_head")]


def test_one_rank_cuts_nothing() -> None:
    assert decide(structure("llama"), 1, {}) == Decided((), ())
    assert own_partition(SMALL, 1) == ()
    assert [one.code for one in decide(structure("llama"), 1, {"*.w": "row"}).findings] == ["PT440"]


def test_patterns_of_the_own_decoder_must_agree() -> None:
    rows = own_partition(SMALL, 2)
    found, findings = apply_patterns(SMALL, rows, {"*.ffn.up": "column"})
    assert findings == ()
    rules = {row.rule for row in found if ".ffn.up.weight" in row.name}
    assert rules == {"pattern '*.ffn.up'"}
    _, findings = apply_patterns(SMALL, rows, {"*.ffn.down": "replicated", "*.ffn.middle": "row"})
    assert sorted(one.code for one in findings) == ["PT440", "PT443"]
    _, findings = apply_patterns(SMALL, rows, {"*.q": TensorPattern(style="column", unit=2)})
    assert [one.code for one in findings] == ["PT443"]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_structures_are_still_what_transformers_builds(family: str) -> None:
    pytest.importorskip("transformers")
    assert recorded(family) == structure(family)
