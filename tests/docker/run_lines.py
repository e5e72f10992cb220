"""Runs the Dockerfile's RUN lines without Docker, in an overlay of this machine: `sudo python tests/docker/run_lines.py`.
Needs Linux, root, and apt-get; exit code 1 if a line fails or has no effect; skips lines that need the image."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("make test", "oppo validate", "pip install")
EFFECTS = {
    "cpu": "command -v g++ git make && test $(stat -c %u /opt/oppo-megatron) = 10001 && test -d ~oppo",
    "gpu": "test $(stat -c %u /runs) = 10001 && test $(id -u oppo) = 10001 && test -d ~oppo",
}
OVERLAY = """
set -e
mount -t tmpfs tmpfs "$1"; mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount --bind /dev "$1/root/dev"; mount -t proc proc "$1/root/proc"
chroot "$1/root" /bin/bash -e -c "$2"
"""


def instructions(text: str) -> Iterator[tuple[str, str, str]]:
    """(stage, instruction, rest) of a Dockerfile, continued lines joined, comments left out."""
    stage, pending = "", ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or not (line.strip() or pending):
            continue
        pending += line.strip().removesuffix("\\").rstrip() + " "
        if line.rstrip().endswith("\\"):
            continue
        name, _, rest = pending.strip().partition(" ")
        pending = ""
        stage = rest.rpartition(" AS ")[2] if name == "FROM" else stage
        yield stage, name, rest


def main() -> int:
    failed = 0
    lines = list(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))
    for stage, effect in EFFECTS.items():
        commands = [part for each, name, rest in lines if (each, name) == (stage, "RUN") for part in rest.split(" && ")]
        left_out = [part for part in commands if part.startswith(LEFT_OUT)]
        done = [part for part in commands if part not in left_out]
        script = " && ".join([*done, effect])
        folder = subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip()
        ended = subprocess.run(["unshare", "-m", "bash", "-c", OVERLAY, "run_lines", folder, script], stdout=subprocess.DEVNULL)
        Path(folder).rmdir()
        failed += ended.returncode != 0
        print(f"{stage}: {'FAILED' if ended.returncode else 'done'}: {'; '.join(done)}")
        print(f"{stage}: left out: {'; '.join(left_out)}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
