"""The training loop and its parts.  This package is callable: `oppo_megatron.train(...)` is `api.train`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("oppo_megatron.api").train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
