"""Scores responses to held-out prompts by each part of a reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from oppo_megatron.clock import by_time
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.data.prompt_tokens import encode_prompt
from oppo_megatron.data.tokenizer import load_tokenizer
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
    """Tries the parts before decoding.  Raises ConfigError for unusable ones."""

    def __init__(self, config: ServeConfig, environment: Mapping[str, str], *, summed: bool):
        """`summed`: the parts form one reward, whose sum is also reported."""
        self._config, self._summed = config, summed and len(config.rewards) > 1
        self._rewards = build_reward_functions(config.rewards, environment)

    @property
    def labels(self) -> list[str]:
        labels = [summand.label for summand in self._rewards.summands]
        return [*labels, SUM] if self._summed else labels

    def check(self, rows: Mapping[int, Mapping[str, Any]], longest: int, tell: Callable[[str], None]) -> dict[int, str]:
        """Return the `rows` (columns by number) that cannot be scored, with reasons.

        Raises DataError if none can be scored, ConfigError if the model does not read `longest` tokens.
        """
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
        """Open the reward model, if any.  Raises ConfigError or CheckpointError."""
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
