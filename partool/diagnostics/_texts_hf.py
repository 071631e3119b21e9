"""Rules about models that transformers builds (PT447 to PT454, PT483, PT484, PT643 to PT654); examples to be read."""

from __future__ import annotations

from partool.diagnostics.record import Rule


def _rule(code: str, title: str, reason: str, bad: str, good: str) -> Rule:
    return Rule(code, title, reason, bad, good, "command")


RULES: tuple[Rule, ...] = (
    _rule(
        "PT447",
        "Weights beside the model are not used",
        "Without a word about weights a model starts from numbers drawn from the seed, whatever its folder holds. Who "
        "names a folder with weights mostly means to go on from them.",
        "model: {hf: ./my-llama}   # with model.safetensors",
        "model: {hf: ./my-llama, weights: {source: hf}}",
    ),
    _rule(
        "PT450",
        "The runtime cannot look at the model",
        "A model of transformers is asked for its parts in a process of its own, which needs torch and transformers, "
        "and a folder with a complete config.json. Weights are not read for that.",
        "model: {hf: ./no-such-folder}",
        "model: {hf: ./my-llama}   # holds config.json",
    ),
    _rule(
        "PT451",
        "The model is not quite what is priced or trained",
        "Memory and time are predicted for a decoder with the same sizes; where its parameters differ in number, "
        "predictions are off by about as much. A loss that balances experts is not part of training.",
        "model: {hf: ./unusual-model}",
        "model: {hf: ./my-llama}",
    ),
    _rule(
        "PT452",
        "The loss cannot be computed from the hidden state",
        "partool never holds all logits: it takes the last hidden state and the output matrix and computes the loss in "
        "pieces. A model that scales or caps its logits in between would be trained on another loss.",
        "model: {hf: ./gemma-2-2b}   # caps its logits",
        "model: {hf: ./qwen3-0.6b}",
    ),
    _rule(
        "PT453",
        "The model cannot be cut into pipeline stages",
        "A stage calls the model's own code with a hidden state in place of tokens. A model that changes hidden states "
        "outside of its layers, or looks up learned positions, would do so on every stage.",
        "model: {hf: ./gpt2}\nparallel: {pipeline: 2}",
        "model: {config: ./gpt2}   # partool's own decoder\nparallel: {pipeline: 2}",
    ),
    _rule(
        "PT454",
        "Only partool's own decoder can have this",
        "transformers builds the model as its config.json says and computes it its own way. Compiled blocks, norms on "
        "shares of the sequence, two-dimensional tensor parallelism and weights that travel need partool's decoder.",
        "model: {hf: ./my-llama}\nparallel: {tensor: {degree: 2, sequence_norms: true}}",
        "model: {config: ./my-llama}\nparallel: {tensor: {degree: 2, sequence_norms: true}}",
    ),
    _rule(
        "PT483",
        "The model's attention leaves no place for another",
        "Ranks that share a sequence, and documents that do not see each other, need attention that knows which tokens "
        "are where. The model's layers must ask transformers for their attention by name, with masks that are causal, "
        "with or without a window, and without sinks, caps or biases of scores.",
        "model: {hf: ./gpt-oss-20b}\nparallel: {sequence: 4}",
        "model: {hf: ./qwen3-8b}\nparallel: {sequence: 4}",
    ),
    _rule(
        "PT484",
        "Dropped attention weights, and keys that are met in parts",
        "Where keys are met block by block, or rank by rank, sums of exponentials are merged; dropout works on weights "
        "that are whole. Ulysses gives each rank whole sequences of some heads, of which it drops weights as one "
        "process would.",
        "model: {hf: ./gpt2}   # attn_pdrop: 0.1\nparallel: {sequence: {method: ring, degree: 4}}",
        "model: {hf: ./gpt2}\nparallel: {sequence: {method: ulysses, degree: 4}}",
    ),
    _rule(
        "PT590",
        "The model's folder brings code of its own",
        "Its config.json (auto_map) names classes in Python files beside it, and the installed transformers knows no "
        "model of that type. Such code could do anything that you can, so it runs only where --trust-remote-code is "
        "given on the command line, for each plan, render and launch. A spec or a plan cannot allow it.",
        "partool plan mine.yaml   # model: {hf: ./downloaded}",
        "partool plan mine.yaml --trust-remote-code",
    ),
    _rule(
        "PT591",
        "The model's code is not the one that was allowed",
        "A plan holds the hash of the folder's Python files as they were when --trust-remote-code was given. No rank "
        "runs others.",
        "partool plan mine.yaml --trust-remote-code --out plan.json && git -C downloaded pull && "
        "partool launch plan.json --trust-remote-code",
        "partool plan mine.yaml --trust-remote-code --out plan.json && partool launch plan.json --trust-remote-code",
    ),
    _rule(
        "PT643",
        "transformers cannot build the model",
        "The folder's config.json must be one that the installed version of transformers knows.",
        "model: {hf: ./newer-model}   # with an old transformers",
        "pip install --upgrade transformers",
    ),
    _rule(
        "PT644",
        "The model is no decoder of one list of layers",
        "Training needs an embedding, one list of layers, a final norm and an output matrix that is a linear layer.",
        "model: {hf: ./an-encoder}",
        "model: {hf: ./my-llama}",
    ),
    _rule(
        "PT645",
        "The plan's partition does not fit the model",
        "Another version of transformers may build a model of the same config.json from other modules.",
        "pip install transformers==OTHER && partool launch plan.json",
        "partool plan mine.yaml --out plan.json && partool launch plan.json",
    ),
    _rule(
        "PT646",
        "The model cannot be cut here",
        "Pipeline stages were planned with another version of transformers, or the model's forward pass has changed.",
        "pip install transformers==OTHER && partool launch plan.json",
        "partool plan mine.yaml --out plan.json && partool launch plan.json",
    ),
    _rule(
        "PT649",
        "The model keeps state in buffers",
        "Parameters are loaded, saved and exported. A buffer that belongs to a model's state, such as the balance of "
        "DeepSeek-V3's routers, would keep its first value, and be missing from what is exported.",
        "model: {hf: ./deepseek-v3}",
        "model: {hf: ./deepseek-v2-lite}",
    ),
    _rule(
        "PT654",
        "A layer's attention is not what was planned",
        "What a model's layers ask of attention is looked at when it is planned. Another version of transformers may "
        "ask for another window, or for something that partool's attention does not compute; going on would train "
        "another model without a word.",
        "pip install transformers==OTHER && partool launch plan.json",
        "partool plan mine.yaml --out plan.json && partool launch plan.json",
    ),
)
