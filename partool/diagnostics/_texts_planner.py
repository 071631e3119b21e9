"""Texts of the planner's rules about the resolved model and hardware, memory, time, and what can run."""

from __future__ import annotations

from partool.diagnostics.record import BASE, Rule

_DATA = "data: python-stdlib\n"
_MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\n"
_EXPERTS = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256, moe: {experts: 4, top_k: 2, ffn_hidden: 64}}\n"
_SMALL_STEP = (
    "model: llama3.2-1b\ntraining: {sequence_length: 512, global_batch: 32}\nparallel: {tensor: 1, pipeline: 1}\n"
)
_LONG_STEP = "model: llama3.2-1b\ntraining: {sequence_length: 2048, global_batch: 256}\n"
_TWO_GPUS = "hardware: {accelerator: h100-sxm, per_node: 2}\n" + _DATA
_ONE_GPU = "hardware: {accelerator: h100-sxm, per_node: 1}\n" + _DATA


def _gpus(extra: str) -> str:
    return _MODEL + _TWO_GPUS + extra + "\n"


_LATENT = "mla: {kv_rank: 16, nope_head_dim: 8, rope_head_dim: 8, v_head_dim: 16}"
_PODS = """\
model: llama3-8b
data: python-stdlib
hardware: {accelerator: h100-sxm, nodes: 2, fabric: ib-ndr}
launch:
  target: k8s
  image: registry.example.com/partool:1
"""
_SLOW_STORAGE = BASE.replace("per_node: 1", "per_node: 1, storage_gb_per_s: 0.00005") + "training: {global_batch: 8}\n"
_SMALL_HOST = """\
model: llama3.2-1b
hardware: {accelerator: h100-sxm, per_node: 2, host_memory_gib: 20}
data: python-stdlib
"""
AWKWARD = "model: llama3.2-1b\nhardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}\ndata: python-stdlib\n"

RULES: tuple[Rule, ...] = (
    Rule(
        "PT203",
        "Heads cannot be split evenly over the tensor-parallel ranks",
        "Each rank gets whole heads of keys and values with the query heads they serve (arXiv 1909.08053); all ranks "
        "wait for the one with the most.",
        "model: {layers: 2, hidden: 70, heads: 7, vocab: 256, ffn_hidden: 96}\nhardware: {accelerator: h100-sxm, "
        "per_node: 3}\n" + _DATA + "training: {global_batch: 6}\nparallel: {tensor: 3}\n",
        "model: {layers: 2, hidden: 60, heads: 6, vocab: 256, ffn_hidden: 96}\nhardware: {accelerator: h100-sxm, "
        "per_node: 3}\n" + _DATA + "training: {global_batch: 6}\nparallel: {tensor: 3}\n",
    ),
    Rule(
        "PT225",
        "A pattern of optimizer.groups that applies to no parameter",
        "The first pattern that matches a parameter's name applies. A pattern that matches no parameter, only frozen "
        "ones, or only those of earlier patterns is misspelt or out of place.",
        _gpus("optimizer: {groups: {'layers.*': {lr_factor: 0.5}, 'layers.0.*': {lr_factor: 0.1}}}"),
        _gpus("optimizer: {groups: {'layers.0.*': {lr_factor: 0.1}, 'layers.*': {lr_factor: 0.5}}}"),
    ),
    Rule(
        "PT228",
        "Experts in none of the layers",
        "The first first_dense_layers layers have dense feed-forward networks. If these are all layers, the experts "
        "would be left out without a word.",
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256, moe: {experts: 4, top_k: 2, ffn_hidden: 64, "
        "first_dense_layers: 2}}\n" + _ONE_GPU,
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256, moe: {experts: 4, top_k: 2, ffn_hidden: 64, "
        "first_dense_layers: 1}}\n" + _ONE_GPU,
    ),
    Rule(
        "PT555",
        "A watchdog that ends healthy ranks",
        "Ranks may wait for a slow disk, a full network or another user of their cores. A limit below three steps, by "
        "the predicted time at its upper error bar, would end them for that.",
        _LONG_STEP + _ONE_GPU + "launch: {watchdog: 5}\n",
        _LONG_STEP + _ONE_GPU + "launch: {watchdog: 600}\n",
    ),
    Rule(
        "PT250",
        "No such model preset",
        "Presets are the catalog's models; any other model is given by its config.json or by its fields.",
        "model: lama3-8b\n" + _ONE_GPU,
        "model: llama3.2-1b\n" + _ONE_GPU,
    ),
    Rule(
        "PT251",
        "The model's configuration cannot be read",
        "model.config is the path of a Hugging Face config.json, or of its folder; it starts from the spec's folder.",
        "model: {config: missing/config.json}\n" + _ONE_GPU,
        "model: {preset: gpt2}\n" + _ONE_GPU.replace("data", "training: {sequence_length: 1024}\ndata"),
    ),
    Rule(
        "PT252",
        "The configuration is of an unknown kind of model",
        "The meaning of a config.json depends on its model_type; guessing would build another model.",
        'model: {config: ./config.json}   # {"model_type": "mamba", ...}',
        'model: {config: ./config.json}   # {"model_type": "llama", ...}',
        "command",
    ),
    Rule(
        "PT253",
        "The configuration uses a feature that partool lacks",
        "Leaving the feature out would build a model that computes something else under the same name.",
        'model: {config: ./config.json}   # {"model_type": "llama", "hidden_act": "relu", ...}',
        'model: {config: ./config.json}   # {"model_type": "llama", "hidden_act": "silu", ...}',
        "command",
    ),
    Rule(
        "PT254",
        "Keys of the configuration were ignored",
        "Dropout has no counterpart here, and unknown keys may or may not change the model.",
        'model: {config: ./config.json}   # {"model_type": "llama", "attention_dropout": 0.1, ...}',
        'model: {config: ./config.json}   # {"model_type": "llama", "attention_dropout": 0.0, ...}',
        "command",
    ),
    Rule(
        "PT255",
        "Layers for multi-token prediction are not trained",
        "DeepSeek-V3's folders hold a further layer that predicts a second token (arXiv 2412.19437, section 2.2). "
        "partool trains the model without it.",
        'model: {config: ./config.json}   # {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, ...}',
        'model: {config: ./config.json}   # {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0, ...}',
        "command",
    ),
    Rule(
        "PT402",
        "A field that the model's activation or attention does not read",
        "swiglu_limit and swiglu_alpha are numbers of the clamped gate of GPT-OSS. Sinks are scores beside those of a "
        "head's keys; latent attention has none.",
        BASE.replace("heads: 4", "heads: 4, swiglu_limit: 7"),
        BASE.replace("heads: 4", "heads: 4, activation: swiglu_clamped, swiglu_limit: 7"),
    ),
    Rule(
        "PT239",
        "A field that contradicts latent attention",
        "In latent attention a head is as wide as its two parts together, every head has keys and values of its own, "
        "and norms are on the latents (arXiv 2405.04434).",
        BASE.replace("heads: 4", "heads: 4, kv_heads: 2, " + _LATENT),
        BASE.replace("heads: 4", "heads: 4, " + _LATENT),
    ),
    Rule(
        "PT691",
        "The padding token is trained like any other",
        "In transformers, the embedding's row of pad_token_id gets no gradient where it is looked up. That matters "
        "where text holds this token; often it is the one that ends documents.",
        'model: {config: ./config.json}   # {"pad_token_id": 2, "eos_token_id": 2, ...}',
        "model: {config: ./config.json, padding_token: 2}",
        "command",
    ),
    Rule(
        "PT694",
        "The padding token is not in the vocabulary",
        "padding_token is a row of the embedding, which has one row for each token of the vocabulary.",
        BASE.replace("vocab: 256", "vocab: 256, padding_token: 256"),
        BASE.replace("vocab: 256", "vocab: 256, padding_token: 0"),
    ),
    Rule(
        "PT692",
        "Special tokens of the configuration do not reach exports",
        "An exported folder names the token that ends a text, so that generate() stops. Ids outside the vocabulary "
        "would make that folder unusable.",
        'model: {config: ./config.json, vocab: 512}   # {"eos_token_id": 50256, ...}',
        'model: {config: ./config.json, vocab: 512}   # {"eos_token_id": 2, ...}',
        "command",
    ),
    Rule(
        "PT257",
        "Sequences are longer than the model's positions",
        "Learned positions end at max_position; rotary ones go on, but the model was not trained on them.",
        "model: gpt2\n" + _ONE_GPU + "training: {sequence_length: 2048}\n",
        "model: gpt2\n" + _ONE_GPU + "training: {sequence_length: 1024}\n",
    ),
    Rule(
        "PT258",
        "The vocabulary is smaller than the data's",
        "The embedding has one row for each token that the tokenizer, or a token file, can give.",
        BASE.replace("vocab: 256", "vocab: 100"),
        BASE,
    ),
    Rule(
        "PT259",
        "The batch cannot be split evenly over the ranks",
        "Every rank works on the same number of sequences, in micro-batches of the same size.",
        _gpus("parallel: {tensor: 1, pipeline: 1, sequence: 1}\ntraining: {global_batch: 7}"),
        _gpus("training: {global_batch: 8}"),
    ),
    Rule(
        "PT260",
        "No such accelerator",
        "The catalog has no figures for the device. memory_gib, peak_tflops and memory_gb_per_s describe any other.",
        _MODEL + "hardware: {accelerator: h999}\n" + _DATA,
        _MODEL + "hardware: {accelerator: h999, memory_gib: 40, peak_tflops: 400, memory_gb_per_s: 1500}\n" + _DATA,
    ),
    Rule(
        "PT261",
        "No such fabric",
        "The network between nodes decides what data parallelism costs; fabric_gb_per_s replaces the catalog's figure.",
        _MODEL + "hardware: {accelerator: h100-sxm, fabric: infinband}\n" + _DATA,
        _MODEL + "hardware: {accelerator: h100-sxm, fabric: ib-ndr}\n" + _DATA,
    ),
    Rule(
        "PT262",
        "Figures of the hardware contradict each other",
        "No device exceeds its peak, one pair's link is at most all links together, and a catalog device keeps its "
        "backend.",
        _MODEL + "hardware: {accelerator: h100-sxm, achievable_tflops: 1200}\n" + _DATA,
        _MODEL + "hardware: {accelerator: h100-sxm, achievable_tflops: 700}\n" + _DATA,
    ),
    Rule(
        "PT263",
        "The accelerator does not compute in this precision",
        "Emulation would be many times slower; older devices have fp16 but no bf16.",
        _MODEL + "hardware: {accelerator: v100-32}\n" + _DATA + "training: {precision: bf16}\n",
        _MODEL + "hardware: {accelerator: v100-32}\n" + _DATA + "training: {precision: fp16}\n",
    ),
    Rule(
        "PT264",
        "More pipeline stages than layers",
        "A stage holds at least one layer.",
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: h100-sxm, per_node: 4}\n"
        + _DATA
        + "parallel: {pipeline: {stages: 4}}\n",
        "model: {layers: 4, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: h100-sxm, per_node: 4}\n"
        + _DATA
        + "parallel: {pipeline: {stages: 4}}\n",
    ),
    Rule(
        "PT266",
        "Experts cannot be split over the ranks",
        "Expert parallelism gives every rank the same number of experts, or with expert_tensor a part of each of them; "
        "a dense model has none. The expert × expert_tensor ranks share one copy of the training state, and ranks that "
        "hold the same parts shard the state of these, so ZeRO is 1, 2 or 3.",
        _gpus("parallel: {expert: 2}"),
        _gpus("parallel: {expert: 1}"),
    ),
    Rule(
        "PT438",
        "Tokens cannot cross to each node once",
        "With expert_exchange: node_first a token crosses once to each node, to the rank that has the sender's place "
        "there, and spreads from this rank. So the expert × expert_tensor ranks are all ranks of two nodes or more, or "
        "of two racks whose devices the fast link joins, and each of these has several ranks.",
        "model: mixtral-8x7b\nhardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}\n"
        + _DATA
        + "parallel: {expert: 8, expert_exchange: node_first}\n",
        "model: mixtral-8x7b\nhardware: {accelerator: h100-sxm, nodes: 4, per_node: 4}\n"
        + _DATA
        + "parallel: {expert: 8, expert_exchange: node_first}\n",
    ),
    Rule(
        "PT267",
        "The parallel degrees do not divide the devices",
        "Tensor, pipeline and sequence degrees multiply to the ranks of one copy of the model; copies must use all "
        "devices.",
        _MODEL + "hardware: {accelerator: h100-sxm, per_node: 6}\n" + _DATA + "parallel: {tensor: 4}\n",
        _MODEL + "hardware: {accelerator: h100-sxm, per_node: 8}\n" + _DATA + "parallel: {tensor: 4}\n",
    ),
    Rule(
        "PT268",
        "ZeRO with a single data-parallel rank",
        "ZeRO shards the state over data-parallel ranks; with one of them it changes nothing.",
        _MODEL + _ONE_GPU + "parallel: {data: {zero: 2}}\n",
        _gpus("parallel: {data: {zero: 2}}"),
    ),
    Rule(
        "PT269",
        "The shard group does not divide the data-parallel ranks",
        "Hybrid sharding cuts the data-parallel ranks into equal groups; each group shares one copy of the state.",
        _MODEL + "hardware: {accelerator: h100-sxm, per_node: 8}\n" + _DATA + "parallel: {data: {zero: 3, shard: 3}}\n",
        _MODEL + "hardware: {accelerator: h100-sxm, per_node: 8}\n" + _DATA + "parallel: {data: {zero: 3, shard: 4}}\n",
    ),
    Rule(
        "PT270",
        "Compiled kernels for an accelerator that has none",
        "Kernels are compiled and configured for some architectures only; elsewhere torch computes the same.",
        _MODEL + _ONE_GPU.replace("h100-sxm", "v100-16") + "training: {precision: fp16}\nkernels: {mode: native}\n",
        _MODEL + _ONE_GPU + "kernels: {mode: native}\n",
    ),
    Rule(
        "PT271",
        "The list of recompute policies does not fit the model",
        "A list names one policy per layer; one word stands for all of them.",
        _gpus("parallel: {recompute: [full]}"),
        _gpus("parallel: {recompute: [full, none]}"),
    ),
    Rule(
        "PT272",
        "An inner width cannot be split evenly over the tensor-parallel ranks",
        "Each rank gets ceil(width / ranks) columns of the feed-forward network, the last ones the rest; all ranks "
        "wait for the widest.",
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256, ffn_hidden: 33}\nhardware: {accelerator: h100-sxm, "
        "per_node: 4}\n" + _DATA + "parallel: {tensor: 4}\n",
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256, ffn_hidden: 96}\nhardware: {accelerator: h100-sxm, "
        "per_node: 4}\n" + _DATA + "parallel: {tensor: 4}\n",
    ),
    Rule(
        "PT273",
        "No layout meets all constraints at once",
        "Each value of the spec is legal by itself, but no choice of the open ones satisfies all constraints.",
        "model: {layers: 2, hidden: 64, heads: 1, vocab: 256}\nhardware: {accelerator: h100-sxm, per_node: 7}\n"
        + _DATA
        + "training: {sequence_length: 60, global_batch: 8}\n",
        "model: {layers: 2, hidden: 64, heads: 1, vocab: 256}\nhardware: {accelerator: h100-sxm, per_node: 7}\n"
        + _DATA
        + "training: {sequence_length: 60, global_batch: 14}\n",
    ),
    Rule(
        "PT274",
        "Offload where device and host share their memory",
        "On the CPU there is no other memory to move state to: cpu saves nothing there and serves for trials; nvme "
        "does save memory. Accelerators that share their memory with the host cannot offload at all.",
        _MODEL + "hardware: {accelerator: cpu, per_node: 1}\n" + _DATA + "parallel: {offload: {optimizer: cpu}}\n",
        _MODEL + "hardware: {accelerator: cpu, per_node: 1}\n" + _DATA + "parallel: {offload: {optimizer: none}}\n",
    ),
    Rule(
        "PT275",
        "More devices than any cluster has",
        "Half a million devices is twice the largest cluster known; a larger number is taken for a typing error.",
        _MODEL + "hardware: {accelerator: h100-sxm, nodes: 99999}\n" + _DATA,
        _MODEL + "hardware: {accelerator: h100-sxm, nodes: 1, per_node: 1}\n" + _DATA,
    ),
    Rule(
        "PT277",
        "The accelerator has no such slice",
        "Each accelerator with MIG has profiles of its own, named after its share of multiprocessors and its memory.",
        _MODEL + "hardware: {accelerator: h100-sxm, slice: 3g.20gb}\n" + _DATA,
        _MODEL + "hardware: {accelerator: h100-sxm, slice: 3g.40gb}\n" + _DATA,
    ),
    Rule(
        "PT278",
        "Slices that train together",
        "A process sees one MIG slice, and slices have neither NVLink nor peer access: a plan has one slice per node. "
        "Over the network NCCL joins slices experimentally since 2.32 (NVIDIA/nccl #1716).",
        _MODEL + "hardware: {accelerator: h100-sxm, slice: 1g.10gb, per_node: 7}\n" + _DATA,
        _MODEL + "hardware: {accelerator: h100-sxm, slice: 1g.10gb, per_node: 1}\n" + _DATA,
    ),
    Rule(
        "PT279",
        "A whole node for one slice",
        "launch.slurm.exclusive is true by default and keeps all devices of a node from other jobs, of which the plan "
        "uses one slice.",
        _MODEL + "hardware: {accelerator: h100-sxm, slice: 1g.10gb}\n" + _DATA + "launch: {target: slurm}\n",
        _MODEL
        + "hardware: {accelerator: h100-sxm, slice: 1g.10gb}\n"
        + _DATA
        + "launch: {target: slurm, slurm: {exclusive: false, partition: mig, time: '1:00:00'}}\n",
    ),
    Rule(
        "PT463",
        "The global batch leaves no good layout",
        "Every data-parallel rank has the same number of sequences. A batch that has few divisors in common with the "
        "ranks, such as a prime, makes them share layers, matrices or sequences, which costs messages. A batch beside "
        "it is proposed if it saves 5 % of the time per token or more.",
        AWKWARD + "training: {global_batch: 127, sequence_length: 2048}\n",
        AWKWARD + "training: {global_batch: 128, sequence_length: 2048}\n",
    ),
    Rule(
        "PT276",
        "Fewer devices would be as fast",
        "A plan uses all devices of the spec. Where a step has little work, more devices mean more messages and less "
        "compute between them. Where the passes alone would not take longer, seven eighths to a quarter of the nodes "
        "are searched as well; the finding names a layout on them whose step takes at most 2 % longer.",
        _SMALL_STEP + "hardware: {accelerator: h100-sxm, nodes: 2, per_node: 4, fabric: ethernet-100g}\n" + _DATA,
        _SMALL_STEP + "hardware: {accelerator: h100-sxm, nodes: 1, per_node: 4}\n" + _DATA,
    ),
    Rule(
        "PT280",
        "The calibration cannot be read",
        "hardware.profile is the path, from the spec's folder, of a file that partool calibrate wrote; without it, "
        "plans look for calibration.json beside the runs. Without calibration the catalog's figures are used.",
        "partool plan mine.yaml --set hardware.profile=missing.json",
        "partool calibrate --out machine.json && partool plan mine.yaml --set hardware.profile=machine.json",
        "command",
    ),
    Rule(
        "PT281",
        "The calibration is of another version",
        "Figures of another version may have another meaning.",
        "partool plan mine.yaml --set hardware.profile=from-an-old-partool.json",
        "partool calibrate --out machine.json && partool plan mine.yaml --set hardware.profile=machine.json",
        "command",
    ),
    Rule(
        "PT282",
        "The calibration is of another machine",
        "Figures of one machine say nothing about another. Accelerators are compared by name, CPUs by processor and "
        "number of cores.",
        "partool plan mine.yaml --set hardware.accelerator=h100-sxm --set hardware.profile=laptop.json",
        "partool calibrate && partool plan mine.yaml --set hardware.accelerator=auto",
        "command",
    ),
    Rule(
        "PT283",
        "The calibration lacks the plan's precision",
        "The rate of matrix products is then the catalog's; the other figures are measured.",
        "partool plan mine.yaml --set training.precision=fp64",
        "partool plan mine.yaml --set training.precision=bf16",
        "command",
    ),
    Rule(
        "PT284",
        "The machine could not be measured",
        "The measuring processes failed; their standard error output says why.",
        "partool calibrate --ranks 1000",
        "partool calibrate --ranks 2",
        "command",
    ),
    Rule(
        "PT285",
        "No finished run to learn from",
        "A run counts only if this version predicted it with the machine's present figures and it made ten steps or "
        "more beside warm-up, validations and checkpoints. Runs from before a calibration were predicted without it.",
        "partool calibrate && partool calibrate --from-runs",
        "partool calibrate && partool launch mine.yaml && partool calibrate --from-runs",
        "command",
    ),
    Rule(
        "PT286",
        "A table of runs cannot be read",
        "partool plan --against-runs reads CSV files in UTF-8 with a header: commas between cells, a row per run.",
        "partool plan --against-runs runs.xlsx",
        "partool plan --against-runs runs.csv",
        "command",
    ),
    Rule(
        "PT287",
        "A table of runs lacks columns",
        "A prediction needs the model, the devices, the length of sequences and the batch, and a measurement to be "
        "compared with. docs/guide/own-runs.md lists the columns.",
        "printf 'model,gpu\\nllama3-8b,H100\\n' > runs.csv && partool plan --against-runs runs.csv",
        "partool plan --against-runs tests/data/measured_runs.csv",
        "command",
    ),
    Rule(
        "PT288",
        "No row of a table of runs can be used",
        "Rows that cannot be priced are listed with the line and the reason. A scalar comes from three rows or more of "
        "one device and code base that leave no setting open.",
        "partool plan --against-runs one-row.csv --calibrate",
        "partool plan --against-runs one-row.csv",
        "command",
    ),
    Rule(
        "PT301",
        "No layout fits into memory",
        "The message lists the largest memory terms of the smallest layout, and changes with which a layout fits.",
        "model: deepseek-v3\n" + _ONE_GPU,
        "model: llama3.2-1b\n" + _ONE_GPU,
    ),
    Rule(
        "PT302",
        "The plan may not fit after all",
        "Predictions of memory have an error. A plan near the limit can run for hours and then fail at a higher peak.",
        "model: llama3.2-3b\nhardware: {accelerator: a100-80, per_node: 1, memory_gib: 59}\n"
        + _DATA
        + "training: {sequence_length: 8192, global_batch: 8}\n"
        "parallel: {micro_batch: 2, recompute: full, offload: {optimizer: none, activations: none}}\n"
        "limits: {memory_headroom: 0.0}\n",
        "model: llama3.2-3b\nhardware: {accelerator: a100-80, per_node: 1}\n"
        + _DATA
        + "training: {sequence_length: 8192, global_batch: 8}\n"
        "parallel: {micro_batch: 2, recompute: full, offload: {optimizer: none, activations: none}}\n",
    ),
    Rule(
        "PT401",
        "Tensor parallelism through symmetric memory can be planned, not run",
        "The plan can be read and compared; launch refuses it. The other overlaps can run.",
        _gpus("parallel: {tensor: {degree: 2, overlap: symmetric}}"),
        _gpus("parallel: {tensor: {degree: 2, overlap: backward}}"),
    ),
    Rule(
        "PT405",
        "Layers of experts cannot be combined with this",
        "Experts run with all ZeRO stages, tensor ranks, pipelines of activations and sequence methods but dsp, and "
        "not with weights that travel (WeiPipe) or products in fp8. The plan can be read; launch refuses it.",
        _EXPERTS + _TWO_GPUS + "training: {precision: fp8}\n",
        _EXPERTS + _TWO_GPUS + "training: {precision: bf16}\n",
    ),
    Rule(
        "PT406",
        "Adapters cannot be combined with this",
        "Adapters run with all ZeRO stages, tensor ranks in one dimension, pipelines of activations, sequence methods "
        "and expert ranks, and with optimizers that update each element by itself. Their dropout does not run with the "
        "sequence method dsp, and in models of transformers not on tensor ranks or in tiles. The plan can be read; "
        "launch refuses it.",
        _MODEL + _TWO_GPUS + "adapter: lora\noptimizer: {name: muon}\n",
        _MODEL + _TWO_GPUS + "adapter: lora\noptimizer: {name: adamw}\n",
    ),
    Rule(
        "PT407",
        "DoRA on experts",
        "Experts' matrices are stacked, their products are grouped, and PEFT refuses DoRA there, too. Matrices of "
        "attention and of shared experts can have it.",
        _EXPERTS + _TWO_GPUS + "adapter: dora\n",
        _EXPERTS + _TWO_GPUS + "adapter: {kind: dora, targets: [q, k, v, o]}\n",
    ),
    Rule(
        "PT408",
        "Matrices of a model of transformers that cannot have an adapter",
        "Linear modules of the layers can. The matrices of experts that transformers stacks in one tensor, and GPT-2's "
        "Conv1D, are others; partool's own decoder (model.config) has adapters for both.",
        "model: {hf: gpt2}\nadapter: {targets: [c_attn]}   # a Conv1D",
        "model: {config: gpt2, weights: {source: hf, path: gpt2}}\nadapter: {targets: [q, k, v]}",
        "command",
    ),
    Rule(
        "PT412",
        "DoRA beside a base of few bits",
        "DoRA divides by the norms of the rows of W + scale · B A, and begins with those of W. A base of 4 or 8 bits "
        "is never in memory as a matrix that these could be taken from.",
        "adapter: {kind: dora, base: nf4}",
        "adapter: {kind: lora, base: nf4}",
        "command",
    ),
    Rule(
        "PT292",
        "An adapter of a model that your code builds",
        "The adapter's sum is a term of projections, of partool's decoder and of linear modules of transformers. What "
        "a module of yours computes with its matrices is not known.",
        "model: {module: my_model:Decoder}\nadapter: lora",
        "model: {hf: Llama-3.2-1B}\nadapter: lora",
        "command",
    ),
    Rule(
        "PT293",
        "A pattern of the adapter that matches nothing",
        "A pattern that matches no matrix or no parameter is misspelt: it would train less than the spec says.",
        _MODEL + _TWO_GPUS + "adapter: {targets: [q, k, queries]}\n",
        _MODEL + _TWO_GPUS + "adapter: {targets: [q, k, layers.*.ffn.up]}\n",
    ),
    Rule(
        "PT294",
        "Dropout on adapters of experts",
        "Experts get few rows each, and PEFT refuses dropout there, too.",
        _EXPERTS + _TWO_GPUS + "adapter: {dropout: 0.1}\n",
        _EXPERTS + _TWO_GPUS + "adapter: {dropout: 0.1, targets: [q, k, v, o]}\n",
    ),
    Rule(
        "PT297",
        "A base of few bits for a model that other code builds",
        "Matrices in int8 and nf4 belong to partool's own decoder; the linear layers of transformers and of your own "
        "code multiply by a weight in the type of computation.",
        "model: {hf: Llama-3.2-1B}\nadapter: {base: nf4}   # transformers builds the model",
        "model: {config: Llama-3.2-1B, weights: {source: hf, path: Llama-3.2-1B}}\nadapter: {base: nf4}",
        "command",
    ),
    Rule(
        "PT298",
        "adapter: auto, and no way to tune the model fits",
        "All weights, and adapters beside bases in bf16, int8 and nf4 were tried: even the smallest needs more memory "
        "per rank than may be used.",
        "model: llama3-8b\n" + _ONE_GPU + "parallel: {offload: none}\nlimits: {memory_headroom: 0.95}\nadapter: auto\n",
        "model: llama3-8b\n" + _ONE_GPU + "parallel: {offload: none}\nadapter: auto\n",
    ),
    Rule(
        "PT299",
        "double_quant without base: nf4",
        "Double quantisation stores the scales of 4-bit blocks in 8 bits. A base in int8 has one scale per row, and "
        "bf16 has none.",
        _MODEL + _TWO_GPUS + "adapter: {base: int8, double_quant: true}\n",
        _MODEL + _TWO_GPUS + "adapter: {base: nf4, double_quant: true}\n",
    ),
    Rule(
        "PT340",
        "A stop has less time than a step and its checkpoint may take",
        "A request to stop takes effect as a step ends, and the checkpoint that follows has to be complete before the "
        "ranks are killed. The plan derives the time from the step at its upper error bar and the rate of the storage.",
        _SLOW_STORAGE + "launch: {shutdown_timeout_s: 2}\n",
        _SLOW_STORAGE + "launch: {shutdown_timeout_s: auto}\n",
    ),
    Rule(
        "PT341",
        "Machines that end sooner after a notice than a step and its checkpoint may take",
        "Clouds take spot machines back 15 to 120 s after a notice, and partool cannot lengthen that. The run goes on "
        "from its last checkpoint, so that checkpoint.every decides how much is trained again.",
        _SLOW_STORAGE + "launch:\n  target: k8s\n  image: 'registry.example/train:1'\n"
        "  k8s: {storage: 'pvc:runs', node_selector: {cloud.google.com/gke-spot: 'true'}}\n",
        _SLOW_STORAGE + "launch:\n  target: k8s\n  image: 'registry.example/train:1'\n"
        "  k8s: {storage: 'pvc:runs', node_selector: {eks.amazonaws.com/capacityType: SPOT}}\n",
    ),
    Rule(
        "PT303",
        "The model could not be traced",
        "plan --trace runs the runtime on fake tensors, which needs torch and a model that the runtime can build.",
        "partool plan --trace spec.yaml   # in an environment without torch",
        "partool plan spec.yaml",
        "command",
    ),
    Rule(
        "PT345",
        "Host memory does not hold a save",
        "A checkpoint that is written in the background is first copied into host memory, which a pod's or a job's "
        "limit may not hold: the kernel then ends the ranks at their first save. Written block by block, it takes "
        "memory for two blocks, and training waits.",
        _SMALL_HOST + "checkpoint: {mode: async}\n",
        _SMALL_HOST + "checkpoint: {mode: sync}\n",
    ),
    Rule(
        "PT346",
        "Pods without the nodes' network adapters",
        "A pod's own network is a software network over TCP. Adapters for RDMA (InfiniBand, RoCE, EFA, Slingshot) are "
        "in a pod only if it asks for them; a plan is priced on the fabric of its machines.",
        _PODS + "  k8s: {storage: 'pvc:runs'}\n",
        _PODS + "  k8s: {storage: 'pvc:runs', rdma: {resource: rdma/hca_shared_devices_a, count: 8}}\n",
    ),
    Rule(
        "PT460",
        "Settings of ZeRO-3 gathers with another ZeRO stage",
        "ZeRO-3 gathers parameters before each use. The other stages keep them for the whole step.",
        _gpus("parallel: {data: {zero: 1, prefetch: 2}}"),
        _gpus("parallel: {data: {zero: 3, prefetch: 2}}"),
    ),
    Rule(
        "PT461",
        "A leaf pattern matches no module",
        "parallel.data.leaves are patterns of module paths in the model; partool's own are listed in "
        "docs/design/architecture.md.",
        _gpus("parallel: {data: {leaves: ['*.experts']}}"),
        _gpus("parallel: {data: {leaves: ['layers.*.ffn']}}"),
    ),
    Rule(
        "PT462",
        "A leaf inside a compiled block",
        "Hooks gather and reduce a leaf, and a compiled program would have to stop at each hook.",
        _gpus("parallel: {compile: block, data: {leaves: ['layers.*.ffn']}}"),
        _gpus("parallel: {compile: none, data: {leaves: ['layers.*.ffn']}}"),
    ),
    Rule(
        "PT464",
        "A leaf pattern matches no module that is called",
        "A leaf is a module inside a layer that is called as a whole; lists and dictionaries of modules never are.",
        "parallel: {data: {leaves: ['layers.*.experts.*']}}   # of a dense model",
        "parallel: {data: {leaves: []}}",
        "command",
    ),
    Rule(
        "PT289",
        "A setting that the job does not read",
        "An evaluation has no optimizer and nothing frozen, and saves its sums by itself: no setting would act.",
        BASE + "job: evaluate\noptimizer: {lr: 1e-3}\n",
        BASE + "job: evaluate\n",
    ),
    Rule(
        "PT290",
        "A value that the job does not have",
        "An evaluation only goes forward, in partool: nothing is saved for a backward pass, recomputed or offloaded.",
        BASE + "job: evaluate\nparallel: {recompute: full}\n",
        BASE + "job: evaluate\nparallel: {recompute: none}\n",
    ),
    Rule(
        "PT291",
        "An evaluation of random weights",
        "Without trained weights the loss is that of a guess, ln of the vocabulary. It is useful for trials only.",
        BASE + "job: evaluate\n",
        BASE.replace("vocab: 256}", "vocab: 256, weights: {source: checkpoint, path: step-00000100}}")
        + "job: evaluate\n",
    ),
    Rule(
        "PT295",
        "The objective and the records do not fit",
        "dpo, orpo and simpo compare a chosen with a rejected answer, so they train on preference records and on "
        "nothing else. sft would train on rejected answers, too. Both answers of a pair share a sequence and see "
        "nothing of each other.",
        BASE + "training: {objective: dpo}\n",
        BASE + "training: {objective: sft}\n",
    ),
    Rule(
        "PT296",
        "The objective does not read this setting",
        "dpo reads beta, form, reference and, as sigmoid, smoothing; simpo beta, gamma and smoothing; orpo weight.",
        BASE + "training: {objective: {kind: sft, beta: 0.1}}\n",
        BASE + "training: {objective: sft}\n",
    ),
    Rule(
        "PT633",
        "A profile of steps or ranks that the run does not have",
        "A profile covers steps of the training, counted from 1, on ranks of the plan. Traces of many steps do not fit "
        "in memory.",
        BASE + "training: {steps: 20}\ntelemetry: {profile: {steps: [10, 30]}}\n",
        BASE + "training: {steps: 20}\ntelemetry: {profile: {steps: [10, 12]}}\n",
    ),
    Rule(
        "PT634",
        "A snapshot of memory that only GPUs have",
        "Snapshots list the blocks of the GPU's allocator.",
        BASE + "telemetry: {profile: {steps: [10, 12], memory: true}}\n",
        BASE + "telemetry: {profile: {steps: [10, 12]}}\n",
    ),
)
