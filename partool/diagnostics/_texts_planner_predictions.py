"""Rules about multi-token prediction."""

from __future__ import annotations

from partool.diagnostics.record import BASE, Rule, command_rule

_PREDICTS = BASE.replace("heads: 4", "heads: 4, multi_token: 1")

RULES: tuple[Rule, ...] = (
    Rule(
        "PT439",
        "Multi-token prediction that the runtime does not train",
        "The modules for further tokens share embedding and head with the model, so one rank must hold both: "
        "pipelines, weights that travel, two-dimensional tensor ranks, grids, offloading, adapters, pairs of answers, "
        "perturbed embeddings, teachers, experts by layer, fp8 and exchanges of one bit do not have them yet.",
        _PREDICTS + "training: {adversarial: {epsilon: 0.1}}\n",
        _PREDICTS,
    ),
    Rule(
        "PT677",
        "A weight of losses that the model does not have",
        "multi_token_weight weighs the losses of the modules that model.multi_token gives the model.",
        BASE + "training: {multi_token_weight: 0.1}\n",
        _PREDICTS + "training: {multi_token_weight: 0.1}\n",
    ),
    Rule(
        "PT678",
        "Sequences too short for the further tokens",
        "The module at depth k reads the token k positions later, and predicts the one after it. Positions for which "
        "the sequence ends before have no such loss.",
        BASE.replace("heads: 4", "heads: 4, multi_token: 4") + "training: {sequence_length: 4}\n",
        BASE.replace("heads: 4", "heads: 4, multi_token: 2") + "training: {sequence_length: 4}\n",
    ),
    command_rule(
        "PT638",
        "A folder without the modules for further tokens",
        "Weights of a folder are those of every parameter, and its config.json says how many modules for further "
        "tokens it holds (num_nextn_predict_layers).",
        "model: {config: ./llama, multi_token: 1, weights: {source: hf, path: ./llama}}",
        "model: {config: ./deepseek-v3, multi_token: 1, weights: {source: hf, path: ./deepseek-v3}}",
    ),
    command_rule(
        "PT619",
        "Copies of the embedding or of the head that differ",
        "Folders store the embedding and the head a second time with each module for a further token. partool trains "
        "one matrix for both uses, as DeepSeek-V3 did, so it reads only folders whose copies are equal.",
        "model: {config: ./folder, multi_token: 1, weights: {source: hf, path: ./folder}}",
        "model: {config: ./folder, weights: {source: hf, path: ./folder}}",
    ),
)
