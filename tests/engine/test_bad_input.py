"""Settings that cannot be honoured are errors that name the thing and the way out, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


def engine_for(model: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    return ZeroEngine(model, load_config(stage=stage, barrier_seconds=5.0, **options))


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --------------------------------------------------------------------------------------------------- optimizers


class Whitening(torch.optim.Optimizer):
    """An optimizer that nobody knows, and that needs all of a parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad - p.grad.mean(), alpha=group["lr"])


class MyAdam(torch.optim.Adam):
    """Only the constructor differs: the update is torch's."""


class Lookahead(torch.optim.Adam):
    """A step of its own, which a trial finds to be elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def optimizers(stage: int) -> dict[str, str]:
    found: dict[str, str] = {}
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "Whitening": lambda model: Whitening(model.parameters()),
        "MyAdam": lambda model: MyAdam(model.parameters()),
        "Lookahead": lambda model: Lookahead(model.parameters()),
        "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
        "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.parameters())),
    }
    for name, maker in makers.items():
        model = net()
        engine = engine_for(model, stage)
        found[name] = message_of(lambda engine=engine, maker=maker, model=model: engine.attach(maker(model)))
    model = net()
    engine = engine_for(model, stage, elementwise_optimizers=["Whitening"])
    found["asserted"] = message_of(lambda: engine.attach(Whitening(model.parameters())))
    loss_of(model(torch.ones(2, 6))).backward()
    engine.optimizers[0].optimizer.step()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_optimizers_that_need_more_than_an_element(ranks: Launcher, stage: int) -> None:
    reasons = {
        "Adafactor": "whole matrices",
        "SparseAdam": "sparse gradients",
        "Whitening": "in pieces",
    }
    for found in ranks(2)(optimizers, stage):
        assert [found.pop(name) for name in ("asserted", "MyAdam", "Lookahead")] == ["no error"] * 3
        for name, message in found.items():
            if stage == 0 and name != "SparseAdam":
                assert message == "no error", name
            else:
                assert message.startswith("TypeError") and name in message and reasons[name] in message, name
                assert "torch.optim.AdamW" in message and ("stage 0" in message) == (name != "SparseAdam")
                if name == "SparseAdam":
                    assert "elementwise_optimizers" not in message and "at every stage" in message


def parameters_of_optimizers(stage: int) -> dict[str, str]:
    found: dict[str, str] = {}
    model, other = net(), net(seed=1)
    engine = engine_for(model, stage)
    found["foreign"] = message_of(lambda: engine.attach(torch.optim.SGD([*other.head.parameters()], lr=0.1)))
    mixed = [{"params": [model.scale]}, {"params": [model.head.weight, other.head.weight]}]
    found["mixed"] = message_of(lambda: engine.attach(torch.optim.SGD(mixed, lr=0.1)))
    first = torch.optim.SGD([model.head.weight, model.scale], lr=0.1)
    engine.attach(first)
    engine.attach(first)  # again: nothing happens
    loss_of(model(torch.ones(2, 6))).backward()
    found["none"] = message_of(first.step)
    rest = [p for name, p in model.named_parameters() if name not in ("head.weight", "scale")]
    third = torch.optim.Adam(rest[2:])
    engine.attach(third)
    third.add_param_group({"params": rest[:2]})
    found["goes on"] = message_of(first.step) + message_of(third.step)
    found["again"] = message_of(lambda: [loss_of(model(torch.ones(2, 6))).backward(), first.step(), third.step()])
    first.zero_grad()
    third.zero_grad()
    third.add_param_group({"params": [model.head.weight]})
    loss_of(model(torch.ones(2, 6))).backward()
    found["twice later"] = message_of(third.step)
    third.param_groups.pop()
    first.add_param_group({"params": [other.scale]})
    found["foreign later"] = message_of(first.step)
    found["state"] = message_of(first.state_dict)
    found["unattached"] = message_of(lambda: engine.sharded(torch.optim.SGD(other.parameters(), lr=0.1)))
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_foreign_missing_and_doubled_parameters(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(parameters_of_optimizers, stage):
        assert "not a parameter of the sharded module" in found["foreign"] and "SGD" in found["foreign"]
        assert "param group 1" in found["mixed"] and "parameter 1 " in found["mixed"]
        assert "in no optimizer" in found["none"] and "stem.weight" in found["none"]
        assert found["goes on"] == "no errorno error" and found["again"] == "no error"
        assert found["twice later"] == "no error"  # see test_two_optimizers
        assert "not a parameter of the sharded module" in found["foreign later"]
        assert "not attached" in found["unattached"] and "engine.attach" in found["unattached"]


def states_of_optimizers() -> dict[str, str]:
    model = net()
    engine = engine_for(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine.attach(optimizer)
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    whole = engine.optimizer_state_dict(optimizer)
    other = torch.optim.SGD([model.scale], lr=0.1)
    return {
        "save": message_of(optimizer.state_dict),
        "load": message_of(lambda: optimizer.load_state_dict(whole)),
        "groups": message_of(lambda: engine.load_optimizer_state_dict(optimizer, other.state_dict())),
        "right": message_of(lambda: engine.load_optimizer_state_dict(optimizer, whole)),
    }


def test_part_of_an_optimizer_state_is_not_handed_out(ranks: Launcher) -> None:
    for found in ranks(2)(states_of_optimizers):
        assert "engine.optimizer_state_dict" in found["save"]
        assert "engine.load_optimizer_state_dict" in found["load"]
        assert found["groups"].startswith("ValueError") and found["right"] == "no error"


# ------------------------------------------------------------------------------------------------------ modules


def divided(placements: list[Placement]) -> nn.Module:
    """A layer among all ranks, on a mesh of as many dimensions as there are placements."""
    mesh = init_device_mesh("cpu", (*[1] * (len(placements) - 1), dist.get_world_size()))
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False))
    return nn.Sequential(layer)


def modules() -> dict[str, str]:
    found: dict[str, str] = {}
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    found["lazy"] = message_of(lambda: engine_for(lazy))
    found["Partial"] = message_of(lambda: engine_for(divided([Partial()])))
    found["2-D"] = message_of(lambda: engine_for(divided([Replicate(), Shard(0)])))
    found["mesh.tensor"] = message_of(lambda: engine_for(net(), mesh={"tensor": 2}))
    found["tensor 1"] = message_of(lambda: engine_for(divided([Shard(0)]), mesh={"tensor": 1}))
    found["tensor 3"] = message_of(lambda: engine_for(divided([Shard(0)]), mesh={"tensor": 3}))
    turning = nn.Linear(2, 2, dtype=torch.complex64)
    found["complex"] = message_of(lambda: engine_for(turning))
    model = net()
    engine = engine_for(model)
    found["second engine"] = message_of(lambda: engine_for(model))
    found["part"] = message_of(lambda: engine_for(model.blocks[0]))
    found["first goes on"] = message_of(lambda: model(torch.ones(2, 6)))
    found["class"] = message_of(lambda: engine_for(net(), units={"classes": ["Blok"]}))
    found["pattern"] = message_of(lambda: engine_for(net(), units={"patterns": ["layers.*"]}))
    found["mesh"] = message_of(lambda: engine_for(net(), mesh={"replicate": 4}))
    found["shard"] = message_of(lambda: engine_for(net(), mesh={"shard": 3}))
    found["stage"] = message_of(lambda: engine_for(net(), stage=4))
    found["empty"] = message_of(lambda: engine_for(nn.Identity()))
    del engine
    return found


def test_modules_and_meshes_that_cannot_be_sharded(ranks: Launcher) -> None:
    for found in ranks(2)(modules):
        assert "'1.weight'" in found["lazy"] and "run one forward" in found["lazy"]
        assert "'0.weight' is a DTensor with placements (Partial(sum),)" in found["Partial"]
        assert "'0.weight'" in found["2-D"] and "a mesh of one dimension" in found["2-D"]
        assert "call parallelize_module" in found["mesh.tensor"] and "rank 0" in found["mesh.tensor"]
        assert "among 2 tensor-parallel rank(s), but mesh.tensor is 1" in found["tensor 1"]
        assert "mesh.tensor is 3" in found["tensor 3"] and "world size 2: 1, 2" in found["tensor 3"]
        assert "'weight' is complex" in found["complex"]
        assert "another engine" in found["second engine"] and "another engine" in found["part"]
        assert found["first goes on"] == "no error"
        assert "'Blok'" in found["class"] and "Block" in found["class"]
        assert "'layers.*'" in found["pattern"]
        assert "mesh.replicate" in found["mesh"] and "world size 2" in found["mesh"]
        assert "mesh.shard" in found["shard"]
        assert "stage" in found["stage"]
        assert found["empty"] == "no error"


class Grown(nn.Module):
    """Gets a parameter after it was sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.late if hasattr(self, "late") else x


def late_parameters(stage: int) -> str:
    """A parameter that no engine knows would be trained by each rank alone."""
    model = Grown()
    engine = engine_for(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    model.late = nn.Parameter(torch.ones(6))

    def train() -> None:
        optimizer.add_param_group({"params": [model.late]})
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()

    return message_of(train)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_came_later_is_refused(ranks: Launcher, stage: int) -> None:
    for message in ranks(2)(late_parameters, stage):
        assert "'late'" in message and "engine.close(gather=True)" in message


def different_models() -> str:
    """Rank 1 built another model."""
    rank = dist.get_rank()
    return message_of(lambda: engine_for(nn.Linear(6, 6 + rank)))


def test_ranks_with_different_models(ranks: Launcher) -> None:
    for message in ranks(2)(different_models):
        assert message != "no error"
        assert "weight" in message and "rank" in message


def torn_backward(stage: int) -> dict[str, str]:
    """An exception in backward, and nobody calls `reset`."""
    model = net()
    engine = engine_for(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)

    def fail(_: Tensor) -> None:
        raise KeyError("in backward")

    hidden: list[Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: hidden.append(output))
    loss = loss_of(model(torch.ones(2, 6)))
    hidden[0].register_hook(fail)
    handle.remove()
    with contextlib.suppress(KeyError):
        loss.backward()
    rank = dist.get_rank()

    def train() -> None:
        loss_of(model(torch.full((2, 6), float(rank)))).backward()
        optimizer.step()

    found = {"without": message_of(train)}
    engine.reset()
    model.zero_grad()
    found["with"] = message_of(train)
    weights = [value.tolist() for value in engine.full_state_dict().values()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, weights)
    found["equal"] = str(all(other == weights for other in everyone))
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_torn_backward_without_reset_does_not_pass_in_silence(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(torn_backward, stage):
        assert found["equal"] == "True"
        assert found["with"] == "no error"
        assert found["without"] == "no error" or "reset" in found["without"]
