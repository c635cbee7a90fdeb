"""Writes to parameters by user code: each counts as under plain data parallelism, or is an error that names it.

Every in-place method of torch is tried, through the parameter, `p.data` and `p.detach()`, at every stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, KEPT, PlainTraining, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.fsdp.released import is_released
from zero_strategy.optim.full_state import safe_get_full_fp32_param

SHAPE = (4, 4)
NAME = "block.weight"
NO_WRITES = frozenset({"requires_grad_", "retain_grad_", "share_memory_", "detach_", "rename_", "align_as_"})
"""Methods that change no values."""
OF_OTHER_TENSORS = frozenset(
    {
        "apply_", "map_", "map2_", "coalesce_", "sparse_resize_", "sparse_resize_and_clear_", "set_", "resize_",
        "resize_as_", "resize_as_sparse_", "as_strided_", "logical_and_", "crow_indices_", "t_", "transpose_",
        "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "unsafe_set_", "conj_physical_", "geqrf_",
    }
)  # fmt: skip
"""Methods of sparse tensors, of Python functions, and those that change the shape (see below)."""
OF_INTEGERS = frozenset(
    {
        "bitwise_and_", "bitwise_or_", "bitwise_xor_", "bitwise_not_", "bitwise_left_shift_", "bitwise_right_shift_",
        "gcd_", "lcm_", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
    }
)  # fmt: skip


OPERATORS = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))


@functools.cache
def operations() -> dict[str, Callable[[Tensor], object]]:
    """Every in-place method of tensors, with arguments that it takes, and other ways to write."""
    other = torch.full(SHAPE, 0.25)
    index, mask = torch.tensor([2, 0]), torch.eye(4, dtype=torch.bool)
    special: dict[str, tuple[Any, ...]] = {
        "addmm_": (other, other), "addbmm_": (other.view(1, 4, 4), other.view(1, 4, 4)), "addr_": (other[0], other[1]),
        "clamp_": (0.1, 0.3), "clip_": (0.1, 0.3), "index_add_": (0, index, other[:2]), "cauchy_": (),
        "index_copy_": (0, index, other[:2]), "index_fill_": (0, index, 2.0), "index_put_": ((index,), other[:2]),
        "index_reduce_": (0, index, other[:2], "amax"), "masked_fill_": (mask, 2.0), "masked_scatter_": (mask, other),
        "put_": (index, other[0, :2]), "scatter_": (0, index.view(1, 2), other[:1, :2]), "lerp_": (other, 0.5),
        "scatter_add_": (0, index.view(1, 2), other[:1, :2]), "random_": (10,), "renorm_": (2, 0, 0.1),
        "scatter_reduce_": (0, index.view(1, 2), other[:1, :2], "amax"), "__setitem__": (0, 7.0), "geometric_": (0.5,),
        "log_normal_": (), "addcmul_": (other, other), "addcdiv_": (other, other + 1), "fill_diagonal_": (3.0,),
        "ldexp_": (torch.ones(SHAPE, dtype=torch.int32),), "polygamma_": (1,), "mvlgamma_": (1,), "copy_": (other,),
        "baddbmm_": (), "sspaddmm_": (), "__ipow__": (2.0,), "pow_": (2.0,), "float_power_": (2.0,), "swap_": (),
    }  # fmt: skip
    found: dict[str, Callable[[Tensor], object]] = {}
    for name in dir(Tensor):
        in_place = (name.endswith("_") and not name.startswith("_")) or name in special or name in OPERATORS
        if not in_place or name in NO_WRITES | OF_OTHER_TENSORS | OF_INTEGERS or not callable(getattr(Tensor, name)):
            continue
        for arguments in [special[name]] if name in special else [(), (0.5,), (other,)]:
            torch.manual_seed(0)
            try:
                done = getattr(torch.full(SHAPE, 0.5), name)(*(_cast(a, torch.float32) for a in arguments))
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
                continue
            if done is NotImplemented:
                continue
            found[name] = partial(_call, name=name, arguments=arguments)
            break
    found["nn.init.xavier_uniform_"] = nn.init.xavier_uniform_
    found["torch.add(out=)"] = lambda p: torch.add(torch.ones(SHAPE, dtype=p.dtype), 1.0, out=p)
    found["torch._foreach_mul_"] = lambda p: torch._foreach_mul_([p], 0.5)
    found["a row"] = lambda p: p[1].zero_()
    found["torch.embedding_renorm_"] = lambda p: torch.embedding_renorm_(p, torch.tensor([0, 3]), 0.1, 2.0)
    return found


def _call(tensor: Tensor, *, name: str, arguments: tuple[Any, ...]) -> object:
    return getattr(tensor, name)(*(_cast(argument, tensor.dtype) for argument in arguments))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


ACCESS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "p": lambda p: p,
    "data": lambda p: p.data,
    "detach": Tensor.detach,
}


class Writing(nn.Module):
    """A unit that may write to its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, 17).view(SHAPE) / 16)  # exact in bf16
        self.write: Callable[[nn.Parameter], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.write(self.weight)
        return nn.functional.linear(x, self.weight)


class Around(nn.Module):
    """A root with such a unit, which may write to the unit's weight after the unit's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).requires_grad_(False)  # gradients of it may be infinite
        self.block = Writing()
        self.after: Callable[[nn.Parameter], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(self.first(x))
        if self.after is not None:
            with torch.no_grad():
                self.after(self.block.weight)
        return out


def at_rest(model: Around, write: Callable[[nn.Parameter], object], dtype: torch.dtype) -> None:
    with torch.no_grad():
        write(model.block.weight)


def in_its_forward(model: Around, write: Callable[[nn.Parameter], object], dtype: torch.dtype) -> None:
    model.block.write = write
    try:
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=dtype))
    finally:
        model.block.write = None


def in_the_roots_forward(model: Around, write: Callable[[nn.Parameter], object], dtype: torch.dtype) -> None:
    model.after = write
    try:
        model(torch.ones(2, 4, dtype=dtype))  # with gradients, and no backward
    finally:
        model.after = None


def in_a_scope(model: Around, write: Callable[[nn.Parameter], object], dtype: torch.dtype) -> None:
    with GatheredParameters(model.block.weight, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            write(model.block.weight)


PLACES = {each.__name__: each for each in (at_rest, in_its_forward, in_the_roots_forward, in_a_scope)}


def tried(stage: int, dtype: torch.dtype, place: str) -> dict[str, str]:
    """{operation: what is wrong with it}: after the write, and after an optimizer's step of length 0.

    Of two operations one is tried in each dtype; at the next stage in the other one.
    """
    wrong: dict[str, str] = {}
    model = Around()
    start = model.block.weight.detach().clone()
    config = load_config(stage=stage, units={"min_numel": 1}, barrier_seconds=20.0)
    engine = ZeroEngine(model, config, compute_dtype=None if dtype == torch.float32 else dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.attach(optimizer)
    weight = model.block.weight
    chosen = list(operations().items())[(stage // 2 + (dtype == torch.bfloat16)) % 2 :: 2]
    for number, (name, operation) in enumerate(chosen):
        for access in ACCESS if number % 5 == 0 or "norm" in name or "data" in name else ("data",):
            engine.model.place(weight)[0].kept = False  # type: ignore[index]
            with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                weight.copy_(start)
            expected = start.to(dtype)

            def write(p: Tensor, operation: Callable[[Tensor], object] = operation, access: str = access) -> None:
                torch.manual_seed(1)
                operation(ACCESS[access](p) if isinstance(p, nn.Parameter) else p)

            write(expected)
            key = f"{access}.{name}"
            try:
                PLACES[place](model, write, dtype)
            except (RuntimeError, ValueError) as error:
                if f"{NAME!r}" not in str(error) or place != "at_rest" or stage < 3:
                    wrong[key] = f"{type(error).__name__}: {error}"
                engine.reset()
                continue
            if place == "at_rest" and stage == 3:
                wrong[key] = "no error"
                continue
            for when in ("at once", "after a step"):
                found = safe_get_full_fp32_param(weight)
                shown = engine.full_state_dict()[NAME]
                if not (same_numbers(found, expected.float()) and same_numbers(shown, expected)):
                    wrong[key] = f"{when}: {found.flatten()[:3]} for {expected.flatten()[:3]}"
                if number % 8:
                    break
                model(torch.ones(2, 4, dtype=dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return wrong


def same_numbers(found: Tensor, expected: Tensor) -> bool:
    """True if they are equal, NaN to NaN."""
    return torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def cases() -> Iterator[Any]:
    for place in PLACES:
        for stage in (1, 2, 3) if place == "at_rest" else (1, 3):
            for dtype in (torch.float32, torch.bfloat16):
                yield pytest.param(stage, dtype, place, id=f"{place}-{stage}-{str(dtype)[6:]}")


@pytest.mark.parametrize("stage, dtype, place", list(cases()))
def test_every_in_place_method_counts_or_is_refused(
    ranks: Launcher, stage: int, dtype: torch.dtype, place: str
) -> None:
    assert len(operations()) > 90
    for wrong in ranks(2, timeout=120)(tried, stage, dtype, place):
        assert not wrong


# ---- assignments, and the lines of well-known trainings, beside plain data parallelism ----


def clamped(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.3, 0.3)


def clamped_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.3, 0.3)


def clamped_without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


def scaled_together(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def as_a_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def set_to_others(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.set_(p.detach() * 0.9)  # type: ignore[call-overload]


def kept_data(model: nn.Module) -> None:
    """Write to what `p.data` gave before."""
    kept = model.__dict__.setdefault("kept_data", [p.data for p in model.parameters()])
    for values in kept:
        values.mul_(0.9)


EDITS = [clamped, clamped_in_place, clamped_without_gradients, scaled_together, as_a_vector, set_to_others, kept_data]


def edits_between_steps(training: PlainTraining, edit: Callable[[nn.Module], None]) -> None:
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(4):
        loss = loss_of(model(training.data(step, 2, 6)))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
        sharded = isinstance(training, ShardedTraining) and training.setting.stage == 3
        parameters = list(model.parameters()) if sharded and edit is not kept_data else []
        with GatheredParameters(parameters, modifier_rank=0):
            edit(model)


@pytest.mark.parametrize("edit", EDITS)
def test_edits_between_steps_are_those_of_plain_training(ranks: Launcher, edit: Callable[[nn.Module], None]) -> None:
    settings = [setting for setting in DEFAULTS if setting.stage < 3 or edit is not kept_data]
    for wrong in ranks(2)(play, partial(edits_between_steps, edit=edit), settings):
        assert not wrong


def low_precision(edit: Callable[[nn.Module], None], stage: int) -> float:
    """Distance of master weights from the parameters after steps with edits between; steps are of length 0."""
    model = net()
    config = load_config(stage=stage, units={"min_numel": 0})
    engine = ZeroEngine(model, config, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    engine.attach(optimizer)
    plain = net().bfloat16()
    for _ in range(3):
        loss_of(model(torch.ones(2, 6, dtype=torch.bfloat16))).backward()
        optimizer.step()
        optimizer.zero_grad()
        edit(model)
        edit(plain)
    optimizer.step()
    expected = {name: p.float() for name, p in plain.named_parameters()}
    found = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("edit", EDITS)
def test_master_weights_take_what_is_written(ranks: Launcher, edit: Callable[[nn.Module], None], stage: int) -> None:
    for difference in ranks(2)(low_precision, edit, stage):
        assert difference < 2**-9  # elements that are not changed by rounding keep their finer master weights


class Codebook(nn.Module):
    """Vectors that its forward moves towards what it is given, as VQ-VAE does; ranks agree on the move."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 24).view(4, 6), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(6))
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                mean = x.mean(dim=0)
                if dist.is_initialized():
                    dist.all_reduce(mean)
                moved = self.weight.lerp(mean.expand_as(self.weight), 0.1)
                if self.through == "copy_":
                    self.weight.copy_(moved)
                elif self.through == "data.copy_":
                    self.weight.data.copy_(moved)
                elif self.through == "numpy":  # which no counter sees, so that it has to be told
                    self.weight.detach().numpy()[:] = moved.numpy()
                    torch.autograd.graph.increment_version(self.weight)
                else:
                    self.weight.data = moved
        return x * self.scale + self.weight.mean(dim=0)


def codebook(training: PlainTraining, through: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Codebook(through), nn.Linear(6, 3))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.5 + number, p.numel()).view(p.shape))
    training.shard(model)
    training.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, foreach=False))
    for step in range(3):
        loss = loss_of(model(training.data(step, 2, 6)))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
    model.eval()
    with torch.no_grad():
        training.note(model(torch.ones(2, 6)))


@pytest.mark.parametrize("through", ["copy_", "data.copy_", "data =", "numpy"])
def test_a_codebook_is_moved_by_its_forward(ranks: Launcher, through: str) -> None:
    for wrong in ranks(2)(play, partial(codebook, through=through), [*DEFAULTS, KEPT]):
        assert not wrong


def bounded_embedding(training: PlainTraining) -> None:
    """All ranks look the same words up: the norm of their vectors is bounded on all."""
    model = nn.Sequential(nn.Embedding(8, 6, max_norm=1.0), nn.Linear(6, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1.0, 1.5, p.numel()).view(p.shape))
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    for step in range(3):
        loss = loss_of(model(torch.tensor([[0, 7, 3], [3, step, 1]])))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()


def test_an_embedding_with_max_norm_trains_as_in_plain_torch(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, bounded_embedding, [*DEFAULTS, KEPT]):
        assert not wrong


class Shadow:
    """An average whose values take the parameters' place and leave it again, as many trainings have it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup = model, dict[str, Tensor]()
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = (0.9 * self.shadow[name] + 0.1 * p.data).clone()

    def apply(self) -> None:
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]
        self.backup = {}


def with_a_shadow(training: PlainTraining, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.05, foreach=False))
    shadow = Shadow(model)
    for step in range(4):
        loss = loss_of(model(training.data(step, 2, 6).to(dtype)))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
        shadow.update()
        shadow.apply()
        if step % 2 and isinstance(training, ShardedTraining):  # a save in the middle takes the average's values
            saved = training.own.full_state_dict()
            training.own.model.follow_edits()
            assert all(torch.equal(saved[name], value) for name, value in shadow.shadow.items())
        with torch.no_grad():
            training.note(model(torch.ones(2, 6, dtype=dtype)))
        shadow.restore()
        with torch.no_grad():
            training.note(model(torch.ones(2, 6, dtype=dtype)))


def test_an_average_in_the_place_of_parameters_leaves_them_as_they_were(ranks: Launcher) -> None:
    settings = [setting for setting in DEFAULTS if setting.stage < 3]
    for wrong in ranks(2)(play, partial(with_a_shadow, dtype=torch.float32), settings):
        assert not wrong


# ---- what cannot count ----


def refused(stage: int) -> dict[str, str]:
    model = net()
    ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}), compute_dtype=torch.bfloat16)
    p, found = model.head.weight, {}
    rows: dict[str, Callable[[], Any]] = {
        "shape": lambda: setattr(p, "data", torch.zeros(2, 2, dtype=torch.bfloat16)),
        "emptied": lambda: setattr(p, "data", torch.empty(0, dtype=torch.bfloat16)),
        "dtype": lambda: setattr(p, "data", torch.zeros(3, 6)),
        "tie": lambda: setattr(model.blocks[1].down.bias, "data", model.blocks[1].norm.bias.data),
        "device": lambda: setattr(p, "data", torch.zeros(3, 6, dtype=torch.bfloat16, device="meta")),
    }
    for name, row in rows.items():
        try:
            row()
            found[name] = "no error"
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_what_does_not_fit_is_refused_at_its_line(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(refused, stage):
        tie = found.pop("tie")
        assert all("'head.weight'" in text for text in found.values()), found
        assert "'blocks.1.down.bias'" in tie and (stage == 3 or "'blocks.1.norm.bias'" in tie)


def turned(stage: int) -> list[str]:
    """A parameter whose shape was changed in place is refused at the next look at least."""
    found = []
    for turn in (Tensor.t_, lambda p: p.unsqueeze_(0), lambda p: p.resize_(2, 2), lambda p: p.as_strided_((2,), (1,))):
        model = net()
        engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach(optimizer)
        loss_of(model(torch.ones(2, 6))).backward()
        try:
            with torch.no_grad():
                turn(model.head.weight)
            optimizer.step()
            found.append("no error")
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_a_change_of_shape_in_place_is_refused(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(turned, stage):
        assert all("head.weight" in text or "resize" in text for text in found), found


# ---- the objects ----


def test_parameters_are_parameters_to_everybody(ranks: Launcher) -> None:
    ranks(2)(looked_at)


def looked_at() -> None:
    import copy
    import io
    import pickle

    model = net()
    engine = ZeroEngine(model, load_config(stage=1, units={"min_numel": 0}), compute_dtype=torch.bfloat16)
    p = model.head.weight
    assert isinstance(p, nn.Parameter) and type(p.data) is type(p.detach()) is type(p + 1) is Tensor
    assert type(copy.deepcopy(p)) is type(pickle.loads(pickle.dumps(p))) is nn.Parameter
    assert all(type(each) is nn.Parameter for each in copy.deepcopy(model).parameters())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    again = nn.Parameter(p)
    with torch.no_grad():
        again.add_(0)
    again.data = torch.zeros(2)
    assert again.shape == (2,) and p.shape == (3, 6)
    model.extra = nn.Parameter(torch.zeros(3))
    assert engine.model.place(model.extra) is None


class ScaledParameter(nn.Parameter):
    """A class of parameters of somebody's own."""


def of_own_class(training: PlainTraining) -> None:
    model = net()
    for block in model.blocks:
        block.up.weight = ScaledParameter(block.up.weight.detach().clone())
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    for step in range(3):
        loss = loss_of(model(training.data(step, 2, 6)))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
        if isinstance(training, ShardedTraining) and training.own.stage == 3:
            p = model.blocks[1].up.weight
            assert is_released(p) and isinstance(p, ScaledParameter)
            with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"):
                p.sum()
            with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"):
                p.data.mul_(2)


def test_classes_of_parameters_are_guarded_as_the_plain_one(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, of_own_class, DEFAULTS):
        assert not wrong
