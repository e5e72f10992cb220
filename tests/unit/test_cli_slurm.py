"""`oppo launch slurm`: what it asks for, what it writes, and what it refuses."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.cli.slurm import packaged
from oppo_megatron.cli.slurm.request import time_limit_s
from tests.support.commands import enter

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
run_dir: runs/big one
steps: 3
tokenizer: {path: tok}
data: {path: rows.jsonl, max_prompt_tokens: 20}
actor: {init: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4,
               num_attention_heads: 8, num_key_value_heads: 8}}
critic: {init: "${actor.init}"}
rewards: [{kind: verifier, name: gsm8k}]
rollout: {batch_size: 8, max_response_tokens: 20}
placement: {mode: disaggregated, actor: {tp: 2, dp: 4}, scorer: {tp: 2, pp: 2}}
checkpoint: {every_steps: 10}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return enter(tmp_path, monkeypatch, CONFIG).name


def write(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(["launch", "slurm", *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def directives(script: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for line in script.splitlines():
        if line == "#SBATCH hetjob":
            parts.append([])
        elif line.startswith("#SBATCH "):
            parts[-1].append(line.removeprefix("#SBATCH --"))
    return parts


def test_nodes_and_tasks_follow_from_the_configuration(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, said = write(capsys, config, "seed=3", "--gpus-per-node=4", "--partition=gpu", "--account=me", "--time=1-00:00:00")
    (options,) = directives(script)
    for option in (
        "job-name=oppo-big-one", "nodes=3", "ntasks-per-node=4", "gpus-per-node=4", "partition=gpu", "account=me",
        "time=1-00:00:00", "signal=B:USR1@600", "exclusive", "requeue", "open-mode=append", "dependency=singleton",
        "mem=0", f"chdir={Path.cwd()}",
    ):  # fmt: skip
        assert options.count(option) == 1, option
    assert len({option.partition("=")[0] for option in options}) == len(options), "no option twice"
    assert f"OPPO_RUN_DIR='{Path.cwd()}/runs/big one'" in script
    assert f'set -- {Path.cwd()}/c.yaml seed=3 "$@"' in script
    body = packaged("job.sh")
    assert script.endswith(body[body.index("# What a job") :])
    assert "job oppo-big-one: 12 ranks, without a container" in said
    assert "3 exclusive nodes x 4 ranks, 4 GPUs each, partition gpu: ranks 0-11" in said and "note" not in said


def test_a_heterogeneous_job(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, said = write(
        capsys, config, "--hetero", "--partition=big", "--scorer-partition=small", "--scorer-gpus-per-node=2",
        "--container-image=a#b", "--container-mounts=/x:/x", "--max-restarts=4",
    )  # fmt: skip
    actor, scorers = directives(script)
    assert {"job-name=oppo-big-one", "nodes=1", "ntasks-per-node=8", "gpus-per-node=8", "partition=big"} <= set(actor)
    assert {"job-name=oppo-big-one-scorers", "nodes=2", "ntasks-per-node=2", "gpus-per-node=2"} <= set(scorers)
    assert "partition=small" in scorers and not {"dependency=singleton"} & set(scorers)
    assert "ranks 0-7 (actor)" in said and "ranks 8-11 (scorers)" in said and "in a#b" in said
    for line in ("OPPO_CONTAINER_IMAGE='a#b'", "OPPO_CONTAINER_MOUNTS=/x:/x", "OPPO_MAX_RESTARTS=4"):
        assert line in script.splitlines()


@pytest.mark.parametrize(("ready", "actor_dp", "options"), [("train.sbatch", 2, []), ("train-hetero.sbatch", 4, ["--hetero"])])
def test_the_ready_scripts_have_the_lines_of_the_template(
    config: str, capsys: pytest.CaptureFixture[str], ready: str, actor_dp: int, options: list[str]
) -> None:
    placement = f"placement={{mode: disaggregated, actor: {{tp: 2, dp: {actor_dp}}}, scorer: {{tp: 2, pp: {actor_dp}}}}}"
    script, _ = write(capsys, config, placement, "--job-name=oppo", *options)
    written, own = (text[text.index("#SBATCH ") :].partition("\n\n")[0] for text in (script, packaged(ready)))
    assert [line for line in written.splitlines() if "--chdir=" not in line] == own.splitlines()


def test_no_gpus_are_asked_for_on_the_cpu(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, said = write(capsys, config, "runtime.device=cpu", "--ranks-per-node=6")
    assert not [option for option in directives(script)[0] if option.startswith("gpu")]
    assert "2 exclusive nodes x 6 ranks, no GPUs" in said
    _, said = write(capsys, config, "runtime.device=cpu", "--out=a job.sbatch", "--time=90")
    assert "time limit 90 minutes for each" in said and said.endswith("submit it with: sbatch 'a job.sbatch'\n")


def test_a_file_and_a_new_cluster_env(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, said = write(capsys, config, "--gpus-per-node=4", "--out=job.sbatch", "--cluster-env=cluster.env")
    assert out == "" and "made cluster.env" in said and "sbatch job.sbatch" in said
    assert "without a container, unless cluster.env names an image" in said
    assert Path("cluster.env").read_text() == (ROOT / "launch/slurm/cluster.env").read_text()
    assert f"OPPO_CLUSTER_ENV={Path.cwd()}/cluster.env" in Path("job.sbatch").read_text().splitlines()
    (line,) = [x for x in Path("job.sbatch").read_text().splitlines() if x.startswith("# Written by: ")]
    again = shlex.split(line.removeprefix("# Written by: oppo "))
    assert main([*again, "--out=again.sbatch"]) == 0 and {"--gpus-per-node", "--cluster-env"} <= set(again)
    assert Path("again.sbatch").read_text() == Path("job.sbatch").read_text().replace("--out job", "--out again")
    subprocess.run(["bash", "-n", "job.sbatch"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "job.sbatch"], check=True)
    Path("cluster.env").write_text("mine")
    write(capsys, config, "--gpus-per-node=4", "--cluster-env=cluster.env")
    assert Path("cluster.env").read_text() == "mine"


def test_notes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = write(capsys, config, "checkpoint.every_steps=0", "--ranks-per-node=3")
    assert "checkpoint.every_steps is 0" in said and "5 of 8 GPUs on each node stay idle" in said
    assert "tensor-parallel ranks of actor are on different nodes" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "12 ranks do not fill nodes of 8, and every node must have as many; give --ranks-per-node 6 (2 nodes)"),
        (["--gpus-per-node=4", "--ranks-per-node=6"], "6 ranks on nodes with 4 GPUs"),
        (["runtime.device=cpu", "--gpus-per-node=4"], "runtime.device is cpu and would leave them idle"),
        (["--hetero", "--scorer-ranks-per-node=3"], "give --scorer-ranks-per-node 2 (2 nodes)"),
        (["--scorer-partition=x"], "add --hetero"),
        (["--hetero", "placement.mode=colocated", "placement.scorer=null"], "where reference and critic run, too"),
        (["--time=soon"], "--time is 'soon'; Slurm reads"),
        (["--time=10"], "--time 10 is 600 s, and --signal-s 600 comes before it"),
        (["preempt_deadline_s=700"], "--signal-s is 600, and the run may take preempt_deadline_s=700 s"),
        (["preempt_deadline_s=0"], "preempt_deadline_s is 0"),
        (["--partition=a b"], "--partition is 'a b'"),
        (["--job-name=a\n#SBATCH --uid=0"], "--job-name is"),
        (["--job-name=a/b"], "logs are named after it"),
        (["--container-mounts=/a:/b"], "without --container-image"),
        (["--container-image="], "--container-image is empty"),
        (["--hetero", "runtime.device=cpu", "--scorer-gpus-per-node=4"], "--scorer-gpus-per-node is given"),
        (["--signal-s=70000", "--time=2-0"], "sbatch takes at most 65535"),
        (["--cluster-env=tok"], "--cluster-env is tok, a folder"),
        (["--gpus-per-node=4", "--out=./tok/../c.yaml"], "the configuration itself"),
    ],
)
def test_what_does_not_fit(config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert main(["launch", "slurm", config, *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("1-02:30:05", 95405),
        ("", None), ("1h", None), ("1:2:3:4", None), ("-5", None),
    ],
)  # fmt: skip
def test_time_limits(text: str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


def test_the_package_has_the_files_of_launch_and_no_others() -> None:
    folder = ROOT / "launch" / "slurm"
    packaged_files = ROOT / "oppo_megatron" / "cli" / "slurm" / "files"
    assert {path.name for path in packaged_files.iterdir()} == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        assert packaged(path.name) == path.read_text(encoding="utf-8")
