"""Make choices from a model's structure alone, based on the widths of consecutive matrices and their names.

In an attention or a feed-forward network, the matrix whose output is the hidden size is cut by rows. Matrices whose
input is the hidden size are cut by columns (Megatron-LM, arXiv 1909.08053, section 3). If widths do not match, no
choice is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partool.layout.tensor.choice import LINEAR, CutChoice, ModuleGroup, Unclear, head_kind, leaf
from partool.layout.tensor.structure import Structure, StructureModule
from partool.layout.tensor.types import Style

RULE = "structure"
_ROW_NAMES = {
    "o_proj", "out_proj", "o", "wo", "dense", "c_proj", "down_proj", "fc2", "w2", "dense_4h_to_h", "down", "fc_out",
}  # fmt: skip
_POSITIONS = ("pos", "wpe")


def infer(structure: Structure, group: ModuleGroup | None, module: StructureModule) -> CutChoice | Unclear:
    """Return the choice for a module that is no norm (see :func:`infer_norm`) and has no stacked experts."""
    if module.name in (structure.embedding, structure.head):
        return CutChoice("vocabulary", RULE, "tokens over all ranks")
    if module.kind == "router":
        return _router()
    if module.kind == "embedding":
        if any(word in leaf(module.name).lower() for word in _POSITIONS):
            return CutChoice("replicated", RULE, "of positions")
        return Unclear("it is an embedding, but not that of the tokens")
    if module.kind in LINEAR and group is not None:
        if is_router(group, module.name):
            return _router()
        return _attention(group, module) if group.attention else _network(group, module)
    sizes = {shape[:1] for shape in module.parameters.values()}
    line = '"NAME": {style: column, heads: query}' if sizes == {(structure.heads,)} else '"NAME": replicated'
    return Unclear(f"nothing is known of the parameters of a {module.class_name}", line)


def is_router(group: ModuleGroup, name: str) -> bool:
    """Return True if a matrix of a group is a router, which selects experts or weights their outputs."""
    experts = group.structure.experts
    return bool(experts) and group.linears[name][0] in (1, experts) and not group.attention


def _router() -> CutChoice:
    return CutChoice("replicated", RULE, "chooses experts or weighs them, for all tokens")


def row_of(group: ModuleGroup) -> str | None:
    """Return the name of the group's matrix whose output is the hidden size; None if widths and names do not decide."""
    hidden = group.structure.hidden
    back = [name for name, (out, _) in group.linears.items() if out == hidden]
    back = [name for name in back if group.linears[name][1] != hidden] or back
    named = [name for name in back if leaf(name) in _ROW_NAMES]
    if len(named) == 1:
        return named[0]
    if len(back) == 1:
        return back[0]
    last = list(group.linears)[-1]
    return last if last in back and not named else None


def _network(group: ModuleGroup, module: StructureModule) -> CutChoice | Unclear:
    """Return the choice for a matrix of a feed-forward network."""
    row, hidden = row_of(group), group.structure.hidden
    if row is None or len(group.linears) < 2:
        return Unclear("it is not clear which matrix beside it leads back to the hidden size", '"NAME": column')
    inner = group.linears[row][1]
    out, into = group.linears[module.name]
    if module.name == row:
        return CutChoice("row", RULE, f"leads back to the hidden size of {hidden}")
    if into == hidden and out == inner:
        return CutChoice("column", RULE, f"leads from the hidden size to {leaf(row)}")
    if into == hidden and out == 2 * inner:
        why = f"{out} is twice the input of {leaf(row)}: fused, but whether one matrix after the other is not known"
        return Unclear(why, f'"NAME": {{style: column, parts: [{inner}, {inner}]}}')
    return Unclear(f"its widths {into} → {out} do not lead from {hidden} to the {inner} of {leaf(row)}")


def _attention(group: ModuleGroup, module: StructureModule) -> CutChoice | Unclear:
    """Return the choice for a projection of an attention."""
    row, structure = row_of(group), group.structure
    if row is None or len(group.linears) < 2:
        return Unclear("it is not clear which matrix beside it leads back to the hidden size", '"NAME": column')
    if module.name == row:
        return by_heads(group, module, "row", RULE, f"leads from the heads to the hidden size of {structure.hidden}")
    latent = low_rank(group, module)
    if latent is not None:
        return latent
    return by_heads(group, module, "column", RULE, "whole heads")


def low_rank(group: ModuleGroup, module: StructureModule, rule: str = RULE) -> CutChoice | None:
    """Return the choice for a down-projection of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    The output of a down-projection, except any rotary part, is the input of another matrix, which is not the last one.
    Returns None for a module that is not a down-projection.
    """
    out, into = group.linears[module.name]
    row, hidden = row_of(group), group.structure.hidden
    inputs = {width for name, (_, width) in group.linears.items() if name not in (row, module.name)} - {hidden}
    if into != hidden:
        return None
    if out in inputs:
        return CutChoice("replicated", rule, "low rank, which every head reads")
    if "kv" not in leaf(module.name):
        return None
    normed = {module.parameters["weight"][0] for module in group.members if module.kind == "norm" and module.parameters}
    ranks = [width for width in inputs & normed if width < out]
    if len(ranks) != 1:
        return None
    why = "low rank, which every head reads; the gradient of its rotary part is summed over the ranks' heads"
    return CutChoice("replicated", rule, why, summed_outputs=((ranks[0], out),))


def latents(group: ModuleGroup) -> dict[str, CutChoice]:
    """Return the choices for all down-projections of a group that is a latent attention; empty for other groups."""
    if not group.attention or row_of(group) is None:
        return {}
    choices = {module.name: low_rank(group, module) for module in group.members if module.name in group.linears}
    return {name: choice for name, choice in choices.items() if choice is not None}


def set_summed_outputs(group: ModuleGroup, chosen: dict[str, CutChoice]) -> None:
    """Set whether the gradients of the rotary parts of down-projections are summed over ranks.

    They are summed only if the ranks compute different heads: if every rank has all heads, a sum would count the
    gradient once per rank. Patterns cannot express such a sum.
    """
    cut = any(name in chosen and chosen[name].style == "column" for name in group.linears)
    for name, latent in latents(group).items():
        if name in chosen and chosen[name].style == "replicated":
            chosen[name] = replace(chosen[name], summed_outputs=latent.summed_outputs if cut else ())


def by_heads(group: ModuleGroup, module: StructureModule, style: Style, rule: str, why: str) -> CutChoice | Unclear:
    """Return the choice to cut an attention's projection by whole heads; unclear if no number of heads fits."""
    structure = group.structure
    width = group.linears[module.name][1 if style == "row" else 0]
    kind = head_kind(structure, width)
    if kind is not None and not (style == "row" and kind == "key"):
        return CutChoice(style, rule, why, heads=kind)
    latent = any(low_rank(group, other) for other in group.members if other.name in group.linears)
    if latent and width % structure.heads == 0:
        return CutChoice(style, rule, why, heads="query")
    fused = (structure.heads + 2 * structure.kv_heads) * structure.head_dim
    if width == fused:
        query, key = structure.heads * structure.head_dim, structure.kv_heads * structure.head_dim
        text = "queries, keys and values are fused, but whether one after the other or head by head is not known"
        return Unclear(text, f'"NAME": {{style: {style}, parts: [{query}, {key}, {key}]}}')
    text = (
        f"its width of {width} is not that of {structure.heads} or {structure.kv_heads} heads of {structure.head_dim}"
    )
    line = f'"NAME": {{style: {style}, heads: query}}' if width % structure.heads == 0 else '"NAME": column_gathered'
    return Unclear(text, line)


def infer_norm(group: ModuleGroup, module: StructureModule, chosen: Mapping[str, CutChoice]) -> CutChoice | Unclear:
    """Return the choice for a norm; ``chosen`` has the choices for the matrices of the norm's group, by module name."""
    structure, shape = group.structure, next(iter(module.parameters.values()), ())
    decided = {name: chosen[name] for name in group.linears if name in chosen}
    cut = [name for name, choice in decided.items() if choice.style == "column"]
    if not cut or group.block:
        # The norm's input is whole: it is the hidden state, or no matrix of the group has outputs that stay cut.
        if shape in ((structure.hidden,), ()) or (decided and not cut):
            return CutChoice("replicated", RULE, "of what every rank has")
        return Unclear(f"it is over {shape}, not over the hidden size of {structure.hidden}")
    if group.attention and shape == (structure.head_dim,):
        return CutChoice("replicated", RULE, "each rank applies it to its own heads", summed=True)
    if group.attention and len(shape) == 2 and shape[1] == structure.head_dim:
        kind = head_kind(structure, shape[0] * shape[1])
        if kind is not None:
            return CutChoice("column", RULE, "one row per head", heads=kind)
    latent_widths = {
        group.linears[name][0] for name, choice in decided.items() if choice.style not in ("column", "row")
    }
    latent_widths |= {start for choice in latents(group).values() for start, _ in choice.summed_outputs}
    if len(shape) == 1 and shape[0] in latent_widths:
        return CutChoice("replicated", RULE, "of the latent, which every rank has")
    gathered = ", ".join(f'"*.{leaf(name)}": column_gathered' for name in cut)
    return Unclear(f"it is over {shape}, of which each rank has a part", gathered)
