"""The scripts of `benchmarks/`: a small run of each, and their arithmetic by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import machine, planning, scale_study, seeds, shared_prompts
from benchmarks.dry_run import Cluster, DryRun
from benchmarks.fitting.engine import PARAMETERS, Observed, fit_engine, phase_seconds
from benchmarks.fitting.points import CollectivePoint, LayerPoint, read_collectives, read_layers, write_collectives, write_layers
from benchmarks.limit import Response, decode_batches, decode_steps, least_seconds
from benchmarks.peaks import Peaks, measure_peaks
from benchmarks.rank_run import RankRun
from benchmarks.scale_study import MARGIN, STRONG, WEAK, Layout, Point, least_layout
from benchmarks.simulation import simulate_rounds
from oppo_megatron.cli import demo
from oppo_megatron.cli.main import main as oppo
from oppo_megatron.config.derived import switched
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import usable_cores
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.layout.shape import causal_pairs
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.schedule.checking.checker import Fault, FaultKind
from oppo_megatron.sim.clusters.cluster import OF_CPU, Engine, measured, threaded
from oppo_megatron.sim.clusters.cluster import Cluster as Machines
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.pricing.model import Decoding
from tests.unit.test_bench_suite import config as with_critic
from tests.unit.test_bench_suite import without_critic as config
from tests.unit.test_layout_shape import LLAMA

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "benchmark" / "overlap.yaml")
SMALL = Cluster(tp=2, pp=2, response_tokens=64, chunk=16, lengths=(20.0, 0.5), steps=3)
SIZES = ["--tp", "2", "--pp", "2", "--sequences", "8", "--chunk", "16"]
MODES = ["disaggregated", "colocated"]
PROMPT = 24
each_mode = pytest.mark.parametrize("mode", MODES)


# planning and dry_run


def test_planning_has_a_row_for_the_first_and_the_last_rank_of_each_size() -> None:
    rows = list(planning.bench_planning(SMALL, MODES, [8, 16], [16]))
    assert [(row["mode"], row["ranks"], row["rank"]) for row in rows] == [
        (mode, n, rank) for mode in MODES for n in (8, 16) for rank in (0, n - 1)
    ]
    for row in rows:
        assert 0 < row["planning"] + row["checking"] + row["bookkeeping"] <= 1.5 * row["total"]
        assert row["percent"] == pytest.approx(100 * row["total"] / row["step_s"])
        assert row["rounds"] >= 2 and row["first"] > 0
        assert row["shapes"] > 0 or row["mode"] == "disaggregated", "woven rounds are planned anew in each step"
    with pytest.raises(ConfigError, match="--ranks 12: disaggregated replicas of tp 2 x pp 2 need a multiple of 8"):
        next(planning.bench_planning(SMALL, MODES[:1], [8, 12], [16]))


def test_a_step_takes_at_least_what_reading_and_computing_take() -> None:
    """Counted by hand: 70.6e9 weights of two bytes in eight parts; operations of some 6 and 18 of them a token's weight."""
    cluster = Cluster(steps=1)
    config = cluster.config("disaggregated", 128, 64)
    reading = planning.least_step_s(config, cluster, 1001, 500.0) - planning.least_step_s(config, cluster, 1, 500.0)
    assert reading == pytest.approx(1000 * 2 * 69.5e9 / 8 / 3.35e12, rel=0.02)
    computing = planning.least_step_s(config, cluster, 0, 500.0)
    assert computing == pytest.approx(64 * 1012 * 69.5e9 * (4 * 2 + 2 * 6) / (128 * 989e12), rel=0.05)


def test_planning_counts_what_a_rank_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning.main(["--count", "--ranks", "8", "64", *SIZES]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["disaggregated", "8"], ["disaggregated", "64"]]
    groups, calls, messages, chunks, peers = zip(*(map(int, row[2:]) for row in rows), strict=True)
    assert groups == (15, 16) and calls[0] == 37, "there is a dp group where there are replicas"
    assert chunks == (8, 16) and peers == (5, 9), "a header and a payload to eight listeners, and tokens to one stage"
    assert all((each - chunk) % 16 in (0, 2) for each, chunk in zip(messages, chunks, strict=True)), "two gathers of dp"


def test_a_dry_run_trains_every_prompt_and_forgets_it() -> None:
    base = with_critic(steps=3, overlap={"delta": {"rule": "fixed", "initial": 4}, "chunk": 8})
    for mode in ("sequential", "full", "full+both"):
        dry = DryRun(switched(base, mode), prompt_tokens=5)
        steps = dry.run()
        assert len(steps) == 3 and dry.scheduler.num_consumed == 48
        for part in ("scheduler and buffer", "planner and checker", "stream", "controllers"):
            assert all(step[part] > 0 for step in steps), part
        assert not dry.encoder.ledgers and not dry.decoder.ledgers
        assert all(book.num_open(0) == 0 for book in (dry.planner.actor, *dry.planner.scorers.values()))
    for preset in ("dapo", "reinforce_pp"):
        assert all(step["planner and checker"] > 0 for step in DryRun(config(preset), 16).run())


# simulation: a round that every rank plans for itself


def faults_of(config: TrainConfig, rank: int, odd: Callable[[int], RankRun], number: int) -> list[Fault]:
    (played,) = simulate_rounds(config, lambda each: odd(each) if each == rank else RankRun(config, PROMPT, each), number, number)
    return played.faults


@each_mode
def test_ranks_that_plan_alike_have_a_sound_round(mode: str) -> None:
    config = SMALL.config(mode, 16, 16)
    rounds = list(simulate_rounds(config, lambda rank: RankRun(config, PROMPT, rank), 1, 3))
    assert [played.faults for played in rounds] == [[], [], []] and [played.round.index for played in rounds] == [1, 2, 3]
    for played in rounds:
        assert sorted(played.schedule.actions) == list(range(16))
        assert played.chain >= 2 * played.round.steps, "to the last stage and back, in each decode step"


@each_mode
def test_a_rank_that_plans_otherwise_is_named(mode: str) -> None:
    config, other = SMALL.config(mode, 8, 8), replace(SMALL, chunk=8).config(mode, 8, 8)
    own = RankRun(config, PROMPT, 0)
    ended = next(seq_id for seq_id in range(8) if own.limit(seq_id) <= SMALL.chunk)
    for rank in (0, 3, 7):
        lengths = lambda each: RankRun(config, PROMPT, each, lambda seq_id: own.limit(seq_id) - (seq_id == ended))  # noqa: E731
        faults = faults_of(config, rank, lengths, 2)
        assert [(fault.kind, fault.rank) for fault in faults if "other records" in fault.message] == [(FaultKind.PLAN, rank)]
        assert f"of sequence {ended}, " in faults[0].message

        faults = faults_of(config, rank, lambda each: RankRun(other, PROMPT, each), 1)
        assert [fault.rank for fault in faults if fault.kind == FaultKind.PLAN][0] == rank
        assert "plans round 1 with 8 decode steps, most others round 1 with 16" in faults[0].message
        decodes = mode == "colocated" or rank < 4
        assert not decodes or {FaultKind.DEADLOCK, FaultKind.MISSING} <= {fault.kind for fault in faults}
        assert any(fault.rank != rank for fault in faults) == decodes, "its peers wait"


def test_planning_prints_a_row_for_each_size_that_it_simulates(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by hand: each shard sends a hidden state and a token per decode step, and one for scorers; listeners get two."""
    assert planning.main(["--simulate", "--ranks", "8", "16", *SIZES]) == 0
    out, err = capsys.readouterr()
    heads, *rows = [line.split() for line in out.splitlines()[:3]]
    assert heads[:6] == ["mode", "ranks", "round", "actions", "chain", "messages"]
    assert [[row[1], row[2], row[5]] for row in rows] == [[str(8 * n), "2", str(n * (2 * (2 * 16 + 3) + 4 * 2))] for n in (1, 2)]
    assert out.splitlines()[-1] == "OK: all ranks have planned the same round, and the checker finds no fault in it"
    assert err.splitlines()[-1].startswith("disaggregated: 16 of 16 ranks have planned, ")


# scale_study


def test_the_least_layout_fits_and_uses_every_rank() -> None:
    for model, ranks in (("8B", 8), ("8B", 128), ("70B", 64), ("405B", 256)):
        found = least_layout(model, ranks, WEAK * ranks)
        assert found is not None
        layout, fullest_gb = found
        config = layout.config(model, ranks, WEAK * ranks, 0)
        memory_gb = scale_study.cluster_of(ranks).gpu.memory_bytes / 1e9
        assert world_size(config) == ranks and fullest_gb <= (1 - MARGIN) * memory_gb
        placements = role_placements(config)
        assert len(placements["actor"].ranks) == 3 * ranks // 4
        assert len({frozenset(placements[role].ranks) for role in ("reference", "critic", "reward")}) == 1
    assert least_layout("405B", 64, 256) is None and least_layout("8B", 16384, STRONG) is None, "nothing fits"
    assert least_layout("8B", 8192, STRONG) is not None


def test_a_free_network_saves_and_a_free_host_decodes_faster() -> None:
    point = Point("8B", 32, 128, Layout((1, 1), (1, 1)), 0)
    assert 0 < point.network_s() < point.costs.update_s("actor", sum(point.typical))
    assert Point("8B", 8, 32, Layout((1, 1), (2, 1)), 0).network_s() == 0  # one node
    assert point.fixed_s(100) == 100 * point.costs.actions.decode_at(0).fixed_s


@pytest.mark.long
def test_scale_study_prints_and_writes_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale_study.main(["--models", "8B", "--ranks", "8,32", "--out", str(tmp_path)]) == 0
    assert "stops first" in capsys.readouterr().out
    found = json.loads((tmp_path / "scale.json").read_text())
    assert [row["ranks"] for row in found["weak"]] == [8, 32] and all(row["speedup"] > 1 for row in found["weak"])
    assert [round(row["step_s"], 2) for row in found["weak"]] == [18.76, 20.95], "benchmarks/README.md"
    for row in found["weak"]:
        shares = sum(row[f"{part}_percent"] for part in ("decode", "score", "update", "critic"))
        assert shares + 100 * row["idle_s"] / row["step_s"] == pytest.approx(100)


def test_mistakes_of_scale_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in (
        (["--ranks", "12"], "--ranks 12: nodes have 8 GPUs; give multiples of 8"),
        (["--models", "9B"], "--models names 9B; choose from 8B, 70B, 405B"),
        (["--models", "405B", "--ranks", "8"], "no layout fits an H200's memory; give more ranks"),
    ):
        assert scale_study.main([*arguments, "--out", str(tmp_path)]) == 2
        assert problem in capsys.readouterr().err


# fitting and machine


HERE = measured("here")
TRUE = Engine(2e-3, 1e-3, HERE, decode=1.2, read=1.1, update=1.4)
LENGTHS = ((3, 40, 90, 200), (10, 20, 30, 250), (64, 64, 64, 64))
CORE = machine.Core(5e10, 2e10, {1: 1.0, 2: 1.5, 4: 2.0})


def observed(cluster: Machines, engine: Engine, cores: int) -> list[Observed]:
    """Steps that an engine of known constants would take."""
    config = load_config(TrainConfig, EXAMPLE, ["placement={mode: single}", "rollout.batch_size=4", "runtime.dtype=float32"])
    config = config.model_copy(update={"runtime": config.runtime.with_threads(cores)})
    steps = [Decoding(64, lengths) for lengths in LENGTHS]
    return [Observed(config, step, phase_seconds(replace(cluster, adapted=engine), config, step)) for step in steps]


def test_the_constants_of_an_engine_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    write_json(tmp_path / "measured.json", {"source": "here", "threads": {"1": 1.0, "2": 1.7}})
    (tmp_path / "cluster.yaml").write_text("gpus_per_node: 2\ngpu: cpu\nmeasured: measured.json\n")
    cluster = read_cluster(tmp_path / "cluster.yaml")
    fit = fit_engine(cluster, [*observed(cluster, TRUE, 1), *observed(cluster, TRUE, 2)], HERE)
    for name in PARAMETERS:
        assert getattr(fit.engine, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert max(fit.errors.values()) < 1e-9 and list(fit.errors) == ["decode", "score", "update", "critic update"]
    with pytest.raises(DataError, match="no step was measured; let the runs make two or more"):
        fit_engine(cluster, [], HERE)

    kernels, both = (observed(cluster, engine, 1)[0].seconds for engine in (replace(TRUE, launch_s=0, replay_s=0), TRUE))
    faster = observed(cluster, TRUE, 2)[0].seconds
    for phase, seconds in kernels.items():
        not_of_the_host = pytest.approx(both[phase] - seconds * (1 - 1 / 1.7), rel=0.02)
        assert faster[phase] == not_of_the_host, f"further cores do not shorten what the host takes: {phase}"

    assert cluster.engine == OF_CPU
    write_json(tmp_path / "measured.json", {"source": "here", "engine": {name: getattr(TRUE, name) for name in PARAMETERS}})
    assert read_cluster(tmp_path / "cluster.yaml").engine == replace(TRUE, source=HERE)


def test_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = [LayerPoint("cpu", "qwen2", {"model_type": "llama"} | sizes, 1, 4, 2.5, 1.25, 0.5)]
    messages = [CollectivePoint("cpu", "send_recv", 2, 2, 1024.0, 51.5)]
    write_layers(tmp_path / "layers.csv", layers)
    write_collectives(tmp_path / "collectives.csv", messages)
    assert (read_layers(tmp_path / "layers.csv"), read_collectives(tmp_path / "collectives.csv")) == (layers, messages)


def test_a_rank_is_as_fast_as_its_cores_were_measured(tmp_path: Path) -> None:
    threads = {str(count): times for count, times in CORE.threads.items()}
    write_json(tmp_path / "measured.json", {"source": "here", "threads": threads})
    text = yaml.safe_dump(machine.cluster_tree(machine.processor(CORE, 4), 4, "measured.json"))
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.num_ranks == 4 and cluster.gpu.on_cpu
    for threads, times in {1: 1.0, 2: 1.5, 3: 1.5, 4: 2.0}.items():
        gpu = threaded(cluster, 1, threads).gpu
        assert (gpu.flops, gpu.bytes_per_s) == pytest.approx((times * 5e10, times * 2e10))
        assert threads == 1 or gpu.sources["threads"].kind == "measured"
    assert threaded(cluster, 2, 0).gpu.flops == pytest.approx(1.5 * 5e10)


@pytest.mark.long
def test_the_machine_at_hand_is_a_cluster_that_runs_can_be_simulated_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert machine.main([EXAMPLE, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"{usable_cores()} cores: " in told and "qwen2: products" in told
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.adapted is not None and cluster.engine.source.kind == "measured"
    assert cluster.gpus_per_node == usable_cores() and cluster.gpu.sources["efficiencies"].kind == "measured"
    command = ["plan", "simulate", EXAMPLE, "--cluster", str(tmp_path / "cluster.yaml"), "--steps", "2"]
    assert oppo([*command, "placement.mode=single"]) == 0
    assert "s/step" in capsys.readouterr().out


# limit and peaks


def test_the_least_time_counts_the_scorers_that_there_are() -> None:
    peaks = Peaks("float32", {1: 1e9}, {1: 1e9}, {1: {1: 1e9, 8: 1e9}})
    responses = [Response(5, 7, 7), Response(6, 4, 9)]
    found = {name: least_seconds(config(name), responses, peaks, 1) for name in ("dapo", "grpo")}
    assert found["dapo"]["score_s"] == 0 < found["grpo"]["score_s"]
    for least in found.values():
        assert least["train_s"] > 0
        assert least["least_s"] == pytest.approx(least["decode_s"] + least["score_s"] + least["train_s"])


def test_decode_steps_are_those_of_a_clock() -> None:
    # Clocks 1 to 6.  The first sequence: tokens at clocks 1..4; the second, carried or late: at clocks 3..4; the third at 6.
    responses = [Response(10, 4, 4), Response(5, 2, 4), Response(7, 1, 6)]
    sequences, keys = decode_steps(responses)
    assert sequences == [1, 1, 2, 2, 1], "nothing runs at clock 5"
    assert keys == [10, 11, 12 + 5, 13 + 6, 7]
    assert sum(keys) == sum(causal_pairs(r.prompt_tokens - 1, r.tokens) for r in responses)
    assert decode_batches(6) == [1, 2, 4, 6] and decode_batches(8) == [1, 2, 4, 8]


@pytest.mark.long
def test_peaks_are_measured_on_this_machine() -> None:
    before = torch.get_num_threads()
    peaks = measure_peaks(LLAMA, "float32", [1, 4], [1])
    assert torch.get_num_threads() == before
    # Any processor that runs this does more than 0.1 GFLOP/s and reads more than 0.1 GB/s, and less than 10^6 of both.
    assert 1e8 < peaks.flops[1] < 1e15 and 1e8 < peaks.read_bytes[1] < 1e15
    assert set(peaks.decode_flops[1]) == {1, 4}
    assert peaks.lines()[0].startswith("1 thread(s), float32: GEMM ")


# seeds


def figures(step_s: float, reward: float, accuracy: float) -> dict[str, Any]:
    return {"step_s": step_s, "reward_half": reward, "reward_last": reward, "accuracy_before": 0.2, "accuracy_after": accuracy}


def test_seeds_are_compared_in_pairs() -> None:
    found = seeds.difference([1.0, 2.0, 3.0], [2.0, 2.5, 6.0])
    assert (found["difference_mean"], found["difference_sd"]) == pytest.approx((1.5, 1.75**0.5))
    assert (found["base_mean"], found["other_mean"]) == (2.0, 3.5)
    assert found["p"] == pytest.approx(2 / 8), "only all plus and all minus are as far from 0"
    assert seeds.difference([1.0, 2.0], [2.0, 1.0])["p"] == seeds.difference([1.0, 1.0], [1.0, 1.0])["p"] == 1.0
    demos = {
        1: {"sequential": figures(1.0, 0.5, 0.6), "oppo": figures(0.5, 0.5, 0.7)},
        2: {"sequential": figures(1.2, 0.8, 0.6), "oppo": figures(0.8, 0.4, 0.5)},
    }
    result = seeds.compare(demos)
    assert [row["speedup"] for row in result["results"]] == pytest.approx([2.0, 1.5])
    assert [row["reward_per_second"] for row in result["results"]] == pytest.approx([2.0, 0.75])
    rates = result["tests"]["reward per second"]
    assert (rates["base_mean"], rates["other_mean"]) == pytest.approx(((0.5 + 0.8 / 1.2) / 2, (1.0 + 0.5) / 2))
    assert result["tests"]["held-out accuracy"]["difference_mean"] == pytest.approx(0.0)
    text = "\n".join(seeds.remarks(result))
    assert "difference -0.200" in text and "1.75 times as fast" in text


@pytest.mark.parametrize(("given", "code", "ends", "says"), [
    ("3,3", 0, 2, "needs two different seeds"), ("3,4", 75, 143, "stopped in the demo of seed 3"),
    ("3,4", 130, 130, "interrupted"),
])  # fmt: skip
def test_what_ends_a_comparison_of_seeds(
    given: str, code: int, ends: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", lambda settings: code)
    assert seeds.main(["--seeds", given]) == ends
    assert says in capsys.readouterr().err


# shared_prompts


def test_shared_prompts_read_fewer_tokens_for_the_same_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--model", str(ROOT / "examples" / "benchmark" / "model_tiny.json"), "--repeats", "1"]
    assert shared_prompts.main([*tiny, "--prompts", "10", "--responses", "2-5", "--group", "4", "--groups", "2"]) == 0
    names, row = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    found = dict(zip(names[:5], map(float, row[:5]), strict=True))
    assert (found["prompt"], found["tokens"], found["shared"]) == (10, 2 * (40 + 10), 2 * (10 + 10))  # 1, 2, 3 and 4 follow
    assert 0 <= float(row[-1]) < 1e-4
    with pytest.raises(SystemExit):
        shared_prompts.main([*tiny, "--responses", "5-2"])
    assert "'5-2' is not a range of lengths; give one like 64-128" in capsys.readouterr().err
