"""Session set-up: one CPU thread a process, no time limit on an example, and the rank pool closed at the end."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oppo_megatron.cores import CONNECTIONS, has_cuda, set_exact_products

if TYPE_CHECKING:
    from tests.e2e.matrix import Matrix
    from tests.support.ppo import Workspace

with suppress(ImportError):  # a GPU node, where tests/gpu runs alone, may have none
    from hypothesis import settings

    # A busy machine is not a fault of the code; and what is drawn today is drawn tomorrow.
    # --hypothesis-profile=explore draws anew.
    settings.register_profile("explore", deadline=None)
    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.load_profile("repeatable")
MANY_THREADS = 200
# `make test &` in a script, or `nohup make test`: tests send these signals, and wait for what they do.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A run has a thread for each core: on cores that are busy, threads that spin for each other take milliseconds a product.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
set_exact_products()
if not has_cuda():  # on a device streams would wait for each other
    os.environ.setdefault(CONNECTIONS, "1")


def pytest_collection_finish() -> None:
    """Modules are no garbage: a collection that looks through all of them takes a third of a second."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _rank_pool() -> Iterator[None]:
    yield
    from tests.support.ranks import POOL

    POOL.close()


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """A run within this process leaves about 100 threads of process groups, which slow down what follows."""
    yield
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        from tests.support.ranks import let_go_of_groups

        let_go_of_groups()


@pytest.fixture(scope="session")
def _data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.ppo import Workspace

    return Workspace.create(tmp_path_factory.mktemp("data")).root


@pytest.fixture(scope="module")
def workspace(_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    from tests.support.ppo import Workspace

    return Workspace(Path(shutil.copytree(_data, tmp_path_factory.mktemp("workspace"), dirs_exist_ok=True)))


@pytest.fixture(scope="session")
def matrix(_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    from tests.e2e.matrix import Matrix
    from tests.support.ppo import Workspace

    return Matrix(Workspace(Path(shutil.copytree(_data, tmp_path_factory.mktemp("matrix"), dirs_exist_ok=True))))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data files; OPPO_SHARED names its parent, by default a folder `shared` beside the checkout."""
    root = Path(os.environ.get("OPPO_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (root / "data").is_dir():
        pytest.skip(f"no {root / 'data'}: set OPPO_SHARED to the folder that holds data/ with the real data files")
    return root / "data"
