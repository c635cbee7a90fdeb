"""Activations of plain numbers are what autograd keeps of such a GPT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTSize, loss_fn
from tests.activation.alive import Alive, Recomputing
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.planning.gpt_shape import gpt_shape
from zero_strategy.planning.model_shape import GRADIENTS, ModelShape

SIZE = GPTSize(width=64, depth=3, heads=2, vocabulary=512)
ROWS, LENGTH = 2, 32


def kept(model: nn.Module) -> int:
    """Bytes of all storages that a forward saves for backward, parameters left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_fn(model(tokens), tokens)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def test_a_forward_keeps_what_is_planned() -> None:
    shape = gpt_shape(SIZE.width, SIZE.depth, SIZE.vocabulary)
    assert shape.costs is not None
    planned = shape.costs.nbytes(ROWS * LENGTH, 4)
    transient = ROWS * LENGTH * 2 * 4 * SIZE.vocabulary  # logits and their gradient, around the beginning of backward
    assert kept(GPT(SIZE, LENGTH)) == pytest.approx(planned - transient, rel=0.02)


def test_recomputed_blocks_keep_their_inputs() -> None:
    """Beside what one block keeps while it is run again, which a forward alone does not show."""
    shape = gpt_shape(SIZE.width, SIZE.depth, SIZE.vocabulary)
    assert shape.costs is not None
    model = GPT(SIZE, LENGTH)
    model.blocks = nn.ModuleList(Recomputing(block) for block in model.blocks)
    loss, backward = 3 * SIZE.vocabulary, shape.costs.per_layer + GRADIENTS * SIZE.width  # one after the other
    beside = ROWS * LENGTH * 4 * (max(loss, backward) - SIZE.vocabulary)
    planned = shape.costs.nbytes(ROWS * LENGTH, 4, recompute=True) - beside
    assert kept(model) == pytest.approx(planned, rel=0.02)


def test_the_plan_counts_them() -> None:
    shape = gpt_shape(256, 4, 1000)
    assert shape.costs is not None
    config = load_config(stage=3)
    without = config.plan(shape, device="cpu", compute_dtype=torch.bfloat16).ledger().total.taken
    for recompute in (False, True):
        plan = config.plan(shape, device="cpu", compute_dtype=torch.bfloat16, tokens=4096, recompute=recompute)
        due = shape.costs.nbytes(4096, 2, recompute=recompute)
        assert plan.ledger().only(category="activations").total.taken == due == plan.ledger().total.taken - without


MODES: list[tuple[dict[str, Any], float]] = [
    ({"mode": "none"}, 0.02),
    ({"mode": "full"}, 0.02),
    ({"mode": "every_n", "every_n": 2}, 0.02),
    ({"mode": "selective"}, 0.03),
]


@pytest.mark.parametrize("mode, tolerance", MODES)
def test_modes_keep_what_is_planned(mode: dict[str, Any], tolerance: float) -> None:
    """The blocks alone, as their engine leaves them after a forward."""
    config = load_config(stage=0, units={"classes": ["Block"]}, activation_checkpointing=mode)
    shape = gpt_shape(SIZE.width, SIZE.depth, SIZE.vocabulary)
    assert shape.costs is not None
    planned = config.plan(shape, device="cpu", tokens=ROWS * LENGTH).ledger().only(category="activations").total.taken
    moving, staying, _ = shape.costs._blocks(config.activation_checkpointing)
    model = GPT(SIZE, LENGTH)
    ZeroEngine(model, config)
    x = torch.randn(ROWS, LENGTH, SIZE.width, requires_grad=True)
    with Alive() as alive:
        y = x
        for block in model.blocks:
            y = block(y)
        alive.look()
    assert alive.most == pytest.approx(ROWS * LENGTH * 4 * (moving + staying), rel=tolerance)
    assert planned >= ROWS * LENGTH * 4 * (moving + staying)


def test_offloaded_activations_are_planned_on_the_host() -> None:
    shape = gpt_shape(256, 8, 1000)
    assert shape.costs is not None
    offload = {"activations": "cpu"}
    for mode, per_block in (("none", shape.costs.per_layer), ("full", 256), ("selective", 256)):
        config = load_config(stage=3, offload=offload, activation_checkpointing={"mode": mode})
        here = load_config(stage=3, activation_checkpointing={"mode": mode})
        found, kept = (one.plan(shape, device="cuda", tokens=512).ledger() for one in (config, here))
        assert found.only(category="activations", tier="host").total.taken == 8 * per_block * 512 * 4
        less = kept.tier_bytes("device") - found.tier_bytes("device")
        assert less == 6 * per_block * 512 * 4  # two blocks' part is on the device
        cpu = config.plan(shape, device="cpu", tokens=512).ledger()
        assert cpu.only(category="activations", tier="host").total.taken == 0
    budget = load_config(activation_checkpointing={"mode": "budget", "budget": 0.25}).plan(shape, tokens=512)
    none = load_config().plan(shape, tokens=512)
    found, kept = (plan.ledger().only(category="activations").total.taken for plan in (budget, none))
    assert kept - found == 8 * shape.costs.per_layer * 512 * 3


def test_other_models_reserve() -> None:
    with pytest.raises(ValueError, match=r"plain numbers only.*--activations 4GB"):
        load_config().plan(ModelShape.of(nn.Linear(2, 2)), tokens=7)
