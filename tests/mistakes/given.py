"""Wrong input of commands: missing or damaged files, settings, words and environments."""

import gzip

from tests.mistakes.project import JOB, PPO, REWARDS, TRAIN, VALIDATE, Edit, Mistake, copy, cut, remove, replace, setting, write

SFT, RM = ("validate", "sft.yaml"), ("validate", "rm.yaml")
PAIRS = ("validate", "sft.yaml", "data.path=pairs.jsonl", "data.bad_rows=quarantine", "--kind", "dpo")


def _spoilt(name: str, spoil: Edit, *says: str) -> Mistake:
    return Mistake(name, PPO, says, spoils=[spoil], mends=[write("train.yaml", TRAIN)])


def _damaged(name: str, spoil: Edit, *says: str) -> Mistake:
    mends = [remove("actor"), copy("spare", "actor")]
    return Mistake(name, PPO, says, spoils=[copy("actor", "spare"), spoil], mends=mends)


YAML: tuple[Mistake, ...] = (
    Mistake("a file that is not there", ("train", "trian.yaml"), ("trian.yaml", "does not exist")),
    Mistake("a folder in the place of a file", ("train", "actor"), ("actor",)),
    _spoilt("a tab for spaces", replace("train.yaml", "seed: 7", "\tseed: 7"), "line 2", "YAML"),
    _spoilt("a bracket left open", replace("train.yaml", "max_prompt_tokens: 20}", "max_prompt_tokens: 20"), "line", "YAML"),
    _spoilt("a key given twice", replace("train.yaml", "steps: 4", "steps: 4\nsteps: 6"), "steps"),
    _spoilt("an empty file", write("train.yaml", ""), "train.yaml is empty", "oppo config --init"),
    _spoilt("a list", write("train.yaml", "- steps: 4\n"), "list", "mapping"),
    _spoilt("a colon forgotten", replace("train.yaml", "seed: 7", "seed 7"), "train.yaml"),
    _spoilt("another encoding", write("train.yaml", b"# caf\xe9\n" + TRAIN.encode()), "train.yaml", "UTF-8"),
    Mistake("a binary file", ("train", "t.model"), ("t.model",)),
    _spoilt("a reference to nothing", replace("train.yaml", "seed: 7", "seed: ${nowhere}"), "nowhere"),
    _spoilt("a required section left out",
        replace("train.yaml", "rollout: {batch_size: 8, max_response_tokens: 20}\n", ""), "rollout"),
    Mistake("the file of another command", ("train", "sft.yaml"), ("oppo sft",), SFT),
    Mistake("an override without its value", (*PPO, "steps"), ("steps", "a.b=c")),
    Mistake("an override with a colon", (*PPO, "steps: 3"), ("steps: 3", "a.b=c")),
)  # fmt: skip

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
WEIGHTS: tuple[Mistake, ...] = (
    setting("weights that are not there", "actor.checkpoint=aktor", "actor.checkpoint=actor", "aktor"),
    setting("weights given as a file", "actor.checkpoint=actor/config.json", "actor.checkpoint=actor", "is a file"),
    setting("a folder without weights", "actor.checkpoint=runs", "actor.checkpoint=actor", "config.json"),
    setting("an actor as a reward model", "reward.checkpoint=actor", "reward.checkpoint=reward", "LlamaForCausalLM", "oppo rm"),
    setting("a reward model as an actor", "actor.checkpoint=reward", "actor.checkpoint=actor", "ForSequenceClassification"),
    _damaged("weights cut short", cut("actor/model.safetensors", 5000), "model.safetensors"),
    _damaged("weights of no content", write("actor/model.safetensors", ""), "model.safetensors"),
    _damaged("a pointer to weights, not fetched", write("actor/model.safetensors", POINTER), "model.safetensors"),
    _damaged("a config.json cut short", cut("actor/config.json", 40), "config.json"),
    _damaged("an architecture that is not known",
        replace("actor/config.json", '"model_type": "llama"', '"model_type": "gpt2"'), "gpt2", "llama"),
    _damaged("a config.json that says another size",
        replace("actor/config.json", '"hidden_size": 32', '"hidden_size": 64'), "config.json", "[304, 64]"),
    Mistake("weights and a shape at once", (*PPO, "actor.init=actor/config.json"), ("init", "checkpoint")),
)  # fmt: skip

VOCABULARY = ("data", "tokenizer", "prompts.jsonl", "--out", "new.model", "--vocab-size", "273")
TOKENIZERS: tuple[Mistake, ...] = (
    setting("a tokenizer that is not there", "tokenizer.path=tok.model", "tokenizer.path=t.model", "tok.model"),
    setting("a tokenizer that is none", "tokenizer.path=train.yaml", "tokenizer.path=t.model", "train.yaml"),
    setting("a folder without a tokenizer", "tokenizer.path=runs", "tokenizer.path=t.model", "runs"),
    Mistake("a tokenizer cut short", PPO, ("t.model",),
        spoils=[copy("t.model", "spare.model"), cut("t.model", 300)], mends=[remove("t.model"), copy("spare.model", "t.model")]),
    Mistake("chat messages without a template", PPO, ("chat",), ("validate", "train.yaml",
        "rewards=[{kind: model}]", "tokenizer.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"),
        spoils=[write("prompts.jsonl", '{"messages": [{"role": "user", "content": "1+1="}]}\n' * 16)]),
    Mistake("a vocabulary that is too large", (*VOCABULARY[:-1], "9000"), ("9000", "too large"), VOCABULARY),
    Mistake("a vocabulary that is too small", (*VOCABULARY[:-1], "9"), ("9", "too small"), VOCABULARY),
    Mistake("texts that are not there", ("data", "tokenizer", "prompt.jsonl", *VOCABULARY[3:]), ("prompt.jsonl",), VOCABULARY),
)  # fmt: skip

ASIDE = (*VALIDATE, "data.bad_rows=quarantine")
ROW = '{"prompt": "1+1=", "answer": "2"}\n'
CHOICE = "rewards.1.name=multiple_choice"
CHOSEN = '{{"prompt": "1+1=", "answer": "{}"}}\n'
CODE = "rewards.1={kind: verifier, name: code}"
TESTED = '{{"prompt": "1+1=", "answer": ["assert {}"]}}\n'
DATA: tuple[Mistake, ...] = (
    setting("data that are not there", "data.path=prompt.jsonl", "data.path=prompts.jsonl", "prompt.jsonl"),
    Mistake("data of no rows", PPO, ("prompts.jsonl",), spoils=[copy("prompts.jsonl", "spare"), write("prompts.jsonl", "")],
        mends=[remove("prompts.jsonl"), copy("spare", "prompts.jsonl")]),
    Mistake("a line that is no JSON", PPO, ("prompts.jsonl:3",), ASIDE,
        spoils=[write("prompts.jsonl", ROW * 2 + "{'prompt': '2+2='}\n" + ROW * 30)]),
    setting("a column that is not there", "data.columns.prompt=question", "data.columns.prompt=prompt", "question", "prompt"),
    setting("an answer's column that is not there", "rewards.1.answer=solution", "rewards.1.answer=answer", "solution", "answer"),
    Mistake("a choice in words", (*PPO, CHOICE), ("prompts.jsonl:2", "'Paris'", "give a letter"),
        (*VALIDATE, CHOICE), spoils=[write("prompts.jsonl", CHOSEN.format("C") + CHOSEN.format("Paris"))],
        mends=[write("prompts.jsonl", CHOSEN.format("C") + CHOSEN.format("B"))]),
    Mistake("a test of a program that is not Python", (*PPO, CODE),
        ("prompts.jsonl:1", "assert f(1 == 2", "give a list of asserts"), (*VALIDATE, CODE),
        spoils=[write("prompts.jsonl", TESTED.format("f(1 == 2") + TESTED.format("f(2) == 4"))],
        mends=[write("prompts.jsonl", TESTED.format("f(1) == 2") + TESTED.format("f(2) == 4"))]),
    Mistake("prompts that are longer than allowed", (*PPO, "data.max_prompt_tokens=2"), ("max_prompt_tokens",),
        (*VALIDATE, "data.max_prompt_tokens=2", "data.long_rows=truncate")),
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
    Mistake("an answer that is a number in words", PPO, ("prompts.jsonl:1", "four"),
        ASIDE, spoils=[replace("prompts.jsonl", '"answer": "0"', '"answer": "four"')]),
    Mistake("a prompt that is a number", PPO, ("prompts.jsonl:1",), ASIDE, spoils=[replace("prompts.jsonl", '"0+0="', "5")]),
    Mistake("an empty prompt", PPO, ("prompts.jsonl:1", "empty"), ASIDE, spoils=[replace("prompts.jsonl", '"0+0="', '""')]),
    Mistake("an archive cut short", (*PPO, "data.path=rows.jsonl.gz"), ("rows.jsonl.gz",),
        spoils=[write("rows.jsonl.gz", gzip.compress(ROW.encode() * 30)[:40])]),
    Mistake("rows in Latin-1", PPO, ("prompts.jsonl:1", "UTF-8"), ASIDE,
        spoils=[write("prompts.jsonl", b'{"prompt": "caf\xe9", "answer": "2"}\n' + ROW.encode() * 20)]),
)  # fmt: skip

RUNS: tuple[Mistake, ...] = (
    Mistake("a run directory that is a file", (*PPO, "run_dir=t.model"), ("t.model",)),
    Mistake("a run directory below a file", (*PPO, "run_dir=t.model/run"), ("t.model",)),
    Mistake("a finished run written over", (*PPO, "run_dir=runs/done"), ("finished run",), VALIDATE),
)


RULES = "rewards=[{{kind: model}}, {{kind: verifier, {}}}]"
REWARD = "rewards=[{kind: model}, {kind: python, entry_point: 'my_rewards:short'}]"

SETTINGS: tuple[Mistake, ...] = (
    setting("a batch of no prompts", "rollout.batch_size=0", "rollout.batch_size=8", "0", "greater than or equal to 1"),
    setting("a batch size in words", "rollout.batch_size=many", "rollout.batch_size=8", "many", "integer"),
    setting("half a step", "steps=2.5", "steps=3", "2.5", "integer"),
    setting("no steps", "steps=0", "steps=1", "0", "greater than or equal to 1"),
    setting("steps as a flag", "steps=true", "steps=1", "not a boolean"),
    setting("a negative seed", "seed=-1", "seed=1", "-1", "greater than or equal to 0"),
    setting("a negative learning rate", "actor.optimizer.lr=-1e-6", "actor.optimizer.lr=1e-6", "greater than"),
    setting("a learning rate with a unit", "actor.optimizer.lr=1e-6/step", "actor.optimizer.lr=1e-6", "number"),
    setting("an infinite learning rate", "actor.optimizer.lr=.inf", "actor.optimizer.lr=1e-6", "finite"),
    setting("a temperature below zero", "rollout.temperature=-0.5", "rollout.temperature=0.5", "-0.5"),
    setting("top_p above one", "rollout.top_p=1.5", "rollout.top_p=0.95", "1.5"),
    setting("a discount above one", "ppo.gamma=1.1", "ppo.gamma=1.0", "1.1"),
    setting("a negative clip range", "ppo.clip=-0.2", "ppo.clip=0.2", "ppo.clip", "-0.2"),
    Mistake("a critic that warms up for longer than the prompts last",
            (*PPO, "steps=null", "epochs=1", "ppo.critic_warmup_steps=99"), ("ppo.critic_warmup_steps is 99", "raise epochs"),
            (*VALIDATE, "steps=null", "epochs=1", "ppo.critic_warmup_steps=1")),
    setting("minibatches that do not divide the batch", "ppo.minibatches=3", "ppo.minibatches=4", "3", "8"),
    setting("delta beyond what can be trained in time", "overlap.delta.max=33", "overlap.delta.max=32", "33", "8"),
    setting("delta that begins above its largest", "overlap.delta.initial=6", "overlap.delta.initial=4", "6", "4"),
    setting("no deferrals at all", "overlap.max_staleness=-1", "overlap.max_staleness=2", "-1"),
    setting("a rule for delta that is none", "overlap.delta.rule=eq5", "overlap.delta.rule=eq4", "eq5", "eq4"),
    setting("a placement that is none", "placement.mode=disagregated", "placement.mode=disaggregated", "disaggregated"),
    setting("a type that is none", "runtime.dtype=float16", "runtime.dtype=bfloat16", "float16", "bfloat16"),
    setting("ranks where one process is asked for", "placement.actor.tp=2", "placement.actor.tp=1", "tp 2", "single"),
    setting("tensor ranks that do not divide the heads", "placement={mode: colocated, actor: {tp: 3}}",
            "placement={mode: colocated, actor: {tp: 2}}", "tp", "3"),
    setting("more stages than layers", "placement={mode: colocated, actor: {pp: 5}}",
            "placement={mode: colocated, actor: {pp: 4}}", "pp", "5", "4"),
    setting("a loss of pairs without pairs", "dpo.beta=0.2", "ppo.kl.coefficient=0.2", "dpo is given", "ppo has no pairs"),
    setting("a wrong key", "rolout.batch_size=8", "rollout.batch_size=8", "rollout"),
    setting("a wrong key in a section", "rollout.batchsize=8", "rollout.batch_size=8", "batch_size"),
    setting("a section as a number", "overlap=3", "overlap.intra=true", "overlap"),
    setting("responses longer than the model", "rollout.max_response_tokens=200", "rollout.max_response_tokens=100", "128"),
    setting("prompts of no tokens", "data.max_prompt_tokens=0", "data.max_prompt_tokens=20", "0"),
    setting("a rule of rewards that is none", "rewards.1.name=gsm-8k", "rewards.1.name=gsm8k", "gsm-8k", "`gsm8k`?"),
    setting("a format without its pattern", RULES.format("name: format"), RULES.format("name: format, pattern: '.*[0-9]'"),
            "rewards.1", "`pattern`"),
    setting("a pattern that is none", RULES.format("name: format, pattern: '(<think>.*'"),
            RULES.format("name: format, pattern: '<think>.*'"), "rewards.1.pattern", "(<think>.*", "missing )"),
    setting("a penalty of lengths without its buffer", RULES.format("name: length"),
            RULES.format("name: length, buffer_tokens: 5"), "rewards.1", "buffer_tokens"),
    setting("a buffer longer than the responses", RULES.format("name: length, buffer_tokens: 50"),
            RULES.format("name: length, buffer_tokens: 5"), "buffer_tokens 50", "20"),
    setting("a penalty beyond the longest response", RULES.format("name: length, buffer_tokens: 5, max_tokens: 99"),
            RULES.format("name: length, buffer_tokens: 5"), "begins at 94 tokens", "max_response_tokens 20"),
    setting("a setting of another rule", RULES.format("name: gsm8k, pattern: '.*'"), RULES.format("name: gsm8k"),
            "rule gsm8k", "pattern", "only rule format"),
    setting("a weight that is no number", "rewards.1.weight=.nan", "rewards.1.weight=0.5", "finite"),
    setting("a reward part of no kind", "rewards=[{kind: model}, {name: gsm8k}]",
        "rewards=[{kind: model}, {kind: verifier, name: gsm8k}]", "kind"),
    setting("a function without its name", "rewards=[{kind: model}, {kind: python}]", REWARD, "entry_point", "module:function"),
    setting("a service without its address", "rewards=[{kind: http}]", "rewards=[{kind: model}]", "url"),
    setting("rewards of no part", "rewards=[]", "rewards=[{kind: model}]", "at least 1"),
    setting("a KV cache that is too small", "runtime.kv_cache_mb=0.01", "runtime.kv_cache_mb=64", "0.01"),
    setting("micro-batches of no tokens", "runtime.micro_batch_tokens=0", "runtime.micro_batch_tokens=512", "0"),
    setting("a console that is none", "logging.console=loud", "logging.console=plain", "loud", "plain"),
    setting("checkpoints at negative steps", "checkpoint.every_steps=-5", "checkpoint.every_steps=5", "-5"),
    setting("no checkpoint kept", "checkpoint.keep=0", "checkpoint.keep=1", "0"),
    setting("a KL coefficient below zero", "ppo.kl.coefficient=-0.1", "ppo.kl.coefficient=0.1", "-0.1"),
    setting("a loss of k1, which pulls at nothing", "ppo.kl.mode=loss", "ppo.kl={mode: loss, estimator: k3}", "k1", "k2", "k3"),
    setting("whole passes of no length", "epochs=0", "epochs=1", "0", command="sft"),
    setting("a policy for long rows that is none", "data.long_rows=drop", "data.long_rows=truncate", "drop", "truncate",
            command="rm"),
    setting("a row of one token", "max_tokens=1", "max_tokens=64", "1", command="sft"),
)  # fmt: skip


def _function(name: str, body: str, *says: str) -> Mistake:
    spoil, mend = write("my_rewards.py", body), write("my_rewards.py", REWARDS)
    typed, then = (*PPO, REWARD), (*VALIDATE, REWARD)
    return Mistake(name, typed, ("my_rewards", *says), then, spoils=[spoil], mends=[mend])


COMMANDS: tuple[Mistake, ...] = (
    Mistake("a command misspelt", ("vaildate", "train.yaml"), ("vaildate", "validate")), Mistake("no command", (), ("COMMAND",)),
    Mistake("no configuration", ("train",), ("CONFIG.yaml",)),
    Mistake("an option with an underscore", (*PPO, "--dry_run"), ("--dry_run", "--dry-run"), (*PPO, "--dry-run")),
    Mistake("an option of another command", (*VALIDATE, "--resume"), ("--resume",)),
    Mistake("a negative number of restarts", (*PPO, "--max-restarts", "-1"), ("-1", "at least 0")),
    Mistake("restarts in words", (*PPO, "--max-restarts", "two"), ("two",)),
    Mistake("a benchmark misspelt", ("bench", "overlp", "train.yaml"), ("overlp", "overlap"), ("bench", "--help")),
    Mistake("a case misspelt", ("config", "--init", "arithmetik"), ("arithmetik", "arithmetic"), ("config", "--init")),
    Mistake("a key misspelt in a question", ("config", "train.yaml", "--explain", "overlap.detla"), ("overlap.delta",),
        ("config", "train.yaml", "--explain", "overlap.delta")),
    Mistake("a report of no run", ("report", "runs"), ("runs",), ("report", "runs/done", "--watch")),
    Mistake("a report of a folder that is not there", ("report", "runs/dnoe"), ("runs/dnoe",),
        ("report", "runs/done", "--watch")),
    Mistake("watching no run", ("report", "runs/nothing", "--watch"), ("runs/nothing",), ("report", "runs/done", "--watch")),
    Mistake("a generator of rounds that is none", ("plan", "schedule", "train.yaml", "--generator", "wowen"), ("wowen", "woven"),
        ("plan", "schedule", "train.yaml", "--generator", "sequential")),
    Mistake("a conversion of nothing", ("convert", "aktor", "out", "--to", "hf"), ("aktor",), ("convert", "--help")),
    Mistake("a conversion onto itself", ("convert", "actor", "actor", "--to", "hf"), ("actor",), ("convert", "--help")),
    Mistake("a conversion to a format that is none", ("convert", "actor", "out", "--to", "gguf"), ("gguf",),
        ("convert", "--help")),
    Mistake("a service of a run's file", ("serve", "sft.yaml"), ("sft.yaml",), ("validate", "serve.yaml")),
    Mistake("a job without a partition's file", ("launch", "slurm", "tain.yaml"), ("tain.yaml",), JOB),
    Mistake("a job on a machine of another name", ("launch", "pbs", "train.yaml"), ("pbs", "slurm"), JOB),
)  # fmt: skip

FUNCTIONS: tuple[Mistake, ...] = (
    setting("a module that is not there", REWARD.replace("my_rewards:", "my_reward:"), REWARD, "my_reward"),
    setting("a function that is not there", REWARD.replace(":short", ":shrot"), REWARD, "shrot"),
    setting("a function without its module", REWARD.replace("my_rewards:", ""), REWARD, "module:function"),
    setting("a function's path as a file", REWARD.replace(":short", ".py"), REWARD, "module:function"),
    _function("a module with an error of syntax", "def short(prompt, response, fields)\n    return 0.0\n", "my_rewards.py:1"),
    _function("a module that imports what is not there", "import numpyy\n", "numpyy"),
    _function("a module that fails", "short = 1 / 0\n", "division by zero"),
    _function("a name that is no function", "short = 3\n", "short"),
    _function("a function of one argument", "def short(response):\n    return 1.0\n", "short"),
)  # fmt: skip

ENVIRONMENT: tuple[Mistake, ...] = (
    Mistake("RANK without WORLD_SIZE", PPO, ("WORLD_SIZE",), variables={"RANK": "0"}),
    Mistake("a rank beyond the world", PPO, ("rank 2 of 1",), variables={"RANK": "2", "WORLD_SIZE": "1"}),
    Mistake("more ranks than the placement has", PPO, ("4", "1"), variables={"RANK": "0", "WORLD_SIZE": "4"}),
    Mistake("a device that is not there", (*PPO, "runtime.device=cuda"), ("cuda",)),
    Mistake("a tracker that is not installed", (*PPO, "logging.trackers=[wandb:mine]"), ("wandb",)),
    Mistake("a continued run with other prompts", (*PPO, "--resume", "run_dir=runs/done"), ("runs/done",)),
)  # fmt: skip
