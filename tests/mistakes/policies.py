"""Mistakes with trained policies and in continuing runs: asking, judging, converting, reporting, resuming."""

from tests.mistakes.project import JOB, PPO, Mistake, copy, remove, replace, setting, write

ASK = ("generate", "runs/ppo", "--prompt", "1+1=", "--max-tokens", "2")
JUDGE = ("eval", "runs/ppo", "--data", "prompts.jsonl", "--max-tokens", "2", "--max-prompts", "2")
RULE = ("--verifier", "arithmetic")
JUDGED = (*JUDGE, *RULE)
LONG = "1+" * 80


def _asked(name: str, typed: tuple[str, ...], *says: str, then: tuple[str, ...] = ASK) -> Mistake:
    return Mistake(name, ("generate", *typed), says, then)


GENERATE: tuple[Mistake, ...] = (
    _asked("a policy that is not there", ("runs/pop", "--prompt", "1"), "runs/pop", "runs/ppo"),
    _asked("a folder of runs as a policy", ("runs", "--prompt", "1"), "`runs`", "`runs/ppo`"),
    _asked("a file of weights as a policy", ("runs/ppo/weights/actor/model.safetensors", "--prompt", "1"), "is a file"),
    _asked("a reward model that is asked", ("reward", "--prompt", "1", "--tokenizer", "t.model"), "reward", "generates no text"),
    _asked("weights without their tokenizer", ("actor", "--prompt", "1"), "actor", "--tokenizer",
           then=("generate", "actor", "--prompt", "1", "--tokenizer", "t.model", "--max-tokens", "2")),
    _asked("a folder of weights as a tokenizer", ("runs/ppo", "--prompt", "1", "--tokenizer", "actor"), "actor", "no tokenizer"),
    _asked("nothing asked", ("runs/ppo",), "--prompt", "--input", "--chat"),
    _asked("two questions at once", ("runs/ppo", "--prompt", "1", "--input", "prompts.jsonl"), "--prompt and --input"),
    _asked("prompts of a file that is not there", ("runs/ppo", "--input", "promts.jsonl"), "promts.jsonl", "prompts.jsonl"),
    _asked("a column of prompts that is not there", ("runs/ppo", "--input", "prompts.jsonl", "--column", "question"), "question",
           "prompt, answer"),
    _asked("an empty question", ("runs/ppo", "--prompt", ""), "no token"),
    _asked("a question longer than the model", ("runs/ppo", "--prompt", LONG), "128", "shorten"),
    _asked("an answer longer than the model", ("runs/ppo", "--prompt", "1", "--max-tokens", "500"), "500", "128"),
    _asked("no samples", ("runs/ppo", "--prompt", "1", "-n", "0"), "--samples is 0", "at least 1"),
    _asked("greedy samples", ("runs/ppo", "--prompt", "1", "-n", "3", "--greedy"), "would be the same", "--temperature"),
    _asked("a share above one", ("runs/ppo", "--prompt", "1", "--top-p", "2"), "--top-p is 2", "at most 1"),
    _asked("a negative temperature", ("runs/ppo", "--prompt", "1", "--temperature", "-1"), "--temperature is -1"),
    _asked("an empty end of answers", ("runs/ppo", "--prompt", "1", "--stop", ""), "--stop is empty"),
    _asked("an id that is none as an end", ("runs/ppo", "--prompt", "1", "--stop-id", "999"), "999", "303"),
    _asked("a template without a place", ("runs/ppo", "--prompt", "1", "--template", "Q:"), "{prompt}", "add it"),
    _asked("a system's turn outside a chat", ("runs/ppo", "--prompt", "1", "--system", "be kind"), "--as-chat"),
    _asked("a chat without a template", ("runs/ppo", "--chat"), "--chat-template"),
    _asked("a broken template of chats", ("runs/ppo", "--prompt", "1", "--chat-template", "{% for"), "{% for", "Jinja"),
    Mistake("a policy whose config.json is of something else", ("generate", "runs/ppo", "--prompt", "1"),
            ("model_type None", "llama"), ("generate", "runs/cut", "--prompt", "1", "--max-tokens", "2"),
            spoils=[write("runs/ppo/weights/actor/config.json", '{"a": [1, null]}')]),
    _asked("a base of no adapters", ("runs/ppo", "--prompt", "1", "--base", "actor"), "--base is actor", "drop it"),
    _asked("heads that do not divide", ("runs/ppo", "--prompt", "1", "--tp", "3"), "tp 3", "1, 2, 4"),
    _asked("a cache of nothing", ("runs/ppo", "--prompt", "1", "--kv-cache-mb", "0"), "--kv-cache-mb is 0"),
    _asked("answers over a file", ("runs/ppo", "--prompt", "1", "--output", "prompts.jsonl"), "prompts.jsonl is there already"),
    _asked("answers into a folder that is not there", ("runs/ppo", "--prompt", "1", "--output", "out/a.jsonl"), "not a folder"),
    _asked("answers gone on with, without a file", ("runs/ppo", "--prompt", "1", "--resume"), "--resume", "--output"),
)  # fmt: skip

EVAL: tuple[Mistake, ...] = (
    Mistake("nothing that judges", JUDGE, ("nothing judges", "--verifier"), JUDGED),
    Mistake("no held-out prompts", ("eval", "runs/ppo", *RULE), ("--data",), JUDGED),
    Mistake("a policy judged twice", ("eval", "runs/ppo", "runs/ppo", "--data", "prompts.jsonl", *RULE), ("twice",), JUDGED),
    Mistake("a rule that is none", (*JUDGE, "--verifier", "maths"), ("`maths`", "`math`?"), (*JUDGE, "--verifier", "math")),
    Mistake("a rule without its answers", (*JUDGE, *RULE, "--answer", "solution"), ("solution",), JUDGED),
    Mistake("an actor as a judge", (*JUDGE, "--reward-model", "actor"), ("LlamaForCausalLM", "scalar head"), JUDGED),
    Mistake("a judging function misspelt", (*JUDGE, "--function", "my_rewards:shrot"), ("shrot",),
        (*JUDGE, "--function", "my_rewards:short")),
    Mistake("judges of a file without any", (*JUDGE, "--rewards", "sft.yaml"), ("sft.yaml", "`rewards`"),
        (*JUDGE, "--rewards", "serve.yaml")),
    Mistake("figures over a folder", (*JUDGE, *RULE, "--out", "actor"), ("actor is there already",),
        (*JUDGE, *RULE, "--out", "figures")),
)  # fmt: skip

TAKEN: tuple[Mistake, ...] = (
    Mistake("a run that is converted", ("convert", "runs/ppo", "out"), ("runs/ppo is a run", "runs/ppo/weights/actor"),
        ("convert", "runs/ppo/weights/actor", "out")),
    Mistake("a run of sft that is converted", ("convert", "runs/tuned", "out"), ("is a run", "runs/tuned/weights"),
        ("convert", "runs/tuned/weights", "out")),
    Mistake("an interrupted run that is converted", ("convert", "runs/cut", "out"), ("is a run", "runs/cut/checkpoints"),
        ("convert", "runs/cut/checkpoints/step-000002/models/actor", "out")),
    Mistake("a conversion over weights", ("convert", "actor", "reward"), ("never overwritten",), ("convert", "actor", "out")),
    Mistake("a reward model as a policy", ("convert", "reward", "out"), ("score.weight",),
        ("convert", "reward", "out", "--as", "reward")),
    Mistake("files of no size", ("convert", "actor", "out", "--max-shard-mb", "0"), ("'0'", "at least 1"),
        ("convert", "actor", "out", "--max-shard-mb", "1")),
    Mistake("weights as adapters", ("convert", "actor", "out", "--adapter", "actor"), ("actor/adapter_config.json",),
        ("convert", "actor", "out")),
    Mistake("a report over another page", ("report", "runs/done", "--out", "page", "--no-png"), ("page/index.html", "--out"),
        ("report", "runs/done", "--out", "pages", "--no-png"), spoils=[write("page/index.html", "<h1>mine</h1>")]),
    Mistake("a report of a step that was not made", ("report", "runs/ppo", "--out", "page", "--step", "9", "--no-png"),
        ("--step 9", "1 to 2"), ("report", "runs/ppo", "--out", "page", "--step", "2", "--no-png")),
    Mistake("a job written over its configuration", ("launch", "slurm", "train.yaml", "--out", "train.yaml"), ("--out is",), JOB),
    Mistake("a case written over a file", ("config", "--init", "arithmetic"), ("sft.yaml is there already", "--force"),
        ("config", "--init", "arithmetic"), mends=[remove("sft.yaml"), remove("rm.yaml")]),
)  # fmt: skip


MORE = (*PPO, "run_dir=runs/ppo", "steps=3", "--resume")
CUT = (*PPO, "run_dir=runs/cut", "steps=3", "--resume")
TUNE = ("sft", "sft.yaml", "run_dir=runs/tuned", "steps=3", "--resume")
STATE = "runs/cut/checkpoints/step-000002/state.json"


def _continued(name: str, wrong: str, *says: str) -> Mistake:
    return Mistake(name, (*CUT, wrong), says, CUT)


RESUME: tuple[Mistake, ...] = (
    Mistake("fewer steps than the run has made", (*PPO, "run_dir=runs/cut", "steps=1", "--resume"),
        ("steps is 1", "after step 2"), CUT),
    Mistake("a finished run with no more to do",
        (*PPO, "run_dir=runs/ppo", "steps=2", "--resume", "seed=7", "logging.console=plain"),
        ("steps is 2", "ended after 2", "more than 2"), MORE),
    Mistake("fewer steps than a finished run has made", (*PPO, "run_dir=runs/ppo", "steps=1", "--resume"),
        ("steps is 1", "ended after 2"), MORE),
    Mistake("a finished run begun again", (*PPO, "run_dir=runs/ppo"), ("finished run", "another run_dir"), MORE),
    Mistake("an interrupted run begun again", (*PPO, "run_dir=runs/cut"), ("--resume",), CUT),
    _continued("another seed", "seed=8", "seed is 8", "has 7"), _continued("another order", "data.shuffle=false", "data.shuffle"),
    _continued("adapters from here on", "actor.lora={rank: 2}", "actor.lora", "rank 2"),
    _continued("another model from here on", "actor.checkpoint=runs/ppo/weights/critic", "language-model head", "ForSequence"),
    Mistake("other prompts from here on", CUT, ("number of usable prompts is 23", "24"), CUT,
        spoils=[copy("prompts.jsonl", "spare"), replace("prompts.jsonl", '{"prompt": "0+0=", "answer": "0"}\n', "")],
        mends=[remove("prompts.jsonl"), copy("spare", "prompts.jsonl")]),
    Mistake("the weights of the very run that is continued", (*MORE, "actor.checkpoint=runs/ppo/weights/actor"),
        ("actor.checkpoint is runs/ppo/weights/actor", "another run_dir"),
        (*PPO, "run_dir=runs/second", "steps=1", "actor.checkpoint=runs/ppo/weights/actor")),
    Mistake("a run of sft continued by PPO", (*PPO, "run_dir=runs/tuned", "steps=9", "--resume"),
        ("runs/tuned", "`oppo sft`", "another run_dir"), TUNE),
    Mistake("a run of PPO continued by sft", ("sft", "sft.yaml", "run_dir=runs/ppo", "--resume"),
        ("runs/ppo", "`oppo train`", "another run_dir"), TUNE),
    Mistake("a run of sft continued by rm", ("rm", "rm.yaml", "run_dir=runs/tuned", "--resume"), ("runs/tuned", "sft"), TUNE),
    Mistake("adapters for a run of sft from here on", (*TUNE, "model.lora={rank: 2}"), ("model.lora", "rank 2", "has none"),
        TUNE),
    Mistake("held-out rows for a run of sft from here on", (*TUNE, "evaluation.fraction=0.2"), ("usable rows", "19", "24"), TUNE),
    Mistake("a seed of sft changed", (*TUNE, "seed=4"), ("seed is 4", "has 1"), TUNE),
    Mistake("fewer updates than sft has made", ("sft", "sft.yaml", "run_dir=runs/tuned", "steps=1", "--resume"),
        ("steps is 1", "2"), TUNE),
    Mistake("a file of the only checkpoint lost", CUT, ("none of its checkpoints is whole", "state.json", "another run_dir"), CUT,
        spoils=[copy(STATE, "spare"), remove(STATE)], mends=[copy("spare", STATE)]),
    Mistake("a checkpoint without its models", CUT, ("models", "none of its checkpoints is whole"),
        (*PPO, "run_dir=runs/anew", "steps=1"), spoils=[remove("runs/cut/checkpoints/step-000002/models")]),
    Mistake("a run in the folder of other work", (*PPO, "run_dir=.", "steps=1"),
        ("weights", "no run wrote", "run_dir=runs/first"), (*PPO, "run_dir=runs/first", "steps=1"),
        spoils=[copy("actor", "weights"), write("config.yaml", "mine: true\n")]),
    Mistake("a run of sft in the folder of other work", ("sft", "sft.yaml", "run_dir=.", "steps=1"),
        ("tensorboard, wandb, checkpoints", "no run wrote"), ("sft", "sft.yaml", "run_dir=runs/first", "steps=1"),
        spoils=[write("tensorboard/mine", "1"), write("checkpoints/mine", "1"), write("wandb/mine", "1")]),
)  # fmt: skip

ENDS: tuple[Mistake, ...] = (
    Mistake("an early stop of what is not measured", (*PPO, "early_stop.metric=accuracy"),
            ("early_stop.metric", "evaluation.every_steps")),
    Mistake("an early stop without patience", (*PPO, "early_stop={metric: accuracy, patience: 0}"), ("early_stop.patience", "0")),
    setting("held-out rows from nowhere", "evaluation={every_steps: 1}", "evaluation={every_steps: 1, fraction: 0.05}",
            "neither of data and fraction", "evaluation.fraction=0.05", command="sft"),
    setting("all rows held out", "evaluation.fraction=1", "evaluation.fraction=0.5", "less than 1", "evaluation.fraction",
            command="sft"),
    Mistake("an early stop by a metric of others", ("sft", "sft.yaml", "evaluation={fraction: 0.2, every_steps: 1}",
            "early_stop.metric=margin"), ("margin", "choose from loss, accuracy"),
            ("validate", "sft.yaml", "evaluation={fraction: 0.2, every_steps: 1}", "early_stop.metric=loss")),
    Mistake("a best step that nothing names", ("rm", "rm.yaml", "checkpoint.keep_best=true"),
            ("checkpoint.keep_best", "evaluation.every_steps"),
            ("validate", "rm.yaml", "checkpoint.keep_best=true", "evaluation={fraction: 0.2, every_steps: 1}")),
    setting("a best step by a metric that is none", "checkpoint.keep_best=acuracy", "checkpoint.keep_best=reward", "acuracy",
            "evaluation.every_steps"),
    setting("an end of responses that is no list", "rollout.stop=END", "rollout.stop=[END]", "END", "a list"),
    Mistake("an empty end of responses", (*PPO, "rollout.stop=['']"), ("rollout.stop", "empty")),
    setting("an end beyond the vocabulary", "rollout.stop=[9999]", "rollout.stop=[5]", "9999", "303"),
    Mistake("a negative id as an end", (*PPO, "rollout.stop=[-1]"), ("-1", "from 0 on")),
)  # fmt: skip
