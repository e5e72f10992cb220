"""The NeMo-Aligner plugin without nemo: importing it, its configuration, the pool of rollouts and the sidecar."""

import importlib.util
import json
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from oppo_megatron.config.aligner import read_aligner_config
from oppo_megatron.errors import CheckpointError, ConfigError, OppoError
from oppo_megatron.integrations.nemo_aligner.pool import Pool, Row, room, share_of
from oppo_megatron.integrations.nemo_aligner.sidecar import Kept, Sidecar, folder_next_to, name_of, stamps_of
from oppo_megatron.rundir.manifest import list_files, seal, write_manifest


@pytest.mark.skipif(importlib.util.find_spec("nemo_aligner") is not None, reason="nemo_aligner is installed")
def test_without_nemo_the_import_of_the_trainer_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="No module named 'nemo.*install nemo-aligner 0.7 and nemo-toolkit 2.1 to 2.4"):
        from oppo_megatron.integrations.nemo_aligner import PPOTrainer  # noqa: F401


def test_the_block_is_read_strictly_and_the_example_is_one() -> None:
    assert read_aligner_config({}).delta.rule == "eq4" and read_aligner_config({}).scorer is None
    for unasked in ({}, {"delta": {}}, {"delta": {"window": 3}, "chunk": 64}):
        delta = read_aligner_config(unasked).delta
        assert (delta.initial, delta.max) == (0, 0), "nothing is deferred until that is asked for"
    for wrong, said in (
        ({"chunk": 0}, "trainer.ppo.oppo: .*chunk"), ({"delta": {"initial": 4, "max": 2}}, "initial 4 is above max 2"),
        ({"scorer": {"url": "somewhere:80"}}, "url"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            read_aligner_config(wrong)
    folder = Path(__file__).resolve().parents[2] / "examples" / "nemo_aligner"
    added = [line[1:] for line in (folder / "gpt_ppo_actor.yaml.diff").read_text().splitlines() if line[:1] == "+"]
    shown = read_aligner_config(yaml.safe_load(textwrap.dedent("\n".join(added[2:])))["oppo"])
    assert shown.scorer.url == "http://127.0.0.1:8901" and shown.delta.max == 64
    script = (folder / "train_gpt_ppo_actor.py.diff").read_text().splitlines()
    assert "+from oppo_megatron.integrations.nemo_aligner import PPOTrainer" in script


@given(
    steps=st.lists(st.tuples(st.integers(0, 6), st.randoms(use_true_random=False)), min_size=1, max_size=8),
    width=st.integers(1, 3), max_staleness=st.integers(1, 3),
)  # fmt: skip
def test_a_step_trains_its_batch_and_leaves_the_rest(steps: list[tuple[int, object]], width: int, max_staleness: int) -> None:
    pool, batch, trained, drawn = Pool(max_staleness), 2 * width, [], 0
    for step, (delta, chance) in enumerate(steps):
        new = max(0, batch + min(delta, batch) - len(pool))
        pool.admit([[drawn + i] for i in range(new)])
        drawn += new
        pool.begin(batch, width)
        for _ in range(batch // width):
            while pool.num_ready < width:
                wave = pool.next_wave()
                assert 1 <= len(wave.rows) <= width
                running = list(range(len(wave.rows)))
                chance.shuffle(running)
                ended: list[int] = []
                while not wave.enough(running):
                    ended.append(running.pop())
                for place, row in enumerate(wave.rows):
                    row.grow([*row.tokens, 1], step, finished=place in ended)
                pool.decoded(wave, [ended.index(i) if i in ended else 99 for i in range(len(wave.rows))])
            taken = pool.take(width)
            assert all(row.finished for row in taken) and len(taken) == width
            trained += [row.prompt[0] for row in taken]
        pool.end()
        assert len(pool) == drawn - len(trained)
        assert all(row.deferrals <= max_staleness for row in pool.rows if not row.finished)
    assert sorted(trained + [row.prompt[0] for row in pool.rows]) == list(range(drawn))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8, 64])
def test_parts_of_delta_sum_to_it_and_lie_far_apart(replicas: int) -> None:
    for delta in range(2 * replicas + 3):
        parts = [share_of(delta, replica, replicas) for replica in range(replicas)]
        assert sum(parts) == delta and max(parts) - min(parts) <= 1
        for first in range(0, replicas, 8):  # a machine of eight has what its size asks for, give or take one
            here = parts[first : first + 8]
            assert abs(sum(here) - delta * len(here) / replicas) < 1


def test_rows_and_the_room_for_them() -> None:
    assert [room(drawn, 32, 8) for drawn in (0, 8, 24, 32, 40)] == [32, 24, 8, 32, 24]
    row = Row(0, [5, 6])
    row.grow([1, 2], policy=3, finished=False)
    row.grow([1, 2, 4], policy=5, finished=True)
    assert row.versions == [(3, 2), (5, 1)] and row.stale_tokens(5) == 2 and row.context == [5, 6, 1, 2, 4]


ROWS = [Row(7, [3, 4], [5], [(0, 1)], 2), Row(9, [2**40], [], [], 0), Row(11, [1, 2, 3], [4, 5], [(0, 1), (1, 1)], 1, True)]


def sidecar(folder: Path, replicas: int = 1) -> Sidecar:
    def alone(error: Exception | None, kind: type[OppoError]) -> None:
        if error is not None:
            raise error

    return Sidecar(folder_next_to(folder / "checkpoints"), 0, replicas, writes=True, leads=True, agree=alone)


def test_a_sidecar_gives_back_what_was_written(tmp_path: Path) -> None:
    kept = Kept(ROWS, 12, {"delta": {"rule": "eq4", "value": 3, "rewards": [0.5]}})
    assert sidecar(tmp_path).read(4) is None, "checkpoints of NeMo-Aligner's own"
    for step in (4, 6, 6):
        sidecar(tmp_path).write(step, kept)
    assert sidecar(tmp_path).read(6) == kept
    sidecar(tmp_path).write(8, Kept([], 0, {}))
    assert sidecar(tmp_path).read(8) == Kept([], 0, {})
    suffixes = sorted(path.suffix for path in (tmp_path / "checkpoints-oppo" / "step-000006").iterdir())
    assert suffixes == [".json", ".jsonl", ".safetensors"]


def test_a_sidecar_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    sidecar(tmp_path).write(4, Kept(ROWS, 12, {}))
    with pytest.raises(CheckpointError, match="no rows of step 5, only of 4"):
        sidecar(tmp_path).read(5)
    with pytest.raises(CheckpointError, match="rows of 1 data-parallel replicas, but there are 2"):
        sidecar(tmp_path, replicas=2).read(4)
    rows = tmp_path / "checkpoints-oppo" / "step-000004" / "replica-00000.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([lines[0], json.dumps({**json.loads(lines[1]), "prompt": 1}), *lines[2:]]))
    with pytest.raises(CheckpointError, match="replica-00000.jsonl"):
        sidecar(tmp_path).read(4)


NAME = "megatron_gpt-step={}-consumed_samples=64-ppo_optimization_step={}-epoch=0-val_rewards=1.5"


def test_steps_are_read_from_the_names_of_nemos_checkpoints(tmp_path: Path) -> None:
    wheres = ("{}", "{}.ckpt", "mp_rank_00/{}.ckpt", "tp_rank_00_pp_rank_001/{}.ckpt", "{}-last", "{}-unfinished")
    for number, where in enumerate(wheres):
        folder = tmp_path / str(number)
        path = folder / where.format(NAME.format(12, 48))
        path.mkdir(parents=True)
        (folder / "megatron_gpt.nemo").touch()
        assert list(stamps_of(folder, 12)) == [name_of(path)] and not stamps_of(folder, 48)


def test_rows_go_with_their_checkpoint_if_its_name_has_a_step(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "epoch=0-last").mkdir(parents=True)
    for step in (2, 4):
        sidecar(tmp_path).write(step, Kept(ROWS, 12, {}))
    sidecar(tmp_path).prune(checkpoints, 4)
    assert len(list((tmp_path / "checkpoints-oppo").iterdir())) == 2
    for step in (2, 6):
        (checkpoints / NAME.format(step, step)).mkdir(parents=True)
    for step in (2, 4, 6, 8):
        sidecar(tmp_path).write(step, Kept(ROWS, 12, {}))
    assert len(list(checkpoints.iterdir())) == 3, "nothing is among NeMo's checkpoints"
    sidecar(tmp_path).prune(checkpoints, 8)  # its checkpoint is still being written
    kept = sorted(path.name for path in (tmp_path / "checkpoints-oppo").iterdir())
    assert kept == ["step-000002", "step-000006", "step-000008"]


def test_a_failing_disk_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    sidecar(tmp_path).write(2, Kept(ROWS, 12, {}))
    folder = tmp_path / "checkpoints-oppo" / "step-000002"
    (folder / "replica-00000.safetensors").write_bytes(b"no tensors")
    write_manifest(folder, seal(folder, list_files(folder)))
    with pytest.raises(CheckpointError, match="replica-00000: not what was written"):
        sidecar(tmp_path).read(2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints-oppo").write_text("a file in place of the folder")
    with pytest.raises(CheckpointError, match="checkpoints-oppo.*see to the disk"):
        sidecar(tmp_path / "other").write(2, Kept(ROWS, 12, {}))
    monkeypatch.setattr("oppo_megatron.integrations.nemo_aligner.sidecar.save_file", fill)
    with pytest.raises(CheckpointError, match="No space left on device.*see to the disk"):
        sidecar(tmp_path).write(2, Kept(ROWS, 12, {}))


def test_rows_are_of_the_checkpoint_that_was_written_after_them(tmp_path: Path) -> None:
    checkpoints, name = tmp_path / "checkpoints", NAME.format(4, 16)
    part = checkpoints / "mp_rank_00" / f"{name}.ckpt"
    part.parent.mkdir(parents=True)
    part.touch()
    (checkpoints / f"{name}-last").mkdir()
    (checkpoints / NAME.format(6, 16)).mkdir()
    before = stamps_of(checkpoints, 4)
    assert set(before) == {name, f"{name}-last"} and name_of(part) == name
    sidecar(tmp_path).write(4, Kept(ROWS, 12, {}, frozenset(before)))
    with pytest.raises(CheckpointError, match=f"the rows of another checkpoint of step 4, saved later than {name};"):
        sidecar(tmp_path).read(4, name)
    for later in (f"{name}-v1", None):
        assert sidecar(tmp_path).read(4, later).rows == ROWS
    (checkpoints / f"{name}-last" / "weights").touch()
    assert [key for key, stamp in stamps_of(checkpoints, 4).items() if before[key] != stamp] == [f"{name}-last"]
