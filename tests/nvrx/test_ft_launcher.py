"""Restarts by nvidia-resiliency-ext's real `ft_launcher`."""

from __future__ import annotations

import pytest

from oppo_megatron.cli.ft_launcher import DISTRIBUTION, launcher_version
from tests.e2e.test_preemption import stopped_killed_and_undisturbed
from tests.support.ppo import Workspace

if launcher_version() is None:
    pytest.skip(
        f"{DISTRIBUTION} is not installed: `make test-nvrx` installs it aside and runs this", allow_module_level=True
    )


def test_a_run_that_it_stops_and_starts_again_ends_as_if_nothing_had_been(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workspace = Workspace.create(tmp_path_factory.mktemp("nvrx"))
    told = stopped_killed_and_undisturbed(workspace, "--agent", "nvrx")
    assert f"up to 1 restarts, by ft_launcher of {DISTRIBUTION}" in told and "1 of 1 restarts left" in told
