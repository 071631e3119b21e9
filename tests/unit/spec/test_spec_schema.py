"""The JSON Schema: up to date, valid draft 7, and consistent with the loader."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from partool.spec.reference import reference
from partool.spec.schema import json_schema
from partool.spec.spec import Spec
from partool.strategies.kernel_parts import PARTS
from partool.strategies.optimizers import OPTIMIZERS
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS
from partool.strategies.targets import TARGETS

ROOT = Path(__file__).parents[3]
SCHEMA = json_schema()
CHECK = jsonschema.Draft7Validator(SCHEMA)


def test_the_reference_is_fresh_and_tells_every_field() -> None:
    page = reference()
    assert (ROOT / "docs/guide/spec.md").read_text(encoding="utf-8") == page, "run: make schema"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 250
    assert [row for row in rows if row.endswith("|  |")] == [], "write a text under the field"
    headings = {line[4:-1] for line in page.splitlines() if line.startswith("## `")}
    assert {
        "parallel.sequence",
        "launch.k8s.rdma",
        "optimizer.groups.NAME",
        "launch.secrets.NAME",
        "launch.mounts[]",
    } <= headings
    for names in (SCHEDULES, METHODS, OPTIMIZERS, TARGETS, PARTS):
        assert all(f"| `{name}` |" in page for name in names)


def test_the_committed_copy_is_fresh() -> None:
    committed = ROOT / "partool" / "spec" / "partool.schema.json"
    assert json.loads(committed.read_text(encoding="utf-8")) == SCHEMA, "run: make schema"


def test_the_schema_has_a_name_and_its_references_stay_inside() -> None:
    assert SCHEMA["$id"] == f"urn:partool:spec:{Spec.model_fields['spec'].default}"
    references = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(SCHEMA)))
    assert references
    assert {each for each in references if not each.startswith("#/definitions/")} == set()
    assert not CHECK.is_valid({"model": "llama3-8b", "data": "a", "parallel": {"tensor": {"degree": 0}}})


def test_only_words_of_draft_7() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    text = json.dumps(SCHEMA)
    for word in ("prefixItems", "$defs", "unevaluatedProperties", "dependentRequired", "$dynamicRef"):
        assert word not in text


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert list(CHECK.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))) == []


def test_shorthands_are_valid_and_mistakes_are_not() -> None:
    good = {"model": "llama3-8b", "data": "python-stdlib", "hardware": "cpu"}
    assert list(CHECK.iter_errors(good)) == []
    for wrong in ({"model": 1}, {"model": {"layerz": 1}}, {"training": {"stepz": 2}}, {"parallel": {"tensor": 0}}):
        assert list(CHECK.iter_errors(good | wrong)), wrong


def test_every_number_has_a_largest_value() -> None:
    """Editors show the loader's limits, which keep searches and arithmetic within bounds."""
    endless = [
        place
        for place, node in _within(SCHEMA, "")
        if node.get("type") in ("integer", "number")
        and not {"maximum", "exclusiveMaximum", "const", "enum"} & set(node)
    ]
    # Read as text, which has a form and a length: `time: 60`, `memory: 8`.
    as_text = {
        "K8sSpec.cpu",
        "K8sSpec.ephemeral_storage",
        "K8sSpec.memory",
        "K8sSpec.shared_memory",
        "SlurmSpec.time",
        "SlurmSpec.memory",
    }
    assert {place.replace("definitions.", "").replace("properties.", "").split(".any")[0] for place in endless} == {
        f".{name}" for name in as_text
    }


def _within(node: object, place: str) -> Iterator[tuple[str, dict[str, object]]]:
    if isinstance(node, dict):
        yield place, node
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield from _within(value, f"{place}.{key}")


def test_every_field_of_the_launch_section_is_described() -> None:
    """Editors show the description, which cluster options need most."""
    sections = ["LaunchSpec", "SlurmSpec", "K8sSpec", "Secret", "Mount", "Toleration", "Rdma", "Topology"]
    bare = [
        f"{name}.{field}"
        for name in sections
        for field, entry in SCHEMA["definitions"][name]["properties"].items()
        if not entry.get("description")
    ]
    assert bare == []
