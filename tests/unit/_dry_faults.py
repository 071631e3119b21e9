"""Faults planted into the code that is dry-run: ``python _dry_faults.py HOME NAME...`` prints what is found of each.

One process executes all of them. A fault of some ranks is planted while these ranks are executed; the others run the
code as it is. Standard output has one line of JSON per name, the list of findings.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

SPEC = """\
model: {hidden: 1024, layers: %d, heads: 8, kv_heads: 8, vocab: 4096, ffn_hidden: 2048}
hardware: {accelerator: h100-sxm, per_node: %d}
data: python-stdlib
training: {global_batch: %d, sequence_length: 2048, steps: 3}
parallel: {%s, compile: none, micro_batch: 1}
kernels: {mode: torch}
"""
SHARDS = "tensor: 1, sequence: 1, pipeline: 1, data: {zero: 3}"
STAGES = "tensor: {degree: 2, sequence_norms: false}, sequence: 1, pipeline: {stages: 2, schedule: 1f1b}"
BASES = {
    "shards": (3, 2, 4, f"{SHARDS}, recompute: none"),
    "recomputed": (6, 2, 2, f"{SHARDS}, recompute: full"),
    "stages": (2, 4, 2, STAGES),
    "four micro-batches": (2, 2, 8, f"{SHARDS}, recompute: none"),
}
"""Name → layers, devices, sequences of a step, section ``parallel``."""
EXECUTED = {"shards": 2, "recomputed": 1, "stages": 4, "four micro-batches": 1}
"""Number of ranks that are executed."""
Planting = Callable[[], AbstractContextManager[Any]]


class Fault(NamedTuple):
    """A fault of the code, and what must be found of it."""

    base: str
    plant: Planting
    code: str
    text: str
    """Part of the message: the exchange or the tensor."""
    place: str
    """Section of the spec."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that run the wrong code, of which one is named."""


def replaced(place: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Replace a function ``module:name`` of the runtime by what ``change`` makes of it."""
    from importlib import import_module

    module, _, names = place.partition(":")
    owner: Any = import_module(module)
    *path, name = names.split(".")
    for each in path:
        owner = getattr(owner, each)
    return patch.object(owner, name, change(getattr(owner, name)))


OPS = "partool_runtime.parallel.tensor.ops:"
WIRES = "partool_runtime.parallel.pipeline.wires:Wires."


def skips_the_norm() -> AbstractContextManager[Any]:
    return replaced("partool_runtime.optim.grad_norm:sum_over", lambda right: lambda tensor, group: tensor)


def skips_a_sum(seed: int) -> Planting:
    """Skip one of the sums of tensor ranks in the second step; six of them run in each step."""

    def change(right: Any) -> Any:
        calls, skipped = itertools.count(), random.Random(seed).sample(range(6, 12), 1)

        def wrong(x: Any, team: Any, **options: Any) -> Any:
            return x.clone() if next(calls) in skipped else right(x, team, **options)

        return wrong

    return lambda: replaced(OPS + "start_reduce_from_tp", change)


def skips_reductions() -> AbstractContextManager[Any]:
    def change(right: Any) -> Any:
        def wrong(self: Any, *, last: bool) -> None:
            right(self, last=last)
            self._modules[-1].set_requires_gradient_sync(False, recurse=False)

        return wrong

    return replaced("partool_runtime.parallel.grad_sync:GradSync.before_micro_batch", change)


def sends_half() -> AbstractContextManager[Any]:
    def change(right: Any) -> Any:
        return lambda self, x, *to: right(self, x[:, ::2].contiguous(), *to)

    return replaced(WIRES + "send", change)


def sends_wide() -> AbstractContextManager[Any]:
    return replaced(WIRES + "send", lambda right: lambda self, x, *to: right(self, x.float(), *to))


def sends_crosswise() -> AbstractContextManager[Any]:
    """Send to the other stage's other tensor rank."""

    def change(right: Any) -> Any:
        def wrong(rank: Any, lines: Any, *rest: Any, **options: Any) -> Any:
            ranks = tuple(each ^ 1 if place else each for place, each in enumerate(lines.ranks))
            return right(rank, dataclasses.replace(lines, ranks=ranks), *rest, **options)

        return wrong

    return replaced("partool_runtime.parallel.pipeline.passes:Wires", change)


def sends_late() -> AbstractContextManager[Any]:
    """Hold each message back until the next one is sent, and the last one until the end."""

    def change(right: Any) -> Any:
        def wrong(self: Any, *message: Any) -> None:
            held = vars(self).setdefault("held", [])
            held.append(message)
            if len(held) > 1:
                right(self, *held.pop(0))

        return wrong

    def end(right: Any) -> Any:
        def wrong(self: Any) -> None:
            for message in vars(self).pop("held", ()):
                send(self, *message)
            right(self)

        return wrong

    from partool_runtime.parallel.pipeline.wires import Wires

    send, stack = Wires.send, ExitStack()
    stack.enter_context(replaced(WIRES + "send", change))
    stack.enter_context(replaced(WIRES + "finish", end))
    return stack


def reduces_narrow() -> AbstractContextManager[Any]:
    """Sum gradients in the type of computation."""

    def change(right: Any) -> Any:
        return lambda precision, **options: right(precision, reduce_in_compute_dtype=True)

    return replaced("partool_runtime.parallel.zero:_policy", change)


def has_no_wires() -> AbstractContextManager[Any]:
    return _no_group("pipeline")


def has_no_team() -> AbstractContextManager[Any]:
    """Take the group of the world where that of the tensor ranks is asked for."""
    import torch.distributed as dist

    return _no_group("", lambda: dist.group.WORLD)


def _no_group(purpose: str, instead: Callable[[], Any] = lambda: None) -> AbstractContextManager[Any]:
    def change(right: Any) -> Any:
        def wrong(self: Any, parts: Any, asked: str = "", **options: Any) -> Any:
            found = right(self, parts, asked, **options)
            return instead() if asked.startswith(purpose) and found is not None and found.size() == 2 else found

        return wrong

    return replaced("partool_runtime.groups:Groups.of", change)


def rotates_on_the_host() -> AbstractContextManager[Any]:
    def change(right: Any) -> Any:
        return lambda *asked: tuple(table.cpu() for table in right(*asked))

    return replaced("partool_runtime.model.decoder:tables", change)


def sums_on_the_host() -> AbstractContextManager[Any]:
    return replaced(
        "partool_runtime.optim.grad_norm:sum_over", lambda right: lambda tensor, group: right(tensor.cpu(), group)
    )


def moments_on_the_host() -> AbstractContextManager[Any]:
    def change(right: Any) -> Any:
        def wrong(self: Any, *given: Any, **options: Any) -> None:
            right(self, *given, **options)
            for of in self._moments.values():
                for name, moment in of.items():
                    of[name] = moment.cpu()

        return wrong

    return replaced("partool_runtime.optim.device:DeviceOptimizer.__init__", change)


def keeps_parameters() -> AbstractContextManager[Any]:
    """Keep gathered parameters until the end of the step."""
    from torch.distributed.fsdp import FSDPModule

    def change(right: Any) -> Any:
        def wrong(self: Any, *, last: bool) -> None:
            right(self, last=last)
            for module in self._modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.set_reshard_after_backward(last, recurse=False)

        return wrong

    assert FSDPModule
    return replaced("partool_runtime.parallel.grad_sync:GradSync.before_micro_batch", change)


def keeps_gradients() -> AbstractContextManager[Any]:
    """Hold whole gradients for the next micro-batch, as ZeRO-1 does, instead of reducing those of each."""

    def change(right: Any) -> Any:
        def wrong(self: Any, *given: Any, **options: Any) -> None:
            right(self, *given, **options)
            self._reduce_each = False

        return wrong

    return replaced("partool_runtime.parallel.grad_sync:GradSync.__init__", change)


@contextmanager
def keeps_results(steps: int) -> Iterator[None]:
    """Keep the result of each layer, with the graph behind it, until ``steps`` more steps have begun."""
    kept: list[list[Any]] = [[]]

    def layer(right: Any) -> Any:
        def wrong(self: Any, *given: Any, **options: Any) -> Any:
            result = right(self, *given, **options)
            kept[-1].append(result.float())
            return result

        return wrong

    def step(right: Any) -> Any:
        def wrong(self: Any, *given: Any) -> Any:
            kept.append([])
            del kept[: -1 - steps]
            return right(self, *given)

        return wrong

    with (
        replaced("partool_runtime.model.decoder:Block.forward", layer),
        replaced("partool_runtime.parallel.passes:PlainPasses.step", step),
    ):
        yield


@contextmanager
def keeps_logits() -> Iterator[None]:
    """Keep one row of each micro-batch's logits until the next step: a view, which holds all of them."""
    kept: list[Any] = []

    def logits(right: Any) -> Any:
        def wrong(*given: Any, **options: Any) -> Any:
            result = right(*given, **options)
            kept.append(result[0].detach())
            return result

        return wrong

    def step(right: Any) -> Any:
        def wrong(self: Any, *given: Any) -> Any:
            kept.clear()
            return right(self, *given)

        return wrong

    with (
        replaced("partool_runtime.model.loss:_logits", logits),
        replaced("partool_runtime.parallel.passes:PlainPasses.step", step),
    ):
        yield


def recomputes_nothing() -> AbstractContextManager[Any]:
    return replaced("partool_runtime.parallel.recompute:_recomputed", lambda right: lambda forward, *_, **__: forward)


def recomputes_but_keeps() -> AbstractContextManager[Any]:
    """Keep the results of all matrix products, which ``full`` recomputes."""
    from partool_runtime.parallel import recompute

    return patch.dict(recompute._CONTEXTS, {"full": recompute._products_kept})


def has_two_masters() -> AbstractContextManager[Any]:
    """Keep a copy of all parameters with the moments."""

    def change(right: Any) -> Any:
        def wrong(self: Any, parameters: Any, *given: Any, **options: Any) -> None:
            right(self, parameters, *given, **options)
            self.copies = [each.detach().clone() for each in parameters.values()]

        return wrong

    return replaced("partool_runtime.optim.device:DeviceOptimizer.__init__", change)


def keeps_messages() -> AbstractContextManager[Any]:
    """Keep what is sent."""

    def change(right: Any) -> Any:
        def wrong(self: Any, x: Any, *to: Any) -> None:
            vars(self).setdefault("all_sent", []).append(x)
            right(self, x, *to)

        return wrong

    return replaced(WIRES + "send", change)


BOTH = (0, 1)
OFTEN: dict[str, Fault] = {
    "a rank skips the sum of norms": Fault("shards", skips_the_norm, "PT592", "skips all_reduce of 3", "parallel.data"),
    "a tensor rank skips a sum": Fault("stages", skips_a_sum(0), "PT592", "skips all_reduce", "parallel.tensor"),
    "crosswise sends": Fault("stages", sends_crosswise, "PT598", "is not part of group", "parallel.pipeline", BOTH),
    "sums in another type": Fault("shards", reduces_narrow, "PT593", "of bfloat16", "parallel.data"),
    "a sum on the host": Fault(
        "shards", sums_on_the_host, "PT598", "elements on cpu, in a group for cuda", "optimizer"
    ),
    "gradients stay": Fault("shards", keeps_gradients, "PT697", "(gradients", "parallel.data", BOTH),
    "results stay": Fault("shards", lambda: keeps_results(1), "PT696", "layers.*", "parallel.recompute"),
}
LONGER: dict[str, Fault] = {
    "a send of half a message": Fault("stages", sends_half, "PT595", "issues send of 1048576", "parallel.pipeline"),
    "late sends": Fault("stages", sends_late, "PT597", "receive of 2097152", "parallel.pipeline"),
    "no group of tensor ranks": Fault("stages", has_no_team, "PT592", "skips all_reduce", "parallel.tensor"),
    "a table on the host": Fault("shards", rotates_on_the_host, "PT598", "layers.0.attention", "model"),
    "gathered parameters stay": Fault("shards", keeps_parameters, "PT697", "of layers.*", "parallel.data", BOTH),
    "nothing is recomputed": Fault("recomputed", recomputes_nothing, "PT697", "layers.*.", "parallel.recompute"),
    **{
        f"a skipped sum, {n}": Fault("stages", skips_a_sum(n), "PT592", "skips", "parallel.tensor") for n in range(1, 6)
    },
    "a rank reduces nothing": Fault("shards", skips_reductions, "PT593", "issues reduce_scatter", "parallel.data"),
    "messages of another type": Fault("stages", sends_wide, "PT595", "of float32", "parallel.pipeline"),
    "no group of a pipeline": Fault("stages", has_no_wires, "PT598", "no wire goes", "parallel.pipeline"),
    "moments on the host": Fault("shards", moments_on_the_host, "PT598", "cpu", "optimizer"),
    "results stay for a step": Fault(
        "four micro-batches", lambda: keeps_results(0), "PT697", "layers.*", "parallel.recompute"
    ),
    "a view of the logits stays": Fault("four micro-batches", keeps_logits, "PT697", "of head", "kernels"),
    "products are kept": Fault("recomputed", recomputes_but_keeps, "PT697", "of layers.*", "parallel.recompute"),
    "a second master": Fault("shards", has_two_masters, "PT697", "(optimizer", "optimizer"),
    "sent messages stay": Fault("stages", keeps_messages, "PT696", "of layers.*", "parallel.recompute"),
}
FAULTS = OFTEN | LONGER


class _Worlds:
    """Plans, and the traces of their ranks without a fault."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, dict[int, Any]]] = {}

    def plain(self, base: str) -> tuple[Any, dict[int, Any]]:
        from planned import plan_of

        from partool_runtime.dry.rank import dry_rank

        if base not in self._found:
            plan = plan_of(SPEC % BASES[base])
            self._found[base] = plan, {rank: dry_rank(plan, rank) for rank in range(EXECUTED[base])}
        return self._found[base]

    def found(self, base: str, planted: Planting = nullcontext, ranks: Sequence[int] = ()) -> list[Any]:
        """Return the findings of a plan of which some ranks run other code."""
        from partool.verify.verification import findings
        from partool_runtime.dry.failure import failure
        from partool_runtime.dry.rank import dry_rank

        plan, plain = self.plain(base)
        traces = dict(plain)
        for rank in ranks:
            with planted():
                try:
                    traces[rank] = dry_rank(plan, rank)
                except Exception as error:
                    traceback.print_exc()
                    told = failure(rank, error)
                    return [(told["code"], told["message"], told["places"], [rank])]
        return [(each.code, each.message, each.places, each.ranks) for each in findings(plan, tuple(traces.values()))]


def _main(home: Path, names: Sequence[str]) -> None:
    from planned import plan_of

    from partool_runtime.dry import shim

    shim.load(home)
    from partool_runtime.dry.__main__ import _install

    _install(plan_of(SPEC % BASES["shards"]))
    worlds = _Worlds()
    for name in names:
        fault = FAULTS.get(name)
        found = worlds.found(fault.base, fault.plant, fault.ranks) if fault else worlds.found(name)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
