"""The reference of settings: complete, with a meaning, a unit and the values of every setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oppo_megatron.config.base import Section
from oppo_megatron.config.describe import COMMANDS, Setting, all_settings, find_setting, near_keys, settings_in
from oppo_megatron.config.explain import known_keys
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig
from tools.reference import render_reference


def sections(kind: type[Section]) -> Iterator[type[Section]]:
    yield kind
    for setting in settings_in(kind):
        if setting.section is not None:
            yield from sections(setting.section)


ALL_SECTIONS = sorted({each for kind in COMMANDS.values() for each in sections(kind)}, key=lambda section: section.__name__)


def test_the_page_has_a_row_for_every_setting() -> None:
    page = render_reference()
    assert page.startswith("# Configuration\n")
    for section in ALL_SECTIONS:
        for setting in settings_in(section):
            assert f"\n| `{setting.name}` | " in page, (section.__name__, setting.name)


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_has_a_meaning(section: type[Section]) -> None:
    without = [setting.name for setting in settings_in(section) if not setting.meaning.strip()]
    assert not without, f"{section.__name__}: describe {without}"


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_number_has_a_unit(section: type[Section]) -> None:
    without = [setting.name for setting in settings_in(section) if setting.is_number and setting.unit is None]
    assert not without, f'{section.__name__}: write `Annotated[int, Unit("what it counts")]` for {without}'


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_choice_and_bound_is_among_the_values(section: type[Section]) -> None:
    """Compares with pydantic's own JSON schema, made from the same fields in another way."""
    schema = section.model_json_schema(ref_template="{model}")["properties"]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for setting in settings_in(section):
        shown = setting.values(lambda inner: "section")
        for node in nodes(schema[setting.name]):
            for choice in node.get("enum", []):
                assert f"`{choice}`" in shown, (setting.name, shown)
            for name, sign in signs.items():
                if name in node:
                    assert f"{sign} {node[name]:g}" in shown, (setting.name, shown)


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        for inner in tree.values():
            yield from nodes(inner)
    elif isinstance(tree, list):
        for inner in tree:
            yield from nodes(inner)


@pytest.mark.parametrize("kind", [TrainConfig, SFTConfig, RewardModelConfig])
def test_every_key_is_on_the_page(kind: type[Section]) -> None:
    blocks = render_reference().split("\n#")
    for key in known_keys(kind):
        place, _, name = key.rpartition(".")
        under = [b for b in blocks if f"`{place}`" in b.partition("\n|")[0] or f"`{place}[]`" in b.partition("\n|")[0]]
        assert any(f"| `{name}` |" in block for block in (under if place else blocks)), key


def test_defaults_bounds_and_types_are_shown() -> None:
    page = render_reference()
    for row in (
        "| `batch_size` | integer, ≥ 1 | rollouts | required | trained rollouts per step (paper's B) |",
        "| `top_p` | number, > 0, ≤ 1 | share | `1.0` |",
        '| `estimator` | `k1`, `k2`, `k3`, `k1+`, `k3+` |  | `"k1"` |',
        "| `chunk` | integer > 0 or list of integer > 0 | decode steps | `[32, 16, 64]` |",
        "| `reference` | [Role](#role) or `null` |  | `null` |",
        "| `path` | path or list of path |  | required |",
    ):
        assert row in page, row


def test_a_key_is_found_however_its_list_is_written() -> None:
    for key in ("rewards.kind", "rewards[].kind", "rewards.0.kind", "rewards[3].kind"):
        setting = find_setting(TrainConfig, key)
        assert setting is not None and setting.key == "rewards[].kind"
    for key in ("rewards.kid", "rollout.batch_size.x", "", "RUN_DIR"):
        assert find_setting(TrainConfig, key) is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rollout.batchsize", "rollout.batch_size"),
        ("overlap.dleta.rule", "overlap.delta.rule"),
        ("max_stalenes", "overlap.max_staleness"),
        ("actor.lr", "actor.optimizer.lr"),
        ("evaluation.metrcs", "evaluation.metrics"),
        ("reward.kind", "rewards[].kind"),
    ],
)
def test_near_misses(wrong: str, right: str) -> None:
    assert near_keys(COMMANDS, wrong)[0] == right


def test_every_key_can_be_found_again() -> None:
    for kind in COMMANDS.values():
        for setting in all_settings(kind):
            assert find_setting(kind, setting.key) == setting


def test_a_unit_is_said_by_the_name_or_by_the_field() -> None:
    def unit(key: str) -> str | None:
        setting = find_setting(TrainConfig, key)
        assert isinstance(setting, Setting)
        return setting.unit

    assert unit("runtime.timeout_s") == "s" and unit("runtime.kv_cache_mb") == "MiB"
    assert unit("overlap.delta.max") == "prompts" and unit("data.max_prompt_tokens") == "tokens"
    assert unit("seed") == "" and unit("overlap.intra") is None and unit("data") is None
