"""`reshard_after_backward: false`: parameters stay whole from their first forward until an optimizer steps on them.

One gather for all micro-batches, and between them full parameters that may be read and written as those of stage 2.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, KEPT, PlainTraining, Script, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.fsdp.released import is_released
from zero_strategy.optim.full_state import safe_get_full_fp32_param, safe_set_full_fp32_param
from zero_strategy.planning.buckets import Offload

SETTINGS = [
    KEPT,
    Setting(3, "per_step", {"reshard_after_backward": False, "prefetch": 0}),
]
OFFLOADED = Setting(
    3, "per_micro_batch", {"reshard_after_backward": False, "offload": {"parameters": "cpu", "optimizer": "cpu"}}
)
WHOLE = [setting for setting in DEFAULTS if setting.stage < 3]


def micro_batch(training: PlainTraining, model: nn.Module, seed: int, *, sync: bool = True) -> None:
    loss = loss_of(model(training.data(seed, 2, 6)))
    training.note(loss)
    training.backward(loss, sync=sync)


def written_between(training: PlainTraining, dtype: torch.dtype, through_data: bool) -> None:
    """In-place writes at any point of a step, to all of a parameter and to a part, also to one without a gradient."""
    model: Any = net().to(dtype)
    model.stem.weight.requires_grad_(False)
    model.mask = nn.Parameter(torch.arange(7), requires_grad=False)
    training.shard(model)
    training.attach(torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1, foreach=False))
    for step in range(3):
        loss = loss_of(model(training.data(3 * step, 2, 6).to(dtype)))
        training.backward(loss, sync=False)
        with torch.no_grad():
            model.blocks[step].up.weight.mul_(0.5)
            model.stem.weight[1:3] += 0.25
            model.mask.add_(step)
        training.note(loss, model.blocks[step].up.weight, model.stem.weight)
        loss = loss_of(model(training.data(3 * step + 1, 2, 6).to(dtype)))
        training.backward(loss)
        with torch.no_grad():
            model.head.bias.copy_(torch.arange(3.0))
            if through_data:
                model.blocks[1].norm.weight.data.clamp_(-0.75, 0.75)
            training.note(model(training.data(3 * step + 2, 2, 6).to(dtype)))
            model.scale.add_(0.125)
        training.note(loss)
        training.step()
        training.zero_grad()


def values_replaced_between(training: PlainTraining) -> None:
    """Whole values, a master, a state dict, a modifier rank: each in the middle of a step, beside a write in place."""
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False))
    sharded = isinstance(training, ShardedTraining)
    for step in range(4):
        micro_batch(training, model, 2 * step, sync=False)
        with torch.no_grad():
            model.stem.bias.add_(0.5)
        if step == 0:
            new = torch.full_like(model.head.weight, 0.25)
            safe_set_full_fp32_param(model.head.weight, new) if sharded else model.head.weight.data.copy_(new)
        elif step == 1:
            model.load_state_dict({name: value / 2 for name, value in net(seed=4).state_dict().items()})
        elif step == 2:
            held: Any = (
                GatheredParameters([model.head.bias], training.world - 1) if sharded else contextlib.nullcontext()
            )
            with held, torch.no_grad():
                if not sharded or training.rank == training.world - 1:
                    model.head.bias.add_(2)
        micro_batch(training, model, 2 * step + 1)
        training.step()
        training.zero_grad()
        with torch.no_grad():
            training.note(model(training.data(40, 2, 6)))


def written_in_a_scope(training: PlainTraining) -> None:
    """Manual optimization: the root is in use while the optimizer steps, and written to before and after that."""
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False))
    for step in range(2):
        with training.scope():
            for micro in range(3):
                micro_batch(training, model, 3 * step + micro)
                with torch.no_grad():
                    model.stem.weight.mul_(0.5)
                    model.scale.data.add_(0.25)
                training.step()
                training.zero_grad()
                with torch.no_grad():
                    model.head.bias.add_(0.125)
                    training.note(model.stem.weight, model.scale, model.head.bias)


def two_optimizers(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    body = torch.optim.SGD(model.blocks.parameters(), lr=0.3)
    rest = torch.optim.AdamW([*model.stem.parameters(), *model.head.parameters(), model.scale], lr=0.1, foreach=False)
    training.attach(body, rest)
    for step in range(4):
        micro_batch(training, model, 2 * step, sync=False)
        micro_batch(training, model, 2 * step + 1)
        training.step(body)
        if step % 2:
            micro_batch(training, model, 30 + step)
        training.step(rest)
        training.zero_grad()


def penalties(training: PlainTraining) -> None:
    """Losses that use weights outside of any forward, before it and after it, as where they are never released."""
    model = net()
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(3):
        for micro in range(2):
            before = model.blocks[0].up.weight.square().sum() if micro else 0.0
            loss = loss_of(model(training.data(2 * step + micro, 2, 6)))
            after = model.blocks[step].down.weight.abs().sum() + model.scale.square()
            training.note(loss)
            training.backward(loss + 0.1 * before + 0.1 * after, sync=micro == 1)
        training.step()
        training.zero_grad()


def second_derivatives(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(2):
        for micro in range(2):
            x = training.data(2 * step + micro, 2, 6).requires_grad_()
            (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
            training.backward(slope.square().sum(), sync=micro == 1)
        training.step()
        training.zero_grad()
        training.note(model(training.data(9, 2, 6)).detach())


SCRIPTS: list[Any] = [
    pytest.param(partial(written_between, dtype=torch.float32, through_data=True), id="written"),
    pytest.param(values_replaced_between, id="replaced"),
    pytest.param(written_in_a_scope, id="written in a scope"),
    pytest.param(two_optimizers, id="two optimizers"),
    pytest.param(penalties, id="penalties"),
    pytest.param(second_derivatives, id="second derivatives"),
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("world", [1, 2])
def test_kept_units_are_those_of_plain_modules(ranks: Launcher, world: int, script: Script) -> None:
    # A gradient that comes after its unit's is reduced by itself, so the order of sums is another one.
    tolerance = 1e-7 if script is penalties else 0.0
    # Of the stages that release nothing, one is played on two ranks, too.
    settings = [*WHOLE, *SETTINGS] if world == 1 else [WHOLE[2], *SETTINGS]
    for wrong in ranks(world)(play, script, settings, tolerance):
        assert not wrong


def other_than_stage_2(script: Script, settings: list[Setting]) -> dict[str, Any]:
    """Differences from stage 2, which has the same master weights and tiers; by setting."""
    wrong: dict[str, Any] = {}
    for setting in settings:
        outcomes = []
        tiers = {"offload": {"optimizer": "cpu"}} if "offload" in setting.config else {}
        for each in (Setting(2, setting.order, tiers), setting):
            training = ShardedTraining(each)
            script(training)
            outcomes.append(training.outcome())
        assert outcomes[0].keys() == outcomes[1].keys()
        found = [
            key
            for key, value in outcomes[0].items()
            if not (torch.equal(value, outcomes[1][key]) if torch.is_tensor(value) else value == outcomes[1][key])
        ]
        if found:
            wrong[str(setting)] = found
    return wrong


def test_kept_units_with_master_weights_and_in_tiers(ranks: Launcher) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        settings = [*SETTINGS, OFFLOADED] if dtype == torch.bfloat16 else [OFFLOADED]
        # Master weights do not follow what goes through `p.data`, at any stage, nor do slices in a tier.
        script = partial(written_between, dtype=dtype, through_data=False)
        for wrong in ranks(2)(other_than_stage_2, script, settings):
            assert not wrong, dtype


def rows_turned(training: PlainTraining) -> None:
    """Written after backward, in a way that leaves sums of the bytes as they were."""
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(5):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        with torch.no_grad():
            model.blocks[1].up.weight.copy_(model.blocks[1].up.weight.flip(0))
        training.step()
        training.zero_grad()


def test_rows_turned_after_backward_are_stepped_from(ranks: Launcher) -> None:
    settings = [Setting(3, "per_micro_batch", {"reshard_after_backward": False, "offload": {"optimizer": "cpu"}})]
    for wrong in ranks(2)(other_than_stage_2, rows_turned, settings):
        assert not wrong


def when_whole() -> dict[str, list[bool]]:
    """Units that are whole at points of a step, and after it."""
    training = ShardedTraining(KEPT)
    model = net()
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    found = {}

    def look(when: str) -> None:
        found[when] = [unit.gathered for unit in training.own.model.units]

    for step in range(2):
        with torch.no_grad():
            model(training.data(7, 2, 6))
        look(f"{step} evaluated")
        micro_batch(training, model, step, sync=False)
        look(f"{step} first")
        with torch.no_grad():
            model(training.data(8, 2, 6))
        micro_batch(training, model, step + 5)
        look(f"{step} second")
        if step:
            training.reset()
            look("1 reset, second")
            with torch.no_grad():
                model(training.data(9, 2, 6))
        training.step()
        look(f"{step} stepped")
    return found


def test_units_are_whole_from_the_first_forward_to_the_step(ranks: Launcher) -> None:
    for found in ranks(2)(when_whole):
        for when, whole in found.items():
            assert all(whole) if when.endswith(("first", "second")) else not any(whole), when


def elements_gathered(accumulation: int, keeps: bool, order: str) -> tuple[float, int]:
    """Elements sent in a step, as parts of what each rank lacks of the model; units whole after the last backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    config = load_config(
        stage=3, reshard_after_backward=not keeps, gradient_reduction=order, units={"min_numel": 0}, prefetch=1
    )
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    for step in range(3):
        if step == 1:
            engine.counters.reset()
        for index in range(accumulation):
            with contextlib.nullcontext() if index == accumulation - 1 else engine.no_sync():
                model(torch.randn(2, 64)).square().mean().backward()
        whole = sum(unit.gathered for unit in engine.model.units[1:])
        optimizer.step()
        optimizer.zero_grad()
    mesh = engine.mesh
    whole_bytes = sum(4 * bucket.layout.numel for bucket in engine.model.buckets)
    assert engine.state_bytes()["parameters"] == whole_bytes // (1 if keeps else mesh.world_size)
    lacking = sum(bucket.layout.numel for bucket in engine.model.buckets) * (mesh.world_size - 1) / mesh.world_size
    return engine.counters.elements_sent / 2 / lacking, whole


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("order", "reductions"), [("per_micro_batch", 3), ("per_step", 1)])
def test_one_gather_for_all_micro_batches(ranks: Launcher, world: int, order: str, reductions: int) -> None:
    for passes, whole in ranks(world)(elements_gathered, 3, True, order):
        assert passes == reductions + 1
        assert whole == 6
    for passes, whole in ranks(world)(elements_gathered, 3, False, order):
        assert passes >= reductions + 3
        assert not whole


def frozen_bases() -> list[Any]:
    """Bytes sent in each step where only small parts are trained; what is whole; the frozen values, written to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1)) for _ in range(4)))
    down = nn.Linear(1, 64, bias=False).requires_grad_(False)
    for block in model:
        block.append(down)
        block[0].requires_grad_(False)
    engine = ZeroEngine(model, load_config(stage=3, reshard_after_backward=False, units={"min_numel": 0}))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine.attach(optimizer)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sent = []
    for step in range(4):
        before = engine.counters.elements_sent
        model(torch.randn(2, 64)).square().mean().backward()
        if step == 2:
            with torch.no_grad():
                model[1][0].weight.fill_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        sent.append(engine.counters.elements_sent - before)
    whole = [bucket.gathered for bucket in engine.model.buckets if not bucket.trainable]
    engine.drain()
    drained = [bucket.gathered for bucket in engine.model.buckets]
    return [trained, sent, whole, drained, engine.full_state_dict()["1.0.weight"]]


def test_what_is_frozen_is_gathered_once(ranks: Launcher) -> None:
    for trained, sent, whole, drained, saved in ranks(2)(frozen_bases):
        assert whole and all(whole) and not any(drained)
        assert sent[0] > 4 * 64 * 64 / 2, "once"
        assert sent[1] == sent[2] == sent[3] <= 2 * trained, "the trained part: gathered and reduced by two ranks"
        assert torch.equal(saved, torch.full((64, 64), 0.5))


def loaded_and_read(folder: str) -> None:
    """Values written before a load of something else stay, and readers of slices see it; what is loaded counts."""
    model = net()
    engine = ZeroEngine(model, load_config(stage=3, reshard_after_backward=False, units={"min_numel": 0}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    engine.save(folder)
    trained = engine.full_state_dict()
    for load in (engine.drain, lambda: engine.load_optimizers(folder)):
        loss_of(model(torch.ones(2, 6))).backward()
        with torch.no_grad():
            model.head.bias.fill_(3.0)
            model.scale.data.fill_(2.0)
        assert torch.equal(safe_get_full_fp32_param(model.head.bias), torch.full((3,), 3.0))
        assert safe_get_full_fp32_param(model.scale) == 2.0
        load()
        assert is_released(model.scale)
        full = engine.full_state_dict()
        assert torch.equal(full["head.bias"], torch.full((3,), 3.0)) and full["scale"] == 2.0
    for scope in (contextlib.nullcontext(), engine.forward_scope(), GatheredParameters(model.parameters())):
        loss_of(model(torch.ones(2, 6))).backward()
        with scope:
            with torch.no_grad():
                if not is_released(model.head.weight):
                    model.head.weight.fill_(7.0)
            engine.load_weights(folder)
        full = engine.full_state_dict()
        assert all(torch.equal(full[name], value) for name, value in trained.items())
        assert loss_of(model(torch.ones(2, 6))).isfinite()


def break_the_second_group(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[1]["lr"] = None


def step_that_raises() -> None:
    """In a scope, where the root is in use: what it has changed stays so, and forwards see it after `reset`."""
    model = net()
    engine = ZeroEngine(model, load_config(stage=3, reshard_after_backward=False, units={"min_numel": 0}))
    rest = [p for p in model.parameters() if p is not model.scale]
    optimizer = torch.optim.SGD([{"params": [model.scale]}, {"params": rest}], lr=0.5, foreach=False)
    engine.attach(optimizer)
    optimizer.register_step_pre_hook(break_the_second_group)
    with pytest.raises(TypeError), engine.forward_scope():
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    engine.reset()
    changed = safe_get_full_fp32_param(model.scale)
    assert changed != torch.tensor(0.9)
    with engine.forward_scope():
        assert torch.equal(model.scale, changed)
        model(torch.ones(2, 6)).sum().backward()
    engine.drain()
    assert torch.equal(engine.full_state_dict()["scale"], changed)


def test_a_step_that_raises_leaves_no_old_values(ranks: Launcher) -> None:
    ranks(2)(step_that_raises)


def test_loads_and_readers_know_what_was_written(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(loaded_and_read, str(tmp_path / "saved"))


def planned_and_held(offload: dict[str, str]) -> list[int]:
    """Bytes of parameters and of gather buffers: a plan that is told of tiers by itself, and one by its config."""
    with torch.device("meta"):
        shapes = net(width=256)
    kept: dict[str, Any] = {"stage": 3, "reshard_after_backward": False, "units": {"min_numel": 0}}
    found = []
    for plan in (
        load_config(kept).plan(shapes, world_size=2, device="cpu", offload=Offload(**offload)),
        load_config({**kept, "offload": offload}).plan(shapes, world_size=2, device="cpu"),
    ):
        ledger = plan.ledger(0)
        found += [ledger.only(category=category).total.taken for category in ("parameters", "gather buffers")]
    return found


def test_a_plan_knows_where_slices_are() -> None:
    device = planned_and_held({})
    host = planned_and_held({"optimizer": "cpu", "parameters": "cpu"})
    assert device[:2] == device[2:] and device[1] == 0
    assert host[:2] == host[2:] and host[1] > 0 and 1.9 * host[0] < device[0] < 2.1 * host[0]


def skipped_steps() -> list[Any]:
    """An overflow leaves values as they are: they stay whole, and the next forward needs no gather."""
    model = net()
    engine = ZeroEngine(model, load_config(stage=3, reshard_after_backward=False, units={"min_numel": 0}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    values = engine.full_state_dict()
    kept, sent = [], []
    for step in range(3):
        before = engine.counters.elements_sent
        loss = loss_of(model(torch.full((2, 6), 1.0)))
        sent.append(engine.counters.elements_sent - before)
        loss.backward()
        engine.optimizers[0].skip_next = step < 2
        optimizer.step()
        optimizer.zero_grad()
        kept.append([unit.gathered for unit in engine.model.units])
        if step == 1:
            assert all(torch.equal(value, values[name]) for name, value in engine.full_state_dict().items())
    return [kept, sent]


def test_a_skipped_step_keeps_them(ranks: Launcher) -> None:
    for kept, sent in ranks(2)(skipped_steps):
        assert all(kept[0]) and all(kept[1]) and not any(kept[2])
        assert sent[0] > 0 and sent[1:] == [0, 0]
