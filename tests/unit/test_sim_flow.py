"""`oppo plan flow`: a user's calls are placed as brute force places them, and what runs cover becomes a configuration."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import oppo_megatron.api as oppo
from benchmarks.published.dataflow import Call as Played
from benchmarks.published.dataflow import check, makespan_ns, play
from benchmarks.published.flows import compare
from benchmarks.published.prediction import order_is_right
from benchmarks.published.tables import PLANS
from oppo_megatron.cli.main import main
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.memory import Memory
from oppo_megatron.layout.placements import RolePlacement, named_roles, role_placements
from oppo_megatron.layout.role_memory import both_memory
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, published
from oppo_megatron.sim.flow.dataflow import Dataflow
from oppo_megatron.sim.flow.placing import FlowPlan, FlowSearch
from oppo_megatron.sim.flow.prices import FlowPrices
from oppo_megatron.sim.pricing.prices import Weights, reallocation_s
from tests.support.rows import write_rows
from tests.support.tokenizers import save_byte_level

SHAPE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
ONE_RANK = SHAPE | {"num_hidden_layers": 1, "num_key_value_heads": 1}
"""With a batch of one, nothing divides."""
NETWORK = Between(19e-6, 50e9, 8, published("a test"))
TWO = Cluster(1, 2, GPUS["h100"], INSIDE["h100"])


def call(name: str, model: str, kind: str, inputs: str, outputs: str = "", **settings: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "kind": kind, "inputs": inputs.split(), "outputs": outputs.split(), **settings}


ROLLOUT = call("rollout", "actor", "generate", "prompts", "responses")
SCORE = call("score", "reward", "inference", "prompts responses", "scores")
LOGPROBS = call("logprobs", "reference", "inference", "responses", "reference")
VALUES = call("values", "critic", "inference", "responses", "values")
PPO = [
    ROLLOUT, SCORE, LOGPROBS, VALUES,
    call("learn", "critic", "train", "responses scores reference values", minibatches=2),
    call("improve", "actor", "train", "responses scores reference values", minibatches=2),
]  # fmt: skip
UPDATE = call("improve", "actor", "train", "responses scores reference", minibatches=2)
SCALAR = ("critic", "reward")


def tree(calls: list[dict[str, Any]], shape: dict[str, Any] = SHAPE, **settings: Any) -> dict[str, Any]:
    names = dict.fromkeys(each["model"] for each in calls)
    models = {name: {"init": shape, "scalar": name in SCALAR} for name in names}
    return {"batch": 8, "prompt_tokens": 64, "response_tokens": 64, "models": models, "calls": calls, **settings}


def prices_of(given: dict[str, Any], cluster: Cluster, memory_bytes: float = 80e9) -> FlowPrices:
    flow = Dataflow.model_validate(given)
    assert flow.problems() == []
    smaller = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=memory_bytes))
    return FlowPrices(flow, smaller, lambda config: [config.rollout.max_response_tokens] * config.rollout.batch_size, margin=0.0)


def found(prices: FlowPrices, tolerance: float = 0.0) -> FlowPlan:
    plan = FlowSearch(prices, tolerance).find()
    assert plan is not None
    return plan


Layout = tuple[Any, Any, int, tuple[Memory, ...]]


def every_step(prices: FlowPrices) -> Iterator[tuple[int, float]]:
    """Yield nanoseconds and the fullest rank's bytes of every placement, by the player of the published plans."""
    flow, tables = prices.flow, {each.name: prices.table(each) for each in prices.flow.calls}
    choices = []
    for each in flow.calls:
        table, role = tables[each.name]
        sizes = {block.size: list(table.phases(role, block.size, update=each.kind == "train")) for block in prices.blocks()}
        choices.append([(block, layout) for block in prices.blocks() for layout in sizes[block.size]])
    moves: dict[Any, int] = {}
    for chosen in product(*choices):
        placed = dict(zip((each.name for each in flow.calls), chosen, strict=True))
        calls, groups = list[Played](), dict[Any, dict[str, tuple[Memory, ...]]]()
        for each in flow.calls:
            block, (sizes, _, time_ns, memory) = placed[each.name]
            calls.append(Played(each.name, frozenset(block.ranks), time_ns, tuple(flow.parents[each.name])))
            groups.setdefault((each.model, block, sizes), {})["train" if each.kind == "train" else "serve"] = memory
        for each in flow.calls:
            others = {(placed[user.name][0], placed[user.name][1][0]): user.name for user in flow.calls_of(each.model)}
            here = (placed[each.name][0], placed[each.name][1][0])
            for there in others if each.kind == "train" else ():
                if there == here:
                    continue
                if (each.model, here, there) not in moves:
                    source, target = (
                        Weights(RolePlacement(block.ranks, *sizes[:3]), sizes.vpp) for block, sizes in (here, there)
                    )
                    scalar = flow.models[each.model].scalar
                    seconds = reallocation_s(prices.cluster, SHAPE, source, target, scalar=scalar)
                    moves[each.model, here, there] = round(seconds * 1e9)
                devices = frozenset({*here[0].ranks, *there[0].ranks})
                calls.append(Played(f"move {each.model} {others[there]}", devices, moves[each.model, here, there], (each.name,)))
        ranks: dict[int, list[Memory]] = {}
        for (_, block, _), uses in groups.items():
            stages = next(iter(uses.values()))
            if len(uses) == 2:
                stages = tuple(both_memory(*pair, one_model=False) for pair in zip(uses["serve"], uses["train"], strict=True))
            for place, rank in enumerate(block.ranks):
                ranks.setdefault(rank, []).append(stages[place * len(stages) // block.size])
        spans = play(calls)
        yield makespan_ns(spans), max(Memory.of_rank(each).total for each in ranks.values())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_search_finds_the_step_of_brute_force(share: float) -> None:
    """Over all blocks and layouts; also if memory admits few of them."""
    given = tree([ROLLOUT, SCORE, {**UPDATE, "inputs": ["responses", "scores"]}])
    steps = list(every_step(prices_of(given, TWO)))
    least, most = (pick(held for _, held in steps) for pick in (min, max))
    memory = int(least + share * (most - least)) + 1
    best = min(step_ns for step_ns, held in steps if held <= memory)
    plan = found(prices_of(given, TWO, memory))
    assert plan.step_ns == plan.bound_ns == best and len(steps) > 300
    assert plan.fullest_bytes <= memory
    loose = found(prices_of(given, TWO, memory), 0.05)
    assert best <= loose.step_ns and 0.95 * loose.step_ns <= loose.bound_ns + 1 and loose.bound_ns <= best


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.4, 0.2])
def test_the_search_finds_the_step_of_brute_force_with_a_critic(share: float) -> None:
    given = tree([ROLLOUT, VALUES, {**PPO[4], "inputs": ["values"]}, {**UPDATE, "inputs": ["responses", "values"]}], ONE_LAYER)
    steps = list(every_step(prices_of(given, TWO)))
    least, most = (pick(held for _, held in steps) for pick in (min, max))
    memory = int(least + share * (most - least)) + 1
    plan = found(prices_of(given, TWO, memory))
    assert plan.step_ns == plan.bound_ns == min(step_ns for step_ns, held in steps if held <= memory)


ONE_LAYER = SHAPE | {"num_hidden_layers": 1}


def test_a_chain_takes_the_sum_and_calls_on_ranks_of_their_own_the_longest() -> None:
    single = {"shape": ONE_RANK, "batch": 1}
    chain = [call(f"c{i}", f"m{i}", "inference", f"x{i}", f"x{i + 1}", response_tokens=64 * (i + 1)) for i in range(3)]
    plan = found(prices_of(tree(chain, **single, data=["x0"]), TWO))
    assert plan.step_ns == sum(event.end_ns - event.start_ns for event in plan.events)
    apart = [each | {"inputs": ["x0"]} for each in chain[:2]]
    plan = found(prices_of(tree(apart, **single, data=["x0"]), TWO))
    assert plan.step_ns == max(event.end_ns - event.start_ns for event in plan.events)
    assert {event.start_ns for event in plan.events} == {0} and len({tuple(event.ranks) for event in plan.events}) == 2


def test_a_plan_is_played_as_by_the_algorithm_of_the_paper() -> None:
    """Its times equal the published plans' player's; no rank is used twice at once; weights move after training."""
    prices = prices_of(tree(PPO), Cluster(2, 2, GPUS["h100"], INSIDE["h100"], NETWORK))
    ends = iter([False] * 400)
    plan = FlowSearch(prices, is_over=lambda: next(ends, True)).find()
    assert plan is not None and plan.bound_ns <= plan.step_ns
    parents = prices.flow.parents
    order = {each.name: place for place, each in enumerate(prices.flow.calls)}
    trained = {name: each for name in ("rollout", "values") for each in ("improve", "learn") if (name, each) in TRAINED}
    calls = [
        Played(
            event.name, frozenset(map(int, event.ranks)), event.end_ns - event.start_ns,
            tuple(parents[event.name]) if event.choice else (trained[event.name.removeprefix("weights for ")],),
        )
        for event in sorted(plan.events, key=lambda event: order.get(event.name, len(order)))
    ]  # fmt: skip
    spans = play(calls)
    check(calls, spans)
    assert {name: (span.start_ns, span.end_ns) for name, span in spans.items()} == {
        event.name: (event.start_ns, event.end_ns) for event in plan.events
    }


@pytest.mark.long
def test_published_plans_are_in_order_at_our_prices_to_which_nothing_was_fitted() -> None:
    steps = [list(compare(plan, 1))[-1] for plan in PLANS]
    assert order_is_right({step["plan"]: step["priced"] for step in steps})
    assert all(-25 < step["error_percent"] < 0 for step in steps)


TRAINED = {("rollout", "improve"), ("values", "learn")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_byte_level(tmp_path / "tok", ["1 + 2 = 3"])
    write_rows(tmp_path / "rows.jsonl", *({"prompt": f"{i} + {i} = "} for i in range(16)))
    (tmp_path / "cluster.yaml").write_text("nodes: 1\ngpus_per_node: 2\ngpu: h100\n")
    return tmp_path


RUN = {"tokenizer": {"path": "tok"}, "data": {"path": "rows.jsonl"}, "steps": 1}
PLAN = ["plan", "flow", "flow.yaml", "--cluster", "cluster.yaml", "--out", "out", "--seconds", "2"]
GROUP = [{**ROLLOUT, "samples": 4}, SCORE, LOGPROBS, UPDATE]
GREEDY = [
    ROLLOUT, call("again", "actor", "generate", "prompts", "greedy", greedy=True), SCORE,
    call("score again", "reward", "inference", "greedy", "baselines"), LOGPROBS,
    {**UPDATE, "inputs": ["responses", "scores", "baselines", "reference"]},
]  # fmt: skip
COVERED = {
    "ppo": PPO, "grpo": GROUP, "remax": GREEDY,
    "reinforce_pp": [ROLLOUT, SCORE, {**UPDATE, "inputs": ["responses", "scores"]}],
}  # fmt: skip


@pytest.mark.parametrize(
    "preset", [each if each in ("ppo", "grpo") else pytest.param(each, marks=pytest.mark.long) for each in COVERED]
)
def test_what_the_roles_cover_becomes_a_valid_configuration(
    preset: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its models and calls are called."""
    text = yaml.safe_dump(tree(COVERED[preset], run=RUN))
    for name in ("actor", "rollout", "responses"):
        text = text.replace(name, f"my {name}")
    (folder / "flow.yaml").write_text(text)
    assert main(PLAN) == 0
    out = capsys.readouterr().out
    assert f"a run of preset {preset}" in out and "s per step" in out and "efficiencies: published" in out
    assert main(["validate", "out/plan.yaml", "--elsewhere"]) == 0
    config = load_config(TrainConfig, "out/plan.yaml")
    assert config.algorithm.preset == preset and not config.overlap.intra and not config.overlap.inter
    expected = {"ppo": {"actor", "reward", "reference", "critic"}, "reinforce_pp": {"actor", "reward"}}
    assert set(named_roles(config)) == expected.get(preset, {"actor", "reward", "reference"})
    assert (config.rollout.group_size, config.ppo.minibatches) == (4 if preset == "grpo" else 1, 2)
    record = json.loads((folder / "out/flow.json").read_text())
    placement = yaml.safe_load((folder / "out/placement.yaml").read_text())["calls"]
    assert len(placement) == len(COVERED[preset])
    for each in placement.values():
        first, _, last = each["ranks"].partition("-")
        assert int(last or first) - int(first) + 1 == math.prod(each[size] for size in ("tp", "pp", "dp", "cp"))
    assert max(event["start_s"] + event["seconds"] for event in record["events"]) == pytest.approx(record["step_s"])
    assert max(rank for placed in role_placements(config).values() for rank in placed.ranks) <= 1


EXAMPLES = ["examples/planner/ppo-flow.yaml", "examples/planner/critique-flow.yaml", "docs/planner.md"]


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_are_dataflows(path: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        text = text.partition("## A dataflow of your own\n```yaml\n")[2].partition("```")[0]
    flow = Dataflow.model_validate(yaml.safe_load(text))
    assert flow.problems() == []
    expected = {"ppo-flow": "ppo", "planner": "grpo", "critique-flow": "call `critique` is none"}[Path(path).stem]
    found = flow.roles()
    assert expected in (found if isinstance(found, str) else found[0])


UNCOVERED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a judge that writes": (
        [ROLLOUT, call("critique", "judge", "generate", "responses", "critiques"), SCORE,
         UPDATE | {"inputs": ["critiques", "scores"]}],
        "call `critique` is none of a run's"),
    "a second reward model": (
        [ROLLOUT, SCORE, SCORE | {"name": "more", "model": "other", "outputs": ["further"]},
         UPDATE | {"inputs": ["responses", "scores", "further"]}],
        "call `more` is none of a run's"),
    "other sizes": ([ROLLOUT, SCORE | {"response_tokens": 8}, UPDATE | {"inputs": ["responses", "scores"]}],
        "call `score` is none of a run's"),
    "a critic that is not read": (
        [ROLLOUT, SCORE, call("learn", "critic", "train", "responses scores", minibatches=2),
         UPDATE | {"inputs": ["responses", "scores"]}],
        "nothing reads the values of the critic"),
    "no reward model": ([ROLLOUT, UPDATE | {"inputs": ["responses"]}], "give run.rewards"),
    "given rows": ([call("fit", "actor", "train", "prompts")], "call `fit` is none of a run's"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCOVERED)
def test_the_reason_is_given_if_no_roles_cover_a_dataflow(case: str) -> None:
    calls, reason = UNCOVERED[case]
    given = tree(calls)
    given["models"].get("other", {})["scalar"] = True
    flow = Dataflow.model_validate({key: value for key, value in given.items()})
    assert flow.problems() == []
    assert reason in str(flow.roles())


def test_a_dataflow_of_python_objects_and_rewards_by_rules(folder: Path) -> None:
    rewards = [{"kind": "verifier", "name": "gsm8k"}]
    flow = Dataflow.model_validate(tree([ROLLOUT, UPDATE | {"inputs": ["responses"]}], run=RUN | {"rewards": rewards}))
    record = oppo.plan_flow(flow, "cluster.yaml", seconds=1, lognormal=(20, 0.5), out="out")
    assert {event["name"] for event in record["events"]} >= {"rollout", "improve"}
    full = oppo.plan_flow(flow, "cluster.yaml", seconds=1)
    assert record["step_s"] < full["step_s"], "shorter responses take less"
    assert load_config(TrainConfig, "out/plan.yaml").rewards[0].name == "gsm8k"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"calls": [ROLLOUT | {"model": "acter"}]}, "model `acter` is not known; the models are actor"),
    "input": ({"calls": [ROLLOUT | {"inputs": ["promts"]}]}, "input `promts` is not known; there are prompts, responses"),
    "kind": ({"calls": [ROLLOUT | {"kind": "generat"}]}, "did you mean `generate`?"),
    "no prompts": ({"calls": [ROLLOUT | {"inputs": []}]}, "has no prompts; name some: columns or outputs"),
    "call twice": ({"calls": [ROLLOUT, ROLLOUT | {"outputs": ["others"]}]}, "call `rollout` is given twice"),
    "output twice": ({"calls": [ROLLOUT, ROLLOUT | {"name": "b"}]}, "output `responses` is given twice"),
    "circle": ({"calls": [ROLLOUT | {"inputs": ["a"]}, call("b", "actor", "inference", "responses", "a")]},
        "calls wait for each other in a circle: "),
    "weights": ({"calls": [call("t", "actor", "train", "prompts", "loss")]}, "makes weights only; remove its outputs"),
    "nothing": ({"calls": [ROLLOUT | {"outputs": []}]}, "makes nothing; name its outputs"),
    "trained twice": ({"calls": [call(name, "actor", "train", "prompts") for name in "ab"]}, "several calls train it"),
    "minibatches": ({"calls": [call("t", "actor", "train", "prompts", minibatches=3)]}, "minibatches 3 does not divide"),
    "no model": ({"models": {"actor": {}}}, "neither of checkpoint and init"),
    "no file": ({"models": {"actor": "absent.json"}}, "absent.json"),
    "scalar": ({"models": {"actor": {"init": SHAPE, "scalar": True}}}, "has a scalar head; name a language model"),
    "context": ({"prompt_tokens": 9000}, "max_position_embeddings"),
    "derived": ({"run": {"actor": {}}}, "run has actor, but these settings follow from the dataflow"),
    "derived key": ({"run": {"ppo": {"minibatches": 3}}}, "run has ppo.minibatches, but these settings follow"),
    "a move's name": ({"calls": [ROLLOUT | {"name": "weights for me"}]}, "that begins with `weights for ` belongs to a move"),
    "samples": ({"calls": [ROLLOUT, SCORE | {"model": "actor", "samples": 2}]}, "has samples, which only a generate call may"),
    "run": ({"run": {"runtime": {"micro_batch": 3}}}, "run: `runtime.micro_batch` is not a setting"),
    "batch": ({"batch": 10**9}, "`batch` is 1000000000, but must be less than or equal to 1048576"),
    "key": ({"batches": 3}, "did you mean `batch`?"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_named_with_a_remedy(mistake: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, message = WRONG[mistake]
    (folder / "flow.yaml").write_text(yaml.safe_dump(tree([ROLLOUT]) | settings))
    assert main(PLAN) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


PRESET = [ROLLOUT, SCORE, UPDATE | {"inputs": ["responses", "scores"]}]


def test_settings_of_a_run_are_checked_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, given in ("data", "rows.jsonl"), ("ppo", None):
        (folder / "flow.yaml").write_text(yaml.safe_dump(tree(PRESET, run=RUN | {key: given})))
        assert main(PLAN) == 2
        assert f"run: `{key}` is {given!r}, but must be a section of keys" in capsys.readouterr().err


def test_settings_of_the_algorithm_keep_the_preset_and_another_plan_is_removed(folder: Path) -> None:
    algorithm = {"reduction": "sequence_mean"}
    (folder / "flow.yaml").write_text(
        yaml.safe_dump(tree([ROLLOUT | {"samples": 4}, *PRESET[1:]], run=RUN | {"algorithm": algorithm}))
    )
    assert main(PLAN) == 0
    planned = load_config(TrainConfig, "out/plan.yaml").algorithm
    assert (planned.preset, planned.reduction) == ("grpo", "sequence_mean")
    (folder / "flow.yaml").write_text(yaml.safe_dump(tree([ROLLOUT])))
    assert main(PLAN) == 0 and not (folder / "out/plan.yaml").exists()


def test_a_model_needs_the_context_of_its_own_calls_only() -> None:
    short = SHAPE | {"max_position_embeddings": 128}
    given = tree([ROLLOUT, SCORE | {"response_tokens": 512}])
    given["models"]["actor"]["init"] = short
    assert Dataflow.model_validate(given).problems() == []
    given["models"]["reward"]["init"] = short
    assert "models.reward" in " ".join(Dataflow.model_validate(given).problems())


def test_a_search_without_time_is_no_lack_of_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "flow.yaml").write_text(yaml.safe_dump(tree(PRESET)))
    clock = SimpleNamespace(monotonic=map(float, itertools.count(step=10)).__next__)
    monkeypatch.setattr("oppo_megatron.cli.plan.flow.time", clock)
    assert main([*PLAN[:-1], "1"]) == 2
    assert "raise --seconds from 1" in capsys.readouterr().err


def test_too_little_memory_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "flow.yaml").write_text(yaml.safe_dump(tree([ROLLOUT])))
    (folder / "cluster.yaml").write_text(
        "gpus_per_node: 2\ngpu: {memory_gb: 0.001, tflops: 300, gb_per_s: 2000}\ninside: {gb_per_s: 300}\n"
    )
    assert main(PLAN) == 2
    assert "no placement of all calls was found" in capsys.readouterr().err
