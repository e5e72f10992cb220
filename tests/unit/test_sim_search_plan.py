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

from benchmarks.prices import main as prices
from benchmarks.published.tables import PLANS, SHAPES, PublishedPlan
from oppo_megatron.cli.main import main
from oppo_megatron.cli.run import load_train
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.holdings import rank_memory, train_holdings
from oppo_megatron.layout.placements import layout_tree, named_roles, role_placements
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.schedule.weaving.costs_file import read_costs
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.gpus import GPUS
from oppo_megatron.sim.clusters.links import INSIDE, Between
from oppo_megatron.sim.clusters.sources import assumed, published
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.pricing.prices import Prices, total_s
from oppo_megatron.sim.search.calibration import scales_of_run
from oppo_megatron.sim.search.exact import never
from oppo_megatron.sim.search.fitted import beyond_fits
from oppo_megatron.sim.search.planning import Planned, Task, make_plan

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


def best(cluster: Cluster, of: TrainConfig, lengths: list[int] = LENGTHS) -> Planned:
    return make_plan(Task(of, cluster, lengths), "exact", 3, 1, never, never)


def seconds(cluster: Cluster, of: TrainConfig | None = None, lengths: list[int] = LENGTHS) -> int:
    """Of the exact optimum, in nanoseconds, whatever its micro-batches."""
    return best(cluster, of or config(), lengths).plans[0].plan.step_ns


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


@pytest.mark.parametrize(
    "kind", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.long) for each in KINDS]
)
def test_every_plan_is_a_configuration_that_passes_the_checks(kind: str) -> None:
    """Memory is to the byte that of `--dry-run`, and the search's own count of the fullest rank agrees."""
    given = config(**KINDS[kind])
    planned = best(replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=16e9)), given)
    assert planned.plans and planned.found.ended
    for each in planned.plans:
        again = TrainConfig.model_validate(each.config.model_dump())
        assert check_layouts(again, {name: read_hf_config(role) for name, role in named_roles(again).items()}) == []
        held = [memory.total for _, memory in sorted(rank_memory(train_holdings(again, on_cpu=False)).items())]
        assert list(each.rank_bytes) == held and max(held) <= planned.task.budget
        if kind != "adapters":  # there the reference may be computed over the actor's weights
            assert each.fullest_bytes == pytest.approx(each.plan.fullest_bytes, abs=16)
        homes = {name: tuple(p.ranks) for name, p in role_placements(again).items()}
        assert homes == {name: home.ranks for name, home in zip(planned.table.roles, each.plan.homes, strict=True)}
        assert each.parts.total == each.plan.step_ns
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


def decode_micro_batches(plan: PublishedPlan) -> int:
    """The printed number, times the stages where there are several."""
    call = plan.call("ActorGen")
    return call.micro_batches * call.pp


def published_tree(plan: PublishedPlan, **runtime: Any) -> dict[str, Any]:
    """A plan of ReaL whose calls are all on the same ranks, as a configuration."""

    def sizes(name: str) -> dict[str, int]:
        call = plan.call(name)
        return {"tp": call.tp, "pp": call.pp, "dp": call.dp}

    def shape(name: str) -> dict[str, Any]:
        return {**SHAPES[plan.call(name).model], "max_position_embeddings": 4096}

    train = {"recompute": "full"}
    return tree(
        placement={"mode": "colocated", "actor": sizes("ActorGen")},
        actor={"init": shape("ActorGen"), "train": sizes("ActorTrain") | train},
        critic={"init": shape("CriticInf"), "parallel": sizes("CriticInf"), "train": sizes("CriticTrain") | train},
        reward={"init": shape("RewInf"), "parallel": sizes("RewInf")},
        reference={"init": shape("RefInf"), "parallel": sizes("RefInf")},
        rollout={"batch_size": plan.batch, "max_response_tokens": 1024},
        data={"path": "rows.jsonl", "max_prompt_tokens": 1024},
        ppo={"minibatches": 8},
        overlap={"intra": False, "inter": False, "weave": [decode_micro_batches(plan), "auto"]},
        runtime={"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 8192, **runtime},
    )


TOGETHER = [plan for plan in PLANS if plan.name != "7b-searched"]


@pytest.mark.parametrize("plan", TOGETHER, ids=lambda plan: plan.name)
def test_published_plans_load_as_configurations(plan: PublishedPlan) -> None:
    """All but Table 4, whose actor decodes on other ranks than it is trained on."""
    loaded = TrainConfig.model_validate(published_tree(plan))
    assert check_layouts(loaded, {name: read_hf_config(role) for name, role in named_roles(loaded).items()}) == []
    layouts = layout_tree(loaded)
    for role, call in (("actor", "ActorGen"), ("actor, trained", "ActorTrain"), ("critic, trained", "CriticTrain")):
        found = plan.call(call)
        assert layouts[role][1:] == [found.tp, found.pp, found.dp]


@pytest.mark.parametrize("plan", TOGETHER, ids=lambda plan: plan.name)
def test_generation_of_published_plans_is_priced(plan: PublishedPlan) -> None:
    """Nothing is fitted but the host's time for a layer; each of a step's micro-batches costs it."""
    nodes, network = len(plan.call("ActorGen").nodes), Between(19e-6, 25e9, 1, published("a test"))
    cluster = Cluster(nodes, 8, GPUS["h100"], INSIDE["h100"], network)
    loaded = TrainConfig.model_validate(published_tree(plan))
    told = {True: (plan.call("ActorGen").seconds, plan.wall_s), False: (plan.no_graph_s, plan.no_graph_wall_s)}
    for captured, (seconds, wall_s) in told.items():
        rows = list(Prices(loaded, cluster, Decoding(1024, [1024] * plan.batch, captured)).rows())
        generation = sum(row.seconds for row in rows if row.phase in ("prompts", "decode"))
        assert generation == pytest.approx(seconds, rel=0.09)
        assert 0.8 < total_s(rows) / wall_s < 1.0


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


PLAN = ["plan", "c.yaml", "--cluster", "cluster.yaml", "--top", "1"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    return capsys.readouterr().err


def test_the_command_writes_a_plan_that_runs_can_take(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--lognormal", "60,0.7", "--out", "out", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "gap 0" in out and "margin of 10%" in out and "efficiencies: published" in out and "the next plan" in out
    assert "with its own placement" in out
    record = json.loads((described / "out/plan.json").read_text())
    planned = load_train(described / "out/plan.yaml", [])
    held = [memory.total for memory in rank_memory(train_holdings(planned, on_cpu=False)).values()]
    assert max(held) / 1e9 == pytest.approx(record["plans"][0]["fullest_gb"])
    first = record["plans"][0]
    parts = ("decode_s", "scoring_s", "update_s", "critic_s", "weights_s", "idle_s")
    assert sum(first[part] for part in parts) == pytest.approx(first["step_s"])
    assert read_costs(described / "out/costs.json", role_placements(planned)).prefill["critic"]
    assert {path.name for path in (described / "out").iterdir()} == {
        "plan.yaml", "plan.json", "costs.json", "plan.png", "pareto.png",
    }  # fmt: skip
    kinds = {source.partition(":")[0] for source in record["constants"].values()}
    assert kinds <= {"measured", "published", "given", "assumed"}
    assert main(["plan", "--again", "out/plan.json"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == out.splitlines()[0]


@pytest.mark.parametrize("kind", ["exact", pytest.param("mcmc", marks=pytest.mark.long)])
def test_equal_input_gives_equal_bytes(kind: str, described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("one", "two"):
        assert main([*PLAN, "--search", kind, "--out", out, "--seed", "3"]) == 0
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
        ("gpu: h100\n", ["--lognormal", "5000,1.0"], "rollout.max_response_tokens is 128; raise"),
        ("gpu: {memory_gb: 0.1, tflops: 9, gb_per_s: 3}\ngpus_per_node: 1\n", ["--seconds", "1"], "GB are missing"),
        ("gpu: h100\n", ["--again", "plan.json"], "leave one of them out"),
        ("gpu: h100\n", ["--costs", "none.json"], "none.json"),
        ("gpu: h100\n", ["--calibrate", "nowhere"], "there is no nowhere/config.yaml"),
        ("gpu: h100\n", ["rollout.batch_size=x"], "rollout.batch_size"),
    ],
)
def test_wrong_input_is_refused(
    cluster: str, arguments: list[str], words: str, described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (described / "cluster.yaml").write_text(cluster)
    assert words in refused(capsys, *PLAN, *arguments)


def test_a_plan_of_another_version_is_refused(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (described / "plan.json").write_text('{"version": 99}')
    assert "version 99, but this `oppo plan` reads version 2" in refused(capsys, "plan", "--again", "plan.json")
    (described / "plan.json").write_text("[]")
    assert "version None" in refused(capsys, "plan", "--again", "plan.json")
    (described / "plan.json").write_text('{"version": 2, "plans": []}')
    assert "is not as `oppo plan` wrote it; search again" in refused(capsys, "plan", "--again", "plan.json")
    assert "is no file" in refused(capsys, "plan", "--again", "nothing.json")
    assert "needs a configuration" in refused(capsys, "plan")
    assert "needs --cluster" in refused(capsys, "plan", "c.yaml")


@pytest.mark.long
def test_measured_costs_scale_the_laws(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines twice as slow as the laws make every call twice as slow, and the best step nearly so."""
    place = ["placement={mode: colocated, actor: {tp: 2, dp: 2}}"]
    assert prices(["c.yaml", "--cluster", "cluster.yaml", "--costs", "laws.json", *place]) == 0
    twice = {key: _doubled(value) for key, value in json.loads((described / "laws.json").read_text()).items()}
    (described / "twice.json").write_text(json.dumps(twice))
    found = []
    for costs in ("laws.json", "twice.json"):
        assert main([*PLAN, *place, "--costs", costs, "--out", costs.partition(".")[0]]) == 0
        record = json.loads((described / costs.partition(".")[0] / "plan.json").read_text())
        assert "measured" in record["constants"]["factors on phases"]
        found.append(record["plans"][0]["step_s"])
    assert main([*PLAN, "--out", "none"]) == 0
    plain = json.loads((described / "none/plan.json").read_text())["plans"][0]["step_s"]
    assert found[0] == pytest.approx(plain, rel=1e-6) and found[1] == pytest.approx(2 * plain, rel=0.05)


def _doubled(value: Any) -> Any:
    return [_doubled(each) for each in value] if isinstance(value, list) else (
        {key: _doubled(each) for key, each in value.items()} if isinstance(value, dict) else 2 * value
    )  # fmt: skip


@pytest.mark.long
def test_table_2_is_refused_on_80_gb(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan is found where caches are bounded; the published one lacks memory, and it is told why."""
    plan = PLANS[0]
    (described / "c.yaml").write_text(yaml.safe_dump(published_tree(plan, kv_cache_mb=4096)))
    (described / "cluster.yaml").write_text("nodes: 16\ngpu: h100\nbetween: {gb_per_s: 50}\n")
    given = load_config(TrainConfig, described / "c.yaml")
    needed = max(memory.total for memory in rank_memory(train_holdings(given, on_cpu=False)).values())
    assert needed > 80e9
    assert main([*PLAN, "--seconds", "6"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"refused, for it needs {needed / 1e9:.1f} GB on rank" in out and "GB are missing" in out


@pytest.mark.parametrize("mode", ["colocated", pytest.param("disaggregated", marks=pytest.mark.long)])
def test_a_run_twice_as_slow_as_the_laws_doubles_them(mode: str) -> None:
    given = config(placement={"mode": mode, "actor": {"dp": 2}})
    length, count = 300, 32
    laws = {(p.role, p.phase): p.seconds for p in Prices(given, CLUSTER, Decoding(256, [length] * count)).rows()}
    scoring = 2 * sum(seconds for (_, phase), seconds in laws.items() if phase == "score")
    line = {
        "step_s": 1.0, "trained_len_mean": float(length), "score_busy_s": scoring,
        "train_s": 2 * laws["actor", "update"], "critic_update_s": 2 * laws["critic", "update"],
        "decode_s": 2 * (laws["actor", "prompts"] + laws["actor", "decode"]) + scoring * (mode == "colocated"),
    }  # fmt: skip
    scales = scales_of_run(given, [{**line, "step_s": 9.0, "train_s": 99.0}, line, line], CLUSTER, 256, "a run")
    assert scales.serving == pytest.approx(dict.fromkeys(("actor", "reference", "critic", "reward"), 2.0))
    assert scales.update == pytest.approx({"actor": 2.0, "critic": 2.0}) and "2 steps" in scales.source
    task = Task(given, CLUSTER, [length] * count)
    plain, scaled = (make_plan(each, "exact", 1, 1, never, never) for each in (task, replace(task, scales=scales)))
    assert scaled.found.plans[0].step_ns == pytest.approx(2 * plain.found.plans[0].step_ns, rel=0.01)
    with pytest.raises(ConfigError, match="no finished step"):
        scales_of_run(given, [], CLUSTER, 256, "a run")


def test_what_lies_beyond_the_fits_is_said() -> None:
    told = beyond_fits(Task(config(runtime={"device": "cpu", "micro_batch_tokens": 65536}), CLUSTER, LENGTHS), config())
    assert told == []
    large = config(runtime={"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 65536})
    assert "65536 tokens" in beyond_fits(Task(large, CLUSTER, LENGTHS), large)[0]
    by_numbers = replace(CLUSTER, gpu=replace(CLUSTER.gpu, sources={"efficiencies": assumed("as an h100's")}))
    assert "no layers of such a processor" in beyond_fits(Task(config(), by_numbers, LENGTHS), config())[0]
    few = config(runtime={"device": "cpu", "dtype": "bfloat16", "kv_cache_mb": 32})
    assert "the others wait" in beyond_fits(Task(few, CLUSTER, LENGTHS), few)[0]


def test_what_no_price_has_is_said(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards of a service; and lengths that are no numbers are refused."""
    rewards = ["reward=null", "rewards=[{kind: http, url: http://127.0.0.1:9}]"]
    assert main([*PLAN, *rewards, "overlap.intra=false", "--out", "out"]) == 0
    assert "rewards of kind http take no time here" in " ".join(capsys.readouterr().out.split())
    (described / "costs.json").write_text('{"prefill": {"judge": [0.1, 0.2]}}')
    assert "prefill of judge, which the configuration does not have" in refused(capsys, *PLAN, "--costs", "costs.json")
    with pytest.raises(SystemExit):
        main([*PLAN, "--lognormal", "nan,1"])
    assert "'nan,1' must be two finite numbers" in capsys.readouterr().err
