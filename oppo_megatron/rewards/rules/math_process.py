"""Rule `math` in its process, which loads the library as it starts, and not within the time of its first response."""

import math_verify  # noqa: F401

from oppo_megatron.rewards.rules.math_answers import grade  # noqa: F401
