"""Small requests with odd sizes, for tests of edge cases and for Triton's slow interpreter.

Larger requests take the interpreter hours.
"""

from __future__ import annotations

from dataclasses import replace

from partool_kernels.registry import Request

_ROWS, _WIDTH = 5, 37
_WIDTHS = {"d": 16, "chunk": 512, "senders": 3}
"""Values in place of ``_WIDTH`` for widths that are restricted: ``d`` is even, ``chunk`` is a multiple of 8."""
_OF_KERNELS: dict[str, dict[str, int]] = {
    "moe_permute": {"k": 2},
    "moe_unpermute": {"k": 2},
    "moe_unpermute_backward": {"k": 2},
    "rope": {"n": 3},
    "rope_norm_forward": {"n": 3},
    "rope_norm_backward": {"n": 3},
    "onebit_pack": {"rows": 777},
    "onebit_unpack": {"rows": 777},
    "grouped_gemm": {"e": 3, "rows": 19},
    "grouped_gemm_weight": {"e": 3, "rows": 19},
    "gemm_sum": {"parts": 3},
}


def small(example: Request, dtype: str = "bfloat16") -> Request:
    """Return a typical request with few rows and narrow widths, and with ``dtype`` in place of bfloat16."""
    widths = _WIDTHS | _OF_KERNELS.get(example.kernel, {})
    shape = tuple((name, widths.get(name, _WIDTH)) for name, _ in example.shape)
    dtypes = tuple(dtype if name == "bfloat16" else name for name in example.dtypes)
    return replace(example, shape=shape, rows=widths.get("rows", _ROWS), dtypes=dtypes)
