"""Float8 layers of torchao train at every stage as in one process on the same micro-batches, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torchao.float8 import convert_to_float8_training

from tests.engine.float8 import Net, float8_net, in_blocks, plain_net, recipe
from tests.engine.nets import loss_of
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.fsdp.init import Init

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS = 3


def trained(training: PlainTraining, name: str, compiled: str = "", dtype: torch.dtype = torch.float32) -> None:
    """Two micro-batches per step; the weights that stages gather, and an evaluation, are compared too."""
    torch._dynamo.reset()
    model = float8_net(recipe(name)).to(dtype)
    training.shard(model)
    if compiled and isinstance(training, ShardedTraining):
        for block in model.blocks:
            block.compile(backend=compiled)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False))
    for step in range(STEPS):
        for micro in range(2):
            loss = loss_of(model(training.data(2 * step + micro, 4, 6).to(dtype)).float()) / 2
            training.note(loss)
            training.backward(loss, sync=micro == 1)
        training.step()
        training.zero_grad()
    with torch.no_grad():
        training.note(model(training.data(50, 4, 6).to(dtype)))


@pytest.mark.parametrize("name", RECIPES)
def test_all_stages_have_the_bits_of_one_process(ranks: Launcher, name: str) -> None:
    for wrong in ranks(2)(play, partial(trained, name=name), DEFAULTS):
        assert not wrong


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_with_recomputed_activations(ranks: Launcher, mode: str) -> None:
    settings = [
        Setting(stage, "per_step" if stage < 2 else "per_micro_batch", {"activation_checkpointing": mode})
        for stage in (0, 3)
    ]
    for wrong in ranks(2)(play, partial(trained, name="tensorwise"), settings):
        assert not wrong


@pytest.mark.parametrize("name", RECIPES[:2])
def test_compiled_units_of_float8_layers(ranks: Launcher, name: str) -> None:
    script = partial(trained, name=name, compiled="aot_eager")
    for wrong in ranks(2, timeout=200)(play, script, DEFAULTS[-1:], tolerance=1e-7):
        assert not wrong


def test_in_bf16_with_master_weights(ranks: Launcher) -> None:
    """Stages have the same bits; plain torch has no fp32 master weights to compare with."""
    found = ranks(2)(in_bf16)[0]
    assert all(torch.equal(one, other) for stage in found[1:] for one, other in zip(found[0], stage, strict=True))


def in_bf16() -> list[list[torch.Tensor]]:
    found = []
    for stage in range(4):
        model = float8_net(recipe("tensorwise"))
        config = {"stage": stage, "units": {"min_numel": 0}, "gradient_reduction": "per_step"}
        engine = ZeroEngine(model, config, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        engine.attach(optimizer)
        data = PlainTraining(Setting(stage, "per_step"))
        for step in range(STEPS):
            loss_of(model(data.data(step, 4, 6).bfloat16()).float()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(engine.full_state_dict().values()))
    return found


@torch.no_grad()
def test_the_emulated_layers_round() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    found = [plain_net()(x), *(float8_net(recipe(name))(x) for name in RECIPES[:2])]
    assert all(0 < float((found[0] - other).abs().max()) < 0.2 for other in found[1:])
    assert not torch.equal(found[1], found[2])


def built_in_slices(inside: bool) -> float:
    """The largest difference to a model that was built whole, after a step."""
    outputs = []
    for sliced in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if sliced:
                with Init():
                    model = Net()
                    if inside:
                        convert_to_float8_training(model, module_filter_fn=in_blocks, config=recipe("tensorwise"))
            else:
                model = Net()
        if not (sliced and inside):
            convert_to_float8_training(model, module_filter_fn=in_blocks, config=recipe("tensorwise"))
        engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        engine.attach(optimizer)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        loss_of(model(x)).backward()
        optimizer.step()
        outputs.append(model(x).detach())
    return float((outputs[0] - outputs[1]).abs().max())


@pytest.mark.parametrize("inside", [False, True])
def test_models_that_are_sharded_while_they_are_built(ranks: Launcher, inside: bool) -> None:
    assert ranks(2)(built_in_slices, inside) == [0.0, 0.0]


def for_fsdp() -> None:
    model = float8_net(recipe("tensorwise", enable_fsdp_float8_all_gather=True))
    for stage in (1, 3):
        with pytest.raises(ValueError, match=r"blocks.0.up.weight.*FSDP2.*enable_fsdp_float8_all_gather=False"):
            ZeroEngine(model, {"stage": stage})
    assert type(model.first.weight) is torch.nn.Parameter


def test_weights_for_the_gathers_of_fsdp_are_refused(ranks: Launcher) -> None:
    ranks(2)(for_fsdp)
