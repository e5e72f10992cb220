"""Collects what a GPU node without a network needs: `make gpu-pack`, on a machine with a package index.

Into .whl/ go wheels of what the package and tests/gpu ask for and the node's image lacks, into .kit/ the scripts of this folder.
Take both along with the checkout, and call `bash .kit/first.sh` there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
WHEELS, KIT = ROOT / ".whl", ROOT / ".kit"
SCRIPTS = ("first.sh", "trace.py", "attend.py")
TESTED_WITH = ("pytest",)
"""Packages that tests/gpu needs in addition to the package's requirements."""
IMAGE = (
    "torch", "triton", "numpy", "transformers", "safetensors", "tensorboard", "protobuf", "packaging", "pytest", "rich", "regex",
    "einops", "psutil", "httpx", "jinja2", "sentencepiece", "matplotlib", "pyyaml",
)  # fmt: skip
"""Packages that images for training on GPUs have.  `--image` names the list of another image."""
GLIBC = (28, 27, 24, 17, 12, 5)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-version", default="3.12", help="the image's; default %(default)s")
    parser.add_argument("--machine", default="x86_64", help="the image's processor; default %(default)s")
    parser.add_argument("--image", type=Path, help="a file with the output of `pip freeze` in the image")
    parser.add_argument("--try-with", metavar="PYTHON", help="import the package with these wheels by this Python")
    asked = parser.parse_args(arguments)
    has = dict(frozen(asked.image.read_text(encoding="utf-8"))) if asked.image else dict.fromkeys(IMAGE)
    for folder in (WHEELS, KIT):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        collect(has, asked.python_version, asked.machine)
    except subprocess.CalledProcessError as error:
        print(f"pack.py: {' '.join(error.cmd[-1:])} has no wheel for CPython {asked.python_version}; pip says:\n{error.stderr}")
        return 1
    for name in SCRIPTS:
        shutil.copy(HERE / name, KIT)
    for wheel in sorted(WHEELS.iterdir()):
        print(f"{wheel.stat().st_size:10,} {wheel.name}")
    if asked.try_with and not imports(asked.try_with):
        return 1
    print("Take the checkout with .whl and .kit along.  On the node, in its root: bash .kit/first.sh")
    return 0


def frozen(text: str) -> Iterator[tuple[str, str | None]]:
    """Names and versions of `pip freeze`; None for a version that is a file or an address."""
    for line in text.splitlines():
        name, _, version = line.partition("==")
        if name.strip() and not name.startswith(("#", "-")):
            yield canonicalize_name(name.partition(" @ ")[0].strip()), version.strip() or None


def collect(has: dict[str, str | None], python: str, machine: str) -> None:
    """Wheels of all that is asked for, and of what these ask for in turn."""
    target = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine, "extra": ""}
    left = [Requirement(line) for line in (*(metadata.requires("oppo-megatron") or []), *TESTED_WITH)]
    taken: dict[str, Path] = {}
    while left:
        needed = left.pop(0)
        name = canonicalize_name(needed.name)
        if needed.marker is not None and not needed.marker.evaluate(target) or name in taken:
            continue
        version = has.get(name)
        if name in has and (version is None or needed.specifier.contains(version, prereleases=True)):
            continue
        taken[name] = download(needed, python, machine)
        with zipfile.ZipFile(taken[name]) as wheel:
            (about,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
            headers = HeaderParser().parsestr(wheel.read(about).decode("utf-8"))
        left += map(Requirement, headers.get_all("Requires-Dist", []))


def download(needed: Requirement, python: str, machine: str) -> Path:
    """The wheel, of the version that the tests run on if it will do."""
    pins = dict(frozen((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    pin = (pins.get(canonicalize_name(needed.name)) or "").partition(";")[0].strip()
    wanted = f"{needed.name}=={pin}" if pin and needed.specifier.contains(pin) else f"{needed.name}{needed.specifier}"
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"--platform=manylinux2014_{machine}"]
    before = set(WHEELS.iterdir())
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--implementation=cp",
         f"--python-version={python}", *platforms, "-d", WHEELS, wanted],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (found,) = set(WHEELS.iterdir()) - before
    return found


def imports(python: str) -> bool:
    """True if this Python, with the wheels before its own packages, can import a run's modules."""
    site = KIT / "site"
    pip = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, *WHEELS.iterdir()]
    code = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]; import oppo_megatron.train.entry, tests.gpu.test_cuda"
    try:
        return not subprocess.call(pip) and not subprocess.call([python, "-W", "ignore", "-c", code], cwd=ROOT)
    finally:
        shutil.rmtree(site, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
