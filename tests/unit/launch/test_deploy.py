"""The contents of deploy/ work: Dockerfiles, RBAC rules, the notes' specs and commands, the CI action and the hook."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from partool.cli.main import COMMANDS
from partool.diagnostics.record import Diagnostic
from partool.launch.k8s.doctor import _permissions
from partool.launch.k8s.resources import Resource
from partool.planner import make_plan
from partool.render.dockerfile import dockerfile
from partool.spec import load_text

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
NOTES = sorted(DEPLOY.glob("*.md"))
BIN = Path(sys.executable).parent
REST = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\ndata: python-stdlib\n"
BAD = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: h100x}\ndata: python-stdlib\n"


@pytest.mark.parametrize(
    ("name", "backend", "architecture"),
    [("cuda", "cuda", "amd64"), ("rocm", "rocm", "amd64"), ("arm64", "cuda", "arm64")],
)
def test_dockerfiles_are_those_that_partool_writes(name: str, backend: str, architecture: Any) -> None:
    assert (DEPLOY / f"Dockerfile.{name}").read_text() == dockerfile(backend, architecture)


def test_images_leave_out_what_belongs_to_this_machine() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".partool", "build"} <= set(left_out)
    for needed in (
        "pyproject.toml",
        "CMakeLists.txt",
        "README.md",
        "partool",
        "runtime",
        "kernels",
        "templates",
        "specs",
    ):
        assert (ROOT / needed).exists()
        assert needed not in left_out


def blocks(kind: str) -> list[tuple[str, str]]:
    """Return (note, text) of each block of a kind in the notes."""
    found = []
    for note in NOTES:
        found += [(note.name, text) for text in re.findall(rf"```{kind}\n(.*?)```", note.read_text(), re.DOTALL)]
    return found


SPECS = [(note, text) for note, text in blocks("yaml") if re.match(r"(hardware|launch|checkpoint):", text)]


@pytest.mark.parametrize(("note", "text"), SPECS, ids=[f"{note}-{i}" for i, (note, _) in enumerate(SPECS)])
def test_specs_of_the_notes_have_a_plan(note: str, text: str, tmp_path: Path) -> None:
    for other, profile in blocks("yaml"):
        if other == note and profile.startswith("# site.yaml"):
            (tmp_path / "site.yaml").write_text(profile)
    (tmp_path / "spec.yaml").touch()
    hardware = "" if text.startswith("hardware") else "hardware: {accelerator: h100-sxm, nodes: 2}\n"
    loaded = load_text(REST + hardware + text)
    assert loaded.spec is not None, loaded.diagnostics
    result = make_plan(loaded.spec, base_dir=tmp_path, default_name="note")
    assert [d for d in result.diagnostics if d.severity == "error"] == []
    assert result.plan is not None


def test_there_are_specs_in_the_notes() -> None:
    assert {note for note, _ in SPECS} == {"kubernetes.md", "rocm.md", "slurm.md", "superchip.md"}


def commands() -> set[str]:
    text = "\n".join(note.read_text() for note in NOTES)
    return {line.split("#")[0].strip() for line in re.findall(r"(?m)^ {4,}(partool .*)$", text)}


@pytest.mark.parametrize("line", sorted(commands()))
def test_commands_of_the_notes_exist(line: str) -> None:
    _, command, *words = shlex.split(line)
    app = typer.Typer()
    app.command(command)(importlib.import_module(COMMANDS[command][0]).command)
    known = {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_links_and_files_of_the_notes_exist() -> None:
    for note in NOTES:
        text = note.read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (DEPLOY / target).exists(), f"{note.name}: {target}"
        for name in re.findall(r"deploy/[\w.-]+\w", text):
            assert (ROOT / name).exists(), f"{note.name}: {name}"


def test_codes_of_the_notes_are_of_rules() -> None:
    from partool.diagnostics.rules import RULES

    codes = {code for note in NOTES for code in re.findall(r"PT\d{3}", note.read_text())}
    assert codes
    assert codes <= set(RULES)


def allowed() -> set[tuple[str, str]]:
    """Return (verb, resource with its group) of the role."""
    role = next(each for each in yaml.safe_load_all((DEPLOY / "role.yaml").read_text()) if each["kind"] == "Role")
    return {
        (verb, f"{name}.{group}" if group else name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
        for verb in rule["verbs"]
    }


class Asked:
    """Fake cluster that allows exactly the role's verbs."""

    namespace = "train"

    def __init__(self, rights: set[tuple[str, str]]) -> None:
        self.rights = rights

    def may(self, verb: str, resource: Resource, sub: str = "", *, namespace: str | None = None) -> bool:
        return (verb, resource.full_name + (f"/{sub}" if sub else "")) in self.rights

    def read(self, path: str) -> dict[str, Any]:
        return {"preferredVersion": {"version": "v1beta1"}, "versions": [{"version": "v1beta1"}], "resources": []}


@pytest.mark.parametrize("kind", ["jobset", "job", "trainjob", "pytorchjob", "volcano"])
def test_the_role_allows_what_runs_take(kind: str) -> None:
    from _launch_case import launch_plan

    plan = launch_plan(target="k8s", image="team/partool:1", k8s={"kind": kind, "namespace": "train"})
    (check,) = _permissions(Asked(allowed()), plan)  # type: ignore[arg-type]
    assert check.verdict == "ok", check.text
    (check,) = _permissions(Asked(allowed() - {("get", "pods/log")}), plan)  # type: ignore[arg-type]
    assert check.verdict == "failed"


def test_the_role_gives_single_secrets_and_no_wildcards() -> None:
    for document in yaml.safe_load_all((DEPLOY / "role.yaml").read_text()):
        for rule in document.get("rules", []):
            if "secrets" in rule["resources"]:
                assert document["kind"] == "Role"
                assert not {"list", "watch", "deletecollection", "update"} & set(rule["verbs"])
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def action() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return document


def checked(tmp_path: Path, **inputs: str) -> tuple[int, str, str]:
    """Run the action's check step in a folder; return its exit code, standard output and standard error."""
    step = action()["runs"]["steps"][1]
    given = {name: str(field["default"]) for name, field in action()["inputs"].items()} | inputs
    environment = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
        for name, text in step["env"].items()
    }
    place = tmp_path / "runner" / "partool"
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "bin").exists():
        (place / "bin").symlink_to(BIN)
    runner = {
        "RUNNER_TEMP": str(tmp_path / "runner"), "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }  # fmt: skip
    process = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path, env=os.environ | environment | runner, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return process.returncode, process.stdout, process.stderr


def test_every_input_of_the_action_is_used_and_described() -> None:
    text = (ROOT / "action.yml").read_text()
    document = action()
    for name, field in document["inputs"].items():
        assert field["description"]
        assert f"${{{{ inputs.{name} }}}}" in text
    for step in document["runs"]["steps"]:
        assert "${{" not in step["run"], "values go through the environment, where they are no code"
        assert step["shell"] == "bash"
    readme = (DEPLOY / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in document["inputs"])


def test_the_action_passes_good_specs(tmp_path: Path) -> None:
    folder = tmp_path / "with blanks"
    folder.mkdir()
    (folder / "partool quickstart.yaml").write_text((ROOT / "specs/quickstart.yaml").read_text())
    code, output, errors = checked(tmp_path)
    assert (code, output) == (0, ""), errors
    assert (tmp_path / "output").read_text() == "sarif=partool.sarif\n"
    log = json.loads((tmp_path / "partool.sarif").read_text())
    assert log["version"] == "2.1.0"
    assert log["runs"][0]["results"] == []


def test_the_action_fails_and_annotates_bad_specs(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/bad.yaml").write_text(BAD)
    (tmp_path / "specs/good.yaml").write_text((ROOT / "specs/quickstart.yaml").read_text())
    code, output, _ = checked(tmp_path, specs="  specs/*.yaml\n\nnowhere/*.yaml\n", sarif="out.sarif")
    assert code == 1
    assert output.startswith("::error file=specs/bad.yaml,line=2,")
    (result,) = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "PT260"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "specs/bad.yaml"
    assert place["region"]["startLine"] == 2
    assert result["partialFingerprints"]


def test_the_action_can_be_strict_and_write_no_file(tmp_path: Path) -> None:
    text = REST + "hardware: {accelerator: h100-sxm}\ntraining: {sequence_length: 8192}\n"  # above max_position
    (tmp_path / "partool.yaml").write_text(text)
    code, output, _ = checked(tmp_path, sarif="")
    assert code == 0
    assert output.startswith("::warning file=partool.yaml,line=")
    assert "::error" not in output
    assert checked(tmp_path, strict="true", sarif="")[0] == 1
    assert list(tmp_path.glob("*.sarif")) == []


def test_the_action_says_where_there_is_nothing_to_check(tmp_path: Path) -> None:
    code, _, errors = checked(tmp_path, specs="nowhere/**/*.yaml")
    assert code == 2
    assert "no spec matches: nowhere/**/*.yaml" in errors


def test_names_in_the_action_s_inputs_are_never_run(tmp_path: Path) -> None:
    (tmp_path / "$(touch ran).yaml").write_text(BAD)
    (tmp_path / "-x.yaml").write_text(BAD)
    code, output, _ = checked(tmp_path, specs="$(touch ran).yaml\n-x.yaml\n; touch ran", sarif="$(touch ran)")
    assert code == 1
    assert output.count("PT260") == 2
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "$(touch ran)").exists()


def test_the_script_of_the_action_passes_shellcheck() -> None:
    subprocess.run([BIN / "shellcheck", DEPLOY / "check-specs.sh"], check=True, timeout=30)
    for step in action()["runs"]["steps"]:
        subprocess.run([BIN / "shellcheck", "-s", "bash", "-"], input=step["run"], text=True, check=True, timeout=30)


def hook() -> dict[str, Any]:
    (found,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    return dict(found)


def test_the_hook_runs_on_specs(tmp_path: Path) -> None:
    bad = tmp_path / "partool-bad.yaml"
    bad.write_text(BAD)
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    command = shlex.split(hook()["entry"])

    def code(*files: Path) -> int:
        return subprocess.run([*command, *files], env=environment, capture_output=True, timeout=60).returncode

    assert code(ROOT / "specs/quickstart.yaml") == 0
    assert code(ROOT / "specs/quickstart.yaml", bad) == 1


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("partool.yaml", True),
        ("experiments/llama.partool.yml", True),
        ("partool/base.yaml", True),
        ("experiments/llama.yaml", False),
        ("partool.py", False),
        (".pre-commit-config.yaml", False),
    ],
)
def test_the_hook_takes_files_by_their_names(path: str, taken: bool) -> None:
    fields = hook()
    assert bool(re.search(fields["files"], path) and not re.search(fields["exclude"], path)) == taken


def test_findings_have_a_place(tmp_path: Path) -> None:
    """CI annotations need a place: a finding without one would be lost."""
    loaded = load_text(BAD)
    assert loaded.spec is not None
    result = make_plan(loaded.spec, base_dir=tmp_path, default_name="bad")
    assert all(isinstance(found, Diagnostic) and found.path for found in result.diagnostics)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_action_installs_partool(tmp_path: Path) -> None:
    step = action()["runs"]["steps"][0]
    environment = os.environ | {
        "INSTALL": "", "PYTHON": sys.executable, "RUNNER_TEMP": str(tmp_path), "GITHUB_ACTION_PATH": str(ROOT)
    }  # fmt: skip
    subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], env=environment, check=True, timeout=500)
    installed = tmp_path / "partool/bin"
    assert not list((tmp_path / "partool").glob("lib/python*/site-packages/torch")), "checking needs no torch"
    process = subprocess.run(
        [DEPLOY / "check-specs.sh"], cwd=ROOT, capture_output=True, text=True, timeout=100,
        env=os.environ | {"SPECS": "specs/*.yaml", "SARIF": "", "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
