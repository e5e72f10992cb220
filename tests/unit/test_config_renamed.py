"""Old keys are refused with their new names, and what an older run wrote down is read with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.config.aligner import AlignerConfig, read_aligner_config
from oppo_megatron.config.base import Section
from oppo_megatron.config.changes import changed_settings
from oppo_megatron.config.describe import COMMANDS, find_setting, settings_in
from oppo_megatron.config.load import load_config
from oppo_megatron.config.renamed import (
    NOW_SECTIONS,
    RENAMED,
    RENAMED_VALUES,
    Fixed,
    Moved,
    take_out_renamed,
    with_new_names,
)
from oppo_megatron.config.run import SFTConfig, TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.policy.finding import read_run
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.saving.telling import tell_of_changes

BLOCK = "trainer.ppo.oppo."
ROOT = Path(__file__).resolve().parents[2]


def exists(key: str) -> bool:
    if key.startswith(BLOCK):
        return find_setting(AlignerConfig, key.removeprefix(BLOCK)) is not None
    return any(find_setting(kind, key) is not None for kind in COMMANDS.values())


def tree_of(key: str, value: Any) -> Any:
    """A configuration that holds the key alone."""
    for name in reversed(key.replace("[]", ".[]").split(".")):
        value = [value] if name == "[]" else {name: value}
    return value


@pytest.mark.parametrize("old", RENAMED)
def test_every_old_key_is_refused_with_its_new_name(old: str) -> None:
    rule = RENAMED[old]
    left, problems = take_out_renamed(tree_of(old, 7))
    shown = old.replace("[]", ".0")
    assert len(problems) == 1 and left in ({}, tree_of(old.partition("[]")[0], [{}]))
    if isinstance(rule, Moved):
        assert problems[0].startswith(f"`{shown}` is now `{rule.key}`; ") and exists(rule.key)
    else:
        assert problems[0].startswith(f"`{shown}` is 7, but is now fixed at {rule.at}, because ")
        assert problems[0].endswith("; remove it")
    assert not exists(old)


def test_the_table_has_old_names_of_both_kinds() -> None:
    assert len(RENAMED) > 60
    assert {type(rule) for rule in RENAMED.values()} == {Moved, Fixed}


@pytest.mark.parametrize("key", RENAMED_VALUES)
def test_every_old_word_is_refused_with_its_new_one(key: str) -> None:
    for old, new in RENAMED_VALUES[key].items():
        left, problems = take_out_renamed(tree_of(key, old))
        assert problems == [f"`{key}`: {old!r} is now called {new!r}; rename it"] and left == tree_of(key, new)
        setting = find_setting(TrainConfig, key)
        assert setting is not None and f"`{new}`" in setting.values(str) and f"`{old}`" not in setting.values(str)


@pytest.mark.parametrize("key", NOW_SECTIONS)
def test_a_word_in_a_sections_place_is_told_its_key(key: str) -> None:
    _, problems = take_out_renamed(tree_of(key, "skip"))
    assert problems == [f"`{key}` is now a section; write `{NOW_SECTIONS[key]}: skip` in it"]
    assert exists(f"{key}.{NOW_SECTIONS[key]}")


def test_file_and_command_line_are_told_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    text = (ROOT / "examples" / "benchmark" / "overlap.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("rollout:\n", "rollout:\n  forced_lengths: {median: 9}\n"), encoding="utf-8")
    old = ["rewards.0.remote.retry_s=3", "overlap.backfill_every=4", "runtime.decode_path=lean", "max_deferals=1"]
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, path, old)
    assert caught.value.problems == [
        "`rollout.forced_lengths.median` is now `debug.forced_lengths`; write [median, sigma] (1 where there was no sigma)",
        "`overlap.backfill_every` is now `overlap.backfill`; write the number there in place of true",
        "`rewards.0.remote.retry_s` is 3, but is now fixed at 0.5 s, doubled up to 30 s, because a service that fails for a "
        "while needs no other pauses; remove it",
        "`runtime.decode_path`: 'lean' is now called 'fused'; rename it",
        "`max_deferals` is not a setting; the settings here are: " + ", ".join(TrainConfig.model_fields),
    ]


def test_the_block_of_nemo_aligner_is_told_too() -> None:
    with pytest.raises(ConfigError) as caught:
        read_aligner_config({"delta": {"ess_floor": 0.5}, "scorer": {"url": "http://x", "give_up_s": 3}})
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "`trainer.ppo.oppo.delta.ess_floor`",
        "`trainer.ppo.oppo.scorer.give_up_s`",
    ]


OLD_TRAIN: dict[str, Any] = {
    "data_epochs": 2,
    "rewards": [
        {
            "kind": "http", "url": "http://h/", "isolate": False,
            "limits": {"wall_s": 30.0, "cpu_s": 30, "memory_mb": 4096, "start_s": 60.0},
            "remote": {"on_failure": "stop", "give_up_s": 600.0, "min_score": None, "max_score": 2.0, "retry_s": 0.5},
        },
        {"kind": "python", "entry_point": "a:b", "isolate": True, "limits": {"wall_s": 5.0, "memory_mb": 4096}},
        {"kind": "verifier", "name": "gsm8k", "method": "flexible", "match": "full", "partial_credit": False},
        {"kind": "verifier", "name": "math", "method": "strict", "match": "full", "partial_credit": False},
    ],
    "rollout": {"stop": ["x"], "stop_token_ids": [3], "forced_lengths": {"trace": "t.csv", "column": "Words"}},
    "ppo": {
        "kl": {"mode": "loss", "adaptive": {"target": 2.0, "horizon": 1e4}},
        "staleness": {"correction": "decoupled", "weight_cap": 2.0}, "logprob_gap_limit": None, "ratio_cap": 5.0,
    },
    "overlap": {
        "weave": {"micro_batches": "auto", "prefill_tokens": 64}, "backfill": True, "backfill_every": 32,
        "hide_critic": False, "forward_ahead": True, "beside_actor": "last",
        "delta": {"target_waste": 0.35, "max": 3, "decrease": 2}, "chunk": {"trials": 1, "adaptive": True, "candidates": [8, 16]},
    },
    "runtime": {"decode_path": "lean", "rendezvous_timeout_s": 300.0},
    "guards": {"logprob_gap": "skip", "max_skips": 3},
    "checkpoint": {"keep_best": True, "best_metric": "judge", "best_mode": "min", "final": True},
    "save_weights": False,
    "early_stop": {"metric": "accuracy", "mode": None, "min_delta": 0.0},
    "evaluation": {"max_prompts": 9, "answer": "answer", "data": {"long_prompts": "error"}},
    "preempt": {"enabled": False, "deadline_s": 120.0},
    "stall": {"deadline_s": 60.0},
    "logging": {"wandb_mode": None, "actions": True, "trace": True},
    "actor": {"optimizer": {"beta1": 0.8, "beta2": 0.95}},
}  # fmt: skip


def test_what_an_older_run_wrote_down_is_read_with_the_new_names() -> None:
    assert with_new_names(OLD_TRAIN) == {
        "epochs": 2,
        "rewards": [
            {"kind": "http", "url": "http://h/", "isolate": False, "remote": {"give_up_s": 0.0, "score_range": [None, 2.0]}},
            {"kind": "python", "entry_point": "a:b", "isolate": {"wall_s": 5.0}},
            {"kind": "verifier", "name": "gsm8k", "lenient": True},
            {"kind": "verifier", "name": "math", "lenient": False},
        ],
        "rollout": {"stop": ["x", 3]},
        "ppo": {"kl": {"mode": "loss", "target": 2.0}, "staleness": "decoupled", "clip_high": 4.0},
        "overlap": {"weave": ["auto", 64], "backfill": 32, "delta": {"max": 3, "change": [1, 2]}, "chunk": {"adaptive": [8, 16]}},
        "debug": {"forced_lengths": ["t.csv", "Words"], "wait_for": ["critic"]},
        "runtime": {"decode_path": "fused"},
        "guards": {"logprob_gap": {"action": "skip", "limit": None}},
        "checkpoint": {"keep_best": "min judge", "final": "nothing"},
        "early_stop": {"metric": "accuracy"},
        "evaluation": {"max_rows": 9, "data": {"long_rows": "error"}},
        "preempt_deadline_s": 0.0,
        "stall_deadline_s": 60.0,
        "logging": {"trace": "actions"},
        "actor": {"optimizer": {"betas": [0.8, 0.95]}},
    }


def test_oppo_config_says_what_has_become_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    for key, says in {
        "max_steps": "`max_steps` is now `steps`; rename it",
        "rewards.limits.wall_s": "`rewards.limits.wall_s` is now `rewards[].isolate`; ",
        "overlap.delta.ess_floor": "`overlap.delta.ess_floor` is now fixed at 0.8",
    }.items():
        assert main(["config", "--explain", key]) == 2
        assert says in capsys.readouterr().err


def test_what_goes_on_from_an_older_run_is_told_by_the_new_names(tmp_path: Path) -> None:
    assert tell_of_changes({"max_steps": 4, "stall": {"deadline_s": 9.0}}, {"steps": 5, "stall_deadline_s": 9.0}, {}, {}) == [
        "changed: steps: 4 -> 5"
    ]
    settings = {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"checkpoint": "m"}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings | {"max_steps": 4, "preempt": {"enabled": False}}))
    assert RunDirectory(tmp_path).settings()["steps"] == 4
    run = read_run(tmp_path)
    assert (run.steps, run.preempt_deadline_s) == (4, 0.0)


@pytest.mark.parametrize("tree", [{}, {"overlap": None, "preempt": [1], "rewards": "x", 3: {"a": 1}}])
def test_a_tree_without_old_keys_stays_as_it_is(tree: dict[Any, Any]) -> None:
    assert with_new_names(tree) == tree and take_out_renamed(tree) == (tree, [])


def test_a_run_of_an_older_version_goes_on_without_a_word_of_what_was_only_renamed() -> None:
    """Its settings against those that now say the same."""
    settings: dict[str, Any] = {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"checkpoint": "m"}}
    now = SFTConfig(**settings, steps=5, stall_deadline_s=7).model_dump(mode="json")
    then = with_new_names(
        settings
        | {"max_steps": 4, "long_rows": "quarantine", "stall": {"deadline_s": 7.0}}
        | {"preempt": {"enabled": True, "deadline_s": 120.0}, "optimizer": {"beta1": 0.9, "beta2": 0.95}}
        | {"data": {"path": "d", "long_prompts": "error"}}
    )
    told = [line for line in changed_settings(then, now) if "absent" not in line and "{" not in line]
    assert told == ["steps: 4 -> 5"]


def settings_with_a_default() -> dict[type[Section], list[str]]:
    """Of each section class those that a user may leave out, where it is the class that brings them in."""
    import oppo_megatron.config.describe  # noqa: F401  (it reads every module with sections)

    found: dict[type[Section], list[str]] = {}
    pending = list(Section.__subclasses__())
    while pending:
        section = pending.pop()
        pending += section.__subclasses__()
        if section.__module__.startswith("oppo_megatron.config"):
            inherited = {name for base in section.__bases__ if issubclass(base, Section) for name in base.model_fields}
            found[section] = [
                name
                for name, field in section.model_fields.items()
                if name not in inherited and not field.is_required()
            ]
    return found


def test_there_are_no_more_settings_than_a_page_can_hold() -> None:
    """A setting that nobody sets is a constant of the module that uses it; one of benchmarks alone lies under `debug`."""
    assert sum(map(len, settings_with_a_default().values())) <= 238


MOST = {"train": 205, "sft": 82, "rm": 82, "prm": 83, "dpo": 90, "kto": 89, "serve-reward": 55, "serve-scorer": 26}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_no_more_settings_than_it_reads(command: str) -> None:
    """Those of its sections that may be left out; a section that stands at several places counts once."""
    with_default, pending = settings_with_a_default(), [COMMANDS[command]]
    reached: set[tuple[type[Section], str]] = set()
    seen: set[type[Section]] = set()
    while pending:
        section = pending.pop()
        seen.add(section)
        pending += {each.section for each in settings_in(section) if each.section is not None} - seen
        reached |= {
            (owner, name)
            for owner in section.__mro__
            for name in with_default.get(owner, ())
            if not section.model_fields[name].is_required()
        }
    assert len(reached) <= MOST[command]


def test_what_an_older_run_wrote_down_of_settings_that_it_did_not_read_is_left_out() -> None:
    columns = {"prompt": "q", "completion": None, "label": None}
    data = {"path": "d", "turns": "last", "completion_template": "{completion}", "columns": columns, "max_prompt_tokens": 9}
    of_prompts = {"path": "d", "columns": {"prompt": "q"}, "max_prompt_tokens": 9}
    tree = {"rollout": {"batch_size": 2}, "data": data, "evaluation": {"data": data}}
    assert with_new_names(tree) == {**tree, "data": of_prompts, "evaluation": {"data": of_prompts}}
    answers = {key: value for key, value in data.items() if key != "max_prompt_tokens"}
    assert with_new_names({"model": {}, "data": data}) == {"model": {}, "data": answers}
