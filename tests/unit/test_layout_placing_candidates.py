"""Which placements `auto` measures: by machine and shapes, each of them valid, what is not possible with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.model import PlacementConfig
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.candidates import Candidate, Machine, Options, find_candidates, fingerprint, most_ranks, probe_config
from oppo_megatron.layout.checks import check_auto_placement, check_layouts
from oppo_megatron.layout.placements import world_size

ROLES = ("actor", "reference", "critic")


def shape(kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": kv_heads, "vocab_size": 96, "max_position_embeddings": 256,
    }  # fmt: skip


def settings(kv_heads: int = 2, batch: int = 16, **changes: Any) -> TrainSettings:
    tree = {
        "run_dir": "run", "placement": {"mode": "auto"}, "tokenizer": {"path": "tok"},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 28}, "actor": {"init": shape(kv_heads)},
        "critic": {"init": shape(kv_heads)}, "rewards": [{"kind": "verifier", "name": "gsm8k"}],
        "rollout": {"batch_size": batch, "max_response_tokens": 100},
    }  # fmt: skip
    return TrainSettings.model_validate(tree | changes)


def names(options: Options) -> list[str]:
    return [candidate.name for candidate in options.candidates]


PAIRS = ("disaggregated 1 | 1", "disaggregated 1 | 1 (reference: actor)")
CPU = {
    1: ["single"],
    2: ["single", *PAIRS, "colocated dp 2", "colocated tp 2"],
    4: [
        "single", *PAIRS,
        "disaggregated dp 3 | 1", "disaggregated dp 3 | 1 (reference: actor)", "disaggregated dp 2 | dp 2",
        "disaggregated tp 2 | tp 2", "disaggregated dp 2 | dp 2 (reference: actor)",
        "colocated dp 4", "colocated tp 2 x dp 2",
    ],
    8: [
        "single", *PAIRS,
        "disaggregated dp 7 | 1", "disaggregated dp 7 | 1 (reference: actor)", "disaggregated dp 6 | dp 2",
        "disaggregated tp 2 x dp 3 | tp 2", "disaggregated dp 6 | dp 2 (reference: actor)", "disaggregated dp 4 | dp 4",
        "disaggregated tp 2 x dp 2 | tp 2 x dp 2", "disaggregated dp 4 | dp 4 (reference: actor)",
        "colocated dp 8", "colocated tp 2 x dp 4",
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads_are_our_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("cores", CPU)
def test_on_cores(cores: int) -> None:
    options = find_candidates(settings(), Machine("cpu", cores))
    assert names(options) == CPU[cores]
    assert [option.name for option in options.left_out] == (["disaggregated", "colocated"] if cores == 1 else [])


@pytest.mark.parametrize("devices", CPU)
def test_on_cuda_devices_none_lies_idle(devices: int) -> None:
    options = find_candidates(settings(), Machine("cuda", devices))
    shared = ["single", *PAIRS] if devices > 2 else ["single"]
    assert names(options) == (["single"] if devices == 1 else [name for name in CPU[devices] if name not in shared])
    assert all(candidate.num_ranks == devices for candidate in options.candidates)
    if devices > 1:
        assert f"one process uses one of {devices} CUDA devices" in [option.reason for option in options.left_out]


@pytest.mark.parametrize(
    ("kv_heads", "batch", "expected"),
    [(1, 16, ["dp 8"]), (8, 16, ["dp 8", "tp 8"]), (8, 6, ["tp 2 x dp 4", "tp 8"]), (8, 1, ["tp 8"])],
)
def test_shapes_and_batch_bound_the_layouts(kv_heads: int, batch: int, expected: list[str]) -> None:
    options = find_candidates(settings(kv_heads, batch, overlap={"inter": False}), Machine("cpu", 8))
    assert [name[10:] for name in names(options) if name.startswith("colocated")] == expected


def test_what_no_layout_fits_is_left_out_with_the_reason() -> None:
    options = find_candidates(settings(1, 4, overlap={"inter": False}), Machine("cuda", 8))
    assert names(options) == ["disaggregated dp 4 | dp 4", "disaggregated dp 4 | dp 4 (reference: actor)"]
    reasons = {option.name: option.reason for option in options.left_out}
    assert set(reasons) == {"single", "disaggregated 7 | 1", "disaggregated 6 | 2", "colocated"}
    assert reasons["colocated"].startswith("actor has dp 8, but at most 4 sequences are in work at once")
    with pytest.raises(ConfigError, match="colocated: actor has dp 8, .*; change OMP_NUM_THREADS, or choose"):
        find_candidates(settings(1, 3, overlap={"inter": False}), Machine("cuda", 8))
    with pytest.raises(ConfigError, match="none of single, disaggregated, colocated is possible on 3 CUDA devices .*needs one"):
        find_candidates(settings(kv_heads=1, batch=1), Machine("cuda", 3))


def test_a_mode_that_the_schedule_forbids_is_left_out() -> None:
    options = find_candidates(settings(overlap={"schedule": "woven"}), Machine("cpu", 2))
    assert not [name for name in names(options) if name.startswith("disaggregated")]
    [option] = options.left_out
    assert option.name == "disaggregated 1 | 1" and "overlap.schedule is woven" in option.reason


UPTO12, HEADS, DEVICES = st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["cpu", "cuda"])


@given(UPTO12, HEADS, UPTO12, st.integers(1, 3), DEVICES)
def test_every_candidate_passes_the_checks_of_a_run(units: int, kv_heads: int, rows: int, minibatches: int, device: Any) -> None:
    asked = settings(kv_heads, rows * minibatches, ppo={"minibatches": minibatches})
    try:
        options = find_candidates(asked, Machine(device, units))
    except ConfigError as error:
        assert device == "cuda" and "none of single, disaggregated, colocated is possible" in str(error)
        return
    assert len(set(names(options))) == len(options.candidates) <= 15
    for candidate in options.candidates:
        config = asked.with_placement(candidate.placement)
        assert check_layouts(config, dict.fromkeys(ROLES, shape(kv_heads))) == []
        assert world_size(config) == candidate.num_ranks <= max(units, 1)
        assert candidate == Candidate.of_record({"chosen": {"placement": candidate.yaml_tree()}})


def test_threads_of_a_rank_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    asked = settings()
    assert most_ranks(asked, Machine("cpu", 16)) == 4 and most_ranks(asked, Machine("cpu", 3)) == 1
    options = find_candidates(asked, Machine("cpu", 16))
    assert "disaggregated 1 | 1" not in names(options), "it would use 8 of 16 cores"
    assert "disaggregated dp 3 | 1" in names(options)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"actor": {"init": shape(2), "parallel": {"tp": 2}}}, "actor.parallel is tp 2 x pp 1 x dp 1"),
        ({"actor": {"init": shape(2), "train": {"dp": 2}}}, "actor.train.dp is 2"),
        ({"critic": {"init": shape(2), "train": {"vpp": 2}}}, "critic.train.vpp is 2"),
        ({"critic": {"init": shape(2), "ranks": "0-1"}}, "critic.ranks is 0-1"),
        ({"reference": {"init": shape(2), "parallel": {"dp": 2}}}, "reference.parallel is tp 1 x pp 1 x dp 2"),
        ({"placement": {"mode": "auto", "actor": {"tp": 2}}}, "placement.actor is tp 2 x pp 1 x dp 1"),
        ({"placement": {"mode": "auto", "scorer": {}}}, "placement.scorer is tp 1 x pp 1 x dp 1"),
        ({"placement": {"mode": "auto", "reference": "actor"}}, "placement.reference is actor"),
    ],
)
def test_written_ranks_and_layouts_leave_nothing_to_choose(changes: dict[str, Any], key: str) -> None:
    assert check_auto_placement(settings()) == []
    [problem] = check_auto_placement(settings(**changes))
    assert problem.startswith(f"{key}, but placement.mode auto chooses") and "remove it, or choose disagg" in problem


def test_settings_without_auto_are_settled() -> None:
    config = settings(placement={"mode": "disaggregated", "actor": {"dp": 3}}).settled()
    assert isinstance(config, TrainConfig) and settings().settled() is None
    assert config.placement == PlacementConfig(mode="disaggregated", actor={"dp": 3})


def test_a_measuring_run_is_the_configuration_but_short_and_quiet() -> None:
    asked = settings(evaluation={"data": {"path": "x"}, "metrics": [{"kind": "verifier", "name": "gsm8k"}]}, steps=900)
    placement = PlacementConfig(mode="single")
    probe = probe_config(asked, placement, Path("scratch"))
    assert (probe.run_dir, probe.steps, probe.evaluation, probe.checkpoint.final) == (Path("scratch"), 3, None, "nothing")
    assert probe.logging.console == "off" and not probe.logging.trace and probe.overlap.chunk == 32
    changed = {"run_dir", "steps", "epochs", "evaluation", "logging", "overlap", "placement", "checkpoint"}
    before, after = asked.with_placement(placement).model_dump(), probe.model_dump()
    assert {name for name in before if before[name] != after[name]} <= changed
    after["overlap"]["chunk"] = [32, 16, 64]
    assert before["overlap"] == after["overlap"] and before["seed"] == after["seed"]


def test_what_measuring_replaces_does_not_ask_for_another_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("cpu", 2)
    key = fingerprint(settings(), machine)
    for same in ({"run_dir": "other"}, {"steps": 7}, {"logging": {"console": "off"}}, {"checkpoint": {"final": "nothing"}}):
        assert fingerprint(settings(**same), machine) == key, same
    others = [settings(batch=8), settings(kv_heads=4), settings(seed=2)]
    others += [settings(overlap={"intra": False})]
    keys = [fingerprint(other, machine) for other in others] + [fingerprint(settings(), Machine("cpu", 3)), key]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys.append(fingerprint(settings(), machine))
    assert len(set(keys)) == len(keys)
