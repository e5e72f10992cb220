"""The placements and libraries that `auto` takes: turns, noise, failures, the reason and its record.  Times are made up."""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.model import ParallelConfig, PlacementConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.errors import ConfigError, PlacementError
from oppo_megatron.layout import candidates
from oppo_megatron.layout.candidates import CONFIRMED_RUNS, Candidate, Machine, Options, Run, choose, find_candidates, fingerprint
from oppo_megatron.layout.checks import check_auto_placement, check_layouts
from oppo_megatron.layout.kernels import Available, find_available, import_fault, kernel_table, layer_kind, layer_problem, usable
from oppo_megatron.layout.placements import world_size


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
    1: ["single"], 2: ["single", *PAIRS, "colocated dp 2", "colocated tp 2"],
    4: [
        "single", *PAIRS, "disaggregated dp 3 | 1", "disaggregated dp 3 | 1 (reference: actor)",
        "disaggregated dp 2 | dp 2", "disaggregated tp 2 | tp 2", "disaggregated dp 2 | dp 2 (reference: actor)",
        "colocated dp 4", "colocated tp 2 x dp 2",
    ],
    8: [
        "single", *PAIRS, "disaggregated dp 7 | 1", "disaggregated dp 7 | 1 (reference: actor)",
        "disaggregated dp 6 | dp 2", "disaggregated tp 2 x dp 3 | tp 2", "disaggregated dp 6 | dp 2 (reference: actor)",
        "disaggregated dp 4 | dp 4", "disaggregated tp 2 x dp 2 | tp 2 x dp 2", "disaggregated dp 4 | dp 4 (reference: actor)",
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
        assert check_layouts(config, dict.fromkeys(("actor", "reference", "critic"), shape(kv_heads))) == []
        assert world_size(config) == candidate.num_ranks <= max(units, 1)
        assert candidate == Candidate.of_record({"chosen": {"placement": candidate.yaml_tree()}})


def test_threads_of_a_rank_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    asked = settings()
    assert candidates.most_ranks(asked, Machine("cpu", 16)) == 4 and candidates.most_ranks(asked, Machine("cpu", 3)) == 1
    options = find_candidates(asked, Machine("cpu", 16))
    assert "disaggregated 1 | 1" not in names(options), "it would use 8 of 16 cores"
    assert "disaggregated dp 3 | 1" in names(options)


@pytest.mark.parametrize(("changes", "key"), [
    ({"actor": {"init": shape(2), "parallel": {"tp": 2}}}, "actor.parallel is tp 2 x pp 1 x dp 1"),
    ({"actor": {"init": shape(2), "train": {"dp": 2}}}, "actor.train.dp is 2"),
    ({"critic": {"init": shape(2), "train": {"vpp": 2}}}, "critic.train.vpp is 2"),
    ({"critic": {"init": shape(2), "ranks": "0-1"}}, "critic.ranks is 0-1"),
    ({"reference": {"init": shape(2), "parallel": {"dp": 2}}}, "reference.parallel is tp 1 x pp 1 x dp 2"),
    ({"placement": {"mode": "auto", "actor": {"tp": 2}}}, "placement.actor is tp 2 x pp 1 x dp 1"),
    ({"placement": {"mode": "auto", "scorer": {}}}, "placement.scorer is tp 1 x pp 1 x dp 1"),
    ({"placement": {"mode": "auto", "reference": "actor"}}, "placement.reference is actor"),
])  # fmt: skip
def test_written_ranks_and_layouts_leave_nothing_to_choose(changes: dict[str, Any], key: str) -> None:
    assert check_auto_placement(settings()) == []
    [problem] = check_auto_placement(settings(**changes))
    assert problem.startswith(f"{key}, but placement.mode auto chooses") and "remove it, or choose disagg" in problem
    config = settings(placement={"mode": "disaggregated", "actor": {"dp": 3}}).resolved()
    assert settings().resolved() is None and config.placement == PlacementConfig(mode="disaggregated", actor={"dp": 3})


def test_a_measuring_run_is_the_configuration_but_short_and_quiet() -> None:
    asked = settings(evaluation={"data": {"path": "x"}, "metrics": [{"kind": "verifier", "name": "gsm8k"}]}, steps=900)
    placement = PlacementConfig(mode="single")
    probe = candidates.probe_config(asked, placement, Path("scratch"))
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
    others = [settings(batch=8), settings(kv_heads=4), settings(seed=2), settings(overlap={"intra": False})]
    keys = [fingerprint(other, machine) for other in others] + [fingerprint(settings(), Machine("cpu", 3)), key]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys.append(fingerprint(settings(), machine))
    assert len(set(keys)) == len(keys)


SINGLE = Candidate(PlacementConfig(mode="single"))
PAIR = Candidate(PlacementConfig(mode="disaggregated", scorer=ParallelConfig()))
REPLICAS = Candidate(PlacementConfig(mode="colocated", actor=ParallelConfig(dp=2)))
ALL = (SINGLE, PAIR, REPLICAS)
OPTIONS = Options(Machine("cpu", 2), ALL, (candidates.LeftOut("colocated tp 2", "1 key/value head does not divide"),))


class Bench:
    def __init__(self, seconds: Mapping[str, Sequence[float | str]]):
        self.seconds, self.calls = seconds, list[tuple[str, int]]()

    def __call__(self, candidate: Candidate, turn: int) -> Run:
        self.calls.append((candidate.name, turn))
        given_s = self.seconds[candidate.name]
        now = given_s[min(turn, len(given_s)) - 1]
        if isinstance(now, str):
            raise PlacementError(now)
        return Run(steps=2, tokens=200, seconds=2 * now, decode_s=now, train_s=now / 2)


def decide(*seconds: Sequence[float | str]) -> tuple[candidates.Choice, Bench, list[candidates.Trial]]:
    bench = Bench({candidate.name: given_s for candidate, given_s in zip(ALL, seconds, strict=True)})
    trials = candidates.measure_all(ALL, bench)
    return choose(OPTIONS, trials), bench, trials


def test_a_clear_case_is_measured_once_and_close_ones_again_in_turn_so_that_one_odd_run_does_not_decide() -> None:
    choice, bench, _ = decide([3.0], [2.0], [2.5])
    assert bench.calls == [(candidate.name, 1) for candidate in ALL]
    assert choice.candidate == PAIR and choice.margin == pytest.approx(0.25)
    reason = (
        "disaggregated 1 | 1 trains 50 tokens/s (2 s per step); the next, colocated dp 2, needs 25.0% more time; most of it in"
    )
    assert choice.reason == f"{reason} rounds that decode: 1 s per step against 1.25"
    runs = {SINGLE.name: Run(2, 100, 1.0, 0.5, 0.1), PAIR.name: Run(2, 210, 2.0, 0.5, 0.1)}
    assert choose(OPTIONS, candidates.measure_all([SINGLE, PAIR], lambda candidate, turn: runs[candidate.name])).candidate == PAIR
    choice, bench, trials = decide([2.0], [1.96, 2.1, 2.12], [2.5])
    assert bench.calls[3:] == [("single", 2), (PAIR.name, 2), ("single", 3), (PAIR.name, 3)]
    assert choice.candidate == SINGLE and choice.margin == pytest.approx(0.05)
    assert "2 are this close and were run 3 times or more; runs of one placement differ by up to 7.6%" in choice.reason
    assert "take it as a draw" in choice.reason
    assert trials[1].spread == pytest.approx(0.16 / 2.1)
    # The first run of the second is too good; then the third, which was too far off, is close too.
    choice, bench, _ = decide([2.0], [1.92, 2.3, 2.3], [2.08])
    assert choice.candidate == SINGLE
    assert [turn for name, turn in bench.calls if name == REPLICAS.name] == [1, 2, 3]
    choice, _, _ = decide([2.0], [2.04], [9.0])  # a margin within the noise of no run
    assert choice.candidate == SINGLE and "draw" not in choice.reason and "differ by up to 0.0%" in choice.reason


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(-0.014, 0.014), min_size=CONFIRMED_RUNS, max_size=CONFIRMED_RUNS), min_size=3, max_size=3),
)
def test_with_small_noise_the_choice_is_within_3_percent_of_the_best(true: list[float], noise: list[list[float]]) -> None:
    times = [[seconds * (1 + share) for share in shares] for seconds, shares in zip(true, noise, strict=True)]
    choice, bench, _ = decide(*times)
    assert true[ALL.index(choice.candidate)] <= 1.03 * min(true)
    assert len(bench.calls) <= CONFIRMED_RUNS * len(ALL)


def test_one_that_fails_is_left_out_and_of_failures_the_only_one_that_ran_is_left_or_the_first_error() -> None:
    choice, bench, trials = decide(["out of memory"], [2.0], [2.01])
    assert choice.candidate == PAIR and bench.calls.count(("single", 1)) == 1
    assert ("single", 2) not in bench.calls and (PAIR.name, 2) in bench.calls
    record = candidates.to_record("key", OPTIONS, trials, choice)
    assert record["candidates"][0]["failure"] == "out of memory" and "seconds_per_token" not in record["candidates"][0]
    assert decide([1.99, "lost a peer"], [2.0], [2.5])[0].candidate == PAIR, "it failed when it was measured again"
    choice, _, _ = decide(["no"], [2.0], ["no"])
    assert choice.candidate == PAIR and choice.margin is None
    assert choice.reason.endswith("of 3 placements it is the only one that ran")
    with pytest.raises(PlacementError, match="none of 3 .* the first, single, ended with: rows.jsonl:3 is not JSON"):
        decide(["rows.jsonl:3 is not JSON"], ["b"], ["c"])
    choice = choose(Options(Machine("cuda", 1), (SINGLE,), ()), [])
    assert choice.candidate == SINGLE and choice.margin is None
    assert "only placement to choose from on 1 CUDA device; nothing measured" in choice.reason


def test_the_record_gives_the_choice_back() -> None:
    choice, _, trials = decide([3.0], [2.0], [2.5])
    record: dict[str, Any] = json.loads(json.dumps(candidates.to_record("key", OPTIONS, trials, choice)))
    assert Candidate.of_record(record) == PAIR and record["key"] == "key"
    assert record["machine"] == {"device": "cpu", "units": 2}
    assert record["left_out"] == [{"name": "colocated tp 2", "reason": "1 key/value head does not divide"}]
    rows = {row["name"]: row for row in record["candidates"]}
    assert rows["single"]["step_seconds"] == 3.0 and rows["single"]["seconds_per_token"] == pytest.approx(0.03)
    assert rows["single"]["runs"] == [{"steps": 2, "tokens": 200, "seconds": 6.0, "decode_s": 3.0, "train_s": 1.5}]


def line(step_s: float, mean: float, deferred: dict[str, int]) -> dict[str, Any]:
    return {"step_s": step_s, "decode_s": 1.0, "train_s": 0.5, "trained_len_mean": mean, "deferred": deferred}


def test_figures_of_a_run_leave_out_the_first_step() -> None:
    run = candidates.read_run([line(9.0, 99.0, {"0": 4}), line(2.0, 10.0, {"0": 3, "1": 1}), line(3.0, 12.5, {"0": 4})])
    assert run == Run(steps=2, tokens=90, seconds=5.0, decode_s=2.0, train_s=1.0)
    assert run.other_s == 2.0 and run.seconds_per_token == pytest.approx(5 / 90)
    with pytest.raises(PlacementError, match="has 1 step, but the first one only warms up"):
        candidates.read_run([line(9.0, 99.0, {"0": 4})])


def table(available: Available) -> dict[str, tuple[str, str | None]]:
    return {kernels.part: (kernels.used, kernels.lacking) for kernels in kernel_table(available)}


def test_what_can_be_imported_is_found_and_the_table_names_it_and_what_is_missing() -> None:
    found = table(Available(transformer_engine="2.12.0", apex="0.1", flash_attn="2.8.3", cuda=True))
    assert found["layers and norms"] == ("transformer-engine 2.12.0", None)
    assert found["Adam"] == found["gradient norm"] == ("fused, of transformer-engine 2.12.0", None)
    assert found["context parallelism"] == ("ring of transformer-engine 2.12.0 in bfloat16 and float16, else gathered keys", None)
    assert "flash-attn 2.8.3 with block tables" in found["attention"][0]
    found = table(Available(apex="0.1", cuda=True))
    assert found["Adam"] == found["gradient norm"] == ("fused, of apex 0.1", None)
    assert found["layers and norms"][1] == "transformer-engine's: transformer-engine is not installed"
    found = table(Available())
    assert found["Adam"] == ("fused, of torch", None) and "CUDA devices only" in str(found["layers and norms"][1])
    assert found["gradient norm"][1] == "fused: it computes on CUDA devices only"
    by_torch = ("gathered keys and values", "transformer-engine's ring: it computes on CUDA devices only")
    assert found["context parallelism"] == by_torch
    found = table(Available(cuda=True))
    assert found["gradient norm"][1] == "fused: transformer-engine is not installed, and NVIDIA's apex is not installed"
    lacking = "block tables: flash-attn is not installed, triton is not installed"
    assert found["attention"] == ("torch's, over dense KV caches", lacking)
    found = table(Available(cuda=True, triton="3.6.0"))
    assert found["attention"][0].startswith("a kernel of this package by triton 3.6.0 with block tables")
    available = find_available(True, lambda *names: None)
    assert available.transformer_engine and available.apex and available.flash_attn and available.triton and not available.faults
    assert import_fault("json:loads") is None and import_fault("json") is None
    assert import_fault("no_such_package.at:all") == "is not installed"


@pytest.mark.parametrize("te,cuda,adapters", list(product([None, "2.0"], [True, False], [True, False])))
def test_auto_takes_transformer_engine_where_it_can(te: str | None, cuda: bool, adapters: bool) -> None:
    available = Available(transformer_engine=te, cuda=cuda)
    possible = te is not None and cuda and not adapters
    assert (layer_kind(available, adapters=adapters) == "transformer_engine") == possible
    assert (layer_problem(available, adapters=adapters) is None) == possible


BROKEN = {
    "flash-attn 4": ("flash_attn", {"flash_attn/cute/__init__.py": ""}, "flash_attn is {folder}/flash_attn, without it"),
    "built for another torch": ("flash_attn", {"flash_attn/__init__.py": "raise ImportError('undefined symbol: _ZN3c10')"},
        "ImportError: undefined symbol"),
    "PyPI's apex": ("apex", {"apex/__init__.py": ""}, "No module named 'apex.optimizers'"),
    "apex without kernels": ("apex", {"apex/optimizers.py": "class FusedAdam: pass"}, "No module named 'amp_C'"),
    "transformer-engine without its compiled half": ("transformer_engine",
        {"transformer_engine/__init__.py": "raise RuntimeError('Found empty meta package')"}, "RuntimeError: Found empty"),
}  # fmt: skip
"""Packages that are found, with the files that they have, and what is said of them."""


@pytest.mark.parametrize("case", BROKEN)
def test_a_package_without_what_is_used_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    package, files, said = BROKEN[case]
    library = package.replace("_", "-")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in (package, "amp_C")]:
        monkeypatch.delitem(sys.modules, name)
    import_fault.cache_clear()
    try:
        assert find_spec(package) is not None
        with pytest.warns(UserWarning, match=f"{library} cannot be used: .*; the run continues without it"):
            assert not usable(library)
        available = find_available(True)
        assert getattr(available, package) is None and said.format(folder=tmp_path) in available.fault(library)
        assert any(available.fault(library) in str(kernels.lacking) for kernels in kernel_table(available))
        assert find_available(False) == Available(), "without a CUDA device nothing is asked"
    finally:
        import_fault.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
