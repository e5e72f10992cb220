from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from oppo_megatron.clock import by_time
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.control.estimates import Estimate, estimate, paired_difference
from oppo_megatron.data.tokenizer import encode_prompt, load_tokenizer
from oppo_megatron.errors import ConfigError, DataError, RewardError
from oppo_megatron.rewards.functions import build_reward_functions
from oppo_megatron.rewards.protocol import Item, ScoreItem
from oppo_megatron.serving.scorers import open_model_scores

SUM = "reward"
"""The weighted sum, if requested and there are several parts."""


@dataclass(frozen=True)
class Answer:
    """A response, as `oppo generate` writes it."""

    row: int
    sample: int
    prompt: str
    response: str
    finish_reason: str
    num_tokens: int
    fields: Mapping[str, Any]


Grade = Callable[[Sequence[Answer]], list[dict[str, float]]]
"""Scores of each answer by part label, and their weighted sum if requested."""


class Grader:
    """Tries the parts before decoding. Raises ConfigError for unusable ones."""

    def __init__(self, config: ServeConfig, environment: Mapping[str, str], *, summed: bool):
        """`summed`: the parts form one reward, whose sum is also reported."""
        self._config, self._summed = config, summed and len(config.rewards) > 1
        self._rewards = build_reward_functions(config.rewards, environment)

    @property
    def labels(self) -> list[str]:
        labels = [summand.label for summand in self._rewards.summands]
        return [*labels, SUM] if self._summed else labels

    def check(self, rows: Mapping[int, Mapping[str, Any]], longest: int, tell: Callable[[str], None]) -> dict[int, str]:
        """Return `rows` (by number) that cannot be scored. Raises DataError for all, ConfigError if `longest` does not fit."""
        if self._rewards.reads_model() and longest > self._config.max_tokens:
            raise ConfigError(
                f"prompts and responses have up to {longest} tokens, but the reward model reads {self._config.max_tokens}; lower "
                "--max-tokens, or take a reward model of longer context"
            )
        refused = dict[int, str]()
        for row, fields in rows.items():
            try:
                self._rewards.check(fields)
            except RewardError as error:
                refused[row] = str(error)
        left = [row for row in rows if row not in refused]
        refused |= {left[place]: why for place, why in self._rewards.unusable([rows[row] for row in left], tell).items()}
        if rows and len(refused) == len(rows):
            row, why = next(iter(refused.items()))
            raise DataError(f"row {row} of the data cannot be scored, nor can any other: {why}")
        return refused

    @contextmanager
    def opened(self) -> Iterator[Grade]:
        """Raises ConfigError or CheckpointError."""
        rewards = self._rewards
        with closing(rewards), open_model_scores(self._config, rewards) as model_scores:
            yield lambda answers: self._grade(answers, model_scores(self._items(answers)))

    def _items(self, answers: Sequence[Answer]) -> list[Item]:
        """Encode by the reward model's tokenizer; a response that was cut gets no EOS."""
        tokenizer = None if self._config.tokenizer is None else load_tokenizer(self._config.tokenizer)
        items = []
        for number, each in enumerate(answers):
            tokens = None
            if tokenizer is not None:
                end = [tokenizer.eos_id] if each.finish_reason == "eos" else []
                tokens = [*encode_prompt(tokenizer, each.prompt + each.response), *end]
            items.append(Item(id=number, prompt=each.prompt, response=each.response, tokens=tokens))
        return items

    def _grade(self, answers: Sequence[Answer], model_scores: Sequence[float | None]) -> list[dict[str, float]]:
        graded = []
        self._rewards.request([ScoreItem(number, each.prompt, each.response, each.fields) for number, each in enumerate(answers)])
        progress = by_time()
        for number, (each, score) in enumerate(zip(answers, model_scores, strict=True)):
            progress(f"{number} of {len(answers)} responses judged")
            reward = self._rewards.evaluate(each.prompt, each.response, each.fields, score, number, num_tokens=each.num_tokens)
            graded.append({**reward.parts, SUM: reward.total} if self._summed else dict(reward.parts))
        return graded


LENGTH = "response tokens"


@dataclass(frozen=True)
class Judged:
    also: ClassVar[tuple[str, ...]] = (LENGTH,)
    name: str
    answers: Sequence[Answer]
    grades: Sequence[Mapping[str, float]]

    def by_prompt(self, metric: str) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for answer, grade in zip(self.answers, self.grades, strict=True):
            value = float(answer.num_tokens) if metric == LENGTH else grade[metric]
            found.setdefault(answer.row, []).append(value)
        return found

    def estimate(self, metric: str) -> Estimate:
        return estimate(self.by_prompt(metric))

    def about(self) -> dict[str, Any]:
        return {"prompts": len(self.by_prompt(LENGTH)), "responses": len(self.answers), "finish_reasons": self.finish_reasons()}

    def finish_reasons(self) -> dict[str, float]:
        counts = Counter(answer.finish_reason for answer in self.answers)
        return {reason: count / len(self.answers) for reason, count in sorted(counts.items())}


@dataclass(frozen=True)
class Measured(Judged):
    """A policy's figures on tasks, by task and metric."""

    found: Mapping[str, Mapping[str, Any]]
    also = ()

    def by_prompt(self, metric: str) -> dict[int, list[float]]:
        return {int(document): [value] for document, value in self.found[metric]["documents"].items()}

    def estimate(self, metric: str) -> Estimate:
        return Estimate(self.found[metric]["mean"], self.found[metric]["error"], len(self.found[metric]["documents"]))

    def about(self) -> dict[str, Any]:
        return {}


def as_json(policies: Sequence[Judged], metrics: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    first, entries = policies[0], []
    for policy in policies:
        estimates = {m: asdict(policy.estimate(m)) for m in (*metrics, *first.also)}
        entry = {"policy": policy.name, **policy.about(), "metrics": estimates}
        if policy is not first:
            entry["difference"] = {m: asdict(_difference(first, policy, m)) for m in (*metrics, *first.also)}
        entries.append(entry)
    return {"settings": dict(settings), "policies": entries}


def as_table(policies: Sequence[Judged], metrics: Sequence[str]) -> str:
    """A row per metric, a column per policy, with paired differences from the first."""
    first, rest = policies[0], policies[1:]
    head = ["", first.name]
    for policy in rest:
        head += [policy.name, f"minus {first.name}" if len(rest) == 1 else "minus the first"]
    rows = [head]
    for metric in (*metrics, *first.also):
        row = [metric, _shown(first.estimate(metric))]
        for policy in rest:
            row += [_shown(policy.estimate(metric)), _shown(_difference(first, policy, metric), sign="+")]
        rows.append(row)
    reasons = sorted({reason for policy in policies for reason in policy.finish_reasons()})
    for reason in reasons:
        row = [f"ended by {reason}", _share(first, reason)]
        for policy in rest:
            row += [_share(policy, reason), ""]
        rows.append(row)
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _difference(first: Judged, policy: Judged, metric: str) -> Estimate:
    before, after = first.by_prompt(metric), policy.by_prompt(metric)
    if not before:  # a metric of all documents together
        return Estimate(policy.estimate(metric).mean - first.estimate(metric).mean, None, 0)
    return paired_difference(before, after)


def _share(policy: Judged, reason: str) -> str:
    return f"{100 * policy.finish_reasons().get(reason, 0.0):.1f} %"


def _shown(value: Estimate, sign: str = "") -> str:
    digits = "+.4g" if sign else ".4g"
    error = "" if value.error is None else f" ± {value.error:.2g}"
    return f"{format(value.mean, digits)}{error}"
