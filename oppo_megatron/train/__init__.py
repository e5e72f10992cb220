"""The training loop and its parts.  `oppo_megatron.train(...)` is `api.train`: this package has its name, and is callable."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.api import Result


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        from oppo_megatron.api import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
