"""Select the fastest library, or partool's kernel, for a product of matrices of some shape.

``cuBLAS`` and ``cuBLASLt`` (``hipBLAS``, ``hipBLASLt`` and ``CK`` on ROCm) are chosen through
``torch.backends.cuda.preferred_blas_library``; ``torch`` leaves the choice to torch. Expert products use
``grouped_mm``, a loop, or partool's kernel; block-scaled 8-bit products use ``scaled_mm`` or partool's kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from partool_kernels.device import uses_triton
from partool_kernels.fp8.formats import BLOCK, Quantised, blocks
from partool_kernels.fp8.op import quantise
from partool_kernels.gemm.op import dense, form_of, gemm
from partool_kernels.gemm_a8w8.op import gemm_a8w8
from partool_kernels.grouped_gemm.op import grouped_gemm, loop
from partool_kernels.select.selector import Candidate, Question, Selector

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def matmul(selector: Selector, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a [M, K] @ b [K, N]`` by the implementation that is fastest for M rounded up to a power of two."""
    a, b = dense(a), dense(b)
    answer = selector.choose(_problem("gemm", (a, b), _libraries(a), ("form", form_of(a, b))))
    return _by(answer.name)(a, b)


def grouped(selector: Selector, rows_RK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows with the expert's matrix by the fastest implementation, and return ``[R, N]``.

    ``ends_E`` holds the index after each expert's last row, as in ``partool_kernels.moe.op.route``; result rows
    from ``ends_E[-1]`` on must not be used. Candidates are measured with rows spread evenly over experts.
    """
    names = (
        *(("torch",) if hasattr(F, "grouped_mm") else ()),
        *(("triton",) if uses_triton("auto", rows_RK, weights_EKN) else ()),
        "loop",
    )
    experts = len(weights_EKN)
    even = (torch.arange(1, experts + 1, device=ends_E.device) * len(rows_RK)) // experts

    def candidates() -> Sequence[Candidate]:
        x, w = (t.requires_grad_() for t in _random(rows_RK, weights_EKN))
        return [Candidate(name, functools.partial(_trained, _GROUPED[name], (x, w), even)) for name in names]

    key = (*_sizes(rows_RK, weights_EKN), ("e", experts), ("form", "n" if weights_EKN.stride(-1) == 1 else "t"))
    answer = selector.choose(Question("grouped_gemm", key, names, candidates))
    return _GROUPED[answer.name](rows_RK, weights_EKN, ends_E)


def scaled(selector: Selector, a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b.T`` of 8-bit numbers with block scales, as in ``partool_kernels.gemm_a8w8.op.gemm_a8w8``."""

    def candidates() -> Sequence[Candidate]:
        # Test numbers replace the numbers of this call: zeros, or one large row, would hide a wrong scale.
        like = tuple(_scales_apart(x, seed) for seed, x in enumerate((a, b)))
        return [Candidate(name, functools.partial(_alone, run, *like, dtype)) for name, run in _SCALED.items()]

    key = (*_sizes(a.q, b.q.T), ("scales", str(list(b.scale.shape))), ("out", _word(dtype)))
    problem = Question("scaled_gemm", key, tuple(_SCALED), candidates, by_row=True)
    return _SCALED[selector.choose(problem).name](a, b, dtype)


def _scales_apart(x: Quantised, seed: int) -> Quantised:
    """Return random 8-bit numbers in the layout of ``x``; scales of blocks differ by factors of up to 16."""
    generator = torch.Generator(x.q.device).manual_seed(seed)
    rows, columns = x.q.shape
    down = 1 if x.scale.shape[1] == rows else BLOCK
    exponents = torch.randint(-2, 3, (-(-rows // down), blocks(columns)), device=x.q.device, generator=generator)
    factors = torch.exp2(exponents).repeat_interleave(down, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    numbers = torch.randn(rows, columns, device=x.q.device, generator=generator)
    return quantise(numbers.mul_(factors), "plain" if down == 1 else "plain square", x.q.dtype)[0]


def _random(*like: torch.Tensor) -> list[torch.Tensor]:
    """Return random tensors with the layouts of ``like``, from a generator that training does not use."""
    generator = torch.Generator(like[0].device).manual_seed(0)
    return [torch.empty_like(x).normal_(generator=generator) for x in like]


def _problem(
    operation: str, inputs: tuple[torch.Tensor, ...], names: tuple[str, ...], *more: tuple[str, str | int]
) -> Question:
    def candidates() -> Sequence[Candidate]:
        like = _random(*inputs)
        return [Candidate(name, functools.partial(_alone, _by(name), *like)) for name in names]

    return Question(operation, (*_sizes(*inputs), *more), names, candidates)


def _alone(run: Callable[..., torch.Tensor], *inputs: object) -> Sequence[torch.Tensor]:
    return (run(*inputs),)


def _sizes(a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[str, str | int], ...]:
    bucket = 1 << max(len(a) - 1, 0).bit_length()
    return ("rows", bucket), ("n", b.shape[-1]), ("k", a.shape[-1]), ("dtype", _word(a.dtype))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _libraries(a: torch.Tensor) -> tuple[str, ...]:
    ours = ("triton",) if uses_triton("auto", a) else ()
    if not a.is_cuda:
        return ("torch", *ours)
    return ("torch", "cublas", "cublaslt", *(("ck",) if torch.version.hip is not None else ()), *ours)


def _by(name: str) -> Product:
    if name == "torch":
        return torch.matmul
    return gemm if name == "triton" else functools.partial(_by_library, name)


def _by_library(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with _preferred(name):
        return a @ b


@contextmanager
def _preferred(name: str) -> Iterator[None]:
    library = torch.backends.cuda.preferred_blas_library
    before = library()
    library(name)
    try:
        yield
    finally:
        library(before)


def _trained(run: Callable[..., torch.Tensor], leaves: tuple[torch.Tensor, ...], ends: torch.Tensor) -> Sequence[Any]:
    """Return the result of ``run`` and the gradients of ``leaves``."""
    with torch.enable_grad():
        out = run(*leaves, ends)
        return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))


def _grouped_by_torch(rows_RK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(rows_RK, weights_EKN, offs=ends_E.to(torch.int32))


_GROUPED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "torch": _grouped_by_torch,
    "triton": grouped_gemm,
    "loop": loop,
}


def _scaled_by_torch(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Multiply by ``scaled_mm``; raises where this torch or device does not support block scales."""
    kinds = F.ScalingType
    square = b.scale.shape[1] != len(b.q)
    # partool's scales are [K / 128, M] and [K / 128, N / 128]; torch takes their transposes without a copy.
    out: torch.Tensor = F.scaled_mm(
        a.q,
        b.q.T,
        scale_a=a.scale.T,
        scale_recipe_a=kinds.BlockWise1x128,
        scale_b=b.scale if square else b.scale.T,
        scale_recipe_b=kinds.BlockWise128x128 if square else kinds.BlockWise1x128,
        output_dtype=dtype,
    )
    return out


_SCALED: dict[str, Callable[[Quantised, Quantised, torch.dtype], torch.Tensor]] = {
    "triton": gemm_a8w8,
    "torch": _scaled_by_torch,
}
