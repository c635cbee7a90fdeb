"""One training script, played twice on the same ranks: by plain modules, and by the engine.

The plain training keeps a whole replica per rank and averages gradients by hand, in the order that the engine
documents.
A script that reduces once per parameter and step must come out bit-equal at every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reference import Order
from zero_strategy.compat.megatron.gradients import clip_tensors_by_global_norm
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.full_state import safe_get_full_grad

Script = Callable[["PlainTraining"], None]


@dataclass(frozen=True)
class Setting:
    """Runner of a script in the engine; also decides the plain training's order of summation."""

    stage: int
    order: Order
    config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"stage {self.stage} {self.order}" + "".join(f" {k}={v}" for k, v in self.config.items())


SETTINGS = (
    Setting(0, "per_step"),
    Setting(0, "per_micro_batch"),
    Setting(1, "per_step"),
    Setting(2, "per_micro_batch"),
    Setting(3, "per_micro_batch"),
    Setting(3, "per_step"),
)
KEPT = Setting(3, "per_micro_batch", {"reshard_after_backward": False})
"""Units stay whole until the optimizer's step."""
DEFAULTS = tuple(setting for setting in SETTINGS if (setting.order == "per_step") == (setting.stage < 2))


class PlainTraining:
    """Operations of a script; this class does it in plain torch."""

    engine: ZeroEngine | None = None

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.module = nn.Module()
        self.optimizers: list[Optimizer] = []
        self.notes: list[Any] = []
        self._local: dict[int, Tensor] = {}

    def shard(self, module: nn.Module) -> nn.Module:
        self.module = module
        return module

    def attach(self, *optimizers: Optimizer) -> None:
        self.optimizers += optimizers

    def data(self, step: int, *shape: int) -> Tensor:
        """Random numbers that differ from rank to rank."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(*shape, generator=generator)

    def note(self, *values: Any) -> None:
        """Something on this rank that must be the same for both trainings."""
        self.notes += [value.detach().clone() if isinstance(value, Tensor) else value for value in values]

    def backward(self, loss: Tensor, *, sync: bool = True, **kwargs: Any) -> None:
        parameters = list(self.module.parameters())
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        loss.backward(**kwargs)
        for p, earlier in zip(parameters, before, strict=True):
            if p.grad is not None:
                known = self._local.get(id(p))
                self._local[id(p)] = p.grad if known is None else known + p.grad
            p.grad = earlier
        if sync or self.setting.order == "per_micro_batch":
            self.settle()

    def settle(self) -> None:
        """Average what has not been averaged yet."""
        parameters = list(self.module.parameters())
        mine = {number: self._local.pop(id(p)) for number, p in enumerate(parameters) if id(p) in self._local}
        everyone = [mine] if self.world == 1 else self._gathered(mine, parameters)
        for number in sorted({number for part in everyone for number in part}):
            p = parameters[number]
            total = torch.zeros_like(p)
            for part in everyone:
                if number in part:
                    total = total + part[number]
            total = total * (1 / self.world)
            p.grad = total if p.grad is None else total + p.grad

    def _gathered(self, mine: dict[int, Tensor], parameters: list[nn.Parameter]) -> list[dict[int, Tensor]]:
        """Every rank's gradients by number: one collective, in float64, which holds the bits of all narrower types."""
        present = torch.tensor([float(number in mine) for number in range(len(parameters))])
        values = [mine.get(n, torch.zeros_like(p)).to_dense().reshape(-1) for n, p in enumerate(parameters)]
        packed = torch.cat([part.double() for part in (present, *values)])
        everyone = [torch.empty_like(packed) for _ in range(self.world)]
        dist.all_gather(everyone, packed)
        sizes = [len(parameters), *(p.numel() for p in parameters)]
        found = []
        for each in everyone:
            given, *parts = each.split(sizes)
            pairs = zip(parameters, parts, strict=True)
            found.append({n: part.view(p.shape).to(p.dtype) for n, (p, part) in enumerate(pairs) if given[n]})
        return found

    def step(self, *optimizers: Optimizer) -> None:
        self.settle()
        for optimizer in optimizers or self.optimizers:
            optimizer.step()

    def zero_grad(self, *optimizers: Optimizer, set_to_none: bool = True) -> None:
        for optimizer in optimizers or self.optimizers:
            optimizer.zero_grad(set_to_none)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    waiting = self._local.pop(id(p), None)
                    if waiting is not None and not set_to_none:
                        self._local[id(p)] = torch.zeros_like(waiting)

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        """The whole mean gradient; all ranks call it."""
        self.settle()
        return None if p.grad is None else p.grad.clone()

    def gradients(self) -> list[Tensor | None]:
        """Of all parameters of the model; all ranks call it."""
        self.settle()
        return [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]

    def assign(self, p: nn.Parameter, gradient: Tensor | None) -> None:
        """Replace a gradient, also what is not yet averaged of it."""
        self._local.pop(id(p), None)
        p.grad = gradient

    def clip(self, max_norm: float, norm_type: float = 2.0, optimizer: Optimizer | None = None) -> Tensor:
        self.settle()
        return nn.utils.clip_grad_norm_(self._parameters(optimizer), max_norm, norm_type)

    def clip_exactly(self, max_norm: float) -> None:
        """Clip by a norm in float64, whose coefficient does not depend on how gradients are divided."""
        self.settle()
        gradients = [p.grad for p in self._parameters(None) if p.grad is not None]
        clip_tensors_by_global_norm(gradients, max_norm)

    def clip_value(self, limit: float, optimizer: Optimizer | None = None) -> None:
        self.settle()
        nn.utils.clip_grad_value_(self._parameters(optimizer), limit)

    def _parameters(self, optimizer: Optimizer | None) -> list[nn.Parameter]:
        chosen = self.optimizers if optimizer is None else [optimizer]
        return [p for each in chosen for group in each.param_groups for p in group["params"]]

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reset(self) -> None:
        self._local.clear()

    def outcome(self) -> dict[str, Any]:
        """Notes, weights, buffers and optimizer states by name."""
        found: dict[str, Any] = {f"note {number}": note for number, note in enumerate(self.notes)}
        found |= {f"weight {name}": value.clone() for name, value in self.module.state_dict().items()}
        names = {id(p): name for name, p in self.module.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            states = {names[id(p)]: values for p, values in optimizer.state.items()}
            found |= _flat(number, states)
        return found


class ShardedTraining(PlainTraining):
    """The same, done by the engine."""

    def shard(self, module: nn.Module) -> nn.Module:
        self.module = module
        # The plain training runs torch's own optimizer code; scripts with fused optimizers run those on both sides.
        # It keeps each rank's own buffers (tests/fsdp/test_buffers.py has those of DDP).
        fixed = {
            "units": {"min_numel": 0},
            "barrier_seconds": 5.0,
            "fused_optimizers": False,
            "broadcast_buffers": False,
        }
        options = {**fixed, **self.setting.config}
        config = load_config(stage=self.setting.stage, gradient_reduction=self.setting.order, **options)
        self.engine = ZeroEngine(module, config)
        return module

    @property
    def own(self) -> ZeroEngine:
        assert self.engine is not None
        return self.engine

    def attach(self, *optimizers: Optimizer) -> None:
        super().attach(*optimizers)
        self.own.attach(*optimizers)

    def backward(self, loss: Tensor, *, sync: bool = True, **kwargs: Any) -> None:
        with nullcontext() if sync else self.own.no_sync():
            loss.backward(**kwargs)

    def settle(self) -> None:
        pass

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        return safe_get_full_grad(p)

    def gradients(self) -> list[Tensor | None]:
        return [safe_get_full_grad(p) for p in self.module.parameters()]

    def clip(self, max_norm: float, norm_type: float = 2.0, optimizer: Optimizer | None = None) -> Tensor:
        return self.own.clip_grad_norm_(max_norm, norm_type, optimizer)

    def clip_exactly(self, max_norm: float) -> None:
        self.own.clip_grad_norm_(max_norm)

    def clip_value(self, limit: float, optimizer: Optimizer | None = None) -> None:
        self.own.clip_grad_value_(limit, optimizer)

    def scope(self) -> AbstractContextManager[None]:
        return self.own.forward_scope()

    def reset(self) -> None:
        self.own.reset()

    def outcome(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"note {number}": note for number, note in enumerate(self.notes)}
        found |= {f"weight {name}": value for name, value in self.own.full_state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            found |= _flat(number, self.own.full_optimizer_state(optimizer))
        return found


def _flat(number: int, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"state {number} {name} {key}": value.detach().clone() if isinstance(value, Tensor) else value
        for name, values in states.items()
        for key, value in values.items()
    }


# ------------------------------------------------------------------------------------------------- comparison


def different(actual: Any, expected: Any, tolerance: float) -> str | None:
    """In what way two values differ, or None."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        same = actual == expected if not isinstance(expected, float) else abs(actual - expected) <= tolerance
        return None if same else f"{actual!r}, expected {expected!r}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    if torch.equal(actual, expected):
        return None
    gap = float((actual.double() - expected.double()).abs().max())
    scale = max(1.0, float(expected.double().abs().max()))
    return None if gap <= tolerance * scale else f"differs by up to {gap:.3g} of {scale:.3g}"


def play(script: Script, settings: Sequence[Setting] = SETTINGS, tolerance: float = 0.0) -> dict[str, Any]:
    """Both trainings play; to be called on every rank of a run.

    Returns:
        By setting, what came out differently; empty if nothing did.
    """
    wrong: dict[str, Any] = {}
    expected: dict[Order, dict[str, Any]] = {}
    for setting in settings:
        if setting.order not in expected:
            plain = PlainTraining(setting)
            script(plain)
            expected[setting.order] = plain.outcome()
        sharded = ShardedTraining(setting)
        script(sharded)
        actual, wanted = sharded.outcome(), expected[setting.order]
        found = {key: "missing" for key in wanted.keys() - actual.keys()}
        found |= {key: "not expected" for key in actual.keys() - wanted.keys()}
        for key in wanted.keys() & actual.keys():
            difference = different(actual[key], wanted[key], tolerance)
            if difference:
                found[key] = difference
        if found:
            wrong[str(setting)] = dict(sorted(found.items()))
    return wrong
