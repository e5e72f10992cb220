"""Patterns of rule `format` that no response can match are named before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.rewards.verifiers import literals
from oppo_megatron.train.inputs import unearned_formats
from tests.support.configs import least_config
from tests.support.tokenizers import CharacterTokenizer, save_byte_level

DOCUMENTED = "<think>.*</think>.*"


def config(pattern: str, **rollout: Any) -> TrainConfig:
    rewards = [{"kind": "verifier", "name": "format", "pattern": pattern}]
    return least_config(Path("run"), rewards=rewards, rollout={"batch_size": 8, "max_response_tokens": 100, **rollout})


@pytest.mark.parametrize(
    "pattern, found",
    [
        (DOCUMENTED, ["<think>", "</think>"]),
        (r"^<think>\n.*?\n</think>\n<answer>.*$", ["<think>", "</think>", "<answer>"]),
        (r"\[THINK\].{2,}\[/THINK\]", ["[THINK]", "[/THINK]"]),
        (r"(?:<\|begin_of_thought\|>)?[^<]*\d+(?!x)", ["<|begin_of_thought|>", "x"]),
        (r".*", []),
    ],
)
def test_literals_of_a_pattern(pattern: str, found: list[str]) -> None:
    assert literals(pattern) == found


def test_a_tag_that_is_a_special_token(tmp_path: Path) -> None:
    tags = ["<think>", "</think>"]
    path = save_byte_level(tmp_path, ["a b c <answer>"], additional_special_tokens=tags)
    tokenizer = load_tokenizer(TokenizerConfig(path=path))
    (warning,) = unearned_formats(config(DOCUMENTED), tokenizer, "2+2?")
    assert "it asks for '<think>', but special tokens (" in warning and "no text in a response" in warning
    assert not unearned_formats(config("<answer>.*</answer>"), tokenizer, "2+2?")


@pytest.mark.parametrize("prompt", ["<assistant><think>\n", "<assistant>\n<think>\n\n</think>\n\n"])
def test_a_prompt_that_opens_the_thought(prompt: str) -> None:
    (warning,) = unearned_formats(config(DOCUMENTED), CharacterTokenizer(), prompt)
    assert "the first prompt ends with it" in warning
    assert not unearned_formats(config(DOCUMENTED), CharacterTokenizer(), "Use <think> and </think>. 2+2?")


def test_a_stop_before_the_rest() -> None:
    pattern = "<think>.*</think><answer>.*</answer>"
    (warning,) = unearned_formats(config(pattern, stop=["</think>"]), CharacterTokenizer(), "2+2?")
    assert "it asks for '</think><answer>', but rollout.stop ends a response there" in warning
    assert not unearned_formats(config(pattern, stop=["</answer>"]), CharacterTokenizer(), "2+2?")
