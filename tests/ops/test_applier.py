"""The applier of the Megatron page: what its own formulas give."""

from __future__ import annotations

import math

import pytest
import torch

from zero_strategy import ops


def test_l2_norm() -> None:
    tensors = [torch.randn(1000, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    norm, each = ops.local_multi_tensor_applier(ops.local_multi_tensor_l2_norm, torch.zeros(1), [tensors], True)
    assert norm.shape == (1,)
    torch.testing.assert_close(norm[0], torch.cat(tensors).norm())
    torch.testing.assert_close(each, torch.stack([tensor.norm() for tensor in tensors]))
    assert ops.local_multi_tensor_applier(ops.local_multi_tensor_l2_norm, None, [tensors], False)[1] is None


@pytest.mark.parametrize("flag_type", [torch.int32, torch.float32])
def test_scale_in_place_and_into_another_dtype(flag_type: torch.dtype) -> None:
    flag = torch.zeros(1, dtype=flag_type)
    x, low = [torch.randn(100)], [torch.zeros(100, dtype=torch.bfloat16)]
    expected = x[0] * 0.5
    assert ops.local_multi_tensor_applier(ops.local_multi_tensor_scale, flag, [x, low], 0.5) is None
    ops.local_multi_tensor_applier(ops.local_multi_tensor_scale, flag, [x, x], 0.5)
    assert torch.equal(x[0], expected) and torch.equal(low[0], expected.to(torch.bfloat16))
    assert flag.item() == 0
    x[0][3] = math.inf
    ops.local_multi_tensor_applier(ops.local_multi_tensor_scale, flag, [x, x], 0.5)
    assert flag.item() == 1
    ops.local_multi_tensor_applier(ops.local_multi_tensor_scale, None, [x, x], 0.5)


def test_wrong_lists_are_named() -> None:
    with pytest.raises(ValueError, match="tensor_lists has 2 lists, but must have 1"):
        ops.local_multi_tensor_l2_norm(1, None, [[], []], False)
    with pytest.raises(ValueError, match="tensor_lists has 1 lists, but must have 2"):
        ops.local_multi_tensor_scale(1, None, [[]], 1.0)
