"""``partool data``: conversations are tokenised once, counted, and shown with what is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _chat_case import MARKED, folder

from partool.cli.main import run

SPEC = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 500}
hardware: {accelerator: cpu, per_node: 1}
data: {source: a.jsonl, tokenizer: tok}
training: {sequence_length: 121, global_batch: 2, epochs: 2}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PARTOOL_CACHE", str(tmp_path / "cache"))
    folder(tmp_path / "tok", MARKED)
    records = [
        {"messages": [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": "the cat " * n}]}
        for n in range(1, 12)
    ]
    records.append({"messages": [{"role": "user", "content": "no answer"}]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    return str(tmp_path / "spec.yaml")


def partool(*words: str) -> int:
    try:
        run(list(words))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def test_data_are_prepared_shown_and_counted(spec: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert partool("plan", spec) == 1
    assert "PT663" in capfd.readouterr().err
    assert partool("data", "prepare", spec) == 0
    out = capfd.readouterr().out
    assert "1 file, 12 documents" in out
    assert "1 have no token to train on; the first is" in out
    assert "a.jsonl:12" in out
    epoch = int(out.split("an epoch: ")[1].split(" sequences")[0])
    assert partool("plan", spec, "--output", "json") == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["training"]["steps"] == -(-2 * epoch // 2)
    assert plan["data"]["records"] == "chat"
    assert plan["prediction"]["totals"]["data_rows"] == epoch

    assert partool("data", "show", spec, "--output", "json") == 0
    row = json.loads(capfd.readouterr().out)
    runs = [run for document in row["documents"] for run in document["runs"]]
    trained = [run["text"] for run in runs if run["trained"]]
    assert trained
    assert all(text.startswith("the cat") and text.endswith("<|end|>") for text in trained)
    assert {run["role"] for run in runs if run["trained"]} == {"assistant"}
    assert "".join(run["text"] for run in row["documents"][0]["runs"]).startswith("<bos><|start|>user\nwhat is")
    assert partool("data", "show", spec) == 0
    assert "assistant │ <|start|>assistant" in capfd.readouterr().out

    assert partool("data", "stats", spec) == 0
    out = capfd.readouterr().out
    assert "12 samples" in out
    assert "in sequences of 121 tokens" in out
    assert "1 are left out" in out


def test_sources_of_a_mixture_are_prepared_and_shown_in_order(spec: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(spec)
    lines = path.with_name("a.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in (("b", lines[:4]), ("c", lines[4:9]), ("held", lines[9:11])):
        path.with_name(f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    mix = (
        "data: {mix: [{source: b.jsonl, epochs: 3}, {source: c.jsonl}], validation_source: held.jsonl, tokenizer: tok}"
    )
    text = "\n".join(mix if line.startswith("data:") else line for line in SPEC.splitlines())
    path.write_text(text, encoding="utf-8")
    assert partool("data", "prepare", spec) == 0
    out = capfd.readouterr().out
    assert [f"{count} documents" in out for count in (4, 5, 2)] == [True] * 3
    assert partool("plan", spec, "--output", "json") == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["prediction"]["totals"]["data_samples"] == 3 * 4 + 5
    assert partool("data", "stats", spec) == 0
    assert "9 samples" in capfd.readouterr().out
    seen = set()
    for row in range(1, 6):
        if partool("data", "show", spec, "--sample", str(row), "--output", "json") == 0:
            seen |= {one["origin"].split("/")[-1] for one in json.loads(capfd.readouterr().out)["documents"]}
    assert seen == {f"{name}.jsonl:{line}" for name, count in (("b", 4), ("c", 5)) for line in range(1, count + 1)}


def test_what_cannot_be_shown_is_said(spec: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert partool("data", "show", spec, "--sample", "99") == 2
    assert "fewer sequences" in capfd.readouterr().err
    path = Path(spec).with_name("a.jsonl")
    path.write_text(path.read_text(encoding="utf-8") + '{"messages": 5}\n', encoding="utf-8")
    assert partool("data", "prepare", spec) == 1
    assert "a.jsonl:13: 'messages' is a int" in capfd.readouterr().err


def test_lengths_and_sequences_are_a_page(spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "a.jsonl"
    content = chats.read_text().replace("what is 3?", "<script>alert(3)</script>")
    chats.write_text(content, encoding="utf-8")
    assert partool("data", "stats", spec, "--html", str(tmp_path / "d.html")) == 0
    assert "in sequences of 121 tokens" in capfd.readouterr().out
    page = (tmp_path / "d.html").read_text(encoding="utf-8")
    assert "12 samples" in page
    assert page.count('class="run trained"') >= 3
    assert "<script>alert" not in page
    assert "http" not in page.split("</style>")[1].replace("http://www.w3.org", "")
    assert partool("data", "prepare", spec, "--html", str(tmp_path / "d.html")) == 2
    assert partool("data", "show", spec, "--sample", "999", "--html", str(tmp_path / "none.html")) == 2
    assert not (tmp_path / "none.html").exists()
