"""Norms and clipping without an engine, on one rank, against torch; marks and units of scripts.

What groups add up is in `tests/compat/megatron/test_on_ranks.py`.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.comm.pretended import pretend
from zero_strategy.compat.megatron.fsdp_utils import align_dense_tensors, all_gather_dp_groups
from zero_strategy.compat.megatron.gradients import (
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_global_norm_of_tensors,
    get_grad_norm,
)
from zero_strategy.compat.megatron.models import (
    bwc_tensor_model_parallel_rank,
    get_mcore_tensor_parallel_partition_dim,
    is_expert_parameter,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
    is_model_parallel_parameter,
)
from zero_strategy.ops.multi_tensor import local_multi_tensor_applier, local_multi_tensor_l2_norm
from zero_strategy.optim import DummyOptim

ORDERS: list[float | str] = [1.0, 2, 3.5, math.inf, "inf"]


def net() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3))
    model[1](model[0](torch.randn(4, 5))).square().sum().backward()  # the last layer has no gradients
    return model


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bound", [0.0, 0.5, 1e6])
def test_clip_grad_norm_is_torch_s(order: float | str, bound: float) -> None:
    ours, theirs = net(), net()
    assert get_grad_norm(ours.parameters(), order) == pytest.approx(get_grad_norm(list(ours.parameters()), order))
    found = clip_grad_norm_(ours.parameters(), bound, order)
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), bound, order)
    assert type(found) is float and found == pytest.approx(float(wanted), rel=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0.0)


def test_experts_gradients_count_like_any_without_groups() -> None:
    plain, model = net(), net()
    model[0].weight.allreduce = False  # type: ignore[union-attr, assignment]
    for order in ORDERS:
        assert get_grad_norm(model.parameters(), order) == pytest.approx(get_grad_norm(plain.parameters(), order))
    alone = copy.deepcopy(plain[0].weight)
    alone.grad = torch.full_like(alone, 3e38)
    assert get_grad_norm(alone, 12) == pytest.approx(3e38 * 35 ** (1 / 12))  # one tensor; powers that overflow


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_gradients_show_in_the_norm_and_stay_bad(bad: float) -> None:
    ours, theirs = net(), net()
    for model in (ours, theirs):
        model[0].weight.grad[0, 0] = bad  # type: ignore[index, union-attr]
    found = clip_grad_norm_(ours.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert not math.isfinite(found)
    torch.testing.assert_close(ours[1].weight.grad, theirs[1].weight.grad, rtol=0.0, atol=0.0, equal_nan=True)
    assert bool(torch.isnan(ours[0].weight.grad[0, 0]))  # type: ignore[index, union-attr]


@pytest.mark.parametrize("order", ORDERS)
def test_tensors_of_any_shape_and_dtype_are_clipped_together(order: float | str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4).t(), torch.randn(5, dtype=torch.float64), torch.randn(2).bfloat16(), torch.zeros(0)]
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    norm = float(torch.linalg.vector_norm(flat, float(order)))
    assert get_global_norm_of_tensors(iter(tensors), order) == pytest.approx(norm, rel=1e-12)
    before = [tensor.clone() for tensor in tensors]
    assert clip_tensors_by_global_norm(tensors, 2 * norm, norm_type=order) == pytest.approx(norm)
    assert all(map(torch.equal, tensors, before))
    assert clip_tensors_by_global_norm(iter(tensors), 0.25, norm_type=order) == pytest.approx(norm)
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old * (0.25 / (norm + 1e-6)))
    assert clip_tensors_by_global_norm(tensors, 1.0, 4.0, eps=0.0) == 4.0  # a norm that is known already
    torch.testing.assert_close(tensors[1], before[1] * (0.25 / (norm + 1e-6)) / 4)


def test_what_makes_no_norm_is_refused() -> None:
    model = net()
    for call in (lambda: clip_grad_norm_(model.parameters(), -1.0), lambda: clip_tensors_by_global_norm([], -1.0)):
        with pytest.raises(ValueError, match=r"max_norm must not be negative, not -1\.0"):
            call()
    with pytest.raises(ValueError, match="norm_type must be positive or inf, not 0"):
        get_grad_norm(model.parameters(), 0)
    with pytest.raises(TypeError, match=r"mpu must have one of get_tensor_model_parallel_rank\(\), .* int has none"):
        get_grad_norm(model.parameters(), 2, mpu=3)
    with pytest.raises(TypeError, match=r"get_model_parallel_group\(\), .* SimpleNamespace has none"):
        get_global_norm_of_tensors([torch.ones(1)], 2, SimpleNamespace())
    with pretend(0, 2), pytest.raises(ValueError, match="pass mpu or group, not both"):
        get_global_norm_of_tensors([], mpu=object(), group=torch.distributed.group.WORLD)
    assert get_grad_norm([]) == clip_grad_norm_([], 1.0) == get_global_norm_of_tensors([], math.inf) == 0.0


class Reads(TorchDispatchMode):
    """Counts the numbers that the host asks of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_once_per_tensor() -> None:
    counts = []
    for number in (1, 40):
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        with Reads() as clip:
            clip_grad_norm_(parameters, 1.0)
        gradients = [parameter.grad for parameter in parameters]
        with Reads() as tensors:
            clip_tensors_by_global_norm(gradients, 0.5)  # type: ignore[arg-type]
        doubles = [gradient.double() for gradient in gradients]  # type: ignore[union-attr]
        with Reads() as wide:  # which the op does not take
            get_global_norm_of_tensors(doubles)
        with Reads() as applier:
            local_multi_tensor_applier(local_multi_tensor_l2_norm, None, [gradients], True)
        counts.append((clip.count, tensors.count, wide.count, applier.count))
    assert counts[0] == counts[1] and counts[0][-1] == 0


# ---- marks and units ----


def marked(**marks: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2, 3))
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def test_marks_of_model_parallelism_are_read() -> None:
    plain, off = marked(), marked(tensor_model_parallel=False, model_parallel=False, allreduce=True)
    for parameter in (plain, off):
        assert not is_mcore_tensor_model_parallel(parameter) and not is_model_parallel_parameter(parameter)
        assert not is_mcore_tensor_parallel_duplicated(parameter) and not is_expert_parameter(parameter)
        assert get_mcore_tensor_parallel_partition_dim(parameter) is None
    assert is_model_parallel_parameter(marked(model_parallel=True))
    assert not is_mcore_tensor_model_parallel(marked(model_parallel=True))  # DeepSpeed's mark, not Megatron's
    for marks in ({"tensor_model_parallel": True, "partition_dim": 1}, {"_mcore_tp": True, "_tp_partition_dim": 1}):
        parameter = marked(**marks)
        assert is_mcore_tensor_model_parallel(parameter) and is_model_parallel_parameter(parameter)
        assert get_mcore_tensor_parallel_partition_dim(parameter) == 1
    assert is_mcore_tensor_parallel_duplicated(marked(_tp_duplicated=True))
    assert is_expert_parameter(marked(allreduce=False))
    with pytest.raises(ValueError, match=r"shape \[2, 3\] is marked as tensor-parallel, but has no partition_dim"):
        get_mcore_tensor_parallel_partition_dim(marked(_mcore_tp=True))
    for mode, dim in (("column", 0), ("row", 1)):
        parameter = marked(_tensor_parallel_mode=mode)
        assert is_mcore_tensor_model_parallel(parameter) and get_mcore_tensor_parallel_partition_dim(parameter) == dim
    said = marked(_tensor_parallel_mode="row", partition_dim=0)
    assert get_mcore_tensor_parallel_partition_dim(said) == 0, "what is said outright wins"
    assert get_mcore_tensor_parallel_partition_dim(marked(_tensor_parallel_mode="replicated")) is None


def test_old_and_new_units_tell_the_tensor_parallel_rank() -> None:
    def rank() -> int:
        return 3

    def other() -> int:
        return 1

    assert bwc_tensor_model_parallel_rank() == bwc_tensor_model_parallel_rank(None) == 0
    assert bwc_tensor_model_parallel_rank(SimpleNamespace(get_model_parallel_rank=rank)) == 3
    assert bwc_tensor_model_parallel_rank(SimpleNamespace(get_slice_parallel_rank=rank)) == 3
    new = SimpleNamespace(get_tensor_model_parallel_rank=rank, get_model_parallel_rank=other)
    assert bwc_tensor_model_parallel_rank(new) == 3  # of a unit with pipelines, whose old name counts both
    with pytest.raises(TypeError, match="int has none"):
        bwc_tensor_model_parallel_rank(1)


# ---- flat groups ----


def test_flat_groups_are_padded_to_the_boundary() -> None:
    tensors = [torch.ones(5, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)]
    padded = align_dense_tensors(tensors, 8)
    assert padded[0] is tensors[0] and padded[1] is tensors[1]
    assert padded[2].dtype == torch.bfloat16 and padded[2].tolist() == [0.0] * 5
    assert align_dense_tensors(tensors, 11) == tensors and align_dense_tensors([], 4) == []
    with pytest.raises(ValueError, match="alignment must be at least 1, not 0"):
        align_dense_tensors(tensors, 0)
    with pytest.raises(ValueError, match="one dtype and device"):
        align_dense_tensors([*tensors, torch.ones(1)], 4)


def test_gathering_partitions_of_one_rank_changes_nothing_and_wrong_groups_are_refused() -> None:
    own = torch.arange(5.0)
    all_gather_dp_groups([[own]], None, 2, 4)
    assert own.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="group 0 has 2 partitions, but there are 1 ranks"):
        all_gather_dp_groups([[own, own]], None, 2, 4)
    with pytest.raises(ValueError, match="1 groups of parameters, but 2 process groups"):
        all_gather_dp_groups([[own]], [None, None], 2, 4)
    with pytest.raises(ValueError, match=r"must be flat and of one size, not \[\[1, 5\]\]"):
        all_gather_dp_groups([[own[None]]], None, 2, 4)
    with pytest.raises(ValueError, match="allgather_bucket_size 0 must be at least 1"):
        all_gather_dp_groups([[own]], None, 2, 0)


def test_a_dummy_optimizer_shows_parameters_as_one_group() -> None:
    model = net()
    dummy = DummyOptim(model.parameters())
    assert len(dummy.param_groups) == 1
    for _ in range(2):  # a generator would be used up
        assert [id(p) for p in dummy.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    given = list(model.parameters())
    assert DummyOptim(given).param_groups[0]["params"] is given
