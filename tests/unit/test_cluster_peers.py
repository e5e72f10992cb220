"""What a rank says when another does not come."""

from __future__ import annotations

import pytest

from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.errors import StallError, StreamError

GLOO = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1234. Check the logs"


def test_a_lost_peer_is_told_with_what_was_waited_for() -> None:
    with (
        open_world(RuntimeConfig(device="cpu", timeout_s=7), {}),
        pytest.raises(StallError) as caught,
        waiting_for("update actor, step 3"),
    ):
        raise RuntimeError(GLOO)
    assert str(caught.value) == (
        "rank 0 waited in vain for `update actor, step 3` (Connection closed by peer [10.0.0.2]:1234). The peer has died "
        "or hangs: see its own message; runtime.timeout_s is 7."
    )


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), StreamError("a chunk message was lost"), KeyError(1)])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, waiting_for("update actor, step 3"):
        raise error
    assert caught.value is error
