"""Settings: each is described, and read by an algorithm or refused; choices, presets, rewards, and changes in a continued run."""

import types
import typing
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.base import Section
from oppo_megatron.config.describe import COMMANDS, Setting, all_settings, find_setting, near_keys, settings_in
from oppo_megatron.config.explain import explain, known_keys
from oppo_megatron.config.load import config_yaml, dump_config, load_config
from oppo_megatron.config.rewards import RewardPart, check_rewards, check_waits
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.run_rules import train_rules, unread_settings
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.train.saving.state import changed_settings
from tests.support.configs import least_config, put
from tools.reference import render_reference


def sections(kind: type[Section]) -> Iterator[type[Section]]:
    yield kind
    for setting in settings_in(kind):
        if setting.section is not None:
            yield from sections(setting.section)


ALL_SECTIONS = sorted({each for kind in COMMANDS.values() for each in sections(kind)}, key=lambda section: section.__name__)


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_has_a_meaning(section: type[Section]) -> None:
    """Values are compared with pydantic's own JSON schema, made from the same fields in another way."""
    schema = section.model_json_schema(ref_template="{model}")["properties"]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for setting in settings_in(section):
        assert setting.meaning.strip(), f"{section.__name__}: describe {setting.name}"
        assert not setting.is_number or setting.unit is not None, f'write `Annotated[int, Unit("...")]` for {setting.name}'
        shown = setting.values(lambda inner: "section")
        for node in nodes(schema[setting.name]):
            for choice in node.get("enum", []):
                assert f"`{choice}`" in shown, (setting.name, shown)
            for name, sign in signs.items():
                if name in node:
                    assert f"{sign} {node[name]:g}" in shown, (setting.name, shown)


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        for inner in tree.values():
            yield from nodes(inner)
    elif isinstance(tree, list):
        for inner in tree:
            yield from nodes(inner)


def test_every_key_is_on_the_page_with_its_default_bounds_and_type() -> None:
    page = render_reference()
    assert page.startswith("# Configuration\n")
    blocks = page.split("\n#")
    for kind in COMMANDS.values():
        for key in known_keys(kind):
            place, _, name = key.rpartition(".")
            under = [b for b in blocks if f"`{place}`" in b.partition("\n|")[0] or f"`{place}[]`" in b.partition("\n|")[0]]
            assert any(f"| `{name}` |" in block for block in (under if place else blocks)), (kind, key)
    for row in (
        "| `batch_size` | integer, ≥ 1 | rollouts | required | trained rollouts per step (paper's B) |",
        "| `top_p` | number, > 0, ≤ 1 | share | `1.0` |", '| `estimator` | `k1`, `k2`, `k3`, `k1+`, `k3+` |  | `"k1"` |',
        "| `chunk` | integer > 0 or list of integer > 0 | decode steps | `[32, 16, 64]` |",
        "| `reference` | [Role](#role) or `null` |  | `null` |",
        "| `path` | path or list of path or [Files](#files) |  | required |",
    ):  # fmt: skip
        assert row in page, row


def test_a_key_is_found_however_its_list_is_written_and_by_near_misses_with_its_unit() -> None:
    for key in ("rewards.kind", "rewards[].kind", "rewards.0.kind", "rewards[3].kind"):
        setting = find_setting(TrainConfig, key)
        assert setting is not None and setting.key == "rewards[].kind"
    for key in ("rewards.kid", "rollout.batch_size.x", "", "RUN_DIR"):
        assert find_setting(TrainConfig, key) is None
    assert all(find_setting(kind, each.key) == each for kind in COMMANDS.values() for each in all_settings(kind))
    nearest = {
        "rollout.batchsize": "rollout.batch_size", "overlap.dleta.rule": "overlap.delta.rule",
        "max_stalenes": "overlap.max_staleness", "actor.lr": "actor.optimizer.lr", "evaluation.metrcs": "evaluation.metrics",
        "reward.kind": "rewards[].kind",
    }  # fmt: skip
    assert {wrong: near_keys(COMMANDS, wrong)[0] for wrong in nearest} == nearest
    units = {
        "runtime.timeout_s": "s", "runtime.kv_cache_mb": "MiB", "overlap.delta.max": "prompts",
        "data.max_prompt_tokens": "tokens", "seed": "", "overlap.intra": None, "data": None,
    }  # fmt: skip
    for key, unit in units.items():
        setting = find_setting(TrainConfig, key)
        assert isinstance(setting, Setting) and setting.unit == unit


def words_of(annotation: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if get_origin(annotation) is Literal:
        yield from ((key, word) for word in get_args(annotation)[-1:] if isinstance(word, str))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from words_of(field.annotation, f"{key}.{name}" if key else name)
    elif get_origin(annotation) in (Union, types.UnionType, typing.Annotated):
        for each in get_args(annotation):
            yield from words_of(each, key)
    elif get_origin(annotation) in (list, tuple):
        yield from words_of(get_args(annotation)[0], f"{key}.0")


CHOICES = [(kind, key, word) for kind in (TrainConfig, SFTConfig, RewardModelConfig) for key, word in words_of(kind)]
assert len(CHOICES) > 60


@pytest.mark.parametrize(("kind", "key", "word"), CHOICES, ids=lambda value: getattr(value, "__name__", value))
def test_a_misspelt_word_is_answered_by_the_nearest(kind: type[Section], key: str, word: str) -> None:
    tree: Any = f"{word}x"
    for name in reversed(key.split(".")):
        tree = [tree] if name == "0" else {name: tree}
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(tree)
    sentences = [problem for problem in explain(kind, caught.value) if f"'{word}x'" in problem]
    head = tuple(f"`{name}` is '{word}x', but must be " for name in (key, key.removesuffix(".0")))
    assert len(sentences) == 1 and sentences[0].startswith(head)
    assert f"'{word}'" in sentences[0] and sentences[0].endswith(f"did you mean `{word}`?")


def tree(**sections: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(config_yaml(least_config(Path("runs/x"), **sections))))


def test_settings_parts_and_sections_that_changed_are_told_and_what_goes_on_from_the_checkpoint() -> None:
    now = tree(steps=9, actor={"checkpoint": "a", "optimizer": {"lr": 2e-6}}, ppo={"kl": {"coefficient": 0.2}})
    told = changed_settings(tree(), now)
    assert "steps: null -> 9" in told and "ppo.kl.coefficient: 0.05 -> 0.2" in told
    assert any(line.startswith("actor.optimizer.lr: ") and line.endswith("-> 2e-06") for line in told) and len(told) == 3
    now = tree(actor={"checkpoint": "other"}, overlap={"delta": {"initial": 3}, "chunk": [48, 16]})
    told = "\n".join(changed_settings(tree(), now))
    assert "actor.checkpoint: a -> other (the actor's weights come from the checkpoint)" in told
    assert "overlap.delta.initial: 4 -> 3 (delta continues from the checkpoint)" in told
    assert "(the chunk size continues from the checkpoint)" in told
    followed = changed_settings(tree(ppo={"kl": {"target": 2.0}}), tree(ppo={"kl": {"target": 2.0, "coefficient": 0.2}}))
    assert followed == ["ppo.kl.coefficient: 0.05 -> 0.2 (the adaptive coefficient continues from the checkpoint)"]
    fixed = tree(overlap={"delta": {"rule": "fixed", "initial": 3}})
    assert not any("goes on" in line for line in changed_settings(tree(overlap={"delta": {"rule": "fixed"}}), fixed))
    parts = [{"kind": "verifier", "name": "gsm8k", "weight": 0.5}, {"kind": "verifier", "name": "arithmetic"}]
    told = changed_settings(tree(), tree(rewards=parts))
    assert "rewards.0.weight: 1.0 -> 0.5" in told
    assert [line for line in told if line.startswith("rewards.1: absent -> {kind: verifier, weight: 1.0, name: arithmetic")]
    assert len(told) == 2, told
    stop = {"early_stop": {"metric": "accuracy", "patience": 3, "mode": None}}
    assert changed_settings({"early_stop": None}, stop) == ["early_stop: null -> {metric: accuracy, patience: 3}"]
    assert changed_settings(stop, {}) == ["early_stop: {metric: accuracy, patience: 3} -> absent"]
    assert changed_settings({}, {"evaluation": None}) == [], "a setting that the code has got since"
    assert changed_settings(tree(), tree() | {"run_dir": "elsewhere"}) == [], "where it is continued"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=3), max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from("abc"), PLAIN), st.dictionaries(st.sampled_from("abc"), PLAIN))
def test_nothing_is_told_of_what_is_equal_and_something_of_all_else(then: dict[str, Any], now: dict[str, Any]) -> None:
    assert changed_settings(then, then) == []
    told = changed_settings(then, now)
    assert told if without_nulls(then) != without_nulls(now) else True
    assert then != now or not told


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


MINE = {
    "algorithm": {"preset": "grpo", "scale": "none"}, "ppo": {"clip_high": 0.28, "kl": {"mode": "none"}},
    "rollout": {"group_size": 4},
}  # fmt: skip
TREE: dict[str, Any] = {
    "run_dir": "run", "tokenizer": {"path": "t"}, "data": {"path": "d", "max_prompt_tokens": 8}, "actor": {"init": {}},
    "rewards": [{"kind": "verifier", "name": "gsm8k"}], "rollout": {"batch_size": 16, "max_response_tokens": 8},
    "overlap": {"inter": False},
}  # fmt: skip


def loaded(tmp_path: Path, preset: Any, *overrides: str) -> TrainConfig:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(preset))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE | {"algorithm": {"preset": str(tmp_path / "mine.yaml")}}))
    return load_config(TrainConfig, tmp_path / "run.yaml", overrides, check=lambda config: list(train_rules(config)))


def test_a_file_gives_defaults_that_the_configuration_overrides(tmp_path: Path) -> None:
    config = loaded(tmp_path, MINE)
    choices = config.algorithm
    assert (choices.preset, choices.scale, choices.reduction) == ("grpo", "none", "sequence_mean")
    assert (config.ppo.clip_high, config.ppo.kl.mode, config.rollout.group_size) == (0.28, "none", 4)
    changed = loaded(tmp_path, MINE, "ppo.clip_high=0.3", "algorithm.scale=group_std")
    assert (changed.ppo.clip_high, changed.algorithm.scale, changed.rollout.group_size) == (0.3, "group_std", 4)
    dump_config(config, tmp_path / "resolved.yaml")
    (tmp_path / "mine.yaml").unlink()
    assert load_config(TrainConfig, tmp_path / "resolved.yaml") == config, "a resolved file needs the preset no more"
    with pytest.raises(ConfigError, match="algorithm.preset `.*mine.yaml` does not exist"):
        load_config(TrainConfig, tmp_path / "run.yaml")


@pytest.mark.parametrize(("preset", "says"), [
    ({"algorithm": {"preset": "grpo"}, "ppo": {"gae_lambda": 0.9}}, "has no critic, and nothing reads it; remove it"),
    ({"algorithm": {"preset": "cispo"}, "ppo": {"clip": 0.1}}, "algorithm.objective is cispo, which does not clip by it"),
    ({"algorithm": {"preset": "grppo"}}, "did you mean `grpo`?"),
    ({"algorithm": {"preset": "grpo"}, "ppo": {"clp": 0.1}}, "`ppo.clp` is not a setting; did you mean `ppo.clip`?"),
    ({"algorithm": {"preset": "other.yaml"}}, "is `other.yaml`, but must be a built-in preset"),
    ({"actor": {}}, "has actor, but a preset has the sections algorithm, ppo"), ([1], "is not a YAML mapping"),
])  # fmt: skip
def test_a_file_is_checked_as_a_built_in_preset_is(tmp_path: Path, preset: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, preset)
    assert says in str(error.value)


SIZE, GROUPS, LONGEST = 2, 3, 6
CHANGES: dict[str, tuple[Any, ...]] = {
    "ppo.gamma": (0.7,), "ppo.gae_lambda": (0.3,), "ppo.clip": (0.01,), "ppo.clip_high": (0.02,), "ppo.dual_clip": (1.01,),
    "ppo.value_clip": (0.01,), "ppo.entropy_coefficient": (0.3,), "ppo.reward_clip": (0.4,), "ppo.truncated": (-9.0,),
    "ppo.reward_normalization": ("batch",), "ppo.kl.coefficient": (0.7,),
    "ppo.kl.estimator": ("k2", "k3"), "ppo.staleness": ("decoupled", "behaviour"),
    "algorithm.ratio": ("sequence_product", "token"), "algorithm.scale": ("batch_std", "none"), "dpo.beta": (0.7,),
}  # fmt: skip
"""Values of each setting, of which the first is taken that an algorithm does not have already."""
VARIANTS: dict[str, dict[str, Any]] = {name: {"algorithm.preset": name} for name in PRESETS} | {
    "grpo, plain": {"algorithm.preset": "grpo", "algorithm.objective": "plain"},
    "grpo, cispo": {"algorithm.preset": "grpo", "algorithm.objective": "cispo", "ppo.clip_high": 4.0},
    "grpo, no KL": {"algorithm.preset": "grpo", "ppo.kl.mode": "none"},
    "grpo, penalty": {"algorithm.preset": "grpo", "ppo.kl.mode": "penalty"},
}


def configured(changes: Mapping[str, Any]) -> TrainConfig:
    tree: dict[str, Any] = {
        "run_dir": "run", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "actor": {"init": {}},
        "rewards": [{"kind": "verifier", "name": "gsm8k"}],
        "rollout": {"batch_size": SIZE * GROUPS, "group_size": SIZE, "max_response_tokens": LONGEST}, "overlap": {"inter": False},
    }  # fmt: skip
    if changes["algorithm.preset"] == "ppo":
        tree["critic"] = {"init": {}}
    for key, value in changes.items():
        put(tree, key, value)
    return TrainConfig.model_validate(tree)


def trained(config: TrainConfig) -> list[torch.Tensor]:
    """Losses and the actor's gradient on a fixed batch, on which every bound of a ratio is reached."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 6, 2, 5, 4, 6]
    total = sum(lengths)

    def drawn(count: int = total, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(count, generator=generator) * scale

    behaviour_T, values_T, scores_B = -drawn().abs(), drawn(), drawn(len(lengths), 2.0)
    algorithm, kl = Algorithm.of(config), config.ppo.kl
    scored = ScoredBatch(
        behaviour_logp_T=behaviour_T, reference_logp_T=None if kl.mode == "none" else behaviour_T + drawn(scale=0.3),
        values_T=values_T if config.algorithm.critic else None, scores_B=scores_B, lengths_B=lengths,
        truncated_B=torch.tensor([each == LONGEST for each in lengths]), group_size=SIZE,
        greedy=None if not config.algorithm.greedy
        else GreedyRows(drawn(GROUPS), torch.tensor([2, 6, 3]), torch.tensor([False, True, False])),
    )  # fmt: skip
    made = algorithm.experience(scored, kl.coefficient)
    stale_T = behaviour_T + drawn(scale=0.5)
    proximal_T = stale_T if algorithm.ppo.staleness == "decoupled" else None
    old_T, weight_T = algorithm.ratio_base(behaviour_T, proximal_T, made.advantages_T, made.lengths_B)
    shares = algorithm.row_weights(lengths, [True] * len(lengths))
    share_T = torch.cat([torch.full((length,), share) for length, share in zip(lengths, shares, strict=True)])
    logp_T = (behaviour_T + drawn(scale=0.6)).requires_grad_()
    entropy_T = (logp_T * drawn()).abs()
    targets = ActorTargets(
        old_T, made.advantages_T, made.reference_logp_T, weight_T, share_T, torch.tensor(lengths), stale_T=None
    )
    loss, _ = algorithm.actor_loss(logp_T, entropy_T, targets, kl.coefficient, total)
    found = [loss.detach(), *torch.autograd.grad(loss, logp_T)]
    if config.algorithm.critic:
        found.append(algorithm.critic_loss(values_T + drawn(scale=0.5), values_T, made.returns_T, total)[0])
    return found


@pytest.mark.parametrize(("variant", "key"), [
    (variant, key) for variant, changes in VARIANTS.items() for key in CHANGES  # but for those that rules of their own refuse
    if key != ("algorithm.scale" if configured(changes).algorithm.pairs else "dpo.beta")
])  # fmt: skip
def test_a_setting_is_refused_if_and_only_if_it_changes_nothing(variant: str, key: str) -> None:
    base = VARIANTS[variant]
    plain = configured(base)
    section, _, name = key.rpartition(".")
    now = getattr(reduce(getattr, section.split("."), plain), name)
    changed = configured({**base, key: next(value for value in CHANGES[key] if value != now)})
    refused = [problem for problem in unread_settings(changed) if problem.startswith(f"{key} is ")]
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(trained(plain), trained(changed), strict=True))
    assert same == bool(refused), refused
    assert not list(unread_settings(plain))


URL = "http://10.0.0.7:8900/score"
RULE, SERVICE = {"kind": "verifier"}, {"kind": "http", "url": URL}
FUNCTION = {"kind": "python", "entry_point": "a.b:c"}


@pytest.mark.parametrize("part", [
    SERVICE | {"token_env": "REWARD_TOKEN", "timeout_s": 2, "give_up_s": 0},
    SERVICE | {"url": "https://[::1]:1/"}, SERVICE | {"url": "http://host"},
    FUNCTION | {"isolate": 512, "timeout_s": 3, "options": {"a": 1}}, FUNCTION | {"isolate": False},
    RULE | {"name": "gsm8k", "lenient": True, "answer": "solution"}, RULE | {"name": "math", "isolate": 512, "timeout_s": 3},
    RULE | {"name": "multiple_choice"}, RULE | {"name": "format", "pattern": "<think>.*</think>.*", "lenient": True},
    RULE | {"name": "length", "buffer_tokens": 4, "max_tokens": 9}, RULE | {"name": "code", "lenient": True, "isolate": True},
], ids=str)  # fmt: skip
def test_right(part: dict[str, Any]) -> None:
    given = RewardPart(**part)
    for each in (given, RewardPart(**given.model_dump())):
        assert check_rewards([each], has_reward_model=False) == []


@pytest.mark.parametrize(("part", "expected"), [
    ({"kind": "http"}, "rewards.0.url is missing"),
    *((SERVICE | {"url": url}, "not the address of a service") for url in (
        "10.0.0.7:8900", "ftp://host/", "http:///score", "http://host:99999/", "http://[::1/", "http://ho st/")),
    (SERVICE | {"url": "http://me:s3cret@host/"}, "a user name or password"),
    *((SERVICE | {"url": f"http://host/{end}"}, "a query or fragment") for end in ("?key=s3cret", "#s3cret")),
    (SERVICE | {"token_env": "sk-s3cret"}, "not the name of an environment variable"),
    (SERVICE | {"entry_point": "a:b", "isolate": True}, "entry_point and isolate, but only kind python"),
    (SERVICE | {"name": "gsm8k"}, "kind http has no rule to name"),
    (FUNCTION | {"step_rewards": "min", "separator": "."}, "step_rewards and separator, but only kind process takes"),
    (FUNCTION | {"url": URL, "token_env": "A"}, "url and token_env, but only kind http takes them"),
    (FUNCTION | {"give_up_s": 3}, "give_up_s, but only kind http takes them"),
    (FUNCTION | {"timeout_s": 3}, "timeout_s, but only kind http, a function with isolate, and the rules math and code"),
    ({"kind": "verifier", "name": "gsm8k", "isolate": 512}, "isolate, but only kind python takes them"),
    (RULE, "without a `name`; add one of arithmetic, gsm8k, gsm8k_first, math, multiple_choice, format, length, code"),
    (RULE | {"name": "format"}, "without a `pattern`; add a regular expression"),
    (RULE | {"name": "length"}, "without `buffer_tokens`; add over how many tokens"),
    (RULE | {"name": "arithmetic", "lenient": True}, "has lenient, but only rule gsm8k or format or code takes"),
    (RULE | {"name": "math", "pattern": "."}, "of rule math and has pattern, but only rule format takes it; remove it"),
    *((RULE | {"name": "code", key: 3}, f"has {key}, but only rule length takes it") for key in ("buffer_tokens", "max_tokens")),
    (RULE | {"name": "math", "lenient": True}, "has lenient, but only rule gsm8k or format or code takes it; remove it"),
    (RULE | {"name": "gsm8k", "timeout_s": 2}, "timeout_s, but only kind http, a function with isolate, and the rules"),
    (FUNCTION | {"pattern": "."}, "of kind python and has pattern, but only rule format takes it; remove it"),
    (RULE | {"name": "code", "url": URL}, "url, but only kind http takes them"),
], ids=str)  # fmt: skip
def test_broken(part: dict[str, Any], expected: str) -> None:
    problems = check_rewards([RewardPart(**part)], has_reward_model=False)
    assert len(problems) == 1 and expected in problems[0] and "s3cret" not in problems[0]


def test_a_run_gives_up_before_its_ranks_do() -> None:
    parts = [RewardPart(kind="http", url=URL, give_up_s=600, timeout_s=30)]
    assert list(check_waits(parts, 631.0)) == [] == list(check_waits(parts, 631.0, 631.0))
    assert "is ended after stall_deadline_s 630" in next(check_waits(parts, 1800.0, 630.0))
    isolated = [RewardPart(kind="python", entry_point="a:b", isolate=True, timeout_s=50)]
    assert list(check_waits(isolated, 1800.0, 111.0)) == []
    assert "60 to start, and timeout_s" in next(check_waits(isolated, 1800.0, 110.0))
    rule = [RewardPart(kind="verifier", name="code")]
    assert list(check_waits(rule, 1800.0, 71.0)) == [] and "rewards.0 may wait 70 s" in next(check_waits(rule, 1800.0, 70.0))
    assert "rewards.0 may wait 630 s" in next(check_waits(parts, 630.0))
    parts[0].give_up_s = 0
    assert list(check_waits(parts, 31.0)) == []


def test_patterns_counts_and_tokens_of_parts() -> None:
    with pytest.raises(ValidationError, match=r"a regular expression \(missing \)"):
        RewardPart(kind="verifier", name="format", pattern="(<think>")
    (problem,) = ServeConfig(rewards=[RewardPart(kind="verifier", name="length", buffer_tokens=4, max_tokens=9)]).rules()
    assert "rewards.0 is of rule length, but a service gets no counts of tokens; name it in the run's file" in problem
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert list(ServeConfig(rewards=[RewardPart(kind="verifier", name="gsm8k")], host=host).rules()) == []
