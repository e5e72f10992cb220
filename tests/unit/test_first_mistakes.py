"""Mistakes before a run: `oppo validate` and `oppo train` refuse them in the same words, with a remedy."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from pytest import CaptureFixture, MonkeyPatch

from oppo_megatron.cli import validate
from oppo_megatron.cli.main import main
from oppo_megatron.cli.measure import check_devices
from oppo_megatron.cli.ready import on_one_rank
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.placements import world_size
from tests.support.commands import SHAPE, work_in
from tests.support.processes import own_lines

ROOT = Path(__file__).parents[2]
TRAIN = {
    "run_dir": "run", "tokenizer": {"path": "t.model"}, "placement": {"mode": "single"},
    "data": {"path": "rows.jsonl", "max_prompt_tokens": 40}, "actor": {"init": SHAPE}, "critic": {"init": SHAPE},
    "rewards": [{"kind": "verifier", "name": "arithmetic"}], "rollout": {"batch_size": 8, "max_response_tokens": 20},
    "runtime": {"device": "cpu"},
}  # fmt: skip
SFT = {
    "run_dir": "run", "tokenizer": {"path": "t.model"}, "data": {"path": "rows.jsonl"}, "model": {"init": SHAPE},
    "max_tokens": 64, "runtime": {"device": "cpu"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    work_in(tmp_path, monkeypatch, vocabulary=True)
    (tmp_path / "rows.jsonl").write_text((json.dumps({"prompt": "1+1=", "answer": "2", "completion": "it is 2"}) + "\n") * 8)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAIN))
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT))
    return tmp_path


def refused(capsys: CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said, said
    return said


def both_refuse(capsys: CaptureFixture[str], *arguments: str) -> str:
    said = refused(capsys, "validate", *arguments)
    assert refused(capsys, "train", *arguments).partition(":")[2] == said.partition(":")[2]
    return said


def test_a_run_directory_that_cannot_be_used(folder: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    assert main(["validate", "train.yaml"]) == 0 and main(["validate", "sft.yaml"]) == 0, "what is right is taken"
    assert "rows.jsonl" in both_refuse(capsys, "train.yaml", "run_dir=rows.jsonl/run")
    assert "is a file, but must be a folder" in both_refuse(capsys, "train.yaml", "run_dir=rows.jsonl")
    (folder / "run").mkdir()
    (folder / "run" / "summary.json").write_text("{}")
    assert "holds a finished run" in both_refuse(capsys, "train.yaml")
    assert "holds a finished run" in refused(capsys, "validate", "sft.yaml")
    assert "holds a finished run" in refused(capsys, "sft", "sft.yaml")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser has all rights
    assert "choose a folder that you may write" in both_refuse(capsys, "train.yaml", "run_dir=other")


def test_more_ranks_than_devices(folder: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.cli.measure.cuda_devices", lambda: 0)
    assert "torch finds no CUDA device here; set runtime.device=cpu" in both_refuse(capsys, "train.yaml", "runtime.device=cuda")
    monkeypatch.setattr("oppo_megatron.cli.measure.has_cuda", lambda: True)
    monkeypatch.setattr("oppo_megatron.cli.measure.cuda_devices", lambda: 1)
    asked = ["runtime.device=auto", "placement.mode=colocated", "placement.actor.dp=2"]
    said = both_refuse(capsys, "train.yaml", *asked)
    assert "2 ranks would be started, but this host has one CUDA device" in said and "starting" not in said
    remedy = re.findall(r"[\w.]+=\w+", said.partition("; set ")[2])
    assert remedy == ["placement.mode=single", "placement.actor.dp=1", "runtime.device=cpu"]
    assert main(["validate", "train.yaml", *asked, *remedy[:-1]]) == 0
    assert main(["validate", "train.yaml", *asked, remedy[-1]]) == 0
    said = refused(capsys, "validate", "sft.yaml", "runtime.device=auto", "parallel.dp=2", "batch_size=8")
    assert "set parallel.dp=1, or runtime.device=cpu" in said
    assert main(["validate", "sft.yaml", "runtime.device=auto"]) == 0


@pytest.mark.parametrize("layout", [
    ["placement.actor.dp=2", "actor.train.ep=2"], ["placement.actor.dp=2", "actor.train.cp=2"],
    ["placement.actor.tp=2", "actor.train.sequence_parallel=true"],
], ids=str)  # fmt: skip
def test_the_remedy_of_one_device_fits_each_layout_of_an_update(folder: Path, layout: list[str]) -> None:
    shape = ["model_type=mixtral", "num_local_experts=4", "num_key_value_heads=2"]
    asked = ["placement.mode=colocated", *(f"actor.init.{each}" for each in shape), *layout]
    remedy = on_one_rank(load_config(TrainConfig, folder / "train.yaml", asked)).split()
    assert main(["validate", "train.yaml", *asked]) == main(["validate", "train.yaml", *asked, *remedy]) == 0
    assert world_size(load_config(TrainConfig, folder / "train.yaml", [*asked, *remedy])) == 1


def test_more_ranks_than_several_devices(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.cli.measure.has_cuda", lambda: True)
    monkeypatch.setattr("oppo_megatron.cli.measure.cuda_devices", lambda: 2)
    check_devices("auto", 2, "")
    check_devices("cpu", 9, "")
    with pytest.raises(ConfigError, match="3 ranks .* has 2 CUDA devices, .* a placement of at most 2 ranks .on one: a=1"):
        check_devices("auto", 3, "a=1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_devices("cuda", 4, "")  # a launcher may show each rank a device of its own


PLACED = sorted(path for path in ROOT.glob("examples/*/*.yaml") if "placement:" in path.read_text())


@pytest.mark.parametrize("file", [path for path in PLACED if path.parent.name != "recipes"])  # those name their GPUs
def test_examples_run_on_one_device(file: Path) -> None:
    config = load_config(TrainConfig, file)
    alone = load_config(TrainConfig, file, on_one_rank(config).split(), check=lambda found: check_layouts(found, {}))
    assert world_size(alone) == 1
    assert f"# one GPU: {on_one_rank(config)}\n" in file.read_text()


def test_a_package_that_is_not_installed(folder: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    asked = ["logging.trackers=[wandb:p]", "run_dir=taken"]
    (folder / "taken").mkdir()
    (folder / "taken" / "summary.json").write_text("{}")
    said = both_refuse(capsys, "train.yaml", *asked)
    assert "pip install wandb" in said and "holds a finished run" in said  # all at once
    assert "pip install tensorboard" in refused(capsys, "validate", "sft.yaml", "logging.trackers=[tensorboard]")


def test_a_service_without_its_packages(folder: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.cli.ready.SERVICE_PACKAGES", {"no-such-package": ("no_such_package:Server",)})
    monkeypatch.setattr(validate, "load_service", lambda *_: SimpleNamespace(host="h", port=1, token_env=None))
    monkeypatch.setattr("oppo_megatron.cli.serve.load_service", lambda *_: None)
    (folder / "s.yaml").write_text("port: 1\n")
    for said in (refused(capsys, "validate", "s.yaml", "--kind", "serve"), refused(capsys, "serve", "s.yaml")):
        assert "but no-such-package is not installed;" in said
        assert "pip install 'oppo-megatron[serve]'" in said and "pip install '.[serve]'" in said


def test_too_little_space_and_memory(folder: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.rundir.directory.free_bytes", lambda _: 2**20)
    assert "1.0 MB are free on its disk, but the run writes at least about" in both_refuse(capsys, "train.yaml")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert main(["validate", "train.yaml", "rewards=[{kind: http, url: 'http://127.0.0.1:9/score'}]"]) == 0
    assert "127.0.0.1:9 takes no connection now" in capsys.readouterr().out, "a service that is not there is a warning"
    monkeypatch.setattr("oppo_megatron.cli.ready.host_bytes", lambda: 2**10)
    assert "of memory: the run's `--dry-run` shows what takes it" in both_refuse(capsys, "train.yaml")


def test_overrides_count_for_the_kind_of_a_file(folder: Path) -> None:
    assert validate.guess_kind(folder / "sft.yaml") == "sft"
    assert validate.guess_kind(folder / "sft.yaml", ["data.columns.chosen=best"]) == "rm"
    (folder / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    (folder / "pairs.jsonl.gz").write_bytes(gzip.compress((folder / "pairs.jsonl").read_bytes()))
    for name in ("pairs.jsonl", "pairs.jsonl.gz"):
        assert validate.guess_kind(folder / "sft.yaml", [f"data.path={folder / name}"]) == "rm"
    assert validate.guess_kind(folder / "sft.yaml", [f"data.path={folder / 'pairs.jsonl'}", "data.turns=all"]) == "sft"


@pytest.mark.parametrize(("text", "remedy"), [
    (b"steps: 1\n\tseed: 2\n", "YAML takes no tabs"), (b"seed: 1\nseed: 2\n", "given twice in one section"),
    ("run_dir: caf\u00e9\n".encode("latin1"), "iconv -f LATIN1 -t UTF-8 c.yaml"),
    ("run_dir: run\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8 c.yaml"), (b"run_dir: a: b\n", "is put in quotes"),
    (b"actor: {init: x\n", "bracket or brace is not closed"), (b"run_dir: 'run\n", "quotation mark is not closed"),
    (b"run_dir: @here\n", "put the value in quotes"), (b"run_dir run\nsteps: 3\n", "its colon and a space"),
    (b"- 1\n- 2\n", "holds a list"),
])  # fmt: skip
def test_text_that_is_no_yaml(folder: Path, capsys: CaptureFixture[str], text: bytes, remedy: str) -> None:
    (folder / "c.yaml").write_bytes(text)
    for command in ("train", "validate"):
        said = refused(capsys, command, "c.yaml")
        assert remedy in said and "c.yaml" in said and "in the configuration" not in said


def test_windows_line_ends_and_json_are_taken_and_a_folder_is_not(folder: Path, capsys: CaptureFixture[str]) -> None:
    assert "is a folder, and a configuration is a file; name a file in it, as sft.yaml" in refused(capsys, "train", ".")
    assert "did you mean" in refused(capsys, "train", "trian.yaml")
    assert "settings are given as a.b=c" in refused(capsys, "train", "train.yaml", "--zzz", "3")
    (folder / "c.yaml").write_bytes(yaml.safe_dump(TRAIN).replace("\n", "\r\n").encode())
    (folder / "c.json").write_text(json.dumps(TRAIN))
    assert main(["validate", "c.yaml"]) == 0 and main(["validate", "c.json"]) == 0


@pytest.mark.parametrize(("arguments", "nearest"), [
    (("trian",), "`train`"), (("train", "train.yaml", "--resme"), "`--resume`"), (("bench", "decod"), "`decode`"),
    (("config", "--init", "gsm8"), "`gsm8k`"), (("validate", "train.yaml", "--kind", "trian"), "`train`"),
    (("validate", "train.yaml", "rollout.batch_sise=4"), "`batch_size`"),
])  # fmt: skip
def test_the_nearest_word(folder: Path, capsys: CaptureFixture[str], arguments: tuple[str, ...], nearest: str) -> None:
    said = refused(capsys, *arguments)
    assert "did you mean" in said and nearest in said.replace("rollout.", "")


@pytest.mark.parametrize("given", [
    {"RANK": "x", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "here"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "x"},
    {"SLURM_PROCID": "x", "SLURM_NTASKS": "2"},
])  # fmt: skip
def test_no_rank_numbers(folder: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert "is not a number" in both_refuse(capsys, "train.yaml")


def test_a_frozen_reward_model_is_not_told_to_begin_with_a_new_head(folder: Path, capsys: CaptureFixture[str]) -> None:
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps({**SHAPE, "architectures": ["Qwen2ForCausalLM"]}))
    assert "`oppo rm` trains one" in both_refuse(capsys, "train.yaml", "rewards=[{kind: model}]", "reward={checkpoint: m}")


def test_a_full_disk_anywhere_is_a_sentence(folder: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        monkeypatch.setattr("oppo_megatron.cli.run.require_ready", mock.Mock(side_effect=OSError(number, os.strerror(number))))
        said = refused(capsys, "train", "train.yaml")
        assert "the disk has no place" in said and "free some" in said and len(said.splitlines()) == 1
    assert str(ConfigError("x is no folder")) == "x is no folder"
    assert str(ConfigError(["a", "b"])) == "2 problems:\n  - a\n  - b", "several problems are listed"


FIRST_LINE = """
import sys
from oppo_megatron.cli import launch, main
def started(*_, **__):
    print(sorted({"torch", "megatron", "transformers", "pandas", "datasets"} & set(sys.modules)))
    return 0
launch.launch = started
sys.exit(main.main(sys.argv[1:]))
"""


def test_the_first_line_comes_before_torch_is_loaded(folder: Path) -> None:
    for kind in ("train", "sft"):
        command = [sys.executable, "-c", FIRST_LINE, kind, f"{kind}.yaml"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert own_lines(ended.stderr) == [f"oppo {kind}: starting 1 rank, run directory run"] and ended.stdout == "[]\n"


def test_a_rank_does_not_load_what_it_never_calls() -> None:
    unused = (
        "transformers", "tensorboard", "wandb", "pandas", "datasets", "pyarrow", "matplotlib", "scipy", "sklearn", "networkx",
        "torch._dynamo", "torch._inductor", "torch.utils.tensorboard",
    )  # fmt: skip
    look = f"import sys, oppo_megatron.train.entry; print(sorted(set({unused!r}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=240, check=True).stdout == "[]\n"


def test_compiling_at_the_first_call_gives_what_compiling_at_once_does() -> None:
    import torch

    from oppo_megatron.mcore import compiled_when_called

    @compiled_when_called(backend="eager", fullgraph=True)
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @compiled_when_called(backend="eager", fullgraph=True)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    assert outer(torch.tensor([1.0, 2.0])).tolist() == [3.0, 5.0]
    assert inner.__name__ == "inner"
