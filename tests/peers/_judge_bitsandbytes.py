"""Quantises the matrices of tests/unit/_quantised.py by bitsandbytes on the CPU, and prints hashes of the results."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(os.environ["PARTOOL_PEERS"])  # behind the packages that partool has, too
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import torch
from _quantised import SHAPES, TYPES, matrix, name, word
from bitsandbytes import functional

torch.set_num_threads(1)  # a mean of several threads has another last bit


def of(values: torch.Tensor) -> dict[str, str]:
    """Return the hashes of a matrix's codes and scales, and of the numbers that these stand for."""
    codes, state = functional.quantize_4bit(values, quant_type="nf4", blocksize=64)
    made = {"nf4 codes": codes, "nf4 absmax": state.absmax, "nf4 numbers": functional.dequantize_4bit(codes, state)}
    codes, state = functional.quantize_4bit(values, quant_type="nf4", blocksize=64, compress_statistics=True)
    made |= {
        "double absmax": state.absmax,
        "double seconds": torch.cat([state.state2.absmax, state.offset[None]]),
        "double numbers": functional.dequantize_4bit(codes, state),
    }
    if not values.any(1).all():
        values = values[values.any(1)]  # it divides by zero
    codes, absmax, _ = functional.int8_vectorwise_quant(values.clone())
    made |= {"int8 codes": codes, "int8 absmax": absmax}
    made["int8 numbers"] = functional.int8_vectorwise_dequant(codes, absmax)
    return {key: word(tensor.flatten()) for key, tensor in made.items()}


if __name__ == "__main__":
    print(json.dumps({name(shape, each): of(matrix(*shape, each)) for shape in SHAPES for each in TYPES}, indent=1))
