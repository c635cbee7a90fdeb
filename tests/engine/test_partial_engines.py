"""Engines for parts of a model, each on a lane of ranks of its own, and gradients that come from elsewhere."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import own_group
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.ties import Gathered
from zero_strategy.train_state import ModelPart

STAGES = (0, 1, 2, 3)
STEPS = 3


def part(dp_group: int) -> nn.Module:
    torch.manual_seed(dp_group)
    return nn.Sequential(nn.Linear(5 + dp_group, 7), nn.Tanh(), nn.Linear(7, 3))


def rows(dp_group: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dp_group + 10 * rank + step)
    return torch.randn(4, 5 + dp_group, generator=generator)


def extra(rank: int, step: int) -> Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(1000 + 10 * rank + step))


def train_plain(dp_group: int, ranks: int) -> dict[str, Tensor]:
    model = part(dp_group)
    weight = model[2].weight  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        copies = [copy.deepcopy(model) for _ in range(ranks)]
        for rank, each in enumerate(copies):
            each(rows(dp_group, rank, step)).square().mean().backward()
        for parameter, *theirs in zip(model.parameters(), *(each.parameters() for each in copies)):
            parameter.grad = sum(each.grad for each in theirs) / ranks  # type: ignore[misc,operator]
        if dp_group == 0:
            weight.grad += sum(extra(rank, step) for rank in range(ranks)) / ranks
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def train(stage: int, dp_groups: list[list[int]] | None) -> dict[str, Any]:
    me = torch.distributed.get_rank()
    dp_group = 0 if dp_groups is None else next(number for number, ranks in enumerate(dp_groups) if me in ranks)
    model = part(dp_group)
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}), part=ModelPart(dp_groups=dp_groups))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine.attach(optimizer)
    rank = engine.mesh.rank
    for step in range(STEPS):
        model(rows(dp_group, rank, step)).square().mean().backward()
        if dp_group == 0:
            engine.add_gradient(model[2].weight, extra(rank, step))  # type: ignore[index]
        engine.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.zero_grad()
    return {"lane": dp_group, "team": engine.mesh.world_group.world_size, "weights": engine.full_state_dict()}


@pytest.mark.parametrize("dp_groups", [None, [[0, 1], [2, 3]], [[0, 2], [3, 1]], [[2], [0], [3], [1]]])
def test_every_lane_trains_its_own_part(ranks: Launcher, dp_groups: list[list[int]] | None) -> None:
    world = 2 if dp_groups is None else 4
    for stage in STAGES:
        for found in ranks(world)(train, stage, dp_groups):
            expected = train_plain(found["lane"], 2 if dp_groups is None else len(dp_groups[0]))
            assert found["team"] == world
            for name, value in found["weights"].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def refused() -> None:
    model = part(0)
    with pytest.raises(ValueError, match=r"\[\[0\], \[0\]\].* each of the 2 ranks once"):
        ZeroEngine(model, load_config(stage=1), part=ModelPart(dp_groups=[[0], [0]]))
    engine = ZeroEngine(model, load_config(stage=1), part=ModelPart(dp_groups=[[0], [1]]))
    with pytest.raises(ValueError, match="trainable parameter of the engine's module"):
        engine.add_gradient(nn.Parameter(torch.ones(3)), torch.ones(3))
    with pytest.raises(ValueError, match=r"shape \(3,\) for a parameter of \(7,\)"):
        engine.add_gradient(model[0].bias, torch.ones(3))  # type: ignore[index]


def test_wrong_lanes_and_gradients(ranks: Launcher) -> None:
    ranks(2)(refused)


class Copies:
    """Says when copies of weights get new values, and whether the parameters are whole then."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight, self.seen = weight, list[tuple[int, ...]]()

    def aliases(self) -> dict[str, str]:
        return {"copy": "2.weight"}

    def publish(self, gathered: Gathered) -> None:
        with gathered([self.weight]):
            self.seen.append(tuple(self.weight.shape))


def joined(folder: str) -> None:
    """A part, with a group and copies that others have made."""
    model, made = part(0), list[Communicator]()

    def further() -> dict[str, Communicator]:
        group = own_group([[0, 1]], timeout=timedelta(seconds=60))
        made.append(Communicator(group, CommunicationCounters(), owns=True))
        return {"other parts": made[0]}

    copies = Copies(model[2].weight)  # type: ignore[index]
    config = load_config(stage=3, units={"min_numel": 0})
    before = ZeroEngine(part(0), config)
    before.save(folder).wait()
    engine = ZeroEngine(model, config, part=ModelPart(further_groups=further, copies=copies))
    group = engine.mesh.further["other parts"]
    assert group is made[0] and group.observed is engine.observed and group in engine.model.norm_groups
    assert group.track is not None and group.track.key == "other parts 0-1"
    assert engine.aliases == {"copy": "2.weight"} and not copies.seen  # whoever made the copies gives the first values
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    model(rows(0, engine.mesh.rank, 0)).sum().backward()
    optimizer.step()
    assert copies.seen == [(3, 7)]
    engine.load_weights(folder)
    assert copies.seen == [(3, 7)] * 2
    engine.close()
    assert group.closed


def test_what_joins_a_part_to_others_is_handed_in(ranks: Launcher, tmp_path: Any) -> None:
    ranks(2)(joined, str(tmp_path / "saved"))


# ------------------------------------------------------------------------------------------- checkpoints of the whole


def layers(numbers: list[int]) -> nn.Module:
    """Some layers of a model, under the names of the whole."""
    found = nn.ModuleDict()
    for number in numbers:
        torch.manual_seed(number)
        found[f"layer{number}"] = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
    if 0 in numbers and 2 in numbers:
        found["layer2"][2].weight = found["layer0"][2].weight  # type: ignore[index]
    return found


def place(name: str) -> tuple[int, ...]:
    return (int(name.removeprefix("layer").split(".")[0]),)


class Run(nn.Module):
    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = layers(numbers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def name_place(name: str) -> tuple[int, ...]:
    return place(name.removeprefix("layers."))


def begin(stage: int, parts: list[list[int]]) -> tuple[Run, ZeroEngine, torch.optim.Optimizer]:
    """The layers of one of the parts, trained by a lane of its own."""
    world, me = torch.distributed.get_world_size(), torch.distributed.get_rank()
    size = world // len(parts)
    dp_groups = [list(range(size * dp_group, size * (dp_group + 1))) for dp_group in range(len(parts))]
    model = Run(parts[me // size])
    config = load_config(stage=stage, units={"min_numel": 0})
    of_whole = ModelPart(dp_groups=dp_groups if len(parts) > 1 else None, order=name_place)
    engine = ZeroEngine(model, config, part=of_whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine.attach(optimizer)
    return model, engine, optimizer


def save(stage: int, parts: list[list[int]], folder: str, steps: int) -> None:
    model, engine, optimizer = begin(stage, parts)
    for _ in range(steps):
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.save(folder, asynchronous=True).wait()


def load_and_save(stage: int, parts: list[list[int]], source: str, folder: str) -> None:
    _, engine, _ = begin(stage, parts)
    engine.load(source)
    engine.save(folder).finish()


def tensor_files(folder: Any) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


PARTS = [[[0, 1, 2, 3, 4]], [[0, 2], [1, 3, 4]], [[3], [1], [0, 2], [4]]]
"""The tied layers are always together."""


def test_checkpoints_are_of_the_whole_whatever_its_parts(ranks: Launcher, tmp_path: Any) -> None:
    ranks(4)(save, 2, PARTS[1], str(tmp_path / "first"), 2)
    first = tensor_files(tmp_path / "first")
    for number, parts in enumerate([*PARTS, PARTS[0]]):
        folder = tmp_path / str(number)
        ranks(2 if number == 3 else 4)(load_and_save, number, parts, str(tmp_path / "first"), str(folder))
        assert tensor_files(folder) == first
    whole = Run(PARTS[0][0])
    found = {name for name in load_file(tmp_path / "first")}
    assert found == set(whole.state_dict()) - {"layers.layer2.2.weight"}


def load_file(folder: Any) -> dict[str, Tensor]:
    from safetensors.torch import load_file as read

    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in read(path).items()}
