"""Rules about the tasks of evaluations."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

_MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu, per_node: 1}\n"
_HELD_OUT = _MODEL + "data: {source: python-stdlib, validation: 0.01}\n"
_TASKS = "evaluation: {tasks: [arc_easy]}\n"

RULES: tuple[Rule, ...] = (
    Rule(
        "PT411",
        "Settings of an evaluation without tasks",
        "The section says how tasks are run; without tasks nothing reads it.",
        _HELD_OUT + "evaluation: {limit: 100}\n",
        _HELD_OUT + "evaluation: {tasks: [arc_easy], limit: 100}\n",
    ),
    Rule(
        "PT414",
        "Tasks without validations",
        "A training runs its tasks where it validates, on the same ranks and weights.",
        _MODEL + "data: python-stdlib\n" + _TASKS,
        _HELD_OUT + _TASKS,
    ),
    Rule(
        "PT415",
        "A task is named twice",
        "A task has one result.",
        _HELD_OUT + "evaluation: {tasks: [arc_easy, arc_easy]}\n",
        _HELD_OUT + _TASKS,
    ),
    Rule(
        "PT416",
        "Tasks do not run in this layout, or with this engine",
        "Schedules that send weights around compute the loss on every rank in turn, and nothing compares the scores "
        "of single labels there with those of one process. Other engines are planned, and trained elsewhere.",
        _MODEL.replace("per_node: 1", "per_node: 2")
        + "data: {source: python-stdlib, validation: 0.01}\nparallel: {pipeline: {stages: 2, schedule: weipipe}}\n"
        + _TASKS,
        _MODEL.replace("per_node: 1", "per_node: 2")
        + "data: {source: python-stdlib, validation: 0.01}\nparallel: {pipeline: {stages: 2, schedule: 1f1b}}\n"
        + _TASKS,
    ),
    Rule(
        "PT417",
        "An early stop by a figure that not every validation has",
        "The patience counts validations, and one without the figure would count as no improvement.",
        _HELD_OUT + "training: {validation: {every: 10}, early_stop: {metric: arc_easy/acc}}\n"
        "evaluation: {tasks: [arc_easy], every: 3}\n",
        _HELD_OUT + "training: {validation: {every: 10}, early_stop: {metric: arc_easy/acc}}\n" + _TASKS,
    ),
    Rule(
        "PT418",
        "The file of a task is not there",
        "A task is named by the path of its YAML file, or by a name that lm-evaluation-harness or a file in "
        "include_path defines.",
        _HELD_OUT + "evaluation: {tasks: [nowhere/squares.yaml]}\n",
        _HELD_OUT + _TASKS,
    ),
    Rule(
        "PT419",
        "Tasks are texts, and the tokenizer is not the model's",
        "Data that were tokenised elsewhere need no tokenizer here; texts of tasks do, and bytes would be tokens of "
        "another meaning.",
        _HELD_OUT.replace("256", "50257") + _TASKS,
        _HELD_OUT + _TASKS,
    ),
    command_rule(
        "PT428",
        "Nothing can be evaluated there",
        "An evaluation needs weights: a run with a complete checkpoint, the folder of a checkpoint, or a folder of "
        "transformers with config.json and weights.",
        "partool eval last   # of a run that has written no checkpoint",
        "partool eval last --tasks arc_easy",
    ),
    command_rule(
        "PT429",
        "The tasks have no such figure",
        "checkpoint.best or training.early_stop names TASK/METRIC, and metrics are known once the tasks have run.",
        "partool launch mine.yaml --set checkpoint.best=arc_easy/accuracy",
        "partool launch mine.yaml --set checkpoint.best=arc_easy/acc",
    ),
    command_rule(
        "PT538",
        "lm-evaluation-harness is not installed",
        "Tasks are those of the package lm_eval, which only the first rank's machine needs.",
        "partool eval last --tasks arc_easy   # without the package",
        "pip install 'partool[eval]'",
    ),
    command_rule(
        "PT539",
        "Tasks cannot be loaded",
        "A name is known to lm-evaluation-harness, or defined in a file of include_path; its data set must be here or "
        "in the cache of datasets, as ranks download nothing where there is no network.",
        "partool eval last --tasks arc_esay",
        "partool eval last --tasks arc_easy",
    ),
    command_rule(
        "PT639",
        "Generation is not there",
        "The model's log-likelihoods are computed in the layout of the plan; tokens are not generated. Tasks with "
        "output_type loglikelihood, multiple_choice and loglikelihood_rolling run.",
        "partool eval last --tasks gsm8k",
        "partool eval last --tasks arc_easy",
    ),
    command_rule(
        "PT640",
        "An answer that cannot be scored",
        "All tokens of an answer have to fit in a sequence, and an answer has at least one token.",
        "partool eval last --tasks mine.yaml   # with answers of 5,000 tokens, sequence_length: 4096",
        "partool eval last --tasks mine.yaml --set training.sequence_length=8192",
    ),
    command_rule(
        "PT641",
        "The process of the tasks has failed",
        "Tasks are loaded, and their metrics computed, by a process beside the first rank, so that nothing of it "
        "touches the training. Its log is in the run's folder.",
        "partool eval last --tasks mine.yaml   # whose metric raises an error",
        "partool logs last",
    ),
    command_rule(
        "PT642",
        "No token stands before a text",
        "The first token of a text is predicted from a token that begins or ends texts, which the tokenizer names.",
        "partool eval last --tasks wikitext   # with a tokenizer without bos_token and eos_token",
        "partool eval last --tasks arc_easy",
    ),
)
