"""TRL's own trainer on the work that a JSON file describes: the script of `trl_training.py`.

    .venv-trl/bin/python benchmarks/peers/trl_run.py WORK.json RESULT.json
    .venv-trl/bin/python benchmarks/peers/trl_run.py --check      prints the versions of the environment, or what is wrong

`--any-build` before these asks for the pinned TRL only, with whatever torch and transformers a GPU's machine has.  Every step is
written as a line of RESULT.jsonl when it is done.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # an isolated Python does not even have the script's folder
    from benchmarks.peers.trl_training import main

    sys.exit(main(sys.argv[1:]))
