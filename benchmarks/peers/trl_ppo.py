"""TRL's own PPOTrainer on the work that a JSON file describes, and how long each step of it took.

    .venv-trl/bin/python benchmarks/peers/trl_ppo.py WORK.json RESULT.json
    .venv-trl/bin/python benchmarks/peers/trl_ppo.py --check      prints the versions of the environment, or what is wrong

`--any-build` before these asks for the pinned TRL only, with whatever torch and transformers a GPU's machine has.  Every step is
written as a line of RESULT.jsonl when it is done.

Runs in the environment of `requirements-trl.txt` and imports nothing of oppo_megatron; `compare.py` writes WORK.json
(`work.py` says what is in it) and reads RESULT.json.  The trainer's code is not changed.  What is put around it:

- the data loader hands out the prompts in their order (TRL's shuffles);
- a logits processor bans EOS and the padding token until a row's forced length is reached, and lets nothing but EOS be
  drawn there: TRL ends, pads and masks the row as it does any other.  The seconds that this takes are measured;
- a clock looks at the calls by which TRL goes from one phase to the next (`Clock`);
- with bfloat16, generation and scoring run under autocast as training does: accelerate wraps the training forward only.

Legend: B rows, P prompt tokens, L response tokens of the longest row, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).with_name("requirements-trl.txt")
EXIT_WRONG_INPUT = 2


class PeerError(Exception):
    """What the caller can correct."""


def main(arguments: Sequence[str]) -> int:
    any_build = list(arguments[:1]) == ["--any-build"]
    arguments = arguments[any_build:]
    try:
        pinned = REQUIREMENTS.read_text(encoding="utf-8")
        versions = require_versions(pinned, installed, ["trl"] if any_build else None)
        if list(arguments) == ["--check"]:
            print(json.dumps(versions))
            return 0
        if len(arguments) != 2:
            raise PeerError("usage: trl_ppo.py WORK.json RESULT.json, or --check; compare.py makes these calls")
        work = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        result = train(work, Path(arguments[1]).with_suffix(".jsonl"))
    except PeerError as error:
        print(f"trl_ppo: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    Path(arguments[1]).write_text(json.dumps({"versions": versions, **result}, indent=1) + "\n", encoding="utf-8")
    return 0


def installed(package: str) -> str | None:
    """The version of a package in this environment; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require_versions(
    requirements: str, version_of: Callable[[str], str | None], held: Sequence[str] | None = None
) -> dict[str, str]:
    """The versions of what `requirements` pins, as they are installed.

    Raises PeerError where one is missing, or where one of `held` (null: all) is another.
    """
    pins = [line.split("==") for line in requirements.splitlines() if "==" in line and not line.startswith("#")]
    found = {name: version_of(name) or "none" for name, _ in pins}
    # A build is told by what follows the plus sign: 2.13.0+cpu is 2.13.0.
    wrong = [
        f"{name} {found[name]} (pinned: {pin})"
        for name, pin in pins
        if found[name] == "none" or (found[name].split("+")[0] != pin and (held is None or name in held))
    ]
    if wrong:
        raise PeerError(
            f"TRL's environment has {', '.join(wrong)}; remove it and run `make bench-trl`, which installs what "
            f"{REQUIREMENTS.name} pins"
        )
    return found


class Clock:
    """Seconds of a step by phase.

    other     from the step's begin to the call of `batch_generation`: the data loader, garbage collection
    generate  `batch_generation`
    score     from its return to the first forward of the update: log-probs, reference, value and reward forwards, advantages
    train     from there to the callback `on_step_end`: epochs of forward, backward and optimizer, and TRL's metrics
    """

    PHASES = ("other", "generate", "score", "train")

    def __init__(self, synchronize: Callable[[], None]):
        self._synchronize = synchronize
        self.begin()

    def begin(self) -> None:
        self._synchronize()
        self._marks = [time.perf_counter()]

    def enter(self, phase: str) -> None:
        """The step goes on to a phase; a phase that it is in already is not entered again."""
        if len(self._marks) == self.PHASES.index(phase):
            self._synchronize()
            self._marks.append(time.perf_counter())

    def end(self) -> dict[str, float]:
        """Seconds by phase, and of the step.  Raises PeerError where TRL went another way than through all phases."""
        self._synchronize()
        if len(self._marks) != len(self.PHASES):
            raise PeerError(f"a step of TRL had {len(self._marks)} phases, not {', '.join(self.PHASES)}")
        ends = [*self._marks[1:], time.perf_counter()]
        seconds = {f"{name}_s": ends[i] - self._marks[i] for i, name in enumerate(self.PHASES)}
        return {"step_s": ends[-1] - self._marks[0], **seconds}


class ForcedRows:
    """A logits processor for one call of `generate`: every row draws EOS as its last token, and never before.

    Also never drawn is the padding token: TRL would take it for the end of the row.
    """

    def __init__(self, lengths: Sequence[int], prompt_tokens: int, eos_id: int, pad_id: int):
        self.prompt_tokens, self.eos_id, self.banned = prompt_tokens, eos_id, [eos_id, pad_id]
        self.ending: dict[int, list[int]] = {}  # rows by the number of their last token
        for row, length in enumerate(lengths):
            self.ending.setdefault(length, []).append(row)
        self.seconds = 0.0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores [B, V] of the next token, changed in place."""
        started = time.perf_counter()
        rows = self.ending.get(input_ids.shape[1] - self.prompt_tokens + 1)
        scores[:, self.banned] = -math.inf
        if rows is not None:
            scores[rows] = -math.inf
            scores[rows, self.eos_id] = 0.0
        self.seconds += time.perf_counter() - started
        return scores


class ForcedGenerate:
    """`generate` of the policy with the forced lengths of the rows that it is called with, in their order."""

    def __init__(self, generate: Callable[..., Any], work: Mapping[str, Any]):
        self.generate, self.work = generate, work
        self.rows = 0  # generated so far
        self.seconds = 0.0

    def __call__(self, input_ids: Any, **options: Any) -> Any:
        count = len(input_ids)
        lengths = self.work["lengths"][self.rows : self.rows + count]
        forced = ForcedRows(lengths, input_ids.shape[1], self.work["eos_id"], self.work["pad_id"])
        output = self.generate(input_ids=input_ids, logits_processor=[forced], **options)
        self.rows += count
        self.seconds += forced.seconds
        return output


def train(work: Mapping[str, Any], lines: Path) -> dict[str, Any]:
    """Train all steps, each a line of `lines`.  Returns the device, the precision and what each step took and held."""
    import torch

    if work["device"] == "cuda" and not torch.cuda.is_available():
        raise PeerError(f"the device is to be cuda, but torch {torch.__version__} of this environment finds none")
    torch.set_num_threads(work["threads"])
    bfloat16 = work["dtype"] == "bfloat16"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if bfloat16 else "no"  # the trainer's `bf16` option sets nothing

    from trl.experimental.ppo import ppo_trainer

    trainer, clock = build_trainer(work), Clock(torch.cuda.synchronize if work["device"] == "cuda" else _nothing)
    precision = "bf16" if bfloat16 else "no"
    if trainer.accelerator.mixed_precision != precision:
        raise PeerError(f"accelerate computes in {trainer.accelerator.mixed_precision!r}, not in {precision!r}")
    policy = trainer.policy_model
    policy.generate = generate = ForcedGenerate(policy.generate, work)
    steps: list[dict[str, Any]] = []
    batches: list[Any] = []

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(work["device"], torch.bfloat16) if bfloat16 else contextlib.nullcontext()

    def step_end() -> None:
        steps.append(_step(work, clock, generate, batches.pop(), len(steps)))
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(steps[-1]) + "\n")

    with watched(ppo_trainer, trainer.model, clock, autocast, batches.append):
        trainer.add_callback(_step_end(step_end))
        clock.begin()
        trainer.train()
    _require_finite(trainer.state.log_history, steps)
    return {
        "device": trainer.accelerator.device.type,
        "device_name": torch.cuda.get_device_name() if work["device"] == "cuda" else None,
        "threads": torch.get_num_threads(),
        "mixed_precision": precision,
        "attention": policy.config._attn_implementation,
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in _models(trainer).items()},
        "steps": steps,
    }


def build_trainer(work: Mapping[str, Any]) -> Any:
    """TRL's PPOTrainer over the models, prompts and settings of the work."""
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOTrainer

    def load(role: str, kind: Any) -> Any:
        return kind.from_pretrained(work["models"][role], dtype=torch.float32, local_files_only=True)

    policy = load("actor", AutoModelForCausalLM)
    tokenizer = build_tokenizer(policy.config.vocab_size, work["eos_id"], work["pad_id"])
    policy.generation_config.pad_token_id = work["pad_id"]
    prompts = Dataset.from_dict({"input_ids": work["prompts"]})
    trainer = PPOTrainer(
        args=ppo_config(work),
        processing_class=tokenizer,
        model=policy,
        ref_model=load("reference", AutoModelForCausalLM),
        reward_model=load("reward", AutoModelForSequenceClassification),
        value_model=load("critic", AutoModelForSequenceClassification),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(1)),  # asked for, never read
    )
    in_order = DataLoader(prompts, batch_size=work["batch_size"], collate_fn=trainer.data_collator, drop_last=True)
    trainer.dataloader = trainer.accelerator.prepare(in_order)
    return trainer


def ppo_config(work: Mapping[str, Any]) -> Any:
    """TRL's settings: one process, no logging but its own lines, nothing saved, no gradient checkpointing."""
    from trl.experimental.ppo import PPOConfig

    micro_batch, batch = work["micro_batch"], work["batch_size"]
    return PPOConfig(
        output_dir=work["output_dir"],
        use_cpu=work["device"] == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        seed=work["seed"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        total_episodes=work["steps"] * batch,
        local_rollout_forward_batch_size=batch,
        response_length=work["max_response_tokens"],
        stop_token="eos",  # noqa: S106  (a token of the vocabulary)
        temperature=work["temperature"],
        num_sample_generations=0,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        lr_scheduler_type="constant",
        **work["ppo"],
        **work["optimizer"],
    )


def build_tokenizer(vocab_size: int, eos_id: int, pad_id: int) -> Any:
    """A tokenizer whose tokens are the numbers of the vocabulary: prompts come as token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(i): i for i in range(vocab_size)}, unk_token=str(eos_id)))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=str(eos_id), pad_token=str(pad_id), padding_side="left"
    )


@contextlib.contextmanager
def watched(
    module: Any,
    trained: Any,
    clock: Clock,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    generated: Callable[[Any], None],
) -> Iterator[None]:
    """TRL's functions of generation and scoring, as the trainer's module knows them, with the clock and autocast around.

    `generated` is given queries and responses of each batch.
    """
    original = {name: getattr(module, name) for name in ("batch_generation", "forward", "get_reward")}

    def batch_generation(model: Any, queries: Any, *rest: Any) -> Any:
        clock.enter("generate")
        with autocast():
            query_responses, logits = original["batch_generation"](model, queries, *rest)
        clock.enter("score")
        generated((queries, query_responses))
        return query_responses, logits

    def forward(model: Any, *rest: Any) -> Any:
        if model is trained:
            clock.enter("train")
            return original["forward"](model, *rest)  # accelerate's own autocast
        with autocast():
            return original["forward"](model, *rest)

    def get_reward(*arguments: Any) -> Any:
        with autocast():
            return original["get_reward"](*arguments)

    wrappers = {"batch_generation": batch_generation, "forward": forward, "get_reward": get_reward}
    for name, wrapper in wrappers.items():
        setattr(module, name, wrapper)
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(module, name, function)


def _step_end(act: Callable[[], None]) -> Any:
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            act()

    return StepEnd()


def _step(work: Mapping[str, Any], clock: Clock, generate: ForcedGenerate, batch: Any, number: int) -> dict[str, Any]:
    """A finished step: its seconds, and the tokens of its rows as TRL has them.  The next step begins behind it."""
    seconds = clock.end()
    queries, query_responses = batch
    rows = slice(number * work["batch_size"], (number + 1) * work["batch_size"])
    prompts = [[token for token in row if token != work["pad_id"]] for row in queries.tolist()]
    if prompts != work["prompts"][rows]:
        raise PeerError(
            f"step {number + 1} of TRL has other prompts than rows {rows.start} to {rows.stop - 1} of the work"
        )
    responses = query_responses[:, queries.shape[1] :]
    found = {
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "response_tokens": (responses != work["pad_id"]).sum(1).tolist(),
        "ended_by_eos": int((responses == work["eos_id"]).any(1).sum()),
        "computed_tokens": query_responses.numel(),
        "forcing_s": generate.seconds,
    }
    generate.seconds = 0.0
    clock.begin()
    return seconds | found


def _require_finite(history: Sequence[Mapping[str, Any]], steps: list[dict[str, Any]]) -> None:
    """TRL's metrics of each step, kept with it.  Raises PeerError where one is not finite."""
    names = {"objective/scores": "reward_mean", "loss/policy_avg": "actor_loss", "loss/value_avg": "critic_loss"}
    for number, (step, metrics) in enumerate(zip(steps, history, strict=True), start=1):
        step |= {ours: metrics[theirs] for theirs, ours in names.items()}
        if wrong := [theirs for theirs in names if not math.isfinite(metrics[theirs])]:
            raise PeerError(f"step {number} of TRL has no finite {', '.join(wrong)}: it did not train")


def _models(trainer: Any) -> dict[str, Any]:
    return {
        "actor": trainer.policy_model,
        "reference": trainer.ref_model,
        "critic": trainer.value_model,
        "reward": trainer.reward_model,
    }


def _nothing() -> None:
    """A CPU has nothing to wait for."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
