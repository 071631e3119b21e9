"""AdamW calls on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.adamw.op import Tensors, Update, launch, reference
from partool_kernels.cases import FORWARD, Case
from partool_kernels.registry import Config, Request

_UPDATE = Update(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, scale=0.5, step=3)


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a case that updates a large tensor with weight decay and a small tensor without weight decay.

    Every run updates the same tensors again, so only the results of the first run can be compared.
    """
    generator = torch.Generator(device).manual_seed(seed)
    small = request.rows // 4
    kinds = ["float32", request.dtypes[1], "float32", "float32"]
    made = [
        tuple(torch.randn(size, device=device, generator=generator).to(getattr(torch, kind)) for kind in kinds)
        for size in (request.rows - small, small)
    ]
    for _, _, _, square in made:
        square.abs_()
    before = [tuple(x.clone() for x in row) for row in made]
    parameters, gradients, averages, squares = zip(*made, strict=True)
    tensors = Tensors(parameters, gradients, averages, squares, (True, False))

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch(tensors, _UPDATE, config)
        return _results(made)

    def by_torch(dtype: torch.dtype) -> Sequence[torch.Tensor]:
        rows = [(p.to(dtype, copy=True), g, m.to(dtype, copy=True), v.to(dtype, copy=True)) for p, g, m, v in before]
        for row, decays in zip(rows, tensors.decays, strict=True):
            reference(row, decays, _UPDATE)
        return _results(rows)

    return Case(
        run=run,
        eager=lambda: by_torch(torch.float32),
        exact=lambda: by_torch(torch.float64),
        factors=(FORWARD,) * 6,
    )


def _results(rows: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [x for p, _, m, v in rows for x in (p, m, v)]
