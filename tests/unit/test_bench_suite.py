"""The suite of a benchmark's runs, its figures, and the overlap benchmark's modes, placements and comparison."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import with_model
from oppo_megatron.bench import suite as suites
from oppo_megatron.bench.figures import figures, steady
from oppo_megatron.bench.suite import BenchError, Run, Suite, compare, known_modes, placed, remarks, require_same_work
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.derived import MODES, switched
from oppo_megatron.config.load import config_yaml, dump_config
from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import EXIT_REQUEUE, ConfigError, DataError
from oppo_megatron.layout.placements import world_size
from oppo_megatron.preflight.validate import train_problems
from oppo_megatron.report.comparison import format_table
from oppo_megatron.report.timeline import kind_of, utilization
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, SpanRecorder, merge_traces
from oppo_megatron.schedule.plan import plan_step
from tests.support.commands import enter, refused

SHAPE = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 288, "max_position_embeddings": 128,
}  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "run_dir": "runs/x", "tokenizer": {"path": "t.model"}, "data": {"path": "p.jsonl", "max_prompt_tokens": 64},
        "actor": {"init": SHAPE}, "critic": {"init": SHAPE}, "reward": {"init": SHAPE},
        "rewards": [{"kind": "model"}], "rollout": {"batch_size": 16, "max_response_tokens": 64, "forced_lengths": [16, 1.0]},
    }  # fmt: skip
    return TrainConfig.model_validate(plain | changes)


def line(step: int, step_s: float, exposed: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "step_s": step_s, "decode_s": 1.0, "score_exposed_s": exposed, "score_busy_s": 2.0, "train_s": 0.5,
        "critic_update_s": 0.8, "idle_s": {"actor": 0.1, "scorer": 0.2}, "tokens": 100, "reward_mean": 0.1 * step, "delta": 4,
        "carried": 3, "stale_token_fraction": 0.25, "submitted_len_mean": 20.0, "trained_len_mean": 17.0, "ess": 0.9,
        "tail_waste": 0.5, **more,
    }  # fmt: skip


def runs_of(seconds: Sequence[float]) -> list[Run]:
    return [Run(Path("run"), [line(n, s) for n, s in enumerate(seconds, start=1)])]


def faults(config: TrainConfig) -> list[str]:
    return [problem for problem in train_problems(config) if "does not exist" not in problem]


def quiet(out: Path, repeats: int, launch: suites.Launch | None = None, resume: bool | None = None) -> Suite:
    return Suite(out, repeats, launch or (lambda *_: pytest.fail("nothing may start")), say=lambda _: None, resume=resume)


@pytest.fixture
def real_config(tmp_path: Path) -> TrainConfig:
    tokenizer, prompts = write_random_prompts(tmp_path / "inputs", 8)
    return config(tokenizer={"path": tokenizer}, data={"path": prompts, "max_prompt_tokens": 8})


def test_nothing_starts_where_a_run_cannot_fit_the_machine(tmp_path: Path, real_config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"large: weights.* of all ranks take [\d,.]+ GiB on this machine"):
        quiet(tmp_path, 1).run({"small": real_config, "large": with_model(real_config, 300)})


def test_a_wrong_run_is_refused_and_a_finished_one_not_overwritten(tmp_path: Path, real_config: TrainConfig) -> None:
    suite = quiet(tmp_path / "out", 2)
    with pytest.raises(ConfigError, match="only: tokenizer.path"):
        suite.run({"only": config()})
    (tmp_path / "out" / "a-2").mkdir(parents=True)
    (tmp_path / "out" / "a-2" / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="a-2 holds a finished run"):
        suite.run({"a": real_config})
    saved = tmp_path / "out" / "b-1" / "checkpoints" / "step-000002-clock-00000009"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="b-1 holds the checkpoints of an unfinished run"):
        suite.run({"b": real_config})


def test_runs_take_turns_and_a_failed_one_ends_the_benchmark(tmp_path: Path, real_config: TrainConfig) -> None:
    started: list[str] = []

    def launch(kind: str, config: TrainConfig, ranks: int) -> int:
        assert kind == "train" and ranks == 2
        started.append(config.run_dir.name)
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        return {"c-1": 1, "d-1": EXIT_REQUEUE}.get(config.run_dir.name, 0)

    runs = quiet(tmp_path, 2, launch).run({"a": real_config, "b": real_config})
    assert started == ["a-1", "b-1", "a-2", "b-2"] and [run.lines for run in runs["b"]] == [[{"step": 1}]] * 2
    with pytest.raises(BenchError, match="c-1 ended with exit code 1"):
        quiet(tmp_path, 1, launch).run({"c": real_config})
    said: list[str] = []
    with pytest.raises(suites.BenchStopped, match="the run d was asked to stop"):
        Suite(tmp_path, 1, launch, said.append, resume=False).run(dict.fromkeys(("e", "d", "f"), real_config))
    assert said[-1] == (
        f"--- 1 of 3 runs are finished and stay in {tmp_path}, each with its metrics.jsonl; "
        "nothing is compared yet; continue with the same command and --resume"
    )


def test_an_interrupted_benchmark_continues_with_the_missing_runs(tmp_path: Path, real_config: TrainConfig) -> None:
    started: list[str] = []

    def launch(kind: str, config: TrainConfig, ranks: int) -> int:
        started.append(config.run_dir.name)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "metrics.jsonl").write_text(f'{{"step": {len(started)}}}\n')
        if started == ["a-1", "b-1"]:
            return 1
        dump_config(config, config.run_dir / "config.yaml")
        (config.run_dir / "summary.json").write_text("{}")
        return 0

    configs = {"a": real_config, "b": real_config}
    with pytest.raises(BenchError, match="b-1"):
        quiet(tmp_path, 2, launch).run(configs)
    with pytest.raises(ConfigError, match="a-1 holds a finished run, .* take it as it is with --resume"):
        quiet(tmp_path, 2, launch, resume=False).run(configs)
    other = {"a": real_config.model_copy(update={"seed": 77}), "b": real_config}
    with pytest.raises(ConfigError, match="a-1 holds a finished run of another configuration"):
        quiet(tmp_path, 2, launch, resume=True).run(other)
    written = tmp_path / "a-1" / "config.yaml"
    lost = written.rename(tmp_path / "lost.yaml")
    with pytest.raises(ConfigError, match="a-1 holds a finished run of another configuration"):
        quiet(tmp_path, 2, launch, resume=True).run(configs)
    lost.rename(written)
    said: list[str] = []
    runs = Suite(tmp_path, 2, launch, said.append, resume=True).run(configs)
    assert started == ["a-1", "b-1", "b-1", "a-2", "b-2"] and f"finished before: {tmp_path / 'a-1'}" in said
    assert [run.lines[0]["step"] for run in (*runs["a"], *runs["b"])] == [1, 4, 3, 5]


def test_equal_work_is_judged_by_decoded_tokens() -> None:
    same = {"a": runs_of([1.0, 2.0]), "b": runs_of([3.0, 1.0]) * 2}
    found = suites.work_figures(same)
    assert found == {"same_work": True, "decoded_tokens": {"a": [200], "b": [200, 200]}}
    assert suites.work_lines(found) == ["the same work: 200 decoded tokens in every run"]
    require_same_work(config(), found)
    other = suites.work_figures(same | {"c": runs_of([1.0])})
    assert not other["same_work"] and "a 200, b 200 200, c 100" in suites.work_lines(other)[0]
    require_same_work(config(rollout={"batch_size": 16, "max_response_tokens": 64}), other)
    with pytest.raises(BenchError, match="lengths were forced, but this is NOT the same work"):
        require_same_work(config(), other)


def without_critic(preset: str, **changes: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "run_dir": "runs/x", "algorithm": {"preset": preset}, "steps": 3,
        "tokenizer": {"path": "t.model"}, "data": {"path": "p.jsonl", "max_prompt_tokens": 16},
        "actor": {"init": SHAPE}, "rewards": [{"kind": "verifier", "name": "arithmetic"}],
        "rollout": {"batch_size": 64, "group_size": 8, "max_response_tokens": 16, "forced_lengths": [4, 0.5]},
        "ppo": {"minibatches": 4}, "overlap": {"delta": {"initial": 2, "max": 2}},
    }  # fmt: skip
    return TrainConfig.model_validate(plain | changes)


def test_figures_leave_out_the_first_step_but_in_the_total() -> None:
    result = figures([[line(1, 100.0, exposed=2.0), line(1, 2.0), line(1, 4.0, exposed=0.5)], [line(1, 90.0), line(1, 3.0)]])
    assert result["step_s"] == 3.0 and result["total_s"] == pytest.approx((106.0 + 93.0) / 2)
    assert result["score_exposed_percent"] == pytest.approx(100 * 2.5 / 6)
    assert result["tokens_per_s"] == pytest.approx(300 / 9)
    assert result["idle_actor_s"] == 0.1 and result["idle_scorer_s"] == 0.2
    assert result["critic_exposed_s"] is None and result["critic_exposed_percent"] is None, "no line has the field"
    assert len(steady([[line(1, 1.0)]])) == 1, "a single step is all there is"
    result = figures([[line(1, 1.0), line(1, 1.0, critic_exposed_s=0.2), line(1, 1.0, critic_exposed_s=0.6)]])
    assert result["critic_exposed_s"] == pytest.approx(0.4)
    assert result["critic_exposed_percent"] == pytest.approx(50.0)


def test_modes_set_every_switch_and_nothing_else() -> None:
    base = config()
    plans = {}
    for mode, switches in MODES.items():
        changed = switched(base, mode)
        others = {name: value for name, value in switches.items() if name != "hide_critic"}
        assert {name: getattr(changed.overlap, name) for name in others} == others
        assert changed.overlap.without == ([] if switches["hide_critic"] else ["critic"])
        assert changed.model_copy(update={"overlap": base.overlap}) == base
        plans[mode] = plan_step(changed)
    assert plans["sequential"].wait_for_critic and not plans["sequential"].stream
    assert plans["full"].wait_for_critic and plans["full"].stream
    assert not plans["full+critic"].wait_for_critic and not plans["full+both"].wait_for_critic


def test_other_placements_use_all_cores_and_drop_layouts_of_the_roles() -> None:
    base = config(
        actor={"init": {}, "parallel": {"tp": 2}, "train": {"pp": 2, "recompute": "full"}},
        critic={"init": {}, "ranks": "2", "train": {"dp": 1, "cp": 2, "ep": 2}}, placement={"scorer": {"dp": 1}},
    )  # fmt: skip
    assert placed(base, "pair", 4) is base
    single, replicas = placed(base, "single", 4), placed(base, "replicas", 4)
    assert world_size(single) == 1 and single.runtime.threads_per_rank == 4
    assert world_size(replicas) == 4 and replicas.runtime.threads_per_rank == 1
    assert replicas.placement.actor == ParallelConfig(dp=4)
    for changed in (single, replicas):
        assert changed.critic.ranks is None and changed.actor.parallel is None
        assert changed.actor.train.pp is None and changed.actor.train.recompute == "full"
        assert changed.critic.train.cp == changed.critic.train.ep == 1


def made(tmp_path: Path, name: str, lines: Sequence[dict[str, Any]], spans: Sequence[Span]) -> Run:
    run = RunDirectory(tmp_path / name).prepare()
    recorders = {span.rank: SpanRecorder(span.rank, run) for span in spans}
    for span in spans:
        recorders[span.rank].write(span)
    for recorder in recorders.values():
        recorder.flush()
    merge_traces(run)
    return Run(run.path, lines)


def two_ranks(step_s: float) -> list[Span]:
    """Two steps: the actor decodes half of each and updates for 1 s; the scorer scores for 1 s and waits."""
    spans = []
    for step in (1, 2):
        start = step * step_s
        spans += [
            Span(0, "actor", "decode", step, start, start + step_s / 2),
            Span(0, "actor", "wait_scores", step, start + step_s / 2, start + step_s - 1),
            Span(0, "actor", "update", step, start + step_s - 1, start + step_s),
            Span(1, "scorer", "wait_tokens", step, start, start + step_s / 2),
            Span(1, "reward", "score", step, start + step_s / 2, start + step_s / 2 + 1),
        ]
    return spans


def test_ratios_are_to_sequential_here_and_to_the_best_sequential(tmp_path: Path) -> None:
    seconds = {"pair/sequential": 4.0, "pair/full": 2.0, "single/sequential": 3.0}
    base = config()
    configs = {name: switched(placed(base, name.split("/")[0], 2), name.split("/")[1]) for name in seconds}
    runs = {name: [made(tmp_path, name, [line(1, s + 4), line(1, s), line(1, s)], two_ranks(s))] for name, s in seconds.items()}
    both = [replace(span, rank=0) for span in two_ranks(3.0)]
    runs["single/sequential"] = [made(tmp_path, "single/own", runs["single/sequential"][0].lines, both)]
    result = compare(configs, runs)
    rows = {f"{row['placement']}/{row['mode']}": row for row in result["results"]}
    figures = {"speedup_step_s": 2.0, "best_step_s": 1.5, "speedup_total_s": 16 / 10, "best_total_s": 13 / 10}
    assert {name: rows["pair/full"][name] for name in figures} == pytest.approx(figures)
    assert rows["single/sequential"]["speedup_step_s"] == 1.0 and rows["pair/sequential"]["best_step_s"] == 0.75
    assert result["best_sequential"] == {"step_s": "single", "total_s": "single"}
    assert any("best sequential placement: single, 3.00 s/step" in text for text in remarks(result, tmp_path))
    pair, single = result["nothing_waits"]
    assert [rank["step_s"] for rank in pair["ranks"]] == [3.0, 1.0], "decoding and update, scoring; no waiting"
    assert pair["least"] == {"step_s": 3.0, "total_s": 6.0}
    assert pair["over_least"]["full"]["step_s"] == pytest.approx(2.0 / 3.0)
    assert pair["over_least"]["sequential"]["total_s"] == pytest.approx(16 / 6)
    assert single["least"]["step_s"] == pytest.approx(3.5), "one rank does both"
    alone = compare({"pair/full": configs["pair/full"]}, {"pair/full": runs["pair/full"]})
    row = alone["results"][0]
    assert row["speedup_step_s"] is None and row["best_step_s"] is None and alone["nothing_waits"] == []


def test_utilization_is_of_the_steps_after_the_first(tmp_path: Path) -> None:
    run = made(tmp_path, "run", [], two_ranks(4.0))
    # Step 2: from 8 to 12 s.
    assert utilization([run.path]) == [
        {"rank": 0, "decode": 50.0, "score": 0.0, "update": 25.0, "idle": 25.0},
        {"rank": 1, "decode": 0.0, "score": 25.0, "update": 0.0, "idle": 75.0},
    ]
    shares = utilization([run.path, made(tmp_path, "slower", [], two_ranks(8.0)).path])[0]
    assert shares["decode"] == pytest.approx(50.0) and shares["update"] == pytest.approx(100 * 2 / 12)
    waiting = made(tmp_path, "waiting", [], [Span(0, "actor", "wait_scores", 1, 0.0, 1.0)])
    with pytest.raises(DataError, match="no work of any step"):
        utilization([waiting.path])


def test_work_is_told_by_label_and_by_action() -> None:
    kinds = {
        ("actor", "decode"): "decode", ("actor", "decode actor m0 c3 s1"): "decode", ("actor", "sample actor m0 c3 s1"):
        "decode", ("actor", "prefill actor m0 c3"): "decode", ("reward", "prefill reward m0 c3"): "score",
        ("critic", "score critic m0 c3"): "score", ("critic", "update"): "update", ("actor", "wait"): None,
        ("actor", "recv tokens actor m0 c1 s0 <- 1"): None, ("actor", "evaluate"): None, ("scorer", "send"): None,
    }  # fmt: skip
    for (role, name), kind in kinds.items():
        assert kind_of(Span(0, role, name, 1, 0.0, 1.0)) == kind, name


def test_evaluation_and_weights_are_no_part_of_a_benchmark() -> None:
    held_out = config(
        evaluation={"data": {"path": "h.jsonl"}, "metrics": [{"kind": "verifier", "name": "gsm8k"}]},
        logging={"trace": False, "console": "off"},
    )
    changed = suites.bare(held_out)
    assert changed.evaluation is None and not changed.checkpoint.writes_weights
    assert changed.logging.trace and changed.logging.console == "off"


def test_a_figure_that_is_not_there_is_a_dash() -> None:
    text = format_table({"a": "a", "b": "b", "c": "c"}, [{"a": "x", "b": 1.234, "c": [1, 250.4]}, {"a": None}])
    assert text.splitlines() == ["a     b      c", "x  1.23  1 250", "-     -      -"]
    small = format_table({"a": "a"}, [{"a": value} for value in (0.0, 0.0000314, -0.0049, 0.005)])
    assert small.split() == ["a", "0.00", "3e-05", "-0.005", "0.01"]


@pytest.mark.parametrize("length", [1, 64])
def test_random_prompts_have_the_length_asked_for(tmp_path: Path, length: int) -> None:
    path, rows = write_random_prompts(tmp_path, length)
    tokenizer = load_tokenizer(TokenizerConfig(path=path))
    prompts = [json.loads(row)["prompt"] for row in rows.read_text().splitlines()]
    assert len(set(map(len, prompts))) == 1 and len(prompts) > 500
    assert all(len(tokenizer.encode(prompt)) == length for prompt in prompts[:50])


@pytest.mark.parametrize("preset", ["dapo", "grpo"])
def test_every_placement_of_the_overlap_benchmark(preset: str) -> None:
    for placement, ranks in (("single", 1), ("replicas", 2)):
        there = placed(without_critic(preset, placement={"mode": "disaggregated"}), placement, 2)
        assert world_size(there) == ranks and not faults(there)
    assert known_modes(without_critic(preset)) == [mode for mode in MODES if "critic" not in mode and "both" not in mode]


def test_a_hidden_critic_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"path": "rows.jsonl", "max_prompt_tokens": 16}
    enter(tmp_path, monkeypatch, config_yaml(without_critic("dapo", tokenizer={"path": "tok"}, data=data)))
    said = "names full+critic, which would hide the critic's update, but algorithm.preset dapo has no critic; choose from "
    found = refused(capsys, "bench", "overlap", "c.yaml", "--out", "out", "--modes", "full,full+critic")
    assert said + "sequential, intra, inter, full, full+backfill" in found and not Path("out").exists()
