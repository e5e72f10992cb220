"""`python -m oppo_megatron` is `oppo`, for launchers that start a module (torchrun -m)."""

from __future__ import annotations

import sys

from oppo_megatron.cli.main import main

sys.exit(main())
