"""What a rank does about signals while it ends."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from oppo_megatron.config.reliability import PreemptConfig
from oppo_megatron.train.saving.preemption import Preemption


@pytest.mark.parametrize(("ranks", "fails", "ignored"), [(2, True, True), (2, False, False), (1, True, False)])
def test_a_rank_that_fails_among_peers_lives_to_say_why(
    monkeypatch: pytest.MonkeyPatch, ranks: int, fails: bool, ignored: bool
) -> None:
    """torch's agent, which has seen its peer end, sends it SIGTERM at that very moment."""
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ZeroDivisionError) if fails else Preemption(PreemptConfig()).listening():
            if fails:
                with Preemption(PreemptConfig()).listening():
                    raise ZeroDivisionError
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) == ignored
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, before)
