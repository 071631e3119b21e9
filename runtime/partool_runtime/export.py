"""``python -m partool_runtime.export`` writes a run's checkpoint as a Hugging Face folder; it uses no other ranks."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from pydantic import ValidationError

from partool.plan.outline import other_version
from partool.plan.run import PLAN_FILE
from partool.plan.terminal import say
from partool.plan.types import Generation, Plan
from partool.spec.model import ModelConfig
from partool.spec.training import Precision
from partool_runtime.checkpoint import CheckpointError
from partool_runtime.data import open_tokenizer
from partool_runtime.errors import EXIT_DONE, ConfigurationError, exit_code
from partool_runtime.hf import family_of, write_folder
from partool_runtime.hf.folder import write_model_folder
from partool_runtime.hf.peft import write_adapter
from partool_runtime.hf.writer import SHARD_BYTES, write_tensors
from partool_runtime.merge import merged_weights, trained_weights
from partool_runtime.tokens.exporting import write_tokenizer
from partool_runtime.weights import check_finite, whole_shapes
from partool_runtime.weights.chosen import ChosenWeights, WeightsChoice, choose

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # only products are in 8 bits
}


NEWEST = WeightsChoice()
"""The weights of the newest checkpoint."""


def export(
    run_dir: Path,
    out: Path,
    *,
    choice: WeightsChoice = NEWEST,
    dtype: Precision | None = None,
    force: bool = False,
    merge: bool = False,
) -> str:
    """Write a model of a run's checkpoints into ``out`` and return a short message for the user.

    ``choice`` says which, ``dtype`` None selects the run's precision. ``out`` is created atomically. Of a run with an
    adapter, the folder has the adapter in PEFT's format, or with ``merge`` the whole model with the adapter's sum.
    Raises ConfigurationError PT620, PT621, PT626 to PT628 (no usable checkpoint), PT624 (no Hugging Face model type
    fits, or nothing to merge), PT625 (``out`` is in use).
    """
    plan = _read_plan(run_dir)
    folder = Path(plan.checkpoint.dir) / run_dir.name if plan.checkpoint.dir else run_dir / "checkpoints"
    weights = choose(plan, folder, choice)
    model_type = _model_type(plan)
    _check_out(out, force)
    precision = dtype or plan.training.precision
    state = _state(plan, weights, DTYPES[precision], merge=merge)
    check_finite(state)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        if plan.adapter is not None and not merge:
            base, transformers = plan.weights.path or "", plan.hf is not None
            write_adapter(state, plan.model, temporary, base=base, transformers=transformers)
        elif plan.hf is not None:
            write_model_folder(state, plan.hf, temporary)
        elif plan.module is not None:
            write_tensors(state, temporary, SHARD_BYTES)
        else:
            write_folder(state, _plain(plan), temporary, generation=plan.generation or _of_tokenizer(plan))
        tokenizer = write_tokenizer(plan.data, temporary)
        stops = _stop_at_turn_end(plan, temporary)
        _give_usual_modes(temporary)
        _move(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    elements = sum(tensor.numel() for tensor in state.values())
    what = "trained parameters beside the base model" if plan.adapter is not None and not merge else "parameters"
    written = f"wrote {weights.title} to {out}: {model_type}, {elements:,} {what} in {precision}"
    return f"{written}{_left_out(plan)}\n{tokenizer}{stops}"


def _left_out(plan: Plan) -> str:
    """Return a sentence about modules of further tokens that folders of the model type do not have; empty without."""
    if not plan.own_decoder or not plan.model.predictions or family_of(_plain(plan)).predicts:
        return ""
    return "\nmodules of further tokens are left out: folders of this model type have none"


def _state(plan: Plan, weights: ChosenWeights, dtype: torch.dtype, *, merge: bool) -> dict[str, torch.Tensor]:
    """Return what is written, by partool's names."""
    if plan.adapter is not None:
        return (merged_weights if merge else trained_weights)(plan, weights, dtype)
    if merge:
        raise ConfigurationError("PT624", "--merge: the run has no adapter", "Export it without --merge.")
    # A model that other code builds has the names of the checkpoint, so its shapes are not checked.
    return weights.load(dtype, whole_shapes(plan.model) if plan.own_decoder else None)


def _plain(plan: Plan) -> ModelConfig:
    """Return the plan's model without an adapter."""
    return plan.model.model_copy(update={"adapter": None})


def _model_type(plan: Plan) -> str:
    """Return the Hugging Face model type of a plan's model, or the class of the user's module."""
    if plan.module is not None:
        return plan.module.module
    return plan.hf.model_type if plan.hf is not None else family_of(_plain(plan)).model_type


def _of_tokenizer(plan: Plan) -> Generation | None:
    """Return the tokenizer's separator, which is the token that ends a generated text; None if it is not known."""
    data = plan.data
    parts = [part.source for part in data.parts]
    sources = [name for part in parts for name in ([part] if isinstance(part, str) else part)]
    if data.format in ("tokens", "megatron") or all(source.endswith(".bin") for source in sources):
        return None  # the tokenizer is unknown
    try:
        end = open_tokenizer(data.tokenizer, data.special_tokens).separator
    except ConfigurationError:
        return None  # the folder is not on this machine; the report says so
    return None if end is None or end >= plan.model.vocab else Generation(token_ids={"eos_token_id": end})


def _stop_at_turn_end(plan: Plan, folder: Path) -> str:
    """Add the token that ends an answer to those at which generation stops, and return a sentence about it.

    A model tuned on conversations ends its turn with this token, which the base model's settings may not name.
    """
    if plan.data.records != "chat" or not (folder / "config.json").is_file():  # an adapter's folder has no model
        return ""
    from partool_runtime.chat import Encoder  # jinja2 is not needed for texts

    try:
        end = Encoder.of_data(plan.data).turn_end()
    except ConfigurationError as error:
        return f"\nthe token that ends an answer is unknown: {error.message}"
    if end is None:
        return "\nno special token ends an answer: set eos_token_id in generation_config.json yourself"
    path = folder / "generation_config.json"
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    stops = settings.get("eos_token_id", json.loads((folder / "config.json").read_bytes()).get("eos_token_id"))
    ends = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    if end not in ends:
        settings["eos_token_id"] = [*ends, end] if ends else end
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return f"\ngeneration stops at token {end}, which ends an answer"


def _read_plan(run_dir: Path) -> Plan:
    file = run_dir / PLAN_FILE
    try:
        return Plan.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError("PT620", f"{run_dir} is no run: {error}") from error
    except ValidationError as error:
        if refusal := other_version(file):
            raise ConfigurationError("PT620", *refusal) from None
        raise ConfigurationError("PT620", f"{file} is no plan of this version: {error}") from error


def _check_out(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigurationError("PT625", f"{out} is a file", "Choose another --out.")
    if not any(out.iterdir()):
        return
    if not force:
        raise ConfigurationError("PT625", f"{out} is not empty", "Choose another --out, or replace it with --force.")
    if not any((out / name).exists() for name in ("config.json", "adapter_config.json")):
        message = f"{out} holds something other than an exported model, and is not replaced"
        raise ConfigurationError("PT625", message, "Choose another --out.")


def _give_usual_modes(folder: Path) -> None:
    """Set the usual permissions; new temporary folders and safetensors files are accessible only to their owner."""
    mask = os.umask(0o077)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _move(temporary: Path, out: Path) -> None:
    """Move a finished folder to its final path; a folder that exists there is removed only afterwards."""
    if not out.exists():
        temporary.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    out.rename(old)  # ``old`` is an empty folder, which a rename replaces
    try:
        temporary.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (0, 78 for an error that no retry fixes, 1 otherwise)."""
    parser = argparse.ArgumentParser(prog="python -m partool_runtime.export", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--average", type=int, default=1)
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--format", choices=["hf"], default="hf")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--merge", action="store_true")
    options = parser.parse_args(arguments)
    try:
        report = export(
            options.run_dir.absolute(),
            options.out.absolute(),
            choice=WeightsChoice(options.step, options.best, options.average, options.ema),
            dtype=options.dtype,
            force=options.force,
            merge=options.merge,
        )
    except ConfigurationError as error:
        say(f"error[{error.code}]: {error.message}" + f"\n  help: {error.help}" * bool(error.help), err=True)
        return exit_code(error)
    except (CheckpointError, OSError) as error:
        say(f"error: {error}", err=True)
        return exit_code(error)
    say(str(report))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
