"""Hostile text in every string field of a launch on Kubernetes: refused, or in the objects unchanged."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from _k8s_case import EVERY_KIND, documents, expanded, k8s_job, k8s_plan, read, templates, workload
from _launch_case import launch_job
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from partool.launch.k8s.validate import validate_offline
from partool.plan.types import Variable
from partool.render.k8s import findings, render
from partool.render.k8s.manifest import text
from partool.spec.launch_checks import ERRORS

HOSTILE = [
    "'", '"', "a\nb", "a\r\nb", "$(HOME)", "$$(HOME)", "$", "$é", "$$", "${HOME}", "`id`", "{{ x }}", "{% x %}",
    "# no", ": no", "- no", "a: b", "&a", "*a", "!!str x", "|", ">", "%YAML", "---", "...", "yes", "No", "on", "null",
    "~", "", " ", " a ", "1e3", "1e-3", "0x10", "0o7", "010", "1_000", "12:30:45", "1.0", ".5", "+1", "-1", ".inf",
    ".NaN", "=", "<<", "2026-11-21", "True", "y", "é", "☃", "𝔘", "\u2028", "\ufeff", "\x85", "\x07", "\t",
    "\x1b[0m", "\x7f", "a" * 300, "é" * 300, "\\n", "\\", "[", "{", "a,b", "@x", "?x", "x\ty", "\n", "a\n\n",
    "  a\n b", "/../..", "a..b", "-a", "a-", "A", "a_b", "pvc:..", "pvc:a..b", "..", ".a", "a/b", "a//b", "/",
]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(max_size=40),
    st.lists(st.sampled_from([*HOSTILE[:20], "a", "-", ".", "/", "1"]), max_size=6).map("".join),
)
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

DNS = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
QUALIFIED = rf"({DNS}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
"""Patterns of names and keys from apimachinery's validation."""
LABEL = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"


def fields(value: str) -> dict[str, dict[str, Any]]:
    """Return launch sections with the text in one field each, by the field's name."""
    k8s = {
        "namespace": value,
        "queue": value,
        "priority": value,
        "node_selector": {"pool": value},
        "device_resource": value,
        "storage": value,
        "service_account": value,
        "image_pull_secrets": [value],
        "labels": {"team": value},
        "annotations": {"note": value},
        "runtime": value,
        "cpu": value,
        "memory": value,
        "shared_memory": value,
        "rdma": {"resource": value},
        "tolerations": [{"key": value, "value": "x"}],
        "topology": {"level": value},
    }
    found: dict[str, dict[str, Any]] = {f"k8s.{name}": {"k8s": {name: given}} for name, given in k8s.items()}
    found["k8s.topology"]["k8s"]["queue"] = "research"
    found["k8s.priority"]["k8s"]["queue"] = "research"
    for section in ("labels", "annotations", "node_selector"):
        found[f"k8s.{section}, the key"] = {"k8s": {section: {value: "x"}}}
    found["k8s.tolerations, the value"] = {"k8s": {"tolerations": [{"key": "x", "value": value}]}}
    found["env"] = {"env": {"NAME": value}}
    found["env, the name"] = {"env": {value: "x"}}
    found["secrets, the name"] = {"secrets": {value: {"secret": "hub", "key": "token"}}}
    found["secrets.secret"] = {"secrets": {"S": {"secret": value, "key": "token"}}}
    found["secrets.key"] = {"secrets": {"S": {"secret": "hub", "key": value}}}
    found["python"] = {"python": value}
    found["image"] = {"image": value}
    found["mounts.source"] = {"mounts": [{"source": value, "target": "/data"}]}
    found["mounts.target"] = {"mounts": [{"source": "/data", "target": value}]}
    return found


FIELDS = sorted(fields("x"))
OFTEN = (
    "k8s.namespace", "k8s.labels, the key", "k8s.annotations", "k8s.cpu", "k8s.storage", "k8s.tolerations",
    "env, the name", "secrets.secret", "python", "mounts.target",
)  # fmt: skip
"""Fields of every kind, which run each time."""


def strings(value: Any) -> list[str]:
    """Return every text in an object, keys too."""
    if isinstance(value, dict):
        return [*value, *(found for each in value.values() for found in strings(each))]
    if isinstance(value, list):
        return [found for each in value for found in strings(each)]
    return [value] if isinstance(value, str) else []


def check_names(value: Any) -> None:
    """Check labels, selectors and names of referenced objects by the API server's rules."""
    if isinstance(value, list):
        for each in value:
            check_names(each)
    if not isinstance(value, dict):
        return
    for section in ("labels", "nodeSelector", "annotations"):
        for key, content in value.get(section, {}).items():
            assert re.fullmatch(QUALIFIED, key), (section, key)
            assert len(key.rpartition("/")[0]) <= 253
            assert isinstance(content, str)
            assert section == "annotations" or re.fullmatch(LABEL, content), (section, content)
    for key in ("claimName", "namespace", "serviceAccountName", "priorityClassName"):
        assert key not in value or re.fullmatch(DNS, value[key])
    for each in value.values():
        check_names(each)


@pytest.mark.parametrize("field", OFTEN)
@settings(FEW, max_examples=12)
@given(value=TEXTS, kind=st.sampled_from(EVERY_KIND))
@example(value="a..b", kind="jobset")
@example(value="a..b/c", kind="jobset")
@example(value="$(HOME)$é", kind="volcano")
@example(value="pvc:a..b", kind="job")
@example(value="/a/../b", kind="job")
@example(value="0", kind="job")
@example(value="1e3", kind="trainjob")
@example(value="2000000000000", kind="job")
def test_hostile_text_is_refused_or_kept(field: str, value: str, kind: str) -> None:
    check_text(field, value, kind)


@pytest.mark.long
@pytest.mark.parametrize("field", FIELDS)
@FEW
@given(value=TEXTS, kind=st.sampled_from(EVERY_KIND))
def test_more_hostile_text_in_every_field_is_refused_or_kept(field: str, value: str, kind: str) -> None:
    check_text(field, value, kind)


def check_text(field: str, value: str, kind: str) -> None:
    """Render a plan with a text in one field, unless it is refused, and check what Kubernetes would be told."""
    launch = fields(value)[field]
    launch["k8s"] = {"kind": kind} | launch.get("k8s", {})
    try:
        job = k8s_job(**{"kind": kind} | launch)
    except ValidationError:
        return
    if any(list(rule(job.plan.launch)) for rule in ERRORS) or any(each.severity == "error" for each in findings(job)):
        return
    rendered = render(job)
    items = read(rendered.text)
    for item in items:
        check_names(item)
        assert item["metadata"]["name"].startswith(job.run_id)
    assert items[0]["data"] == {"plan.json": job.plan.to_json()}
    assert len(items) == (3 if kind == "job" else 2)
    errors = [each for level in validate_offline(rendered.text)[:2] for each in level.findings]
    assert [each for each in errors if each.severity == "error"] == []
    _check_meant(field, value, job, items)


def _check_meant(field: str, value: str, job: Any, items: list[dict[str, Any]]) -> None:
    """Check that the text reaches its intended place, and that Kubernetes passes it on unchanged."""
    kind = job.plan.launch.k8s.kind
    _, template = next(templates(kind, items[-1]))
    container = template["spec"]["containers"][0]
    values = {each["name"]: each.get("value", "") for each in container.get("env", [])}
    if field == "env":
        assert expanded(values["NAME"], {"HOME": "/home/me"}) == value
    elif field == "python":
        assert expanded(container["command"][0], {"HOME": "/home/me"}) == value
    elif field in ("env, the name", "secrets, the name"):
        assert value in values
    elif not field.startswith("mounts.source") and field not in ("k8s.storage",):
        assert value in strings(items), (field, value)


@settings(max_examples=150, deadline=None)
@given(st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**40), 2**40), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=8,
))  # fmt: skip
def test_what_is_written_is_read_back(value: Any) -> None:
    item = {"kind": "X", "value": value}
    written = text([item, item])
    assert list(yaml.safe_load_all(written)) == [item, item]
    assert not re.search(r"(^|\s)[&*][A-Za-z0-9]+\s*$", re.sub(r'"(\\.|[^"\\])*"|\'[^\']*\'', "", written), re.M)


LOOKALIKES = [
    "yes", "No", "on", "OFF", "y", "N", "True", "false", "null", "Null", "~", "1e3", "1e-3", "0x10", "0o7", "010",
    "0b1", "1_000", "12:30:45", "1.0", ".5", "+1", "-1", ".inf", ".NaN", "=", "<<", "2026-11-21", "", "-", "---",
    "?", "1Gi",
]  # fmt: skip


@pytest.mark.parametrize("value", LOOKALIKES)
def test_texts_that_look_like_something_else_are_quoted(value: str) -> None:
    """YAML parsers differ: a string to one is a number or a boolean to another."""
    assert f'value: "{value}"\n' in text([{"kind": "X", "value": value}])


def test_long_texts_stay_on_their_line() -> None:
    value = "word " * 500
    assert f'"{value}"' in text([{"kind": "X", "value": value}])


def test_numbers_and_truth_values_are_no_texts() -> None:
    assert (
        text([{"kind": "X", "count": 3, "on": True, "port": "29500"}])
        == 'kind: X\ncount: 3\n"on": true\nport: "29500"\n'
    )


def test_origins_are_kept_as_they_are() -> None:
    origin = "quotes \" ' and\nlines, $(HOME), é ☃ 𝔘 \u2028"
    variables = (Variable(name="X", value="1", origin=origin),)
    job = launch_job(k8s_plan().model_copy(update={"environment": variables}))
    annotation = workload(job)["metadata"]["annotations"]["partool.dev/environment-origins"]
    assert json.loads(annotation)["X"] == origin


def test_a_plan_with_texts_of_all_sorts_is_printable() -> None:
    plan = k8s_plan().model_copy(update={"reasons": tuple(HOSTILE), "name": "llama"})
    job = launch_job(plan)
    block = render(job).text.partition("plan.json: |\n")[2].partition("---\n")[0]
    assert block.isascii()
    assert documents(job)[0]["data"]["plan.json"] == plan.to_json()


def by_kubectl(program: Path, manifest: str) -> list[Any]:
    """Return the documents as kubectl reads them; ``label --local`` asks no server."""
    command = [str(program), "label", "--local", "-f", "-", "-o", "json", "read-by=kubectl"]
    answer = subprocess.run(
        command, input=manifest, capture_output=True, text=True, encoding="utf-8", timeout=60, check=True
    )
    found, rest = [], answer.stdout.strip()
    while rest:
        item, end = json.JSONDecoder().raw_decode(rest)
        found += item["items"] if item["kind"] == "List" else [item]
        rest = rest[end:].lstrip()
    for item in found:
        del item["metadata"]["labels"]["read-by"]
    return found


def test_kubectl_reads_what_was_meant() -> None:
    """kubectl's YAML parser differs from Python's in YAML 1.1 words and numbers without a dot."""
    from kubectl_tool import at_hand

    program = at_hand()
    if program is None:
        pytest.skip("there is no kubectl")
    texts = dict(enumerate([*HOSTILE, *LOOKALIKES]))
    annotations = {f"note-{number}": value for number, value in texts.items()}
    env = {f"VALUE_{number}": value for number, value in texts.items()}
    job = k8s_job("job", k8s={"annotations": annotations}, env=env)
    found = by_kubectl(program, render(job).text)
    assert found == documents(job)
    given = {each["name"]: each.get("value") for each in found[-1]["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert {name: expanded(given[name], {}) for name in env} == env
