"""First values of DoRA's magnitudes: the norms of the rows of the matrices beside which they lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from partool.layout.adapters import MAGNITUDE
from partool_runtime.model import AnyDecoder
from partool_runtime.pieces import pieces
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
    norms = {name: _norms(model, name, masters, group) for name in model.whole_shapes() if is_magnitude(name)}

    def block(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        del shape
        return norms[name][offsets[0] : offsets[0] + sizes[0]]

    fill_from(model, block, masters, is_magnitude)


def _norms(
    model: AnyDecoder, name: str, masters: Mapping[str, torch.Tensor] | None, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the norm of each row of the matrix beside ``name``, in float64.

    Several ranks may hold a block, so the elements of each row are counted, too.
    """
    matrix = f"{name.removesuffix(_ENDING)}.weight"
    held = targets(model, masters)
    rows, columns = model.whole_shapes()[matrix]
    device = next(iter(model.parameters())).device
    sums = torch.zeros(2, rows, dtype=torch.float64, device=device)
    for piece in pieces(held[matrix], model.placements.get(matrix)) if matrix in held else ():
        at = slice(piece.offsets[0], piece.offsets[0] + len(piece.tensor))
        norms = torch.linalg.vector_norm(
            piece.tensor, dim=1, dtype=torch.promote_types(piece.tensor.dtype, torch.float32)
        )
        sums[0, at] += norms.to(device=device, dtype=torch.float64).square()
        sums[1, at] += piece.tensor.shape[1]
    if group is not None:
        dist.all_reduce(sums, group=group)
    squares, counts = sums
    return (squares * columns / counts).sqrt()
