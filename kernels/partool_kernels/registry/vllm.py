"""Read vLLM's configurations of expert products.

The files are from https://github.com/vllm-project/vllm, ``model_executor/layers/fused_moe/configs``, and are named
``E=<experts of the rank>,N=<inner width of an expert>,device_name=<device>[,dtype=<types>][,block_shape=[n,k]].json``.
A file holds the fastest configuration for some numbers of tokens; the nearest number is used.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from partool_kernels.registry.aiter import as_config, carried, is_forward
from partool_kernels.registry.distance import MODELLED, ROWS, same_device
from partool_kernels.registry.tables import TableError, bucket, json_object
from partool_kernels.registry.types import Choice, Request

_NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<width>\d+),device_name=(?P<device>[^,]+)"
    r"(?:,dtype=(?P<dtype>\w+))?(?:,block_shape=\[(?P<n>\d+), ?(?P<k>\d+)\])?\.json"
)
_DTYPES = {"grouped_gemm": None, "grouped_a8w8": "fp8_w8a8"}
"""The types that a file's name contains, by the name of partool's kernel for these products."""
_BLOCK = (128, 128)
"""Block of 8-bit weights that shares a scale in partool's kernels."""


_BLOCKS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
"""Keys that every configuration of a file holds."""


class Name(NamedTuple):
    """Fields of a file's name."""

    experts: int
    """Number of experts on the rank."""
    width: int
    """Inner width of an expert on the rank; gate and up count as one width."""
    device: str
    dtype: str | None
    """Types of the product, such as ``fp8_w8a8``; None means 16 bits."""
    block: tuple[int, int] | None


def parse_name(name: str) -> Name | None:
    """Return the fields of a file's name, or None for a name that is not in vLLM's format."""
    match = _NAME.fullmatch(name)
    if not match:
        return None
    block = (int(match["n"]), int(match["k"])) if match["n"] else None
    return Name(int(match["experts"]), int(match["width"]), match["device"].replace("_", " "), match["dtype"], block)


class VllmConfiguration(NamedTuple):
    """Configuration that vLLM uses for a product."""

    config: Mapping[str, int | str | None]
    file: Path
    tokens: int
    """Number of tokens that the entry is for."""


class VllmConfigs:
    """Configurations from some of vLLM's files."""

    def __init__(self, files: Iterable[Path], expert_width: int | None = None) -> None:
        """Load the files; files with other names are skipped.

        ``expert_width`` is the inner width of an expert on the rank, which a product's shape alone does not show.
        """
        self._expert_width = expert_width
        named = ((parse_name(file.name), file) for file in files)
        self._files = {name: file for name, file in named if name is not None}

    def look_up(self, name: Name, tokens: int) -> VllmConfiguration | None:
        """Return the configuration for the nearest number of tokens (the lower of two equally near), or None."""
        for other, file in self._files.items():
            if other._replace(device="") == name._replace(device="") and same_device(other.device, name.device):
                body = read(file)
                nearest = min(sorted(body), key=lambda rows: abs(rows - tokens))
                return VllmConfiguration(body[nearest], file, nearest)
        return None

    def choices(self, request: Request) -> Iterator[Choice]:
        """Yield vLLM's parameters for partool's expert kernel; the parameters were measured with vLLM's kernel."""
        for configuration in self._of(request):
            config = carried(request, configuration.config)
            if config:
                yield Choice("triton", config, "modelled", MODELLED, table=str(configuration.file))

    def coverage(self, request: Request) -> Iterator[Choice]:
        """Yield the configurations of vLLM's kernel, without times.

        The source is ``exact`` if the entry is for the request's bucket of rows, otherwise ``rows``.
        """
        for configuration in self._of(request):
            apart = abs(math.log2(bucket(configuration.tokens) / bucket(request.rows)))
            yield Choice(
                "vllm",
                as_config(configuration.config),
                "rows" if apart else "exact",
                ROWS * apart,
                table=str(configuration.file),
            )

    def _of(self, request: Request) -> Iterator[VllmConfiguration]:
        """Yield the configurations for an expert's product, the product for gate and up or the product for down.

        vLLM counts every token once; a request counts a token once for each expert that the token is sent to.
        """
        if request.kernel not in _DTYPES or not is_forward(request) or not request.device:
            return
        dtype, width = _DTYPES[request.kernel], request.width
        for inner in {width["k"], width["n"] // 2}:
            if self._expert_width not in (None, inner):
                continue
            name = Name(width["e"], inner, request.device, dtype, _BLOCK if dtype else None)
            configuration = self.look_up(name, request.rows)
            if configuration:
                yield configuration


@functools.lru_cache(maxsize=1024)
def read(path: Path) -> dict[int, dict[str, int | str | None]]:
    """Return a file's configurations by number of tokens; raises :class:`TableError` unless the format is vLLM's."""
    body = json_object(path)
    configurations = {}
    for key, config in body.items():
        if key == "triton_version":
            continue
        if not key.isdecimal() or not isinstance(config, dict) or not all(type(x) is int for x in config.values()):
            raise TableError(path, f"{key}: keys are numbers of tokens, and hold objects of numbers")
        missing = [name for name in _BLOCKS if config.get(name, 0) <= 0]
        if missing:
            raise TableError(path, f"{key}: there is no {missing[0]}, vLLM's kernel needs {', '.join(_BLOCKS)}")
        configurations[int(key)] = dict(config)
    if not configurations:
        raise TableError(path, "no configurations")
    return configurations
