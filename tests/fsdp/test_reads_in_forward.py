"""Stage 3: code of a forward or a backward reads parameters of units that are not in their own forward.

They are gathered on demand, and kept until the backward that may need them: trainings are those of plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zero_strategy.integrations.deepspeed as deepspeed
from tests.engine.nets import Block, loss_of, seeded
from tests.engine.trainings import DEFAULTS, KEPT, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.fsdp.released import is_released

STAGE_3 = Setting(3, "per_micro_batch")
SETTINGS = [
    STAGE_3,
    KEPT,
    Setting(3, "per_micro_batch", {"reshard_after_forward": False}),
    Setting(3, "per_micro_batch", {"activation_checkpointing": "full"}),
]
"""Where units are released; elsewhere such reads find what is there."""


class Blocks(nn.Module):
    """Three units; subclasses use them in other ways than calling each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class ByForward(Blocks):
    """Calls `block.forward(x)`, which runs no hooks of the block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        out: Tensor = self.head(x)
        return out


class OtherWeight(Blocks):
    """Uses a weight of the first block after its forward, and of the last before."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(F.linear(x, self.blocks[2].up.weight), self.blocks[2].down.weight)
        x = self.blocks[1](self.blocks[0](x))
        x = x + F.linear(x, self.blocks[0].up.weight)[:, :6]
        out: Tensor = self.head(self.blocks[2](x))
        return out


class Penalised(Blocks):
    """Adds a penalty over the blocks' weights to its output, read first without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = sum(block.up.weight.norm() for block in self.blocks)
        penalty = sum(block.up.weight.pow(2).sum() for block in self.blocks)
        return super().forward(x) + penalty / size


class Standardised(Blocks):
    """Divides a weight by its norm, through `p.data`, `p.detach()` and a view."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[1].up.weight
        x = x + F.linear(x, weight.view(12, 6) / weight.detach().norm())[:, :6] / weight.data.abs().max()
        return super().forward(x)


class _Recomputed(torch.autograd.Function):
    """Computes a block again in its backward, from its parameters alone, as reversible models do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block.forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            ctx.block.forward(again).backward(gradients[0])
        return again.grad, None


class Reversible(Blocks):
    """Blocks are computed again in backward by a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = _Recomputed.apply(x, block)
        out: Tensor = self.head(x)
        return out


class _ReadInBackward(torch.autograd.Function):
    """Reads a weight in backward that its forward did not save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.block.up.weight.norm(), None


class LateReader(Blocks):
    """The gradient of its input is scaled by a weight that is read in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return super().forward(_ReadInBackward.apply(x, self.blocks[2]))


MODELS = [ByForward, OtherWeight, Penalised, Standardised, Reversible, LateReader]


def trained(training: PlainTraining, build: type[nn.Module], evaluates: bool = False) -> None:
    model = seeded(build)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        for micro in range(2):
            with training.scope():
                loss = loss_of(model(training.data(2 * step + micro, 2, 6)))
            training.note(loss)
            training.backward(loss)
        training.step()
        training.zero_grad()
        with torch.no_grad():
            training.note(model(torch.ones(2, 6)))
        if isinstance(training, ShardedTraining) and training.own.stage == 3:
            assert all(is_released(p) for p in model.parameters()), "what was gathered on demand is given back"


@pytest.mark.parametrize("build", MODELS)
def test_parameters_of_other_units_train_as_in_plain_torch(ranks: Launcher, build: type[nn.Module]) -> None:
    """At stage 3 in all settings, and at one of the other stages."""
    settings = [DEFAULTS[MODELS.index(build) % 3], *SETTINGS]
    for wrong in ranks(2)(play, partial(trained, build=build), settings, tolerance=1e-6):
        assert not wrong


def evaluated(build: type[nn.Module]) -> list[bool]:
    """True where all is released after forwards without gradients, and in inference mode."""
    training = ShardedTraining(STAGE_3)
    model = seeded(build)
    training.shard(model)
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(torch.ones(2, 6))
        found.append(all(is_released(p) for p in model.parameters()))
    return found


@pytest.mark.parametrize("build", [ByForward, OtherWeight, Penalised])
def test_evaluation_gives_back_what_it_gathered(ranks: Launcher, build: type[nn.Module]) -> None:
    for found in ranks(2)(evaluated, build):
        assert all(found)


def registered(training: PlainTraining) -> None:
    """A weight that DeepSpeed's scripts register is whole when the module's forward begins, as long as it is so."""
    model = seeded(OtherWeight)
    deepspeed.zero.register_external_parameter(model.blocks[1], model.blocks[2].up.weight)
    model.blocks[1].register_forward_pre_hook(
        lambda *_: training.note(is_released(model.blocks[2].up.weight))  # type: ignore[union-attr]
    )
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(2):
        loss = loss_of(model(training.data(step, 2, 6)))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
    deepspeed.zero.unregister_external_parameter(model.blocks[1], model.blocks[2].up.weight)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not registered"):
        deepspeed.zero.unregister_external_parameter(model.blocks[1], model.blocks[2].up.weight)  # type: ignore[arg-type]


def test_a_registered_external_parameter_is_gathered_with_its_module(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, registered, DEFAULTS, tolerance=1e-6):
        assert not wrong


class OneRankReads(Blocks):
    """One rank alone looks at a weight in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            self.blocks[1].up.weight.norm()
        return super().forward(x)


def read_by_one() -> str:
    model = seeded(OneRankReads)
    ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}, watchdog={"silence_seconds": 2.0}))
    try:
        for _ in range(2):
            loss_of(model(torch.ones(2, 6))).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_read_by_one_rank_is_named(fresh_ranks: Launcher) -> None:
    for text in fresh_ranks(2)(read_by_one):
        assert "blocks" in text


def transformed() -> dict[str, str]:
    """`torch.func` over a sharded module, beside a plain one."""
    plain, model = seeded(Blocks), seeded(Blocks)
    ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}))
    x, found = torch.linspace(-1.0, 1.0, 6), dict[str, str]()
    calls: dict[str, Callable[[nn.Module], Any]] = {
        "jacrev": lambda m: torch.func.jacrev(m)(x),
        "jacfwd": lambda m: torch.func.jacfwd(m)(x),
        "vmap": lambda m: torch.func.vmap(m)(x.repeat(3, 1)),
        "vmap of grad": lambda m: torch.func.vmap(torch.func.grad(lambda y: m(y).sum()))(x.repeat(3, 1)),
        "jvp": lambda m: torch.func.jvp(m, (x,), (torch.ones(6),))[1],
        "vjp": lambda m: torch.func.vjp(m, x)[1](torch.ones(3))[0],
        "hessian": lambda m: torch.func.hessian(lambda y: m(y).sum())(x),
        "functional_call": lambda m: torch.func.functional_call(m, {"head.bias": torch.ones(3)}, (x,)),
    }
    for name, call in calls.items():
        expected = call(plain)
        try:
            difference = (call(model) - expected).abs().max()
            found[name] = "" if difference < 1e-6 else f"off by {difference}"
        except Exception as error:  # compared with the way out
            found[name] = f"{type(error).__name__}: {error}"
    return found


class WithTangents(Blocks):
    """Its output has the tangents of a forward-mode derivative, whose backward needs the weights again."""

    def forward(self, x: Tensor) -> Tensor:
        out, tangents = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return out + tangents


def test_forward_mode_derivatives_have_a_backward(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, partial(trained, build=WithTangents), DEFAULTS, tolerance=1e-6):
        assert not wrong


def traced() -> list[str]:
    """Errors of `torch.jit.trace`, outside of a scope and inside of one."""
    model = seeded(Blocks)
    ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}))
    found = []
    for parameters in ([], list(model.parameters())):
        try:
            with GatheredParameters(parameters), torch.no_grad():
                torch.jit.trace(model, torch.ones(2, 6), check_trace=False)
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_tracing_released_units_is_refused(ranks: Launcher) -> None:
    for found in ranks(2)(traced):
        assert all("torch.jit.trace" in text and "full_state_dict" in text for text in found)


def test_transforms_of_functions_run_over_released_units(ranks: Launcher) -> None:
    for found in ranks(2)(transformed):
        assert not {name: text for name, text in found.items() if text}
