"""Shell scripts are read as a shell would read them, and never run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partool.engines.shell import ShellScript, Word

HERE = Path("train.sh")


def commands(text: str) -> list[list[Word]]:
    script = ShellScript()
    script.read(HERE, text)
    return script.commands


def words(text: str) -> list[str]:
    """Return the words of the only command."""
    (command,) = commands(text)
    assert not any(word.unknown for word in command), command
    return [word.text for word in command]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("run --a 1 --b=2 # remark --c", ["run", "--a", "1", "--b=2"]),
        ("N=3\nrun --a $N --b ${N}x", ["run", "--a", "3", "--b", "3x"]),
        ("run \\\n  --a \\\n  1", ["run", "--a", "1"]),
        ('ARGS="--a 1 \\\n --b 2"\nrun $ARGS', ["run", "--a", "1", "--b", "2"]),
        ('ARGS="--a 1"\nARGS="$ARGS --b 2"\nrun $ARGS', ["run", "--a", "1", "--b", "2"]),
        ("A=(--a 1 # first\n --b 2)\nA+=(--c)\nrun ${A[@]}", ["run", "--a", "1", "--b", "2", "--c"]),
        ('A=(--a "1 2")\nrun "${A[@]}"', ["run", "--a", "1 2"]),
        ("run ${X:-4} ${Y-five}", ["run", "4", "five"]),
        ("X=2; run ${X:-4}", ["run", "2"]),
        ("X=2; run ${X:?the words} ${X?}", ["run", "2", "2"]),
        ("A=2 B=3\nrun $((A * B + 1)) $(($A*4))", ["run", "7", "8"]),
        ("export A=1\nrun '$A' \"$A\"", ["run", "$A", "1"]),
        ("A=1 run --a", ["run", "--a"]),
        ("A=1\nif true; then\n  A=1\nfi\nrun $A", ["run", "1"]),
        ('A=("--a 1" "--b")\nrun ${A[@]}', ["run", "--a", "1", "--b"]),
        ("A=x\nif [ $A = x ]; then B=1; else B=2; fi\nrun $B", ["run", "1"]),
        (
            'A=3\nif [[ "$A" == "4" ]]; then\n B=1\nelif [ $A -gt 2 ] && [ $A -le 3 ]; then\n B=2\nfi\nrun $B',
            ["run", "2"],
        ),
        ("A=3\nif [ $A -lt 3 ] || [ ! $A != 3 ]\nthen\nrun --yes\nelse\nrun --no\nfi", ["run", "--yes"]),
        ("A=1\nif [ $A -eq 1 ]; then if [ $A -eq 2 ]; then B=2; else B=3; fi; fi\nrun $B", ["run", "3"]),
        ("if [ -z ${NOWHERE} ]; then A=unset; else A=set; fi\nrun $A", ["run", "unset"]),
        ('case "8B" in\n "1B") A=1;;\n "8B"|"9B") A=2\n ;;\n *) A=3;;\nesac\nrun $A', ["run", "2"]),
        ("case q in\n a) A=1;;\n *) A=3;;\nesac\nrun $A", ["run", "3"]),
        ('A="--a"\n#--b \\\nB="--c"\nrun $A $B', ["run", "--a", "--c"]),
        ('cat > /dev/null <<EOT\nrun --wrong "\nEOT\nrun --a', ["run", "--a"]),
        ("T=2\nA=$(( ($T > 1) ? 1 : 0 ))\nrun $A $(( (T + 1) * 2 ))", ["run", "1", "6"]),
        ("A=1\nif [ $A = 2 ]; then B=--b; fi\nrun --a $B --c", ["run", "--a", "--c"]),
        ("run --a $@ ${NONE:-${ALSO:-4}}", ["run", "--a", "4"]),
    ],
)
def test_words_are_those_of_a_shell(text: str, want: list[str]) -> None:
    script = text.replace("true", ":")
    found = [command for command in commands(script) if command[0].text == "run"]
    assert [word.text for word in found[0]] == want
    shell = "run() { printf '%s\\n' run \"$@\"; }\n" + script
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == want, "bash reads it otherwise"


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("run --a $MISSING", "$MISSING"),
        ("if [ $X = 1 ]; then A=1; else A=2; fi\nrun $A", "$A"),
        ("A=1\nif grep -q x y; then A=2; fi\nrun $A", "$A"),
        ("run $(echo $(date))", "$(echo $(date))"),
        ("run --a $(nproc)", "$(nproc)"),
        ("A=`nproc`\nrun --a $A", "`nproc`"),
        ("A=1\nif [ $B = 2 ]; then A=2; fi\nrun --a $A", "$A"),
        ("run --a $((N / 0))", "$((N / 0))"),
        ("run --a $1", "$1"),
        ("run ${X:?no value}", "${X:?no value}"),
    ],
)
def test_what_only_a_shell_could_tell_is_named(text: str, unknown: str) -> None:
    command = next(each for each in commands(text) if each[0].text == "run")
    assert [each.replace("\u00a0", " ") for each in command[-1].unknown] == [unknown]


def test_words_know_their_lines() -> None:
    text = 'A=(\n  --a 1\n  --b 2\n)\nB="--c 3 \\\n  --d 4"\nrun ${A[@]} $B \\\n --e 5\n'
    (command,) = commands(text)
    lines = {word.text: word.line for word in command}
    assert [lines[name] for name in ("run", "--a", "--b", "--c", "--d", "--e")] == [7, 2, 3, 5, 6, 8]


def test_sourced_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "sizes.sh").write_text("LAYERS=12\nsource train.sh\n")
    text = "source sizes.sh\n. nowhere.sh\nrun --num-layers $LAYERS\n"
    (tmp_path / "train.sh").write_text(text)
    script = ShellScript()
    script.read(tmp_path / "train.sh", text)
    assert [word.text for word in script.commands[-1]] == ["run", "--num-layers", "12"]
    assert "nowhere.sh" in [word.text for word in script.missing]


def test_nothing_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    text = (
        f"touch {trace}\nA=$(touch {trace})\nB=`touch {trace}`\neval touch {trace}\nrun --a ${{A:-$(touch {trace})}}\n"
    )
    assert commands(text)
    assert not trace.exists()


@given(st.text(alphabet="aA1 =$(){}[]@'\"\\\n;#`+-*/:|&<>\v", max_size=60))
def test_any_text_is_read(text: str) -> None:
    """Half-finished quotes, brackets and references raise nothing and end."""
    for command in commands(text):
        assert all(word.line >= 0 for word in command)
