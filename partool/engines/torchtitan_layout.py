"""The layout in torchtitan's settings: degrees, stages, recomputation and offload.

``torchtitan/distributed`` of https://github.com/pytorch/torchtitan (0.0 to 2026): ``parallel_dims.py``,
``pipeline_parallel.py`` and ``activation_checkpoint.py``.
"""

from __future__ import annotations

import re

from partool.engines.sections import DataDict, OffloadDict, ParallelDict, PipelineDict, SequenceDict, TensorDict
from partool.engines.settings import Sheet
from partool.engines.torchtitan import listed

_IN = "parallelism."
_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "interleaved_1f1b": "interleaved",
    "zbvzerobubble": "zb-v",
}  # fmt: skip


def parallel_of(
    sheet: Sheet, world: int | None, era: int, layers: int, *, experts: bool, compiled: bool
) -> tuple[ParallelDict, int | None]:
    """Return the section ``parallel`` and the number of data-parallel ranks, if it is known."""
    tensor = sheet.integer(_IN + "tensor_parallel_degree", 1, to="parallel.tensor.degree")
    stages = sheet.integer(_IN + "pipeline_parallel_degree", 1, to="parallel.pipeline.stages")
    context = sheet.integer(_IN + "context_parallel_degree", 1, to="parallel.sequence.degree")
    data, ranks = _data(sheet, world, tensor * stages, context, stages)
    parallel: ParallelDict = {
        "data": data,
        "tensor": _tensor(sheet, tensor, compiled=compiled),
        "pipeline": _pipeline(sheet, stages, era, layers),
        "sequence": _sequence(sheet, context),
        "tiles": {"mlp": 0, "loss": 0},
        "compile": "block" if compiled else "none",
        "recompute": _recompute(sheet, layers, era),
        "offload": _offload(sheet),
    }
    parallel["micro_batch"] = _micro_batch(sheet, parallel["pipeline"], era)
    exchange = str(sheet.get(_IN + "expert_parallel_comm_backend", "standard", to="nothing: all-to-all is priced"))
    if exchange != "standard":
        sheet.say(
            "PT824", "note", f"tokens are exchanged by {exchange}, and priced as by all-to-all", "standard",
            _IN + "expert_parallel_comm_backend",
        )  # fmt: skip
    degree = sheet.integer(_IN + "expert_parallel_degree", 1, to="parallel.expert")
    inner = sheet.integer(_IN + "expert_tensor_parallel_degree", 1, to="parallel.expert_tensor")
    if experts:
        parallel["expert"] = degree
        if degree > 1:
            parallel["expert_tensor"] = inner
    return parallel, ranks


def _data(sheet: Sheet, world: int | None, others: int, context: int, stages: int) -> tuple[DataDict, int | None]:
    """Return the section ``data`` and the number of data-parallel ranks; a shard degree of -1 takes what is left."""
    copies = sheet.integer(_IN + "data_parallel_replicate_degree", 1, to="parallel.data.shard")
    shard = sheet.integer(_IN + "data_parallel_shard_degree", -1, to="parallel.data.shard", off=(-1,))
    inner = others * context * copies
    ranks = None if shard < 0 and world is None else copies * (shard if shard >= 0 else (world or 0) // inner)
    if world is not None and (world % inner if shard < 0 else shard * inner != world):
        given = inner * max(1, shard)
        sheet.say(
            "PT821", "error", f"data {copies} · {shard if shard >= 0 else 'the rest'}, context {context}, tensor and "
            f"pipeline {others} need {'a multiple of ' * (shard < 0)}{given} ranks, and there are {world}",
            "degrees whose product is the number of ranks, or other --nodes and --per-node", *_degree_names(sheet),
        )  # fmt: skip
        ranks = max(1, ranks or 1)
    shards = shard if shard >= 0 else (ranks // copies if ranks is not None else None)
    policy = str(sheet.get(_IN + "fsdp_reshard_after_forward", "default", to="parallel.data.zero"))
    if policy == "always" and stages > 1:
        sheet.say(
            "PT824", "note", "parameters are gathered for each micro-batch, and priced as gathered once per step",
            "default, which does that in pipelines", _IN + "fsdp_reshard_after_forward",
        )  # fmt: skip
    if str(sheet.get("training.data_parallel_type", "fsdp", to="parallel.data.zero")) == "ddp":
        return {"zero": 0}, ranks
    if shards is not None and shards * context == 1:
        return {"zero": 0}, ranks
    data: DataDict = {"zero": 2 if policy == "never" else 3}
    if shards is not None:
        data["shard"] = shards
    return data, ranks


def _degree_names(sheet: Sheet) -> list[str]:
    """Return the names of the degrees, those first that are more than one."""
    kinds = (
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "data_parallel_shard",
        "data_parallel_replicate",
    )
    names = [f"{_IN}{kind}_degree" for kind in kinds]
    return sorted(names, key=lambda name: name not in sheet.settings or str(sheet.settings[name].value) in ("1", "-1"))


def _tensor(sheet: Sheet, degree: int, *, compiled: bool) -> TensorDict:
    fused = sheet.flag(_IN + "enable_async_tensor_parallel", to="parallel.tensor.overlap")
    norms = sheet.flag(_IN + "enable_sequence_parallel", True, to="parallel.tensor.sequence_norms")
    full_loss = sheet.flag(_IN + "disable_loss_parallel", to="nothing: the loss is shared by tensor ranks")
    full_loss = full_loss or not sheet.flag("training.enable_loss_parallel", True, to="nothing: the loss is shared")
    if degree <= 1:
        return {"degree": degree}
    if fused and not compiled:
        sheet.say(
            "PT821", "error", "asynchronous tensor parallelism needs a compiled model", "compile.enable = true",
            _IN + "enable_async_tensor_parallel",
        )  # fmt: skip
    if full_loss:
        sheet.say(
            "PT824", "note", "each tensor rank computes the whole loss, and is priced with its share of it",
            "remove disable_loss_parallel", _IN + "disable_loss_parallel", "training.enable_loss_parallel",
        )  # fmt: skip
    overlap = "symmetric" if fused else "none"
    return {"degree": degree, "shape": [degree, 1], "sequence_norms": norms, "overlap": overlap}


def _sequence(sheet: Sheet, degree: int) -> SequenceDict:
    how = str(sheet.get(_IN + "context_parallel_rotate_method", "allgather", to="parallel.sequence.method"))
    balance = sheet.get(_IN + "context_parallel_load_balancer", "headtail", to="parallel.sequence.order")
    if degree <= 1:
        return {"degree": 1}
    if how not in ("allgather", "alltoall"):
        name = _IN + "context_parallel_rotate_method"
        sheet.say("PT823", "error", f"{how} has no counterpart here", "allgather or alltoall", name)
    order = "zigzag" if balance not in (None, "None", "none", "") else "contiguous"
    return {"degree": degree, "method": "ring" if how == "alltoall" else "all_gather", "order": order}


def _pipeline(sheet: Sheet, stages: int, era: int, layers: int) -> PipelineDict:
    word = str(sheet.get(_IN + "pipeline_parallel_schedule", "1F1B", to="parallel.pipeline.schedule"))
    file = sheet.get(_IN + "pipeline_parallel_schedule_csv", "", to="parallel.pipeline.schedule")
    chunks, split = _split(sheet, stages, era, layers, several=word.lower() not in ("1f1b", "gpipe"))
    if stages <= 1:
        return {"stages": 1}
    name = _SCHEDULES.get(word.lower())
    if name is None or file:
        what = "a schedule in a file" if file else f"the schedule {word}"
        help = "1F1B, GPipe, Interleaved1F1B or ZBVZeroBubble"
        key = "pipeline_parallel_schedule" + "_csv" * bool(file)
        sheet.say("PT823", "error", f"{what} has no counterpart here", help, _IN + key)
    pipeline: PipelineDict = {"stages": stages, "schedule": name or "1f1b"}
    if name == "interleaved":
        pipeline["chunks"] = chunks
    if split and min(split) < 1:
        sheet.say(
            "PT823", "error", f"a stage would have no layer: {split}", "fewer stages, or smaller "
            "pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers",
            _IN + "pipeline_parallel_degree",
        )  # fmt: skip
    elif split:
        pipeline["layers"] = split
    return pipeline


def _split(sheet: Sheet, stages: int, era: int, layers: int, *, several: bool) -> tuple[int, list[int]]:
    """Return the chunks of each rank and the layers of each chunk, in the model's order; no layers if not known."""
    path = "parallel.pipeline.layers"
    points = listed(sheet.get(_IN + "pipeline_parallel_split_points", [], to=path))
    parts = sheet.get(_IN + "module_fqns_per_model_part", to=path)
    each = sheet.integer(_IN + "pipeline_parallel_layers_per_stage", 0, to="parallel.pipeline.chunks")
    first, last = (
        sheet.integer(f"{_IN}pipeline_parallel_{end}_stage_less_layers", 1 if era >= 3 else 0, to=path, least=0)
        for end in ("first", "last")
    )
    if isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts):
        counts = [sum(str(name).startswith("layers.") for name in part) for part in parts]
        return max(1, len(parts) // stages), counts
    starts = [int(match[1]) for point in points if (match := re.fullmatch(r"layers\.([0-9]{1,6})", point))]
    if starts:
        counts = [stop - start for start, stop in zip([0, *starts], [*starts, layers], strict=True)]
        return max(1, len(counts) // stages), counts if layers else []
    chunks = 2 if several else 1
    if each and layers:
        chunks = max(1, -(-(layers + first + last) // each) // stages)
    enough = stages > 1 and stages * chunks <= layers + first + last
    return chunks, spread(layers, stages * chunks, first, last, era) if layers and enough else []


def spread(layers: int, stages: int, first: int, last: int, era: int) -> list[int]:
    """Return the layers of each stage.

    Since 0.2 embedding and head count as ``first`` and ``last`` layers, and the first stages take what is left over;
    before, stages from the second on did, and neither embedding nor head counted.
    """
    size, rest = divmod(layers + first + last, stages)
    if era < 3:
        return [size + (1 <= place <= rest) for place in range(stages)]
    counts = [size + (place < rest) for place in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def _micro_batch(sheet: Sheet, pipeline: PipelineDict, era: int) -> int:
    """Return the sequences of a forward pass: the local batch, or in a pipeline a part of it."""
    local: int = sheet.integer("training.local_batch_size", 8, to="parallel.micro_batch")
    size: int = sheet.integer(_IN + "pipeline_parallel_microbatch_size", 1, to="parallel.micro_batch")
    parts: int = sheet.integer(_IN + "pipeline_parallel_microbatches", 0, to="parallel.micro_batch")
    if pipeline["stages"] <= 1:
        return local
    if parts or era == 1:
        number = parts or pipeline["stages"] * pipeline.get("chunks", 1)
        size, rest = divmod(local, number)
        what, name = f"{number} micro-batches", _IN + "pipeline_parallel_microbatches"
    else:
        rest, what, name = local % size, f"micro-batches of {size}", _IN + "pipeline_parallel_microbatch_size"
    if rest or not size:
        sheet.say(
            "PT821", "error", f"a local batch of {local} does not divide into {what}", "a local batch that does",
            name, "training.local_batch_size",
        )  # fmt: skip
    return max(1, size)


def _recompute(sheet: Sheet, layers: int, era: int) -> str | list[str]:
    """Return the policy of all layers, or of each where every n-th layer is recomputed."""
    path = "parallel.recompute"
    mode = str(sheet.get("activation_checkpoint.mode", "selective", to=path) or "none")
    option = str(sheet.get("activation_checkpoint.selective_ac_option", "op" if era == 4 else "2", to=path))
    if "activation_checkpoint" in sheet.settings and sheet.get("activation_checkpoint", to=path) is None:
        return "none"
    sheet.get("activation_checkpoint.memory_budget", to="parallel.recompute")
    if mode in ("none", "full"):
        return mode
    if mode != "selective":
        sheet.say(
            "PT823", "error", f"recomputation by {mode} has no counterpart here", "selective, full or none",
            "activation_checkpoint.mode",
        )  # fmt: skip
        return "none"
    if option == "op":
        return "selective"
    if not option.isdecimal() or len(option) > 9:
        sheet.say(
            "PT820", "error", f"selective_ac_option is {option!r}", "op, or a number",
            "activation_checkpoint.selective_ac_option",
        )  # fmt: skip
        return "none"
    step = int(option)
    if step <= 1:
        return "full"
    return ["none" if (place + 1) % step else "full" for place in range(layers)] if layers else "selective"


def _offload(sheet: Sheet) -> OffloadDict:
    place = "cpu" if sheet.flag("training.enable_cpu_offload", to="parallel.offload") else "none"
    return {"optimizer": place, "parameters": place, "activations": "none"}
