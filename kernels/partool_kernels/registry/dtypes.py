"""Triton's name and the size of each type, looked up by torch's name."""

from __future__ import annotations

TRITON_TYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2": "fp8e5",
    "float8_e5m2fnuz": "fp8e5b16",
    "uint8": "u8",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i32": 4, "i64": 8}


def bytes_of(dtype: str) -> int:
    """Return the bytes of an element of the type that torch calls ``dtype``."""
    return _BYTES.get(TRITON_TYPE[dtype], 1)
