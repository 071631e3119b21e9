"""The real kubectl with the output of ``partool render``, on the server that partool's own client is tested against."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import k8s_schemas
import pytest
import yaml
from k8s_case import Case, case
from kubectl_tool import at_hand, kubectl
from patience import PATIENCE
from test_k8s_commands import kinds, plan_file
from test_launch_commands import invoke

pytestmark = [
    *([] if at_hand() else [pytest.mark.long]),  # the download may be slow
    pytest.mark.timeout(420),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the package carries kubectl for linux/amd64"),
    pytest.mark.skipif(not k8s_schemas.custom_types(), reason=f"no definitions of types in {k8s_schemas.CRDS}"),
]


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return kubectl()
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "kube-cache"))
    with case(tmp_path) as found:
        found.cluster.token = ""  # kubectl sends no token where nothing is encrypted
        yield found


def run(program: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@kinds
def test_kubectl_takes_what_is_rendered(here: Case, program: Path, kind: str) -> None:
    printed = invoke("render", plan_file(kind=kind))
    assert printed.exit_code == 0, printed.output
    Path("manifest.yaml").write_text(printed.stdout)
    dry = run(program, "apply", "--dry-run=server", "--validate=strict", "-f", "manifest.yaml")
    assert dry.count("created (server dry run)") == len(list(yaml.safe_load_all(printed.stdout)))
    assert not here.cluster.names("configmaps")
    created = run(program, "create", "--validate=strict", "-f", "manifest.yaml")
    assert created.count("created") == dry.count("created")
    [config] = here.cluster.names("configmaps")
    name = config.removesuffix("-plan")
    resource = {"job": "jobs.batch", "volcano": "jobs.batch.volcano.sh"}.get(kind, f"{kind}s")
    found = json.loads(run(program, "get", resource, name, "-o", "json"))
    assert found["metadata"]["labels"]["partool.dev/run"] == name
    # First create the agents' key, then make the job the owner of it and the rest.
    comments = [line.removeprefix("# ") for line in printed.stdout.splitlines() if line.startswith("# ")]
    (key,) = (line.split() for line in comments if "create secret generic" in line)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": key[key.index("generic") + 1]}}
    Path("key.yaml").write_text(yaml.safe_dump(secret))
    run(program, "create", "-f", "key.yaml")  # `create secret` speaks protobuf, which this server does not
    head = [line for line in comments if line.startswith("  ")]
    lines = [f'kubectl() {{ "{program}" "$@"; }}', *head]
    subprocess.run(["bash", "-ceu", "\n".join(lines)], check=True, timeout=60 * PATIENCE)
    owners = here.cluster.find("configmaps", config)["metadata"]["ownerReferences"]
    assert [(each["name"], each["uid"]) for each in owners] == [(name, found["metadata"]["uid"])]
    # partool's own diff and kubectl's agree that nothing differs
    run(program, "apply", "--validate=strict", "-f", "manifest.yaml")
    assert invoke("launch", "plan.json", "--diff").exit_code == 0
    run(program, "delete", "--wait=true", "-f", "manifest.yaml")
    assert not here.cluster.names("configmaps")


def test_kubectl_is_refused_what_partool_is_refused(here: Case, program: Path) -> None:
    text = invoke("render", plan_file(kind="jobset")).stdout
    Path("manifest.yaml").write_text(text.replace("replicatedJobs:", "replicatedJob:"))
    refused = run(program, "create", "--validate=strict", "-f", "manifest.yaml", code=1)
    assert 'unknown field "spec.replicatedJob"' in refused
    assert not here.cluster.names("jobsets")


def test_kubectl_reads_and_follows_logs_and_waits_for_the_end(here: Case, program: Path) -> None:
    assert invoke("launch", plan_file()).exit_code == 0
    [launched] = here.store.runs()
    pod = here.pod(launched, 0)
    here.cluster.write(pod, "[0] one", "[1] two")
    assert run(program, "logs", pod) == "[0] one\n[1] two\n"
    following = subprocess.Popen([str(program), "logs", "-f", pod], stdout=subprocess.PIPE, text=True)
    time.sleep(0.5)
    here.cluster.write(pod, "[0] three")
    here.end_pod(pod, 0)
    assert following.communicate(timeout=30 * PATIENCE)[0] == "[0] one\n[1] two\n[0] three\n"
    here.cluster.forbidden.add(("list", "pods"))
    assert "cannot list resource" in run(program, "get", "pods", code=1)
