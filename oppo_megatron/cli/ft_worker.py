"""python -m oppo_megatron.cli.ft_worker FOLDER: one start of a run, by ft_launcher (`ft_launcher.py`)."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

from oppo_megatron.cli.ft_launcher import Desk, Verdict
from oppo_megatron.errors import EXIT_REQUEUE, OppoError
from oppo_megatron.processes import end_with_parent

EXIT_AGAIN = 2
EXIT_DEFECT = 1
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "FT_")


def main(folder: Path) -> int:
    """Return 0 after a verdict, `EXIT_AGAIN` if ft_launcher must start the run again."""
    from oppo_megatron.cli.launch import RankKilled, RankStalled
    from oppo_megatron.cli.run import launch_again, resuming
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.run import TrainConfig

    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until `launch` listens; the sender repeats it
    desk = Desk(folder)
    desk.take_over()
    begun, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    _be_no_rank()
    config = load_config(TrainConfig, desk.config)
    try:
        verdict = Verdict(
            EXIT_REQUEUE if desk.told.exists() else launch_again("train", resuming(config) if begun else config, 0)
        )
    except OppoError as error:
        left = most - begun
        if isinstance(error, RankKilled | RankStalled) and left and not desk.told.exists():
            print(f"oppo train: {error}; starting again, {left} of {most} restarts left", file=sys.stderr, flush=True)
            return EXIT_AGAIN
        verdict = Verdict(2, str(error))
    except Exception:
        traceback.print_exc()
        verdict = Verdict(EXIT_DEFECT)
    desk.leave(verdict)
    return 0


def _be_no_rank() -> None:
    """Remove ft_launcher's rank variables: it takes this process for a rank, but the ranks are the processes started here."""
    for name in list(os.environ):
        if name in OF_A_RANK or name.startswith(PREFIXES):
            del os.environ[name]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
