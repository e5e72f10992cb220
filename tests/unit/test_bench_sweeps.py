"""Chunk, delta and scaling benchmarks: which runs they make, and their arithmetic on made-up metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.bench import chunk, delta, scaling
from oppo_megatron.bench.dry_run import PARTS, DryRun
from oppo_megatron.bench.outcomes import BenchError, BenchStopped
from oppo_megatron.bench.overhead import dry_figures, tiny
from oppo_megatron.bench.pictures import draw_chunks, draw_deltas, draw_scaling
from oppo_megatron.bench.suite import Run, Suite, require_same_work, work_figures, work_lines
from oppo_megatron.bench.weave import weave_figures
from oppo_megatron.config.derived import max_context
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.modes import switched
from oppo_megatron.config.overlap import ChunkConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, StepCost, first_settled_step
from oppo_megatron.control.delta_controllers import RULES
from oppo_megatron.errors import EXIT_REQUEUE, ConfigError
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rundir.trace import Span
from tests.unit.test_bench_overlap import made

SHAPE = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 288, "max_position_embeddings": 128,
}  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "run_dir": "runs/x",
        "tokenizer": {"path": "t.model"},
        "data": {"path": "p.jsonl", "max_prompt_tokens": 64},
        "actor": {"init": SHAPE},
        "critic": {"init": SHAPE},
        "reward": {"init": SHAPE},
        "rewards": [{"kind": "model"}],
        "rollout": {"batch_size": 16, "max_response_tokens": 64},
        "debug": {"forced_lengths": [16, 1.0]},
    }
    return TrainConfig.model_validate(plain | changes)


def line(step: int, step_s: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "step_s": step_s, "decode_s": 1.0, "score_exposed_s": 0.5, "score_busy_s": 2.0, "train_s": 0.5,
        "idle_s": {"actor": 0.1, "scorer": 0.2}, "tokens": 100, "reward_mean": 0.1 * step, "delta": 4, "carried": 3,
        "stale_token_fraction": 0.25, "submitted_len_mean": 20.0, "trained_len_mean": 17.0, "ess": 0.9, "tail_waste": 0.5, **more,
    }  # fmt: skip


def runs_of(seconds: Sequence[float], **more: Any) -> list[Run]:
    return [Run(Path("run"), [line(n, s, **more) for n, s in enumerate(seconds, start=1)])]


def test_chunk_sizes_within_the_limit_and_the_tuner_as_configured() -> None:
    base = config(overlap={"chunk": {"adaptive": [4, 8]}})
    configs = chunk.chunk_configs(base, [8, 64, 128], adaptive=True)
    assert list(configs) == ["8", "64", "adaptive"], "128 is beyond the limit"
    assert configs["8"].overlap.chunk.tokens == 8 and not configs["8"].overlap.chunk.adaptive
    assert configs["adaptive"].overlap.chunk == base.overlap.chunk
    off = base.overlap.model_copy(update={"chunk": base.overlap.chunk.model_copy(update={"adaptive": False})})
    unsearched = base.model_copy(update={"overlap": off})
    assert chunk.chunk_configs(unsearched, [8], adaptive=True)["adaptive"].overlap.chunk.adaptive is True
    with pytest.raises(ConfigError, match="none is within rollout.max_response_tokens, 64"):
        chunk.chunk_configs(base, [128], adaptive=True)
    with pytest.raises(ConfigError, match="overlap.intra=true"):
        chunk.chunk_configs(config(overlap={"intra": False}), [8], adaptive=True)


@pytest.mark.parametrize(
    "settings",
    [{}, {"tokens": 48}, {"adaptive": [64, 200]}, {"adaptive": [32]}, {"adaptive": False}],
)
def test_the_first_settled_step_is_that_of_the_tuner(settings: dict[str, Any]) -> None:
    chunks, longest = ChunkConfig(**settings), 100
    tuner, seen = ChunkTuner(chunks, longest), []
    costs = {16: 3.0, 32: 2.0, 48: 5.0, 64: 1.0, 100: 4.0}
    for step in range(1, 20):
        seen.append(tuner.value)
        tuner.observe(step, StepCost(costs[tuner.value], steps=1, tokens=1))
    first = first_settled_step(chunks, longest)
    assert len(set(seen[first - 1 :])) == 1, "nothing is tried from there on"
    tried = {*chunks.candidates, chunks.tokens} if chunks.adaptive else {chunks.tokens}
    assert seen[first - 1] == min({min(size, longest) for size in tried}, key=lambda size: costs[size])


def test_the_tuner_is_compared_over_the_same_steps() -> None:
    base = config(overlap={"chunk": {"adaptive": [16, 32]}})  # settles in step 4
    runs = {
        "16": runs_of([9.0, 1.0, 1.0, 4.0, 4.0]),
        "32": runs_of([9.0, 5.0, 5.0, 2.0, 3.0]),
        "adaptive": [Run(Path("run"), [line(n, 3.0, chunk_tokens=16) for n in range(1, 6)])],
    }
    configs = chunk.chunk_configs(base, [16, 32], adaptive=True)
    result = chunk.compare(configs, runs)
    found = result["adaptive"]
    assert found["first_settled_step"] == 4 and found["settled_on"] == [16]
    assert found["best_fixed"] == 32 and found["best_fixed_step_s"] == 2.5, "of steps 4 and 5 alone"
    assert found["fixed_step_s"] == {"16": 4.0, "32": 2.5}
    assert found["percent"] == pytest.approx(20.0) and found["choice_percent"] == pytest.approx(60.0)
    assert "+20.0 % of the best fixed size, 32" in chunk.remarks(result)[0]
    rows = {row["chunk"]: row for row in result["results"]}
    assert rows["16"]["step_s"] == 2.5 and rows["32"]["step_s"] == 4.0 and rows["32"]["over_best"] == 1.6

    short = {name: [Run(Path("run"), turns[0].lines[:3])] for name, turns in runs.items()}
    assert "give more --steps" in chunk.remarks(chunk.compare(configs, short))[0]


def test_deltas_fixed_and_by_rule() -> None:
    base = config(overlap={"delta": {"rule": "eq4", "initial": 2, "max": 4}})
    configs = delta.delta_configs(base, [0, 8], ["eq4", "algorithm1"])
    assert {name: c.overlap.delta.rule for name, c in configs.items()} == {
        "fixed-0": "fixed", "fixed-8": "fixed", "eq4": "eq4", "algorithm1": "algorithm1",
    }  # fmt: skip
    assert configs["fixed-8"].overlap.delta.initial == 8 and configs["fixed-0"].overlap.delta.initial == 0
    assert configs["algorithm1"].overlap.delta.max == 4, "a rule is bounded as configured"
    assert all(not list(c.overlap.rules(16)) for c in configs.values())
    with pytest.raises(ConfigError, match="overlap.inter=true"):
        delta.delta_configs(config(overlap={"inter": False}), [0], [])
    assert set(delta.COMPARED_RULES) == set(RULES) - {"fixed", "eq4_literal"}


def test_what_a_delta_costs() -> None:
    runs = [[line(1, 9.0, delta=8, carried=9), line(2, 2.0, delta=4), line(3, 3.0, delta=2, submitted_len_mean=19.0)]]
    row = delta.row("eq4", runs)
    assert row["step_s"] == 2.5 and row["delta_mean"] == 3.0 and row["delta_last"] == [2]
    assert row["length_gap"] == 2.5 and row["stale_percent"] == 25.0 and row["carried"] == 3.0 and row["ess"] == 0.9
    assert row["waste_percent"] == 50.0 and row["gap_percent"] is None, "no step has it"
    result = {"steps": 10, "results": [row]}
    assert "2 x overlap.delta.window = 10" in delta.remarks(config(), result)[0]
    assert not delta.remarks(config(), result | {"steps": 11})
    assert not delta.remarks(config(), result | {"results": [{"delta": "measured"}]}), "it does not look at rewards"


def test_ranks_divide_the_work() -> None:
    pair = config()
    assert [world_size(scaling.with_ranks(pair, n)) for n in (1, 2, 4)] == [1, 2, 4]
    placements = role_placements(scaling.with_ranks(pair, 4))
    assert placements["actor"].layout == (1, 1, 3) and placements["critic"].ranks == (3,)
    colocated = scaling.with_ranks(config(placement={"mode": "colocated"}), 4)
    assert role_placements(colocated)["actor"] == role_placements(colocated)["critic"] and world_size(colocated) == 4
    assert all(scaling.with_ranks(pair, n).runtime.threads_per_rank == 1 for n in (1, 2))


@pytest.mark.parametrize("factor", [0.1, 0.5, 0.75, 1.0, 1.5, 2.0])
def test_scaled_models_are_models(factor: float) -> None:
    changed = scaling.with_model(config(), factor)
    for role in (changed.actor, changed.critic, changed.reward):
        assert role is not None
        shape = read_hf_config(role)
        assert check_shape("role", shape, changed.placement.actor, max_context(changed), 288) == []
    shape = read_hf_config(changed.actor)
    assert shape["hidden_size"] // shape["num_attention_heads"] == 8, "heads keep their size"
    if factor in (0.5, 1.0, 1.5, 2.0):
        scaled = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
        assert all(shape[name] == SHAPE[name] * factor for name in scaled)


def test_weights_cannot_be_scaled() -> None:
    with pytest.raises(ConfigError, match="critic.checkpoint is given"):
        scaling.with_model(config(critic={"checkpoint": "c"}), 2.0)


def test_longer_responses_fit() -> None:
    changed = scaling.with_limit(config(runtime={"micro_batch_tokens": 128}), 256)
    assert changed.rollout.max_response_tokens == 256 and changed.debug.forced_lengths == [64.0, 1.0]
    assert changed.runtime.micro_batch_tokens == 320
    assert read_hf_config(changed.critic)["max_position_embeddings"] == 320


def test_delta_follows_the_batch() -> None:
    changed = scaling.with_batch(config(overlap={"delta": {"initial": 4, "max": 8}}), 4)
    assert changed.rollout.batch_size == 4
    assert (changed.overlap.delta.initial, changed.overlap.delta.max) == (1, 2)
    assert not list(changed.overlap.rules(4))


def test_growth_is_the_power_of_what_grows() -> None:
    rows: list[dict[str, Any]] = [
        {"axis": "batch", "value": 8, "million_parameters": 1.0, "sequential_step_s": 1.0, "full_step_s": 1.0},
        {"axis": "batch", "value": 16, "million_parameters": 1.0, "sequential_step_s": 2.0, "full_step_s": 4.0},
    ]
    scaling.add_growth(rows)
    assert rows[1]["sequential_growth"] == pytest.approx(1.0) and rows[1]["full_growth"] == pytest.approx(2.0)
    assert "full_growth" not in rows[0]


def test_axes_are_the_configurations_own_values_times_factors() -> None:
    axes = scaling.make_axes(config(), ["limit", "batch"], [1], [0.5, 1.0])
    assert axes["limit"].values == [32, 64] and axes["batch"].values == [8, 16]


def test_a_dry_run_trains_every_prompt_and_forgets_it() -> None:
    base = config(
        steps=3, overlap={"delta": {"rule": "fixed", "initial": 4}, "chunk": {"tokens": 8, "adaptive": False}}
    )
    for mode in ("sequential", "full", "full+both"):
        dry = DryRun(switched(base, mode), prompt_tokens=5)
        steps = dry.run()
        assert len(steps) == 3 and dry.scheduler.num_consumed == 48
        for part in ("scheduler and buffer", "planner and checker", "stream", "controllers"):
            assert all(step[part] > 0 for step in steps), part
        assert not dry.encoder.ledgers and not dry.decoder.ledgers
        assert all(book.num_open(0) == 0 for book in (dry.planner.actor, *dry.planner.scorers.values()))


def test_overhead_in_percent_of_a_step() -> None:
    steps = [dict.fromkeys(PARTS, seconds) for seconds in (9.0, 0.001, 0.003)]
    dry = dry_figures(steps)
    assert dry["total_ms"] == pytest.approx(8.0) and dry["parts_ms"]["stream"] == pytest.approx(2.0)


def test_tiny_models_are_models() -> None:
    changed = tiny(config())
    for role in (changed.actor, changed.critic, changed.reward):
        assert role is not None
        assert check_shape("role", read_hf_config(role), changed.placement.actor, 128, 288) == []
    with pytest.raises(ConfigError, match="actor.checkpoint is given"):
        tiny(config(actor={"checkpoint": "c"}))


def test_pictures_are_written(tmp_path: Path) -> None:
    found = {"settled_on": [16], "settled_step_s": 2.0, "fixed_step_s": {"8": 2.1, "16": 1.9}}
    draw_chunks(
        {"results": [{"chunk": c, "step_s": 2.0} for c in ("8", "16", "adaptive")], "adaptive": found},
        tmp_path / "c.png",
    )
    draw_deltas({"fixed-0": [line(1, 2.0), line(2, 3.0)]}, tmp_path / "d.png")
    row = {"axis": "batch", "million_parameters": 1.0, "sequential_step_s": 2.0, "full_step_s": 1.0}
    draw_scaling({"batch": "batch size"}, [{**row, "value": 8}, {**row, "value": 16}], tmp_path / "s.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("c.png", "d.png", "s.png"))


def test_nothing_starts_where_one_of_the_runs_is_wrong(tmp_path: Path) -> None:
    started: list[str] = []
    suite = Suite(tmp_path, 2, lambda *_: started.append("run") or 0, say=lambda _: None)
    with pytest.raises(ConfigError, match="only: tokenizer.path"):
        suite.run({"only": config()})
    assert not started


def test_nothing_starts_where_a_run_cannot_fit_the_machine(tmp_path: Path, real_config: TrainConfig) -> None:
    started: list[str] = []
    suite = Suite(tmp_path, 1, lambda *_: started.append("run") or 0, say=lambda _: None)
    with pytest.raises(ConfigError, match=r"large: weights.* of all ranks take [\d,.]+ GiB on this machine"):
        suite.run({"small": real_config, "large": scaling.with_model(real_config, 300)})
    assert not started


def test_a_finished_run_is_not_written_over(tmp_path: Path, real_config: TrainConfig) -> None:
    started: list[str] = []
    suite = Suite(tmp_path / "out", 2, lambda *_: started.append("run") or 0, say=lambda _: None)
    (tmp_path / "out" / "a-2").mkdir(parents=True)
    (tmp_path / "out" / "a-2" / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="a-2 holds a finished run"):
        suite.run({"a": real_config})
    saved = tmp_path / "out" / "b-1" / "checkpoints" / "step-000002-clock-00000009"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="b-1 holds the checkpoints of a run that did not finish"):
        suite.run({"b": real_config})
    assert not started


def test_runs_take_turns_and_a_failed_one_ends_the_benchmark(tmp_path: Path, real_config: TrainConfig) -> None:
    started: list[str] = []

    def launch(kind: str, config: TrainConfig, ranks: int) -> int:
        assert kind == "train" and ranks == 2
        started.append(config.run_dir.name)
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        return {"c-1": 1, "d-1": EXIT_REQUEUE}.get(config.run_dir.name, 0)

    runs = Suite(tmp_path, 2, launch, say=lambda _: None).run({"a": real_config, "b": real_config})
    assert started == ["a-1", "b-1", "a-2", "b-2"]
    assert [run.lines for run in runs["b"]] == [[{"step": 1}]] * 2
    with pytest.raises(BenchError, match="c-1 ended with exit code 1"):
        Suite(tmp_path, 1, launch, say=lambda _: None).run({"c": real_config})
    said: list[str] = []
    with pytest.raises(BenchStopped, match="told to stop in the run d"):
        Suite(tmp_path, 1, launch, said.append, resume=False).run(dict.fromkeys(("e", "d", "f"), real_config))
    assert said[-1] == (
        f"--- 1 of 3 runs are finished and stay in {tmp_path}, each with its metrics.jsonl; "
        "nothing is compared yet: the same command with --resume goes on"
    )


def test_an_interrupted_benchmark_goes_on_with_the_runs_that_it_has_not_made(
    tmp_path: Path, real_config: TrainConfig
) -> None:
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
        Suite(tmp_path, 2, launch, say=lambda _: None).run(configs)
    with pytest.raises(ConfigError, match="a-1 holds a finished run, .* take it as it is with --resume"):
        Suite(tmp_path, 2, launch, say=lambda _: None, resume=False).run(configs)
    other = {"a": real_config.model_copy(update={"seed": 77}), "b": real_config}
    with pytest.raises(ConfigError, match="a-1 holds a finished run of another configuration"):
        Suite(tmp_path, 2, launch, say=lambda _: None, resume=True).run(other)
    written = tmp_path / "a-1" / "config.yaml"
    lost = written.rename(tmp_path / "lost.yaml")
    with pytest.raises(ConfigError, match="a-1 holds a finished run of another configuration"):
        Suite(tmp_path, 2, launch, say=lambda _: None, resume=True).run(configs)
    lost.rename(written)
    said: list[str] = []
    runs = Suite(tmp_path, 2, launch, said.append, resume=True).run(configs)
    assert started == ["a-1", "b-1", "b-1", "a-2", "b-2"] and f"finished before: {tmp_path / 'a-1'}" in said
    assert [run.lines[0]["step"] for run in (*runs["a"], *runs["b"])] == [1, 4, 3, 5]


def test_the_same_work_is_told_by_decoded_tokens() -> None:
    same = {"a": runs_of([1.0, 2.0]), "b": runs_of([3.0, 1.0]) * 2}
    found = work_figures(same)
    assert found == {"same_work": True, "decoded_tokens": {"a": [200], "b": [200, 200]}}
    assert work_lines(found) == ["the same work: 200 decoded tokens in every run"]
    require_same_work(config(), found)
    other = work_figures(same | {"c": runs_of([1.0])})
    assert not other["same_work"] and "a 200, b 200 200, c 100" in work_lines(other)[0]
    require_same_work(config(debug={}), other)
    with pytest.raises(BenchError, match="lengths were forced, but this is NOT the same work"):
        require_same_work(config(), other)


def test_woven_rounds_of_a_run_of_one_step_are_that_step(tmp_path: Path) -> None:
    spans = [
        Span(0, "actor", "decode actor m0 c1 s0", 1, 1.0, 2.0),
        Span(1, "actor", "decode actor m0 c1 s0", 1, 2.0, 4.0),
    ]
    run = made(tmp_path, "run", [], spans)
    assert weave_figures([run.path])["bubble_by_rank"] == pytest.approx([200 / 3, 100 / 3])


@pytest.fixture
def real_config(tmp_path: Path) -> TrainConfig:
    """A configuration that passes every check: its files exist."""
    from oppo_megatron.data.random_prompts import write_random_prompts

    tokenizer, prompts = write_random_prompts(tmp_path / "inputs", 8)
    return config(tokenizer={"path": tokenizer}, data={"path": prompts, "max_prompt_tokens": 8})
