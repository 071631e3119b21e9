"""Specs for attacks, and mutations of their structure: values of another size, type or place.

Fields are chosen from the JSON schema, so a new field is attacked as soon as there is one.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from partool.spec.schema import json_schema

ROOT = Path(__file__).parents[2]
Path_ = tuple[str | int, ...]
Node = dict[str, Any]
SCHEMA = json_schema()

NUMBERS: list[Any] = [
    0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 100, 1000, 4096, 65536, -1, -7, 10**6, 10**9, 2**31 - 1, 2**31, 2**53, 2**53 + 1,
    2**63 - 1, 2**63, 10**19, 10**30, 0.0, -0.0, 0.5, 0.999, 1.0, 1.5, -1.5, 1e-9, 5e-324, 1e18, 1e30, 1e300, 1.8e308,
    float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
TEXTS: list[str] = [
    "", " ", "auto", "none", "all", "cpu", "nvme", "x", "0", "1e9", "true", "null", "~", ".", "..", "/", "a/../../b",
    "*", "**", "[", "{a,b}", "layers.*", "embed.*", "\0", "a\0b", "a\nb", "\x1b[31mred\x1b[0m", "\u202egnp.exe",
    "é" * 9, "\U0001f600", "a" * 300, "d/" * 2000 + "x", "x" * 70_000, "$(id)", "; id", "%n%s", "{{ 7 * 7 }}", "-rf",
    "a:b:c",     "pvc:claim", "python-stdlib", "/dev/null", "/dev/zero", "/proc/self/mem", "/etc/passwd", "specs",
    "30min", "10-99:00",
]  # fmt: skip
SEEDS: dict[str, Node] = {
    "gpu": {
        "model": {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "vocab": 1000},
        "hardware": {"accelerator": "h100-sxm", "per_node": 4},
        "training": {"sequence_length": 512, "global_batch": 32},
        "data": "python-stdlib",
    },
    "two nodes": {
        "model": {"preset": "llama3.2-1b"},
        "hardware": {"accelerator": "mi300x", "nodes": 2, "per_node": 4, "fabric": "roce-400"},
        "training": {"sequence_length": 1024, "global_batch": 16},
        "launch": {"target": "slurm", "min_nodes": 1},
        "data": "python-stdlib",
    },
    "offload": {
        "model": {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000},
        "hardware": {"accelerator": "h100-sxm", "per_node": 2, "host_memory_gib": 64},
        "training": {"sequence_length": 1024, "global_batch": 8},
        "parallel": {"offload": {"optimizer": "nvme", "dir": "state", "pinned_gib": 4}, "micro_batch": 2},
        "data": "python-stdlib",
    },
    "pipeline": {
        "model": {"layers": 6, "hidden": 128, "heads": 4, "vocab": 300, "tied_embeddings": True},
        "hardware": {"accelerator": "a100-40", "per_node": 4},
        "training": {"sequence_length": 256, "global_batch": 16, "precision": "fp16"},
        "parallel": {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 3}, "recompute": "selective"},
        "data": {"source": ["python-stdlib"], "validation": 0.1, "attend": "document"},
    },
    "sequence": {
        "model": {
            "layers": 2, "hidden": 64, "heads": 4, "vocab": 256,
            "attention": {"grid": [8, 16], "layer_types": {"pattern": ["row", "column"]}},
        },
        "hardware": {"accelerator": "cpu", "per_node": 4, "memory_gib": 16},
        "training": {"sequence_length": 128, "global_batch": 8, "precision": "fp32"},
        "parallel": {"sequence": {"method": "dsp", "degree": 2}},
        "data": "python-stdlib",
    },
    "tensor": {
        "model": {"layers": 2, "hidden": 96, "heads": 8, "vocab": 256, "position": "learned", "norm": "layernorm"},
        "hardware": {"accelerator": "cpu", "per_node": 4, "memory_gib": 16},
        "training": {"sequence_length": 64, "global_batch": 8, "precision": "fp64"},
        "parallel": {"tensor": {"shape": [2, 2], "patterns": {"layers.*.ffn.up": "column"}}},
        "data": "python-stdlib",
    },
    "experts": {
        "model": {
            "layers": 4, "hidden": 128, "heads": 8, "vocab": 500, "frozen": ["embed.*"],
            "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 64, "shared_experts": 1, "first_dense_layers": 1},
            "mla": {"q_rank": 32, "kv_rank": 16, "nope_head_dim": 16, "rope_head_dim": 8, "v_head_dim": 16},
        },
        "hardware": {"accelerator": "gh200-96", "per_node": 1, "nodes": 4},
        "training": {"sequence_length": 256, "global_batch": 8, "precision": "fp8"},
        "parallel": {"data": {"zero": 3, "persistent": 1000, "prefetch": 2}},
        "data": "python-stdlib",
    },
    "own device": {
        "model": {"layers": 3, "hidden": 60, "heads": 3, "vocab": 300, "attention": {"window": 16}},
        "hardware": {
            "accelerator": "mine", "nodes": 3, "per_node": 5, "memory_gib": 8, "peak_tflops": 50,
            "memory_gb_per_s": 500, "topology": "mesh", "link_gb_per_s": 20, "host_link_gb_per_s": 900,
        },
        "training": {"sequence_length": 96, "global_batch": 30},
        "optimizer": {"name": "lion", "groups": {"embed.*": {"lr_factor": 0.1}}},
        "launch": {"target": "k8s", "image": "registry/name:1", "k8s": {"storage": "pvc:claim"}},
        "data": {"source": ["*.txt", "missing.jsonl"], "tokenizer": "bytes"},
    },
    "configuration": {
        "model": {"config": str(ROOT / "specs" / "qwen2-small.json")},
        "hardware": {"accelerator": "cpu", "per_node": 2, "memory_gib": 256},
        "training": {"sequence_length": 128, "global_batch": 4, "precision": "bf16"},
        "data": "python-stdlib",
    },
}  # fmt: skip
"""Small specs of every kind, each planned in a fraction of a second."""


@cache
def documents() -> dict[str, Node]:
    """Return the specs that attacks start from: :data:`SEEDS`, partool's own specs and its templates."""
    found = dict(SEEDS)
    for path in sorted((ROOT / "specs").glob("*.yaml")):
        found[path.name] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "templates").glob("starter*.yaml")):
        found[path.name] = yaml.safe_load(path.read_text(encoding="utf-8").replace("$preset", "gpt2"))
    return found


def resolved(node: Node) -> Node:
    """Return a part of the schema, with a reference replaced by the definition it refers to."""
    only = node["allOf"][0] if "allOf" in node else node
    return SCHEMA["definitions"][only["$ref"].rpartition("/")[2]] if "$ref" in only else only


def choices(node: Node) -> list[Node]:
    """Return the types that a field may have."""
    node = resolved(node)
    return [one for part in node["anyOf"] for one in choices(part)] if "anyOf" in node else [node]


def fields(node: Node = SCHEMA, prefix: Path_ = ()) -> Iterator[tuple[Path_, list[Node]]]:
    """Yield every field of a spec with its types."""
    for key, inner in node.get("properties", {}).items():
        kinds = choices(inner)
        yield (*prefix, key), kinds
        for kind in kinds:
            yield from fields(kind, (*prefix, key))


FIELDS = list(fields())


def value_of(rng: random.Random, node: Node) -> Any:
    """Return a value of a field's type, legal or just outside its limits."""
    if "enum" in node or "const" in node:
        return rng.choice(node.get("enum", [node.get("const")]))
    kind = node.get("type")
    if kind in ("integer", "number"):
        return _number(rng, node, whole=kind == "integer")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        inner = choices(node.get("items", {}))
        return [value_of(rng, rng.choice(inner)) for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 4, 1500]))]
    if kind == "object":
        return _section(rng, node)
    return None if kind == "null" else rng.choice(TEXTS)


def _number(rng: random.Random, node: Node, *, whole: bool) -> Any:
    bounds = [node[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in node]
    if rng.random() < 0.4:
        return rng.choice([1, 2, 2, 3, 4, 4, 6, 8]) if whole else rng.choice([0.25, 0.5, 1.0, 2.0, 10.0])
    edges = [bound + step for bound in bounds for step in (-1, 0, 1)]
    return rng.choice(edges if edges and rng.random() < 0.5 else NUMBERS)


def _section(rng: random.Random, node: Node) -> Any:
    known = node.get("properties", {})
    if known:
        keys = rng.sample(sorted(known), min(len(known), rng.choice([0, 1, 2, 3])))
        return {key: value_of(rng, rng.choice(choices(known[key]))) for key in keys}
    inner = node.get("additionalProperties")
    kinds = choices(inner) if isinstance(inner, dict) else [{}]
    return {rng.choice(TEXTS): value_of(rng, rng.choice(kinds)) for _ in range(rng.choice([1, 2, 40]))}


def put(document: Node, path: Path_, value: Any) -> None:
    """Set a field, making sections on the way; a shorthand such as ``tensor: 2`` gives way."""
    for key in path[:-1]:
        inner = document.get(key)
        if not isinstance(inner, dict):
            inner = document[key] = {}
        document = inner
    document[path[-1]] = value


def places(value: Any, prefix: Path_ = ()) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything within a document."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key], (*prefix, key))


def set_field(rng: random.Random, document: Node) -> None:
    """Give some field a value of one of its types."""
    path, kinds = rng.choice(FIELDS)
    put(document, path, value_of(rng, rng.choice(kinds)))


def two_of_parallel(rng: random.Random, document: Node) -> None:
    """Set two fields of the layout: rules for combinations are the most likely to be missing."""
    inner = [one for one in FIELDS if one[0][0] == "parallel" and len(one[0]) > 1]
    for path, kinds in rng.sample(inner, 2):
        put(document, path, value_of(rng, rng.choice(kinds)))


def extreme(rng: random.Random, document: Node) -> None:
    """Set an existing number, or some numeric field, to an extreme value."""
    numeric = [(path, kind) for path, kinds in FIELDS for kind in kinds if kind.get("type") in ("integer", "number")]
    there = [(at, key) for at, key in places(document) if isinstance(at[key], int | float)]
    if there and rng.random() < 0.5:
        at, key = rng.choice(there)
        at[key] = rng.choice(NUMBERS)
    else:
        put(document, rng.choice(numeric)[0], rng.choice(NUMBERS))


def huge(rng: random.Random, document: Node) -> None:
    """Set a size of the model, or a degree of the layout, to a number far larger than any real one."""
    sizes = [
        path
        for path, kinds in FIELDS
        if path[0] in ("model", "parallel", "training") and any(kind.get("type") == "integer" for kind in kinds)
    ]
    put(document, rng.choice(sizes), rng.choice([10**9, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**62, 10**12]))


def retype(rng: random.Random, document: Node) -> None:
    """Replace some value by one of any type."""
    at, key = rng.choice(list(places(document)))
    at[key] = rng.choice([rng.choice(NUMBERS), rng.choice(TEXTS), None, True, [], {}, [[]], {"a": {}}, [1, "x"]])


def hostile_text(rng: random.Random, document: Node) -> None:
    """Set some text field to a hostile text."""
    path, _ = rng.choice([one for one in FIELDS if any(kind.get("type") == "string" for kind in one[1])])
    put(document, path, rng.choice(TEXTS))


def delete(rng: random.Random, document: Node) -> None:
    """Delete some key or list item."""
    at, key = rng.choice(list(places(document)))
    del at[key]


def copy_elsewhere(rng: random.Random, document: Node) -> None:
    """Replace some value by a copy of another one, or duplicate an item of a list."""
    all_ = list(places(document))
    (source, name), (target, key) = rng.choice(all_), rng.choice(all_)
    value = copy.deepcopy(source[name])
    if isinstance(target, list) and rng.random() < 0.5:
        target.append(value)
    else:
        target[key] = value


def other_section(rng: random.Random, document: Node) -> None:
    """Take a section of another spec."""
    other = rng.choice(list(documents().values()))
    name = rng.choice(list(other))
    document[name] = copy.deepcopy(other[name])


MUTATIONS = [
    set_field, set_field, set_field, two_of_parallel, two_of_parallel, two_of_parallel, extreme, huge, huge, retype,
    hostile_text, delete, copy_elsewhere, other_section,
]  # fmt: skip


def mutated(rng: random.Random) -> tuple[str, Node]:
    """Return a spec's name and the spec after one to three mutations."""
    known = documents()
    # Small specs are tried more often: planning them takes less time.
    name = rng.choice(list(SEEDS) if rng.random() < 0.85 else list(known))
    document = copy.deepcopy(known[name])
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        if document:
            rng.choice(MUTATIONS)(rng, document)
    return name, document


def text_of(document: Node) -> str:
    """Return a document as YAML."""
    return yaml.safe_dump(document, allow_unicode=True, sort_keys=False, width=1000)
