"""Mistakes in continuing runs, and with the folders of runs."""

from __future__ import annotations

from tests.mistakes.mistake import Mistake, copy, remove, replace, write

MORE = ("train", "train.yaml", "run_dir=runs/ppo", "steps=3", "--resume")
CUT = ("train", "train.yaml", "run_dir=runs/cut", "steps=3", "--resume")
TUNE = ("sft", "sft.yaml", "run_dir=runs/tuned", "steps=3", "--resume")
STATE = "runs/cut/checkpoints/step-000002/state.json"


def _continued(name: str, wrong: str, *says: str) -> Mistake:
    return Mistake(name, (*CUT, wrong), says, CUT)


RESUME: tuple[Mistake, ...] = (
    Mistake("fewer steps than the run has made", ("train", "train.yaml", "run_dir=runs/cut", "steps=1", "--resume"),
            ("steps is 1", "after step 2"), CUT),
    Mistake("a finished run with no more to do", ("train", "train.yaml", "run_dir=runs/ppo", "steps=2", "--resume", "seed=7",
            "logging.console=plain"), ("steps is 2", "ended after 2", "more than 2"), MORE),
    Mistake("fewer steps than a finished run has made", ("train", "train.yaml", "run_dir=runs/ppo", "steps=1", "--resume"),
            ("steps is 1", "ended after 2"), MORE),
    Mistake("a finished run begun again", ("train", "train.yaml", "run_dir=runs/ppo"), ("finished run", "another run_dir"), MORE),
    Mistake("an interrupted run begun again", ("train", "train.yaml", "run_dir=runs/cut"), ("--resume",), CUT),
    _continued("another seed", "seed=8", "seed is 8", "has 7"),
    _continued("another order", "data.shuffle=false", "data.shuffle"),
    _continued("adapters from here on", "actor.lora={rank: 2}", "actor.lora", "rank 2"),
    _continued("another model from here on", "actor.checkpoint=runs/ppo/weights/critic", "language-model head", "ForSequence"),
    Mistake("other prompts from here on", CUT, ("number of usable prompts is 23", "24"), CUT,
            spoils=[copy("prompts.jsonl", "spare"), replace("prompts.jsonl", '{"prompt": "0+0=", "answer": "0"}\n', "")],
            mends=[remove("prompts.jsonl"), copy("spare", "prompts.jsonl")]),
    Mistake("the weights of the very run that is continued", (*MORE, "actor.checkpoint=runs/ppo/weights/actor"),
            ("actor.checkpoint is runs/ppo/weights/actor", "another run_dir"),
            ("train", "train.yaml", "run_dir=runs/second", "steps=1", "actor.checkpoint=runs/ppo/weights/actor")),
    Mistake("a run of sft continued by PPO", ("train", "train.yaml", "run_dir=runs/tuned", "steps=9", "--resume"),
            ("runs/tuned", "`oppo sft`", "another run_dir"), TUNE),
    Mistake("a run of PPO continued by sft", ("sft", "sft.yaml", "run_dir=runs/ppo", "--resume"),
            ("runs/ppo", "`oppo train`", "another run_dir"), TUNE),
    Mistake("a run of sft continued by rm", ("rm", "rm.yaml", "run_dir=runs/tuned", "--resume"), ("runs/tuned", "sft"), TUNE),
    Mistake("adapters for a run of sft from here on", (*TUNE, "model.lora={rank: 2}"),
            ("model.lora", "rank 2", "has none"), TUNE),
    Mistake("held-out rows for a run of sft from here on", (*TUNE, "evaluation.fraction=0.2"),
            ("usable rows", "19", "24"), TUNE),
    Mistake("a seed of sft changed", (*TUNE, "seed=4"), ("seed is 4", "has 1"), TUNE),
    Mistake("fewer updates than sft has made", ("sft", "sft.yaml", "run_dir=runs/tuned", "steps=1", "--resume"),
            ("steps is 1", "2"), TUNE),
    Mistake("a file of the only checkpoint lost", CUT, ("none of its checkpoints is whole", "state.json", "another run_dir"), CUT,
            spoils=[copy(STATE, "spare"), remove(STATE)], mends=[copy("spare", STATE)]),
    Mistake("a checkpoint without its models", CUT, ("models", "none of its checkpoints is whole"),
            ("train", "train.yaml", "run_dir=runs/anew", "steps=1"),
            spoils=[remove("runs/cut/checkpoints/step-000002/models")]),
    Mistake("a run in the folder of other work", ("train", "train.yaml", "run_dir=.", "steps=1"),
            ("weights", "no run wrote", "run_dir=runs/first"), ("train", "train.yaml", "run_dir=runs/first", "steps=1"),
            spoils=[copy("actor", "weights"), write("config.yaml", "mine: true\n")]),
    Mistake("a run of sft in the folder of other work", ("sft", "sft.yaml", "run_dir=.", "steps=1"),
            ("tensorboard, wandb, checkpoints", "no run wrote"), ("sft", "sft.yaml", "run_dir=runs/first", "steps=1"),
            spoils=[write("tensorboard/mine", "1"), write("checkpoints/mine", "1"), write("wandb/mine", "1")]),
)  # fmt: skip

ENDS: tuple[Mistake, ...] = (
    Mistake("an early stop of what is not measured", ("train", "train.yaml", "early_stop.metric=accuracy"),
            ("early_stop.metric", "evaluation.every_steps")),
    Mistake("an early stop without patience", ("train", "train.yaml", "early_stop={metric: accuracy, patience: 0}"),
            ("early_stop.patience", "0")),
    Mistake("held-out rows from nowhere", ("sft", "sft.yaml", "evaluation={every_steps: 1}"),
            ("neither of data and fraction", "evaluation.fraction=0.05"),
            ("validate", "sft.yaml", "evaluation={every_steps: 1, fraction: 0.05}")),
    Mistake("all rows held out", ("sft", "sft.yaml", "evaluation.fraction=1"), ("evaluation.fraction", "less than 1"),
            ("validate", "sft.yaml", "evaluation.fraction=0.5")),
    Mistake("an early stop by a metric of others", ("sft", "sft.yaml", "evaluation={fraction: 0.2, every_steps: 1}",
            "early_stop.metric=margin"), ("margin", "choose from loss, accuracy"),
            ("validate", "sft.yaml", "evaluation={fraction: 0.2, every_steps: 1}", "early_stop.metric=loss")),
    Mistake("a best step that nothing names", ("rm", "rm.yaml", "checkpoint.keep_best=true"),
            ("checkpoint.keep_best", "evaluation.every_steps"),
            ("validate", "rm.yaml", "checkpoint.keep_best=true", "evaluation={fraction: 0.2, every_steps: 1}")),
    Mistake("a best step by a metric that is none", ("train", "train.yaml", "checkpoint.keep_best=acuracy"),
            ("acuracy", "evaluation.every_steps"), ("validate", "train.yaml", "checkpoint.keep_best=reward")),
    Mistake("an end of responses that is no list", ("train", "train.yaml", "rollout.stop=END"), ("END", "a list"),
            ("validate", "train.yaml", "rollout.stop=[END]")),
    Mistake("an empty end of responses", ("train", "train.yaml", "rollout.stop=['']"), ("rollout.stop", "empty")),
    Mistake("an end beyond the vocabulary", ("train", "train.yaml", "rollout.stop=[9999]"), ("9999", "303"),
            ("validate", "train.yaml", "rollout.stop=[5]")),
    Mistake("a negative id as an end", ("train", "train.yaml", "rollout.stop=[-1]"), ("-1", "from 0 on")),
)  # fmt: skip
