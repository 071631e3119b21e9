"""Rules about the best checkpoints, early stops, averages of weights, and profiles."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

_HELD_OUT = (
    "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu, per_node: 1}\n"
    "data: {source: python-stdlib, validation: 0.01}\n"
)

RULES: tuple[Rule, ...] = (
    Rule(
        "PT409",
        "Best checkpoints, or an early stop, without validations",
        "What is the best, and when nothing improves any more, is told by validations during the training.",
        _HELD_OUT + "checkpoint: {best: loss}\n",
        _HELD_OUT + "checkpoint: {best: loss}\ntraining: {validation: {every: 100}}\n",
    ),
    Rule(
        "PT410",
        "A figure that validations do not have",
        "Every validation has a loss. Objectives that compare pairs of answers have an accuracy and more.",
        _HELD_OUT + "checkpoint: {best: accuracy}\ntraining: {validation: {every: 100}}\n",
        _HELD_OUT + "checkpoint: {best: loss}\ntraining: {validation: {every: 100}}\n",
    ),
    Rule(
        "PT425",
        "Prompts without a validation",
        "The model continues prompts when it is validated, and what there is to validate says whether it ever is.",
        _HELD_OUT.replace(", validation: 0.01", "") + "training: {validation: {prompts: [Once upon a time]}}\n",
        _HELD_OUT + "training: {validation: {every: 100, prompts: [Once upon a time]}}\n",
    ),
    Rule(
        "PT426",
        "Nothing makes tokens of a prompt",
        "A prompt becomes tokens as the data do, and its messages become text by the chat template. Files of tokens "
        "are read without a tokenizer, so that nothing says how.",
        _HELD_OUT + "training: {validation: {prompts: [[{role: user, content: Hello}]]}}\n",
        _HELD_OUT + "training: {validation: {prompts: [Hello]}}\n",
        "command",
    ),
    command_rule(
        "PT637",
        "A prompt leaves no room in its sequence",
        "The model continues a prompt within one sequence of training.sequence_length tokens, and a prompt needs one "
        "token at least.",
        "training: {sequence_length: 8, validation: {prompts: [Once upon a time]}}",
        "training: {sequence_length: 64, validation: {prompts: [Once upon a time]}}",
    ),
    command_rule(
        "PT626",
        "The best checkpoint is not known",
        "The file validations.json beside the checkpoints has the figures of the validations; a run writes it with "
        "checkpoint.best or training.early_stop.",
        "partool export last --best --out model   # of a run without checkpoint: {best: loss}",
        "partool export last --out model",
    ),
    command_rule(
        "PT627",
        "The checkpoint holds no moving average",
        "Only a training with training.ema keeps an average of its weights.",
        "partool export last --ema --out model   # of a run without training: {ema: 0.999}",
        "partool export last --average 3 --out model",
    ),
    command_rule(
        "PT628",
        "There are fewer checkpoints than are to be averaged",
        "A mean of fewer checkpoints would be another model than the one that was asked for.",
        "partool export last --average 5 --out model   # with checkpoint: {keep: 3}",
        "partool export last --average 3 --out model",
    ),
    command_rule(
        "PT629",
        "The moving average begins anew",
        "A checkpoint of a training without an average has none to go on from, so the average begins with the weights.",
        "partool launch mine.yaml --set training.ema=0.999 --resume   # of a run without it",
        "partool launch mine.yaml --set training.ema=0.999",
    ),
    command_rule(
        "PT635",
        "The run cannot be profiled so",
        "A profile is of ranks that the run has; snapshots of memory are of GPUs.",
        "partool profile last --ranks 0-9   # of a run of 4 ranks",
        "partool profile last --ranks 0-3",
    ),
    command_rule(
        "PT636",
        "There is no profile",
        "A run is profiled while it trains, at the steps that its spec names or that a command asks for. The command "
        "asks through a file in the run's folder, which the ranks must see.",
        "partool profile last --show   # of a run that was not profiled",
        "partool profile last   # while it trains",
    ),
)
