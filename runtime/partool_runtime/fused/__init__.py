"""Parts of a model that kernels of partool compute instead of several of torch's: an entry per part."""

from partool_runtime.fused.apply import fuse as fuse
