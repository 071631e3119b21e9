"""Strict schemas of Kubernetes and of add-ons, the CEL rules of CRDs, and where CRDs are kept."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from _manifest_edits import CRDS, GONE, edited, needs_crds, rendered

from partool.launch.k8s.validate import cached_crds, cel, store_crds, validate_manifest, validate_offline
from partool.launch.k8s.validate.crd_cache import definitions
from partool.launch.k8s.validate.reading import manifest_of
from partool.launch.k8s.validate.structural import strict, with_defaults

needs_celpy = pytest.mark.skipif(importlib.util.find_spec("celpy") is None, reason="cel-python is not installed")
needs_core = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed"
)
SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["size"],
    "properties": {
        "size": {"type": "integer", "format": "int32", "minimum": 1, "x-kubernetes-validations": [
            {"rule": "self < 10", "message": "at most 9"}, {"rule": "self == oldSelf", "message": "is immutable"}]},
        "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
        "port": {"x-kubernetes-int-or-string": True},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "texts": {"type": "object", "additionalProperties": {"type": "string"}},
        "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
        "none": {"type": "string", "nullable": True},
        "ratio": {"type": "number"},
        "my-key": {"type": "string"},
        "ports": {
            "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["port", "protocol"],
            "items": {"type": "object", "properties": {
                "port": {"type": "integer"}, "protocol": {"type": "string", "default": "TCP"}}},
        },
    },
}  # fmt: skip


def definition(spec: dict[str, Any] = SPEC, version: str = "v1", served: bool = True) -> dict[str, Any]:
    """Return a definition of a type Thing."""
    schema = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": spec}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com",
            "names": {"kind": "Thing", "plural": "things"},
            "versions": [{"name": version, "served": served, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def ruled(*rules: str) -> dict[str, Any]:
    """Return the type's spec with rules of its own."""
    return {**SPEC, "x-kubernetes-validations": [{"rule": rule} for rule in rules]}


def thing(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "t"}, "spec": {"size": 1, **spec}}


def levels(folder: Path, document: dict[str, Any], **crd: Any) -> dict[str, Any]:
    """Return the levels by name, with the definition as the only file of a folder."""
    (folder / "things.json").write_text(json.dumps(definition(**crd)))
    return {level.name: level for level in validate_manifest(manifest_of([document]), crds=folder)}


def said(level: Any) -> list[str]:
    return [f"{d.code} {d.message.removeprefix('Thing/t: ')}" for d in level.findings]


def test_a_sound_object_fits(tmp_path: Path) -> None:
    document = thing(
        port="http", free={"a": 1}, texts={"b": "c"}, tags=["a", "b"], none=None, mode=None, ratio=1,
        ports=[{"port": 1}, {"port": 1, "protocol": "UDP"}],
    )  # fmt: skip
    found = levels(tmp_path, document)
    assert [said(level) for level in found.values()] == [[], [], [], []]
    assert found["CRD schemas"].note == f"{tmp_path}: example.com/v1 Thing"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"siez": 1}, "spec.siez: there is no such field"),
        ({"size": "1"}, "spec.size: must be of type integer, not string"),
        ({"size": 0}, "spec.size: 0 is less than the minimum of 1"),
        ({"size": 2**31}, "spec.size: 2147483648 is greater than the maximum of 2147483647"),
        ({"size": None}, "spec.size: must be of type integer, not null"),
        ({"mode": "c"}, "spec.mode: 'c' is not one of ['a', 'b']"),
        ({"port": [1]}, "spec.port: must be of type integer or string"),
        ({"texts": {"a": 1}}, "spec.texts.a: must be of type string, not integer"),
        ({"tags": ["a", "a"]}, "spec.tags[1]: 'a' is already in the list"),
        (
            {"ports": [{"port": 1}, {"port": 1, "protocol": "TCP"}]},
            "spec.ports[1]: 1 'TCP' is already in the list",
        ),
        ({"free": 1}, "spec.free: must be of type object, not integer"),
        ({"ports": [{"prot": 1}]}, "spec.ports[0].prot: there is no such field"),
    ],
)
def test_what_does_not_fit_is_found(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    assert said(levels(tmp_path, thing(**spec))["CRD schemas"]) == [f"PT572 {message}"]


def test_missing_fields_and_unknown_ones_beside_the_spec(tmp_path: Path) -> None:
    document = thing() | {"status": {}}
    del document["spec"]["size"]
    document["metadata"]["label"] = {}
    found = levels(tmp_path, document)["CRD schemas"]
    assert set(said(found)) == {
        "PT572 spec.size: is missing",
        "PT572 status: there is no such field",
        "PT572 metadata.label: there is no such field",
    }
    assert {d.help for d in found.findings} == {"", "did you mean labels?"}


def test_a_version_that_is_not_served(tmp_path: Path) -> None:
    found = levels(tmp_path, thing(), version="v2")["CRD schemas"]
    assert said(found) == ["PT573 apiVersion: the cluster serves example.com/v2, not example.com/v1"]


def test_defaults_reach_items() -> None:
    assert with_defaults(SPEC, {"ports": [{"port": 1}], "mode": None}) == {
        "ports": [{"port": 1, "protocol": "TCP"}],
        "mode": "a",
    }


def test_strict_keeps_no_annotation_of_kubernetes() -> None:
    assert "x-kubernetes" not in json.dumps(strict(definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))


@needs_celpy
@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("has(self.mode) && self.mode == 'b'", {"mode": "b"}, {}),
        ("self.mode == 'a'", {}, {"mode": "b"}),
        ("self.none == 'x'", {"none": "x"}, {}),
        ("self.tags.all(t, t.matches('^[a-z]+$'))", {"tags": ["ab"]}, {"tags": ["A"]}),
        ("self.texts.exists(k, k == 'a')", {"texts": {"a": ""}}, {"texts": {"b": ""}}),
        ("size(self.ports) <= 1 && self.ports[0].protocol == 'TCP'", {"ports": [{"port": 1}]}, {"ports": [{}, {}]}),
        ("self.ratio > 0.5", {"ratio": 1}, {"ratio": 0}),
        ("self.my__dash__key == 'x'", {"my-key": "x"}, {"my-key": "y"}),
        ("self.mode.upperAscii().lowerAscii() == 'a'", {}, {"mode": "b"}),
        ("self.texts.v.split('-').join('+') == 'a+b'", {"texts": {"v": "a-b"}}, {"texts": {"v": "a"}}),
        ("self.texts.v.split('-', 2)[1] == 'b-c'", {"texts": {"v": "a-b-c"}}, {"texts": {"v": "a-b"}}),
        ("self.texts.v.indexOf('b') == 1 && self.texts.v.lastIndexOf('b') == 3", {"texts": {"v": "abab"}},
         {"texts": {"v": "ab"}}),
        ("self.tags.indexOf('b') == 1 && self.tags.lastIndexOf('c') == -1", {"tags": ["a", "b"]}, {"tags": ["b"]}),
        ("self.texts.v.find('[0-9]+') == '12'", {"texts": {"v": "a12b"}}, {"texts": {"v": "a"}}),
        ("self.texts.v.trim().substring(1) == 'bc'", {"texts": {"v": " abc "}}, {"texts": {"v": "bc"}}),
        ("self.texts.v.replace('a', 'b').substring(0, 1) == 'b'", {"texts": {"v": "ab"}}, {"texts": {"v": "cd"}}),
        ("self.tags.isSorted() && self.tags.min() == 'a' && self.tags.max() == 'b'", {"tags": ["a", "b"]},
         {"tags": ["b", "a"]}),
        ("self.ports.map(p, p.port).sum() == 3", {"ports": [{"port": 1}, {"port": 2}]}, {"ports": [{"port": 1}]}),
    ],
)  # fmt: skip
def test_rules_of_definitions(tmp_path: Path, rule: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    sound = levels(tmp_path, thing(**good), spec=ruled(rule))[cel.NAME]
    assert said(sound) == []
    assert "2 rules evaluated, 0 of fields that are not set, 1 for changes only" in sound.note
    broken = levels(tmp_path, thing(**bad), spec=ruled(rule))[cel.NAME]
    assert len(said(broken)) == 1
    assert said(broken)[0].startswith(f"PT572 spec: {rule} ")


@needs_celpy
def test_a_rule_of_a_field_has_its_message(tmp_path: Path) -> None:
    assert said(levels(tmp_path, thing(size=10))[cel.NAME]) == ["PT572 spec.size: at most 9"]


@needs_celpy
@pytest.mark.parametrize(
    "rule", ["isURL(self.mode)", "self.mode.notThere()", "self.(", "quantity(self.mode).isGreaterThan(quantity('1'))"]
)
def test_rules_that_cannot_be_evaluated_are_counted(tmp_path: Path, rule: str) -> None:
    found = levels(tmp_path, thing(mode="a"), spec=ruled(rule))[cel.NAME]
    assert said(found) == []
    assert (
        f"1 rules evaluated, 0 of fields that are not set, 1 for changes only, 1 COULD NOT BE EVALUATED: {rule} ("
        in found.note
    )


@needs_crds
@needs_celpy
def test_every_rule_of_the_add_ons_can_be_compiled() -> None:
    rules = [rule for each in definitions(CRDS) for _, rule in cel.rules_of(each.schema)]
    new = {rule["rule"] for rule in rules if not cel.of_a_change(rule)}
    for rule in new | {rule["rule"] for rule in rules}:
        cel.program(rule)
    assert (len(rules), len({rule["rule"] for rule in rules}), len(new)) == (50, 11, 10)


@needs_crds
@needs_celpy
@pytest.mark.parametrize(
    ("kind", "edits", "message"),
    [
        (
            "jobset",
            [
                ("spec.startupPolicy", {"startupPolicyOrder": "InOrder"}),
                ("spec.replicatedJobs.0.dependsOn", [{"name": "x", "status": "Ready"}]),
            ],
            "spec: StartupPolicy and DependsOn APIs are mutually exclusive",
        ),
        (
            "jobset",
            [("spec.volumeClaimPolicies", [{"templates": [{"metadata": {"name": "a", "namespace": "b"}}]}])],
            "spec.volumeClaimPolicies[0]: namespace cannot be set",
        ),
        ("trainjob", [("spec.managedBy", "me")], "spec.managedBy: ManagedBy must be"),
        ("trainjob", [("metadata.name", "1st")], "metadata.name must match RFC 1035"),
        ("trainjob", [("metadata.name", "a" * 64)], "metadata.name must be no more than 63"),
        ("trainjob", [("spec.initializer", {"dataset": {"storageUri": "x"}})], "storageUri may be empty, or it must"),
    ],
)
def test_planted_violations_of_the_add_ons_rules(kind: str, edits: list[Any], message: str) -> None:
    level = validate_manifest(edited(kind, *edits), crds=CRDS)[3]
    assert message in " ".join(d.message for d in level.findings)
    assert "COULD NOT" not in level.note


def former_trainjob() -> dict[str, Any]:
    """Return the CRD of Trainer 2.1: the patches have another name, and the number may be a string."""
    found = next(each for each in definitions(CRDS) if each.kind == "TrainJob")
    schema = copy.deepcopy(found.schema)
    spec = schema["properties"]["spec"]["properties"]
    spec["podTemplateOverrides"] = spec.pop("runtimePatches")
    spec["trainer"]["properties"]["numProcPerNode"] = {"x-kubernetes-int-or-string": True}
    names = {"kind": "TrainJob", "plural": "trainjobs"}
    version = {"name": "v1alpha1", "served": True, "schema": {"openAPIV3Schema": schema}}
    spec = {"group": "trainer.kubeflow.org", "names": names, "versions": [version]}
    return {"kind": "CustomResourceDefinition", "metadata": {"name": "trainjobs.trainer.kubeflow.org"}, "spec": spec}


@needs_crds
def test_a_trainjob_of_another_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "crd.json").write_text(json.dumps(former_trainjob()))
    level = validate_offline(rendered("trainjob"), crds=tmp_path)[2]
    gate = [d for d in level.findings if d.code == "PT573"]
    assert len(gate) == 1
    assert "lacks spec.runtimePatches" in gate[0].message
    assert "spec.trainer.numProcPerNode (integer), and has spec.podTemplateOverrides (Trainer 2.1)" in gate[0].message
    assert any("spec.runtimePatches: there is no such field" in d.message for d in level.findings)


@needs_crds
def test_a_jobset_that_lacks_a_field_of_the_failure_policy_is_refused(tmp_path: Path) -> None:
    found = copy.deepcopy(next(each for each in definitions(CRDS) if each.kind == "JobSet").schema)
    rules = found["properties"]["spec"]["properties"]["failurePolicy"]["properties"]["rules"]
    del rules["items"]["properties"]["onJobFailureMessagePatterns"]
    version = {"name": "v1alpha2", "served": True, "schema": {"openAPIV3Schema": found}}
    spec = {"group": "jobset.x-k8s.io", "names": {"kind": "JobSet"}, "versions": [version]}
    (tmp_path / "crd.json").write_text(json.dumps({"kind": "CustomResourceDefinition", "spec": spec}))
    level = validate_offline(rendered("jobset"), crds=tmp_path)[2]
    assert [d.code for d in level.findings] == ["PT573", "PT572"]
    assert "it lacks spec.failurePolicy.rules.*.onJobFailureMessagePatterns (array)" in level.findings[0].message


@needs_core
def test_core_schemas_by_version() -> None:
    core = validate_offline(rendered("job"), core_version="1.30")[1]
    assert (core.ran, core.findings, core.note) == (True, (), "Kubernetes 1.30, 3 objects and templates")
    later = edited("job", ("job:scheduling", {}))
    assert [d.message.partition(": ")[2] for d in validate_manifest(later, core_version="v1.30.2")[1].findings] == [
        "spec.scheduling: there is no such field"
    ]
    assert validate_manifest(later, core_version="1.37")[1].findings == ()
    newer = validate_offline(rendered("job"), core_version="1.99")[1]
    assert newer.ran
    assert newer.note.endswith("; there are no schemas of 1.99 yet")
    assert not validate_offline(rendered("job"), core_version="latest")[1].ran
    old = validate_offline(rendered("job"), core_version="1.10")[1]
    assert not old.ran
    assert old.note.startswith("kubernetes-validate holds schemas of Kubernetes 1.25 to ")


@needs_core
@pytest.mark.parametrize(
    ("kind", "place", "message"),
    [
        ("job", "pod:spec.containers.0.imag", "spec.template.spec.containers[0].imag: there is no such field"),
        ("jobset", "pod:spec.surprise", "spec.replicatedJobs[0].template.spec.template.spec.surprise: there is no"),
        ("pytorchjob", "pod:spec.surprise", "spec.pytorchReplicaSpecs.Worker.template.spec.surprise: there is no"),
        ("volcano", "pod:spec.surprise", "spec.tasks[0].template.spec.surprise: there is no such field"),
        ("trainjob", "pod:spec.surprise", "replicatedJobs[0].template.spec.template.spec.surprise: there is no"),
        ("trainjob", "spec.trainer.env.0.valu", "spec.trainer.env[0].valu: there is no such field"),
        ("trainjob", "spec.trainer.resourcesPerNode.limit", "spec.trainer.resourcesPerNode.limit: there is no such"),
    ],
)
def test_core_schemas_reach_into_every_kind(kind: str, place: str, message: str) -> None:
    found = validate_manifest(edited(kind, (place, "x")))[1].findings
    assert any(message in d.message for d in found), found


@needs_core
def test_objects_without_a_schema_are_named() -> None:
    odd = manifest_of([{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}}])
    assert "without a schema: Deployment/a" in validate_manifest(odd)[1].note


@needs_core
def test_helps_with_a_misspelt_field() -> None:
    level = validate_manifest(edited("job", ("job:paralelism", 2), ("job:parallelism", GONE)))[1]
    assert [d.help for d in level.findings] == ["did you mean parallelism?"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return tmp_path / "cache"


def test_definitions_of_a_cluster_are_kept_by_context(cache: Path, tmp_path: Path) -> None:
    assert cached_crds("arn:aws:eks:eu:1:cluster/a") is None
    folder = store_crds("arn:aws:eks:eu:1:cluster/a", [definition()])
    assert folder == cached_crds("arn:aws:eks:eu:1:cluster/a")
    assert folder.parent == cache / "partool" / "crds"
    assert [each.kind for each in definitions(folder)] == ["Thing"]
    assert cached_crds("another") is None
    for name in ("..", ".", ""):
        assert store_crds(name, [definition()]).parent == cache / "partool" / "crds"
    assert not (cache / "partool" / "things.example.com.json").exists()


def test_definitions_replace_those_of_before(cache: Path) -> None:
    store_crds("c", [definition()])
    other = definition(version="v3")
    other["metadata"]["name"] = "others.example.com"
    folder = store_crds("c", [other])
    assert [each.api_version for each in definitions(folder)] == ["example.com/v3"]
    store_crds("c", [])
    assert cached_crds("c") is None


def test_without_a_context_the_current_one_counts(cache: Path, tmp_path: Path) -> None:
    text = json.dumps(thing())
    note = validate_offline(text)[2].note
    assert note == ("no definitions of the cluster in-cluster: partool doctor --target k8s stores them, or --crds DIR")
    (tmp_path / "config").write_text("current-context: here\n")
    store_crds("here", [definition()])
    assert [(level.ran, level.note) for level in validate_offline(text)[2:3]] == [
        (True, "definitions of here: example.com/v1 Thing")
    ]
    assert not validate_offline(text, context="there")[2].ran
    assert store_crds(None, [definition()]) == cached_crds("here")


@pytest.mark.parametrize(
    ("files", "note"),
    [
        ({}, "holds no CustomResourceDefinition"),
        ({"a.yaml": "kind: CustomResourceDefinition\na: [\n"}, "a.yaml: the manifest is not YAML"),
        ({"a.json": '{"kind": "CustomResourceDefinition"'}, "a.json is not JSON"),
        ({"a.yaml": json.dumps(definition()).replace("Thing", "Other")}, "no definition of Thing"),
    ],
)
def test_definitions_that_cannot_be_used(tmp_path: Path, files: dict[str, str], note: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    level = validate_offline(json.dumps(thing()), crds=tmp_path)[2]
    assert not level.ran
    assert note in level.note


def test_a_list_as_kubectl_prints_it(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(json.dumps({"kind": "List", "items": [definition(), definition(version="v2")]}))
    assert [each.api_version for each in definitions(tmp_path)] == ["example.com/v1", "example.com/v2"]


def test_a_core_manifest_needs_no_definitions() -> None:
    found = validate_offline(rendered("job"))
    assert [(level.name, level.ran, level.note) for level in found[2:]] == [
        ("CRD schemas", False, "no object of an add-on"),
        ("CEL rules", False, "no object of an add-on"),
    ]
