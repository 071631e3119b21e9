"""Fused parts of a model: each is computed by one kernel of partool instead of several of torch's."""

from partool_runtime.fused.apply import fuse as fuse
from partool_runtime.fused.apply import put as put
from partool_runtime.fused.types import Fusing as Fusing
