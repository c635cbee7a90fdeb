"""Trains one tiny model of transformers at stage 3 on this rank, beside the same model with averaged gradients.

The reference is the plain module on every rank: rank 0's buffers before each forward and the mean of the gradients
after each backward, which is what DistributedDataParallel computes. Two steps are compared (losses, each weight and
buffer); then the engine saves, another model with other numbers loads, both take a third step, and the weights go
through `save_pretrained` and `from_pretrained`.
"""

from __future__ import annotations

import copy
import dataclasses
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.conformance.architectures import Architecture, find_architecture, seeded
from tests.conformance.tiny_inputs import loss_of
from zero_strategy import ZeroEngine

TOLERANCE = 1e-6
"""Largest relative difference of a loss, or of a tensor against its largest number, that counts as equal."""
ROUNDINGS = 8.0
"""A larger difference counts as equal up to so many times the plain model's own under gradients of other roundings."""
LARGEST_ROUNDING = 1e-2
SMALLEST_MOVE = 1e-4
"""Of some weight in the two steps, relative to its largest number: less would prove nothing."""
CONFIG: dict[str, Any] = {"stage": 3, "timeout_seconds": 60.0}
STEPS = 2


@dataclass
class Comparison:
    """Result of one architecture on one rank.

    Attributes:
        kind: The model type.
        verdict: `equal`, `not built`, `plain fails`, `refused`, or else `BAD`.
        words: The reason, or what differs.
        worst: Largest relative difference seen.
        facts: Class, number of parameters, of units, and the like.
    """

    kind: str
    verdict: str
    words: str = ""
    worst: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def agree(mine: Any) -> list[Any]:
    """The answers of all ranks."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """SGD with momentum, by torch's loop over tensors, whose roundings are ours as well."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, foreach=False)


def config_for(model: Any) -> dict[str, Any]:
    """The config; ranks that draw different layers to drop are told to the engine, to train as the plain model does."""
    named = [value for name, value in model.config.to_dict().items() if name.endswith("layerdrop")]
    drops = any(chance > 0.0 for chance in [*named, *(getattr(module, "layerdrop", 0.0) for module in model.modules())])
    return {**CONFIG, "units": {"min_numel": 1, "may_skip": drops}}


class Training:
    """A model, its optimizer and its steps; `engine` is None for the reference."""

    def __init__(self, architecture: Architecture, seed: int, sharded: bool, rounded: bool = False) -> None:
        self.architecture, self.losses, self.evaluated = architecture, list[float](), 0.0
        self.model = architecture.build(seed)
        self.engine = ZeroEngine(self.model, config_for(self.model)) if sharded else None
        self.optimizer = optimizer_of(self.model)
        self._rounded = rounded
        if self.engine is not None:
            self.engine.attach(self.optimizer)

    def step(self, number: int, inputs: dict[str, Any]) -> None:
        """One step on this rank's data, with a seed of this rank's for dropout."""
        if self.engine is None:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        with seeded(1000 + 10 * number + dist.get_rank()):
            loss = loss_of(self.model(**{name: value.clone() for name, value in inputs.items()}))
        loss.backward()
        if self.engine is None:
            average_gradients(self.model)
        if self._rounded:
            round_otherwise(self.model, number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def evaluate(self, inputs: dict[str, Any]) -> float:
        """The loss in evaluation mode on this rank's data."""
        self.model.eval()
        if self.engine is None:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        with torch.no_grad(), seeded(7):
            loss = loss_of(self.model(**{name: value.clone() for name, value in inputs.items()}))
        self.model.train()
        return float(loss)

    def state(self) -> dict[str, torch.Tensor]:
        """Full weights and buffers."""
        whole = self.model.state_dict() if self.engine is None else self.engine.full_state_dict()
        return {name: value.detach().clone() for name, value in whole.items() if isinstance(value, torch.Tensor)}


def average_gradients(model: Any) -> None:
    """Mean over ranks of each gradient that any rank has."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    present = torch.tensor([float(parameter.grad is not None) for parameter in trained])
    dist.all_reduce(present)
    for parameter, count in zip(trained, present.tolist(), strict=True):
        if count:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()


def round_otherwise(model: Any, seed: int) -> None:
    """Move each gradient by one rounding up or down, the same on each rank, as a sum in another order would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if (gradient := parameter.grad) is not None and gradient.is_floating_point():
            sign = torch.randint(0, 2, gradient.shape, generator=generator) * 2 - 1
            gradient.mul_(1 + sign.to(gradient.dtype) * torch.finfo(gradient.dtype).eps)


def number_gap(ours: float, reference: float) -> float:
    """Relative difference of two losses; infinite if one alone is not a number."""
    gap = abs(ours - reference) / max(abs(reference), 1e-3)
    return gap if gap == gap else float("inf")


def state_gap(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative difference of two states, and the name where it is; infinite where names or shapes differ."""
    if other := sorted(set(ours) ^ set(reference)):
        return float("inf"), f"names on one side only: {other[:4]}"
    worst = (0.0, "")
    for name, wanted in reference.items():
        got = ours[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return float("inf"), f"{name}: {tuple(got.shape)} {got.dtype} for {tuple(wanted.shape)} {wanted.dtype}"
        if torch.equal(got, wanted) or not got.numel():
            continue
        wide = torch.complex128 if got.is_complex() else torch.float64
        largest = float((got.to(wide) - wanted.to(wide)).abs().max())
        gap = largest / max(float(wanted.to(wide).abs().max()), 1e-3)
        worst = max(worst, (gap if gap == gap else float("inf"), name))
    return worst


def shared(folder: Path, name: str) -> Path:
    """A path that all ranks take from rank 0."""
    return Path(agree(str(folder / name))[0])


class Compared:
    """Collects what was compared: what, the relative difference, and where."""

    def __init__(self) -> None:
        self.gaps: list[tuple[str, float, str]] = []

    def add(self, what: str, gap: float, where: str = "") -> None:
        """Note one comparison."""
        self.gaps.append((what, gap, where))

    @property
    def worst(self) -> float:
        """The largest difference."""
        return max((gap for _, gap, _ in self.gaps), default=0.0)

    def problems(self, tolerance: float) -> list[str]:
        """Sentences of what differs by more."""
        words = [(what, gap, f" ({where})" if where else "") for what, gap, where in self.gaps if gap > tolerance]
        return [f"{what} differs by {gap:.1e}{where}" for what, gap, where in words]


def own_gap(plain: Training, data: list[dict[str, Any]], wanted: dict[str, Any], rounded: bool) -> float:
    """The plain model's difference from itself in the same three steps, alike or with gradients of other roundings."""
    other, gap = Training(plain.architecture, 1, sharded=False, rounded=rounded), 0.0
    for step, inputs in enumerate(data):
        if step == STEPS:
            gap = max(gap, state_gap(other.state(), wanted)[0])
        other.step(step, inputs)
    gap = max(gap, *(number_gap(*pair) for pair in zip(other.losses, plain.losses, strict=True)))
    return max(agree(max(gap, number_gap(other.evaluate(data[0]), plain.evaluated))))


def compare(kind: str, names: list[str], folder: Path) -> Comparison:
    """Train an architecture both ways; collective, and never raises what a model raises."""
    try:
        architecture, reason = find_architecture(kind, names), None
    except LookupError as error:
        architecture, reason = None, str(error)
    if why := next((each for each in agree(reason) if each), None):
        return Comparison(kind, "not built", why)
    assert architecture is not None
    facts: dict[str, Any] = {"class": architecture.cls.__name__, "parameters": architecture.parameters}
    found = Comparison(kind, "equal", facts=facts)
    facts["inputs"] = ""
    phase = ["plain"]
    try:
        run(architecture, folder, found, phase)
    except Exception as error:
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)][
            -5:
        ]
        inside = "zero_strategy" in traceback.extract_tb(error.__traceback__)[-1].filename
        refused = inside and isinstance(error, (ValueError, TypeError, NotImplementedError))
        found.verdict = "plain fails" if phase[0] == "plain" else "refused" if refused else "BAD"
        found.words = f"{phase[0]}: {type(error).__name__}: {str(error)[:500]}"
        facts["where"] = where
        facts["raised"] = True
    return found


def run(architecture: Architecture, folder: Path, found: Comparison, phase: list[str]) -> None:
    """The phases of one comparison, the name of the present one in `phase[0]`."""
    rank, compared = dist.get_rank(), Compared()
    plain = Training(architecture, 1, sharded=False)
    data = [architecture.inputs(plain.model, 100 + 10 * step + rank) for step in range(STEPS + 1)]
    found.facts["inputs"] = ", ".join(data[0])
    start = plain.state()
    for step in range(STEPS):
        plain.step(step, data[step])
    wanted = plain.state()
    found.facts["moved"] = state_gap(start, wanted)[0]
    resumed = Training(architecture, 2, sharded=False)
    resumed.model.load_state_dict(plain.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    for training in (plain, resumed):
        training.step(STEPS, data[STEPS])
        training.evaluated = training.evaluate(data[0])
    finite = all(loss == loss and abs(loss) != float("inf") for loss in [*plain.losses, plain.evaluated])
    if not all(agree(finite)):
        found.verdict, found.words = "plain fails", "the plain model's loss is not finite within three steps"
        return
    if found.facts["moved"] < SMALLEST_MOVE:
        found.verdict, found.words = (
            "plain fails",
            f"no weight moves by more than {found.facts['moved']:.0e} in two steps",
        )
        return

    phase[0] = "engine"
    ours = Training(architecture, 1, sharded=True)
    assert ours.engine is not None
    found.facts |= {"units": len(ours.engine.model.units), "may_skip": config_for(ours.model)["units"]["may_skip"]}
    for step in range(STEPS):
        phase[0] = f"step {step + 1}"
        ours.step(step, data[step])
    phase[0] = "full_state_dict"
    state = ours.state()
    buffers = {name for name, _ in plain.model.named_buffers()}
    parameters = {name: value for name, value in wanted.items() if name not in buffers}
    for step in range(STEPS):
        compared.add(f"loss {step + 1}", number_gap(ours.losses[step], plain.losses[step]))
    compared.add("weights", *state_gap({k: v for k, v in state.items() if k not in buffers}, parameters))
    if rank == 0:  # DistributedDataParallel has rank 0's, and takes no others on
        compared.add(
            "buffers",
            *state_gap(
                {k: v for k, v in state.items() if k in buffers}, {k: wanted[k] for k in wanted if k in buffers}
            ),
        )
    found.facts["bits"] = compared.worst == 0.0

    phase[0] = "save"
    path = shared(folder, f"{found.kind}-checkpoint")
    ours.engine.save(str(path)).wait()
    phase[0] = "load"
    other = Training(architecture, 2, sharded=True)
    assert other.engine is not None
    other.engine.load(str(path))
    phase[0] = "full_state_dict after load"
    compared.add("state after load", *state_gap(other.state(), state)) if rank == 0 else other.state()
    for training, reference, when in ((ours, plain, ""), (other, resumed, " after load")):
        phase[0] = f"third step{when}"
        training.step(STEPS, data[STEPS])
        compared.add(f"third loss{when}", number_gap(training.losses[-1], reference.losses[-1]))
        phase[0] = f"evaluation{when}"
        compared.add(phase[0], number_gap(training.evaluate(data[0]), reference.evaluated))

    phase[0] = "save_pretrained"
    path = shared(folder, f"{found.kind}-pretrained")
    whole = ours.state()
    ours.engine.save_pretrained(str(path))
    dist.barrier()
    if rank == 0:
        phase[0] = "from_pretrained"
        back = architecture.cls.from_pretrained(str(path)).state_dict()
        common = {name: value for name, value in whole.items() if name in back}
        compared.add(
            "from_pretrained", *state_gap({name: back[name].to(value.dtype) for name, value in common.items()}, common)
        )
        if lost := [name for name in whole if name not in back and name not in buffers]:
            compared.add("from_pretrained", float("inf"), f"lacks {lost[:3]}")
    dist.barrier()
    phase[0] = "close"
    ours.engine.close()
    other.engine.close()
    judge(found, compared, plain, data, wanted)


def judge(found: Comparison, compared: Compared, plain: Training, data: list[Any], wanted: dict[str, Any]) -> None:
    """The verdict of a comparison that ran to its end; a difference is held against the plain model's own."""
    found.worst, tolerance = compared.worst, TOLERANCE
    if max(agree(found.worst)) > TOLERANCE:
        found.facts["rounding"] = own = own_gap(plain, data, wanted, rounded=True)
        tolerance = max(tolerance, min(ROUNDINGS * own, LARGEST_ROUNDING))
    problems = compared.problems(tolerance)
    if any(agree(bool(problems))) and (noise := own_gap(plain, data, wanted, rounded=False)) > TOLERANCE:
        found.verdict, found.words = (
            "plain fails",
            f"the plain model differs from itself by {noise:.1e} in the same steps",
        )
    elif problems:
        found.verdict, found.words = "BAD", "; ".join(problems)


def record(found: Comparison) -> dict[str, Any]:
    """The result as JSON's kinds."""
    return dataclasses.asdict(found)
