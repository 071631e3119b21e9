"""First values of DoRA's magnitudes: the norms of the rows of the matrices beside which they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from partool.layout.adapters import MAGNITUDE
from partool_runtime.model import AnyDecoder
from partool_runtime.pieces import TensorBlock, pieces
from partool_runtime.weights.blocks import fill_from, targets

_ENDING = f".{MAGNITUDE}"


def is_magnitude(name: str) -> bool:
    """Return True if a parameter holds the magnitudes of a matrix's rows."""
    return name.endswith(_ENDING)


@torch.no_grad()
def fill_magnitudes(
    model: AnyDecoder, masters: Mapping[str, torch.Tensor] | None, group: dist.ProcessGroup | None
) -> None:
    """Fill magnitudes, or their masters, with the norms of the matrices' rows; a collective of the ranks of ``group``.

    The matrices must have their values, and B must be zero. ``group`` None means one rank.
    """
    shapes, tensors = model.whole_shapes(), targets(model, masters)
    norms = {}
    for name in filter(is_magnitude, shapes):
        matrix = f"{name.removesuffix(_ENDING)}.weight"
        blocks = pieces(tensors[matrix], model.placements.get(matrix)) if matrix in tensors else []
        norms[name] = _norms(blocks, shapes[matrix], next(iter(model.parameters())).device, group)

    def block(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        del shape
        return norms[name][offsets[0] : offsets[0] + sizes[0]]

    fill_from(model, block, masters, is_magnitude)


def _norms(
    blocks: Sequence[TensorBlock], shape: tuple[int, ...], device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the norm of each row of a matrix, in float64, of which this rank has ``blocks``.

    Several ranks may hold a block, so the elements of each row are counted, too.
    """
    rows, columns = shape
    sums = torch.zeros(2, rows, dtype=torch.float64, device=device)
    for values, offsets in blocks:
        at = slice(offsets[0], offsets[0] + len(values))
        wide = torch.promote_types(values.dtype, torch.float32)
        norms = torch.linalg.vector_norm(values, dim=1, dtype=wide).to(device=device, dtype=torch.float64)
        sums[0, at] += norms.square()
        sums[1, at] += values.shape[1]
    if group is not None:
        dist.all_reduce(sums, group=group)
    squares, counts = sums
    norms_of_rows: torch.Tensor = (squares * columns / counts).sqrt()
    return norms_of_rows
