"""Writes arithmetic solutions in steps with labels: python examples/arithmetic/write_steps.py FILE.jsonl [ROWS]"""

import sys
from pathlib import Path

from oppo_megatron.data.arithmetic import write_steps

if __name__ == "__main__":
    path = write_steps(Path(sys.argv[1]), seed=1, count=int(sys.argv[2]) if len(sys.argv) > 2 else 6000)
    print(path)
