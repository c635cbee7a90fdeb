"""Divided experts where a parameter is not the same on all ranks, and inputs of unusual forms, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.experts.model import EXPERTS, WIDTH, Experts, Model, batch, make
from tests.experts.test_combinations import message_of
from tests.launcher import Launcher
from zero_strategy.engine import ZeroEngine

Change = Callable[[Model], None]
STEPS = 3


def alone(
    world: int, change: Change | None = None, norm: float = 0.0, penalty: float = 0.0, options: Any = None
) -> dict[str, Tensor]:
    model = make(**(options or {}))
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        for rank in range(world):
            (model(batch(rank, step)) / world).backward()
        if penalty:
            for block in model.blocks:
                up = block.experts.up
                assert up.grad is not None
                up.grad += penalty * torch.arange(up.numel(), dtype=torch.float64).view(up.shape)
        if norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def train(
    stage: int, change: Change | None = None, norm: float = 0.0, penalty: float = 0.0, options: Any = None,
    foreach: bool | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    model, rank = make(**(options or {})), dist.get_rank()
    if change is not None:
        change(model)
    engine = ZeroEngine(model, {"stage": stage, "mesh": {"expert": 2}})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine.attach(optimizer)
    for step in range(STEPS):
        model(batch(rank, step)).backward()
        if penalty:
            for block in model.blocks:
                up = block.experts.up
                whole = (EXPERTS, *up.shape[1:])
                values = penalty * torch.arange(EXPERTS * up[0].numel(), dtype=torch.float64).view(whole)
                engine.add_gradient(up, values)
        if norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
    found = engine.full_state_dict()
    engine.close()
    return found


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_by_torch_s_own_function(ranks: Launcher, stage: int, foreach: bool | None) -> None:
    wanted = alone(2, norm=0.05)
    for found in ranks(2)(train, stage, None, 0.05, 0.0, None, foreach):
        assert (
            furthest(found, wanted) < 1e-6
        )  # its coefficient is of float32 norms elsewhere, and the same on all ranks


@pytest.mark.parametrize("stage", [1, 2])
def test_added_gradients_of_all_experts_count_once(ranks: Launcher, stage: int) -> None:
    """The same on all ranks: the mean over ranks is that."""
    wanted = alone(4, penalty=1e-4)
    assert furthest(ranks(4)(train, stage, None, 0.0, 1e-4)[0], wanted) < 1e-12


def small_choices(model: Model) -> None:
    """The router gives choices as int32."""
    for block in model.blocks:
        block.experts.register_forward_pre_hook(lambda module, args: (args[0], args[1].int(), args[2]))


def frozen_before(model: Model) -> None:
    """Nothing learns but the experts of the last block and the head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("head", "blocks.1.experts")))


@pytest.mark.parametrize("change", [small_choices, frozen_before])
def test_unusual_layers_train_as_in_one_process(ranks: Launcher, change: Change) -> None:
    wanted = alone(2, change)
    assert furthest(ranks(2)(train, 3, change)[0], wanted) < 1e-12


class Directions(Experts):
    """Experts of directions: the norm of a row of zeros has no gradient."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens / tokens.norm(dim=-1, keepdim=True), chosen, weights)


def directions(model: Model) -> None:
    for block in model.blocks:
        block.experts.__class__ = Directions


def test_a_rank_without_rows_gives_no_nan(ranks: Launcher) -> None:
    only = {"only": 3}  # the second rank's experts are never chosen
    assert furthest(ranks(2)(train, 1, directions, 0.0, 0.0, only)[0], alone(2, directions, options=only)) < 1e-12


def no_tokens(stage: int) -> tuple[float, bool]:
    """A rank whose batches have no tokens; its loss is a sum, which is zero."""
    model, plain, rank = make(), make(), dist.get_rank()
    engine = ZeroEngine(model, {"stage": stage, "mesh": {"expert": 2}})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    engine.attach(optimizers[0])
    for step in range(2):
        x = batch(0, step)
        (model.head(run(model, x if rank == 0 else x[:0])).sum()).backward()
        (plain.head(run(plain, x)).sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = engine.full_state_dict()
    engine.close()
    return furthest(found, dict(plain.state_dict())), True


def run(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def double_backward(stage: int) -> Tensor:
    model = make()
    engine = ZeroEngine(model, {"stage": stage, "mesh": {"expert": 2}}) if stage else None
    rank = dist.get_rank() if engine else 0
    x = batch(rank, 0).requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    (first**2).sum().backward()
    found = model.blocks[0].dense.weight.grad
    assert found is not None
    result = torch.as_tensor(found * 1.0).clone()
    if engine is not None:
        engine.close()
    return result


def test_gradients_of_gradients_pass_through_experts(ranks: Launcher) -> None:
    """With the batch of one rank on both the mean is that of one process."""

    wanted = double_backward(0)
    assert float((ranks(2)(same_batch_twice)[0] - wanted).abs().max()) < 1e-12


def same_batch_twice() -> Tensor:
    model = make()
    engine = ZeroEngine(model, {"stage": 1, "mesh": {"expert": 2}})
    x = batch(0, 0).requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    (first**2).sum().backward()
    found = model.blocks[0].dense.weight.grad
    assert found is not None
    result = torch.as_tensor(found * 1.0).clone()
    engine.close()
    return result


def whole_state(stage: int) -> dict[str, bool]:
    """The module's own state dict has all experts, and takes all."""
    model, other = make(), make(5)
    engine = ZeroEngine(model, {"stage": stage, "mesh": {"expert": 2}})
    saved = model.state_dict()
    found = {"saved": all(torch.equal(saved[name], value) for name, value in make().state_dict().items())}
    model.load_state_dict(other.state_dict())
    now = engine.full_state_dict()
    found["loaded"] = all(torch.equal(now[name], value) for name, value in other.state_dict().items())
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dicts_of_the_module_have_all_experts(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(whole_state, stage):
        assert all(found.values()), found


class Scaled(Experts):
    """With a number for each expert in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(EXPERTS))


def named() -> dict[str, str]:
    """Messages, the same on all ranks."""
    found = {}
    found["buffer"] = message_of(lambda: ZeroEngine(Scaled(), {"mesh": {"expert": 2}}))
    model = make()
    engine = ZeroEngine(model, {"stage": 1, "mesh": {"expert": 2}})
    blocks = list(model.blocks)
    found["layers"] = message_of(lambda: blocks[dist.get_rank()](batch(0, 0)))
    experts, rows = model.blocks[0].experts, torch.ones(3, WIDTH, dtype=torch.float64)
    one, all_of_them = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, EXPERTS, dtype=torch.float64)
    found["weights"] = message_of(lambda: experts(rows, one, all_of_them))
    found["number"] = message_of(lambda: experts(rows, one - 1, all_of_them[:, :1]))
    shapes = list[Any]()
    engine.close(gather=True)
    seen = make()
    seen.blocks[0].experts.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    engine = ZeroEngine(seen, {"stage": 1, "mesh": {"expert": 2}})
    seen(batch(0, 0))
    found["hook"] = str(shapes)
    engine.close()
    return found


def test_what_is_wrong_is_named_on_all_ranks(ranks: Launcher) -> None:
    for found in ranks(2)(named):
        assert "buffer 'scale'" in found["buffer"]
        assert "rank 0 in 'blocks.0.experts', rank 1 in" in found["layers"]
        assert "weights (3, 8)" in found["weights"]
        assert "blocks.0.experts chose experts that are not there" in found["number"]
        assert found["hook"] == "[(15, 8)]"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_tokens_takes_part(ranks: Launcher, stage: int) -> None:
    for difference, _ in ranks(2)(no_tokens, stage):
        assert difference < 1e-12


class Shifted(nn.Module):
    """Takes the place of a block that some ranks leave out."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def layer_drop() -> str:
    model = make(blocks=3)
    engine = ZeroEngine(model, {"stage": 1, "mesh": {"expert": 2}})
    model.blocks[dist.get_rank()] = Shifted()  # type: ignore[assignment]
    found = message_of(lambda: model(batch(0, 0)).backward())
    engine.close()
    return found


def test_ranks_that_drop_other_layers_are_told(ranks: Launcher) -> None:
    for text in ranks(2)(layer_drop):
        assert "run different layers of experts" in text and "LayerDrop" in text
