"""`oppo launch slurm`, and launch/slurm/job.sh over made-up srun, scontrol and oppo: what is asked for, requeued and refused."""

import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.cli.slurm import packaged, time_limit_s
from tests.support.commands import LEAST, enter, refused
from tests.support.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
PLACED = "placement: {mode: disaggregated, actor: {tp: 2, dp: 4}, scorer: {tp: 2, pp: 2}}\ncheckpoint: {every_steps: 10}\n"
CONFIG = LEAST.replace("run_dir: run", "run_dir: runs/big one").replace("hidden_layers: 2", "hidden_layers: 4") + PLACED


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
    assert f"OPPO_RUN_DIR='{Path.cwd()}/runs/big one'" in script and f'set -- {Path.cwd()}/c.yaml seed=3 "$@"' in script
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


def test_no_gpus_on_the_cpu_and_notes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, said = write(capsys, config, "runtime.device=cpu", "--ranks-per-node=6")
    assert not [option for option in directives(script)[0] if option.startswith("gpu")]
    assert "2 exclusive nodes x 6 ranks, no GPUs" in said
    _, said = write(capsys, config, "runtime.device=cpu", "--out=a job.sbatch", "--time=90")
    assert "time limit 90 minutes for each" in said and said.endswith("submit it with: sbatch 'a job.sbatch'\n")
    _, said = write(capsys, config, "checkpoint.every_steps=0", "--ranks-per-node=3")
    assert "checkpoint.every_steps is 0" in said and "5 of 8 GPUs on each node stay idle" in said
    assert "tensor-parallel ranks of actor are on different nodes" in said


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


@pytest.mark.parametrize(("arguments", "expected"), [
    ([], "12 ranks do not fill nodes of 8, and every node must have as many; give --ranks-per-node 6 (2 nodes)"),
    (["--gpus-per-node=4", "--ranks-per-node=6"], "6 ranks on nodes with 4 GPUs"),
    (["runtime.device=cpu", "--gpus-per-node=4"], "runtime.device is cpu and would leave them idle"),
    (["--hetero", "--scorer-ranks-per-node=3"], "give --scorer-ranks-per-node 2 (2 nodes)"),
    (["--scorer-partition=x"], "add --hetero"),
    (["--hetero", "placement.mode=colocated", "placement.scorer=null"], "where reference and critic run, too"),
    (["--time=soon"], "--time is 'soon'; Slurm reads"), (["--time=10"], "--time 10 is 600 s, and --signal-s 600 comes before it"),
    (["preempt_deadline_s=700"], "--signal-s is 600, and the run may take preempt_deadline_s=700 s"),
    (["preempt_deadline_s=0"], "preempt_deadline_s is 0"), (["--partition=a b"], "--partition is 'a b'"),
    (["--job-name=a\n#SBATCH --uid=0"], "--job-name is"), (["--job-name=a/b"], "logs are named after it"),
    (["--container-mounts=/a:/b"], "without --container-image"), (["--container-image="], "--container-image is empty"),
    (["--hetero", "runtime.device=cpu", "--scorer-gpus-per-node=4"], "--scorer-gpus-per-node is given"),
    (["--signal-s=70000", "--time=2-0"], "sbatch takes at most 65535"), (["--cluster-env=tok"], "--cluster-env is tok, a folder"),
    (["--gpus-per-node=4", "--out=./tok/../c.yaml"], "the configuration itself"),
])  # fmt: skip
def test_what_does_not_fit(config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert expected in refused(capsys, "launch", "slurm", config, *arguments)


def test_time_limits() -> None:
    for text, seconds in {
        "30": 1800, "1:30": 90, "2:00:00": 7200, "1-0": 86400, "1-2:30": 95400, "1-02:30:05": 95405,
        "": None, "1h": None, "1:2:3:4": None, "-5": None,
    }.items():  # fmt: skip
        assert time_limit_s(text) == seconds, text


def test_the_package_has_the_files_of_launch_and_no_others() -> None:
    folder = ROOT / "launch" / "slurm"
    packaged_files = ROOT / "oppo_megatron" / "cli" / "slurm" / "files"
    assert {path.name for path in packaged_files.iterdir()} == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        assert packaged(path.name) == path.read_text(encoding="utf-8")


LAUNCH = ROOT / "launch" / "slurm"

SRUN = r"""#!/usr/bin/env bash
# Starts the tasks here; the exit code is the largest of theirs.  SIGUSR1 goes to all, SIGTERM kills them: as Slurm does it.
echo "${*//$'\n'/ }" >>"$FAKE/sruns"
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#*=} ;; --het-group=*) export HET=${1#*=} ;; esac
    shift
done
trap 'kill -USR1 $(jobs -p)' USR1 # of which `pids` may not have the last one yet
trap 'pkill -KILL -P "$(echo "${pids[@]}" | tr " " ,)"; kill -KILL "${pids[@]}"; exit 137' TERM
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURMD_NODENAME=node$task "$@" &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    while :; do
        wait "$pid"
        code=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((code <= worst)) || worst=$code
done
exit "$worst"
"""
SCONTROL = r"""#!/usr/bin/env bash
echo "$*" >>"$FAKE/scontrols"
case "$1 $2" in
"show hostnames") echo node0 ;;
"show job") echo "JobId=7 JobState=${JOB_STATE:-RUNNING} Command=$LAUNCH/train.sbatch c.yaml" ;;
esac
"""
OPPO = r"""#!/usr/bin/env bash
# Rank R does what $FAKE/rankR says.
if [[ $1 == --version ]]; then echo "oppo ${VERSION:-1}"; exit "${VERSION_CODE:-0}"; fi
me="$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK"
echo "$me $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID $*" >>"$FAKE/ranks"
trap 'echo "$RANK" >>"$FAKE/stopped"; exit 75' USR1
echo "$RANK" >>"$FAKE/listening"
source "$FAKE/rank$RANK"
"""


@dataclass
class Slurm:
    """A job's batch script as it runs on its first node."""

    root: Path
    environment: dict[str, str]

    def start(self, *arguments: str, script: str = "train.sbatch", **variables: str) -> subprocess.Popen[str]:
        command, pipe = ["bash", str(LAUNCH / script), *(arguments or ("c.yaml", "seed=3"))], subprocess.PIPE
        return subprocess.Popen(command, env=self.environment | variables, cwd=self.root, text=True, stdout=pipe, stderr=pipe)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        job = self.start(*arguments, **variables)
        _, said = job.communicate(timeout=120)
        return job.returncode, said

    def ranks(self, *what: str) -> None:
        for rank, each in enumerate(what):
            (self.root / f"rank{rank}").write_text(each)

    def lines(self, name: str) -> list[str]:
        path = self.root / name
        return sorted(path.read_text().splitlines()) if path.exists() else []

    @property
    def requeued(self) -> bool:
        return "requeue 7" in self.lines("scontrols")


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("oppo", OPPO), ("sleep", "#!/bin/sh\nexec /bin/sleep 0.1\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "c.yaml").write_text("run_dir: run\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OPPO", "MASTER"))}
    job = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "oppo", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "2", "FAKE": str(tmp_path), "LAUNCH": str(LAUNCH), "PATH": f"{commands}:{os.environ['PATH']}",
    }  # fmt: skip
    slurm = Slurm(tmp_path, inherited | job)
    slurm.ranks("exit 0", "exit 0")
    return slurm


def test_ranks_are_started_and_the_end_is_noted(slurm: Slurm) -> None:
    code, said = slurm.run()
    assert (code, slurm.requeued) == (0, False) and "finished" in said
    command = "node0:20007 7 train c.yaml seed=3 --resume"
    assert slurm.lines("ranks") == [f"0/2 0/2 0 {command}", f"1/2 1/2 0 {command}"]
    (check, run) = slurm.lines("sruns")
    assert "--ntasks=1 " in check and "--wait" not in check and "--container" not in check + run
    assert "--nodes=1 --ntasks=2 --ntasks-per-node=2" in run and "--wait=60 --kill-on-bad-exit=1" in run
    assert f"--output={slurm.root}/logs/oppo_7_r0_%t.log" in run
    code, said = slurm.run()
    assert code == 0 and "finished already" in said and len(slurm.lines("sruns")) == 2
    code, said = slurm.run("c.yaml", "seed=4")
    assert code == 0 and "finished already" not in said, "another run has a flag of its own"


STOPPED = ["exit 75", "exit 75"]
KILLED = ["kill -KILL $$", "exit 2"]


@pytest.mark.parametrize(("ranks", "variables", "code", "requeued", "says"), [
    (STOPPED, {}, 75, True, "stopped: requeued, restart 1 of at most 50"),
    (STOPPED, {"SLURM_RESTART_COUNT": "49"}, 75, True, "restart 50 of at most 50"),
    (STOPPED, {"SLURM_RESTART_COUNT": "50"}, 75, False, "OPPO_MAX_RESTARTS is 50: not requeued"),
    (STOPPED, {"SLURM_RESTART_COUNT": "3", "OPPO_MAX_RESTARTS": "3"}, 75, False, "not requeued"),
    (STOPPED, {"JOB_STATE": "CANCELLED"}, 75, False, "cancelled: not requeued"), (KILLED, {}, 137, True, "killed: requeued"),
    (KILLED, {"OPPO_MAX_CRASHES": "1"}, 137, False, "OPPO_MAX_CRASHES is 1: not requeued"),
    (["exit 0", "exit 2"], {}, 2, False, "failed with exit code 2: not requeued"),
    (["exit 1", "exit 75"], {}, 1, False, "failed with exit code 1"),  # the other was told by srun, which ends it
    (["exit 2", "kill -TERM $$"], {}, 2, False, "failed with exit code 2"),
    (["kill -KILL $PPID; kill -KILL $$", "exit 2"], {}, 137, True, "killed: requeued"),
    (["exit 0", "kill -USR1 $PPID; sleep; exit 0"], {}, 75, True, "stopped: requeued"),
])  # fmt: skip
def test_requeued(slurm: Slurm, ranks: list[str], variables: dict[str, str], code: int, requeued: bool, says: str) -> None:
    slurm.ranks(*ranks)
    ended, said = slurm.run(**variables)
    assert (ended, slurm.requeued) == (code, requeued) and says in said, said
    assert not list((slurm.root / "logs").glob("*.finished"))


def test_crashes_count_in_a_row_only(slurm: Slurm) -> None:
    for restart, ranks in enumerate([KILLED, KILLED, STOPPED, KILLED, KILLED, KILLED]):
        slurm.ranks(*ranks)
        (slurm.root / "scontrols").unlink(missing_ok=True)
        _, said = slurm.run(SLURM_RESTART_COUNT=str(restart))
        assert slurm.requeued == (restart < 5), f"attempt {restart}: {said}"


WAITING = "while :; do /bin/sleep 0.1; done"


@pytest.mark.parametrize(
    ("number", "requeued", "says"), [(signal.SIGUSR1, True, "told to stop"), (signal.SIGTERM, False, "cancelled: not requeued")]
)
def test_a_signal_to_the_script_reaches_every_rank(slurm: Slurm, number: signal.Signals, requeued: bool, says: str) -> None:
    slurm.ranks(WAITING, WAITING)
    job = slurm.start()
    wait_for(lambda: len(slurm.lines("listening")) == 2)
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 75 and slurm.lines("stopped") == ["0", "1"]
    assert slurm.requeued == requeued and says in said, said


def test_a_run_that_ends_by_itself_after_the_signal_is_not_requeued(slurm: Slurm) -> None:
    late = "while [[ ! -e $FAKE/go ]]; do /bin/sleep 0.1; done"
    slurm.ranks(*[f"trap 'echo $RANK >>$FAKE/heard' USR1; echo $RANK >>$FAKE/deaf; {late}; exit 0"] * 2)
    job = slurm.start()
    wait_for(lambda: len(slurm.lines("deaf")) == 2)
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(slurm.lines("heard")) == 2)
    (slurm.root / "go").touch()
    _, said = job.communicate(timeout=60)
    assert job.returncode == 0 and not slurm.requeued and "finished" in said, said


HETERO = {
    "SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "2", "SLURM_NTASKS_HET_GROUP_1": "1",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
}  # fmt: skip


def test_components_have_ranks_one_after_the_other(slurm: Slurm) -> None:
    slurm.ranks("exit 0", "exit 0", "exit 0")
    code, said = slurm.run(script="train-hetero.sbatch", **HETERO)
    assert code == 0, said
    assert [line.split(" node0")[0] for line in slurm.lines("ranks")] == ["0/3 0/2 0", "1/3 1/2 0", "2/3 0/1 1"]
    runs = [line for line in slurm.lines("sruns") if "--wait" in line]
    for words in ("--het-group=0 ", "r0_actor-%t.log", "--het-group=1 ", "r0_scorer-%t.log"):
        assert words in runs[0] + runs[1]


def test_a_component_whose_peer_has_failed_is_ended(slurm: Slurm) -> None:
    slurm.ranks(WAITING, WAITING, "exit 3")
    code, said = slurm.run(script="train-hetero.sbatch", OPPO_PEERS_S="0", **HETERO)
    assert code == 3 and not slurm.requeued
    assert "component actor has lost its peer: it is ended" in said, said


def test_the_container_variant(slurm: Slurm) -> None:
    code, _ = slurm.run(OPPO_CONTAINER_IMAGE="nvcr.io#nvidia/nemo:26.02", OPPO_CONTAINER_MOUNTS="/data:/data")
    here = slurm.root
    assert code == 0
    for line in slurm.lines("sruns"):
        assert f"--container-image=nvcr.io#nvidia/nemo:26.02 --container-workdir={here} --no-container-mount-home" in line
        assert f"--container-mounts={here}:{here},{here}/logs:{here}/logs,/data:/data " in line


@pytest.mark.parametrize(("arguments", "variables", "says"), [
    (["nowhere.yaml"], {}, "nowhere.yaml cannot be read in"),
    ([], {"VERSION_CODE": "1"}, "node0: cannot run 'oppo --version': oppo 1"),
    ([], {"SLURM_GPUS_ON_NODE": "1"}, "node0: 0 GPUs answer, but 2 ranks are to run there"),
    ([], {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "3"}, "3 tasks on 2 nodes"),
    ([], {"OPPO_CLUSTER_ENV": "nowhere.env"}, "OPPO_CLUSTER_ENV=nowhere.env cannot be read"),
])  # fmt: skip
def test_what_does_not_fit_is_told_first(slurm: Slurm, arguments: list[str], variables: dict[str, str], says: str) -> None:
    code, said = slurm.run(*arguments, **variables)
    assert code == 2 and says in said and not slurm.requeued and not slurm.lines("ranks"), said


def test_settings_of_the_cluster_come_from_its_file(slurm: Slurm) -> None:
    local = slurm.root / "mine.env"
    local.write_text("MASTER_ADDR=head.example MASTER_PORT=4444\nOPPO_LOG_DIR=out\nsetup_rank() { export VERSION=9; }\n")
    code, said = slurm.run(OPPO_CLUSTER_ENV=str(local))
    assert code == 0 and "oppo 9" in said and all(" head.example:4444 " in line for line in slurm.lines("ranks"))
    assert (slurm.root / "out").is_dir()


def test_the_scripts_are_clean() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; on Debian: apt install shellcheck")
    scripts = [*sorted(LAUNCH.iterdir()), *sorted((ROOT / "launch" / "local").iterdir())]
    said = subprocess.run([shellcheck, "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
