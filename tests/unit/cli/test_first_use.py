"""What new users met: changed presets, guessed names, files of other tools, tabs, repeated warnings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planned import findings_of

from partool.catalog.lookup import did_you_mean, table
from partool.catalog.models import resolve_model
from partool.cli._files import write_or_exit
from partool.cli.main import run
from partool.spec import _pydantic, load_text
from partool.spec.experts import Moe
from partool.spec.foreign import DEEPSPEED, foreign
from partool.spec.model import Mla, ModelConfig, ModelSpec

HERE = Path(__file__).parents[1]
SPEC = "model: {preset: gpt2, layers: 2}\ndata: python-stdlib\ntraining: {sequence_length: 256}\n"


def config_of(preset: str, **changes: Any) -> ModelConfig:
    found = resolve_model(ModelSpec(preset=preset, **changes), HERE)
    assert found.diagnostics == ()
    assert found.config is not None
    return found.config


@pytest.mark.parametrize(
    ("preset", "changes", "kv_heads", "ffn_hidden", "head_dim"),
    [
        ("gpt2", {"hidden": 128, "heads": 4}, 4, 512, 32),
        ("gpt2", {"heads": 6}, 6, 3072, 128),
        ("llama3-8b", {"hidden": 512, "heads": 8}, 2, 1792, 64),
        ("llama3-8b", {"hidden": 512, "heads": 8, "kv_heads": 8, "ffn_hidden": 99, "head_dim": 32}, 8, 99, 32),
        ("llama2-7b", {"hidden": 200, "heads": 2}, 2, 576, 100),  # 537.5 rounded up to a multiple of 64
        ("qwen3-32b", {"hidden": 640, "heads": 8}, 1, 3200, 128),  # heads have a width of their own
        ("llama3-8b", {"layers": 2}, 8, 14336, 128),
    ],
)
def test_numbers_of_a_preset_follow_those_that_the_spec_changes(
    preset: str, changes: dict[str, int], kv_heads: int, ffn_hidden: int, head_dim: int
) -> None:
    config = config_of(preset, **changes)
    assert (config.kv_heads, config.ffn_hidden, config.head_dim) == (kv_heads, ffn_hidden, head_dim)


def test_experts_follow_the_width_unless_the_spec_gives_them() -> None:
    narrow = config_of("mixtral-8x7b", hidden=512, heads=8).moe
    assert narrow is not None
    assert narrow.ffn_hidden == 1792
    own = config_of("mixtral-8x7b", hidden=512, heads=8, moe=Moe(experts=2, top_k=1, ffn_hidden=64)).moe
    assert own is not None
    assert own.ffn_hidden == 64


def test_heads_of_latent_attention_keep_their_width() -> None:
    config = config_of("deepseek-v3", hidden=512, heads=8)
    assert config.head_dim == 192
    assert isinstance(config.mla, Mla)


def test_the_plan_says_which_numbers_followed() -> None:
    source = resolve_model(ModelSpec(preset="gpt2", hidden=128, heads=4), HERE).source
    assert source == "preset gpt2, with heads, hidden from the spec, and ffn_hidden 512, kv_heads 4 in proportion"
    assert "proportion" not in resolve_model(ModelSpec(preset="gpt2", layers=2), HERE).source


@pytest.mark.parametrize(
    ("preset", "changes", "said"),
    [
        ("llama3-8b", {"heads": 6, "head_dim": 64}, "share 8 key and value heads evenly (kv_heads from preset llama3"),
        ("gpt2", {"heads": 7}, "hidden: 768 is not a multiple of heads: 7 (hidden from preset gpt2)"),
        ("gpt2", {"hidden": 100}, "heads: 12 (heads from preset gpt2)"),
    ],
)
def test_a_message_names_the_preset_of_a_number_that_nobody_wrote(
    preset: str, changes: dict[str, int], said: str
) -> None:
    (finding,) = resolve_model(ModelSpec(preset=preset, **changes), HERE).diagnostics  # type: ignore[arg-type]
    assert said in finding.message


def test_numbers_of_a_file_follow_too(tmp_path: Path) -> None:
    fields = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = resolve_model(ModelSpec(config="config.json", hidden=128, heads=8), tmp_path).config
    assert config is not None
    assert (config.kv_heads, config.ffn_hidden, config.head_dim) == (4, 192, 16)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("h100", "did you mean h100-nvl or h100-pcie or h100-sxm?"),
        ("H100", "did you mean h100-nvl or h100-pcie or h100-sxm?"),
        ("a100", "did you mean a100-40 or a100-80?"),
        ("h100-sxn", "did you mean h100-sxm or"),
    ],
)
def test_names_that_begin_with_the_written_one_come_first(written: str, said: str) -> None:
    assert did_you_mean(written, [*table("accelerators"), "cpu", "auto"]).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: gpt2\nhardware:\n\taccelerator: cpu\n", "line 3 is indented with tabs"),
        ("model: gpt2\nhardware:\n  nodes: 1\n\tper_node: 1\n\tdomain: 1\n", "2 lines, the first of them 4, are"),
    ],
)
def test_tabs_come_with_the_line_and_the_command_that_replaces_them(text: str, said: str) -> None:
    (finding,) = load_text(text, "my spec.yaml").diagnostics
    assert (finding.code, said in finding.help) == ("PT006", True)
    assert finding.help.endswith(r"""(sed -i 's/\t/  /g' 'my spec.yaml')""")


def test_a_tab_elsewhere_does_not_explain_a_syntax_error() -> None:
    (finding,) = load_text("model: gpt2\nname: 'a\tb'\ntraining: {steps: 1\n").diagnostics
    assert "tab" not in finding.help


FOREIGN = {
    "Hugging Face": (
        {"model_type": "llama", "hidden_size": 64}, "Hugging Face configuration of a llama model", "model: {config: ",
    ),
    "no type": ({"architectures": ["A"]}, "Hugging Face configuration, not", "model: {config: "),
    "DeepSpeed": (
        {"train_batch_size": 64, "zero_optimization": {"stage": 2, "offload_param": {}}, "bf16": {"enabled": True}},
        "DeepSpeed configuration",
        "train_batch_size → training.global_batch; zero_optimization → parallel.data; bf16 → training.precision; "
        "offload_optimizer and offload_param → parallel.offload",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("command", ["plan", "launch", "report", "render"])
def test_a_file_of_another_tool_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, case: str
) -> None:
    content, named, help = FOREIGN[case]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as end:
        run([command, str(file)])
    assert end.value.code == 1
    shown = capsys.readouterr().err
    if case == "DeepSpeed" and command != "report":  # it is read, and what it does not say is asked for
        assert "PT822" in shown
        assert "--set model.preset=VALUE" in shown
        return
    assert "PT012" in shown
    assert named in shown
    assert help in shown


@pytest.mark.parametrize("case", FOREIGN)
def test_it_is_named_as_a_spec_as_well(case: str) -> None:
    content, named, help = FOREIGN[case]
    (finding,) = load_text(json.dumps(content)).diagnostics
    assert (finding.code, named in finding.message, help in finding.help) == ("PT012", True, True)


def test_other_documents_belong_to_nobody_else() -> None:
    for document in ({"model": "gpt2", "optimizer": {}}, {"optimizer": {}}, {"partool_version": "1"}, [], None):
        assert foreign(document, "x") is None


def test_settings_of_deepspeed_lead_to_fields_that_there_are() -> None:
    known = {_pydantic.dotted(path) for path in _pydantic.all_paths()}
    assert set(DEEPSPEED.values()) <= known


def test_a_warning_is_printed_once_where_both_streams_are_one(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        SPEC.replace("python-stdlib", "/no/such/*.txt") + "hardware: {accelerator: rtx-4090, per_node: 1}\n"
    )
    command = [sys.executable, "-m", "partool", "plan", str(spec)]
    merged = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    assert merged.stdout.count("there are no files at") == 1
    apart = subprocess.run(command, capture_output=True, text=True, check=True)
    assert apart.stdout.count("there are no files at") == apart.stderr.count("there are no files at") == 1


def test_restarts_without_checkpoints_are_doubted() -> None:
    (finding,) = load_text(SPEC + "launch: {restarts: 2}\ncheckpoint: {every: 0}\n").diagnostics
    assert (finding.code, finding.severity) == ("PT227", "warning")
    assert "begins at step 0" in finding.message
    never = "checkpoint: {every: 0}\n"
    for fine in ("launch: {restarts: 2}\ncheckpoint: {every: 5}\n", "launch: {restarts: 2}\n", never):
        assert load_text(SPEC + fine).diagnostics == []


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("target: slurm", "requeues: 20, but no checkpoint"),
        ("target: slurm, requeues: 3", "requeues: 3, but no checkpoint"),
        ("target: slurm, requeues: 0", ""),
        ("target: k8s, image: 'a/b:1', k8s: {storage: 'pvc:runs'}", "a lost pod comes back without a limit"),
        ("target: torchrun, restarts: 1", ""),
        ("target: local", ""),
    ],
)
def test_requeues_without_checkpoints_are_doubted(launch: str, message: str) -> None:
    text = SPEC + f"launch: {{{launch}}}\n"
    assert load_text(text).diagnostics == []  # with auto, runs of more than an hour write checkpoints
    found = load_text(text + "checkpoint: {every: 0}\n").diagnostics
    assert [finding.code for finding in found] == ["PT227"] * bool(message)
    assert all(message in finding.message and "{every: auto}" in finding.help for finding in found)


def test_a_model_too_large_for_a_laptop_leads_to_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    from partool.catalog import devices, hardware
    from partool.catalog.machine import Machine

    for module in (devices, hardware):
        monkeypatch.setattr(module, "this_machine", lambda: Machine("cpu", 0, 4, 8 * 2**30))
    large = "model: llama3-70b\ndata: python-stdlib\n"
    (found,) = [each for each in findings_of(large) if each.code == "PT301"]
    assert "hardware: {accelerator: h100-sxm" in found.help
    (found,) = [each for each in findings_of(large + "hardware: {accelerator: cpu}\n") if each.code == "PT301"]
    assert "h100-sxm" not in found.help


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    try:
        write_or_exit("text", pipe)
        assert os.read(reader, 9) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
