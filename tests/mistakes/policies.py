"""Mistakes with trained policies: asking, judging, converting, reporting."""

from __future__ import annotations

from tests.mistakes.mistake import Mistake, remove, write

ASK = ("generate", "runs/ppo", "--prompt", "1+1=", "--max-tokens", "2")
JUDGE = ("eval", "runs/ppo", "--data", "prompts.jsonl", "--max-tokens", "2", "--max-prompts", "2")
RULE = ("--verifier", "arithmetic")
LONG = "1+" * 80


def _asked(name: str, typed: tuple[str, ...], *says: str, then: tuple[str, ...] = ASK) -> Mistake:
    return Mistake(name, ("generate", *typed), says, then)


GENERATE: tuple[Mistake, ...] = (
    _asked("a policy that is not there", ("runs/pop", "--prompt", "1"), "runs/pop", "runs/ppo"),
    _asked("a folder of runs as a policy", ("runs", "--prompt", "1"), "`runs`", "`runs/ppo`"),
    _asked("a file of weights as a policy", ("runs/ppo/weights/actor/model.safetensors", "--prompt", "1"), "is a file"),
    _asked("a reward model that is asked", ("reward", "--prompt", "1", "--tokenizer", "t.model"), "reward", "says nothing"),
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
    Mistake("nothing that judges", JUDGE, ("nothing judges", "--verifier"), (*JUDGE, *RULE)),
    Mistake("no held-out prompts", ("eval", "runs/ppo", *RULE), ("--data",), (*JUDGE, *RULE)),
    Mistake("a policy judged twice", ("eval", "runs/ppo", "runs/ppo", "--data", "prompts.jsonl", *RULE), ("twice",),
            (*JUDGE, *RULE)),
    Mistake("a rule that is none", (*JUDGE, "--verifier", "maths"), ("`maths`", "`math`?"), (*JUDGE, "--verifier", "math")),
    Mistake("a rule without its answers", (*JUDGE, *RULE, "--answer", "solution"), ("solution",), (*JUDGE, *RULE)),
    Mistake("an actor as a judge", (*JUDGE, "--reward-model", "actor"), ("LlamaForCausalLM", "scalar head"), (*JUDGE, *RULE)),
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
    Mistake("a job written over its configuration", ("launch", "slurm", "train.yaml", "--out", "train.yaml"), ("--out is",),
            ("launch", "slurm", "train.yaml", "--out", "job.sbatch")),
    Mistake("a case written over a file", ("config", "--init", "arithmetic"), ("sft.yaml is there already", "--force"),
            ("config", "--init", "arithmetic"), mends=[remove("sft.yaml"), remove("rm.yaml")]),
)  # fmt: skip
