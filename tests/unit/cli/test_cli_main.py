"""The command line as a user sees it: exit codes, streams, help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from partool.cli.main import COMMANDS, run

ROOT = Path(__file__).parents[3]
_THREADS = "OPENBLAS_NUM_THREADS"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run(arguments)
    shown = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), shown.out, shown.err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_help_names_the_documentation_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "--help")
    page = out.partition("Documentation: ")[2].splitlines()[0]
    assert Path(page) == ROOT / "docs" / "README.md"
    assert max(len(line) for line in out.splitlines() if page not in line) <= 80
    assert "--install-completion" in out


BASH = """\
eval "$(partool --show-completion bash)"
for line in "partool pl" "partool plan --wh" "partool launch --res" "partool schedule --mic"; do
    COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _partool_completion partool
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", BASH], capture_output=True, text=True, env=variables, timeout=120, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["plan", "--why", "--resume", "--micro-batches"]


@pytest.mark.parametrize(("shell", "place"), [("zsh", ".zfunc/_partool"), ("fish", ".config/fish/completions")])
def test_the_scripts_of_other_shells_are_installed(
    shell: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, _ = call(capsys, "--show-completion", shell)
    assert (code, "_PARTOOL_COMPLETE" in out) == (0, True)
    code, _, err = call(capsys, "--install-completion", shell)
    assert code == 0
    assert place in err
    assert (tmp_path / place).exists()
    code, _, err = call(capsys, "--show-completion", "tcsh")
    assert (code, "one of bash, zsh, fish" in err) == (2, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    assert f"partool {name}" in out


def test_an_interrupt_while_a_command_is_loaded_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("partool.cli.main.importlib.import_module", interrupted)
    assert call(capsys, "plan", "x.yaml") == (130, "", "partool: interrupted\n")


INTERRUPTING = """\
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10**6):
                    pass
            except KeyboardInterrupt:  # as where modules catch what their imports raise, or make it another error
                raise RuntimeError("not an interrupt any more") from None

sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize("module", ["partool.cli.main", "typer", "partool.cli.plan", "pydantic"])
def test_an_interrupt_while_modules_load_leaves_no_traceback(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING, encoding="utf-8")
    command = [
        sys.executable,
        "-c",
        "from partool.cli.entry import run; run()",
        "plan",
        str(ROOT / "specs/gpt2-xl.yaml"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "AT": module}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "partool: interrupted\n")


def test_an_error_that_an_interrupt_has_caused_is_an_interrupt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise RuntimeError(f"Error calling __set_name__ of {name}") from KeyboardInterrupt()

    monkeypatch.setattr("partool.cli.main.importlib.import_module", interrupted)
    assert call(capsys, "plan", "x.yaml") == (130, "", "partool: interrupted\n")


@pytest.mark.parametrize("arguments", [["plann"], ["--nope"], ["plan"], ["plan", "--nope"], ["explain", "PT9999"]])
def test_usage_errors_are_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert err
    assert not out


@pytest.mark.parametrize(
    ("arguments", "first", "help"),
    [
        (["plan"], "error: partool plan needs SPEC...", "partool init"),
        (["launch"], "error: partool launch needs SPEC", "partool init"),
        (["plan", "--nope"], "error: no such option: --nope", "partool plan --help"),
        (
            ["plan", "x", "--output", "y"],
            "error: invalid value for '--output': 'y' is not one of",
            "partool plan --help",
        ),
        (["plan", "x", "y"], "error: invalid value: several specs go only together", "partool plan --help"),
    ],
)
def test_usage_errors_speak_like_the_rest(
    capsys: pytest.CaptureFixture[str], arguments: list[str], first: str, help: str
) -> None:
    code, _, err = call(capsys, *arguments)
    lines = err.splitlines()
    assert (code, len(lines)) == (2, 2)
    assert lines[0].startswith(first)
    assert lines[1].startswith(f"  help: {help}")


def test_a_list_without_runs_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARTOOL_HOME", raising=False)
    code, out, err = call(capsys, "list")
    assert (code, out) == (0, "")
    assert err == "partool: there are no runs in .partool/runs; partool launch SPEC starts one\n"
    assert call(capsys, "list", "--output", "json") == (0, "[]\n", "")


def test_a_bad_spec_is_1_in_every_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("model: {layerz: 1}\ndata: x\n")
    code, out, err = call(capsys, "plan", str(spec))
    assert (code, out) == (1, "")
    assert "did you mean `layers`?" in err
    for format, sign in (("json", '"PT101"'), ("github", "::error file="), ("sarif", '"2.1.0"')):
        code, out, _ = call(capsys, "plan", str(spec), "--output", format)
        assert code == 1
        assert sign in out


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "explain", "pt204")
    assert code == 0
    assert "kv_heads: 3" in out
    code, out, _ = call(capsys, "explain", "gathered")
    assert (code, out.startswith("gathered (memory per rank, bytes): parameters as passes")) == (0, True)
    assert "did you mean gathered?" in call(capsys, "explain", "gatherd")[2]
    code, out, _ = call(capsys, "explain")
    assert code == 0
    assert "PT101" in out


def test_a_reader_that_leaves_is_no_error() -> None:
    line = f"{sys.executable} -m partool schema | head -c 10"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    assert len(done.stdout) == 10


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["explain", "PT203"], 141), (["explain", "nothing"], 2)],
    ids=["result", "talk"],
)
def test_a_reader_of_everything_that_leaves_changes_no_exit_code(arguments: list[str], code: int) -> None:
    """A failure to print a message must not change the result, as in ``partool launch mine.yaml 2>&1 | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "partool", *arguments]
    ended = subprocess.run(command, stdout=writing, stderr=writing, timeout=60, check=False)
    os.close(writing)
    assert ended.returncode == code


def test_help_needs_nothing_heavy() -> None:
    program = "import sys\nfrom partool.cli.main import run\ntry:\n    run(['--help'])\nexcept SystemExit:\n    pass\n"
    program += "print(sorted({'typer', 'rich', 'pydantic', 'yaml', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="numpy starts no other thread on one core")
@pytest.mark.parametrize("asked", [None, "2"])
def test_numpy_starts_one_thread_unless_asked_for_more(asked: str | None) -> None:
    """The setting must not reach processes that partool starts, which train."""
    program = "import os\nfrom partool.cli.main import run\ntry:\n    run(['plan', 'specs/weipipe.yaml'])\n"
    program += "except SystemExit:\n    pass\nprint(len(os.listdir('/proc/self/task')), os.environ.get(NAME))"
    environment = {name: value for name, value in os.environ.items() if name not in (_THREADS, "OMP_NUM_THREADS")}
    environment |= {} if asked is None else {_THREADS: asked}
    command = [sys.executable, "-c", program.replace("NAME", repr(_THREADS))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == f"{asked or 1} {asked}"


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_asked_for_by_the_option_that_there_is(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, _, err = call(capsys, name, "--json")
    assert code == 2
    assert err.startswith("error: no such option: --json\n  help: ")
    options = call(capsys, name, "--help")[1]
    assert ("write --output json;" in err) == ("--output" in options and name not in ("export", "import"))
