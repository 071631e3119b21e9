"""Reads and writes Hugging Face safetensors folders of Llama, Mistral, Qwen2, Qwen3 and GPT-2."""

from partool_runtime.hf.families import FAMILIES, Family, family_of
from partool_runtime.hf.reader import HfFolder, open_folder
from partool_runtime.hf.writer import write_folder

__all__ = ["FAMILIES", "Family", "HfFolder", "family_of", "open_folder", "write_folder"]
