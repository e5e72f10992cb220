"""Loading: overrides, interpolation, secrets, every kind of wrong value as one sentence, and the round trip."""

import re
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from oppo_megatron.config.base import Section
from oppo_megatron.config.data import PromptDataConfig
from oppo_megatron.config.explain import explain, first_problem
from oppo_megatron.config.load import config_yaml, dump_config, load_config, plain_settings
from oppo_megatron.config.model import ActorConfig, RuntimeConfig, TrainedRoleConfig
from oppo_megatron.config.ppo import MOST_MEDIAN, MOST_SIGMA, log_normal
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.supervised import SFTConfig
from oppo_megatron.cores import has_cuda
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.preflight.validate import check_source, check_trace
from oppo_megatron.sim.clusters.reading import ClusterConfig

GOOD = """
run_dir: runs/a
steps: 3
tokenizer: {path: tok.model}
data: {path: rows.jsonl}
actor: {checkpoint: actor}
critic: {checkpoint: actor, optimizer: {lr: 1e-5}}
rewards: [{kind: verifier, name: gsm8k}]
rollout: {batch_size: 8, max_response_tokens: 50}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def problems_of(path: Path, *overrides: str, check: Callable[[TrainConfig], list[str]] = lambda config: []) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, path, overrides, check=check)
    return caught.value.problems


def test_overrides_reach_sections_lists_and_null_sections(good: Path) -> None:
    given = ["seed=7", "overlap.delta.max=6", "rewards.0.weight=0.5", "actor.optimizer.lr=1e-4", "ppo.kl.target=3"]
    config = load_config(TrainConfig, good, [*given, "data.prompt_template='a={prompt}'"])
    assert config.data.prompt_template == "a={prompt}"
    assert (config.seed, config.overlap.delta.max, config.rewards[0].weight) == (7, 6, 0.5)
    assert config.actor.optimizer.lr == 1e-4 and config.critic.optimizer.lr == 1e-5 and config.ppo.kl.target == 3
    assert config.data.path == Path("rows.jsonl")  # relative to the current directory, not to the file


def test_files_have_weights_and_a_wrong_one_is_one_problem(good: Path, tmp_path: Path) -> None:
    given = ["data.path=[a.jsonl,{path: b.jsonl,weight: 2},{path: c.jsonl}]", "data.path.1.weight=3"]
    config = load_config(TrainConfig, good, given)
    assert [(str(each.path), each.weight) for each in config.data.sources] == [("a.jsonl", 1), ("b.jsonl", 3), ("c.jsonl", 1)]
    dump_config(config, tmp_path / "dumped.yaml")
    assert load_config(TrainConfig, tmp_path / "dumped.yaml").data == config.data
    for wrong, says in (
        ("0", "is 0, but must be greater than 0; give a value in that range"), ("-0.5", "is -0.5, but must be greater than 0"),
        (".nan", "is nan, but must be a finite number"), ("1e4", "is 10000.0, but must be less than or equal to 1000"),
        ("true", "is True, but must be a number"), ("x", "is 'x', but must be a number; correct the value"),
    ):  # fmt: skip
        (problem,) = problems_of(good, f"data.path=[a.jsonl,{{path: b.jsonl,weight: {wrong}}}]")
        assert problem.startswith(f"`data.path.1.weight` {says}"), problem
    (problem,) = problems_of(good, "data.path=[{path: b.jsonl,wieght: 2}]")
    assert problem == "`data.path.0.wieght` is not a setting; did you mean `data.path.0.weight`?"
    (problem,) = problems_of(good, "data.path={path: b.jsonl,weight: 2}")
    assert "must be a path or a list" in problem
    data = PromptDataConfig.model_validate({"path": ["a", {"path": "b", "weight": 2}]})
    assert [*data.rules("data", ["prompt"])] == []
    assert [*data.rules("evaluation.data", ["prompt"])] == [
        "evaluation.data.path.1.weight is 2, but each held-out row is measured once; remove it"
    ]


@pytest.mark.parametrize(("added", "overrides", "key", "value"), [
    ("ppo: {kl: {coefficient: 0.2, estimator: k3}}", ["ppo.kl=null"], "ppo.kl.coefficient", 0.05),
    ("ppo: {kl: {coefficient: 0.2}}", ["ppo.kl.coefficient=~"], "ppo.kl.coefficient", 0.05),
    ("ppo: {kl: {coefficient: 0.2}}", ["ppo.kl=null", "ppo.kl.coefficient=0.3"], "ppo.kl.coefficient", 0.3),
    ("seed: 7", ["seed=null", "ppo.kl=null"], "seed", 1),
    ("overlap: {delta: {window: 8}}", ["overlap=Null"], "overlap.delta.window", 5),
    ("ppo: {clip_high: 0.3}", ["ppo.clip_high=null"], "ppo.clip_high", None),
    ("ppo: {kl_coefficient: 0.2, odd: 1}", ["ppo.odd=null", "ppo.kl_coefficient=null"], "ppo.kl.coefficient", 0.05),
])  # fmt: skip
def test_an_override_of_null_removes_what_cannot_be_null(good: Path, added: str, overrides: Any, key: str, value: Any) -> None:
    good.write_text(GOOD + added + "\n")
    found: object = load_config(TrainConfig, good, overrides)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_removed_key_of_a_list_and_what_cannot_be_removed(good: Path) -> None:
    good.write_text(GOOD.replace("name: gsm8k", "name: gsm8k, weight: 0.5"))
    assert load_config(TrainConfig, good, ["rewards.0.weight=null"]).rewards[0].weight == 1.0
    assert problems_of(good, "run_dir=null")[0].startswith("`run_dir` is missing")
    assert "`sead` is not a setting" in problems_of(good, "sead=null")[0]
    good.write_text(GOOD + "overlap: {delta: {max: '${rollout.batch_size}'}}\n")
    assert load_config(TrainConfig, good, ["rollout.batch_size=16"]).overlap.delta.max == 16, "a reference sees overrides"


@pytest.mark.parametrize(("override", "expected"), [
    ("overlap.delta.windw=3", "`overlap.delta.windw` is not a setting; did you mean `overlap.delta.window`?"),
    ("overlap.chunk=[]", "`overlap.chunk` is [], but must be an integer or a list of at least 1; correct"),
    ("seed=9223372036854775808", "`seed` is 9223372036854775808, but must be less than 9223372036854775808"),
    ("sead=3", "`sead` is not a setting; did you mean `seed`?"),
    ("ppo.mode=3", "`ppo.mode` is not a setting; did you mean `ppo.kl.mode`?"),
    ("batch_size=3", "`batch_size` is not a setting; did you mean `rollout.batch_size`?"),
    ("rewards.0.weigth=3", "`rewards.0.weigth` is not a setting; did you mean `rewards.0.weight`?"),
    ("tokenizer.zzz=3", "`tokenizer.zzz` is not a setting; the settings here are: path, chat_template"),
    ("rollout.batch_size=0", "`rollout.batch_size` is 0, but must be greater than or equal to 1; give a value"),
    ("rollout.top_p=1.5", "`rollout.top_p` is 1.5, but must be less than or equal to 1"),
    ("rollout.batch_size=2.5", "`rollout.batch_size` is 2.5, but must be an integer, without a fraction; correct"),
    ("rollout.batch_size=many", "`rollout.batch_size` is 'many', but must be an integer"),
    ("rollout.batch_size=true", "`rollout.batch_size` is True, but must be a number, not a boolean"),
    ("ppo.kl.target=true", "`ppo.kl.target` is True, but must be a number, not a boolean"),
    ("rollout.temperature=.nan", "`rollout.temperature` is nan, but must be a finite number"),
    ("overlap.intra=perhaps", "`overlap.intra` is 'perhaps', but must be a boolean"),
    ("overlap.delta.rule=eq5", "did you mean `eq4`?"),
    ("placement.mode=wat", "is 'wat', but must be 'disaggregated', 'colocated' or 'single'; choose one of these"),
    ("actor.init=5", "`actor.init` is 5, but must be a section of keys or a path"),
    ("data.path=5", "`data.path` is 5, but must be a path"),
    ("data.columns=3", "`data.columns` is 3, but must be a section of keys"), ("rollout=null", "`rollout` is missing; add it"),
    ("seed", "override `seed` is not of the form a.b=c"), ("=3", "override `=3` is not of the form a.b=c"),
    ("a..b=3", "override `a..b=3` is not of the form a.b=c"),
    ("rewards.5.weight=3", "override `rewards.5.weight=3` cannot be applied"),
    ("data.path=[a", "override `data.path=[a` cannot be applied"), ("seed=${nowhere}", "`seed` cannot be resolved"),
    ("seed=???", "`seed` cannot be resolved"),
    (r'data.prompt_template="a\0{prompt}"', "`data.prompt_template` has a NUL at character 1; remove it"),
])  # fmt: skip
def test_one_wrong_setting_is_one_sentence(good: Path, override: str, expected: str) -> None:
    problems = problems_of(good, override)
    assert len(problems) == 1 and expected in problems[0]


def test_all_problems_come_at_once_with_those_of_cross_checks(good: Path) -> None:
    wrong = ("sead=3", "steps=0", "rollout.max_respons_tokens=4", "actor.optimizer.lr=-1", "nonsense")
    problems = problems_of(good, *wrong)
    assert len(problems) == 5
    for word in ("sead", "steps", "rollout.max_respons_tokens", "actor.optimizer.lr", "nonsense"):
        assert any(f"`{word}`" in problem for problem in problems)

    def check(config: TrainConfig) -> list[str]:
        return [f"batch {config.rollout.batch_size}"]

    problems = problems_of(good, "sead=3", "steps=0", check=check)
    assert len(problems) == 3 and problems[-1] == "batch 8"
    assert len(problems_of(good, "rollout.batch_size=x", check=check)) == 1, "a required key is wrong: nothing can be checked"


def test_forced_lengths_stay_in_the_range_of_floats(good: Path) -> None:
    for wrong in ("[200,1e6]", "[200,11]", "[1e300,1]", "[200,-1]"):
        with pytest.raises(ConfigError, match=r"`rollout\.forced_lengths` is .* a sigma from 0 to 10"):
            load_config(TrainConfig, good, [f"rollout.forced_lengths={wrong}"])
    forced = load_config(TrainConfig, good, [f"rollout.forced_lengths=[{MOST_MEDIAN},{MOST_SIGMA}]"]).rollout.lengths
    assert forced is not None and log_normal(forced)(1 - 2.0**-53) > log_normal(forced)(0.5)


def test_missing_keys_and_files_are_named_and_a_wrong_key_is_not_said_to_be_absent(good: Path) -> None:
    def check(config: TrainConfig) -> list[str]:
        return [*check_trace(config.rollout), *check_source("actor", config.actor)]

    wrong = ("rollout.forced_lengths=[0,1]", "actor.checkpoint=[1]", "actor.lorra={}")
    found = {problem.split("`")[1] for problem in problems_of(good, *wrong, check=check)}
    assert found == {"actor.checkpoint", "actor.lorra", "rollout.forced_lengths"}
    absent = problems_of(good, "actor.checkpoint=null", "actor.lorra={}", check=check)
    assert [problem.split()[0] for problem in absent] == ["`actor.lorra`", "actor"], "the other key's absence stays a problem"
    assert f"did you mean `{good}`?" in problems_of(good.with_name("goood.yaml"))[0]
    good.write_text("")
    problems = problems_of(good)
    required = {name for name, field in TrainConfig.model_fields.items() if field.is_required()}
    assert {problem.split("`")[1] for problem in problems} == required
    assert all("is missing; add it" in problem for problem in problems)


@pytest.mark.parametrize(("text", "expected"), [
    ("a: 1\nb: [1, 2\nc: 3\n", "line 3, column 2"), ("a: 1\n\tb: 2\n", "line 2, column 1"), ("seed: 1\nseed: 2\n", "line 2"),
    ("- 1\n- 2\n", "list"), ("a: \x07\n", "YAML"), (b"a: \xff\xfe\n", "UTF-8"),
])  # fmt: skip
def test_what_is_no_yaml_mapping_names_the_place(tmp_path: Path, text: str | bytes, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems = problems_of(path)
    assert str(path) in problems[0] and expected in problems[0]


def test_round_trip_of_every_default(good: Path, tmp_path: Path) -> None:
    config = load_config(TrainConfig, good, ["actor.init={rope: {1: 2}, theta: 1e6, name: '1e6', flag: 'yes'}"])
    dump_config(config, tmp_path / "deep" / "resolved.yaml")
    assert load_config(TrainConfig, tmp_path / "deep" / "resolved.yaml") == config
    assert yaml.safe_load((tmp_path / "deep" / "resolved.yaml").read_text()) == plain_settings(config)
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["resolved.yaml"]


@settings(max_examples=50, deadline=None)
@given(
    template=st.text(st.sampled_from(["\\", "$", "{", "}", "'", '"', ":", " ", "1"]) | st.characters(codec="utf-8",
        exclude_categories=("Cc", "Cs", "Zl", "Zp"), exclude_characters="\ufeff")),
)  # fmt: skip
def test_round_trip_keeps_any_text(template: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = {"path": "d", "prompt_template": template + "${seed} {prompt}" + template}
    config = SFTConfig(run_dir="r", tokenizer={"path": "t"}, model={"checkpoint": "m"}, data=data)
    path = tmp_path_factory.mktemp("round") / "c.yaml"
    dump_config(config, path)
    assert load_config(SFTConfig, path) == config
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == plain_settings(config)


def test_roles_take_the_runtimes_type_unless_they_give_their_own(good: Path, tmp_path: Path) -> None:
    config = load_config(TrainConfig, good, ["runtime.dtype=bfloat16", "critic.dtype=float32"])
    assert (config.actor.dtype, config.critic.dtype) == ("bfloat16", "float32")
    assert named_roles(config)["reference"].dtype == "bfloat16"
    dump_config(config, tmp_path / "dumped.yaml")
    again = load_config(TrainConfig, tmp_path / "dumped.yaml", ["runtime.dtype=float32"])
    assert again.actor.dtype == "bfloat16", "what is written down for a role stays"
    plain = load_config(TrainConfig, good)
    assert plain.actor.dtype == "float32"
    sections = {name: getattr(plain, name) for name in type(plain).model_fields}
    sections |= {"runtime": RuntimeConfig(dtype="bfloat16"), "actor": ActorConfig(checkpoint="a")}
    config = TrainConfig(**sections | {"critic": TrainedRoleConfig(checkpoint="a", dtype="float32")})
    assert (config.actor.dtype, config.critic.dtype) == ("bfloat16", "float32")
    (problem,) = problems_of(good, "runtime.dtype=float16")
    assert problem.startswith("`runtime.dtype` is 'float16', but must be 'float32' or 'bfloat16'")
    supervised = {"run_dir": "a", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "runtime": {"dtype": "bfloat16"}}
    assert SFTConfig(**supervised, model={"checkpoint": "m"}).model.dtype == "bfloat16"
    assert SFTConfig(**supervised, model={"checkpoint": "m", "dtype": "float32"}).model.dtype == "float32"


def test_a_learning_rate_that_is_not_given_is_that_of_the_roles_kind(good: Path, tmp_path: Path) -> None:
    critic = "critic.optimizer.lr=null"
    plain = load_config(TrainConfig, good, [critic])
    assert (plain.actor.optimizer.lr, plain.trained["critic"].optimizer.lr) == (1e-6, 5e-6)
    adapted = load_config(TrainConfig, good, [critic, "actor.lora={rank: 4}", "actor.optimizer.warmup_steps=3"])
    assert (adapted.actor.optimizer.lr, adapted.trained["critic"].optimizer.lr) == (1e-5, 5e-6)
    given = load_config(TrainConfig, good, ["actor.optimizer.lr=3e-6", "critic.lora={rank: 4}"])
    assert (given.actor.optimizer.lr, given.trained["critic"].optimizer.lr) == (3e-6, 1e-5), "as it is given"
    dump_config(plain, tmp_path / "dumped.yaml")
    assert "lr: 5.0e-06" in (tmp_path / "dumped.yaml").read_text(), "config.yaml shows what it came to"
    assert load_config(TrainConfig, tmp_path / "dumped.yaml") == plain

    supervised = {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}}
    assert SFTConfig(**supervised, model={"checkpoint": "m"}).optimizer.lr == 1e-5
    assert SFTConfig(**supervised, model={"checkpoint": "m", "lora": {}}).optimizer.lr == 1e-4


@pytest.mark.parametrize(("device", "visible", "driver", "expected"), [
    ("cpu", "0", True, "float32"), ("cuda", "", False, "bfloat16"), ("auto", "0", True, "bfloat16"),
    ("auto", "", True, "float32"), ("auto", "0", False, "float32"),
])  # fmt: skip
def test_the_usual_type_is_that_of_the_device(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, visible: str, driver: bool, expected: str
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    if driver:
        (devices / "nvidiactl").touch()
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text("cuda: Optional[str] = '12.8'\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("oppo_megatron.config.model.has_cuda", lambda: has_cuda(devices))
    config = load_config(TrainConfig, good, [f"runtime.device={device}"])
    assert config.runtime.dtype == config.actor.dtype == named_roles(config)["reference"].dtype == expected
    assert load_config(TrainConfig, good, [f"runtime.device={device}", "actor.dtype=float32"]).actor.dtype == "float32"
    dump_config(config, tmp_path / "dumped.yaml")
    assert f"dtype: {expected}" in (tmp_path / "dumped.yaml").read_text(), "config.yaml shows what it came to"
    (package / "version.py").write_text("cuda: Optional[str] = None\n")
    assert not has_cuda(devices), "torch's build for processors has none"


WRONG = (
    None, "", "x", -1, 0, 1.5, 1e308, float("nan"), [], [None], ["a", "a"], {}, {"a": 1}, "9" * 5000, True, 10**30, b"\xff",
    date(2020, 1, 1), "2020-13-01", [{}], {1: 2}, [[]],
)  # fmt: skip


def every_section(kind: type[Section] = Section) -> set[type[Section]]:
    return {kind}.union(*(every_section(inner) for inner in kind.__subclasses__()))


def test_no_words_of_pydantic_reach_the_user(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"  # pydantic names a union's failed member in the place of a key
    path.write_text("nodes: 1\ngpus_per_node: 8\ngpu: {tflops: 1, gb_per_s: 1, memory_gb: 1, memory: 3}\n")
    with pytest.raises(ConfigError, match="`gpu.memory` is not a setting; did you mean `gpu.memory_gb`"):
        load_config(ClusterConfig, path)
    seen = set()
    for kind in every_section():
        for field in kind.model_fields:
            for value in WRONG:
                try:
                    kind.model_validate({field: value})
                except ValidationError as error:
                    for problem in (*explain(kind, error), first_problem(error)):
                        seen.add(problem.partition("must be ")[2])
    assert len(seen) > 60
    leaks = re.compile(r"\b(Input|String|List|Keys|Unable|should|instance|valid)\b|must be None|Config\b|Section\b")
    assert [rule for rule in seen if leaks.search(rule) or rule[:1].isupper()] == []


SECRET = "k9-very-secret-value"
NAMES = ("WANDB_API_KEY", "HF_TOKEN", "reward_service_token", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY")


@pytest.fixture
def secret_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    (tmp_path / "c.yaml").write_text(GOOD.replace("runs/a", "${oc.env:RUN_FOLDER,run}"))
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_in_a_setting_is_refused_without_being_shown(secret_config: Path, name: str) -> None:
    assert SECRET not in config_yaml(load_config(TrainSettings, secret_config))
    for override in ("run_dir=${oc.env:%s}", "data.path=[a, 'x-${oc.env:%s}']", "actor.init={a: {b: ['${oc.env:%s}']}}"):
        with pytest.raises(ConfigError, match="by its name a secret") as caught:
            load_config(TrainSettings, secret_config, [override % name, "steps=no"])
        assert override.partition("=")[0] in str(caught.value) and SECRET not in str(caught.value)


def test_other_variables_may_be_used(secret_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_FOLDER", "TOKENIZER_PATH", "MONKEY_KEYS_X"):
        monkeypatch.setenv(name, "a-long-folder-name")
    monkeypatch.setenv("HF_TOKEN", "-folder")  # 7 characters may occur in any text
    overrides = ["tokenizer.path=${oc.env:TOKENIZER_PATH}"]
    settings = load_config(TrainSettings, secret_config, overrides)
    assert str(settings.tokenizer.path) == str(settings.run_dir) == "a-long-folder-name"
    monkeypatch.setenv("HF_TOKEN", "-folder-")
    with pytest.raises(ConfigError, match=r"`run_dir` holds the value of the environment variable HF_TOKEN"):
        load_config(TrainSettings, secret_config, overrides)
