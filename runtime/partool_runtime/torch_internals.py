"""The one place that touches private names of torch, each with the reason and the public way that is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

# Documented (docs.pytorch.org, torch.compiler_fake_tensor), under a private name still.
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: PLC0414
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Documented for extension authors, under a private name still.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414

StorageInfo = filesystem._StorageInfo
"""Where a block of a checkpoint lies: file, offset and length."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor without copying, and the tensor itself where it is not a DTensor.

    ``DTensor.to_local`` builds an autograd node per call, which costs as much as the optimizer on small models.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts of tensors."""
    return sum(part.numel() * part.itemsize for part in map(local, tensors))


def placed_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which this rank has ``part``, placed as a parameter is; of another type or on another device.

    ``DTensor.from_local`` moves the part to the mesh's device.
    """
    if not isinstance(parameter, DTensor):
        return part
    spec = parameter._spec
    shape = TensorMeta(spec.shape, spec.stride, part.dtype)
    placed = DTensorSpec(spec.mesh, spec.placements, tensor_meta=shape)
    return cast(torch.Tensor, DTensor(part, placed, requires_grad=False))  # type: ignore[no-untyped-call]


def wide_gradients(model: nn.Module, dtype: torch.dtype) -> None:
    """Let FSDP2 leave reduced gradients in ``dtype``, for parameters that are sharded in a narrower type.

    It casts them to the parameters' own type; the widest sum is lost then. Called behind its lazy initialisation, that
    is in the first forward pass, or before: the groups are told when they are set up.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                _leave_wide(group, dtype)


def _leave_wide(group: Any, dtype: torch.dtype) -> None:
    set_up = group._init_mp_dtypes

    def then() -> None:
        set_up()
        group._orig_dtype = dtype

    group._init_mp_dtypes = then


def _groups(state: Any) -> list[Any]:
    one = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
    return list(getattr(state, "_fsdp_param_groups", [] if one is None else [one]))


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that FSDP2 holds gathered now; it offers no public look at them."""
    outputs = [tensor for parameter in _fsdp_parameters(model) for tensor in parameter.all_gather_outputs]
    return sum(tensor.untyped_storage().size() for tensor in outputs)


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients this rank holds now: its shards, and whole ones that wait for their reduction."""
    held = [parameter.grad for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]
    whole = []
    for parameter in _fsdp_parameters(model):
        whole += [
            parameter.unsharded_accumulated_grad,
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        ]
    return local_bytes(held) + local_bytes(tensor for tensor in whole if tensor is not None)


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    # Modules that are gathered together share one state.
    states = {id(s): s for m in model.modules() if isinstance(m, FSDPModule) for s in [m._get_fsdp_state()]}
    found = []
    for state in states.values():
        found += [parameter for group in _groups(state) for parameter in group.fsdp_params]
    return found


def keep_gradients(root: FSDPModule) -> None:
    """Add gradients that came by other means than a backward pass to what waits for its reduction, in that one's type.

    FSDP2 does so where a backward pass ends, and not otherwise: sums would be of the narrow type of computation.
    """
    for parameter in _fsdp_parameters(cast(nn.Module, root)):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def end_backward(root: FSDPModule, *, fill: bool) -> None:
    """Do what FSDP2 does where a backward pass through ``root`` ends: reduce gradients, release parameters, as set.

    It hangs that onto autograd only. With ``fill``, parameters that have no gradient this time take part with zeros:
    FSDP2 adds partial sums over replicas up as one flat tensor, which must not change its shape.
    """
    for parameter in _fsdp_parameters(cast(nn.Module, root)) if fill else ():
        whole = parameter.unsharded_param
        if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
            parameter.to_accumulated_grad_if_needed()
    root._get_fsdp_state()._root_post_backward_final_callback()


def gather_in_background(root: FSDPModule) -> None:
    """Let the units under ``root`` start their gathers without waiting for them, where they are asked for ahead.

    Only :meth:`FSDPModule.unshard` has a public switch, not the gathers ahead that ``set_modules_to_…_prefetch`` asks
    for. On a GPU those are on a stream of their own anyway.
    """
    root._set_unshard_async_op(True)


def sum_replicas_by(module: FSDPModule, add_up: Callable[[torch.Tensor], None]) -> None:
    """Let ``add_up`` sum a unit's gradients over the replicas, in place of FSDP2's all-reduce, which returns when done.

    ``add_up`` gets this rank's gradients as one flat tensor. The public hook is called behind FSDP2's own all-reduce
    and not in its place; the mesh of the unit's group is what decides whether there is one.
    """
    for group in _own_groups(module):
        mesh = group.mesh_info
        group.mesh_info = FSDPMeshInfo(mesh=mesh.mesh, shard_mesh_dim=mesh.shard_mesh_dim)
    module.set_all_reduce_hook(add_up)


def process_group(handle: Any) -> torch.distributed.ProcessGroup:
    """Return the process group that an operator was given: a boxed script object, or functional collectives' name."""
    if isinstance(handle, str):
        return distributed_c10d._resolve_process_group(handle)  # type: ignore[attr-defined,arg-type]
    if isinstance(handle, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(handle)
    return cast(torch.distributed.ProcessGroup, handle)


def run_watched(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a custom operator's own code so that dispatch modes see what it calls.

    To a mode it is one operator, whose code runs with the mode set aside; no public way leads around that.
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    key = torch._C.DispatchKey.CUDA if any(a.is_cuda for a in tensors) else torch._C.DispatchKey.CPU
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def start_sum(x: torch.Tensor, group_name: str, *, in_place: bool, kind: str = "sum") -> torch.Tensor:
    """Begin to sum a tensor (or ``kind="max"``) over a group's ranks; the result is there after :func:`finished`.

    The functional collectives are documented under a private name, and are the only ones that ``torch.compile`` and
    selective recomputation see as operators. The result must be taken from here also where it is in place: a
    recomputation hands out the saved one.
    """
    collectives = torch.ops._c10d_functional
    if in_place and not torch.compiler.is_compiling():
        return cast(torch.Tensor, collectives.all_reduce_(x, kind, group_name))
    return cast(torch.Tensor, collectives.all_reduce(x, kind, group_name))


def start_gather(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Begin to gather the ranks' tensors, one after the other along dimension 0; see :func:`finished`."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, group_name)
    return cast(torch.Tensor, gathered)


def start_scatter_sum(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Begin to sum a tensor over ranks, of which each gets an equal part of dimension 0; see :func:`finished`."""
    scattered = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group_name)
    return cast(torch.Tensor, scattered)


def start_exchange(x: torch.Tensor, sent: list[int], received: list[int], group_name: str) -> torch.Tensor:
    """Begin to send stretches of dimension 0, ``sent`` rows to each rank in order; see :func:`finished`.

    The result holds ``received`` rows of each rank, one after the other.
    """
    exchanged = torch.ops._c10d_functional.all_to_all_single(x, received, sent, group_name)
    return cast(torch.Tensor, exchanged)


def finished(x: torch.Tensor, term: str = "tensor_parallel") -> torch.Tensor:
    """Wait for what a ``start_…`` function has returned (on a GPU, let the current stream wait), and return it.

    ``term`` is the one of :data:`partool.plan.terms.TIME_TERMS` that the time belongs to.
    """
    if torch.compiler.is_compiling() or _Waits.around is None:
        return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(x))
    with _Waits.around(term):
        return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(x))


def waiting(term: str) -> AbstractContextManager[None]:
    """Return what is entered around a wait of another kind, whose time belongs to ``term``; not in compiled code."""
    return nullcontext() if _Waits.around is None else _Waits.around(term)


class _Waits:
    around: Callable[[str], AbstractContextManager[None]] | None = None


def watch_waits(around: Callable[[str], AbstractContextManager[None]] | None) -> None:
    """Enter what ``around`` returns for a term at every :func:`finished` and :func:`waiting`; None ends it.

    Compiled code is not watched.
    """
    _Waits.around = around


def has_symmetric_products() -> bool:
    """Tell whether this torch has products fused with exchanges; they lie in no public module."""
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    return hasattr(torch.ops, "symm_mem") and all(hasattr(torch.ops.symm_mem, name) for name in names)


def gathered_products(
    x: torch.Tensor, factors: list[torch.Tensor], dim: int, group_name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the ranks' tensors gathered along ``dim``, and its products with each factor, computed as parts arrive."""
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, factors, dim, group_name, return_A=True)
    return whole, products


def scattered_product(x: torch.Tensor, factor: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum over ranks of ``x @ factor``, parts of which leave when done."""
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, factor, "sum", dim, group_name)
    return cast(torch.Tensor, fused)


def summing_operators() -> frozenset[Any]:
    """Return the collectives of passes whose results are worth keeping."""
    collectives = torch.ops._c10d_functional
    return frozenset(
        {
            collectives.all_reduce.default,
            collectives.all_reduce_.default,
            collectives.all_gather_into_tensor.default,
            collectives.reduce_scatter_tensor.default,
            collectives.all_to_all_single.default,
        }
    )


def exchanging_operators() -> frozenset[Any]:
    """Return the collectives that trade one axis of a tensor for another between ranks that share sequences."""
    return frozenset({torch.ops._c10d_functional.all_to_all_single.default})


def in_memory_store() -> Any:
    """Return a rendezvous store for a world of one rank: no port, no file. It is exported, but not typed so."""
    return torch.distributed.HashStore()  # type: ignore[attr-defined]


def fused_adamw(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    step: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """Update parameters and moments in place, in one fused kernel per device and type.

    ``torch.optim.AdamW`` keeps one step counter per parameter and looks up its state for each; here ``step`` is one
    float32 scalar, the same for all, already counted up.
    """
    torch._fused_adamw_(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def scaled_product(m: int, n: int, k: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return an fp8 product [m, k] × [k, n] with one scale per tensor, ready to be repeated.

    ``torch.nn.functional.scaled_mm`` is younger than the oldest torch that is supported.
    """
    a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and handles hold a storage, in Python, in C++ and in autograd graphs."""
    return int(torch._C._storage_Use_Count(storage._cdata))


class GroupGather:
    """Gathers one FSDP2 unit's parameters otherwise than FSDP2 does; it takes the place of the unit's own gathers.

    FSDP2 gathers a unit as one message and then copies every parameter out of it: both exist at once. With ``apart``
    every parameter comes as a message of its own, straight into the storage that FSDP2 computes with: shards are rows,
    padded behind the last ones, and lie there in the order of the ranks, in which an all-gather delivers them.
    Parameters of at most ``most_kept`` elements keep their storage once they were gathered; :meth:`expire` lets them be
    gathered again. With ``in_turn`` a message starts when the one before has come: some backends copy what is on its
    way.

    There is no public way: ``set_custom_all_gather`` replaces the collective, not the copies around it.
    """

    def __init__(self, group: Any, *, apart: bool, in_turn: bool, most_kept: int) -> None:
        self._group, self._apart, self._in_turn = group, apart, in_turn
        self._all = group.fsdp_params
        self.kept = [p for p in self._all if 0 < p._orig_size.numel() <= most_kept]
        """Parameters that stay gathered."""
        kept = {id(parameter) for parameter in self.kept}
        self._others = [p for p in self._all if id(p) not in kept]
        self._missing: list[Any] = []
        self._fresh = False
        self._gather, self._wait = group.unshard, group.wait_for_unshard
        group.unshard, group.wait_for_unshard = self._unshard, self._wait_for_unshard
        for parameter in self.kept:
            parameter.free_unsharded_param = lambda: None

    @property
    def ranks(self) -> Any:
        """The process group that shares the unit's parameters."""
        return self._group._all_gather_process_group

    def expire(self) -> None:
        """Declare what was kept outdated: the next gather brings it again."""
        self._fresh = False

    def refresh(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, of each kept parameter, what this rank sends and where that of all ranks goes, one after the other.

        The caller exchanges them before the next gather. Nothing is returned before the first gather, which brings all.
        """
        if not all(parameter.all_gather_outputs for parameter in self.kept):
            return []
        self._fresh = True
        pairs = [(p, p._sharded_param_data, p.all_gather_outputs[0]) for p in self.kept]
        # Shards may be in host memory.
        return [(shard.to(whole.device, p.param_dtype or shard.dtype), whole) for p, shard, whole in pairs]

    @torch.no_grad()
    def _unshard(self, async_op: bool = False) -> None:
        group = self._group
        busy = group._all_gather_result is not None or group.is_unsharded
        if busy or (not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"):
            return
        self._missing = self._others if self._fresh else self._all
        if self._missing and not self._apart:
            with self._only(self._missing):
                self._gather(async_op)
        else:
            works = _Works()
            for parameter in self._missing:
                self._start(parameter, works)
            group._all_gather_result = _OnTheWay(works)

    def _start(self, parameter: Any, works: _Works) -> None:
        (shard,) = parameter.all_gather_inputs
        parameter.init_all_gather_outputs([shard.numel()], [shard.dtype], self.ranks.size(), shard.device)
        parameter.alloc_all_gather_outputs()
        if shard.numel() > 0:
            works.start(shard, parameter.all_gather_outputs[0], self.ranks)
        if self._in_turn:
            works.wait()

    @torch.no_grad()
    def _wait_for_unshard(self) -> None:
        group = self._group
        if group._all_gather_result is None:
            return
        if isinstance(group._all_gather_result, _OnTheWay):
            group._all_gather_result.all_gather_work.wait()
            group._all_gather_result = None
            for parameter in self._all:
                parameter.init_unsharded_param()
            group._to_unsharded()
        else:
            with self._only(self._missing):
                self._wait()
            for parameter in self.kept if self._missing is self._others else ():
                parameter.init_unsharded_param()
                parameter.to_unsharded()
        self._fresh = True

    @contextmanager
    def _only(self, parameters: list[Any]) -> Iterator[None]:
        """Let FSDP2 see some of the unit's parameters."""
        self._group.fsdp_params = parameters
        try:
            yield
        finally:
            self._group.fsdp_params = self._all


class UnitShards:
    """The shards of one FSDP2 unit, which are in other memory than that of its device between gathers.

    FSDP2 can keep shards in host memory (``CPUOffloadPolicy``), but reduced gradients go there, too: each waits for its
    copy where hooks are to see them. Here shards alone do: their parameters stay tensors of the device to all that
    looks at them, so that gradients do, and ``bring`` is asked for what is gathered. No views are taken of such a
    parameter, ``detach()`` included, but of its :func:`local` part.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._parameters = group.fsdp_params
        self._homes: list[torch.Tensor] = []
        self._gather, self._wait = group.unshard, group.wait_for_unshard
        self._bring: Callable[[], list[torch.Tensor]] = list
        self._ready: Callable[[], None] = _nothing
        self._done: Callable[[], None] = _nothing

    @property
    def sizes(self) -> list[tuple[int, torch.dtype]]:
        """Elements of this rank's shards, padded as they travel, and their types."""
        return [(p.padded_sharded_param_size.numel(), p.sharded_param.dtype) for p in self._parameters]

    @property
    def waits(self) -> bool:
        """Whether a gather was begun and nobody has waited for it."""
        return self._group._all_gather_result is not None

    def move(self, homes: list[torch.Tensor]) -> None:
        """Let shards be in this memory from now on: flat, of :attr:`sizes`, and filled with what they were."""
        self._homes = homes
        for parameter, home in zip(self._parameters, homes, strict=True):
            old = parameter.sharded_param
            data = parameter._sharded_param_data
            if not data.is_meta:
                home.copy_(data)
            shard = home.view(parameter.padded_sharded_param_size)
            dim = parameter.fsdp_placement.dim
            part = shard.narrow(dim, 0, parameter.sharded_size[dim] if parameter.sharded_size.numel() else 0)
            like = torch.empty(0, dtype=part.dtype, device=self._device)
            shell = DTensor(like, parameter._sharding_spec, requires_grad=False)  # type: ignore[no-untyped-call]
            moved = nn.Parameter(shell, requires_grad=old.requires_grad)
            cast(Any, moved)._local_tensor = part
            parameter.sharded_param, parameter._sharded_param_data = moved, home
            parameter._setattr_on_modules(moved)

    def watch(
        self, bring: Callable[[], list[torch.Tensor]], ready: Callable[[], None], done: Callable[[], None]
    ) -> None:
        """Gather from what ``bring`` returns, behind ``ready``, which is for the current stream; then call ``done``."""
        self._bring, self._ready, self._done = bring, ready, done
        self._group.unshard, self._group.wait_for_unshard = self._unshard, self._wait_for_unshard

    def _unshard(self, async_op: bool = False) -> None:
        group = self._group
        busy = group._all_gather_result is not None or group.is_unsharded
        if busy or (not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"):
            return
        for parameter, shard in zip(self._parameters, self._bring(), strict=True):
            parameter._sharded_param_data = shard
        if group._all_gather_process_group.size() > 1:
            # A gather of one message copies shards on a stream of its own.
            stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
            with group.device_handle.stream(stream):
                self._ready()
        if isinstance(getattr(self._gather, "__self__", None), GroupGather):
            self._ready()  # messages of single parameters start on this one, of one rank alone, too
        self._gather(async_op)

    def _wait_for_unshard(self) -> None:
        if not self.waits:
            return
        self._ready()  # one rank alone copies its shards now
        self._wait()
        self.put_back()
        self._done()

    def put_back(self) -> None:
        """Let FSDP2 see shards where they are kept."""
        for parameter, home in zip(self._parameters, self._homes, strict=True):
            parameter._sharded_param_data = home


def _nothing() -> None:
    pass


def unit_shards(roots: Iterable[nn.Module], device: torch.device) -> list[UnitShards]:
    """Return the shards of all FSDP2 units below roots, in the order of the modules."""
    groups: dict[int, Any] = {}
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                groups |= {id(group): group for group in _groups(module._get_fsdp_state())}
    return [UnitShards(group, device) for group in groups.values()]


class _Works(torch.distributed.Work):
    """Several gathers as one."""

    def __init__(self) -> None:
        super().__init__()
        self._started: list[tuple[Any, torch.Tensor]] = []
        self._unseen = ExitStack()

    def start(self, shard: torch.Tensor, whole: torch.Tensor, ranks: Any) -> None:
        """Start to gather shards; this one, a copy where it had another type, lives until it was sent."""
        # Some backends count the write when it happens, which is behind this call.
        self._unseen.enter_context(unseen_writes([whole]))
        self._started.append((gather_into(whole, shard, ranks, asynchronous=True), shard))

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all of them."""
        for work, _ in self._started:
            work.wait()
        self._started.clear()
        self._unseen.close()
        return True


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """What FSDP2 reads of a gather that was started."""

    all_gather_work: _Works
    all_gather_event: None = None


def gather_otherwise(module: FSDPModule, *, apart: bool, in_turn: bool, most_kept: int) -> list[GroupGather]:
    """Replace the gathers of a module's own units; those of one rank, to whom nothing is sent, are left alone."""
    groups = [group for group in _own_groups(module) if group._all_gather_process_group.size() > 1]
    return [GroupGather(group, apart=apart, in_turn=in_turn, most_kept=most_kept) for group in groups]


def gather_in_order(module: FSDPModule) -> None:
    """Let a module's own units be gathered when the work before is done, and not beside it on streams of their own."""
    for group in _own_groups(module):
        group.unshard_async_op = True


def gather_into(whole: torch.Tensor, part: torch.Tensor, ranks: Any, *, asynchronous: bool) -> Any:
    """Gather what ranks hold into ``whole``, one after the other; torch 2.13 has a new name for it."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return gather(whole, part, group=ranks, async_op=asynchronous)


def scatter_sum_into(part: torch.Tensor, whole: torch.Tensor, ranks: Any) -> None:
    """Sum what ranks hold, and leave each its part of the sum; torch 2.13 has a new name for it."""
    scatter = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    scatter(part, whole, group=ranks)


def writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to, which only a private attribute tells; 0 in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def unseen_writes(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Let writes to tensors that autograd has saved go unnoticed: they bring the same values again."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def fill_before_reduction(module: FSDPModule) -> None:
    """Let parameters of a unit that got no gradient take part in its reductions with zeros.

    Without it the tensor that is reduced has another size than on other ranks, or no reduction is started at all. torch
    2.13 has ``set_reduce_scatter_unused_params`` for it; older ones have not, and none lets narrow gradients join wide
    ones that have accumulated.
    """
    for group in _own_groups(module):
        group.post_backward = partial(_filled, group, group.post_backward)


def _filled(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    used = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad]
    wide = any(parameter.unsharded_accumulated_grad is not None for parameter in used)
    for parameter in used if group.reduce_grads else ():
        if parameter.unsharded_param.grad is None and parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
        if wide:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
    post_backward(*unused)


def _own_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
    return list(getattr(state, "_fsdp_param_groups", [] if one is None else [one]))
