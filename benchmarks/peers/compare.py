"""TRL's PPOTrainer and ours on the same work: the script of `comparison.py`.

python benchmarks/peers/compare.py CONFIG.yaml [a.b=c ...] --steps N --repeats R
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script's own path is its folder alone
    from benchmarks.peers.comparison import main

    sys.exit(main())
