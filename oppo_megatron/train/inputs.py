"""Reads all input of a PPO run before a model is built.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.config.derived import batch_rows, members, verdict_lag
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.data.prompts import PromptSet, load_prompts
from oppo_megatron.data.rows import Quarantine, RowProblems, require_some
from oppo_megatron.data.supervised_rows import describe_seen
from oppo_megatron.data.tokenizer import Tokenizer, hidden_ids, load_tokenizer, require_stop_texts
from oppo_megatron.errors import ConfigError
from oppo_megatron.nesting import read_json
from oppo_megatron.overcommit.scheduler import VerdictClock
from oppo_megatron.rewards.functions import RewardSum, build_reward_functions
from oppo_megatron.rewards.verifiers import literals

if TYPE_CHECKING:
    from oppo_megatron.engine.stopping import Quantile

SHOWN_REASONS = 3
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Inputs:
    tokenizer: Tokenizer
    rewards: RewardSum
    prompts: PromptSet
    heldout: PromptSet | None
    judges: RewardSum | None  # of held-out responses
    quarantine: Quarantine
    lengths: Quantile | None  # of a length trace
    warnings: list[str]  # of rewards that no response can earn

    def close(self) -> None:
        for rewards, _, _ in self.judged():
            rewards.close()

    def judged(self) -> Iterator[tuple[RewardSum, PromptSet, str]]:
        """Yield rewards, the prompts whose responses they judge, and the section of these prompts."""
        yield self.rewards, self.prompts, "data"
        if self.heldout is not None and self.judges is not None:
            yield self.judges, self.heldout, "evaluation.data"

    def counts(self) -> dict[str, dict[str, int]]:
        kinds = ("quarantined", "duplicates", "truncated")
        return {
            name: {"prompts": len(rows)} | {kind: getattr(rows, f"num_{kind}") for kind in kinds}
            for _, rows, name in self.judged()
        }


def read_inputs(config: TrainSettings, progress: Callable[[str], None] = lambda line: None) -> Inputs:
    """Read inputs; `progress` gets a line per row.  Raises ConfigError, DataError or RewardError."""
    tokenizer = load_tokenizer(config.tokenizer, config.actor.checkpoint)
    lengths = forced_quantile(config.rollout.lengths, config.rollout.max_response_tokens)
    require_stop_texts(config.rollout.stop_texts, tokenizer, "rollout.stop", "rollout.stop")
    metrics = [] if config.evaluation is None else config.evaluation.metrics
    for name, parts in (("rewards", config.rewards), ("evaluation.metrics", metrics)):
        for index, part in enumerate(parts):
            if part.kind == "process":
                require_stop_texts([part.separator], tokenizer, f"{name}.{index}.separator")
    longest = config.rollout.max_response_tokens
    rewards = build_reward_functions(config.rewards, max_response_tokens=longest)
    quarantine = Quarantine(progress=progress)
    prompts = load_prompts(
        config.data, tokenizer, quarantine=quarantine, check=rewards.check, responses_per_prompt=members(config).size
    )
    _require_training(config, prompts)
    heldout = judges = None
    if config.evaluation is not None:
        judges = build_reward_functions(config.evaluation.metrics, max_response_tokens=longest)
        heldout = load_prompts(config.evaluation.data, tokenizer, quarantine=quarantine, check=judges.check)
    warnings = unearned_formats(config, tokenizer, prompts.rows[0].text)
    return Inputs(tokenizer, rewards, prompts, heldout, judges, quarantine, lengths, warnings)


def _require_training(config: TrainSettings, prompts: PromptSet) -> None:
    warming, passes = config.ppo.critic_warmup_steps, config.passes
    steps = -(-prompts.rollouts(passes or 1) // batch_rows(config))  # refuses a weight that is too small
    if passes is not None and 0 < steps <= warming:
        raise ConfigError(
            f"ppo.critic_warmup_steps is {warming}, but {passes} x {prompts.rollouts(1) // members(config).size} prompts are "
            f"{steps} steps, and the policy would never be trained; lower it, or raise epochs"
        )


def unearned_formats(config: TrainSettings, tokenizer: Tokenizer, prompt: str) -> list[str]:
    found = []
    for part in [*config.rewards, *(config.evaluation.metrics if config.evaluation else ())]:
        if part.name != "format" or part.pattern is None:
            continue
        texts = literals(part.pattern)
        for place, text in enumerate(texts, start=1):
            if (special := hidden_ids(text, tokenizer)) is not None:
                reason = f"special tokens ({special}) have no text in a response; use words that are not special tokens"
            elif prompt.rstrip().endswith(text):
                reason = "the first prompt ends with it, so responses begin after it; leave it out of the pattern or the prompt"
            elif any(stop in text and (texts[place:] or not text.endswith(stop)) for stop in config.rollout.stop_texts):
                reason = "rollout.stop ends a response there, before the rest of the pattern; remove that stop"
            else:
                continue
            found.append(f"WARNING: pattern {part.pattern!r} of rule format may never match: it asks for {text!r}, but {reason}")
            break
    return found


def try_answers(inputs: Inputs, settings: TrainSettings, *, every: bool = True) -> Inputs:
    """Set aside rows whose expected answers cannot be compared, and close the rewards.  Raises DataError by `data.bad_rows`."""
    with closing(inputs):
        refused = [rewards.unusable([row.fields for row in prompts.rows], every=every) for rewards, prompts, _ in inputs.judged()]
    return without_refused(inputs, settings, refused)


def without_refused(inputs: Inputs, settings: TrainSettings, refused: Sequence[Mapping[int, str]]) -> Inputs:
    """Set rows aside; `refused`: reasons by place, for each set of `judged`.  Raises DataError by `data.bad_rows`."""
    left = []
    for (_, prompts, name), reasons in zip(inputs.judged(), refused, strict=True):
        problems = RowProblems(inputs.quarantine)
        data = settings.data if name == "data" or settings.evaluation is None else settings.evaluation.data
        for place, why in reasons.items():
            file, _, line = prompts.rows[place].place.rpartition(":")
            problems.report(file, int(line), why, data.bad_rows)
        require_some(len(prompts) - len(reasons), data, problems)
        left.append(prompts.without(reasons))
    _require_training(settings, left[0])
    return replace(inputs, prompts=left[0], heldout=left[1] if len(left) > 1 else None)


def refused_before(prompts: PromptSet, quarantine: Path) -> dict[int, str]:
    """Rows that a run set aside before it was interrupted: a second trial, on a busy machine, may have another outcome."""
    lines = quarantine.read_text(encoding="utf-8").splitlines() if quarantine.exists() else []
    reasons = {f"{entry['file']}:{entry['line']}": entry["reason"] for entry in map(read_json, lines)}
    return {place: reasons[row.place] for place, row in enumerate(prompts.rows) if row.place in reasons}


def describe_inputs(inputs: Inputs) -> list[str]:
    lines = [
        f"{name}: {count['prompts']} prompts, {count['duplicates']} of them duplicates, {count['truncated']} cut at "
        f"max_prompt_tokens; {count['quarantined']} rows set aside"
        for name, count in inputs.counts().items()
    ]
    if inputs.heldout is not None:
        lines += describe_seen((row.tokens for row in inputs.heldout.rows), (row.tokens for row in inputs.prompts.rows))
    return [*lines, *describe_quarantine(inputs.quarantine), *inputs.rewards.describe(), *inputs.warnings]


def describe_quarantine(quarantine: Quarantine) -> list[str]:
    first = [f"  {entry['file']}:{entry['line']}: {entry['reason']}" for entry in quarantine.entries[:SHOWN_REASONS]]
    left = len(quarantine) - len(first)
    return [*quarantine.notes, *first, *([f"  and {left} more"] if left else [])]


def describe_first(quarantine: Quarantine) -> list[str]:
    lines = []
    for part, text in quarantine.first.items():
        shown = repr(text)
        if len(text) > 2 * SHOWN_CHARACTERS:
            shown = f"{text[:SHOWN_CHARACTERS]!r} ... {text[-SHOWN_CHARACTERS:]!r} ({len(text)} characters)"
        lines.append(f"  {part}: {shown}")
    return ["the first row as the model reads it:", *lines] if lines else []


def verdict_clock(config: TrainConfig) -> VerdictClock | None:
    """Time at which finished responses are judged; None without a filter."""
    if config.filter is None:
        return None
    period = config.overlap.admission_period
    assert period is not None, "a filter asks for backfill"
    return VerdictClock(period, verdict_lag(config, config.filter))
