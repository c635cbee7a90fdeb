"""The reference run: the same training in one process and plain torch, in the order of summation.

It runs by the engine's formula, for its bits, and by torch's, to hold that against.

The engine takes the steps of torch's Adam, AdamW, SGD and Adagrad in fused ops, whose last bit is not torch's. The
reference run does the same to full parameters, so that all else can be compared by bits; and takes each step once more
by the optimizer's own code, from the same state, which may differ by
roundings only.

Each rank's micro-batches are run by themselves, with that rank's random numbers and buffers, and their gradients are
added as `fsdp/grad_bucket.py` says. With `jitter` every weight is off by one unit in its last place while a
micro-batch runs, and every gradient once more: how far such a run goes astray is what re-ordered summation explains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy import ops
from zero_strategy.activation.rng import RandomState, kept_random_state
from zero_strategy.config import ResolvedConfig, ZeroConfig
from zero_strategy.fsdp.layout import gradient_dtypes, wants_master
from zero_strategy.fsdp.materialize import cast_buffers
from zero_strategy.optim import GradientNorm, LossScaler
from zero_strategy.optim.fused import FusedOptimizer, Segment, UpdateRule, in_memory_order, rule_for, rule_in_memory
from zero_strategy.verify.subject import Subject, VerifySettings

ROUNDINGS = 32.0
"""Units in the last place of a tensor's largest value by which the two formulas may differ in one step."""


def engine_rule(
    optimizer: Optimizer, config: ZeroConfig, parameters: Iterable[nn.Parameter], masters: bool = False
) -> UpdateRule | None:
    """The rule by which the engine takes this optimizer's steps; None where it is left to the optimizer's own code.

    Args:
        optimizer: The optimizer.
        config: The sharded side's settings.
        parameters: What it updates.
        masters: Whether some of them are master weights of low-precision parameters.
    """
    parameters = list(parameters)
    if any(parameter.requires_grad and parameter.dtype != torch.float32 for parameter in parameters):
        return None
    if config.offload.optimizer != "none":
        return rule_for(optimizer, any_implementation=True)
    devices = {parameter.device.type for parameter in parameters}
    return rule_in_memory(optimizer, fused_optimizers=config.fused_optimizers, devices=devices, masters=masters)


@torch.no_grad()
def take_step(optimizer: Optimizer, rule: UpdateRule | None, names: dict[int, str]) -> dict[str, str]:
    """Take a step of an optimizer over full parameters that hold their gradients.

    Args:
        optimizer: The optimizer.
        rule: What takes the step, None for the optimizer itself.
        names: Of the parameters, by id.

    Returns:
        In what way the rule's step and the optimizer's own differ by more than roundings, by name.
    """
    if rule is None or isinstance(optimizer, FusedOptimizer):
        optimizer.step()
        return {}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = copy.deepcopy(optimizer)
    copies = [parameter for group in own.param_groups for parameter in group["params"]]
    for parameter, other in zip(held, copies, strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone()
    own.step()
    for device in {parameter.device.type for parameter in held}:
        ops.ensure(device)
    rule.update([_segment(optimizer, group, p) for group in optimizer.param_groups for p in group["params"] if _has(p)])
    found: dict[str, str] = {}
    for parameter, other in zip(held, copies, strict=True):
        state, theirs = optimizer.state.get(parameter, {}), own.state.get(other, {})
        pairs = {"": (parameter, other)} | {f"{key} of ": (state.get(key), theirs.get(key)) for key in theirs}
        for key, (mine, wanted) in pairs.items():
            if isinstance(mine, Tensor) and isinstance(wanted, Tensor) and (how := _far(mine, wanted)):
                found[f"{key}{names[id(parameter)]}"] = how
    return found


def _has(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None


def _segment(optimizer: Optimizer, group: dict[str, object], parameter: nn.Parameter) -> Segment:
    assert parameter.grad is not None
    gradient = torch.empty_like(parameter, dtype=parameter.grad.dtype).copy_(parameter.grad)
    state = optimizer.state[parameter]
    param, grad = in_memory_order(parameter), in_memory_order(gradient)
    return Segment(group, param, grad, state, like=parameter, owner=parameter)


def _far(mine: Tensor, wanted: Tensor) -> str:
    if mine.numel() == 0:
        return ""
    a, b = mine.double(), wanted.double()
    gap = float((a - b).abs().nan_to_num(0.0 if torch.equal(a.isnan(), b.isnan()) else float("inf")).max())
    bound = ROUNDINGS * torch.finfo(torch.float32).eps * float(b.abs().nan_to_num(0.0).max())
    if gap <= bound:
        return ""
    return f"the fused step and the optimizer's own differ by up to {gap:.3g}, roundings explain {bound:.3g}"


Tensors = dict[str, Tensor | None]
"""By name; None where there is none, such as the gradient of a parameter that was not used."""

PHASES = (
    "start", "loss", "mean loss", "gradient", "loss scale", "norm", "clipped gradient", "optimizer state",
    "master weight", "parameter",
)  # fmt: skip
"""What is compared, in the order in which a step makes it ("mean loss": of pipelines; "loss scale": in fp16); then each
rank's buffers, "buffer"."""


@dataclass
class StepRecord:
    """Result of a step, by phase and name.

    Attributes:
        phases: What all ranks are to have.
        losses: By rank: the losses of its micro-batches.
        buffers: By rank.
        odd_steps: Where the engine's formula of the step is not the optimizer's, in what way.
        taken: Whether the step was taken.
    """

    phases: dict[str, Tensors] = field(default_factory=dict)
    losses: list[Tensors] = field(default_factory=list)
    buffers: list[Tensors] = field(default_factory=list)
    odd_steps: dict[str, str] = field(default_factory=dict)
    taken: bool = True

    def of(self, phase: str, rank: int) -> Tensors:
        """Values that a rank is to have."""
        if phase == "loss":
            return self.losses[rank]
        return self.buffers[rank] if phase == "buffer" else self.phases.get(phase, {})


class ReferenceRun:
    """One process that trains what all ranks train.

    Args:
        subject: Of its own: it is trained in place.
        config: The sharded side's settings, for dtypes and the order of summation.
        settings: How it trains.
        jitter: Seed of the disturbance, or None for none.

    Raises:
        ValueError: If the optimizer is not over the model's parameters.
    """

    def __init__(
        self, subject: Subject, config: ResolvedConfig, settings: VerifySettings, jitter: int | None = None
    ) -> None:
        self.subject, self.config, self.settings = subject, config, settings
        self.ranks = self.copies = config.world_size
        self.scaler = LossScaler(config.config.loss_scale) if settings.scales_loss else None
        self.model = subject.model.to(settings.device)
        self.named = dict(self.model.named_parameters())
        self.optimizer = subject.optimizer(self.model)
        self._masters = self._make_masters()
        self._names = {id(master): name for name, master in self._masters.items()}
        low = any(master is not self.named[name] for name, master in self._masters.items())
        self._rule = engine_rule(self.optimizer, config.config, self._masters.values(), low)
        for group in self.optimizer.param_groups:
            if group.get("fused"):  # torch's fused code does not give the same bits for a piece and for the whole
                group["fused"] = False
        self._noise = None if jitter is None else torch.Generator(settings.device).manual_seed(jitter)
        self._random = [RandomState.seeded(settings.seed + rank) for rank in range(self.ranks)]
        self._buffers = [self._copied_buffers() for _ in range(self.ranks)]
        self.steps_taken = 0

    def _make_masters(self) -> dict[str, nn.Parameter]:
        """Tensors that the optimizer updates: float32 copies of low-precision parameters, else the parameters."""
        precision, dtype = self.config.config.precision, self.settings.compute_dtype
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.named.items():
            floating = parameter.is_floating_point()
            target = dtype if dtype is not None and floating else parameter.dtype
            if wants_master(target, precision) and parameter.requires_grad:
                masters[name] = nn.Parameter(parameter.detach().float().clone(memory_format=torch.contiguous_format))
            else:
                masters[name] = parameter
            # Row-major, as in a bucket: with weights of another memory format so are activations, and dropout's draws.
            parameter.data = parameter.data.to(target).contiguous()
        if dtype is not None:
            self._cast_buffers(dtype)
        known = {id(parameter): masters[name] for name, parameter in self.named.items()}
        for group in self.optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise ValueError(
                    "the optimizer is not over the parameters of the model that it was given: make it from that "
                    "argument, optimizer=lambda model: torch.optim.AdamW(model.parameters())"
                )
            group["params"] = [known[id(parameter)] for parameter in group["params"]]
        state: dict[Any, Any] = self.optimizer.state
        for held in list(state):
            if known[id(held)] is not held:
                state[known[id(held)]] = state.pop(held)
        return masters

    def _cast_buffers(self, dtype: torch.dtype) -> None:
        cast_buffers(self.model, dtype)

    # ---- a step ----

    def start(self) -> Tensors:
        """The parameters before the first step."""
        return self._parameters()

    def _parameters(self) -> Tensors:
        """Under all their names, so that a tie that is broken on the other side shows."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in named}

    def step(self, follow: StepRecord | None = None) -> StepRecord:
        """Train one step.

        Args:
            follow: Of another run, which decides whether the step is taken.
        """
        with kept_random_state():
            record = StepRecord(losses=[{} for _ in range(self.ranks)])
            gradients = self._gradients(record)
        if self.config.config.broadcast_buffers:
            self._share_buffers()
        record.phases["gradient"] = self._copied(gradients)
        if self.scaler is not None:
            finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            record.taken = finite if follow is None else follow.taken
            record.phases["loss scale"] = self._unscale(self.scaler, gradients.values(), record.taken)
        if self.settings.clip_norm is not None and record.taken:
            norm = self._clip(gradients.values(), self.settings.clip_norm)
            record.phases["norm"] = {"gradient norm": torch.tensor(norm, dtype=torch.float32)}
            record.phases["clipped gradient"] = self._copied(gradients)
        if record.taken:
            record.odd_steps = self._take_step(gradients)
        record.phases["optimizer state"] = self._state()
        record.phases["master weight"] = {
            name: master.detach().clone() for name, master in self._masters.items() if master is not self.named[name]
        }
        record.phases["parameter"] = self._parameters()
        record.buffers = [dict(buffers) for buffers in self._buffers]
        self.steps_taken += 1
        return record

    @staticmethod
    def _unscale(scaler: LossScaler, gradients: Iterable[Tensor], taken: bool) -> Tensors:
        scale = scaler.scale
        for gradient in gradients:
            gradient.mul_(1.0 / scale)
        scaler.update(finite=taken)
        return {"step taken": torch.tensor(taken), "loss scale": torch.tensor(scale)}

    def _take_step(self, gradients: dict[str, Tensor]) -> dict[str, str]:
        for name, master in self._masters.items():
            gradient = gradients.get(name)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        odd = take_step(self.optimizer, self._rule, self._names)
        with torch.no_grad():
            for name, parameter in self.named.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
                self._masters[name].grad = parameter.grad = None
        return odd

    def _copied(self, gradients: dict[str, Tensor]) -> Tensors:
        return {name: gradients[name].clone() if name in gradients else None for name in self.named}

    def _state(self) -> Tensors:
        return flat_state({name: self.optimizer.state.get(master, {}) for name, master in self._masters.items()})

    # ---- gradients in the documented order ----

    def _gradients(self, record: StepRecord) -> dict[str, Tensor]:
        micros = range(self.settings.accumulation)
        total: dict[str, Tensor] = {}
        if self.config.config.gradient_reduction == "per_step":
            return self._averaged(self._local(record, rank, micros) for rank in range(self.ranks))
        for micro in micros:
            found = self._averaged(self._local(record, rank, [micro]) for rank in range(self.ranks))
            add_gradients(total, found)
        return total

    def _local(self, record: StepRecord, rank: int, micros: Iterable[int]) -> dict[str, Tensor]:
        """A rank's own sum, in the dtype in which gradients are accumulated."""
        total: dict[str, Tensor] = {}
        self._random[rank].restore()
        self._put_buffers(self._buffers[rank])
        for micro in micros:
            number = self.settings.number(self.steps_taken, micro, rank, self.ranks)
            batch = self.subject.batch(number, self.settings.device)
            with self._disturbed():
                with self.settings.forward_context():
                    loss = self.subject.loss(self.model, batch)
                self._scaled(loss / self.settings.accumulation).backward()
            record.losses[rank][f"loss of micro-batch {micro}"] = loss.detach().clone()
            found = {}
            for name, parameter in self.named.items():
                if (gradient := parameter.grad) is not None:
                    gradient = gradient.to_dense() if gradient.is_sparse else gradient
                    dtype = gradient_dtypes(parameter.dtype, self.config.config.precision)[0]
                    found[name] = self._noisy(gradient).to(dtype, copy=True)
                    parameter.grad = None
            add_gradients(total, found)
        self._random[rank] = RandomState.now()
        self._buffers[rank] = self._copied_buffers()
        return total

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else loss * self.scaler.scale

    def _averaged(self, ranks: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Sums over each row of the mesh in rank order, of these over the rows, and the mean of all."""
        shard, rows, row = self.config.shard, dict[str, Tensor](), dict[str, Tensor]()
        for rank, local in enumerate(ranks):
            add_gradients(row, {name: gradient.to(self._dtypes(name)[1]) for name, gradient in local.items()})
            if (rank + 1) % shard == 0:
                add_gradients(rows, row)
                row = {}
        if self.copies > 1:
            for gradient in rows.values():
                gradient.mul_(1.0 / self.copies)
        return {name: gradient.to(self._dtypes(name)[0]) for name, gradient in rows.items()}

    def _dtypes(self, name: str) -> tuple[torch.dtype, torch.dtype]:
        return gradient_dtypes(self.named[name].dtype, self.config.config.precision)

    @staticmethod
    def _clip(gradients: Iterable[Tensor], max_norm: float) -> float:
        found = list(gradients)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in found))
        coefficient = GradientNorm(norm, True).coefficient(max_norm)
        for gradient in found:
            gradient.mul_(coefficient)
        return norm

    # ---- buffers, disturbance ----

    def _copied_buffers(self) -> Tensors:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give all ranks the first one's buffers, as the end of a reduction does."""
        for rank in range(1, self.ranks):
            self._buffers[rank] = {name: None if b is None else b.clone() for name, b in self._buffers[0].items()}

    def _put_buffers(self, values: Tensors) -> None:
        for name, buffer in self.model.named_buffers():
            value = values[name]
            assert value is not None
            buffer.copy_(value)

    @contextmanager
    def _disturbed(self) -> Iterator[None]:
        if self._noise is None:
            yield
            return
        floating = [parameter for parameter in self.named.values() if parameter.is_floating_point()]
        before = [parameter.detach().clone() for parameter in floating]
        with torch.no_grad():
            for parameter in floating:
                parameter.copy_(self._noisy(parameter))
        try:
            yield
        finally:
            for parameter, values in zip(floating, before, strict=True):
                parameter.data.copy_(values)

    def _noisy(self, values: Tensor) -> Tensor:
        """Every element off by one unit in its last place, or in that of what autocast makes of it, up or down."""
        if self._noise is None:
            return values
        dtypes = [values.dtype, *([] if self.settings.autocast is None else [self.settings.autocast])]
        step = max(torch.finfo(dtype).eps for dtype in dtypes)
        signs = torch.randint(0, 2, values.shape, generator=self._noise, device=values.device) * 2 - 1
        return values.detach() * (1 + signs.double() * step).to(values.dtype)  # in float32 a unit of float64 is nothing


def add_gradients(total: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Add what is there to a sum, from left to right; what is not there counts as zero."""
    for name, gradient in found.items():
        if name in total:
            total[name].add_(gradient)
        else:
            total[name] = gradient.clone()


def flat_state(states: dict[str, dict[str, Any]]) -> Tensors:
    """An optimizer's state by "state of parameter", numbers as tensors."""
    return {
        f"{key} of {name}": torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
        .detach()
        .cpu()
        .clone()
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, (Tensor, bool, int, float))
    }
