"""`oppo plan`: what it finds holds as a configuration, follows from the cluster, and is told in full."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.main import main
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.holdings import rank_memory, train_holdings
from oppo_megatron.layout.placements import named_roles, role_placements
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.schedule.weaving.costs import read_costs
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, assumed, published
from oppo_megatron.sim.search.configured import planned_config
from oppo_megatron.sim.search.planning import Task, find_plans
from oppo_megatron.sim.search.record import PARTS, beyond_fits

SMALL = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
CLUSTER = Cluster(2, 2, GPUS["h100"], INSIDE["h100"], Between(19e-6, 50e9, 8, published("a test")))
LENGTHS = [20 * i + 1 for i in range(32)]


def tree(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "run_dir": "run", "steps": 2, "placement": {"mode": "single"},
        "runtime": {"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 2048},
        "tokenizer": {"path": "tok"}, "data": {"path": "rows.jsonl", "max_prompt_tokens": 256},
        "actor": {"init": SMALL}, "critic": {"init": SMALL}, "reward": {"init": SMALL}, "rewards": [{"kind": "model"}],
        "rollout": {"batch_size": 32, "max_response_tokens": 1024}, "ppo": {"minibatches": 2},
    }  # fmt: skip
    return found | changes


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(tree(**changes))


def seconds(cluster: Cluster, of: TrainConfig | None = None, lengths: list[int] = LENGTHS) -> int:
    """Price of the best plan in nanoseconds."""
    return find_plans(Task(of or config(), cluster, lengths), 1)[0][0].step_ns


KINDS: Mapping[str, dict[str, Any]] = {
    "ppo": {},
    "sequential": {"overlap": {"intra": False, "inter": False}},
    "waits for the critic": {"debug": {"wait_for": ["critic"]}},
    "a reference of its own": {"reference": {"init": SMALL}},
    "without a reference": {"ppo": {"minibatches": 2, "kl": {"mode": "none"}}},
    "grpo": {
        "critic": None, "algorithm": {"preset": "grpo"}, "filter": None,
        "rollout": {"batch_size": 32, "group_size": 4, "max_response_tokens": 1024},
    },
    "adapters": {"actor": {"init": SMALL, "lora": {"rank": 8}}, "critic": {"init": SMALL, "lora": {"rank": 8}}},
    "a larger reward model": {"reward": {"init": SMALL | {"num_hidden_layers": 16}}},
    "little memory for caches": {"runtime": {"device": "cpu", "dtype": "bfloat16", "kv_cache_mb": 256}},
    "woven": {"overlap": {"schedule": "woven"}},
}  # fmt: skip


OFTEN = ("ppo", "a reference of its own", "grpo", "adapters")


@pytest.mark.parametrize("kind", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.long) for each in KINDS])
def test_every_plan_is_a_configuration_that_passes_the_checks(kind: str) -> None:
    """Memory is to the byte that of `--dry-run`, and the search's own count of the fullest rank agrees."""
    given, cluster = config(**KINDS[kind]), replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=16e9))
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
        assert placed == {name: block.ranks for name, block in zip(named_roles(given), plan.blocks, strict=True)}
        others = {"placement", "actor", "critic", "reward", "reference", "overlap", "runtime"}
        assert again.model_dump(exclude=others) == given.model_dump(exclude=others)


@pytest.mark.long
@settings(max_examples=12)
@given(st.sampled_from(["flops", "bytes_per_s", "memory_bytes"]), st.sampled_from([1.5, 4.0]), st.booleans())
def test_a_better_cluster_is_never_slower(what: str, factor: float, overlapped: bool) -> None:
    """More operations, memory or memory bandwidth; and more of the network."""
    given = config(overlap={"intra": overlapped, "inter": False})
    tight = replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=10e9))
    better = replace(tight, gpu=replace(tight.gpu, **{what: factor * getattr(tight.gpu, what)}))
    base = seconds(tight, given)
    assert seconds(better, given) <= base
    assert tight.between is not None
    faster = replace(tight, between=replace(tight.between, bytes_per_s=factor * tight.between.bytes_per_s))
    assert seconds(faster, given) <= base


def test_more_memory_never_makes_the_best_plan_slower() -> None:
    """Nor slower links: the best plan of a cluster is one of a better cluster, too."""
    found = [seconds(replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=gb * 1e9))) for gb in (6, 80)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


@pytest.mark.long
def test_more_work_never_takes_less() -> None:
    for overlapped in (True, False):
        overlap = {"intra": overlapped, "inter": False}
        once = seconds(CLUSTER, config(overlap=overlap))
        twice = config(rollout={"batch_size": 64, "max_response_tokens": 1024}, overlap=overlap)
        assert seconds(CLUSTER, twice, LENGTHS * 2) >= once
        assert seconds(CLUSTER, config(overlap=overlap), [2 * length for length in LENGTHS]) >= once


def test_overlapped_steps_are_never_slower() -> None:
    streamed, sequential = (seconds(CLUSTER, config(overlap={"intra": intra, "inter": False})) for intra in (True, False))
    assert streamed <= sequential


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    short = {"batch_size": 128, "max_response_tokens": 128}  # few rounds and steps, for the best plans are played
    overlap = {"inter": False, "chunk": {"tokens": 64, "adaptive": False}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree(rollout=short, overlap=overlap)))
    (tmp_path / "cluster.yaml").write_text("nodes: 2\ngpus_per_node: 2\ngpu: h100\nbetween: {gb_per_s: 50}\n")
    return tmp_path


PLAN = ["plan", "search", "c.yaml", "--cluster", "cluster.yaml", "--top", "1"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    return capsys.readouterr().err


def test_the_command_writes_a_plan_that_runs_can_take(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--lognormal", "60,0.7", "--out", "out", "--top", "2"]) == 0
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
    assert {path.name for path in (described / "out").iterdir()} == {"plan.yaml", "plan.json", "costs.json"}
    kinds = {source.partition(":")[0] for source in record["constants"].values()}
    assert kinds <= {"measured", "published", "given", "assumed"}


def test_equal_input_gives_equal_bytes(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("one", "two"):
        assert main([*PLAN, "--out", out]) == 0
    for name in ("plan.json", "plan.yaml", "costs.json"):
        assert (described / "one" / name).read_bytes() == (described / "two" / name).read_bytes()


TOO_SMALL = "nodes: 1\ngpus_per_node: 2\ngpu: {memory_gb: 3, tflops: 900, gb_per_s: 3000}\ninside: {gb_per_s: 300}\n"


def test_nothing_that_fits_is_told_in_full(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (described / "cluster.yaml").write_text(TOO_SMALL)
    told = refused(capsys, *PLAN)
    assert "no plan fits 1 x 2" in told and "GB are missing" in told and "for actor" in told and "on rank 0" in told
    assert "nodes would do" in told


@pytest.mark.long
@pytest.mark.parametrize("tokens", [2048, 32768])
def test_so_many_nodes_would_do_and_no_fewer(tokens: int, described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With smaller micro-batches, too, where the configured ones lack memory."""
    command = [*PLAN, f"runtime.micro_batch_tokens={tokens}"]
    (described / "cluster.yaml").write_text(TOO_SMALL)
    nodes = int(refused(capsys, *command).split("; ")[-1].split()[0])
    for count, code in ((nodes, 0), (nodes - 1, 2)):
        network = "between: {gb_per_s: 50, nics: 2}\n"
        (described / "cluster.yaml").write_text(TOO_SMALL.replace("nodes: 1", f"nodes: {count}") + network)
        assert main([*command, "--out", f"out{count}"]) == code


@pytest.mark.parametrize(
    "cluster, arguments, words",
    [
        ("gpu: h100\nnodes: 2\nbetween: {gb_per_s: 0}\n", [], "between.gb_per_s"),
        ("gpu: h100\nmeasured: mine.json\n", [], "mine.json"),
        ("gpu: h100\n", ["--lognormal", "5000,1.0"], "rollout.max_response_tokens is 128, which"),
        ("gpu: {memory_gb: 0.1, tflops: 9, gb_per_s: 3}\ngpus_per_node: 1\n", [], "GB are missing"),
        ("gpu: h100\n", ["rollout.batch_size=x"], "rollout.batch_size"),
    ],
)
def test_wrong_input_is_refused(
    cluster: str, arguments: list[str], words: str, described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (described / "cluster.yaml").write_text(cluster)
    assert words in refused(capsys, *PLAN, *arguments)


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
    """Rewards of a service; and lengths that are not numbers are refused."""
    rewards = ["reward=null", "rewards=[{kind: http, url: http://127.0.0.1:9}]"]
    assert main([*PLAN, *rewards, "overlap.intra=false", "--out", "out"]) == 0
    assert "rewards of kind http take no time here" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main([*PLAN, "--lognormal", "nan,1"])
    assert "'nan,1' is not MEDIAN,SIGMA, two finite numbers" in capsys.readouterr().err
