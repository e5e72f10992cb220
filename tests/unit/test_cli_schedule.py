"""`oppo plan schedule`: what it assumes and predicts, the picture, the text form, costs, wrong input and faults."""

import json
import re
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Op, parse_schedule
from oppo_megatron.schedule.links import TRANSPORTS
from oppo_megatron.schedule.preview import preview
from oppo_megatron.schedule.weaving.costs import Costs, Linear, costs_tree, read_costs
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.commands import enter, refused

ROOT = Path(__file__).parents[2]
EXAMPLES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/*/*.yaml")) if "rollout:" in path.read_text()]
CONFIG = """
run_dir: run
steps: 3
tokenizer: {path: tok}
data: {path: rows.jsonl, max_prompt_tokens: 64}
actor: {init: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4,
               num_attention_heads: 4}}
critic: {init: "${actor.init}"}
reward: {init: "${actor.init}"}
rewards: [{kind: model}]
rollout: {batch_size: 8, max_response_tokens: 20}
overlap: {chunk: 6, delta: {initial: 4}, weave: [2, auto]}
placement: {mode: colocated, actor: {pp: 2, dp: 2}}
"""
PLACES = {role: RolePlacement(tuple(range(4)), pp=2, dp=2) for role in ("actor", "critic", "reward")}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch, CONFIG)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["plan", "schedule", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 or captured.out else captured.err


def test_it_says_what_it_assumed_predicts_and_found(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(config))
    assert out.startswith("round 2 of 5 of the first step, woven\n")
    for line in (
        "12 sequences (rollout.batch_size 8 + delta 4) over 2 replicas of the actor", "prompts of 32 tokens",
        "responses of 20 tokens (none ends sooner)", "chunks of 6", "built-in costs",
    ):  # fmt: skip
        assert f"\n  {line}\n" in out
    found = re.search(r"predicted: (0\.\d+) s, bubble share \d+\.\d%", out)
    least = r"([\d.]+) times the larger of decoding alone \(([\d.]+) s\) and the busiest rank's work \(([\d.]+) s\)"
    ratio, path_s, busy_s = map(float, re.search(least, out).groups())
    assert ratio == pytest.approx(float(found[1]) / max(path_s, busy_s), abs=0.01) and ratio >= 1
    assert re.findall(r"^rank (\d)", out, re.MULTILINE) == ["0", "1", "2", "3"]
    assert out.endswith("OK: the checker finds no fault\n")


def test_grid_is_as_wide_as_the_screen(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert {len(line) for line in shown(capsys, str(config)).splitlines() if line.startswith("rank ")} == {columns}


def test_a_picture_is_a_png(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "wrote grid.png" in shown(capsys, str(config), "--out", "grid.png")
    assert Path("grid.png").read_bytes().startswith(b"\x89PNG")
    for out in ("grid", "grid.txt", "."):
        said = refused(capsys, "plan", "schedule", config, "--out", out)
        assert f"--out {out}: the grid is drawn as PNG; name a file that ends in .png" in said


def test_rounds_of_the_first_step(config: Path) -> None:
    """20 tokens in chunks of 6: three whole chunks, one of two, then what is left to score."""
    loaded = load_config(TrainConfig, config)
    rounds = [preview(loaded, number).round for number in range(1, 6)]
    assert [each.steps for each in rounds] == [6, 6, 6, 2, 0] and [each.index for each in rounds] == [1, 2, 3, 4, 5]
    prompts = [g for replica in rounds[0].prefill["actor"] for batch in replica for g in batch]
    assert sorted(g.seq_id for g in prompts) == list(range(12)) and {(g.past, g.new) for g in prompts} == {(0, 31)}
    assert not any(rounds[1].prefill.get("actor", ()))
    assert {(g.past, g.new) for g in [g for replica in rounds[2].decode for batch in replica for g in batch]} == {(31 + 12, 6)}
    # every sequence of the batch gets its outputs: one a token from critic and reference, one from the reward model
    for role, rows in (("critic", 8 * 20), ("reference", 8 * 20), ("reward", 8)):
        growths = [g for each in rounds for replica in each.prefill[role] for batch in replica for g in batch]
        assert sum(g.rows for g in growths if g.seq_id < 8) == rows, role
    assert {action.chunk for action in preview(loaded, 3).schedule if action.op is Op.PREFILL} == {2}


GROUPS = ["rollout.group_size=4", "overlap.delta={initial: 1, max: 2}"]


def test_ranks_that_only_train_receive_each_chunk(config: Path) -> None:
    found = preview(load_config(TrainConfig, config, ["actor.train.ranks=4-7"]), 2)
    assert found.site.followers == (4, 5, 6, 7)
    assert {tuple(action.op for action in found.schedule.of(rank)) for rank in (4, 5, 6, 7)} == {(Op.RECV,)}


def test_groups_fork_their_prompts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three groups of four: the first of each reads 31 of 32 prompt tokens, and the others have them from it."""
    out = shown(capsys, str(config), "--round", "1", *GROUPS)
    assert "\n  12 sequences (rollout.batch_size 8 + delta 1 groups of 4) over 2 replicas of the actor\n" in out
    by_role = ", ".join(f"{role} 9 ({9 * 31} tokens)" for role in ("actor", "reference", "critic"))
    assert f"\nforks, instead of prefills: {by_role}, reward 9 ({9 * 32} tokens)\n" in out and "OK" in out
    first = preview(load_config(TrainConfig, config, GROUPS), 1).round
    assert sorted(g.seq_id for replica in first.prefill["actor"] for batch in replica for g in batch) == [0, 4, 8]
    second = shown(capsys, str(config), *GROUPS)
    assert "forks" not in second and "filter" not in second, "all prompts are cached, and none is judged"
    apart = shown(capsys, str(config), "--round", "1", *GROUPS, "overlap.without=[fork]")
    assert "forks" not in apart and "OK" in apart


BY_RULE = ["rewards=[{kind: verifier, name: gsm8k}]", "reward=null"]
FILTERED = [*GROUPS, "algorithm.preset=dapo", "critic=null", "overlap.backfill=12"]


@pytest.mark.parametrize(("arguments", "judged"), [
    (["--round", "2"], "in this round (decode steps 7 to 12) is judged at step 24"),
    (["--round", "3"], "in this round (decode steps 13 to 18) is judged at step 36"),
    (["--round", "5"], "by decode step 20 is judged at step 36"),
    (["--round", "1", *BY_RULE], "in this round (decode steps 1 to 6) is judged at step 12"),
])  # fmt: skip
def test_a_filter_s_effect_is_told(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], judged: str) -> None:
    out = shown(capsys, str(config), *arguments, *FILTERED)
    assert "\n  no filter (every group is kept)\n" in out and judged in out
    assert "\na filter, which is not drawn, judges at multiples of 12 decode steps" in out
    lag = 0 if "reward=null" in arguments else 1
    assert re.findall(r"(\d) of them later:", out) == [str(lag)] * (lag > 0)


def test_rounds_end_where_prompts_may_enter(config: Path) -> None:
    changes = ["algorithm.preset=dr_grpo", "critic=null", "ppo.kl.mode=none", "overlap.chunk=5", "overlap.backfill=12"]
    loaded = load_config(TrainConfig, config, [*GROUPS, *changes])
    assert [preview(loaded, number).round.steps for number in range(1, 6)] == [5, 5, 2, 5, 3]


def test_scoring_waits_for_the_batch_where_intra_is_off(config: Path) -> None:
    loaded = load_config(TrainConfig, config, ["overlap.intra=false"])
    shows = [preview(loaded, number) for number in range(1, 6)]
    assert {each.generator for each in shows} == {"sequential"}
    assert [any(map(any, (each.round.prefill.get("critic", ())))) for each in shows] == [False, False, False, False, True]


@pytest.mark.parametrize("generator", GENERATORS)
def test_every_generator_can_be_asked_for(config: Path, capsys: pytest.CaptureFixture[str], generator: str) -> None:
    assert f"first step, {generator}\n" in shown(capsys, str(config), "--generator", generator)


def test_a_given_text_is_checked_and_its_fault_shown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = preview(load_config(TrainConfig, config), 2).schedule.text()
    assert parse_schedule(shown(capsys, str(config), "--text").split("\nround 2 of 5")[0]).text() == text
    for mark in ("", "\ufeff", "# an editor's lines end otherwise\r\n"):
        Path("same.txt").write_bytes((mark + text.replace("\n", "\r\n" if mark else "\n")).encode())
        assert "OK" in shown(capsys, str(config), "--from", "same.txt")
    Path("dropped.txt").write_text(text.replace("  send hidden critic m0 c1 -> 2\n", "", 1))
    out = shown(capsys, str(config), "--from", "dropped.txt", "--out", "g.png", code=2)
    assert "missing: rank 0 has no `send hidden critic m0 c1 -> 2`" in out and "\nstuck after " in out
    assert any("!" in line for line in out.splitlines() if line.startswith("rank 2")) and Path("g.png").is_file()
    Path("torn.txt").write_text(text[:-9])
    assert "torn.txt" in shown(capsys, str(config), "--from", "torn.txt", code=2)
    Path("torn.txt").write_bytes(b"\xff\xfe")
    assert "write it as UTF-8" in shown(capsys, str(config), "--from", "torn.txt", code=2)


PP4 = ("placement.actor.pp=4", "placement.actor.dp=1", "--round", "1")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_round_that_only_gloo_survives_is_refused(config: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    cold = name == "nccl-cold"
    out = shown(capsys, str(config), *PP4, "--transport", name, code=2 if cold else 0)
    assert f"\n  messages over {name}\n" in out and ("OK: the checker finds no fault" in out) != cold
    if cold:
        assert re.search(r"\n  - rank 0, action \d+, deadlock: rank 0 waits at `send hidden \w+ m0 c0 -> 1`", out)
        assert "the first use of its communicator, for which both ends have to come" in out
        assert any("!" in line for line in out.splitlines() if line.startswith("rank 0"))


def test_the_transport_is_the_run_s(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "messages over gloo\n" in shown(capsys, str(config), "runtime.device=cpu")
    assert "messages over nccl\n" in shown(capsys, str(config))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "messages over nccl-one-queue\n" in shown(capsys, str(config), "runtime.device=cuda")


HELD = (
    "placement.actor.dp=1", "rollout.batch_size=64", "rollout.max_response_tokens=64", "runtime.micro_batch_tokens=1024",
    "overlap.chunk=8", "overlap.delta.initial=8", "overlap.weave=[auto,auto]", "data.max_prompt_tokens=32",
)  # fmt: skip


def test_an_order_that_one_queue_would_hold_is_shown_as_the_run_changes_it(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for number, title in ((1, "woven\n"), (2, "woven; changed on ranks 0-1 for held sends\n")):
        out = shown(capsys, str(config), *HELD, "--round", str(number))
        assert f"round {number} of 9 of the first step, {title}" in out and "OK: the checker finds no fault" in out
    assert re.search(r"^rank 0 \|[CFR]0", out, re.MULTILINE), "scorers come first"
    named = shown(capsys, str(config), *HELD, "--round", "2", "--generator", "woven", code=2)
    assert "of the first step, woven\n" in named and "an awaited action must come before the wait for it" in named
    free = shown(capsys, str(config), *HELD, "--round", "2", "--transport", "nccl")
    assert "of the first step, woven\n" in free and "OK: the checker finds no fault" in free


def test_costs_from_a_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = {"decode": [1, 0.5], "prefill": {"critic": [2, 0], "reward": [[1, 0], [3, 0]]}, "message_s": 0}
    path = Path("costs.json")
    path.write_text(json.dumps(costs))
    prefill = {"critic": Linear(2, 0), "reward": (Linear(1, 0), Linear(3, 0))}
    assert read_costs(path, PLACES) == Costs(decode=Linear(1, 0.5), prefill=prefill, message_s=0)
    by_stage = Costs((Linear(1, 2), Linear(3, 4)), prefill={"critic": Linear(5, 6)}, sample=Linear(0.5, 0))
    path.write_text(json.dumps(costs_tree(by_stage)))
    assert read_costs(path, PLACES) == by_stage
    out = shown(capsys, str(config), "--costs", "costs.json")
    assert "\n  costs of costs.json\n" in out
    assert float(re.search(r"predicted: (\d+\.\d+) s", out)[1]) > 6 * 2 * 2.5  # a stage's steps: 2 micro-batches of 3


@pytest.mark.parametrize(("text", "says"), [
    ("{", "costs are JSON"), ("[]", "a JSON object"), ('{"decod": [1, 2]}', "`decod` is not a cost"),
    ('{"decode": 3}', "decode is 3; give two numbers"), ('{"decode": [1, -2]}', "give two numbers"),
    ('{"decode": [1, true]}', "give two numbers"), ('{"decode": []}', "decode is []; give two numbers"),
    ('{"decode": [[1, 2], [3]]}', "decode at stage 1 is [3]; give two numbers"),
    ('{"decode": [[1, 2]]}', "decode is of 1 stages, but the role has pp 2"),
    ('{"prefill": {"critic": [[1, 2], [1, 2], [1, 2]]}}', "prefill of critic is of 3 stages, but the role has pp 2"),
    ('{"sample": [[1, 2], [1, 2]]}', "sample is [[1, 2], [1, 2]]; give two numbers"),
    ('{"prefill": [1, 2]}', "a pair for each role"), ('{"prefill": {"critic": [1]}}', "prefill of critic is [1]"),
    ('{"message_s": NaN}', "message_s is nan"),
])  # fmt: skip
def test_wrong_costs_are_refused(config: Path, text: str, says: str) -> None:
    Path("costs.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)costs\.json.*{re.escape(says)}"):
        read_costs(Path("costs.json"), PLACES)


@pytest.mark.parametrize(("arguments", "says"), [
    (["--round", "6"], "the first step has rounds 1 to 5"), (["--round", "0"], "the first step has rounds 1 to 5"),
    (["--prompt-tokens", "65"], "1 to data.max_prompt_tokens = 64"), (["--prompt-tokens", "0"], "prompts of 0 tokens"),
    (["--from", "nowhere.txt"], "nowhere.txt"), (["rollout.batch_sise=3"], "batch_size"),
])  # fmt: skip
def test_wrong_input_ends_with_2(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in refused(capsys, "plan", "schedule", config, *arguments)


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("name", EXAMPLES)
def test_shipped_examples_are_drawn(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)  # without their files
    assert "OK: the checker finds no fault" in shown(capsys, name)


def test_a_mode_that_needs_the_models_says_so(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = [f"{role}.{start}" for role in ("actor", "critic", "reward") for start in ("init=null", "checkpoint=nowhere")]
    assert "nowhere" in shown(capsys, str(config), *without, "runtime.kv_cache_mb=0.3", code=2)
    assert "OK: the checker" in shown(capsys, str(config), *without)


def test_a_small_cache_bounds_what_runs_at_once(config: Path) -> None:
    """64 + 20 tokens a slot, 2 layers, keys and values of 64 in float32: 86,016 bytes; 0.3 MB holds three."""
    first = preview(load_config(TrainConfig, config, ["runtime.kv_cache_mb=0.3", "overlap.chunk=20"]), 1)
    assert first.budgets["actor"][0].slots == 3 and [sum(map(len, replica)) for replica in first.round.decode] == [3, 3]
