"""Choices from a model's own ``tp_plan``, which is a class attribute in transformers 5.23.

The styles of a plan are documented at https://huggingface.co/docs/transformers/main/en/perf_infer_gpu_multi.
"""

from __future__ import annotations

from partool.layout.tensor.choice import CutChoice, ModuleGroup, Unclear
from partool.layout.tensor.cutting import collapsed_name
from partool.layout.tensor.infer import by_heads, low_rank
from partool.layout.tensor.structure import Structure, StructureModule
from partool.layout.tensor.types import Style

RULE = "tp_plan"
_STYLES: dict[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "rowwise_split_input": "row",
    "packed_colwise": "column",
    "packed_rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "replicated",
    "replicate": "replicated",
}
"""Styles that say how a matrix is cut. Styles that describe inputs and outputs, or distribute experts, are not here."""

_WHY: dict[Style, str] = {
    "column": "inner widths",
    "row": "inner widths, as the matrices before it leave them",
    "column_gathered": "results are gathered",
}


def planned(
    structure: Structure, group: ModuleGroup | None, module: StructureModule, name: str
) -> CutChoice | Unclear | None:
    """Return the choice of ``tp_plan`` for a module or for its parameter ``name``; None if the plan names neither."""
    word = _entry(structure, name) or _entry(structure, module.name)
    if word == "mla_kv_a_proj" and group is not None and module.name in group.linears:
        return low_rank(group, module, RULE)
    style = _STYLES.get(word)
    if style is None or module.name in (structure.embedding, structure.head):
        # The loss is computed from sharded logits, so the head's output is never gathered, whatever the plan says.
        return CutChoice("vocabulary", RULE, "tokens over all ranks") if style else None
    if word == "replicated_with_grad_allreduce":
        return CutChoice("replicated", RULE, "each rank applies it to its own part", summed=True)
    if word.startswith("packed"):
        width = module.parameters[name.rpartition(".")[2]][1] if module.kind == "experts" else 0
        width = width or (group.linears[module.name][0] if group is not None else 0)
        return CutChoice(style, RULE, "two matrices, each by its inner widths", parts=(width // 2, width // 2))
    if group is not None and group.attention and module.name in group.linears and style in ("column", "row"):
        return _attention(group, module, style)
    return CutChoice(style, RULE, _WHY.get(style, ""))


def _attention(group: ModuleGroup, module: StructureModule, style: Style) -> CutChoice | Unclear:
    choice = by_heads(group, module, style, RULE, "whole heads")
    structure = group.structure
    if isinstance(choice, CutChoice) or style == "row" or structure.heads != structure.kv_heads:
        return choice
    width = group.linears[module.name][0]
    # The plan gives each rank one range of outputs, so each head's queries, keys and values must be adjacent.
    return CutChoice(style, RULE, "whole heads", heads="query") if width % structure.heads == 0 else choice


def _entry(structure: Structure, name: str) -> str:
    collapsed = collapsed_name(name)
    for pattern, word in structure.tp_plan.items():
        if collapsed == pattern or collapsed.endswith("." + pattern):
            return word
    return ""
