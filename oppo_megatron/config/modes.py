"""The modes of the loop by name: which overlaps are on."""

from __future__ import annotations

from typing import Literal

from oppo_megatron.config.run import TrainConfig

MODES: dict[str, dict[str, bool]] = {
    "sequential": {"intra": False, "inter": False, "hide_critic": False, "backfill": False},
    "intra": {"intra": True, "inter": False, "hide_critic": False, "backfill": False},
    "inter": {"intra": False, "inter": True, "hide_critic": False, "backfill": False},
    "full": {"intra": True, "inter": True, "hide_critic": False, "backfill": False},
    "intra+critic": {"intra": True, "inter": False, "hide_critic": True, "backfill": False},
    "full+backfill": {"intra": True, "inter": True, "hide_critic": False, "backfill": True},
    "full+critic": {"intra": True, "inter": True, "hide_critic": True, "backfill": False},
    "full+both": {"intra": True, "inter": True, "hide_critic": True, "backfill": True},
}
"""The switches by name, `hide_critic` for no `critic` in `debug.wait_for`.  `full` is the paper's method."""


def switched(config: TrainConfig, mode: str) -> TrainConfig:
    """The configuration with the switches of a mode, and without a filter, which most modes cannot have."""
    overlap, wait_for = switches(mode)
    others = [each for each in config.debug.wait_for if each != "critic"]
    return config.model_copy(
        update={
            "overlap": config.overlap.model_copy(update=overlap),
            "filter": None,
            "debug": config.debug.model_copy(update={"wait_for": wait_for + others}),
        }
    )


def switches(mode: str) -> tuple[dict[str, bool], list[Literal["critic", "scores"]]]:
    """The settings of `overlap` and `debug.wait_for` of a mode."""
    overlap = {name: value for name, value in MODES[mode].items() if name != "hide_critic"}
    return overlap, [] if MODES[mode]["hide_critic"] else ["critic"]
