"""A continued run tells each setting that has changed, and where the checkpoint's value stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.load import config_yaml
from oppo_megatron.train.saving.state import changed_settings
from tests.support.configs import least_config


def tree(**sections: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(config_yaml(least_config(Path("runs/x"), **sections))))


def test_settings_that_changed_are_told() -> None:
    now = tree(steps=9, actor={"checkpoint": "a", "optimizer": {"lr": 2e-6}}, ppo={"kl": {"coefficient": 0.2}})
    told = changed_settings(tree(), now)
    assert "steps: null -> 9" in told and "ppo.kl.coefficient: 0.05 -> 0.2" in told
    assert any(line.startswith("actor.optimizer.lr: ") and line.endswith("-> 2e-06") for line in told)
    assert len(told) == 3


def test_what_goes_on_from_the_checkpoint_is_said() -> None:
    now = tree(actor={"checkpoint": "other"}, overlap={"delta": {"initial": 3}, "chunk": [48, 16]})
    told = "\n".join(changed_settings(tree(), now))
    assert "actor.checkpoint: a -> other (the actor's weights come from the checkpoint)" in told
    assert "overlap.delta.initial: 4 -> 3 (delta continues from the checkpoint)" in told
    assert "(the chunk size continues from the checkpoint)" in told
    followed = changed_settings(tree(ppo={"kl": {"target": 2.0}}), tree(ppo={"kl": {"target": 2.0, "coefficient": 0.2}}))
    assert followed == ["ppo.kl.coefficient: 0.05 -> 0.2 (the adaptive coefficient continues from the checkpoint)"]
    fixed = tree(overlap={"delta": {"rule": "fixed", "initial": 3}})
    assert not any("goes on" in line for line in changed_settings(tree(overlap={"delta": {"rule": "fixed"}}), fixed))


def test_a_part_of_a_list_and_a_section_that_come_or_go_are_told_in_a_line() -> None:
    parts = [{"kind": "verifier", "name": "gsm8k", "weight": 0.5}, {"kind": "verifier", "name": "arithmetic"}]
    told = changed_settings(tree(), tree(rewards=parts))
    assert "rewards.0.weight: 1.0 -> 0.5" in told
    assert [line for line in told if line.startswith("rewards.1: absent -> {kind: verifier, weight: 1.0, name: arithmetic")]
    assert len(told) == 2, told
    stop = {"early_stop": {"metric": "accuracy", "patience": 3, "mode": None}}
    assert changed_settings({"early_stop": None}, stop) == ["early_stop: null -> {metric: accuracy, patience: 3}"]
    assert changed_settings(stop, {}) == ["early_stop: {metric: accuracy, patience: 3} -> absent"]
    assert changed_settings({}, {"evaluation": None}) == [], "a setting that the code has got since"


def test_where_it_is_continued_is_no_change() -> None:
    assert changed_settings(tree(), tree() | {"run_dir": "elsewhere"}) == []


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), PLAIN), st.dictionaries(st.sampled_from("abc"), PLAIN))
def test_nothing_is_told_of_what_is_equal_and_something_of_all_else(then: dict[str, Any], now: dict[str, Any]) -> None:
    assert changed_settings(then, then) == []
    told = changed_settings(then, now)
    assert told if without_nulls(then) != without_nulls(now) else True
    assert then != now or not told


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
