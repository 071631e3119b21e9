"""Rules about a spec alone (PT2xx, PT413, PT43x, PT46x and PT47x)."""

from __future__ import annotations

from partool.diagnostics.record import BASE, Rule

_TAIL = "hardware: {accelerator: cpu, per_node: 1}\ndata: python-stdlib\n"


def _model(fields: str) -> str:
    return f"model: {{layers: 2, hidden: 64, vocab: 256, {fields}}}\n{_TAIL}"


def _grid(attention: str) -> str:
    return _model(f"heads: 4, attention: {{{attention}}}") + "training: {sequence_length: 1024}\n"


RULES: tuple[Rule, ...] = (
    Rule(
        "PT201",
        "The model is given twice",
        "A preset and a configuration file both give every field. partool does not guess which one is meant.",
        "model: {preset: llama3.2-1b, config: ./config.json}\n" + _TAIL,
        "model: {preset: llama3.2-1b}\n" + _TAIL,
    ),
    Rule(
        "PT202",
        "The model is not complete",
        "Without a preset or a configuration file, the fields must say how large the model is.",
        "model: {layers: 2, vocab: 256}\n" + _TAIL,
        BASE,
    ),
    Rule(
        "PT204",
        "Heads cannot share the key and value heads evenly",
        "Grouped-query attention gives each key and value head the same number of query heads (arXiv 2305.13245).",
        _model("heads: 4, kv_heads: 3"),
        _model("heads: 4, kv_heads: 2"),
    ),
    Rule(
        "PT205",
        "The hidden size is not a multiple of the heads",
        "Without head_dim, a head's width is hidden / heads, which must be whole.",
        _model("heads: 6"),
        _model("heads: 6, head_dim: 12"),
    ),
    Rule(
        "PT206",
        "Rotary positions need an even head width",
        "RoPE rotates pairs of dimensions (arXiv 2104.09864).",
        _model("heads: 4, head_dim: 15"),
        _model("heads: 4, head_dim: 16"),
    ),
    Rule(
        "PT207",
        "Sliding layers without a window",
        "A sliding layer attends to the last `window` tokens, so it needs the number.",
        _model("heads: 4, attention: {layer_types: [sliding, full]}"),
        _model("heads: 4, attention: {layer_types: [sliding, full], window: 128}"),
    ),
    Rule(
        "PT208",
        "A window, but no sliding layer",
        "The window would have no effect.",
        _model("heads: 4, attention: {layer_types: [full, full], window: 128}"),
        _model("heads: 4, attention: {window: 128}"),
    ),
    Rule(
        "PT209",
        "layer_types does not name every layer",
        "A list has one kind per layer; a pattern repeats.",
        _model("heads: 4, attention: {layer_types: [sliding], window: 128}"),
        _model("heads: 4, attention: {layer_types: {pattern: [sliding]}, window: 128}"),
    ),
    Rule(
        "PT210",
        "More experts per token than experts",
        "Each token goes to top_k different experts.",
        _model("heads: 4, moe: {experts: 4, top_k: 5, ffn_hidden: 32}"),
        _model("heads: 4, moe: {experts: 4, top_k: 2, ffn_hidden: 32}"),
    ),
    Rule(
        "PT240",
        "One expert per token, with weights that are normalised",
        "A weight that is divided by itself is 1 whatever the router's score, so only balancing trains the router. "
        "Switch Transformers weigh the expert's result by its score (arXiv 2101.03961, section 2.1).",
        _model("heads: 4, moe: {experts: 4, top_k: 1, ffn_hidden: 32}"),
        _model("heads: 4, moe: {experts: 4, top_k: 1, ffn_hidden: 32, normalise: false}"),
    ),
    Rule(
        "PT256",
        "Residual experts without shared experts",
        "A residual layer weighs a network that every token uses against the chosen experts (DeepSpeed-MoE, arXiv "
        "2201.05596, section 4.1.1).",
        _model("heads: 4, moe: {experts: 4, top_k: 2, ffn_hidden: 32, residual: true}"),
        _model("heads: 4, moe: {experts: 4, top_k: 2, ffn_hidden: 32, residual: true, shared_experts: 1}"),
    ),
    Rule(
        "PT237",
        "Groups of experts that cannot be chosen from",
        "Groups have the same number of consecutive experts. A token chooses all of its experts from top_groups groups "
        "(DeepSeek-V2, arXiv 2405.04434, section 2.2.2).",
        _model("heads: 4, moe: {experts: 8, top_k: 3, ffn_hidden: 32, groups: 4, top_groups: 1}"),
        _model("heads: 4, moe: {experts: 8, top_k: 3, ffn_hidden: 32, groups: 4, top_groups: 2}"),
    ),
    Rule(
        "PT413",
        "Layers whose experts cannot differ so",
        "A key of moe.layers names layers that have experts, each layer once: a layer or an inclusive range, counted "
        "from 0. Its value says what is different there (pyramids of experts, arXiv 2201.05596, section 4.1.1).",
        _model('heads: 4, moe: {experts: 4, top_k: 2, ffn_hidden: 32, layers: {"1-2": {experts: 8}}}'),
        _model('heads: 4, moe: {experts: 4, top_k: 2, ffn_hidden: 32, layers: {"1": {experts: 8}}}'),
    ),
    Rule(
        "PT211",
        "Weights without a path",
        "Weights from a checkpoint or a Hugging Face folder need the path of that folder.",
        _model("heads: 4, weights: {source: hf}"),
        BASE,
    ),
    Rule(
        "PT212",
        "A path of weights, which are not read",
        "The run would start from random weights although a folder is named.",
        _model("heads: 4, weights: {path: /models/mine}"),
        BASE,
    ),
    Rule(
        "PT229",
        "A model that cannot be upcycled",
        "Upcycling makes each expert a copy of a dense model's network (arXiv 2212.05055). The folder holds a dense "
        "model. The experts are as wide as its network and their weights add up to 1, so that the first step starts "
        "from the dense model's results.",
        _model("heads: 4, weights: {upcycle: true}"),
        BASE,
    ),
    Rule(
        "PT213",
        "Warm-up is longer than training",
        "The learning rate would never reach its peak.",
        BASE + "training: {steps: 100}\noptimizer: {schedule: {warmup_steps: 200}}\n",
        BASE + "training: {steps: 100}\noptimizer: {schedule: {warmup_steps: 10}}\n",
    ),
    Rule(
        "PT214",
        "decay_steps with another schedule than wsd",
        "Only warm-up, stable, decay has a separate phase of decay (arXiv 2404.06395); elsewhere it has no effect.",
        BASE + "optimizer: {schedule: {kind: cosine, decay_steps: 10}}\n",
        BASE + "optimizer: {schedule: {kind: wsd, decay_steps: 10}}\n",
    ),
    Rule(
        "PT215",
        "Warm-up and decay are longer than training",
        "The two phases of wsd must fit into the steps.",
        BASE + "training: {steps: 100}\noptimizer: {schedule: {kind: wsd, warmup_steps: 60, decay_steps: 60}}\n",
        BASE + "training: {steps: 100}\noptimizer: {schedule: {kind: wsd, warmup_steps: 20, decay_steps: 60}}\n",
    ),
    Rule(
        "PT216",
        "An Adam beta outside [0, 1)",
        "The moments are exponential averages; at 1 they never forget, and the bias correction divides by zero.",
        BASE + "optimizer: {betas: [0.9, 1.0]}\n",
        BASE + "optimizer: {betas: [0.9, 0.95]}\n",
    ),
    Rule(
        "PT243",
        "Two lengths for one thing",
        "A training has so many steps, epochs or tokens, and a warm-up so many steps or such a share of them. Two of "
        "them could contradict each other.",
        BASE + "training: {steps: 100, tokens: 1000000}\n",
        BASE + "training: {tokens: 1000000}\n",
    ),
    Rule(
        "PT247",
        "A tracker is listed twice",
        "A run has one place at each tracker; its attempts continue it there.",
        BASE + "telemetry: {trackers: [wandb, {name: wandb, uri: 'https://wandb.example.com'}]}\n",
        BASE + "telemetry: {trackers: [{name: wandb, uri: 'https://wandb.example.com'}]}\n",
    ),
    Rule(
        "PT248",
        "A place that a tracker does not take",
        "W&B has a server, MLflow a database or a server, trackio and TensorBoard have a folder. MLflow's store in "
        "plain folders raises errors in newer versions.",
        BASE + "telemetry: {trackers: [{name: mlflow, uri: mlruns}]}\n",
        BASE + "telemetry: {trackers: [{name: mlflow, uri: 'sqlite:///mlflow.db'}]}\n",
    ),
    Rule(
        "PT245",
        "Data that are named twice",
        "A run reads one source or one mixture, and holds out a share of it or validates on files of their own.",
        BASE.replace("data: python-stdlib", "data: {source: python-stdlib, mix: [{source: python-stdlib}]}"),
        BASE.replace("data: python-stdlib", "data: {mix: [{source: python-stdlib}]}"),
    ),
    Rule(
        "PT246",
        "A mixture of weights and epochs",
        "Weights are shares of the sequences, epochs are passes over a source; a mixture is made by one of them.",
        BASE.replace(
            "data: python-stdlib", "data: {mix: [{source: python-stdlib, weight: 1}, {source: python-stdlib}]}"
        ),
        BASE.replace(
            "data: python-stdlib",
            "data: {mix: [{source: python-stdlib, epochs: 2}, {source: python-stdlib}]}",
        ),
    ),
    Rule(
        "PT217",
        "checkpoint.every is not an interval",
        "Checkpoints are written every so many steps, or every so much time.",
        BASE + "checkpoint: {every: half an hour}\n",
        BASE + "checkpoint: {every: 30min}\n",
    ),
    Rule(
        "PT218",
        "Validation without held-out data",
        "A loss on the training data says little about the model.",
        BASE + "training: {validation: {every: 10}}\n",
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu, per_node: 1}\n"
        "data: {source: python-stdlib, validation: 0.01}\ntraining: {validation: {every: 10}}\n",
    ),
    Rule(
        "PT219",
        "Shards without ZeRO",
        "ZeRO stage 0 replicates everything, so there is nothing that ranks could share.",
        BASE + "parallel: {data: {zero: 0, shard: 4}}\n",
        BASE + "parallel: {data: {zero: 0}}\n",
    ),
    Rule(
        "PT220",
        "data.source names no file",
        "There would be nothing to train on.",
        BASE.replace("data: python-stdlib", "data: {source: []}"),
        BASE,
    ),
    Rule(
        "PT221",
        "A name that no environment variable can have",
        "The system refuses to start a process with such a variable.",
        BASE + "launch: {env: {MY-FLAG: '1'}}\n",
        BASE + "launch: {env: {MY_FLAG: '1'}}\n",
    ),
    Rule(
        "PT222",
        "An environment variable that partool sets itself",
        "Every rank gets its own value; with one value for all, every rank would take itself for the same one.",
        BASE + "launch: {env: {RANK: '0'}}\n",
        BASE + "launch: {env: {OMP_PROC_BIND: 'true'}}\n",
    ),
    Rule(
        "PT223",
        "Chunks that the pipeline schedule does not use",
        "Several chunks of layers per rank belong to interleaved schedules, which need two or more (arXiv 2104.04473), "
        "to zb-v, which has two (arXiv 2405.15362), to hanayo, which has two per wave (SC'23), and to WeiPipe.",
        BASE + "parallel: {pipeline: {stages: 2, schedule: 1f1b, chunks: 2}}\n",
        BASE + "parallel: {pipeline: {schedule: auto, chunks: auto}}\n",
    ),
    Rule(
        "PT224",
        "Offload settings that contradict each other",
        "gpu_fraction splits an offloaded optimizer. Parameters are offloaded as ZeRO-3 shards, with their optimizer. "
        "An optimizer that cannot update in host memory stays on the device.",
        BASE + "parallel: {offload: {optimizer: none, gpu_fraction: 0.5}}\n",
        BASE + "parallel: {offload: {optimizer: none}}\n",
    ),
    Rule(
        "PT227",
        "Restarts or requeues without checkpoints",
        "A run that crashes, or whose node is lost, continues from its last complete checkpoint. With checkpoint: "
        "{every: 0} there is none before the last step or a request to stop, so that all steps are trained again.",
        BASE + "launch: {restarts: 2}\ncheckpoint: {every: 0}\n",
        BASE + "launch: {restarts: 2}\ncheckpoint: {every: auto}\n",
    ),
    Rule(
        "PT230",
        "Offload to disks without a folder",
        "Files of the optimizer's state, or of parameters, need a folder on each machine's own disks, where each rank "
        "writes its own. partool does not guess one, as the wrong disk is slow or full.",
        BASE + "parallel: {offload: {optimizer: nvme}}\n",
        BASE + "parallel: {offload: {optimizer: nvme, dir: /nvme}}\n",
    ),
    Rule(
        "PT231",
        "dir or buffers is given, but nothing is kept in files",
        "dir and buffers are for optimizer: nvme and parameters: nvme; with optimizer: auto, dir permits the use of "
        "disks.",
        BASE + "parallel: {offload: {optimizer: cpu, dir: /nvme}}\n",
        BASE + "parallel: {offload: {optimizer: auto, dir: /nvme}}\n",
    ),
    Rule(
        "PT232",
        "Settings of the host's update, but the device updates",
        "speculate, gradients, moments, bucket_mib and threads say how the host updates parameters.",
        BASE + "parallel: {offload: {optimizer: none, speculate: true}}\n",
        BASE + "parallel: {offload: {optimizer: cpu, speculate: true}}\n",
    ),
    Rule(
        "PT233",
        "undo_gib without speculate: undo",
        "Only speculate: undo copies masters and moments before it changes them. Otherwise the change is put off until "
        "the norm is known, and needs no copies.",
        BASE + "parallel: {offload: {optimizer: cpu, undo_gib: 4}}\n",
        BASE + "parallel: {offload: {optimizer: cpu, speculate: undo, undo_gib: 4}}\n",
    ),
    Rule(
        "PT234",
        "WeiPipe with offload",
        "WeiPipe sends weights from device to device while they are used; none of them is kept in host memory.",
        BASE + "parallel: {pipeline: {schedule: weipipe}, offload: {optimizer: cpu}}\n",
        BASE + "parallel: {pipeline: {schedule: 1f1b}, offload: {optimizer: cpu}}\n",
    ),
    Rule(
        "PT235",
        "A type of offloaded state that the precision does not have",
        "Gradients are sent in the type of the backward pass or of the masters; moments have the type of the masters, "
        "or bf16.",
        BASE + "training: {precision: fp32}\nparallel: {offload: {optimizer: cpu, gradients: bf16}}\n",
        BASE + "training: {precision: bf16}\nparallel: {offload: {optimizer: cpu, gradients: bf16}}\n",
    ),
    Rule(
        "PT226",
        "A setting that the optimizer does not read",
        "adamw reads betas and eps, lion betas, adagrad eps, sgd momentum, muon newton_schulz and what sgd and adamw "
        "read, lamb adapt, norm_bounds and what adamw reads, zero_one_adam and zero_one_lamb one_bit and what adamw "
        "and lamb read; the same holds for their groups.",
        BASE + "optimizer: {name: sgd, betas: [0.8, 0.9]}\n",
        BASE + "optimizer: {name: sgd, momentum: 0.8}\n",
    ),
    Rule(
        "PT241",
        "Muon for a model that transformers builds",
        "Muon orthogonalises each matrix by itself. Of partool's own decoder it is known which parameters are "
        "matrices, and which stack several of them; modules of transformers fuse and stack them in ways of their own.",
        "model: {hf: ./my-llama}\ndata: python-stdlib\noptimizer: {name: muon}\n",
        BASE + "optimizer: {name: muon}\n",
    ),
    Rule(
        "PT242",
        "0/1 Adam with a choice that needs equal weights in every step",
        "Between two exchanges each data-parallel rank trains weights of its own. ZeRO 1 to 3, sequence parallelism, "
        "schedules that move weights and experts are not built for that.",
        BASE + "optimizer: {name: zero_one_adam}\nparallel: {data: {zero: 1}}\n",
        BASE + "optimizer: {name: zero_one_adam}\nparallel: {data: {zero: 0}}\n",
    ),
    Rule(
        "PT244",
        "Bounds of norms in the wrong order",
        "LAMB scales a step by the norm of the weights, limited to norm_bounds: the lowest norm and the highest one.",
        BASE + "optimizer: {name: lamb, norm_bounds: [10, 0]}\n",
        BASE + "optimizer: {name: lamb, norm_bounds: [0, 10]}\n",
    ),
    Rule(
        "PT236",
        "gpu_fraction with offloaded parameters",
        "State that stays on the device updates the weights there; offloaded parameters have no weights on the device.",
        BASE + "parallel: {data: {zero: 3}, offload: {parameters: cpu, gpu_fraction: 0.5}}\n",
        BASE + "parallel: {data: {zero: 3}, offload: {parameters: cpu, gpu_fraction: 0}}\n",
    ),
    Rule(
        "PT238",
        "A field that the kind of RoPE scaling does not read",
        "llama3 reads low_freq_factor and high_freq_factor; yarn reads beta_fast, beta_slow, mscale, mscale_all_dim.",
        _model("heads: 4, rope_scaling: {kind: yarn, factor: 4, original_max_position: 64, high_freq_factor: 4}"),
        _model("heads: 4, rope_scaling: {kind: yarn, factor: 4, original_max_position: 64, beta_fast: 16}"),
    ),
    Rule(
        "PT431",
        "The layers per stage do not add up to the model's",
        "layers has one number per stage, ranks times chunks in all, and they sum up to the layers of the model.",
        BASE + "parallel: {pipeline: {stages: 2, schedule: 1f1b, layers: [2]}}\n",
        BASE + "parallel: {pipeline: {stages: 1, layers: [2]}}\n",
    ),
    Rule(
        "PT434",
        "Compiled blocks with a schedule that splits backward passes",
        "zb-h1, zb-v and weipipe-zb delay the gradients of weights; a compiled block has one undivided backward pass.",
        BASE + "parallel: {compile: block, pipeline: {schedule: zb-h1}}\n",
        BASE + "parallel: {compile: none, pipeline: {schedule: zb-h1}}\n",
    ),
    Rule(
        "PT435",
        "WeiPipe cannot run with this setting",
        "WeiPipe moves weights; each has one owner that keeps its whole state, and stages are recomputed.",
        BASE + "parallel: {data: {zero: 2}, pipeline: {schedule: weipipe}}\n",
        BASE + "parallel: {data: {zero: 0}, pipeline: {schedule: weipipe}}\n",
    ),
    Rule(
        "PT436",
        "in_flight or waves with a schedule that does not read it",
        "Only hanayo runs in waves; only hanayo and zb-v can be made for fewer micro-batches in flight.",
        BASE + "parallel: {pipeline: {schedule: 1f1b, in_flight: 2}}\n",
        BASE + "parallel: {pipeline: {schedule: 1f1b}}\n",
    ),
    Rule(
        "PT465",
        "A field that the sequence method does not read",
        "ulysses sizes the inner groups of usp; teams and inside are for startrail; zigzag is for methods that bring "
        "keys to the queries, and dsp cuts rows and columns in its own order. With degree: 1 none of them is read.",
        BASE + "parallel: {sequence: {method: ring, degree: 1, teams: 2}}\n",
        BASE + "parallel: {sequence: {method: ring, degree: auto, order: zigzag}}\n",
    ),
    Rule(
        "PT472",
        "attend: document without packing",
        "Without packing each sequence is one document, cut or padded, so there is nothing to separate.",
        BASE.replace("data: python-stdlib", "data: {source: python-stdlib, pack: false, attend: document}"),
        BASE.replace("data: python-stdlib", "data: {source: python-stdlib, attend: document}"),
    ),
    Rule(
        "PT475",
        "Row or column layers without a grid",
        "Row and column layers attend to earlier tokens of a token's row or column (arXiv 1912.12180), so the rows and "
        "columns of a sequence must be known.",
        _grid("layer_types: {pattern: [row, column]}"),
        _grid("grid: [16, 64], layer_types: {pattern: [row, column]}"),
    ),
    Rule(
        "PT476",
        "A grid, but no row or column layer",
        "The grid would have no effect.",
        _grid("grid: [16, 64]"),
        _grid("grid: [16, 64], layer_types: [row, column]"),
    ),
    Rule(
        "PT477",
        "The grid has another number of tokens than a sequence",
        "Every token of a sequence has one place on the grid: rows times columns must be sequence_length.",
        _grid("grid: [16, 60], layer_types: [row, column]"),
        _grid("grid: [16, 64], layer_types: [row, column]"),
    ),
)
