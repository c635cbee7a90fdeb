"""Reads of released parameters (stage 3) outside of a forward and a backward: an error by name."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.engine.trainings import Setting, ShardedTraining
from tests.launcher import Launcher
from zero_strategy import fsdp as sharding
from zero_strategy.fsdp.released import is_released

NAME = "blocks.1.up.weight"


def released() -> tuple[ShardedTraining, nn.Module, nn.Parameter]:
    training, model = ShardedTraining(Setting(3, "per_micro_batch")), net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05))
    return training, model, model.get_parameter(NAME)


def several(tensor: Tensor) -> list[Tensor]:
    return [torch.empty(tensor.shape) for _ in range(dist.get_world_size())]


def gathered_into(tensor: Tensor) -> None:
    dist.all_gather(several(tensor), tensor)


def scattered(tensor: Tensor) -> None:
    if dist.get_rank() == 0:
        dist.scatter(torch.empty(tensor.shape), [tensor for _ in several(tensor)], 0)
    else:
        dist.scatter(tensor, None, 0)


def sent_by_address(tensor: Tensor) -> int:
    """The address, as asked for by a package that hands it to NCCL."""
    found: int = eval("tensor.data_ptr()", {"__name__": "vllm.distributed.pynccl", "tensor": tensor})
    return found


LEAVING: dict[str, Callable[[nn.Parameter], Any]] = {
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: np.asarray(p.data),
    "cpu": lambda p: p.cpu(),
    "data.cpu": lambda p: p.data.cpu(),
    "to cpu": lambda p: p.data.to("cpu"),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.data.flatten().item(),
    "float": lambda p: float(p.data.reshape(-1)),
    "save": lambda p: torch.save({"w": p}, io.BytesIO()),
    "save data": lambda p: torch.save(p.data.clone(), io.BytesIO()),
    "pickle": lambda p: pickle.dumps(p.detach()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy_": lambda p: torch.empty(p.shape).copy_(p),
    "copy of data": lambda p: torch.empty(p.shape).copy_(p.data.bfloat16()),
    "elements": lambda p: torch.empty(p.shape).__setitem__(slice(None), p.data),
    "foreach copy": lambda p: torch._foreach_copy_([torch.empty(p.shape)], [p.detach()]),
    "load_state_dict": lambda p: nn.Linear(*reversed(p.shape), bias=False).load_state_dict({"weight": p.data}),
    "shared": lambda p: p.data.share_memory_(),
    "address": lambda p: sent_by_address(p.data),
    "assignment": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "broadcast": lambda p: dist.broadcast(p, 0),
    "broadcast data": lambda p: dist.broadcast(p.data, 0),
    "broadcast a copy": lambda p: dist.broadcast(p.data.to(torch.bfloat16).contiguous(), 0),
    "all_reduce": lambda p: dist.all_reduce(p.detach()),
    **({} if torch.__version__ < "2.12" else {"reduce": lambda p: dist.reduce(p.data, 0)}),  # as the guide says
    "gather": lambda p: dist.gather(p.data, several(p) if dist.get_rank() == 0 else None, 0),
    "gather the parameter": lambda p: dist.gather(p, several(p) if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda p: dist.reduce_scatter(torch.empty(p.shape), [p.data for _ in several(p)]),
    "reduce_scatter the parameter": lambda p: dist.reduce_scatter(torch.empty(p.shape), [p for _ in several(p)]),
    "all_gather": lambda p: gathered_into(p.data),
    "send": lambda p: dist.send(p.data, 1 - dist.get_rank()),
    "isend": lambda p: dist.isend(p.data, 1 - dist.get_rank()),
    "scatter": lambda p: scattered(p.data),
    "scatter the parameter": lambda p: scattered(p),
    "sum": lambda p: p.sum(),
    "norm of data": lambda p: p.data.norm(),
    "function": lambda p: torch.linalg.vector_norm(p.detach()),
    "compared": lambda p: p == 0,
    "row": lambda p: p[0],
    "stack": lambda p: torch.stack([p.data, p.data]),
    "lerp_": lambda p: torch.zeros(p.shape).lerp_(p, 0.5),
    "sub_ of EMA": lambda p: torch.zeros(p.shape).sub_(0.1 * (torch.zeros(p.shape) - p)),
    "foreach lerp": lambda p: torch._foreach_lerp_([torch.zeros(p.shape)], [p], 0.5),
    "out": lambda p: torch.add(p, 1.0, out=torch.zeros(p.shape)),
    "a loss": lambda p: nn.functional.linear(torch.ones(2, p.shape[1]), p).sum(),
    "object": lambda p: dist.broadcast_object_list([p.data], 0) if dist.get_rank() == 0 else pickle.dumps(p),
}


def reads() -> dict[str, str]:
    _, _, p = released()
    found = {}
    for name, read in LEAVING.items():
        try:
            read(p)
            found[name] = "no error"
        except RuntimeError as error:
            found[name] = str(error)
    return found


def test_values_that_leave_the_process_are_an_error(ranks: Launcher) -> None:
    for found in ranks(2)(reads):
        wrong = {name: text for name, text in found.items() if f"{NAME!r} is released" not in text}
        assert not wrong
        assert "GatheredParameters" in found["cpu"] and "cpu()" in found["cpu"]


def uses() -> dict[str, Any]:
    """Metadata is what it is, without a word; so are strides, which the poison does not have."""
    training, model, p = released()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet = [p.shape, p.dtype, p.device, p.numel(), p.requires_grad, p.grad is None, p.is_leaf, p.dim(), len(p)]
        quiet += [p.data.shape, p.detach().dtype, torch.is_complex(p), p.size(0), hash(p) == id(p), p in {p}]
        same = [torch.equal(p, p), p.equal(p), isinstance(p, nn.Parameter), f"{p!r}".startswith(f"{NAME!r} of shape")]
        same += [any(p is other for other in model.parameters()), p.stride() == (p.shape[1], 1), p.is_contiguous()]
        texts = [str(each.message) for each in caught]
    with sharding.GatheredParameters(model.parameters()):
        whole = not is_released(p) and type(p.data) is Tensor and bool(p.isfinite().all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loss_of(model(training.data(0, 2, 6))).backward()
            training.step()
            training.zero_grad()
    return {
        "quiet": len(quiet), "same": same, "texts": texts, "whole": whole, "type": type(p).__name__,
    }  # fmt: skip


def test_metadata_of_released_parameters_is_answered(ranks: Launcher) -> None:
    for found in ranks(2)(uses):
        assert all(found["same"]) and found["whole"] and not found["texts"]
        assert found["type"] == "ReleasedParameter"


def calls_in_a_step() -> int:
    """Calls of `__torch_function__` in a training step."""
    from zero_strategy.fsdp.released import ReleasedParameter

    training, model, _ = released()

    def step() -> None:
        loss_of(model(training.data(0, 2, 6))).backward()
        training.step()
        training.zero_grad()

    step()
    step()
    calls: list[Any] = []
    original = ReleasedParameter.__dict__.get("__torch_function__"), ReleasedParameter.__torch_function__

    def counted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append(func)
        return original[1](func, types, args, kwargs)

    ReleasedParameter.__torch_function__ = classmethod(counted)  # type: ignore[method-assign,assignment]
    try:
        step()
    finally:
        del ReleasedParameter.__torch_function__
    return len(calls)


def test_a_step_asks_released_parameters_for_nothing(ranks: Launcher) -> None:
    assert ranks(2)(calls_in_a_step) == [0, 0]
