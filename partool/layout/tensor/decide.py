"""Partition of a model over tensor-parallel ranks, decided from the model's structure alone.

Rules apply in this order: the user's patterns, presets of known model types, the model's own ``tp_plan``, the model's
structure. A module that no rule decides is an error, whose message says which pattern to write; no module is silently
replicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from partool.diagnostics.record import Diagnostic
from partool.layout.tensor.choice import LINEAR, CutChoice, ModuleGroup, Subject, Unclear, groups
from partool.layout.tensor.cutting import collapse, collapsed_name
from partool.layout.tensor.infer import RULE, infer, infer_norm, set_summed_outputs
from partool.layout.tensor.pairs import check_experts, check_pairs
from partool.layout.tensor.patterns import PATH, Patterns, matching, unmatched, wanted
from partool.layout.tensor.plans import planned
from partool.layout.tensor.ranges import CannotPartitionError, partitions_of
from partool.layout.tensor.structure import Structure, StructureModule
from partool.layout.tensor.types import Partition, Style

Arrangement = Literal["plain", "qkv", "per_head", "halves"]
"""Order of the matrices that are fused into one. plain: a single matrix; qkv: all queries, then all keys, then all
values; per_head: for each head in turn, its queries, keys and values; halves: two matrices of the same width."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The style of a matrix, and the arrangement of the matrices that are fused into it."""

    style: Style
    arrangement: Arrangement = "plain"


PRESETS: dict[str, dict[str, Preset]] = {
    "gpt2": {"attn.c_attn": Preset("column", "qkv")},
    "gpt_neox": {"attention.query_key_value": Preset("column", "per_head")},
    "phi3": {"self_attn.qkv_proj": Preset("column", "qkv"), "mlp.gate_up_proj": Preset("column", "halves")},
    "glm": {"mlp.gate_up_proj": Preset("column", "halves")},
    "glm4": {"mlp.gate_up_proj": Preset("column", "halves")},
}
"""Presets by model type and end of the module's name; o_proj and down_proj need none, as their widths decide."""


def preset(structure: Structure, name: str, width: int) -> CutChoice | Unclear | None:
    """Return how a preset cuts a matrix of output width ``width``; None if there is no preset for the matrix."""
    for ending, chosen_preset in PRESETS.get(structure.model_type, {}).items():
        if name == ending or name.endswith("." + ending):
            return arranged(structure, chosen_preset, width, f"preset {structure.model_type}")
    return None


def arranged(structure: Structure, chosen_preset: Preset, width: int, rule: str) -> CutChoice | Unclear:
    """Return the choice that a preset's arrangement implies for a matrix of output width ``width``."""
    query, key = structure.heads * structure.head_dim, structure.kv_heads * structure.head_dim
    if chosen_preset.arrangement == "halves" and width % 2 == 0:
        return CutChoice(
            chosen_preset.style, rule, "two matrices, each by its inner widths", parts=(width // 2, width // 2)
        )
    if chosen_preset.arrangement == "qkv" and width == query + 2 * key:
        return CutChoice(
            chosen_preset.style, rule, "queries, keys and values, each by whole heads", (query, key, key), 1, "query"
        )
    if chosen_preset.arrangement == "per_head" and structure.heads == structure.kv_heads and width == 3 * query:
        return CutChoice(chosen_preset.style, rule, "whole heads, of queries, keys and values together", heads="query")
    if chosen_preset.arrangement == "plain":
        return CutChoice(chosen_preset.style, rule)
    return Unclear(
        f"its width of {width} is not what the preset of {structure.model_type} expects", '"NAME": column_gathered'
    )


@dataclass(frozen=True, slots=True)
class Decided:
    """Partitions of all parameters (equal layers merged), and findings; after errors, ``rows`` is incomplete."""

    rows: tuple[Partition, ...]
    findings: tuple[Diagnostic, ...]


@dataclass
class _Decider:
    structure: Structure
    patterns: Patterns
    chosen: dict[str, CutChoice] = field(default_factory=dict)
    """Choice by the module's name or, for a module whose parameters are decided one by one, by the parameter's name."""
    findings: dict[str, Diagnostic] = field(default_factory=dict)
    """Findings by message. The layer's number is left out of the message, so that each problem is reported once."""

    def run(self, ranks: int) -> Decided:
        """Make a choice for every module, check the choices, and build the rows for ``ranks`` ranks."""
        structure, by_parent = self.structure, groups(self.structure)
        shapes = structure.shapes()
        for finding in unmatched(self.patterns, [*shapes, *structure.tied]):
            self.report(finding)
        for norms in (False, True):
            # Norms last: their choice depends on the matrices in the same group.
            for module in structure.modules:
                if (module.kind == "norm") == norms and module.parameters:
                    self.choose(by_parent.get(module.name.rpartition(".")[0]), module)
            for group in by_parent.values():
                set_summed_outputs(group, self.chosen)
        rows: list[Partition] = []
        for module in structure.modules:
            rows += self.laid(module, [name for name in module.parameters if f"{module.name}.{name}" in shapes], ranks)
        if not self.findings:
            of_experts = check_experts(structure.modules, self.chosen, rows)
            for finding in (*check_pairs(by_parent, self.chosen, rows), *of_experts):
                self.report(finding)
        return Decided(collapse(rows), tuple(self.findings.values()))

    def choose(self, group: ModuleGroup | None, module: StructureModule) -> None:
        """Make a choice for a module, or for each parameter of the module if the kind of the module is not known."""
        for key, name in _units(module):
            decision = self.choice(group, module, name)
            if isinstance(decision, CutChoice):
                self.chosen[key] = decision
            elif isinstance(decision, Diagnostic):
                self.report(decision)
            else:
                self.report(_undecided(key, decision))

    def choice(self, group: ModuleGroup | None, module: StructureModule, name: str) -> CutChoice | Unclear | Diagnostic:
        """Return the result of the first rule that applies to the parameter ``name`` of a module."""
        structure = self.structure
        if module.name == structure.head and f"{module.name}.weight" in structure.tied:
            return self.chosen.get(structure.embedding) or Unclear("it is tied to the embedding, which is not decided")
        aliases = [alias for alias, kept in structure.tied.items() if kept == name]
        pattern = matching(self.patterns, name, *aliases)
        if pattern is not None:
            asked = wanted(Subject(structure, group, module, name), pattern, self.patterns)
            if module.kind == "norm" and isinstance(asked, CutChoice) and group is not None:
                inferred = infer_norm(group, module, self.chosen)
                summed = isinstance(inferred, CutChoice) and inferred.summed
                return CutChoice("replicated", asked.rule, asked.why, summed=summed)
            return asked
        if group is not None and module.name in group.linears:
            by_preset = preset(structure, module.name, group.linears[module.name][0])
            if by_preset is not None:
                return by_preset
        by_plan = planned(structure, group, module, name)
        if by_plan is not None:
            return by_plan
        if module.kind == "norm" and group is not None:
            return infer_norm(group, module, self.chosen)
        if module.kind == "experts":
            return _experts(structure, module, name)
        return infer(structure, group, module)

    def laid(self, module: StructureModule, names: list[str], ranks: int) -> Iterator[Partition]:
        """Yield the partitions of those parameters of a module for which a choice was made."""
        for key, _ in _units(module):
            choice = self.chosen.get(key)
            mine = names if key == module.name else [name for name in names if f"{module.name}.{name}" == key]
            if choice is None:
                continue
            try:
                yield from partitions_of(self.structure, module, mine, choice, ranks)
            except CannotPartitionError as error:
                self.report(_cannot(key, choice, str(error)))

    def report(self, finding: Diagnostic) -> None:
        """Add a finding unless an earlier finding, such as the finding of another layer, has the same message."""
        self.findings.setdefault(finding.message, finding)


def decide(structure: Structure, ranks: int, patterns: Patterns) -> Decided:
    """Return the partition of each parameter over ``ranks`` tensor-parallel ranks; no partitions for one rank."""
    if ranks == 1:
        return Decided((), tuple(unmatched(patterns, [*structure.shapes(), *structure.tied])))
    return _Decider(structure, patterns).run(ranks)


def _units(module: StructureModule) -> Iterator[tuple[str, str]]:
    """Yield (key, full name of a parameter) for each decision; a matrix and its bias share one decision."""
    names = list(module.parameters)
    if module.kind in (*LINEAR, "embedding", "norm", "router"):
        first = "weight" if "weight" in names else names[0]
        yield module.name, f"{module.name}.{first}"
        return
    for name in names:
        key = f"{module.name}.{name}" if module.name else name
        yield key, key


def _experts(structure: Structure, module: StructureModule, name: str) -> CutChoice | Unclear:
    """Return the choice for a parameter of stacked experts, based on the parameter's name and widths."""
    leaf = name.rpartition(".")[2]
    if len(module.parameters[leaf]) != 3:
        line = f'"{collapsed_name(module.name)}.*": replicated'
        return Unclear("biases of experts would be added once per rank", line)
    if "down" in leaf or leaf.startswith("w2"):
        return CutChoice("row", RULE, "inner widths of every expert")
    if "gate_up" in leaf or "w13" in leaf:
        width = next((size for size in module.parameters[leaf][1:] if size != structure.hidden), structure.hidden)
        half = width // 2
        line = f'"NAME": {{style: column, parts: [{half}, {half}]}}'
        return Unclear("two matrices are fused, but whether one after the other is not known", line)
    if any(word in leaf for word in ("up", "gate", "w1", "w3")):
        return CutChoice("column", RULE, "inner widths of every expert")
    return Unclear(
        "its name does not tell whether it leads to the inner width of the experts or back", '"NAME": column'
    )


def _undecided(key: str, unclear: Unclear) -> Diagnostic:
    name = collapsed_name(key)
    line = unclear.line.replace("NAME", name)
    only = ", where every rank has all of what it reads" if line.endswith("replicated") else ""
    help = f"decide it: parallel: {{tensor: {{patterns: {{{line}}}}}}}{only}"
    return Diagnostic("PT442", f"{name} cannot be cut: {unclear.why}", path=PATH[:2], help=help)


def _cannot(key: str, choice: CutChoice, why: str) -> Diagnostic:
    name = collapsed_name(key)
    message = f"{name} cannot be cut as {choice.rule} says ({choice.style}): {why}"
    if choice.rule.startswith("pattern "):
        pattern = choice.rule.removeprefix("pattern ").strip("'\"")
        return Diagnostic("PT441", message, path=(*PATH, pattern), help="docs/guide/tensor.md has all patterns")
    help = f'fewer ranks, or parallel: {{tensor: {{patterns: {{"{name}": column_gathered}}}}}}'
    return Diagnostic("PT442", message, path=PATH[:2], help=help)
