"""Rules about models that transformers builds (PT447 to PT454, PT483, PT484, PT590, PT591, PT643 to PT654)."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

RULES: tuple[Rule, ...] = (
    command_rule(
        "PT447",
        "Weights beside the model are not used",
        "Unless model.weights names a source, a model starts from random weights, whatever its folder holds. A folder "
        "with weights mostly means that training should continue from them.",
        "model: {hf: ./my-llama}   # with model.safetensors",
        "model: {hf: ./my-llama, weights: {source: hf}}",
    ),
    command_rule(
        "PT448",
        "The model's graph cannot be shared by ranks",
        "Sequence method compiled needs the whole forward pass as one graph whose attention is torch's function (or "
        "goes through the attention interface of transformers), and in which nothing else mixes tokens. The message "
        "names the module and the line of the model's code.",
        "model: {hf: ./bloom}\nparallel: {sequence: {method: compiled, degree: 4}}   # its products are written out",
        "model: {hf: ./falcon}\nparallel: {sequence: {method: compiled, degree: 4}}",
    ),
    command_rule(
        "PT449",
        "A captured graph beside settings that change modules",
        "With sequence method compiled, layers run a graph that calls no modules within them. Tensor parallelism, "
        "pipelines, compile: block, tiles, fp8 and leaves replace such modules.",
        "model: {hf: ./falcon}\nparallel: {sequence: {method: compiled, degree: 2}, tensor: 2}",
        "model: {hf: ./falcon}\nparallel: {sequence: {method: compiled, degree: 4}}",
    ),
    command_rule(
        "PT655",
        "A module of your own that cannot be built or read",
        "model.module names a class that takes the keywords of model.config, has an nn.ModuleList of layers, maps "
        "tokens to logits, and attends by torch's scaled_dot_product_attention; partool reads its sizes from the graph "
        "of its forward pass.",
        "model: {module: nets.tiny:Missing}",
        "model: {module: nets.tiny:Tiny, config: {width: 64}}",
    ),
    command_rule(
        "PT450",
        "The runtime cannot inspect the model",
        "A separate process builds the model with transformers and lists its parts. It needs torch, transformers and a "
        "folder with a complete config.json; weights are not read.",
        "model: {hf: ./no-such-folder}",
        "model: {hf: ./my-llama}   # holds config.json",
    ),
    command_rule(
        "PT451",
        "The model differs from what is priced or trained",
        "Memory and time are predicted for a decoder with the same sizes; where the number of parameters differs, "
        "predictions are off by about as much. Training does not include a loss that balances experts.",
        "model: {hf: ./unusual-model}",
        "model: {hf: ./my-llama}",
    ),
    command_rule(
        "PT452",
        "The loss cannot be computed from the hidden state",
        "partool never holds all logits: it computes the loss in pieces from the last hidden state and the output "
        "matrix. A model that scales or caps its logits in between would be trained on another loss.",
        "model: {hf: ./gemma-2-2b}   # caps its logits",
        "model: {hf: ./qwen3-0.6b}",
    ),
    command_rule(
        "PT453",
        "The model cannot be cut into pipeline stages",
        "A stage calls the model's own code with a hidden state in place of tokens. A model that changes hidden states "
        "outside its layers, or looks up learned positions, would do so again on every stage.",
        "model: {hf: ./gpt2}\nparallel: {pipeline: 2}",
        "model: {config: ./gpt2}   # partool's own decoder\nparallel: {pipeline: 2}",
    ),
    command_rule(
        "PT454",
        "Only partool's own decoder supports this",
        "transformers builds and computes the model as its config.json says. Compiled blocks, norms on shares of the "
        "sequence, two-dimensional tensor parallelism and WeiPipe schedules need partool's decoder.",
        "model: {hf: ./my-llama}\nparallel: {tensor: {degree: 2, sequence_norms: true}}",
        "model: {config: ./my-llama}\nparallel: {tensor: {degree: 2, sequence_norms: true}}",
    ),
    command_rule(
        "PT483",
        "The model's attention cannot be replaced",
        "Sequence parallelism, and documents that do not attend to each other, need attention that knows every token's "
        "position. The model's layers must look up their attention in transformers by name, with causal masks, with or "
        "without a window, and without sinks, caps or biases of scores.",
        "model: {hf: ./gpt-oss-20b}\nparallel: {sequence: 4}",
        "model: {hf: ./qwen3-8b}\nparallel: {sequence: 4}",
    ),
    command_rule(
        "PT484",
        "Attention dropout with keys that arrive in parts",
        "Where keys arrive block by block, or rank by rank, sums of exponentials are merged, but dropout needs all "
        "weights of a query at once. With ulysses each rank holds whole sequences for some heads, and drops weights as "
        "one process would.",
        "model: {hf: ./gpt2}   # attn_pdrop: 0.1\nparallel: {sequence: {method: ring, degree: 4}}",
        "model: {hf: ./gpt2}\nparallel: {sequence: {method: ulysses, degree: 4}}",
    ),
    command_rule(
        "PT590",
        "The model's folder brings code of its own",
        "Its config.json (auto_map) names classes in Python files beside it, and the installed transformers knows no "
        "model of that type. Such code could do anything that you can, so it runs only where --trust-remote-code is "
        "given on the command line, for each plan, render and launch. A spec or a plan cannot allow it.",
        "partool plan mine.yaml   # model: {hf: ./downloaded}",
        "partool plan mine.yaml --trust-remote-code",
    ),
    command_rule(
        "PT591",
        "The model's code is not the one that was allowed",
        "A plan holds the hashes of a folder's Python files, or of the files that a module of yours consists of, as "
        "they were when --trust-remote-code was given. Ranks run no other code.",
        "partool plan mine.yaml --trust-remote-code --out plan.json && git -C downloaded pull && "
        "partool launch plan.json --trust-remote-code",
        "partool plan mine.yaml --trust-remote-code --out plan.json && partool launch plan.json --trust-remote-code",
    ),
    command_rule(
        "PT609",
        "The folder holds experts in mxfp4",
        "GPT-OSS is published with the experts' matrices in blocks of 4-bit numbers with a scale each. Training needs "
        "numbers that an optimizer can change, and transformers writes them.",
        "model: {config: ./gpt-oss-20b, weights: {source: hf, path: ./gpt-oss-20b}}",
        "model: {config: ./gpt-oss-20b-bf16, weights: {source: hf, path: ./gpt-oss-20b-bf16}}",
    ),
    command_rule(
        "PT643",
        "transformers cannot build the model",
        "The folder's config.json must be one that the installed version of transformers knows.",
        "model: {hf: ./newer-model}   # with an old transformers",
        "pip install --upgrade transformers",
    ),
    command_rule(
        "PT644",
        "The model is not a decoder with one list of layers",
        "Training needs an embedding, one list of layers, a final norm and an output matrix that is a linear layer.",
        "model: {hf: ./an-encoder}",
        "model: {hf: ./my-llama}",
    ),
    command_rule(
        "PT645",
        "The plan's partition does not fit the model",
        "Another version of transformers may build a model of the same config.json from other modules.",
        "pip install transformers==OTHER && partool launch plan.json",
        "partool plan mine.yaml --out plan.json && partool launch plan.json",
    ),
    command_rule(
        "PT646",
        "The model cannot be cut into these stages",
        "Pipeline stages were planned with another version of transformers, or the model's forward pass has changed.",
        "pip install transformers==OTHER && partool launch plan.json",
        "partool plan mine.yaml --out plan.json && partool launch plan.json",
    ),
    command_rule(
        "PT649",
        "The model keeps state in buffers",
        "Only parameters are loaded, saved and exported. A buffer that belongs to a model's state, such as the "
        "routers' bias in DeepSeek-V3, would keep its first value, and be missing from exports.",
        "model: {hf: ./deepseek-v3}",
        "model: {hf: ./deepseek-v2-lite}",
    ),
    command_rule(
        "PT654",
        "A layer's attention is not what was planned",
        "The attention of each layer, such as its window, is recorded when the model is planned. Another version of "
        "transformers may use another window, or something that partool's attention does not compute; going on would "
        "silently train another model.",
        "pip install transformers==OTHER && partool launch plan.json",
        "partool plan mine.yaml --out plan.json && partool launch plan.json",
    ),
)
