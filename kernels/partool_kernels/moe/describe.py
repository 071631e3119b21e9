"""Descriptions, for the registry, of the kernels that permute tokens by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature


def _configs(request: Request) -> Iterator[Config]:
    for block in (512, 1024, 2048, 4096):
        for warps in (2, 4, 8):
            if 4 <= block // (warps * 32) <= 32:
                yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _default(request: Request) -> Config:
    narrow = request.width["h"] <= 1024
    return Config((("BLOCK", 512 if narrow else 2048),), num_warps=2 if narrow else 8, num_stages=1)


def _signature(request: Request, config: Config, names: tuple[str, ...]) -> Signature:
    """Return a kernel's signature; ``names`` are the names of the kernel's pointer arguments, in order."""
    of_tokens, of_weights = (TRITON_TYPE[dtype] for dtype in request.dtypes)
    narrow = {"places": "*i64", "kept": "*i64", "weights": f"*{of_weights}", "grad_weights": f"*{of_weights}"}
    strides = tuple(f"{name}_stride" for name in names if name not in narrow)
    constants: dict[str, object] = {"CHOICES": request.width["k"]}
    if names == _UNPERMUTE:
        constants["WEIGHTED"] = "weighted" in request.flags
    constants |= config.constants
    arguments = {name: narrow.get(name, f"*{of_tokens}") for name in names}
    arguments |= dict.fromkeys(strides, "i64") | {"columns": "i32"} | dict.fromkeys(constants, "constexpr")
    if constants.get("WEIGHTED") is False:
        arguments["weights"], constants["weights"] = "constexpr", None
    return Signature(arguments, constants, divisible=(*strides, "columns"))


_PERMUTE = ("x", "rows", "places", "kept")
_UNPERMUTE = ("rows", "out", "places", "kept", "weights")
_BACKWARD = ("grad", "rows", "grad_rows", "places", "kept", "weights", "grad_weights")


def _moved(request: Request, per_token: int, per_choice: int) -> float:
    """Return the bytes moved by a call.

    A token's row is read or written ``per_token`` times, and a choice's row is read or written ``per_choice`` times.
    """
    choices = request.rows * request.width["k"]
    wide = (per_token * request.rows + per_choice * choices) * request.width["h"] * bytes_of(request.dtypes[0])
    return wide + choices * (8 + bytes_of(request.dtypes[1]))


def _kernel(name: str, names: tuple[str, ...], flags: tuple[str, ...], moved: Callable[[Request], float]) -> Kernel:
    def examples(architecture: str) -> Iterator[Request]:
        for hidden, choices in ((4096, 2), (7168, 8)):
            shape = (("h", hidden), ("k", choices))
            yield Request(name, architecture, ("bfloat16", "float32"), shape, 8192, flags)

    return Kernel(
        name=name,
        source="moe/kernel.py",
        function=name,
        widths=("h", "k"),
        configs=_configs,
        default=_default,
        # Shared memory is used only by the sum over a block, for one number per warp.
        shared_bytes=lambda request, config: 4 * config.num_warps,
        signature=lambda request, config: _signature(request, config, names),
        examples=examples,
        moved_bytes=moved,
        reference={
            "moe_permute": "x.repeat_interleave(k, 0)[order]",
            "moe_unpermute": "(rows[places] * weights[..., None]).sum(1)",
            "moe_unpermute_backward": "torch.autograd.grad of (rows[places] * weights[..., None]).sum(1)",
        }[name],
    )


KERNELS = (
    _kernel("moe_permute", _PERMUTE, (), lambda request: _moved(request, 1, 1)),
    _kernel("moe_unpermute", _UNPERMUTE, ("weighted",), lambda request: _moved(request, 1, 1)),
    _kernel("moe_unpermute_backward", _BACKWARD, (), lambda request: _moved(request, 1, 2)),
)
"""A request's types are the tokens' type and the weights' type; ``rows`` is the number of tokens, ``h`` the width of a
token, and ``k`` the number of experts that a token chooses."""
