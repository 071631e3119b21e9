"""Training data: sources become tokens, and tokens become batches whose order depends only on (seed, global step)."""

from partool_runtime.data._open import open_data
from partool_runtime.data.batches import IGNORED_LABEL, Batches, MicroBatch
from partool_runtime.tokens.tokenizers import open_tokenizer

__all__ = ["IGNORED_LABEL", "Batches", "MicroBatch", "open_data", "open_tokenizer"]
