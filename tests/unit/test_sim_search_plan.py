"""`oppo plan search`: plans are configurations, follow from the cluster, are told in full, and are played as they would run."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.cli.lengths import even_lengths, forced_limits
from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.main import main
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.placements import named_roles, role_placements, training_placements, trains_apart
from oppo_megatron.layout.role_memory import rank_memory, train_holdings
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.preflight.validate import check_train
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.schedule.weaving.costs import read_costs
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, assumed, published
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.search import planning, playing
from oppo_megatron.sim.search.enumeration import Plan
from oppo_megatron.sim.search.layouts import steady_work
from oppo_megatron.sim.search.planning import Task, find_plans, planned_config
from oppo_megatron.sim.search.playing import PARTS, beyond_fits, play_config

SMALL = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
NETWORK = Between(19e-6, 50e9, 8, published("a test"))
CLUSTER = Cluster(2, 2, GPUS["h100"], INSIDE["h100"], NETWORK)
LENGTHS = [20 * i + 1 for i in range(32)]


def tree(**changes: Any) -> dict[str, Any]:
    return {
        "run_dir": "run", "steps": 2, "placement": {"mode": "single"},
        "runtime": {"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 2048},
        "tokenizer": {"path": "tok"}, "data": {"path": "rows.jsonl", "max_prompt_tokens": 256},
        "actor": {"init": SMALL}, "critic": {"init": SMALL}, "reward": {"init": SMALL}, "rewards": [{"kind": "model"}],
        "rollout": {"batch_size": 32, "max_response_tokens": 1024}, "ppo": {"minibatches": 2}, **changes,
    }  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(tree(**changes))


def seconds(cluster: Cluster, of: TrainConfig | None = None, lengths: list[int] = LENGTHS) -> int:
    return find_plans(Task(of or config(), cluster, lengths), 1)[0][0].step_ns


GRPO: Mapping[str, Any] = {"critic": None, "algorithm": {"preset": "grpo"}, "filter": None, "ppo": {"minibatches": 1}}


@pytest.mark.parametrize("longest", [3000, 16000])
def test_ranks_share_long_sequences_if_there_are_fewer_than_ranks(longest: int) -> None:
    init = SMALL | {"max_position_embeddings": 16384}
    rollout = {"batch_size": 2, "group_size": 2, "max_response_tokens": longest}
    runtime = {"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 2 * longest}
    asked = config(actor={"init": init}, reward={"init": init}, rollout=rollout, runtime=runtime, **GRPO)
    plans = [planned_config(asked, plan) for plan in find_plans(Task(asked, CLUSTER, [longest, longest // 2]), 4)[0]]
    shapes = {name: read_hf_config(role) for name, role in named_roles(asked).items()}
    assert plans and all(check_layouts(plan, shapes) == [] for plan in plans)
    shared = [plan.actor.train.cp > 1 for plan in plans]
    assert shared[0] if longest > 8000 else not any(shared)


def test_replicas_divide_experts_as_the_search_decides() -> None:
    """A given size is not read."""
    found = []
    for ep in (1, 4):
        asked = config(actor={"init": SMALL | {"model_type": "mixtral", "num_local_experts": 6}, "train": {"ep": ep}})
        plans = [planned_config(asked, plan) for plan in find_plans(Task(asked, CLUSTER, LENGTHS), 4)[0]]
        shapes = {name: read_hf_config(role) for name, role in named_roles(asked).items()}
        assert plans and all(check_layouts(plan, shapes) == [] for plan in plans)
        found.append([training_placements(plan)["actor"] for plan in plans])
    assert found[0] == found[1] and max(each.ep for each in found[0]) == 2


KINDS: Mapping[str, dict[str, Any]] = {
    "ppo": {}, "sequential": {"overlap": {"intra": False, "inter": False}},
    "waits for the critic": {"overlap": {"without": ["critic"]}}, "a reference of its own": {"reference": {"init": SMALL}},
    "without a reference": {"ppo": {"minibatches": 2, "kl": {"mode": "none"}}},
    "grpo": {"critic": None, "algorithm": {"preset": "grpo"}, "filter": None,
        "rollout": {"batch_size": 32, "group_size": 4, "max_response_tokens": 1024}},
    "adapters": {"actor": {"init": SMALL, "lora": {"rank": 8}}, "critic": {"init": SMALL, "lora": {"rank": 8}}},
    "a larger reward model": {"reward": {"init": SMALL | {"num_hidden_layers": 16}}},
    "little memory for caches": {"runtime": {"device": "cpu", "dtype": "bfloat16", "kv_cache_mb": 256}},
    "experts": {role: {"init": SMALL | EXPERTS} for role in ("actor", "critic", "reward")},
    "families": {role: {"init": SMALL | {"model_type": family}} for role, family in (
        ("actor", "gemma2"), ("critic", "olmo2"), ("reward", "phi3"))},
    "woven": {"overlap": {"schedule": "woven"}},
    "continuous": {"critic": None, "algorithm": {"preset": "grpo"}, "filter": None,
        "overlap": {"continuous": {}, "max_staleness": 1},
        "rollout": {"batch_size": 32, "group_size": 4, "max_response_tokens": 1024}},
    "continuous with a critic": {"overlap": {"continuous": {"install": "pause", "lag_steps": 64}, "max_staleness": 2}},
}  # fmt: skip
OFTEN = ("a reference of its own", "grpo", "adapters", "continuous", "experts", "families")


@pytest.mark.parametrize("kind", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.long) for each in KINDS])
def test_every_plan_is_a_configuration_that_passes_the_checks(kind: str) -> None:
    """Memory is to the byte that of `--dry-run`, and the search's own count of the fullest rank agrees."""
    small = replace(CLUSTER.gpu, memory_bytes=4e9 if kind == "adapters" else 16e9)
    given, cluster = config(**KINDS[kind]), replace(CLUSTER, gpu=small)
    task = Task(given, cluster, LENGTHS)
    plans, _ = find_plans(task)
    assert plans
    for plan in plans:
        again = TrainConfig.model_validate(planned_config(given, plan).model_dump())
        assert check_layouts(again, {name: read_hf_config(role) for name, role in named_roles(again).items()}) == []
        held = [memory.total for memory in rank_memory(train_holdings(again, on_cpu=False)).values()]
        assert max(held) <= task.budget(cluster)
        if kind != "adapters":  # there the reference may be computed over the actor's weights
            assert max(held) == pytest.approx(plan.fullest_bytes, abs=16)
        placed = {name: tuple(p.ranks) for name, p in role_placements(again).items()}
        assert placed == {name: block.ranks for name, block in zip(named_roles(given), plan.blocks, strict=False)}
        assert training_placements(again)["actor"].ranks == plan.blocks[-1 if len(plan.blocks) > len(placed) else 0].ranks
        assert trains_apart(again) or given.overlap.continuous is None
        others = {"placement", "actor", "critic", "reward", "reference", "overlap", "runtime"}
        assert again.model_dump(exclude=others) == given.model_dump(exclude=others)
        assert again.overlap.model_dump(exclude={"schedule"}) == given.overlap.model_dump(exclude={"schedule"})


@pytest.mark.long
@settings(max_examples=12)
@given(st.sampled_from(["flops", "bytes_per_s", "memory_bytes"]), st.sampled_from([1.5, 4.0]), st.booleans())
def test_a_better_cluster_is_never_slower_and_more_work_never_faster(what: str, factor: float, overlapped: bool) -> None:
    given = config(overlap={"intra": overlapped, "inter": False})
    tight = replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=10e9))
    better = replace(tight, gpu=replace(tight.gpu, **{what: factor * getattr(tight.gpu, what)}))
    faster = replace(tight, between=replace(NETWORK, bytes_per_s=factor * NETWORK.bytes_per_s))
    base, once = seconds(tight, given), seconds(CLUSTER, given)
    assert max(seconds(better, given), seconds(faster, given)) <= base
    assert seconds(CLUSTER, given.with_values({"rollout.batch_size": 64}), LENGTHS * 2) >= once
    assert seconds(CLUSTER, given, [2 * length for length in LENGTHS]) >= once


def test_more_memory_and_overlap_never_make_the_best_plan_slower() -> None:
    streamed, sequential = (config(overlap={"intra": intra, "inter": False}) for intra in (True, False))
    tight = seconds(replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=6e9)), streamed)
    assert tight > seconds(CLUSTER, streamed) <= seconds(CLUSTER, sequential)


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    short = {"batch_size": 128, "max_response_tokens": 128}  # few rounds and steps, for the best plans are played
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree(rollout=short, overlap={"inter": False, "chunk": 64})))
    (tmp_path / "cluster.yaml").write_text("nodes: 2\ngpus_per_node: 2\ngpu: h100\nbetween: {gb_per_s: 50}\n")
    return tmp_path


PLAN = ["plan", "search", "c.yaml", "--cluster", "cluster.yaml", "--top", "1"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    return capsys.readouterr().err


def test_the_command_writes_a_plan_that_runs_can_take(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("out", "again"):
        assert main([*PLAN, "--lognormal", "60,0.7", "--out", folder, "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "margin of 10%" in out and "efficiencies: published" in out and "the next plan" in out
    assert "with its own placement" in out
    record = json.loads((described / "out/plan.json").read_text())
    planned = load_train(described / "out/plan.yaml", [])
    held = [memory.total for memory in rank_memory(train_holdings(planned, on_cpu=False)).values()]
    assert max(held) / 1e9 == pytest.approx(record["plans"][0]["fullest_gb"])
    first = record["plans"][0]
    assert sum(first[part] for part in PARTS) == pytest.approx(first["step_s"])
    assert read_costs(described / "out/costs.json", role_placements(planned)).prefill["critic"]
    kinds = {source.partition(":")[0] for source in record["constants"].values()}
    assert kinds <= {"measured", "published", "given", "assumed"}
    written, again = ({path.name: path.read_bytes() for path in (described / each).iterdir()} for each in ("out", "again"))
    assert written == again and set(written) == {"plan.yaml", "plan.json", "costs.json"}, "equal input gives equal bytes"


TOO_SMALL = "nodes: 1\ngpus_per_node: 2\ngpu: {memory_gb: 3, tflops: 900, gb_per_s: 3000}\ninside: {gb_per_s: 300}\n"


CRITIC_FREE = [
    "algorithm.preset=grpo", "critic=null", "filter=null", "rollout.group_size=4", "ppo.kl.mode=none", "reward=null",
    "rewards=[{kind: verifier, name: gsm8k}]",
]  # fmt: skip


def test_continuous_plans_are_compared_with_the_synchronous_loop(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`oppo plan simulate` gives the printed seconds, and the plan keeps the settings of continuous generation."""
    rules = ["overlap.inter=true", "overlap.continuous={lag_steps: 48}", "overlap.max_staleness=1", "overlap.carry=keep"]
    assert main([*PLAN, *CRITIC_FREE, *rules, "--lognormal", "60,0.7", "--out", "out"]) == 0
    out = capsys.readouterr().out
    record, planned = json.loads((described / "out/plan.json").read_text()), load_train(described / "out/plan.yaml", [])
    assert trains_apart(planned) and planned.overlap.continuous is not None
    assert (planned.overlap.continuous.lag_steps, planned.overlap.max_staleness, planned.overlap.carry) == (48, 1, "keep")
    assert f"the best plan of the synchronous loop: {record['synchronous']}" in out
    assert record["plans"][0]["roles"]["actor, trained"]["ranks"] == planned.actor.train.ranks
    simulate = ["plan", "simulate", "out/plan.yaml", "--cluster", "cluster.yaml", "--steps", "24", "--out", "played"]
    assert main([*simulate]) == 0
    lines = read_metrics(described / "played/metrics.jsonl")
    assert fmean(line["step_s"] for line in lines[4:]) == pytest.approx(record["plans"][0]["step_s"], rel=0.1)


def test_an_update_on_more_ranks_than_decode_wins_where_memory_is_scarce() -> None:
    changes = {**KINDS["grpo"], "reward": None, "rewards": [{"kind": "verifier", "name": "gsm8k"}]}
    given = config(**changes, ppo={"minibatches": 2, "kl": {"mode": "none"}})
    task = Task(given, replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=2.5e9)), LENGTHS)
    first, second = find_plans(task)[0][:2]
    assert [len(plan.blocks) for plan in (first, second)] == [2, 1] and first.step_ns < second.step_ns
    planned = planned_config(given, first)
    assert planned.actor.train.ranks == "0-3" and role_placements(planned)["actor"].ranks == (0, 1)
    assert check_train(planned, inputs=False, models=False) == []


def test_nothing_that_fits_is_told_in_full(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (described / "cluster.yaml").write_text(TOO_SMALL)
    told = refused(capsys, *PLAN)
    assert "no plan fits 1 x 2" in told and "GB are missing" in told and "for actor" in told and "on rank 0" in told
    assert "nodes would do" in told
    with mock.patch.object(planning, "MOST_NODES", 1):
        assert "not even 128 such nodes would do" in refused(capsys, *PLAN)


def test_blocks_have_as_many_nodes_as_stages_need() -> None:
    shape, rewards = SMALL | {"num_hidden_layers": 11}, [{"kind": "verifier", "name": "gsm8k"}]
    changes = {"algorithm": {"preset": "grpo"}, "critic": None, "reward": None, "rewards": rewards, "actor": {"init": shape}}
    cluster = Cluster(16, 1, replace(GPUS["h100"], memory_bytes=4e9), INSIDE["h100"], NETWORK)
    [plan], _ = find_plans(Task(config(**changes), cluster, LENGTHS), 1)
    assert plan.blocks[-1].size == plan.options[-1].serving.pp == 11, "no power of two, nor 3 times one, nor what is left of 16"


@pytest.mark.long
@pytest.mark.parametrize("tokens", [2048, 32768])
def test_so_many_nodes_would_do_and_no_fewer(tokens: int, described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*PLAN, f"runtime.micro_batch_tokens={tokens}"]
    (described / "cluster.yaml").write_text(TOO_SMALL)
    nodes = int(refused(capsys, *command).split("; ")[-1].split()[0])
    for count, code in ((nodes, 0), (nodes - 1, 2)):
        network = "between: {gb_per_s: 50, nics: 2}\n"
        (described / "cluster.yaml").write_text(TOO_SMALL.replace("nodes: 1", f"nodes: {count}") + network)
        assert main([*command, "--out", f"out{count}"]) == code


@pytest.mark.parametrize("text, more, told", [
    ("gpu: h100\nmeasured: mine.json\n", [], "mine.json"),
    ("gpu: h100\n", ["--lognormal", "5000,1.0"], "rollout.max_response_tokens is 128, which"),
    ("gpu: h100\n", ["rollout.batch_size=x"], "rollout.batch_size"),
])  # fmt: skip
def test_wrong_input_is_refused(text: str, more: list, told: str, described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (described / "cluster.yaml").write_text(text)
    assert told in refused(capsys, *PLAN, *more)


def test_a_plan_beyond_the_fits_says_so() -> None:
    def notes(of: TrainConfig, cluster: Cluster = CLUSTER) -> list[str]:
        return list(beyond_fits(Task(of, cluster, LENGTHS), of))

    assert notes(config()) == []
    runtime = {"device": "cpu", "dtype": "bfloat16"}
    assert "65536 tokens" in notes(config(runtime=runtime | {"micro_batch_tokens": 65536}))[0]
    by_numbers = replace(CLUSTER, gpu=replace(CLUSTER.gpu, sources={"efficiencies": assumed("as an h100's")}))
    assert "layers of such a processor" in notes(config(), by_numbers)[0]
    assert "the others wait" in notes(config(runtime=runtime | {"kv_cache_mb": 32}))[0]


def test_rewards_without_a_price_are_named(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = ["reward=null", "rewards=[{kind: http, url: http://127.0.0.1:9}]"]
    assert main([*PLAN, *rewards, "overlap.intra=false", "--out", "out"]) == 0
    assert "rewards of kind http take no time here" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main([*PLAN, "--lognormal", "nan,1"])
    assert "'nan,1' is not MEDIAN,SIGMA, two finite numbers" in capsys.readouterr().err


MEASURED = {
    "disaggregated": 4.18, "single": 4.66, "disaggregated, reference: actor": 4.91, "colocated, actor: {dp: 2}": 5.56,
    "colocated, actor: {tp: 2}": 8.89,
}  # fmt: skip
"""Seconds a step of examples/benchmark/overlap.yaml on two cores of a Xeon (docs/measurements.md)."""
CLUSTERS = {
    "named": "gpus_per_node: 2\ngpu: cpu\n",
    "by its peaks": "gpus_per_node: 2\ngpu: {memory_gb: 12, tflops: 0.201, gb_per_s: 28, like: cpu}\n"
    "inside: {alpha_us: 300, gb_per_s: 1}\n",
}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_measured_placements_are_in_their_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    (tmp_path / "cluster.yaml").write_text(CLUSTERS[kind])
    cluster = read_cluster(tmp_path / "cluster.yaml")
    found = {}
    for mode in MEASURED:
        changes = [f"placement={{mode: {mode}}}", "runtime.device=cpu", "runtime.dtype=float32"]
        config = load_config(TrainConfig, "examples/benchmark/overlap.yaml", changes)
        found[mode] = play_config(Task(config, cluster, even_lengths(config), limits=forced_limits(config)), config).total
    for one, other in [(a, b) for a in MEASURED for b in MEASURED if MEASURED[b] > 1.15 * MEASURED[a]]:
        assert found[one] < found[other], (one, other)


SHORT = [4 * i + 1 for i in range(32)]
PLAIN = Decoding(256, SHORT)


def dealt(seq_id: int) -> int:
    return SHORT[seq_id * 13 % 32]


def carrying(delta: int, **changes: object) -> TrainConfig:
    return config(overlap={"delta": {"rule": "fixed", "initial": delta, "max": 32}, "chunk": 16} | changes)


def test_without_delta_a_step_decodes_its_batch() -> None:
    """Each of these batches has every length once."""
    assert steady_work(config(overlap={"inter": False}), PLAIN, dealt).decoding == PLAIN
    found = steady_work(carrying(0), PLAIN, dealt)
    assert sorted(found.decoding.lengths) == SHORT and found.decoding.prompt_tokens == 256
    assert found.reads["actor"] == pytest.approx(1.0, abs=0.005) and found.reads["reward"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("delta", [4, 16])
def test_carried_rollouts_fill_up_the_batch_and_are_read_again(delta: int) -> None:
    """Decodes as many tokens as are trained, in the long run, over more sequences in fewer steps."""
    found = steady_work(carrying(delta), PLAIN, dealt)
    assert sum(found.decoding.lengths) == pytest.approx(sum(SHORT), rel=0.06)
    assert len(found.decoding.lengths) > 32 and max(found.decoding.lengths) < max(SHORT)
    assert found.decoding.prompt_tokens > 256 and found.reads["actor"] > 1.05
    kept = steady_work(carrying(delta, carry="keep"), PLAIN, dealt)
    assert kept.reads["actor"] == pytest.approx(1.0, abs=0.02) and kept.decoding == found.decoding


TASK = Task(carrying(0), CLUSTER, SHORT)


@cache
def planned() -> list[Plan]:
    return find_plans(TASK)[0]


def test_plans_are_played_until_no_other_can_win() -> None:
    """Played seconds over price, at its least, bounds the plans that are left out: none of them can be the fastest."""
    seen, real = list[tuple[Plan, float]](), playing.play_plan

    def watched(task: Task, plan: Plan, config: TrainConfig, steps: int) -> playing.Played:
        found = real(task, plan, config, steps)
        seen.append((plan, found.step_s))
        return found

    few = {"RESPONSES": (32, 64), "FEW": 1, "MANY": 2, "WARM_UP": 1, "LONG": 2, "LONG_RESPONSES": 64}
    with mock.patch.multiple(playing, play_plan=watched, **few):
        best = playing.play_plans(TASK, planned(), 1, (told := list[str]()).append)
    count = len({id(plan) for plan, _ in seen})
    assert 1 < count < len(planned()) and len(best) == 1
    assert [line.split(": ")[1] for line in told[:-1]] == [f"{number} played for 1 steps" for number in range(count)]
    first = seen[:count]
    ratio = min(1.0, *(seconds * 1e9 / plan.step_ns for plan, seconds in first))
    assert planned()[count].step_ns * ratio > 1e9 * min(seconds for _, seconds in first)


def test_the_delta_of_least_seconds_is_taken_of_steps_after_the_first_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "MOST_LONG", 16)
    config = planned_config(TASK.config, planned()[0])
    chosen = playing.best_delta(TASK, config, 4)
    runs = {delta: playing.counted_steps(TASK, config.with_values({playing.DELTA: delta}), 16) for delta in (0, 8, 32)}
    paces = {delta: playing.pace(run) for delta, run in runs.items()}
    best = min(paces.values())
    assert paces[chosen or 0] <= 1.015 * best and (chosen is not None) == (paces[0] > 1.015 * best)
    steps = playing.counted_steps(TASK, config, 3)
    assert len(steps) == 3 and steps[0].step > 3 and steps[0].clock > max(SHORT)
    seconds = playing.play_plan(TASK, planned()[0], config, 3).step_s
    assert seconds == pytest.approx(fmean(step.step_s for step in steps), rel=1e-6)
