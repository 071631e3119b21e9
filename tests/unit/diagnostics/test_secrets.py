"""Detection of secrets: hits, non-hits, and a run time proportional to the text's length."""

from __future__ import annotations

import ast
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
from _secret_cases import NAMES, innocent, pem, token, valued

from partool.cli import doctor
from partool.cli.main import run
from partool.diagnostics._secret_rules import ENDINGS, FORMS, SOURCES, WORDS
from partool.diagnostics.rules import RULES
from partool.diagnostics.secrets import (
    in_value,
    in_variable,
    is_secret_name,
    masked,
    masked_lines,
    without_secrets,
)
from partool.launch.target import Check, level_of
from partool.spec import load_text, without_value

HEAD = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\ndata: python-stdlib\n"


def test_every_kind_is_found_and_hidden() -> None:
    rng = random.Random(6)
    for _ in range(500):
        text, hidden = valued(rng)
        assert in_value(text), text
        assert hidden not in masked(f"`launch.image` cannot be {text!r}"), text
        assert in_variable("ORDINARY", token(rng))
    key, body = pem(rng)
    assert in_value(key) == "a private key"
    assert not any(line in "\n".join(masked_lines(["A: |", *key.split("\n")])) for line in body)
    assert all(in_variable(name, "swordfish") for name in NAMES)


def test_ordinary_values_pass() -> None:
    cases = innocent()
    assert len(cases) >= 200
    assert [case for case in cases if in_variable(*case) or masked(case[1]) != case[1]] == []
    env = "".join(
        f"    {name}{n}: {value!r}\n" for n, (name, value) in enumerate(cases) if "'" not in value and not n % 3
    )
    found = load_text(f"{HEAD}launch:\n  env:\n{env}").diagnostics
    assert [finding for finding in found if finding.code == "PT520"] == []


def test_rules_name_their_sources() -> None:
    assert {form.source for form in FORMS} == set(SOURCES)
    assert all(address and licence for address, licence in SOURCES.values())
    assert all(word == word.lower() for form in FORMS for word in form.begins)


HARD = [
    "a", "A_", "aA", "a-", "a=", "a:", "a.", "a/", "-", "=", " ", "@", "a:b@", "://", "://a:", "://a:b", "--a ",
    "--token ", "token=", "TOKEN_", "password: ", "name: TOKEN value: ", "{", "\"", "'", "eyJ", "eyJa.", "bearer ",
    "bearer a", "&sig=", "SG.", "12345678:", "AKIA", "sk-", "hf_", "authorization:", "accountkey=", "-----BEGIN ",
    "-----BEGIN PRIVATE KEY-----",
]  # fmt: skip


@pytest.mark.parametrize("piece", HARD)
def test_thirty_thousand_characters_take_no_time_to_speak_of(piece: str) -> None:
    """A guard against patterns that backtrack, which took 12 s; a linear search takes about 10 ms."""
    text = (piece * 30_000)[:30_000]
    before = time.process_time()
    is_secret_name(text)
    in_variable(text, text)
    masked(text)
    masked_lines([text])
    assert time.process_time() - before < 2


REFUSED = [
    "launch: {env: {A: 'Bearer 0a1b2c3d4e5f6a7b8c9d'}}",
    "launch: {env: {PGPASSWORD: swordfish}}",
    "launch: {env: {A: 'redis://:swordfish@cache'}}",
    "launch: {k8s: {annotations: {example.com/x: ghs_0123456789abcdefghij0123456789abcdef}}}",
    "launch: {k8s: {annotations: {example.com/api-token: swordfish}}}",
    "launch: {slurm: {options: {wckey: npm_0123456789abcdefghij0123456789abcdef}}}",
    "launch: {image: 'me:swordfish@registry.example.com/train:1'}",
    "kernels: {tuned: ['https://me:swordfish@store.example.com/x']}",
]


@pytest.mark.parametrize("text", REFUSED)
def test_secrets_are_refused_wherever_they_stand(text: str) -> None:
    found = [finding for finding in load_text(f"{HEAD}{text}\n").diagnostics if finding.code == "PT520"]
    assert len(found) == 1
    assert "swordfish" not in str(found)


def test_overrides_are_named_without_their_secrets() -> None:
    assert without_value("launch.env.HF_TOKEN=swordfish") == "launch.env.HF_TOKEN=***"
    assert without_value("launch.env={A: 1, DB_PASS: x}") == "launch.env=***"
    assert without_value("launch.env.A=Bearer 0a1b2c3d4e5f6a7b") == "launch.env.A=***"
    assert without_value("HF_TOKEN:swordfish") == "HF_TOKEN:***"
    assert without_value("training.steps=100") == "training.steps=100"


@pytest.mark.parametrize("form", ["text", "json"])
def test_doctor_repeats_no_secrets_of_scripts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    line = "line 4: '#SBATCH --export=ALL,HF_TOKEN=swordfish' stands after the first command"
    monkeypatch.setattr(doctor, "doctor", lambda *_: iter([Check("script", "failed", line)]))
    with pytest.raises(SystemExit):
        run(["doctor", "--output", form])
    shown = capsys.readouterr().out
    assert "HF_TOKEN=***" in shown
    assert "TOKEN=swordfish" not in shown


ROOT = Path(__file__).parents[3]
NAME = "hf-token"
"""The name of a Kubernetes Secret or of a file, which is the name of a secret by its form."""
_NAMED = re.compile(rf"(?i)(?:{'|'.join((*ENDINGS, *WORDS, 'KEY'))})[\"']?\s{{0,3}}[:=]")
"""What a file holds whose messages may be masked; other files need not be compiled."""


def _texts(code: CodeType) -> Iterator[str]:
    """Yield the texts in a module's code; of a text with values in it, each part between them."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        for text in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(text, str):
                yield text


def test_the_own_words_of_messages_are_not_masked() -> None:
    """Whatever a message says about a secret, its words stay: only values that are put into it may be hidden.

    Rules of secrets and examples of rules are left out: they hold names and values on purpose.
    """
    files = [*(ROOT / "partool").rglob("*.py"), *(ROOT / "runtime" / "partool_runtime").rglob("*.py")]
    hidden, examined = [], 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        if file.name.startswith(("_texts_", "_secret_rules")) or not _NAMED.search(source):
            continue
        for text in _texts(compile(source, str(file), "exec", dont_inherit=True, optimize=2)):  # without docstrings
            examined += 1
            if masked(text) != text:
                hidden.append(f"{file.name}: {text}")
    assert examined > 500
    assert hidden == []


def test_texts_of_rules_are_not_masked() -> None:
    assert not [
        rule.code for rule in RULES.values() if masked(f"{rule.title}\n{rule.reason}") != f"{rule.title}\n{rule.reason}"
    ]


def _labels() -> set[str]:
    """Return the names of doctor's checks, and the names that other texts beside them could have."""
    found = {"secret", "credentials", "token"}
    for file in (ROOT / "partool" / "launch").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Check":
                found |= {name.value for name in node.args[:1] if isinstance(name, ast.Constant)}
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                found |= {name.value for name in node.value.elts[:1] if isinstance(name, ast.Constant)}
    return found


def test_labels_of_checks_are_not_masked() -> None:
    texts = (
        "cannot be read",
        f"{NAME}: whether it is there may not be asked",
        f"there is no secrets {NAME} in namespace team",
        f"/home/me/{NAME}: Permission denied",
        "expired",
    )
    labels = _labels()
    assert {"secret", "namespace", "sbatch --test-only"} <= labels
    for label in labels:
        for text in texts:
            level = level_of("checks", [Check(label, "failed", text, f"see {NAME}: it is a Secret")])
            shown = without_secrets(level.findings[0])
            assert (label in shown.message, text in shown.message) == (True, True), shown.message
            assert shown.help == f"see {NAME}: it is a Secret"


def test_values_behind_names_are_masked_still() -> None:
    for text in ("hf-token: swordfish", "secret: swordfish", "DB_PASS: swordfish is wrong", "token: Operation1"):
        assert masked(text).split(" ", 1)[1].startswith("***"), text
