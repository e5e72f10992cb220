"""docs/configuration.md is the schema: complete, with a meaning for every setting, and up to date."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oppo_megatron.config.base import Section
from oppo_megatron.config.explain import known_keys, section_in
from oppo_megatron.config.reference import meaning, render_reference
from oppo_megatron.config.run import RewardModelConfig, SFTConfig, TrainConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def sections(kind: type[Section]) -> Iterator[type[Section]]:
    yield kind
    for field in kind.model_fields.values():
        inner = section_in(field.annotation)
        if inner is not None:
            yield from sections(inner)


ALL_SECTIONS = sorted({*sections(TrainConfig), *sections(SFTConfig)}, key=lambda section: section.__name__)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m oppo_megatron.config.reference > docs/configuration.md"
    )


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_has_a_meaning(section: type[Section]) -> None:
    without = [name for name, field in section.model_fields.items() if not meaning(field).strip()]
    assert not without, f"{section.__name__}: describe {without}"


@pytest.mark.parametrize("kind", [TrainConfig, SFTConfig, RewardModelConfig])
def test_every_key_is_on_the_page(kind: type[Section]) -> None:
    """Each dotted key is a row of the table that stands under its section's place."""
    blocks = render_reference().split("\n#")
    for key in known_keys(kind):
        place, _, name = key.rpartition(".")
        under = [b for b in blocks if f"`{place}`" in b.partition("\n|")[0] or f"`{place}[]`" in b.partition("\n|")[0]]
        assert any(f"| `{name}` |" in block for block in (under if place else blocks)), key


def test_defaults_bounds_and_types_are_shown() -> None:
    page = render_reference()
    for row in (
        "| `batch_size` | integer, ≥ 1 | required | trained rollouts a step (the paper's B) |",
        "| `top_p` | number, > 0, ≤ 1 | `1.0` |",
        '| `estimator` | `k1`, `k2`, `k3` | `"k1"` |',
        "| `candidates` | list of integer | `[16, 32, 64]` |",
        "| `reference` | [Role](#role) or `null` | `null` |",
        "| `path` | path or list of path | required |",
    ):
        assert row in page
