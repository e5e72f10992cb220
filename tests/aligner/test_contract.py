"""The plugin against the real NeMo-Aligner: its `PPOTrainer` and our subclass on the same model (`make test-aligner`)."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("nemo_aligner") is None:
    pytest.skip("needs nemo_aligner, in an environment of its own: make test-aligner", allow_module_level=True)

import torch

from oppo_megatron.cli.main import main
from tests.aligner.job import Job
from tests.support.hf import SIZES, save_tiny
from tests.support.ranks import run_ranks

NO_DELTA = {"delta": {"rule": "fixed", "initial": 0, "max": 0}}
DELTA = {"delta": {"rule": "fixed", "initial": 4, "max": 8}, "chunk": 4}
EVERY = list(range(32))
EOS = 1


def run(job: Job, world: int = 1, entry: str = "run") -> list[dict[str, Any]]:
    return run_ranks(world, f"tests.aligner.jobs:{entry}", timeout_s=400.0, job=job)


def trained(results: list[dict[str, Any]], steps: slice = slice(None)) -> list[int]:
    return sorted(prompt for result in results for batch in result["trained"][steps] for prompt in batch)


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["trained"] == other["trained"] and mine["optim"] == other["optim"]
        assert all(torch.equal(mine["weights"][name], other["weights"][name]) for name in other["weights"])
        assert mine["draw"] == other["draw"], "as many random numbers were drawn"
        for a, b in zip(mine["rollouts"] + mine["validation"], other["rollouts"] + other["validation"], strict=True):
            assert {name: a[name] for name in b} == b


Runs = Callable[[int], list[dict[str, Any]]]
Saved = Callable[[int], tuple[Job, list[dict[str, Any]]]]
PLAIN = Job(val_every=2, warmup=1, save_every=2)
EACH = {"chunk": 1}  # so that rows are streamed up to the limit of the longest
CARRYING = Job(oppo=DELTA | EACH, val_every=2)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return cache(lambda world: run(replace(PLAIN, folder=tmp_path_factory.mktemp("theirs")), world))


@pytest.fixture(scope="module")
def carrying() -> list[dict[str, Any]]:
    return run(CARRYING)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def made(world: int) -> tuple[Job, list[dict[str, Any]]]:
        job = Job(oppo=DELTA, greedy=True, save_every=1, folder=tmp_path_factory.mktemp("saved"))
        return job, run(job, world)

    return made


def test_the_changed_import_alone_changes_nothing(theirs: Runs, tmp_path: Path) -> None:
    ours, other = run(replace(PLAIN, oppo={}, folder=tmp_path)), theirs(1)
    same(ours, other)
    assert ours[0]["inferred"] == other[0]["inferred"], "the model's own infer is what generates"
    for a, b in zip(ours[0]["rollouts"], other[0]["rollouts"], strict=True):
        assert a.keys() == b.keys(), "nothing more is logged"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"], "nothing more is written"
    assert run_ranks(1, "tests.aligner.jobs:untouched", job=Job(oppo={})) == [[True, True, True]]
    assert run_ranks(1, "tests.aligner.jobs:refusal", job=Job(oppo={}), model="has no cfg.ppo") == ["taken"]


def test_without_delta_training_is_nemo_aligners(theirs: Runs, tmp_path: Path) -> None:
    ours, other = run(replace(PLAIN, oppo=NO_DELTA, folder=tmp_path), 2), theirs(2)
    same(ours, other)
    assert [result["inferred"] for result in ours] == [result["inferred"] for result in other]


def once(results: list[dict[str, Any]], deferred: list[int]) -> None:
    """Every prompt is trained once, and nothing stands behind the end of an answer."""
    assert trained(results) == EVERY
    rollouts = results[0]["rollouts"]
    assert [row["oppo_deferred"] for row in rollouts] == deferred, "the epoch's end drains the pool"
    assert any(row["oppo_stale_tokens"] > 0 for row in rollouts)
    assert results[0]["step"] == 4 and results[0]["consumed"] == 32
    assert all(ends in ([], [-1]) for result in results for ends in result["endings"])


def test_with_delta_every_prompt_is_trained_once(carrying: list[dict[str, Any]]) -> None:
    once(carrying, [4, 4, 4, 0])


def test_a_delta_that_replicas_do_not_divide_is_drawn_whole() -> None:
    uneven = {"delta": {"rule": "fixed", "initial": 3, "max": 8}}
    once(run(Job(oppo=DELTA | uneven), 2), [3, 3, 3, 0])


def test_a_wave_ends_when_all_of_its_rows_have_begun() -> None:
    ((early, late),) = run_ranks(1, "tests.aligner.jobs:rows_left", job=Job(greedy=True))
    assert EOS not in early[:-1] and len(early) > 6, "not filled with NeMo's end until the longest context is reached"
    assert len(late) > 8


def test_each_epoch_has_every_prompt_once() -> None:
    results = run(Job(oppo=DELTA, epochs=2))
    assert trained(results, slice(0, 4)) == EVERY and trained(results, slice(4, 8)) == EVERY


def test_a_longer_answer_is_waited_for_in_the_end() -> None:
    results = run(Job(oppo=DELTA | {"max_staleness": 1}))
    assert trained(results) == EVERY
    assert max(row["oppo_max_staleness"] for row in results[0]["rollouts"]) == 1


@pytest.mark.long
def test_validation_leaves_the_pool_alone(saved: Saved) -> None:
    job, (plain,) = saved(1)
    validated = run(replace(job, val_every=1, save_every=0))[0]
    assert plain["trained"] == validated["trained"]
    assert len(validated["validation"]) == 4 and validated["validation"][0]["rollout_size"] == 8


def test_a_run_without_checkpoints_saves_nothing(tmp_path: Path) -> None:
    result = run(Job(oppo=DELTA, save_every=1, stop_after=1, checkpoints=False, folder=tmp_path))[0]
    assert result["step"] == 1 and not list(tmp_path.iterdir())
    (said,) = run_ranks(1, "tests.aligner.jobs:told", job=Job(oppo=DELTA), ckpt_callback=SimpleNamespace())
    assert "the checkpoint callback SimpleNamespace has no dirpath, so deferred rollouts are not kept" in said


@pytest.mark.long
def test_the_critics_warm_up_gives_its_rollouts_back() -> None:
    result = run(Job(oppo=DELTA, warmup=2))[0]
    warm, steps = result["trained"][:2], result["trained"][2:]
    assert len(warm) == 2 and len(steps) == 4
    later = [prompt for batch in steps[1:] for prompt in batch]
    # NeMo-Aligner goes back to one batch of consumed prompts: the other 24 come, once each, none from before the rewind.
    assert len(later) == len(set(later)) == 24
    unrewound = run(Job(warmup=2))[0]["trained"][3:]
    assert sorted(later) == sorted(prompt for batch in unrewound for prompt in batch)


@pytest.mark.parametrize("world", [1, 2])
def test_deferred_rows_survive_a_resume(world: int, saved: Saved, tmp_path: Path) -> None:
    job, whole = saved(world)
    assert whole[0]["rollouts"][1]["oppo_deferred"] == 4
    linked = tmp_path / "linked" / "checkpoints"
    linked.mkdir(parents=True)
    for checkpoint in (job.folder / "checkpoints").iterdir():
        (linked / checkpoint.name).symlink_to(checkpoint)
    resume = replace(job, resume=2, resume_from=linked.parent, folder=tmp_path)  # into a log folder of its own
    resumed = run(resume, world)
    assert sorted(trained(whole, slice(0, 2)) + trained(resumed)) == EVERY
    for before, after in zip(whole, resumed, strict=True):
        assert before["trained"][2:] == after["trained"]
        assert all(torch.equal(before["weights"][name], after["weights"][name]) for name in before["weights"])
    other = replace(resume, oppo=DELTA | {"delta": {"rule": "eq4", "initial": 4, "max": 8}})
    for text in refused(other, world):
        assert "trainer.ppo.oppo.delta.rule is eq4, but the checkpoint's run has fixed" in text
    for text in refused(replace(resume, resume=4), 3 - world):
        assert text.startswith("CheckpointError") and f"rows of {world} data-parallel replicas, but there are {3 - world}" in text


def test_a_run_that_defers_no_more_drains_its_pool(saved: Saved, tmp_path: Path) -> None:
    job, whole = saved(1)
    resume = replace(job, resume=2, resume_from=job.folder, folder=tmp_path, oppo={}, save_every=0)
    drained = run(resume)
    assert sorted(trained(whole, slice(0, 2)) + trained(drained)) == EVERY
    assert [row["oppo_deferred"] for row in drained[0]["rollouts"]] == [0, 0]
    (text,) = refused(replace(resume, trt_llm=True), 1)
    assert "deferred 4 rollouts of this replica" in text and "trainer.ppo.trt_llm.enable is true" in text


def refused(job: Job, world: int) -> list[str]:
    return run_ranks(world, "tests.aligner.jobs:told", job=job)


def test_sidecars_live_and_die_with_nemos_checkpoints(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved(2)[0].folder, tmp_path, dirs_exist_ok=True)
    job = replace(saved(2)[0], folder=tmp_path)
    rows = tmp_path / "checkpoints-oppo"
    assert sorted(path.name for path in rows.iterdir()) == ["step-000001", "step-000002", "step-000004"]
    ((ranked, listed),) = run_ranks(1, "tests.aligner.jobs:topk_of_next_run", job=job)
    assert [name.split("-")[1] for name in ranked] == [name.split("-")[1] for name in listed] == ["step=1", "step=2"]
    spoiled = next((rows / "step-000002").glob("replica-00001.safetensors"))
    spoiled.write_bytes(spoiled.read_bytes()[:-1])
    for text in refused(replace(job, resume=2), 2):
        assert text.startswith("CheckpointError") and "replica-00001.safetensors" in text
    (rows / "step-000002").rename(rows / "step-000003")
    for text in refused(replace(job, resume=2), 2):
        assert text.startswith("CheckpointError") and "no rows of step 2, only of 1, 3, 4" in text
    rows.rename(tmp_path / "elsewhere")
    for text in refused(replace(job, resume=2), 2):
        assert "checkpoints-oppo does not exist: no deferred rollouts are carried into this run" in text


def test_rows_of_a_checkpoint_are_not_taken_for_those_of_a_later_one_of_its_step(saved: Saved, tmp_path: Path) -> None:
    """A run goes back to step 2 and saves in the same folder again: step 4 is there twice."""
    shutil.copytree(saved(1)[0].folder, tmp_path, dirs_exist_ok=True)
    job, checkpoints = replace(saved(1)[0], folder=tmp_path), tmp_path / "checkpoints"
    (one,) = checkpoints.glob("*-step=4-*")
    run(replace(job, resume=2))
    later = [path.rename(tmp_path / path.name) for path in checkpoints.glob("*-step=4-*") if path != one]
    assert later
    (said,) = refused(replace(job, resume=4), 1)
    assert said.startswith("CheckpointError") and f"another checkpoint of step 4, saved later than {one.name};" in said
    one.rename(tmp_path / "the-earlier-one")
    later[0].rename(checkpoints / later[0].name)
    (said,) = refused(replace(job, resume=4), 1)
    assert said.startswith("taken")


@pytest.mark.parametrize("model", ["Sorting", "Choosing", "Twice", "Elsewhere"])
def test_rewards_are_of_what_the_models_own_infer_gives(model: str) -> None:
    job = Job(prompts=16, model=model)
    theirs, streamed = run(job), run(replace(job, oppo=EACH), entry="run_streamed")
    same(streamed, theirs)
    assert streamed[0]["inferred"] == theirs[0]["inferred"] > 0
    assert sum(final for *_, final in streamed[0]["pieces"]) >= 16
    (told,) = run_ranks(1, "tests.aligner.jobs:told", job=replace(job, oppo=DELTA))
    assert f"{model}.infer is not NeMo-Aligner's" in told and "set trainer.ppo.oppo.delta.max to 0" in told


def check_streamed(streamed: list[dict[str, Any]], num_rows: int) -> None:
    pieces = [piece for result in streamed for piece in result["pieces"]]
    lengths = sum(length for result in streamed for length in result["lengths"].values())
    assert sum(count for _, count, _ in pieces) == lengths, "every token is sent once"
    assert sum(final for *_, final in pieces) == num_rows
    assert len(pieces) > 1.5 * num_rows, "most were begun before they were whole"


def test_rewards_that_are_streamed_are_those_of_whole_sequences(theirs: Runs, tmp_path: Path) -> None:
    job = replace(PLAIN, oppo=NO_DELTA | EACH, folder=tmp_path)
    streamed = run(job, entry="run_streamed")
    same(streamed, theirs(1))
    check_streamed(streamed, 40 + 2 * 8)
    assert streamed[0]["inferred"] == theirs(1)[0]["inferred"]


def test_rewards_of_deferred_rows_are_those_of_whole_sequences(carrying: list[dict[str, Any]]) -> None:
    streamed = run(CARRYING, entry="run_streamed")
    same(streamed, carrying)
    check_streamed(streamed, 32 + 2 * 8)


def test_the_last_pipeline_stage_streams_while_it_draws() -> None:
    first, last = run(Job(oppo=DELTA, pp=2), 2, entry="run_streamed")
    assert trained([last]) == EVERY and first["trained"] == last["trained"]
    assert not first["pieces"]
    check_streamed([last], 32)
    means = [sum(first["rewards"][i : i + 8]) / 8 for i in range(0, 32, 8)]
    assert [row["rewards"] for row in first["rollouts"]] == pytest.approx(means)


@pytest.mark.long
def test_the_first_tensor_rank_of_the_last_stage_streams() -> None:
    job = Job(prompts=8, tp=2, pp=2)
    theirs, ours = run(job, 4), run(replace(job, oppo=NO_DELTA | EACH), 4, entry="run_streamed")
    same(ours, theirs)
    assert [bool(rank["pieces"]) for rank in ours] == [False, False, True, False]
    check_streamed([ours[2]], 8)


@pytest.mark.long
def test_a_scorer_that_fails_one_replica_ends_all_of_them() -> None:
    """The last stage of the second one feeds it."""
    job, bad = Job(oppo=DELTA, pp=2), 3
    *others, mine = run_ranks(4, "tests.aligner.jobs:run_refused", timeout_s=400.0, job=job, rank=bad)
    assert mine.startswith("RewardError: the scorer at") and "answered 401" in mine
    assert all(other.startswith(f"RewardError: rank {bad}: the scorer at") for other in others)
    assert all("answered 401" in other for other in others)


def test_what_generates_without_a_break_is_refused() -> None:
    job = Job(oppo=DELTA)
    for changed, changes, words in (
        (job, {"trt_llm.enable": True}, ("trainer.ppo.trt_llm.enable is true", "set it to false")),
        (replace(job, oppo={}), {"trt_llm.enable": True}, ("taken",)),  # what generates there is the model's own affair
        (job, {"batch_iterator_cls": dict}, ("the batch iterator is dict", "use_flask")),
        (replace(job, oppo={"delta": {"max": 9}}), {}, ("delta.max 9 is more than the batch of 8",)),
        (replace(job, oppo={"dleta": {}}), {}, ("ConfigError", "dleta", "delta")),
        (job, {"oppo": 5}, ("trainer.ppo.oppo is 5, but must be a section of keys",)),
        (job, {}, ("taken",)),
    ):
        (said,) = run_ranks(1, "tests.aligner.jobs:refusal", job=changed, **changes)
        assert said == "taken" if words == ("taken",) else all(each in said for each in words), said


def test_a_disk_that_fails_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "checkpoints-oppo").write_text("a file where the folder is to be")
    job = Job(oppo=DELTA, save_every=1, stop_after=1, folder=tmp_path)
    mine, other = run_ranks(2, "tests.aligner.jobs:run_failing", timeout_s=400.0, job=job)
    assert mine.startswith("CheckpointError") and "checkpoints-oppo" in mine
    assert other.startswith("CheckpointError: rank 0: ") and "see to the disk" in other


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_reward_model_has_all_that_nemo_aligners_asks_for(tied: bool, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama", "scalar", tie_word_embeddings=tied)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "nemo"), "--to", "nemo", "--as", "reward"]) == 0
    (found,) = run_ranks(
        1, "tests.aligner.jobs:load_reward_model", weights=str(tmp_path / "nemo" / "model_weights"), sizes=SIZES, tied=tied
    )  # fmt: skip
    assert torch.equal(found["model.rm_head.weight"], model.score.weight)
    assert torch.equal(found["model.embedding.word_embeddings.weight"], model.model.embed_tokens.weight)
