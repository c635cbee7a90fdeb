"""Every method of a mapping on `optimizer.state` between steps, next to plain torch, where it is a dict of dicts.

An operation is done on all ranks in the middle of a training; the training after it, and what it returned, are those of
plain torch with the same operation, or it is refused by name.
"""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import FusedAdamW, MuonAdamW, split_matrices
from zero_strategy.optim.full_state import safe_get_full_optimizer_state, safe_set_full_optimizer_state

Optimizer = torch.optim.Optimizer
Operation = Callable[[Any, Net], Any]
"""Does something with an optimizer (of whatever class) and its model; the result is compared."""
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


def names(model: Net, keys: Any) -> list[str]:
    known = {id(p): name for name, p in model.named_parameters()}
    return [known.get(id(key), repr(key)) for key in keys]


def mask_of(p: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.rand(p.shape, generator=generator) > 0.5).to(torch.float32)


# ---- what drops state ----


@operation
def nothing(optimizer: Any, model: Net) -> Any:
    return len(optimizer.state), bool(optimizer.state)


@operation
def clear(optimizer: Any, model: Net) -> Any:
    optimizer.state.clear()
    return len(optimizer.state), bool(optimizer.state), model.scale in optimizer.state, list(optimizer.state)


@operation
def delete(optimizer: Any, model: Net) -> Any:
    for p in (model.stem.weight, model.scale, model.head.bias):
        del optimizer.state[p]
    return len(optimizer.state), model.scale in optimizer.state, names(model, optimizer.state)


@operation
def delete_twice(optimizer: Any, model: Net) -> Any:
    del optimizer.state[model.scale]
    with pytest.raises(KeyError):
        del optimizer.state[model.scale]
    with pytest.raises(KeyError):
        optimizer.state.pop(model.scale)
    return optimizer.state.pop(model.scale, 5), optimizer.state.pop("no such key", None)


@operation
def pop(optimizer: Any, model: Net) -> Any:
    found = optimizer.state.pop(model.stem.weight)
    return sorted(found), float(found["step"]), len(optimizer.state)


@operation
def pop_and_put_back(optimizer: Any, model: Net) -> Any:
    found = [optimizer.state.pop(p) for p in model.parameters()]
    between = len(optimizer.state)
    for p, values in zip(model.parameters(), found, strict=True):
        optimizer.state[p] = values
    return between, len(optimizer.state)


@operation
def popitem(optimizer: Any, model: Net) -> Any:
    last, values = optimizer.state.popitem()
    again, _ = optimizer.state.popitem()
    return names(model, [last, again]), sorted(values), names(model, optimizer.state)


@operation
def popitem_until_empty(optimizer: Any, model: Net) -> Any:
    order = []
    while optimizer.state:
        order.append(optimizer.state.popitem()[0])
    with pytest.raises(KeyError):
        optimizer.state.popitem()
    return names(model, order)


@operation
def new_dict(optimizer: Any, model: Net) -> Any:
    optimizer.state = defaultdict(dict)


@operation
def new_dict_with_values(optimizer: Any, model: Net) -> Any:
    p = model.stem.weight
    optimizer.state = {p: {"step": torch.tensor(2.0), "exp_avg": mask_of(p), "exp_avg_sq": mask_of(p) + 1}}
    for other in model.parameters():
        if other is not p:
            optimizer.state[other] = {}


@operation
def empty_entries(optimizer: Any, model: Net) -> Any:
    for p in (model.stem.weight, model.scale):
        optimizer.state[p] = {}
    return len(optimizer.state), len(optimizer.state[model.scale]), bool(optimizer.state[model.scale])


@operation
def filtered(optimizer: Any, model: Net) -> Any:
    """Of BAdam and others: keep the state of some parameters only."""
    kept = {id(p) for p in model.blocks.parameters()}
    optimizer.state = defaultdict(dict, {p: v for p, v in optimizer.state.items() if id(p) in kept})
    return None


@operation
def clear_and_put_back_a_copy(optimizer: Any, model: Net) -> Any:
    for copied in (optimizer.state.copy(), copy.copy(optimizer.state)):
        optimizer.state.clear()
        optimizer.state = copied
    return len(copied)


@operation
def load_nothing(optimizer: Any, model: Net) -> Any:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    numbers = list(range(len(optimizer.param_groups[0]["params"])))
    optimizer.load_state_dict({"state": {}, "param_groups": [{**groups[0], "params": numbers}]})


@operation
def dropped_before_a_backward(optimizer: Any, model: Net) -> Any:
    optimizer.zero_grad()
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.state.clear()


# ---- what is asked ----


@operation
def order(optimizer: Any, model: Net) -> Any:
    state = optimizer.state
    ways = [state, state.keys(), [p for p, _ in state.items()], reversed(list(state)), reversed(state)]
    return [names(model, way) for way in ways], len(state.values()), model.scale in state.keys()  # noqa: SIM118


@operation
def order_of_late_ones(optimizer: Any, model: Net) -> Any:
    for p in (model.stem.weight, model.scale):
        del optimizer.state[p]
    optimizer.state[model.scale] = {}
    optimizer.state[model.head.bias] = {}
    return names(model, optimizer.state), names(model, [optimizer.state.popitem()[0]])


@operation
def keys_and_steps(optimizer: Any, model: Net) -> Any:
    found = [(sorted(values), float(values["step"]), len(values)) for values in optimizer.state.values()]
    entry = optimizer.state[model.scale]
    return found, list(entry), "exp_avg" in entry, "no" in entry, entry.get("no"), list(entry.keys()), bool(entry)


@operation
def missing(optimizer: Any, model: Net) -> Any:
    with pytest.raises(KeyError):
        optimizer.state[model.scale]["no such key"]
    return optimizer.state.get(nn.Parameter(torch.zeros(1))), optimizer.state.get(model.scale) is None


@operation
def made_when_asked_for(optimizer: Any, model: Net) -> Any:
    del optimizer.state[model.scale]
    before = optimizer.state.get(model.scale), model.scale in optimizer.state
    optimizer.state[model.scale]
    return before, model.scale in optimizer.state, dict(optimizer.state[model.scale])


@operation
def shapes(optimizer: Any, model: Net) -> Any:
    values = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return [
        (v.shape, v.dtype, v.device, v.numel(), v.dim(), torch.is_tensor(v), v.requires_grad, len(v.shape))
        for v in values
    ], [torch.zeros_like(v) for v in values]


@operation
def equality(optimizer: Any, model: Net) -> Any:
    first = optimizer.state == optimizer.state, optimizer.state == {}, optimizer.state[model.scale] == {}
    optimizer.state.clear()
    return first, optimizer.state == {}, optimizer.state == {}


# ---- what sets values ----


@operation
def setdefault(optimizer: Any, model: Net) -> Any:
    p = model.stem.weight
    optimizer.state.setdefault(p, {})
    del optimizer.state[model.scale]
    found = optimizer.state.setdefault(model.scale, {})
    return len(optimizer.state[p]), len(found), model.scale in optimizer.state


@operation
def update(optimizer: Any, model: Net) -> Any:
    p = model.head.weight
    full = {"step": torch.tensor(7.0), "exp_avg": mask_of(p), "exp_avg_sq": mask_of(p) * 2 + 1}
    optimizer.state.update({p: full, model.scale: {}})
    optimizer.state[model.stem.bias].update(exp_avg=torch.zeros_like(model.stem.bias))
    return float(optimizer.state[p]["step"])


@operation
def in_place_or(optimizer: Any, model: Net) -> Any:
    optimizer.state |= {model.scale: {}, model.stem.weight: {}}
    merged = optimizer.state | {model.head.bias: {}}
    return len(merged), len(merged[model.head.bias]), len(optimizer.state[model.head.bias]), type(merged)


@operation
def whole_entries(optimizer: Any, model: Net) -> Any:
    for number, p in enumerate(model.parameters()):
        full = {"step": torch.tensor(3.0), "exp_avg": mask_of(p) * number, "exp_avg_sq": mask_of(p) + 0.5}
        optimizer.state[p] = full
    return [float(values["step"]) for values in optimizer.state.values()]


@operation
def single_values(optimizer: Any, model: Net) -> Any:
    for p in model.parameters():
        optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
        optimizer.state[p]["exp_avg_sq"] = mask_of(p) + 0.25
        optimizer.state[p]["step"] = torch.tensor(9.0)


@operation
def computed_values(optimizer: Any, model: Net) -> Any:
    for p in model.parameters():
        entry = optimizer.state[p]
        entry["exp_avg"] = entry["exp_avg"] * 0.5 + mask_of(p)
        entry["exp_avg_sq"] = torch.where(mask_of(p) > 0, entry["exp_avg_sq"], torch.full_like(p, 0.125))


@operation
def exchanged(optimizer: Any, model: Net) -> Any:
    for p in model.parameters():
        entry = optimizer.state[p]
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"].abs()


@operation
def moved_to_a_device(optimizer: Any, model: Net) -> Any:
    """As Lightning does before and after a fit."""
    for _, values in optimizer.state.items():
        for key, value in values.items():
            if key != "step":
                values[key] = value.to(torch.device("cpu"))


# ---- in place ----


@operation
def all_zeroed(optimizer: Any, model: Net) -> Any:
    """As ReLoRA does."""
    for p in (model.stem.weight, model.scale, model.head.bias):
        for value in optimizer.state[p].values():
            value.zero_()
    return [float(values["step"]) for values in optimizer.state.values()]


@operation
def pruned(optimizer: Any, model: Net) -> Any:
    for p in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key].mul_(mask_of(p))


@operation
def each_in_its_way(optimizer: Any, model: Net) -> Any:
    for p in model.parameters():
        first, second = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
        first.add_(mask_of(p), alpha=0.5).clamp_(-1, 1)
        first *= 0.5
        first.lerp_(torch.ones_like(p), 0.25)
        first.masked_fill_(mask_of(p) > 0, 0.125)
        second.copy_(mask_of(p)).add_(first.abs()).div_(3)
        second.data.mul_(2)
        optimizer.state[p]["step"].add_(1)


@operation
def held_for_later(optimizer: Any, model: Net) -> Any:
    """A value that was asked for before a step is the optimizer's after it."""
    values = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    optimizer.zero_grad()
    for value in values:
        value.mul_(0.5)


def train_one(training: PlainTraining, step: int) -> None:
    training.backward(loss_of(training.module(training.data(step, 2, 6))))
    training.step()
    training.zero_grad()


def interrupted(training: PlainTraining, do: Operation, kind: Any = torch.optim.AdamW, **options: Any) -> None:
    model = net(depth=1)
    training.shard(model)
    optimizer = kind(model.parameters(), lr=0.05, **options)
    training.attach(optimizer)
    for step in range(2):
        train_one(training, step)
    training.notes.append(do(optimizer, model))
    for step in range(2, 4):
        train_one(training, step)


def plain(found: Any) -> Any:
    """Without tensors, whose equality is no truth value."""
    if isinstance(found, Tensor):
        return found.tolist()
    return [plain(each) for each in found] if isinstance(found, (tuple, list)) else found


def done(optimizer: Any, model: Net, what: str) -> Any:
    return plain(OPERATIONS[what](optimizer, model))


def wrong_operations(
    settings: list[Setting], tolerance: float, chosen: tuple[str, ...], **options: Any
) -> dict[str, Any]:
    found = {}
    for name in chosen:
        script = partial(interrupted, do=partial(done, what=name), **options)
        if wrong := play(script, settings, tolerance):
            found[name] = wrong
    return found


# Every operation is tried on a state that is whole (one rank) and on one that is divided (stage 3); which of the two it
# is decides, not the stage. So the stages 0, 1 and 2 share the operations among them, and three ranks have some again.
SHARES = {(1, 1): (0, 1), (2, 3): (0, 1), (2, 0): (0, 3), (2, 1): (1, 3), (2, 2): (2, 3), (3, 3): (1, 4)}
"""By world and stage, the operations that are tried: from which on, and every which."""


@pytest.mark.parametrize(("world", "stage"), sorted(SHARES))
def test_state_is_a_mapping(ranks: Launcher, world: int, stage: int) -> None:
    """AdamW of torch, to the bit (but for the mean of three like gradients)."""
    tolerance = 1e-6 if world == 3 else 0.0
    first, every = SHARES[world, stage]
    chosen = tuple(OPERATIONS)[first::every]
    for wrong in ranks(world)(wrong_operations, [DEFAULTS[stage]], tolerance, chosen, foreach=False):
        assert not wrong


IN_TIERS = (
    "clear", "delete", "pop_and_put_back", "new_dict_with_values", "filtered", "keys_and_steps", "whole_entries",
    "single_values", "computed_values", "exchanged", "all_zeroed", "each_in_its_way",
)  # fmt: skip
"""Operations that are tried with state in tiers; what is refused there, `refusals_in_tiers` has."""


@pytest.mark.parametrize("tier", ["", "cpu", "nvme"])
def test_state_of_fused_steps_is_a_mapping(ranks: Launcher, tmp_path: Path, tier: str) -> None:
    """Our own rules, in memory and in tiers."""
    offload: dict[str, Any] = {"optimizer": tier}
    if tier == "nvme":
        offload |= {"nvme_path": str(tmp_path), "probe_seconds": 0}  # how fast the drive is says nothing here
    config = {"offload": offload} if tier else {"fused_optimizers": True}
    setting = Setting(3 if tier == "nvme" else 2, "per_micro_batch", config)
    for wrong in ranks(2, timeout=180)(wrong_operations, [setting], 1e-4, IN_TIERS if tier else tuple(OPERATIONS)):
        assert not wrong


# ---- other optimizers ----


@operation
def _resets(optimizer: Any, model: Net) -> Any:
    """Resets that every class has to take."""
    del optimizer.state[model.stem.weight]
    optimizer.state[model.scale] = {}
    return len(optimizer.state)


RESETS = OPERATIONS.pop("_resets")


def cleared(optimizer: Any, model: Net) -> Any:
    optimizer.state.clear()
    return len(optimizer.state)


def replaced(optimizer: Any, model: Net) -> Any:
    optimizer.state = defaultdict(dict)


def sorted_keys(optimizer: Any, model: Net) -> Any:
    return [sorted(values) for values in optimizer.state.values()], names(model, optimizer.state)


def halved(optimizer: Any, model: Net) -> Any:
    for values in optimizer.state.values():
        for key in values:
            if key != "step":
                values[key].mul_(0.5)


CLASSES: dict[str, tuple[Any, list[Operation]]] = {
    "SGD": (torch.optim.SGD, [RESETS, cleared, replaced]),
    "SGD momentum": (partial(torch.optim.SGD, momentum=0.9), [RESETS, cleared, replaced, sorted_keys, halved]),
    "Adagrad": (torch.optim.Adagrad, [sorted_keys, halved]),
    "RMSprop": (partial(torch.optim.RMSprop, momentum=0.5), [RESETS, cleared, replaced, sorted_keys, halved]),
    "NAdam": (torch.optim.NAdam, [RESETS, cleared, replaced, sorted_keys]),
    "ASGD": (torch.optim.ASGD, [RESETS, cleared, replaced, sorted_keys]),
    "Adadelta": (torch.optim.Adadelta, [RESETS, cleared, replaced, sorted_keys, halved]),
}


def wrong_classes() -> dict[str, Any]:
    found = {}
    for number, (name, (kind, operations)) in enumerate(CLASSES.items()):
        for do in operations:
            if name == "SGD" and do is RESETS:
                continue  # it has no state to delete
            script = partial(interrupted, do=do, kind=kind, foreach=False)
            if wrong := play(script, [DEFAULTS[(1, 3, 2)[number % 3]]], 0.0):
                found[f"{name} {do.__name__}"] = wrong
    return found


def test_state_of_every_class_is_a_mapping(ranks: Launcher) -> None:
    assert ranks(2)(wrong_classes) == [{}, {}]


def muon(model: Net) -> Optimizer:
    return MuonAdamW(split_matrices(model), muon={"lr": 0.02}, adamw={"lr": 0.05, "foreach": False}, ns_dtype="float32")


def muon_resets(training: PlainTraining) -> None:
    model = net(depth=2)
    training.shard(model)
    optimizer: Any = muon(model)
    training.attach(optimizer)
    for step in range(2):
        train_one(training, step)
    p, q = model.blocks[0].up.weight, model.head.bias
    training.notes.append([sorted(optimizer.state[each]) for each in model.parameters()])
    del optimizer.state[p]
    optimizer.state[q] = {}
    optimizer.state[model.blocks[1].down.weight]["momentum_buffer"].mul_(mask_of(model.blocks[1].down.weight))
    train_one(training, 2)
    optimizer.state.clear()
    train_one(training, 3)


def wrong_muon() -> dict[str, Any]:
    return play(muon_resets, [DEFAULTS[stage] for stage in (0, 1, 3)], 1e-5)


def test_state_of_muon_is_a_mapping(ranks: Launcher) -> None:
    assert ranks(2)(wrong_muon) == [{}, {}]


def lbfgs_resets(training: PlainTraining) -> None:
    model = net(depth=1)
    training.shard(model)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    training.attach(optimizer)

    def closure(step: int) -> Tensor:
        training.zero_grad()
        loss = loss_of(model(torch.ones(2, 6) * (step + 1)))
        training.backward(loss)
        return loss

    for step, reset in enumerate(["", "clear", "assign", "del", "empty"]):
        training.notes.append(len(optimizer.state))
        if reset == "clear":
            optimizer.state.clear()
        elif reset == "assign":
            optimizer.state = defaultdict(dict)
        elif reset == "del":
            del optimizer.state[next(iter(model.parameters()))]
        elif reset == "empty":
            optimizer.state[next(iter(model.parameters()))] = {}
        for _ in range(2):
            optimizer.step(partial(closure, step))
    training.notes.append([float(p.detach().sum()) for p in model.parameters()] if training.engine is None else [])
    training.optimizers.clear()


def lbfgs_weights() -> list[str]:
    one = PlainTraining(DEFAULTS[1])
    lbfgs_resets(one)
    found = []
    for stage in (0, 1, 3):
        sharded = ShardedTraining(DEFAULTS[stage])
        lbfgs_resets(sharded)
        weights = sharded.own.full_state_dict()
        expected = one.module.state_dict()
        near = {name: torch.allclose(value, expected[name], rtol=1e-3, atol=1e-4) for name, value in weights.items()}
        found += [f"{stage} {name}" for name, is_near in near.items() if not is_near]
        found += [] if sharded.notes[:-1] == one.notes[:-1] else [f"{stage} {sharded.notes}, not {one.notes}"]
    return found


def test_state_of_lbfgs_can_be_dropped(ranks: Launcher) -> None:
    assert ranks(2)(lbfgs_weights) == [[], []]


# ---- refusals by name ----


def started(stage: int, kind: Any = torch.optim.AdamW, **config: Any) -> tuple[Net, ZeroEngine, Any]:
    model = net(depth=1)
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}, **config))
    optimizer = kind(model.parameters())
    engine.attach(optimizer)
    one_step(model, optimizer)
    return model, engine, optimizer


def one_step(model: Net, optimizer: Optimizer) -> None:
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    optimizer.zero_grad()


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda v: v.sum(),
    "select": lambda v: v[0],
    "index_put_": lambda v: v.__setitem__(v > 0, 0.0),
    "numpy": lambda v: v.numpy(),
    "tolist": lambda v: v.tolist(),
    "view": lambda v: v.quantile(0.5),
    "deepcopy": copy.deepcopy,
    "pickling": pickle.dumps,
    "_foreach_mul_": lambda v: torch._foreach_mul_([v], 2.0),
    "normal_": lambda v: v.normal_(),
    "copy_": lambda v: torch.zeros(v.shape).copy_(v),
    "linalg_vector_norm": lambda v: v.norm(),
}


def refusals(stage: int) -> None:
    model, engine, optimizer = started(stage)
    p, value = model.stem.weight, optimizer.state[model.stem.weight]["exp_avg"]
    for name, read in READS.items():
        with pytest.raises(NotImplementedError, match=rf"^{name} needs all.*'stem.weight'.*'exp_avg'.*full_optimizer"):
            read(value)
    assert "stem.weight" in repr(value) and "AdamW" in repr(optimizer.state) and "exp_avg" in repr(optimizer.state[p])
    state = optimizer.state
    with pytest.raises(ValueError, match=r"stem.weight.*takes a number, or a full value.*\(6, 6\), not one of.*\(5,\)"):
        state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(5)}
    with pytest.raises(ValueError, match=r"stem.weight.*\(5,\)"):
        state[p]["exp_avg"] = torch.ones(5)
    with pytest.raises(TypeError, match=r"stem.weight.*takes a dict.*not Tensor"):
        state[p] = torch.ones(6, 6)
    with pytest.raises(ValueError, match="divided among the ranks otherwise"):
        state[p]["exp_avg"] = state[model.stem.bias]["exp_avg"]
    with pytest.raises(KeyError, match=r"shape \(2,\) is no parameter of the model"):
        state[nn.Parameter(torch.ones(2))] = {}
    with pytest.raises(KeyError, match=r"stem\.weight"):
        state.pop(p) and state.pop(p)
    with pytest.raises((NotImplementedError, RuntimeError), match="deepcopy"):  # of the state, or of a parameter
        copy.deepcopy(optimizer)
    with pytest.raises((NotImplementedError, RuntimeError), match="pickling"):
        pickle.dumps(optimizer.state)
    with pytest.raises(TypeError, match="cannot be compared"):
        _ = state == dict.fromkeys(range(len(state)))
    with pytest.raises(RuntimeError, match="state_dict"):
        optimizer.state_dict()
    optimizer.state = [1]
    with pytest.raises(TypeError, match=r"optimizer\.state takes a mapping by parameter, not list"):
        optimizer.step()
    engine.reset()
    optimizer.state = defaultdict(dict)
    one_step(model, optimizer)
    held = optimizer.state[p]["exp_avg"]
    optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=r"'exp_avg'.*was read before it was replaced.*zero_"):
        held.zero_()
    optimizer.state.clear()
    assert pickle.loads(pickle.dumps(optimizer.state)) == {} and copy.deepcopy(optimizer.state) == {}
    engine.detach()
    with pytest.raises(RuntimeError, match="was detached"):
        len(state)
    assert len(optimizer.state) == 0 and type(optimizer.state) is defaultdict


@pytest.mark.parametrize("stage", [1, 3])
def test_state_is_refused_by_name(ranks: Launcher, stage: int) -> None:
    ranks(2)(refusals, stage)


def whole_values(stage: int) -> None:
    """Values are the tensors themselves, and copies are copies."""
    model, _, optimizer = started(stage)
    p = model.stem.weight
    value = optimizer.state[p]["exp_avg"]
    assert type(value) is Tensor and value.shape == p.shape
    assert torch.equal(value, safe_get_full_optimizer_state(p, "exp_avg"))  # type: ignore[arg-type]
    value[0] = 3.0
    assert safe_get_full_optimizer_state(p, "exp_avg")[0].eq(3.0).all()  # type: ignore[index]
    optimizer.state[p]["exp_avg"] = torch.full((6, 6), 2.0)
    assert safe_get_full_optimizer_state(p, "exp_avg").eq(2.0).all()  # type: ignore[union-attr]
    copied = copy.deepcopy(optimizer.state[p])
    assert type(copied) is dict and copied["exp_avg"].eq(2.0).all()
    copied["exp_avg"].zero_()
    assert optimizer.state[p]["exp_avg"].eq(2.0).all()
    assert len(pickle.loads(pickle.dumps(optimizer.state))) == len(optimizer.state)


def test_whole_state_is_shown_as_it_is(ranks: Launcher) -> None:
    ranks(1)(whole_values, 1)
    ranks(2)(whole_values, 0)


class GlobalState(torch.optim.SGD):
    """Keeps something under a key that is no parameter, which is a dict and which is not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state["all"].setdefault("steps", 0)
        self.state["all"]["steps"] += 1
        self.state["count"] = self.state["all"]["steps"]  # type: ignore[assignment]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / self.state["all"]["steps"])


def other_keys() -> None:
    model = net(depth=1)
    engine = ZeroEngine(model, load_config(stage=0))
    optimizer: Any = GlobalState(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    one_step(model, optimizer)
    one_step(model, optimizer)
    assert optimizer.state["all"] == {"steps": 2} and optimizer.state["count"] == 2 and "all" in optimizer.state
    assert list(optimizer.state) == ["all", "count"] and engine.state_bytes()["optimizer"] == 0
    optimizer.state["all"]["steps"] = 6
    del optimizer.state["count"]
    one_step(model, optimizer)
    assert optimizer.state["count"] == 7
    optimizer.state.clear()
    one_step(model, optimizer)
    assert optimizer.state["count"] == 1


def test_state_keeps_what_is_under_other_keys(ranks: Launcher) -> None:
    ranks(1)(other_keys)


def partial_states(fused: bool) -> None:
    """A state that lacks something is an error of the next step, as in torch, not a new beginning."""
    model, engine, optimizer = started(2, fused_optimizers=fused)
    for p in model.parameters():
        del optimizer.state[p]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        one_step(model, optimizer)
    engine.reset()
    optimizer.state.clear()
    optimizer.zero_grad()
    one_step(model, optimizer)
    with pytest.raises(ValueError, match=r"'master'.*the engine keeps.*safe_set_full_fp32_param"):
        low = net(depth=1)
        engine = ZeroEngine(low, load_config(stage=1), compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(low.parameters())
        engine.attach(optimizer)
        optimizer.state[low.scale]["master"] = torch.tensor(1.0)


def test_partial_state_is_an_error(ranks: Launcher) -> None:
    for fused in (True, False):
        ranks(1)(partial_states, fused)


def low_precision() -> None:
    """State of bf16 parameters is float32 beside the master weights, whatever is assigned."""
    model = net(depth=1)
    engine = ZeroEngine(model, load_config(stage=2, units={"min_numel": 0}), compute_dtype=torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    loss_of(model(torch.ones(2, 6, dtype=torch.bfloat16))).backward()
    optimizer.step()
    p = model.stem.weight
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.5)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    found = safe_get_full_optimizer_state(p, "exp_avg")
    assert found is not None and found.dtype == torch.float32 and found.eq(0.5).all()


def test_state_of_low_precision(ranks: Launcher) -> None:
    ranks(2)(low_precision)


# ---- saves and loads, ranks that differ ----


def after_a_load(stage: int, folder: str) -> None:
    """A rank knows of the state that others have loaded; what was dropped is not saved."""
    model, engine, optimizer = started(stage)
    one_step(model, optimizer)
    engine.save(folder)
    del optimizer.state[model.stem.weight]
    assert "stem.weight" not in engine.full_optimizer_state(optimizer)
    assert len(engine.optimizer_state_dict(optimizer)["state"]) == len(list(model.parameters())) - 1
    assert len(optimizer.state) == len(list(model.parameters())) - 1
    engine.load(folder)
    assert len(optimizer.state) == len(list(model.parameters()))
    for p in model.parameters():
        assert sorted(optimizer.state[p]) == ["exp_avg", "exp_avg_sq", "step"] and optimizer.state[p]["step"] == 2
    one_step(model, optimizer)
    assert all(values["step"] == 3 for values in optimizer.state.values())
    whole = engine.optimizer_state_dict(optimizer)
    optimizer.state.clear()
    engine.load_optimizer_state_dict(optimizer, whole)
    assert all(values["step"] == 3 for values in optimizer.state.values()) and len(optimizer.state) == len(
        whole["state"]
    )
    safe_set_full_optimizer_state(model.scale, torch.tensor(4.0), "exp_avg")
    optimizer.state[model.scale]["exp_avg"].mul_(0.5)
    assert safe_get_full_optimizer_state(model.scale, "exp_avg") == torch.tensor(2.0)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_after_saves_and_loads(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    ranks(2)(after_a_load, stage, str(tmp_path / "saved"))


ONE_SIDED: dict[str, Operation] = {
    "clear()": lambda optimizer, model: optimizer.state.clear(),
    "del optimizer.state['scale']": lambda optimizer, model: optimizer.state.pop(model.scale),
    "optimizer.state['scale'] = []": lambda optimizer, model: optimizer.state.update({model.scale: {}}),
    "['exp_avg'].mul_(0.5)": lambda optimizer, model: optimizer.state[model.stem.weight]["exp_avg"].mul_(0.5),
    "['exp_avg'] = Tensor": lambda optimizer, model: optimizer.state[model.scale].update(exp_avg=torch.tensor(1.0)),
    "optimizer.state = ...": lambda optimizer, model: setattr(optimizer, "state", defaultdict(dict)),
}


def one_sided(stage: int) -> list[str]:
    found = []
    for do in ONE_SIDED.values():
        model, engine, optimizer = started(stage)
        if engine.mesh.rank == 1:
            do(optimizer, model)
        try:
            one_step(model, optimizer)
            found.append("not noticed")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_state_that_only_some_ranks_change(ranks: Launcher) -> None:
    """The end of the next reduction says so, on all ranks."""
    for messages in ranks(2)(one_sided, 2):
        for words, message in zip(ONE_SIDED, messages, strict=True):
            assert "changes of optimizer.state is" in message and words in message, message


def refusals_in_tiers(folder: str) -> None:
    """Values in a tier move on with every step: what was asked for before is refused."""
    nvme = {"optimizer": "nvme", "nvme_path": folder, "probe_seconds": 0}
    model, _, optimizer = started(2, FusedAdamW, offload=nvme)
    p = model.stem.weight
    value, entry = optimizer.state[p]["exp_avg"], optimizer.state[p]
    one_step(model, optimizer)
    with pytest.raises(RuntimeError, match=r"'exp_avg'.*was read before it was replaced, loaded or moved"):
        value.mul_(0.5)
    optimizer.state.clear()
    with pytest.raises(RuntimeError, match=r"'exp_avg'.*cannot be (put back|read here), its values in the tier"):
        optimizer.state[p] = entry


def test_state_in_tiers_is_refused_by_name(ranks: Launcher, tmp_path: Path) -> None:
    ranks(1)(refusals_in_tiers, str(tmp_path))
