"""Weights are gathered in autocast's dtype, with the bits that autocast makes of gathered values."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.float8 import plain_net
from tests.engine.nets import loss_of
from tests.engine.trainings import PlainTraining, Setting, play
from tests.launcher import Launcher
from zero_strategy import ZeroEngine, sharding
from zero_strategy.config import load_config
from zero_strategy.fsdp.autocast_gather import CastWeight, weights_cast_by_autocast
from zero_strategy.planning.model_shape import state_of

AUTOCAST: dict[str, Any] = {"communication": {"parameters": "autocast"}}
SETTINGS = {
    "plain": AUTOCAST,
    "kept after a forward": {**AUTOCAST, "reshard_after_forward": False},
    "recomputed": {**AUTOCAST, "activation_checkpointing": "full"},
    "recomputed in part": {**AUTOCAST, "activation_checkpointing": "selective"},
    "activations on the host": {**AUTOCAST, "offload": {"activations": "cpu"}},
}


class Mixed(nn.Module):
    """Layers of all kinds that autocast casts, and others beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Part(nn.Module):
    """A unit: a convolution, attention, a norm, layers with and without a bias, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.twice = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y + self.mix(y.transpose(1, 2)).transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.down(torch.tanh(self.twice(torch.tanh(self.twice(y))))) * self.scale
        return out


def mixed() -> Mixed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mixed()


def trained(training: PlainTraining, dtype: torch.dtype, how: str) -> None:
    """Steps of two micro-batches under autocast, evaluations within autocast and without it."""
    model = mixed()
    if how == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("twice" in name or "norm" in name)
    training.shard(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training.attach(torch.optim.AdamW(trainable, lr=0.02, foreach=False))
    tokens = torch.arange(24).reshape(2, 12) % 11
    for step in range(3):
        for micro in range(2):
            batch = (tokens + step + 3 * micro + training.rank) % 11
            with torch.autocast("cpu", dtype, cache_enabled=how == "cached"):
                loss = nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())
            training.note(loss)
            training.backward(loss, sync=micro == 1)
        training.step()
        training.zero_grad()
        for again in (torch.autocast("cpu", dtype, cache_enabled=False), nullcontext()):
            with torch.no_grad(), again:
                training.note(model(tokens))
    training.note(*(value.clone() for value in training.module.state_dict().values()))


@pytest.mark.parametrize("name", SETTINGS)
def test_autocast_gathers_have_the_bits_of_one_process(ranks: Launcher, name: str) -> None:
    setting = Setting(3, "per_micro_batch", SETTINGS[name])
    for wrong in ranks(2)(play, partial(trained, dtype=torch.bfloat16, how="trained"), [setting]):
        assert not wrong


@pytest.mark.parametrize(("dtype", "how"), [(torch.float16, "trained"), (torch.bfloat16, "frozen")])
def test_autocast_gathers_of_float16_and_of_frozen_weights(ranks: Launcher, dtype: torch.dtype, how: str) -> None:
    settings = [Setting(3, "per_micro_batch", SETTINGS[name]) for name in ("plain", "recomputed")]
    for wrong in ranks(3)(play, partial(trained, dtype=dtype, how=how), settings):
        assert not wrong


def test_with_autocasts_cache_values_are_gathered(ranks: Launcher) -> None:
    """A weight that is used twice has one copy in the cache, whose gradients are summed up in 16 bits."""
    setting = Setting(3, "per_micro_batch", AUTOCAST)
    for wrong in ranks(2)(play, partial(trained, dtype=torch.bfloat16, how="cached"), [setting]):
        assert not wrong


def weights_and_losses(config: dict[str, Any]) -> list[Tensor]:
    """Losses and weights of steps with clipping."""
    model = mixed()
    engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine.attach(optimizer)
    found, tokens = [], torch.arange(24).reshape(2, 12) % 11
    for step in range(3):
        batch = (tokens + step + dist.get_rank()) % 11
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *engine.full_state_dict().values()]


def both(config: dict[str, Any]) -> bool:
    """True if gathers of values and of 16 bits have the same results."""
    values, codes = weights_and_losses(config), weights_and_losses({**config, **AUTOCAST})
    return all(torch.equal(one, other) for one, other in zip(values, codes, strict=True))


@pytest.mark.parametrize(
    "config",
    [
        {"offload": {"optimizer": "cpu", "gradients": "cpu"}},
        {"gradient_reduction": "per_step"},
        {"mesh": {"replicate": 2}},
    ],
)
def test_state_on_the_host_and_replicas_have_the_same_bits(ranks: Launcher, config: dict[str, Any]) -> None:
    assert all(ranks(4 if "mesh" in config else 2)(both, config))


def test_weights_that_layers_give_to_products_are_found() -> None:
    model = mixed()
    model.head.weight = model.embedding.weight  # tied: read by the embedding, too
    model.blocks[1].down.double()
    found = weights_cast_by_autocast(model)
    names = {name for name, parameter in model.named_parameters() if id(parameter) in found}
    ours = {f"blocks.{n}.{layer}.{kind}" for n in range(2) for layer in ("mix", "twice") for kind in ("weight", "bias")}
    assert names == ours | {"blocks.0.down.weight"}


BATCH = 4
"""Less than any layer's features."""


class Casts(TorchDispatchMode):
    """Counts of copies of matrices in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and found.dtype == torch.bfloat16
        if is_copy and found.ndim == 2 and found.shape[0] > BATCH:
            self.elements += found.numel()
        return found


def copies_and_bytes() -> list[tuple[int, int, int, int]]:
    """Elements of weights that a forward copied to 16 bits, bytes that a step gathered, and that units held amid it.

    Last, the elements that this rank sent of weights which are gathered in 16 bits.
    """
    found = []
    for config in ({}, AUTOCAST):
        model = plain_net()
        engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}, "prefetch": 0, **config})
        for _ in range(2):
            engine.counters.reset()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Casts() as casts:
                loss = loss_of(model(torch.ones(BATCH, 6)))
            buckets = [bucket for unit in engine.model.units[1:] for bucket in unit.buckets]
            held = [tensor for bucket in buckets for kind, tensor in bucket.held() if kind == "gather buffers"]
            at_middle = sum(tensor.untyped_storage().nbytes() for tensor in held)
            loss.backward()
        # Of units for forward and backward, of the root once; to one other rank.
        sent = sum(
            bucket.layout.slice_numel * (1 if unit is engine.model.units[0] else 2)
            for unit in engine.model.units
            for bucket in unit.buckets
            if bucket.codes is not None
        )
        found.append((casts.elements, engine.counters.bytes["all_gather"], at_middle, sent))
    return found


def test_a_step_copies_no_weight_and_gathers_two_bytes_for_each_element(ranks: Launcher) -> None:
    shapes = {name: parameter.numel() for name, parameter in plain_net().named_parameters()}
    matrices = sum(numel for name, numel in shapes.items() if name.endswith("weight") and "norm" not in name)
    for (copied, values, held, _), (other, codes, held_codes, sent) in ranks(2)(copies_and_bytes):
        assert (copied, other) == (matrices, 0)
        assert values - codes == 2 * sent
        assert held == held_codes == 0


def held_and_planned() -> tuple[Any, Any]:
    """Entries of the ledger and of the plan."""
    config = load_config(stage=3, units={"min_numel": 0}, **AUTOCAST)
    with torch.device("meta"):
        shape = Mixed()
    model = mixed()
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine.attach(optimizer)
    tokens = torch.arange(24).reshape(2, 12) % 11
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = state_of(optimizer)
    plan = config.plan(shape, world_size=2, optimizer=state, device="cpu", snapshots=False, autocast=torch.bfloat16)
    return engine.ledger().merged(), plan.ledger(dist.get_rank()).held().merged()


def test_the_plan_of_autocast_gathers_is_the_ledger(ranks: Launcher) -> None:
    for ledger, plan in ranks(2)(held_and_planned):
        assert ledger == plan


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"stage": 1}, r"stage is 1: only stage 3 gathers"),
        ({"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}, r"offload.parameters is 'cpu'"),
        ({"stage": 3, "mesh": {"tensor": 2}}, r"mesh.tensor is 2: weights are cast whole"),
    ],
)
def test_what_has_no_place_for_autocast_gathers_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"communication.parameters is 'autocast', and {named}"):
        load_config(**AUTOCAST, **changes)


def double_backward() -> list[Tensor]:
    """Gradients of a gradient's norm, with gathers of values and of 16 bits."""
    found = []
    for config in ({}, AUTOCAST):
        model = plain_net()
        ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}, **config})
        x = torch.ones(4, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone())
    return found


def test_second_derivatives_through_autocast_gathers(ranks: Launcher) -> None:
    for values, codes in ranks(2)(double_backward):
        assert values.any() and torch.equal(values, codes)


def copied() -> bool:
    """True if a closed engine's model, and a copy of it, compute as before under autocast."""
    model = plain_net()
    engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}, **AUTOCAST})
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        before = model(torch.ones(4, 6)).detach()
        engine.close(gather=True)
        return torch.equal(before, copy.deepcopy(model)(torch.ones(4, 6)))


def test_a_module_is_plain_after_autocast_gathers(ranks: Launcher) -> None:
    assert all(ranks(2)(copied))


class NoGradient(torch.autograd.Function):
    """The input, whose gradient is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None


class Using(nn.Module):
    """A unit that uses its layers' weights as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        if how == "expanded":
            self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.how == "expanded":  # a product of many: the weight is one of them, again and again
            return x + self.down(y[:, None].expand(-1, 3, -1).transpose(0, 1)).sum(0)
        if self.how == "no gradient":
            return y + NoGradient.apply(self.down(y))
        if self.how == "out":
            with torch.no_grad():
                y = y + torch.addmm(self.up.bias, x.float(), self.up.weight, out=torch.empty(x.shape))
        return x + self.down(y)


class Rows(nn.Module):
    """A unit whose input is a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Nested(nn.Module):
    """Units between whose calls tensors are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(Rows() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor(list(x.split(1)), layout=torch.jagged, requires_grad=True)
        for each in self.rows:
            nested = each(nested)
        return torch.cat(nested.unbind())


HOOKS: dict[str, Any] = {
    "stacked": lambda tensor: torch.stack([tensor])[0],
    "unsqueezed": lambda tensor: tensor.unsqueeze(0).squeeze(0),
    "in parts": lambda tensor: torch.cat(tensor.chunk(2)) if tensor.dim() and tensor.shape[0] > 1 else tensor,
    "copied": lambda tensor: copy.deepcopy(tensor.detach()),
    "numpy": lambda tensor: (
        torch.from_numpy(tensor.detach().view(torch.int16).numpy()).view(tensor.dtype)
        if tensor.dtype in (torch.bfloat16, torch.float16)
        else tensor
    ),
    "list": lambda tensor: torch.tensor(tensor.tolist(), dtype=tensor.dtype) if tensor.is_floating_point() else tensor,
}


def used(config: dict[str, Any], how: str) -> list[Tensor]:
    """Losses, gradients and weights of steps whose graphs wait for others, and for scopes that hold values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Nested() if how == "nested" else nn.Sequential(Using(how), Using(how))
    units = {"min_numel": 0, "classes": ["Rows" if how == "nested" else "Using"]}
    engine = ZeroEngine(model, {"stage": 3, "units": units, **config})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    engine.attach(optimizer)
    found: list[Tensor] = []
    pack = HOOKS.get(how, lambda tensor: tensor)
    for step in range(2):
        losses = []
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype, cache_enabled=False):
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    losses.append(loss_of(model(torch.ones(4, 8) * (step + dist.get_rank())).float()))
        losses[0].backward()
        with sharding.GatheredParameters(list(model.parameters())):
            losses[1].backward()
        found += [loss.detach() for loss in losses]
        found += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in trainable]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *engine.full_state_dict().values()]


@pytest.mark.parametrize("how", ["expanded", "no gradient", "out", "nested", *HOOKS])
def test_other_uses_of_weights_have_the_bits_of_values(ranks: Launcher, how: str) -> None:
    for values, codes in zip(ranks(2)(used, {}, how), ranks(2)(used, AUTOCAST, how), strict=True):
        assert len(values) == len(codes) and all(map(torch.equal, values, codes))


def written() -> str:
    """The error of a hook that writes to what is saved."""
    model = plain_net()
    ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}, **AUTOCAST})

    def change(tensor: Tensor) -> Tensor:
        return tensor.mul_(2.0) if tensor.dtype == torch.bfloat16 else tensor

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), pytest.raises(RuntimeError) as caught:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, change):
            loss_of(model(torch.ones(4, 6)).float()).backward()
    return str(caught.value)


def test_a_write_to_what_autocast_would_have_copied_is_named(ranks: Launcher) -> None:
    for error in ranks(2)(written):
        assert "writes to the copy of parameter" in error and "communication.parameters to 'values'" in error


@torch.jit.script
def scripted(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x + bias)


class Scripted(nn.Module):
    """A unit that gives a bias to TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return scripted(torch.nn.functional.linear(x, self.up.weight), self.up.bias)


def unseen() -> tuple[str, str]:
    """Errors of a read past torch's functions, and of one from a graph outside of a forward and a backward."""
    errors = []
    for model in (nn.Sequential(Scripted(), Scripted()), plain_net()):
        ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}, **AUTOCAST})
        width = 8 if isinstance(model, nn.Sequential) else 6
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with pytest.raises(RuntimeError) as caught, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model(torch.ones(BATCH, width))
            next(each for each in saved if isinstance(each, CastWeight)).sum()
        errors.append(str(caught.value))
    return errors[0], errors[1]


def test_reads_that_nobody_sees_are_named(ranks: Launcher) -> None:
    for scripted_read, saved_read in ranks(2)(unseen):
        assert "0.up.bias" in scripted_read and "to 'values'" in scripted_read
        assert "outside of a forward and a backward" in saved_read
