"""Triton's matrix product as an operator: gradients, forms, refused inputs, and its compiled code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from partool_kernels.compiled import compile_for
from partool_kernels.gemm.kernel import gemm_sum
from partool_kernels.gemm.op import form_of, gemm
from partool_kernels.proof import ProofJob, faults, prove
from partool_kernels.registry import KERNELS, Request


def test_operator_is_what_its_registrations_say() -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.partool.gemm, (a, weight.detach().T.requires_grad_(), "auto"))
    assert torch.autograd.gradcheck(lambda a, weight: gemm(a, weight.T), (a, weight))
    assert torch.equal(gemm(a, weight.T), a @ weight.T)


@pytest.mark.parametrize("sizes", [(0, 7, 3), (5, 0, 3), (5, 7, 0)])
def test_empty_products_pass(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = torch.zeros(m, k, requires_grad=True), torch.zeros(k, n, requires_grad=True)
    out = gemm(a, b)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(m, n))
    assert a.grad is not None
    assert a.grad.shape == (m, k)


def test_multiples_of_the_parts_stride_are_64_bits_wide() -> None:
    """Launches pass strides below 2³¹ as 32 bits, unlike the offline proof: parts of 1.2e9 elements would overflow."""
    kernel = KERNELS["gemm_sum"]
    request = Request("gemm_sum", "sm_90", ("bfloat16",), (("n", 4096), ("parts", 4)), 64)
    config = kernel.default(request)
    signature = kernel.signature(request, config)
    arguments = {name: "i32" if type_ == "i64" else type_ for name, type_ in signature.arguments.items()}
    source = ASTSource(gemm_sum, arguments, dict(signature.constants))
    text = str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=config.options("cuda")).asm["ttir"])
    used = [line for line in text.splitlines() if "%part_stride" in line and " = arith." in line]
    assert used
    assert all("arith.extsi" in line for line in used)


def test_forms_are_told_by_strides() -> None:
    x, y = torch.zeros(4, 5), torch.zeros(5, 6)
    assert form_of(x, y) == "nn"
    assert form_of(x, torch.zeros(6, 5).T) == "nt"
    assert form_of(torch.zeros(5, 4).T, y) == "tn"


def test_what_has_no_product_is_refused() -> None:
    a = torch.zeros(2, 3)
    for b in (torch.zeros(2, 3), torch.zeros(3), torch.zeros(3, 2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"no product of \[2, 3\] float32 on cpu"):
            gemm(a, b)
    with pytest.raises(ValueError, match="int64"):
        gemm(a.long(), a.long().T)


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_tiles_of_all_forms_are_loaded_into_shared_memory(architecture: str) -> None:
    kernel = KERNELS["gemm"]
    for form in ("nn", "nt", "tn"):
        request = Request("gemm", architecture, ("bfloat16", "bfloat16"), (("n", 4096), ("k", 14336)), 16384, (form,))
        config = kernel.default(request)
        compiled = compile_for(request, config)
        # Tiles without wide loads go through registers, and their loads are not pipelined.
        assert 0.9 <= compiled.shared_bytes / kernel.shared_bytes(request, config) <= 1


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_products_of_float32_keep_to_registers_and_need_matrix_units_on_amd_alone(architecture: str) -> None:
    request = Request("gemm", architecture, ("float32", "float32"), (("n", 4096), ("k", 4096)), 16384, ("nt",))
    proof = prove(ProofJob(request, KERNELS["gemm"].default(request)))
    assert proof.faults == ()
    assert proof.compiled is not None
    assert proof.compiled.matrix is (architecture == "gfx942")
    assert bool(faults(proof.job, replace(proof.compiled, matrix=False))) is (architecture == "gfx942")


def test_split_sums_keep_a_large_device_busy() -> None:
    def split(rows: int, architecture: str) -> int:
        request = Request("gemm", architecture, ("bfloat16",) * 2, (("n", 4096), ("k", 14336)), rows, ("nt",))
        return KERNELS["gemm"].default(request).constants["SPLIT"]

    assert split(16, "sm_90") == 4  # 32 tiles, 132 multiprocessors
    assert split(16, "gfx942") == 8  # 304 compute units
    assert split(16384, "sm_90") == 1
