"""Checkpoints on two ranks: parts of inputs and what is sent for them, bit-equal gradients under every ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.activation.nets import OPTIONS, WIDTH, Block, blocks, direct, tracker, value
from tests.engine.trainings import DEFAULTS, PlainTraining, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.activation.functional import (
    PROCESS,
    Checkpointer,
    configure,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from zero_strategy.activation.settings import CheckpointSettings, ModelParallel
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


class Pair:
    """A unit of two model-parallel ranks."""

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return 0


PARTITIONED = {
    "alone": CheckpointSettings(True),
    "contiguous": CheckpointSettings(True, True, 4),
    "cpu": CheckpointSettings(True, checkpoint_in_cpu=True),
    "all": CheckpointSettings(True, True, 4, True, True, True),
}
SHAPES = ((4, WIDTH), (3, 5, WIDTH))
"""The second has a number of elements that two ranks cannot share equally, with one column less."""


def model_parallel(settings: CheckpointSettings, shape: tuple[int, ...], odd: bool) -> dict[str, Any]:
    """A stack of checkpointed blocks, every rank with the same weights and inputs; and the same without checkpoints."""
    found: dict[str, Any] = {}
    results = []
    for run in (direct, None):
        states = tracker()
        runner = Checkpointer(settings, ModelParallel.of(Pair()), lambda: states)  # noqa: B023
        torch.manual_seed(2)
        x, layers = value(*shape), blocks(4, states)
        h = x[..., : WIDTH - 1] if odd else x
        for layer in layers:
            whole = lambda part, layer=layer: layer(nn.functional.pad(part, (0, WIDTH - part.shape[-1])))  # noqa: E731
            h = (run or runner.checkpoint)(whole, h)[..., : h.shape[-1]].contiguous()
        if run is None:
            assert runner.kept is not None
            found["kept"], found["reserved"] = runner.kept.kept_bytes, runner.kept.reserved_bytes
            found["sent in forward"] = runner.counters.elements["all_gather"]
        h.square().sum().backward()
        results.append([h.detach(), x.grad, *(p.grad for p in layers.parameters()), torch.get_rng_state()])
        if run is None:
            found["sent"] = runner.counters.bytes["all_gather"]
            found["left"] = runner.kept.kept_bytes if runner.kept else None
    found["equal"] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    found["input"] = h.nbytes
    return found


def seeded_as_model_parallel() -> tuple[list[float], list[float], int]:
    configure(Pair(), partition_activations=True)
    model_parallel_cuda_manual_seed(3)
    default = torch.rand(3).tolist()
    with get_cuda_rng_tracker().fork():
        own = torch.rand(3).tolist()
    PROCESS.checkpointer.checkpoint(torch.tanh, value(4, WIDTH)).sum().backward()
    sent = PROCESS.checkpointer.counters.calls["all_gather"]
    PROCESS.clear()
    return default, own, sent


def all_partitioned() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in PARTITIONED.items():
        for odd in (False, True):
            found[f"{name} {odd}"] = model_parallel(settings, SHAPES[odd], odd)
    found["seeds"] = seeded_as_model_parallel()
    return found


def test_each_of_two_ranks_keeps_half_of_an_input_and_gathers_it_in_backward(ranks: Launcher) -> None:
    results = ranks(2)(all_partitioned)
    for found in results:
        for name in PARTITIONED:
            for odd in (False, True):
                case = found[f"{name} {odd}"]
                assert case["equal"], name
                whole = case["input"]  # of 64 elements, or of 3 x 5 x 15
                half = whole // 2 if not odd else (whole // 4 + 1) // 2 * 4
                room = -(-half // 64) * 64
                assert case["kept"] == 4 * room and (odd or 2 * case["kept"] == 4 * whole)
                assert (case["sent in forward"], case["sent"], case["left"]) == (0, 4 * half, 0)
                if name in ("contiguous", "all"):
                    assert case["reserved"] == 4 * room
    (default, own, sent), (other_default, other_own, other_sent) = (found["seeds"] for found in results)
    assert default == other_default and own != other_own and sent == other_sent == 1


# ---- ZeRO ----


class Net(nn.Module):
    """An embedding (no input needs a gradient), blocks, one with adapters, a head and an argument of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(adapter=True), Block(), Block()])
        self.head, self.gain = nn.Linear(WIDTH, 3), nn.Parameter(torch.ones(WIDTH))

    def forward(self, run: Callable[..., Any], tokens: Tensor) -> Tensor:
        mask = (tokens == 1)[..., None]
        h = run(self.embedding, tokens)
        h = run(self.blocks[0], h, None)
        h = run(self.blocks[1], h, mask, scale=self.gain)
        h = run(lambda pair: run(self.blocks[3], run(self.blocks[2], pair["h"])), {"h": h, "none": None})
        out: Tensor = self.head(h)
        return out


def script(training: PlainTraining) -> None:
    """Trained by the plain training without checkpoints, and by the sharded one under each of the options in turn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    training.shard(model)
    training.attach(torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05, foreach=False))
    torch.manual_seed(40 + training.rank)
    for step, settings in enumerate(OPTIONS.values()):
        run = Checkpointer(settings, ModelParallel()).checkpoint if isinstance(training, ShardedTraining) else direct
        tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(10 * step + training.rank))
        loss = model(run, tokens).square().sum()
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()


def same_data_partitioned(training: PlainTraining) -> None:
    """Ranks that see the same data keep halves of inputs while ZeRO divides the weights."""
    layers = blocks(4)
    model = nn.Sequential(*layers)
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    runner = Checkpointer(PARTITIONED["all"], ModelParallel.of(Pair()))
    run = runner.checkpoint if isinstance(training, ShardedTraining) else direct
    torch.manual_seed(1)
    for step in range(2):
        h = value(4, WIDTH, seed=step)
        for layer in layers:
            h = run(layer, h)
        training.note(h)
        training.backward(h.square().sum())
        training.step()
        training.zero_grad()


def elements_gathered(checkpointed: bool) -> int:
    """By one rank in a step of stage 3, after the order of units is known."""
    model = nn.Sequential(*blocks(4))
    engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0, "classes": ["Block"]}))
    run = Checkpointer(OPTIONS["cpu"], ModelParallel()).checkpoint if checkpointed else direct
    for _ in range(2):
        engine.counters.reset()
        h = value(4, WIDTH)
        for layer in model:
            h = run(layer, h)
        h.sum().backward()
    return engine.counters.elements["all_gather"]


def zero_stages() -> list[Any]:
    gathered = elements_gathered(False), elements_gathered(True)
    return [play(script, DEFAULTS), play(same_data_partitioned, DEFAULTS), gathered]


def test_training_is_bit_equal_under_every_stage_and_option(ranks: Launcher) -> None:
    for world in (1, 2):
        if world == 1:
            assert not play(script, DEFAULTS)
            continue
        for *wrong, (plain, checkpointed) in ranks(world)(zero_stages):
            assert wrong == [{}, {}]
            assert checkpointed == plain > 0  # a unit is gathered once for its recomputation and its backward
