"""Texts of the rules about kernels: which parts are fused, and which kernel configurations exist."""

from __future__ import annotations

from partool.diagnostics.record import Rule

_DATA = "hardware: {accelerator: h100-sxm, per_node: 1}\ndata: python-stdlib\n"
_MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\n" + _DATA
_PLAIN = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256, activation: gelu}\n" + _DATA

_EIGHT = _MODEL + "training: {precision: fp8}\n"

RULES: tuple[Rule, ...] = (
    Rule(
        "PT485",
        "A fused part that the model does not have",
        "glu fuses a gate with the product that it controls, rope rotates queries and keys; not all models have them.",
        _PLAIN + "kernels: {fused: [glu]}\n",
        _PLAIN + "kernels: {fused: [norm]}\n",
    ),
    Rule(
        "PT486",
        "Fused kernels that are not compiled here",
        "Without compiled kernels, torch's operators compute the same one after the other: less is kept for the "
        "backward pass, nothing is faster.",
        _MODEL + "kernels: {fused: [norm], mode: torch}\n",
        _MODEL + "kernels: {fused: [norm]}\n",
    ),
    Rule(
        "PT489",
        "fp8 can be planned with this, but not run yet",
        "Products in 8 bits run on H100, H200, B200, GB200, MI300X, MI325X and MI355X, with every ZeRO stage, "
        "one-dimensional tensor parallelism, sequence parallelism and pipelines that send activations. bf16 runs with "
        "everything.",
        _MODEL.replace("h100-sxm", "l40s") + "training: {precision: fp8}\n",
        _EIGHT,
    ),
    Rule(
        "PT490",
        "Layers that stay in bf16 under fp8",
        "8-bit matrix units take widths that are multiples of 16; blocks of scales are 128 wide.",
        _EIGHT.replace("hidden: 64", "hidden: 64, ffn_hidden: 172"),
        _EIGHT,
    ),
    Rule(
        "PT491",
        "A product's configuration is less certain than kernels.require",
        "From the least certain: heuristic (a rule), modelled (not measured), device (measured on another one), shape "
        "(similar widths), rows (another number of rows), exact. Products that libraries compute are not checked.",
        _EIGHT + "kernels: {require: exact}\n",
        _EIGHT + "kernels: {require: heuristic}\n",
    ),
    Rule(
        "PT492",
        "Tables of configurations that cannot be read",
        "kernels.tuned names files or folders: partool's tables, those of ROCm/aiter, or vLLM's for experts; paths "
        "start from the spec's folder.",
        _MODEL + "kernels: {tuned: [missing]}\n",
        _MODEL + "kernels: {tuned: []}\n",
    ),
    Rule(
        "PT493",
        "A time in a table that cannot be true",
        "The time is negative, infinite, or so far from what the device can do that it must be of something else; it "
        "is not used.",
        "partool plan spec.yaml --set 'kernels.tuned=[a8w8_blockscale_tuned_gemm.csv]'  # which has us = -5",
        "partool plan spec.yaml --set 'kernels.tuned=[a8w8_blockscale_tuned_gemm.csv]'  # which has us = 50",
        "command",
    ),
    Rule(
        "PT495",
        "Kernels cannot be tuned here",
        "Configurations are timed on the GPU that they are for; this machine has none, or one of another architecture "
        "than the plan's.",
        "partool tune",
        "partool tune --dry-run",
        "command",
    ),
    Rule(
        "PT496",
        "Tuning ended before it was complete",
        "Configurations found so far are in the tables, and the timings beside them; the next start goes on from "
        "there.",
        "partool tune",
        "partool tune --kernel glu_forward",
        "command",
    ),
)
