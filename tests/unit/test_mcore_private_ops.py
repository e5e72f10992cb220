"""Operations that torch does not document are looked for before a run starts."""

from __future__ import annotations

import pytest

from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.mcore.cpu import require_private_ops


def test_this_torch_has_them_all() -> None:
    require_private_ops(RuntimeConfig(decode_path="packed"), {"float32", "bfloat16"})


def test_each_that_is_missing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.mcore.cpu.PACKING", ("mkldnn._linear_pointwise", "mkldnn._gone"))
    monkeypatch.setattr("oppo_megatron.mcore.cpu.HALF_ATTENTION", ("aten._gone_too",))
    with pytest.raises(ConfigError) as found:
        require_private_ops(RuntimeConfig(decode_path="packed"), {"bfloat16"})
    packing, attention = found.value.problems
    assert packing.startswith("runtime.decode_path packed calls torch.ops.mkldnn._gone, which torch ")
    assert "set it to fused" in packing
    assert "bfloat16 on a CPU calls torch.ops.aten._gone_too" in attention and "runtime.dtype to float32" in attention
    require_private_ops(RuntimeConfig(decode_path="fused"), {"float32"})
