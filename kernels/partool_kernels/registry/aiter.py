"""Look up the configurations that AMD's aiter has for Triton products, by aiter's rules.

A folder ``configs`` of https://github.com/ROCm/aiter holds JSON files in two layouts: ``gemm/<arch>-<FAMILY>.json``,
with ``-N=<n>-K=<k>`` after the family in files for one pair of widths, and ``<arch>/<backend>/gemm/<family>/`` with
``DEFAULT.json`` and ``<FAMILY>-N=<n>-K=<k>.json``. Keys of a file are ``M_LEQ_<rows>``, ``M_GEQ_<rows>`` or ``any``;
each value holds blocks, warps and other parameters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from partool_kernels.registry.distance import MODELLED, ROWS, WIDTH
from partool_kernels.registry.kernels import KERNELS
from partool_kernels.registry.tables import TableError, json_object
from partool_kernels.registry.types import Choice, Config, Request

BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows that keys may contain; aiter ignores keys with other numbers."""
_MORE_BOUNDS = {"GEMM-AFP4WFP4_PRESHUFFLED": 31, "BATCHED_GEMM-AFP4WFP4": 320}
"""Additional row bound of some families in aiter's code."""
FAMILIES = {"gemm_a8w8": "GEMM-A8W8_BLOCKSCALE", "gemm": "GEMM-A16W16"}
"""Name of aiter's family for the product ``x · Wᵀ``, by the name of partool's kernel for this product."""
_BACKENDS = ("triton", "gluon")
_FILE = re.compile(r"(?P<arch>gfx\w+)-(?P<family>(?:BATCHED_)?GEMM-[\w-]+?)(?:-B=\d+)?(?:-N=\d+-K=\d+)?\.json")
_KEY = re.compile(r"(M_LEQ|M_GEQ)_(\d+)|any")
_LEAST_BLOCK_K = 16
_CARRIED = {
    "BLOCK_M": "BLOCK_SIZE_M",
    "BLOCK_N": "BLOCK_SIZE_N",
    "BLOCK_K": "BLOCK_SIZE_K",
    "GROUP_M": "GROUP_SIZE_M",
    "SPLIT": "NUM_KSPLIT",
}
"""Names that aiter and vLLM use for kernel constants, by partool's names of these constants."""


class AiterProduct(NamedTuple):
    """A matrix product whose configuration is looked up."""

    family: str
    m: int
    n: int
    k: int
    batch: int | None = None


class AiterConfiguration(NamedTuple):
    """Configuration that aiter uses for a product."""

    config: Mapping[str, int | str | None]
    tuned: bool
    """True if aiter calls the configuration tuned: it is neither in the default file nor under the key ``any``."""
    file: Path
    key: str

    @property
    def special(self) -> bool:
        """True if the file is for one pair of widths, not the default file."""
        return "N=" in self.file.name


class AiterConfigs:
    """A folder ``configs`` of aiter."""

    def __init__(self, root: Path) -> None:
        """Store the folder; files are read on demand."""
        self._root = root

    def look_up(self, architecture: str, gemm: AiterProduct, backend: str | None = None) -> AiterConfiguration | None:
        """Return aiter's configuration for a product, or None where aiter has no configuration.

        A folder counts only if it has a default file; otherwise its files for one pair of widths are ignored.
        ``backend``: ``triton`` or ``gluon``. Raises :class:`TableError` for a malformed file.
        """
        place = self._place(architecture, gemm.family, backend)
        if place is None:
            return None
        folder, prefix, default = place
        widths = f"N={gemm.n}-K={gemm.k}"
        names = [f"{prefix}-B={gemm.batch}-{widths}.json"] if gemm.batch is not None else []
        special = next(
            (folder / name for name in [*names, f"{prefix}-{widths}.json"] if (folder / name).is_file()), None
        )
        body = read(special or default)
        entry = _entry(body, gemm)
        if entry is None:
            return None
        key, config = entry
        return AiterConfiguration(split(config, gemm.k), special is not None and key != "any", special or default, key)

    def _place(self, architecture: str, family: str, backend: str | None) -> tuple[Path, str, Path] | None:
        """Return the folder that aiter chooses, its prefix of file names for a pair of widths, and its default file."""
        name = family.lower().replace("-", "_")
        nested = [self._root / architecture / each / "gemm" / name for each in ([backend] if backend else _BACKENDS)]
        legacy = [self._root / "gemm" / backend] if backend else []
        flat = f"{architecture}-{family}"
        places = [(folder, family, folder / "DEFAULT.json") for folder in nested]
        places += [(folder, flat, folder / f"{flat}.json") for folder in [*legacy, self._root / "gemm"]]
        return next((place for place in places if place[2].is_file()), None)

    def choices(self, request: Request) -> Iterator[Choice]:
        """Yield aiter's parameters for partool's kernel of the request; aiter measured them with its own kernel."""
        configuration = self._of(request)
        config = carried(request, configuration.config) if configuration else None
        if configuration and config:
            distance = MODELLED + (0.0 if configuration.tuned else ROWS if configuration.special else WIDTH)
            yield Choice("triton", config, "modelled", distance, table=str(configuration.file))

    def coverage(self, request: Request) -> Iterator[Choice]:
        """Yield the configuration of aiter's kernel if it is tuned or is from a file for the request's widths."""
        configuration = self._of(request)
        if configuration and configuration.tuned:
            yield Choice("aiter", as_config(configuration.config), "exact", 0.0, table=str(configuration.file))
        elif configuration and configuration.special:
            yield Choice("aiter", as_config(configuration.config), "rows", ROWS, table=str(configuration.file))

    def _of(self, request: Request) -> AiterConfiguration | None:
        family = FAMILIES.get(request.kernel)
        if family is None or not is_forward(request) or not request.architecture.startswith("gfx"):
            return None
        return self.look_up(
            request.architecture, AiterProduct(family, request.rows, request.width["n"], request.width["k"])
        )


def is_forward(request: Request) -> bool:
    """Return whether the request is a product of a forward pass, without flags for variants such as other scales."""
    return request.flags in ((), ("nt",))


def _entry(
    body: Mapping[str, Mapping[str, int | str | None]], gemm: AiterProduct
) -> tuple[str, Mapping[str, int | str | None]] | None:
    bounds = sorted({*BOUNDS, *(more for name, more in _MORE_BOUNDS.items() if gemm.family.startswith(name))})
    keys = [f"M_LEQ_{bound}" for bound in bounds if gemm.m <= bound]
    keys += [f"M_GEQ_{bound}" for bound in reversed(bounds) if gemm.m >= bound]
    key = next((key for key in [*keys, "any"] if key in body), None)
    return (key, body[key]) if key else None


@functools.lru_cache(maxsize=1024)
def read(path: Path) -> dict[str, dict[str, int | str | None]]:
    """Return a file's configurations by key; raises :class:`TableError` unless the format is aiter's."""
    body = json_object(path)
    for key, config in body.items():
        if not _KEY.fullmatch(key) or not isinstance(config, dict):
            raise TableError(path, f"{key}: keys are M_LEQ_<rows>, M_GEQ_<rows> and any, and hold objects")
        for name, value in config.items():
            fine = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not fine and not (
                name in ("cache_modifier", "kernel_type") and (value is None or isinstance(value, str))
            ):
                raise TableError(path, f"{key}.{name}: {value!r}")
    return body


def split(config: Mapping[str, int | str | None], k: int) -> dict[str, int | str | None]:
    """Return the configuration with the split of the sum over ``k`` corrected as in aiter, so that blocks fit parts."""
    fixed = {"NUM_KSPLIT": 1, "cache_modifier": None, **config}
    parts, block = int(fixed["NUM_KSPLIT"] or 1), int(fixed.get("BLOCK_SIZE_K") or 0)
    while parts > 1 and block > -(-k // parts):
        parts = max(parts // 2, 1)
    part = -(-k // parts)
    if block > part:
        block = max(1 << (part.bit_length() - 1), _LEAST_BLOCK_K)
    fixed |= {"NUM_KSPLIT": parts}
    if block:
        part = -(-part // block) * block
        fixed |= {"BLOCK_SIZE_K": block}
    return fixed | {"SPLITK_BLOCK_SIZE": part}


def carried(request: Request, config: Mapping[str, int | str | None]) -> Config | None:
    """Return aiter's or vLLM's parameters for a partool kernel, or None if the kernel takes other parameters."""
    default = KERNELS[request.kernel].default(request)
    blocks = {}
    for name in default.constants:
        value = config.get(_CARRIED.get(name, ""), 1 if name == "SPLIT" else None)
        if not isinstance(value, int):
            return None
        blocks[name] = value
    return Config(tuple(blocks.items()), **_options(config))


def as_config(config: Mapping[str, int | str | None]) -> Config:
    """Return another tool's configuration as a :class:`Config` that keeps the tool's parameter names."""
    options = _options(config)
    blocks = {name: value for name, value in config.items() if isinstance(value, int) and name not in options}
    return Config(tuple(blocks.items()), **options)


def _options(config: Mapping[str, int | str | None]) -> dict[str, int]:
    names = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
    return {name: int(config[name] or 0) for name in names if name in config}


def default_name(name: str) -> str | None:
    """Return the name of the default file that a file ``<arch>-<FAMILY>-N=<n>-K=<k>.json`` needs in its folder.

    Returns None for other files.
    """
    match = _FILE.fullmatch(name)
    return f"{match['arch']}-{match['family']}.json" if match else None


def holds(path: Path) -> bool:
    """Return whether a folder is aiter's ``configs``."""
    flat = any(_FILE.fullmatch(file.name) for file in (path / "gemm").glob("gfx*.json"))
    return flat or any(path.glob("gfx*/*/gemm/*/DEFAULT.json"))
