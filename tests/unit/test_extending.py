"""The user's own functions of docs/extending.md run as they stand there; results that cannot be used are refused by name."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError
from torch import Tensor

import oppo_megatron as oppo
from oppo_megatron.algorithms.advantages import NOTHING_SEEN
from oppo_megatron.algorithms.custom import AdvantageInputs, CustomAdvantage, CustomLoss, LossInputs
from oppo_megatron.algorithms.experience import ScoredBatch, build_experience
from oppo_megatron.algorithms.losses import ActorTargets, Surrogate, policy_loss, row_weights
from oppo_megatron.config.algorithm import AlgorithmConfig, Reduction
from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.errors import CheckpointError, ConfigError, PluginError
from oppo_megatron.layout.placements import RolePlacement, role_placements
from oppo_megatron.plugins import Plugin
from oppo_megatron.records import StepSignals
from oppo_megatron.schedule.checking.checker import check
from oppo_megatron.schedule.plan import new_planner, round_generator
from oppo_megatron.schedule.preview import first_step, preview
from oppo_megatron.schedule.rounds import Growth, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import generator_of, intra
from tests.support.ppo import Workspace
from tests.support.schedules import ample_budgets
from tests.unit.test_schedule_generators import cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
CODE = [text for language, text in BLOCKS if language == "python"]
SETTINGS = [text for language, text in BLOCKS if language == "yaml" and not text.startswith("# my_preset.yaml")]
PRESET = next(text for language, text in BLOCKS if language == "yaml" and text not in SETTINGS)
FROM_PYTHON = next(text for text in CODE if text.startswith("import oppo_megatron as oppo"))


def merged(into: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    both = {key for key, value in tree.items() if isinstance(value, dict) and isinstance(into.get(key), dict)}
    return into | tree | {key: merged(into[key], tree[key]) for key in both}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("user")
    (root / "my_functions.py").write_text("\n\n".join(text for text in CODE if text is not FROM_PYTHON))
    overlap = {"intra": True, "inter": True, "chunk": 8, "delta": {"window": 1}}
    config = Workspace.create(root).config("a", overlap=overlap, critic=None, **{"rollout.group_size": 2})
    config |= {"ppo": {"minibatches": 3}}
    del config["critic"], config["reward"]
    for text in SETTINGS:
        config = merged(config, yaml.safe_load(text))
    (root / "ppo.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield root


def test_each_example_has_at_most_20_lines() -> None:
    assert len(CODE) >= 6 and len(SETTINGS) >= 5
    for text in (*CODE, *SETTINGS, PRESET):
        assert len([line for line in text.splitlines() if line.strip()]) <= 20


def test_every_example_trains_in_this_process_and_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(FROM_PYTHON, str(PAGE), "exec"), names)
    result = names["result"]
    assert result.finished and len(result.metrics) == 3 and (result.weights / "actor").is_dir()
    assert f"{result.metrics[-1]['reward_mean']}" in capsys.readouterr().out
    assert len(names["answers"]) == 1 and names["answers"][0]["prompt"] == "1 + 2 = "
    assert all(row["reward_mean"] < 0 for row in result.metrics), "brevity is the reward"
    assert "clip_fraction" not in result.metrics[0] and result.metrics[0]["ratio_max"] > 0
    moved = [row["delta_next"] if "delta_next" in row else row["delta"] for row in result.metrics]
    assert moved != [moved[0]] * len(moved) or moved[0] in (0, 4), "delta follows the rule"
    module = next(module for name, module in sys.modules.items() if name.startswith("oppo_plugin_my_functions"))
    assert {"median_baseline", "soft_clip", "follow_ess", "critic_first", "brevity"} <= vars(module).keys()
    again = oppo.train(oppo.load_config("ppo.yaml"), ["steps=3", f"run_dir={folder / 'again'}"])
    given = oppo.generate(again.run_dir, "1 + 2 = ", max_tokens=8, stop="0", output=str(folder / "given.jsonl"))
    assert [row["prompt"] for row in given] == ["1 + 2 = "] and (folder / "given.jsonl").is_file()
    assert [row["actor_loss"] for row in again.metrics] == [row["actor_loss"] for row in result.metrics]


def test_the_preset_of_the_page_is_one_that_a_configuration_can_name(folder: Path) -> None:
    (folder / "my_preset.yaml").write_text(PRESET)
    rollout = {"batch_size": 16, "max_response_tokens": 8}
    config = Workspace(folder).config("p", algorithm={"preset": "my_preset.yaml"}, rollout=rollout)
    del config["critic"], config["ppo"]
    made: Any = oppo.load_config(config)
    assert (made.algorithm.scale, made.ppo.clip_high, made.rollout.group_size) == ("none", 0.28, 16)


API_FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "type": (lambda: oppo.generate("x", ["a"], samples="many"), "samples is 'many': invalid literal"),
    "text": (lambda: oppo.generate("x", [{"role": "user"}]), r"prompts is \[\{'role': 'user'\}\]: type dict is none of text"),
    "flag": (lambda: oppo.generate("x", ["a"], greedy="no"), "greedy is 'no': choose from True, False"),
    "choice": (lambda: oppo.evaluate("x", "y", verifier="maths"), "verifier is 'maths': choose from arithmetic, "),
    "words": (lambda: oppo.generate("x", ["a"], samples=2, greedy=True), "drop samples, or give a temperature above 0"),
    "kind": (lambda: oppo.load_config({}, kind="pop"), "kind is 'pop'; choose from train, sft, rm, dpo"),
    "other": (lambda: oppo.load_config({"model": {}, "data": {}, "tokenizer": {}, "run_dir": Path("x")}),
        "^source .*; give kind='sft'"),
    "source": (lambda: oppo.load_config(None), "source is None: type NoneType is none of text, path"),  # type: ignore[arg-type]
    "both": (lambda: oppo.plan("ppo.yaml", "c.yaml", trace="t.csv", lognormal=(6, 1.5)), "trace and lognormal exclude"),
    "plan": (lambda: oppo.plan("ppo.yaml", "c.yaml", "steps", lognormal=(6, 1.5)), "override `steps` is not of the form"),
    "planned settings": (lambda: oppo.plan({"stepz": 3}, "c.yaml"), "`stepz` is not a setting; did you mean `steps`"),
}  # fmt: skip


@pytest.mark.parametrize("fault", API_FAULTS)
def test_a_wrong_argument_is_named_as_pythons_caller_gave_it(folder: Path, fault: str) -> None:
    (folder / "c.yaml").write_text("gpus_per_node: 2\ngpu: a100-80\n")
    call, says = API_FAULTS[fault]
    with pytest.raises(ConfigError, match=says):
        call()
    with pytest.raises(TypeError, match="no argument is named stopp; there are .*, stop, "):
        oppo.generate("x", ["a"], stopp=["0"])


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, oppo_megatron as o; dir(o); print(*{'torch', 'pydantic', 'numpy', 'megatron'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
    assert all(getattr(oppo, name) is not None for name in oppo.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        _ = oppo.trane


LENGTHS = [3, 1, 4, 2]


def columns(seed: int = 0) -> dict[str, Tensor]:
    dice, count = torch.Generator().manual_seed(seed), sum(LENGTHS)
    rows = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    return {
        "behaviour_logp": torch.randn(count, generator=dice), "tokens": torch.randint(9, (count,), generator=dice),
        "versions": torch.zeros(count, dtype=torch.int64), "score": torch.randn(4, generator=dice)[rows],
        "truncated": rows == 2, "group": rows // 2,
    }  # fmt: skip


def loss_of(function: Callable[[LossInputs], Any] | None, reduction: Reduction = "token_mean", **choices: Any) -> list[Tensor]:
    """The loss of a minibatch in one micro-batch (None: the built-in one of `choices`), and its gradient by the log-probs."""
    dice, lengths_R, count = torch.Generator().manual_seed(1), torch.tensor(LENGTHS), sum(LENGTHS)
    logp_T = torch.randn(count, generator=dice, requires_grad=True)
    old_T, advantages_R = torch.randn(count, generator=dice), torch.randn(4, generator=dice)
    targets = ActorTargets(
        old_T, advantages_R.repeat_interleave(lengths_R), lengths_R=lengths_R, columns=columns(),
        share_T=torch.tensor(row_weights(LENGTHS, 2, reduction, 5)).repeat_interleave(lengths_R),
        counts={"batch_size": 4, "group_size": 2},
    )  # fmt: skip
    if function is not None:
        choices = {"custom": CustomLoss(Plugin(function, "algorithm.loss mine:f"), mean=reduction == "sequence_mean")}
    loss, _ = policy_loss(logp_T, targets, Surrogate(0.2, **choices), count)
    return [loss, *torch.autograd.grad(loss, logp_T)]


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


AS_BUILT_IN: dict[str, tuple[Callable[[LossInputs], Tensor], dict[str, Any], tuple[Reduction, ...]]] = {
    "token": (lambda r: clipped((r.logp_L - r.old_logp_L).exp(), r.advantages_L), {},
        ("token_mean", "sequence_mean", "constant", "group_token_mean", "sequence_sum")),
    "sequence": (lambda r: clipped((r.logp_L - r.old_logp_L).mean().exp(), r.advantages_L.mean()), {"ratio": "sequence"},
        ("sequence_mean",)),
    "product": (lambda r: clipped((r.logp_L - r.old_logp_L).sum().exp(), r.advantages_L.mean()), {"ratio": "sequence_product"},
        ("sequence_sum", "token_mean", "constant", "group_token_mean")),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_BUILT_IN)
def test_a_custom_loss_that_repeats_a_built_in_one_has_its_value_and_gradient(name: str) -> None:
    function, choices, reductions = AS_BUILT_IN[name]
    for reduction in reductions:
        for mine, theirs in zip(loss_of(function, reduction), loss_of(None, reduction, **choices), strict=True):
            torch.testing.assert_close(mine, theirs)


BAD_LOSSES: dict[str, tuple[Callable[[LossInputs], Any], str]] = {
    "shape": (lambda r: torch.zeros(7) * r.logp_L.sum(), r"returned float32 \[7\]; return floats: a loss \[\] or one per token"),
    "number": (lambda r: 3.0, "returned float; return a tensor"), "integers": (lambda r: r.tokens_L, r"returned int64 \[3\]"),
    "nan": (lambda r: r.logp_L / (r.truncated.logical_not() * 1.0), "returned -?inf at index 4"),
    "nan gradient": (lambda r: (r.logp_L - r.logp_L.detach()).abs().sqrt(),
        "a loss whose gradient is NaN or infinite; divide by"),
    "no gradient": (lambda r: -r.advantages_L, "returned a loss without gradient; compute it from response.logp_L"),
    "detached": (lambda r: r.logp_L.detach(), "without gradient"),
    "in place": (lambda r: -r.advantages_L.mul_(2) * r.logp_L, "changed its input advantages_L in place; work on a copy"),
    "in place unseen": (lambda r: r.logp_L * r.old_logp_L.data.mul_(2), "changed its input old_logp_L in place; work on a copy"),
    "in place after use": (lambda r: [x := r.logp_L.exp(), x * x, x.mul_(2)][1],
        r"without gradient \(RuntimeError: .*inplace operation.*; compute it from response.logp_L, without changes in place"),
    "nan gradient of a number": (lambda r: (r.logp_L - r.logp_L.detach()).abs().sqrt().sum(), "a loss whose gradient is NaN or"),
    "first token": (lambda r: r.logp_L - r.logp_L[0], "depends on log-probs of other tokens"),
    "raises": (lambda r: r.logp_L + torch.zeros(99), r"failed \(RuntimeError: .*test_extending.py:\d+"),
    "product per token": (lambda r: -(r.logp_L - r.old_logp_L).sum().exp() * r.advantages_L,
        "depends on log-probs of other tokens; return one number"),
    "discounted sum": (lambda r: r.logp_L.cumsum(0) * r.advantages_L, "depends on log-probs of other tokens"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_LOSSES)
def test_a_loss_that_cannot_be_used_is_refused_by_name(fault: str) -> None:
    function, says = BAD_LOSSES[fault]
    with pytest.raises(PluginError, match=rf"^algorithm\.loss mine:f .*{says}"):
        loss_of(function)


def advantages_of(function: Callable[[AdvantageInputs], Any], critic: bool = False, mode: str = "none") -> Any:
    dice, count = torch.Generator().manual_seed(2), sum(LENGTHS)
    logp_T = -torch.rand(count, generator=dice)
    scored = ScoredBatch(
        logp_T, logp_T - 0.1, torch.rand(count, generator=dice) if critic else None, torch.randn(4, generator=dice), LENGTHS,
        torch.tensor([False, False, True, False]), 2, tokens_T=torch.arange(count), versions_T=torch.zeros(count).long(),
    )  # fmt: skip
    choices = AlgorithmConfig.model_validate({"preset": "ppo" if critic else "grpo"})
    ppo = PPOConfig.model_validate({"kl": {"mode": mode}, "gamma": 0.9})
    custom = CustomAdvantage(Plugin(function, "algorithm.advantage mine:f"))
    return scored, build_experience(scored, choices, ppo, 0.5, True, NOTHING_SEEN, custom=custom)


def test_an_advantage_per_response_is_treated_as_a_compared_score() -> None:
    scored, mine = advantages_of(lambda b: b.scores_B - 1, mode="penalty")
    rows = iter(range(sum(LENGTHS)))
    for score, length in zip(scored.scores_B.tolist(), LENGTHS, strict=True):
        tokens, later = [next(rows) for _ in range(length)], 0.0
        for place in reversed(range(length)):
            later = 0.9 * later - 0.5 * 0.1 + (score - 1 if place == length - 1 else 0.0)
            assert float(mine.advantages_T[tokens[place]]) == pytest.approx(later, abs=1e-5)


def test_an_advantage_per_token_is_taken_as_it_is() -> None:
    seen = []

    def mine(batch: AdvantageInputs) -> Tensor:
        seen.append(batch)
        assert batch.groups_B.tolist() == [0, 0, 1, 1] and batch.sum_tokens(torch.ones(10)).tolist() == LENGTHS
        return batch.to_tokens(batch.scores_B) * batch.tokens_T

    for critic in (False, True):
        scored, made = advantages_of(mine, critic)
        expected = scored.scores_B.repeat_interleave(torch.tensor(LENGTHS)) * torch.arange(10)
        assert torch.equal(made.advantages_T, expected) and seen[-1].values_T is (None if not critic else seen[-1].values_T)
        assert (made.returns_T != made.advantages_T).any(), "a critic learns the rewards"


BAD_ADVANTAGES: dict[str, tuple[Callable[[AdvantageInputs], Any], str]] = {
    "shape": (lambda b: b.scores_B[:2], r"returned float32 \[2\]; return floats: one number per response \[4\] or per token"),
    "groups": (lambda b: b.scores_B.view(2, 2), r"returned float32 \[2, 2\]"), "none": (lambda b: None, "returned NoneType"),
    "nan": (lambda b: b.scores_B / 0 * 0, "returned nan at index 0"),
    "in place": (lambda b: b.scores_B.sub_(1), "changed its input scores_B in place"),
    "in place unseen": (lambda b: torch.from_numpy(np.clip(a := b.scores_B.numpy(), 0, 1, out=a)), "changed its input"),
    "random": (partial(lambda calls, b: b.scores_B * next(calls), count()), "returned two results for the same batch; make it"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_ADVANTAGES)
def test_advantages_that_cannot_be_used_are_refused_by_name(fault: str) -> None:
    function, says = BAD_ADVANTAGES[fault]
    with pytest.raises(PluginError, match=rf"^algorithm\.advantage mine:f {says}"):
        advantages_of(function)


SIGNALS = StepSignals(1.0, 0.2, 1.0, 0.0)
RULES = """
def two_up(signals, delta, memory):
    memory["seen"] = [*memory.get("seen", []), signals.reward_mean]
    return delta + 2

def half(signals, delta, memory): return delta + 0.5
def keeps(signals, delta, memory): return delta + len(memory.update(x=(1, 2)) or "")
def deep(signals, delta, memory): return delta + sum(memory.update(x=dict(memory)) or 0 for _ in range(3000))
def moody(signals, delta, memory, calls=[]): return delta + len(calls.append(1) or calls)
def raises(signals, delta, memory): return delta / 0
"""


def delta_by(name: str, folder: Path) -> DeltaConfig:
    (folder / "rules.py").write_text(RULES)
    return DeltaConfig(rule=f"{folder / 'rules.py'}:{name}", initial=2, max=5)


def test_a_delta_rule_is_bounded_and_resumes_with_its_memory(tmp_path: Path) -> None:
    controller = make_delta_controller(config := delta_by("two_up", tmp_path))
    assert [controller.observe(step, SIGNALS).value for step in (1, 2, 3)] == [4, 5, 5]
    resumed = make_delta_controller(config)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.state_dict() == controller.state_dict() and resumed.state_dict()["memory"] == {"seen": [1.0, 1.0, 1.0]}
    with pytest.raises(PluginError, match=r"two_up gives 4 on this rank and 3 on rank 0"):
        make_delta_controller(config, lambda value: value - 1).observe(1, SIGNALS)
    with pytest.raises(CheckpointError, match="two_up"):
        make_delta_controller(DeltaConfig()).load_state_dict(controller.state_dict())


@pytest.mark.parametrize(("name", "says"), [
    ("half", "returned 2.5; return the next delta, a whole number"), ("keeps", "keeps .*keep numbers, texts"),
    ("moody", "decided twice differently"), ("deep", "keeps .*, nested at most 50 deep"),
    ("raises", r"failed \(ZeroDivisionError: .*rules.py:\d+ in raises"),
])  # fmt: skip
def test_a_delta_rule_that_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(PluginError, match=rf"^overlap\.delta\.rule .*:{name} {says}"):
        make_delta_controller(delta_by(name, tmp_path)).observe(1, SIGNALS)


def test_a_function_that_cannot_be_called_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def none(): pass\ndef more(batch, gain): pass\n")
    for value, says in (
        (f"{tmp_path / 'mine.py'}:none", r"algorithm.advantage=.* takes \(\).*is called with \(batch\)"),
        (f"{tmp_path / 'mine.py'}:more", "missing a required argument: 'gain'"),
        (f"{tmp_path / 'mine.py'}:moree", "did you mean 'more'"),
    ):
        with pytest.raises(ConfigError, match=says):
            Plugin.load("algorithm.advantage", value)
    Plugin.load("algorithm.advantage", {"entry_point": f"{tmp_path / 'mine.py'}:more", "options": {"gain": 1}})
    entry = {"entry_point": "a.b:f"}
    for setting in ("f", "a.b:", ":f", entry | {"kwargs": {}}, {"options": {}}, entry | {"options": 1}):
        with pytest.raises(ValidationError, match="a function `package.module:function` or `file.py:function`"):
            AlgorithmConfig.model_validate({"loss": setting})


def test_an_edited_file_is_read_again_and_an_exit_is_a_failure(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("def one(batch): return 1\n")
    first = Plugin.load("algorithm.advantage", f"{file}:one")
    file.write_text("import sys\ndef one(batch): sys.exit(0)\n")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))  # a coarse clock may give both the same time
    assert first(None) == 1
    with pytest.raises(PluginError, match=r"failed \(sys.exit: 0 at .*mine.py:2 in one\)"):
        Plugin.load("algorithm.advantage", f"{file}:one")(None)


@given(case=cases())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_schedule_of_the_page_is_sound(folder: Path, case: tuple[Round, Site, Costs]) -> None:
    round_, site, costs = case
    made = generator_of("my_functions.py:critic_first")(round_, site, costs)
    assert check(add_communication(made, round_, site), round_, site, ample_budgets(site), costs) == []


def test_the_fields_of_the_page_exist() -> None:
    site = Site({"actor": RolePlacement((0,))})
    round_ = Round(0, 1, decode=(((Growth(0, 1, 1),),),))
    given: dict[str, Any] = {"round": round_, "site": site, "costs": Costs(), "action": intra(round_, site, Costs()).of(0)[0]}
    section = PAGE.read_text(encoding="utf-8").partition("## Schedule inputs")[2].partition("## AdvantageInputs")[0]
    named = re.findall(r"`(\w+)\.(\w+)", section)
    assert {name for name, _ in named} >= given.keys()
    assert [f"{name}.{field}" for name, field in named if name in given and not hasattr(given[name], field)] == []


SCHEDULES = """
from dataclasses import replace
from oppo_megatron import Schedule, intra

def part(round, site, costs, kept):
    plain = intra(round, site, costs)
    return Schedule({rank: plain.of(rank)[kept] for rank in site.ranks})
def backwards(round, site, costs): return part(round, site, costs, slice(None, None, -1))
def short(round, site, costs): return part(round, site, costs, slice(1, None))
def text(round, site, costs): return "decode actor"
def untyped(round, site, costs): return Schedule({0: [replace(a, micro_batch=None) for a in intra(round, site, costs).of(0)]})
def words(round, site, costs): return Schedule({rank: ["decode"] for rank in site.ranks})
def stray(round, site, costs): return Schedule({9: ()})
def lists(round, site, costs): return Schedule([intra(round, site, costs).of(rank) for rank in site.ranks])
def moody(round, site, costs, calls=[]):
    return (intra if len(calls.append(1) or calls) % 2 else short)(round, site, costs)
def sound(round, site, costs): return intra(round, site, costs)
"""


@pytest.mark.parametrize(("name", "says"), [
    ("backwards", "made a schedule that cannot run: .*; correct its order"), ("short", "made a schedule that cannot run: "),
    ("untyped", r"gave rank 0 Action\(.*; give it actions that compute"), ("words", "gave rank 0 'decode'; give it actions"),
    ("stray", "returned actions of 9; give"), ("lists", "returned a Schedule of .*; make it of a dict"),
    ("text", "returned str; return a Schedule"), ("moody", "returned two schedules for the same round"), ("sound", None),
])  # fmt: skip
def test_a_schedule_that_cannot_run_is_refused_by_name(folder: Path, name: str, says: str | None) -> None:
    (folder / "schedules.py").write_text(SCHEDULES)
    overlap = {"intra": True, "schedule": f"schedules.py:{name}"}
    config = TrainConfig(**Workspace(folder).config("x", overlap=overlap, placement={"mode": "colocated", "actor": {"pp": 2}}))
    site = Site(role_placements(config))
    if says is None:
        assert preview(config, 1).schedule == preview(config, 1, generator="intra").schedule
        return
    for rank in (None, 0):
        planner = new_planner(config, site, round_generator(config.overlap, site), lambda _: 40, rank=rank)
        with pytest.raises(PluginError, match=rf"(?s)^overlap\.schedule schedules.py:{name} {says}") as refused:
            list(first_step(config, planner, 8))
        assert len(str(refused.value).splitlines()) <= 13, "ten faults, and the number of the others"
