"""Files that are not there, are not what they are taken for, or are damaged."""

from __future__ import annotations

import gzip

from tests.mistakes.mistake import VALIDATE, Mistake, copy, cut, remove, replace, setting, write
from tests.mistakes.project import TRAIN

SFT = ("validate", "sft.yaml")
RM = ("validate", "rm.yaml")
PAIRS = ("validate", "sft.yaml", "data.path=pairs.jsonl", "data.bad_rows=quarantine", "--kind", "dpo")

YAML: tuple[Mistake, ...] = (
    Mistake("a file that is not there", ("train", "trian.yaml"), ("trian.yaml", "does not exist")),
    Mistake("a folder in the place of a file", ("train", "actor"), ("actor",)),
    Mistake(
        "a tab for spaces", ("train", "train.yaml"), ("line 2", "YAML"),
        spoils=[replace("train.yaml", "seed: 7", "\tseed: 7")], mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "a bracket left open", ("train", "train.yaml"), ("line", "YAML"),
        spoils=[replace("train.yaml", "max_prompt_tokens: 20}", "max_prompt_tokens: 20")],
        mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "a key given twice", ("train", "train.yaml"), ("steps",),
        spoils=[replace("train.yaml", "steps: 4", "steps: 4\nsteps: 6")], mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "an empty file", ("train", "train.yaml"), ("train.yaml is empty", "oppo config --init"),
        spoils=[write("train.yaml", "")], mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "a list", ("train", "train.yaml"), ("list", "mapping"),
        spoils=[write("train.yaml", "- steps: 4\n")], mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "a colon forgotten", ("train", "train.yaml"), ("train.yaml",),
        spoils=[replace("train.yaml", "seed: 7", "seed 7")], mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "another encoding", ("train", "train.yaml"), ("train.yaml", "UTF-8"),
        spoils=[write("train.yaml", b"# caf\xe9\n" + TRAIN.encode())], mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "a binary file", ("train", "t.model"), ("t.model",),
    ),
    Mistake(
        "a reference to nothing", ("train", "train.yaml"), ("nowhere",),
        spoils=[replace("train.yaml", "seed: 7", "seed: ${nowhere}")], mends=[write("train.yaml", TRAIN)],
    ),
    Mistake(
        "a required section left out", ("train", "train.yaml"), ("rollout",),
        spoils=[replace("train.yaml", "rollout: {batch_size: 8, max_response_tokens: 20}\n", "")],
        mends=[write("train.yaml", TRAIN)],
    ),
    Mistake("the file of another command", ("train", "sft.yaml"), ("oppo sft",), SFT),
    Mistake("an override without its value", ("train", "train.yaml", "steps"), ("steps", "a.b=c")),
    Mistake("an override with a colon", ("train", "train.yaml", "steps: 3"), ("steps: 3", "a.b=c")),
)  # fmt: skip

WEIGHTS: tuple[Mistake, ...] = (
    setting("weights that are not there", "actor.checkpoint=aktor", "actor.checkpoint=actor", "aktor"),
    setting("weights given as a file", "actor.checkpoint=actor/config.json", "actor.checkpoint=actor", "is a file"),
    setting("a folder without weights", "actor.checkpoint=runs", "actor.checkpoint=actor", "config.json"),
    setting("an actor as a reward model", "reward.checkpoint=actor", "reward.checkpoint=reward", "LlamaForCausalLM", "oppo rm"),
    setting("a reward model as an actor", "actor.checkpoint=reward", "actor.checkpoint=actor", "ForSequenceClassification"),
    Mistake(
        "weights cut short", ("train", "train.yaml"), ("model.safetensors",),
        spoils=[copy("actor", "spare"), cut("actor/model.safetensors", 5000)],
        mends=[remove("actor"), copy("spare", "actor")],
    ),
    Mistake(
        "weights of no content", ("train", "train.yaml"), ("model.safetensors",),
        spoils=[copy("actor", "spare"), write("actor/model.safetensors", "")],
        mends=[remove("actor"), copy("spare", "actor")],
    ),
    Mistake(
        "a pointer to weights, not fetched", ("train", "train.yaml"), ("model.safetensors",),
        spoils=[copy("actor", "spare"),
                write("actor/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")],
        mends=[remove("actor"), copy("spare", "actor")],
    ),
    Mistake(
        "a config.json cut short", ("train", "train.yaml"), ("config.json",),
        spoils=[copy("actor", "spare"), cut("actor/config.json", 40)], mends=[remove("actor"), copy("spare", "actor")],
    ),
    Mistake(
        "an architecture that is not known", ("train", "train.yaml"), ("gpt2", "llama"),
        spoils=[copy("actor", "spare"), replace("actor/config.json", '"model_type": "llama"', '"model_type": "gpt2"')],
        mends=[remove("actor"), copy("spare", "actor")],
    ),
    Mistake(
        "a config.json that says another size", ("train", "train.yaml"), ("config.json", "[304, 64]"),
        spoils=[copy("actor", "spare"), replace("actor/config.json", '"hidden_size": 32', '"hidden_size": 64')],
        mends=[remove("actor"), copy("spare", "actor")],
    ),
    Mistake(
        "weights and a shape at once", ("train", "train.yaml", "actor.init=actor/config.json"), ("init", "checkpoint"),
    ),
)  # fmt: skip

TOKENIZERS: tuple[Mistake, ...] = (
    setting("a tokenizer that is not there", "tokenizer.path=tok.model", "tokenizer.path=t.model", "tok.model"),
    setting("a tokenizer that is none", "tokenizer.path=train.yaml", "tokenizer.path=t.model", "train.yaml"),
    setting("a folder without a tokenizer", "tokenizer.path=runs", "tokenizer.path=t.model", "runs"),
    Mistake(
        "a tokenizer cut short", ("train", "train.yaml"), ("t.model",),
        spoils=[copy("t.model", "spare.model"), cut("t.model", 300)],
        mends=[remove("t.model"), copy("spare.model", "t.model")],
    ),
    Mistake(
        "chat messages without a template", ("train", "train.yaml"), ("chat",),
        ("validate", "train.yaml", "rewards=[{kind: model}]",
         "tokenizer.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"),
        spoils=[write("prompts.jsonl", '{"messages": [{"role": "user", "content": "1+1="}]}\n' * 16)],
    ),
    Mistake("a vocabulary that is too large", ("tokenizer", "prompts.jsonl", "--out", "new.model", "--vocab-size", "9000"),
            ("9000", "too large"), ("tokenizer", "prompts.jsonl", "--out", "new.model", "--vocab-size", "273")),
    Mistake("a vocabulary that is too small", ("tokenizer", "prompts.jsonl", "--out", "new.model", "--vocab-size", "9"),
            ("9", "too small"), ("tokenizer", "prompts.jsonl", "--out", "new.model", "--vocab-size", "273")),
    Mistake("texts that are not there", ("tokenizer", "prompt.jsonl", "--out", "new.model", "--vocab-size", "273"),
            ("prompt.jsonl",), ("tokenizer", "prompts.jsonl", "--out", "new.model", "--vocab-size", "273")),
)  # fmt: skip

CHOICE = "rewards.1.name=multiple_choice"
CHOSEN = '{{"prompt": "1+1=", "answer": "{}"}}\n'
CODE = "rewards.1={kind: verifier, name: code}"
TESTED = '{{"prompt": "1+1=", "answer": ["assert {}"]}}\n'
DATA: tuple[Mistake, ...] = (
    setting("data that are not there", "data.path=prompt.jsonl", "data.path=prompts.jsonl", "prompt.jsonl"),
    Mistake(
        "data of no rows", ("train", "train.yaml"), ("prompts.jsonl",), spoils=[copy("prompts.jsonl",
            "spare"), write("prompts.jsonl", "")],
        mends=[remove("prompts.jsonl"), copy("spare", "prompts.jsonl")],
    ),
    Mistake(
        "a line that is no JSON", ("train", "train.yaml"), ("prompts.jsonl:3",),
        ("validate", "train.yaml", "data.bad_rows=quarantine"),
        spoils=[write("prompts.jsonl", '{"prompt": "1+1=", "answer": "2"}\n' * 2 + "{'prompt': '2+2='}\n"
                      + '{"prompt": "1+1=", "answer": "2"}\n' * 30)],
    ),
    setting("a column that is not there", "data.columns.prompt=question", "data.columns.prompt=prompt", "question", "prompt"),
    setting("an answer's column that is not there", "rewards.1.answer=solution", "rewards.1.answer=answer", "solution", "answer"),
    Mistake(
        "a choice in words", ("train", "train.yaml", CHOICE), ("prompts.jsonl:2", "'Paris'", "give a letter"),
        ("validate", "train.yaml", CHOICE), spoils=[write("prompts.jsonl", CHOSEN.format("C") + CHOSEN.format("Paris"))],
        mends=[write("prompts.jsonl", CHOSEN.format("C") + CHOSEN.format("B"))],
    ),
    Mistake(
        "a test of a program that is no Python", ("train", "train.yaml", CODE), ("prompts.jsonl:1", "assert f(1 == 2",
            "give a list of asserts"),
        ("validate", "train.yaml", CODE), spoils=[write("prompts.jsonl", TESTED.format("f(1 == 2") + TESTED.format("f(2) == 4"))],
        mends=[write("prompts.jsonl", TESTED.format("f(1) == 2") + TESTED.format("f(2) == 4"))],
    ),
    Mistake(
        "prompts that are longer than allowed", ("train", "train.yaml", "data.max_prompt_tokens=2"), ("max_prompt_tokens",),
        ("validate", "train.yaml", "data.max_prompt_tokens=2", "data.long_rows=truncate"),
    ),
    Mistake("completions for a reward model", ("rm", "rm.yaml", "data.path=completions.jsonl"), ("chosen",), RM),
    Mistake("completions for DPO", ("dpo", "sft.yaml"), ("chosen",), PAIRS),
    Mistake("a pair with the same answer twice", ("dpo", "sft.yaml", "data.path=pairs.jsonl"), ("pairs.jsonl:1", "the same"),
            PAIRS),
    Mistake("completions of KTO that nobody has judged", ("dpo", "sft.yaml", "dpo.loss=kto"), ("label", "data.columns.label"),
            (*PAIRS, "dpo.loss=kto")),
    Mistake("pairs that no micro-batch holds", ("dpo", *PAIRS[1:-2], "runtime.micro_batch_tokens=64"), ("128", "a pair"),
            (*PAIRS[:-2], "runtime.micro_batch_tokens=128", *PAIRS[-2:])),
    Mistake("a beta of nothing", ("dpo", *PAIRS[1:-2], "dpo.beta=0"), ("dpo.beta", "greater than 0"),
            (*PAIRS[:-2], "dpo.beta=0.1", *PAIRS[-2:])),
    Mistake("robust DPO without a share of wrong pairs", ("dpo", *PAIRS[1:-2], "dpo.loss=robust"), ("dpo.label_smoothing",),
            (*PAIRS[:-2], "dpo.loss=robust", "dpo.label_smoothing=0.1", *PAIRS[-2:])),
    Mistake(
        "an answer that is a number in words", ("train", "train.yaml"), ("prompts.jsonl:1", "four"),
        ("validate", "train.yaml",
            "data.bad_rows=quarantine"), spoils=[replace("prompts.jsonl", '"answer": "0"', '"answer": "four"')],
    ),
    Mistake(
        "a prompt that is a number", ("train", "train.yaml"), ("prompts.jsonl:1",),
        ("validate", "train.yaml", "data.bad_rows=quarantine"), spoils=[replace("prompts.jsonl", '"0+0="', "5")],
    ),
    Mistake(
        "an empty prompt", ("train", "train.yaml"), ("prompts.jsonl:1", "empty"),
        ("validate", "train.yaml", "data.bad_rows=quarantine"), spoils=[replace("prompts.jsonl", '"0+0="', '""')],
    ),
    Mistake(
        "an archive cut short", ("train", "train.yaml", "data.path=rows.jsonl.gz"), ("rows.jsonl.gz",),
        spoils=[write("rows.jsonl.gz", gzip.compress(b'{"prompt": "1+1=", "answer": "2"}\n' * 30)[:40])],
    ),
    Mistake(
        "rows in Latin-1", ("train", "train.yaml"), ("prompts.jsonl:1", "UTF-8"),
        ("validate", "train.yaml", "data.bad_rows=quarantine"),
        spoils=[write("prompts.jsonl", b'{"prompt": "caf\xe9", "answer": "2"}\n' + b'{"prompt": "1+1=", "answer": "2"}\n' * 20)],
    ),
)  # fmt: skip

RUNS: tuple[Mistake, ...] = (
    Mistake("a run directory that is a file", ("train", "train.yaml", "run_dir=t.model"), ("t.model",)),
    Mistake("a run directory below a file", ("train", "train.yaml", "run_dir=t.model/run"), ("t.model",)),
    Mistake("a finished run written over", ("train", "train.yaml", "run_dir=runs/done"), ("finished run",), VALIDATE),
)
