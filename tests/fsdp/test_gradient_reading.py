"""`p.grad` at stages 1 to 3 reads, and is multiplied, as under plain data parallelism; writes are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from zero_strategy.comm.store import BarrierError
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

CASES = [(1, "per_step"), (1, "per_micro_batch"), (2, "per_micro_batch"), (3, "per_step"), (3, "per_micro_batch")]


class Pair:
    """A sharded model, and one that is trained by hand as data parallelism does."""

    def __init__(self, stage: int, reduction: str, **options: Any) -> None:
        self.plain, self.sharded = net(), net()
        fixed = {"units": {"min_numel": 0}, "barrier_seconds": 5.0}
        config = load_config(stage=stage, gradient_reduction=reduction, **(fixed | options))
        self.engine = ZeroEngine(self.sharded, config)
        self.engine.attach(torch.optim.SGD(self.sharded.parameters(), lr=0.1))
        self.count = 0

    def backward(self, *, sync: bool = True) -> None:
        torch.manual_seed(10 * self.count + self.engine.mesh.rank)
        self.count += 1
        x = torch.randn(2, 6)
        loss_of(self.plain(x)).backward()
        if sync:
            for p in self.plain.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            loss_of(self.sharded(x)).backward()
        else:
            with self.engine.no_sync():
                loss_of(self.sharded(x)).backward()

    def differing(self) -> list[str]:
        found = []
        named = zip(self.plain.named_parameters(), self.sharded.parameters(), strict=True)
        for (name, mine), theirs in named:
            if (mine.grad is None) != (theirs.grad is None):
                found.append(f"{name}: {mine.grad is None} {theirs.grad is None}")
            elif mine.grad is not None and not torch.allclose(mine.grad, theirs.grad, rtol=1e-6, atol=1e-7):
                found.append(f"{name}: {mine.grad} {theirs.grad.clone()}")
        return found


def reads(stage: int, reduction: str) -> list[str]:
    pair = Pair(stage, reduction)
    pair.backward()
    found = pair.differing()
    if reduction == "per_step":  # what `no_sync` keeps back is the rank's own, on top of what was reduced before
        pair.backward(sync=False)
        found += pair.differing()
        for model in (pair.plain, pair.sharded):
            model.zero_grad(set_to_none=False)
        found += pair.differing()
        pair.backward(sync=False)
        pair.backward(sync=False)
        found += pair.differing()
        pair.plain.zero_grad()
        pair.sharded.zero_grad()
    pair.backward()
    for model in (pair.plain, pair.sharded):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.zero_()
    found += pair.differing()
    pair.backward()
    norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
    own = torch.nn.utils.get_total_norm([p.grad for p in pair.sharded.parameters() if p.grad is not None])
    if not torch.allclose(norm, own):
        found.append(f"norm {norm} {own}")
    pair.engine.clip_grad_norm_(0.1)
    found += pair.differing()
    for model in (pair.plain, pair.sharded):
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5
    found += pair.differing()
    return found


@pytest.mark.parametrize("stage, reduction", CASES)
@pytest.mark.parametrize("world", [2, 3])
def test_reads_what_data_parallelism_shows(ranks: Launcher, world: int, stage: int, reduction: str) -> None:
    for found in ranks(world)(reads, stage, reduction):
        assert found == []


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "data": lambda g: g.data.norm(),
    "mul": lambda g: g * 2,
    "item": lambda g: g.sum().item(),
    "isnan": lambda g: torch.isnan(g).any(),
    "foreach": lambda g: torch._foreach_norm([g, g])[1],
    "clone": lambda g: g.clone(),
    "detached": lambda g: g.detach().cpu(),
    "deepcopy": lambda g: copy.deepcopy(g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "stack": lambda g: torch.stack([g, g]),
    "other": lambda g: torch.zeros(12, 6).add_(g),
    "view": lambda g: g.view(-1)[3:9],
    "row": lambda g: g[1],
    "iterate": lambda g: sum(row.sum() for row in g),
    "format": lambda g: float(f"{g.sum():.6f}"),
    "out": lambda g: torch.add(g, 1, out=torch.empty(12, 6)),
    "T": lambda g: g.T.contiguous(),
    "mT": lambda g: g.mT @ g,
    "view and whole": lambda g: g.view(-1) @ (g.view(12, 6) + g).view(-1),
    "H": lambda g: g.H.reshape(-1),
    "real": lambda g: g.real + 1,
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda g: g.add_(2),
    "mul_ by a tensor": lambda g: g.mul_(torch.full((12, 6), 2.0)),
    "div_ rounding": lambda g: g.div_(2, rounding_mode="floor"),
    "imul by a row": lambda g: g.__imul__(torch.ones(6)),
    "data": lambda g: g.data.add_(2),
    "foreach": lambda g: torch._foreach_mul_([g, g], [2.0, 3.0]),
    "copy_": lambda g: g.copy_(torch.zeros(())),
    "set": lambda g: g.__setitem__(0, 1.0),
    "new data": lambda g: setattr(g, "data", torch.zeros(12, 6)),
    "view": lambda g: g.view(-1).mul_(2),
    "row": lambda g: g[1].fill_(1.0),
    "row of a view": lambda g: g.view(6, 12)[1].__setitem__(0, 1.0),
    "unbound": lambda g: g.unbind()[0].zero_(),
    "out": lambda g: torch.add(torch.ones(12, 6), 1, out=g),
    "numpy": lambda g: g.numpy().__setitem__(0, 1.0),
    "out of a view": lambda g: torch.add(g.view(12, 6), 1, out=g),
    "out to a view": lambda g: torch.add(g, 1, out=g.view(12, 6)),
    "array": lambda g: np.asarray(g).__setitem__(0, 1.0),
    "transposed": lambda g: g.T.zero_(),
}


def uses(stage: int) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    pair = Pair(stage, "per_step" if stage == 1 else "per_micro_batch")
    pair.backward()
    mine, theirs = (model.blocks[0].up.weight.grad for model in (pair.plain, pair.sharded))
    assert mine is not None and theirs is not None
    wrong, written = {}, {}
    for name, use in READS.items():
        expected, actual = use(mine), use(theirs)
        if not torch.allclose(torch.as_tensor(expected), torch.as_tensor(actual)):
            wrong[name] = (expected, actual)
    for name, use in WRITES.items():
        try:
            use(theirs)
        except (RuntimeError, ValueError) as error:
            written[name] = str(error)
    shape = f"{tuple(theirs.shape)} {theirs.dtype} {theirs.numel()} {theirs.is_sparse}"
    return wrong, written, [repr(theirs), shape, *pair.differing()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_kinds_of_uses(ranks: Launcher, stage: int) -> None:
    for wrong, written, facts in ranks(2)(uses, stage):
        assert wrong == {}
        shown = f"GradientProxy('blocks.0.up.weight', shape=(12, 6), stage {stage})"
        assert facts == [shown, "(12, 6) torch.float32 72 False"]
        assert written.keys() == WRITES.keys()
        assert "read-only" in written.pop("numpy") and "read-only" in written.pop("array")
        for message in written.values():
            assert f"'blocks.0.up.weight': at stage {stage} no rank holds it whole" in message


def exported(stage: int) -> tuple[bool, list[Any]]:
    """True if a model that is exported while it has gradients gives its own numbers; what these say of views."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    x = torch.linspace(-1, 1, 12).view(2, 6)
    model(x).square().sum().backward()
    with torch.no_grad():
        same = torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    views = [each for gradient in gradients for each in (gradient, gradient.view(-1))]
    return same, [(each._is_view(), each._base) for each in views]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_with_gradients_is_exported(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(exported, stage):
        assert found == (True, [(False, None)] * 8)


def scale_all(model: nn.Module) -> list[Tensor]:
    """Every way to multiply gradients by a number in place, and torch's clipping by norm; gives the norms."""
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.3), nn.utils.clip_grad_norm_(model.parameters(), 9.0)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        gradient.mul_(0.75)
        gradient *= 1.5
        gradient.data.div_(1.25)
        gradient.detach().__itruediv__(torch.tensor(0.7))
    torch._foreach_mul_(gradients, torch.tensor(0.9))
    torch._foreach_div_([gradients[0], gradients[0]], 1.1)
    return [*norms, nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))]


def multiplied(stage: int, reduction: str) -> list[str]:
    """By gradients and by weights after steps, with what the engine's own clipping has put off."""
    pair = Pair(stage, reduction)
    plain, found = torch.optim.SGD(pair.plain.parameters(), lr=0.1), []
    for step in range(3):
        pair.backward()
        if step:
            pair.backward()
        if step == 2:
            nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.4)
            pair.engine.clip_grad_norm_(0.4)
        norms = scale_all(pair.plain), scale_all(pair.sharded)
        found += [f"{a} {b}" for a, b in zip(*norms, strict=True) if not torch.allclose(a, b, rtol=1e-6)]
        found += pair.differing()
        plain.step(), plain.zero_grad()
        pair.engine.optimizers[0].optimizer.step()
        pair.sharded.zero_grad()
    whole = pair.engine.full_state_dict()
    state = pair.plain.state_dict()
    return found + [name for name in whole if not torch.allclose(whole[name], state[name], rtol=1e-6, atol=1e-7)]


@pytest.mark.parametrize("stage, reduction", CASES)
def test_multiplied_in_place_by_a_number(ranks: Launcher, stage: int, reduction: str) -> None:
    for found in ranks(2)(multiplied, stage, reduction):
        assert found == []


def alone() -> str:
    pair = Pair(1, "per_step", barrier_seconds=0.5)
    pair.backward()
    gradient = pair.sharded.blocks[0].up.weight.grad
    assert gradient is not None
    said = "nothing"
    if pair.engine.mesh.rank == 0:
        try:
            gradient.norm()
        except BarrierError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_rank_that_reads_alone_is_told(ranks: Launcher) -> None:
    said = ranks(2)(alone)[0]
    assert "reading p.grad of 'blocks.0.up.weight'" in said and "[1] did not come" in said


def at_a_wrong_time() -> list[str]:
    pair = Pair(2, "per_micro_batch")
    pair.backward()
    weight = pair.sharded.blocks[1].up.weight
    kept, said = weight.grad, []
    assert kept is not None

    def peek(gradient: Tensor) -> None:
        try:
            kept.norm()
        except RuntimeError as error:
            said.append(str(error))

    hook = pair.sharded.blocks[0].up.weight.register_hook(peek)
    pair.backward()
    hook.remove()
    pair.sharded.zero_grad()
    for use in (kept.norm, lambda: kept.mul_(2)):
        try:
            use()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_reads_at_a_wrong_time_are_refused(ranks: Launcher) -> None:
    for running, removed, multiplied_late in ranks(2)(at_a_wrong_time):
        assert "while a backward is running" in running
        assert "was removed (zero_grad)" in removed and "was removed (zero_grad)" in multiplied_late
