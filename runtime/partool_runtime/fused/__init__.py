"""Parts of a model that kernels of partool compute instead of several of torch's: an entry per part."""

from partool_runtime.fused.apply import fuse as fuse
from partool_runtime.fused.apply import put as put
from partool_runtime.fused.types import Fusing as Fusing
