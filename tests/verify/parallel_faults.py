"""Faults of parallel trainings that raise nothing, known from issues of public trainers, each put into a right one.

`phase`, `name` and `hint` are what `verify_against` has to say first; a name may be a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.verify import hand_written as right
from tests.verify import parallel_model as models
from tests.verify import subjects
from tests.verify.hand_written import summed
from zero_strategy.verify.ready_runs import AveragedRun, DDPRun, FSDP2Run
from zero_strategy.verify.subject import Subject, VerifySettings


@dataclass(frozen=True)
class Fault:
    """One fault, and what has to be said of it.

    Attributes:
        run: The training.
        factory: What it trains.
        phase: In which it shows first.
        name: The tensor.
        hint: Words of the hint.
        step: The first that it shows in.
        rank: Of the difference; None: all ranks, or several.
        settings: How it trains.
    """

    run: type
    factory: Callable[[], Any]
    phase: str
    name: str
    hint: str
    step: int = 0
    rank: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


FAULTS: dict[str, Fault] = {}


def fault(factory: Callable[[], Any], phase: str, name: str, hint: str, **more: Any) -> Callable[[type], type]:
    def keep(run: type) -> type:
        FAULTS[run.__name__] = Fault(run, factory, phase, name, hint, **more)
        return run

    return keep


TWO = {"accumulation": 2}
CLIPPED = {"clip_norm": 0.3}

# --------------------------------------------------------------------------------------------------- tensor parallel


@fault(models.net, "gradient", "layers.0.sink", "a sum over the ranks is missing")
class SinkNotReduced(right.TensorParallel):
    """The sinks are whole on every rank, and each rank's heads give the gradient of their own."""

    SUMMED = ()


@fault(models.net, "norm", "gradient norm", "norm1.bias", settings=CLIPPED)
class ReplicaCountedTwiceInTheNorm(right.TensorParallel):
    """A bias that all ranks have is added to the sum of squares by each."""

    def squares(self) -> Tensor:
        gradient = self.named()["layers.0.norm1.bias"].grad
        assert gradient is not None
        return super().squares() + gradient.double().square().sum()


@fault(models.net, "norm", "gradient norm", "sum of squares over the ranks is missing", settings=CLIPPED)
class NormOfOwnPartOnly(right.ContextParallel):
    """Every rank takes the norm of some parameters, and they are not added up."""

    def squares(self) -> Tensor:
        grads = [p.grad for number, p in enumerate(self.named().values()) if number % 2 == dist.get_rank()]
        return sum((g.double().square().sum() for g in grads if g is not None), torch.zeros(()))


@fault(models.net, "loss", "micro-batch 0", "2 x layers.0.out.bias")
class RowBiasAddedByEachRank(right.TensorParallel):
    """The bias of a row-parallel layer goes into the sum over ranks."""

    def row(self, linear: nn.Linear, x: Tensor) -> Tensor:
        model: Any = self.model
        if linear is model.layers[0].out:
            return self.out_of(F.linear(x, linear.weight, linear.bias))
        return super().row(linear, x)


@fault(models.net, "gradient", "layers.1.norm2.bias", "what layers.1.up.weight's layer sends back")
class ColumnInputGradientNotReduced(right.TensorParallel):
    """The gradient that a column-parallel layer sends back is this rank's part of the sum."""

    calls = 0

    def into(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 4 == 0 else super().into(x)  # the last layer's MLP


@fault(models.net_dropout, "loss", "micro-batch 0", "have different values: dropout")
class ResidualDropoutDiffers(right.TensorParallel):
    """Tensor ranks draw masks of their own where all have the same activations."""

    def forward(self, batch: Tensor) -> Tensor:
        if dist.get_rank():
            torch.manual_seed(17)
        return super().forward(batch)


# --------------------------------------------------------------------------------------- sequence and context parallel


@fault(models.net, "gradient", "layers.0.norm1.weight", "a sum over the ranks is missing")
class LayerNormsNotSummed(right.SequenceParallel):
    """Each rank's tokens give a part of a norm's gradient."""

    SUMMED = tuple(name for name in right.SequenceParallel.SUMMED if not name.startswith("norm"))


@fault(models.net_sgd, "parameter", "layers.0.norm1.weight", "replicas have diverged")
class OnlyWeightsAreShown(LayerNormsNotSummed):
    """The same in a training that shows its weights and nothing else."""

    def gradients(self) -> dict[str, Tensor | None]:
        return {}

    def state(self) -> dict[str, dict[str, Any]]:
        return {}


@fault(models.net, "gradient", "embedding.weight", "2 times what one process has", settings=TWO)
class ContextLossScaledTwice(right.ContextParallel):
    """The loss is multiplied by the number of ranks against a mean that is not taken."""

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * dist.get_world_size()


@fault(models.padded, "gradient", "embedding.weight", "micro-batches count differently")
class DividedByOwnTokens(right.TokenWeighted):
    """Every rank divides by the number of its own labels, and gradients are averaged."""

    def total(self, own: Tensor) -> Tensor:
        return own * dist.get_world_size()


# ----------------------------------------------------------------------------------------------------------- experts


@fault(models.mixture, "gradient", "experts.0.up.weight", "(0.5 is 1 / the number of ranks)", rank=0)
class ExpertsAveragedOverAllRanks(right.ExpertParallel):
    """Experts are divided by all ranks once more, though no other rank has a copy."""

    def reduce(self) -> None:
        super().reduce()
        for name, parameter in self.named().items():
            if name.startswith("experts."):
                assert parameter.grad is not None
                parameter.grad /= dist.get_world_size()


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


@fault(models.mixture, "gradient", "router.weight", "what experts.0.up.weight's layer sends back")
class RouterLossScaledByRanks(right.ExpertParallel):
    """The auxiliary loss is as it should be, and its gradient is multiplied by the number of ranks."""

    def balance(self, means: Tensor) -> Tensor:
        return super().balance(_ScaledBackward.apply(means, float(dist.get_world_size())))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------------------------------------- pipeline


@fault(models.net, "gradient", "embedding.weight", "a sum over the ranks is missing", rank=0)
class TieNotSummed(right.PipelineParallel):
    """Embedding and head are one weight, and each stage has its own gradient of it."""

    def reduce(self) -> None:
        pass


@fault(models.net, "norm", "gradient norm", "counts embedding.weight 2 times", settings=CLIPPED)
class TieCountedTwice(right.PipelineParallel):
    """The tied weight's gradient counts on both stages."""

    def squares(self) -> Tensor:
        grads = [p.grad for p in self.named().values()]
        return summed(torch.stack([g.double().square().sum() for g in grads if g is not None]).sum())


# ------------------------------------------------------------------------------------------------------ data parallel


@fault(subjects.tiny, "gradient", "scale", "0.5 times what one process has", settings=TWO)
class AccumulationDividedTwice(AveragedRun):
    """The loss is divided by the number of micro-batches, and so are gradients."""

    def reduce(self) -> None:
        super().reduce()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.settings.accumulation


@fault(subjects.tiny, "gradient", "scale", "a mean over the ranks is missing", settings=TWO)
class NeverSynchronised(DDPRun):
    """`no_sync` is never left."""

    def before_micro_batch(self, last: bool) -> Any:
        return super().before_micro_batch(False)


@fault(subjects.tiny, "gradient", "scale", "as of embedding.weight: it lacks micro-batch 0", settings=TWO)
class OnlyTheLastMicroBatch(AveragedRun):
    """Gradients are zeroed before every micro-batch."""

    def before_micro_batch(self, last: bool) -> Any:
        self.optimizer.zero_grad()
        return super().before_micro_batch(last)


@fault(subjects.tiny, "norm", "gradient norm", "data rank 0's own gradients, before they are reduced", settings=CLIPPED)
class ClipByLocalNorm(AveragedRun):
    """The norm is taken before gradients are reduced."""

    def reduce(self) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.local = nn.utils.get_total_norm(grads)
        super().reduce()

    def clip(self, max_norm: float) -> Tensor:
        nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, self.local)
        return self.local


@fault(subjects.tiny, "buffer", "seen", "it is stale", rank=1)
class StaleBuffer(AveragedRun):
    """One rank's buffer stays what it was."""

    def backward(self, batches: Sequence[Any]) -> list[Tensor]:
        model: Any = self.model
        before = model.seen.clone()
        losses = super().backward(batches)
        if dist.get_rank() == 1:
            model.seen.copy_(before)
        return losses


@fault(subjects.tiny, "parameter", "position", "weight decay")
class FrozenParameterDecays(AveragedRun):
    """Decay takes all parameters, frozen ones too."""

    def update(self) -> None:
        super().update()
        model: Any = self.model
        with torch.no_grad():
            model.position.mul_(1.0 - 1e-3)


@fault(models.net, "parameter", "layers.1.sink", "it has not moved")
class NotInTheOptimizer(AveragedRun):
    """A parameter was replaced after the optimizer was made."""

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        super().__init__(subject, settings)
        model: Any = self.model
        model.layers[1].sink = nn.Parameter(model.layers[1].sink.detach().clone())

    def state(self) -> dict[str, dict[str, Any]]:
        return {name: state for name, state in super().state().items() if "sink" not in name}


@fault(subjects.tiny, "gradient", "sometimes", "2 times", step=3, settings={"steps": 4})
class AveragedOverItsUsers(AveragedRun):
    """A parameter of a branch is averaged over the ranks that took the branch."""

    def reduce(self) -> None:
        model: Any = self.model
        uses = summed(torch.tensor(float(model.sometimes.grad is not None)))
        super().reduce()
        if uses:
            model.sometimes.grad *= dist.get_world_size() / uses


@fault(models.net, "start", "embedding.weight", "ranks begin with different values", rank=1)
class InitialisedByRank(AveragedRun):
    """Every rank makes its own weights, and nothing hands them out."""

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        super().__init__(subject, settings)
        if dist.get_rank():
            nn.init.normal_(subject.model.get_parameter("embedding.weight"))


@fault(models.net_dropout, "loss", "micro-batch 0", "data rank 0's random numbers", rank=1)
class SameDropoutOnAllRanks(DDPRun):
    """Each rank seeds its generator alike."""

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        super().__init__(subject, settings)
        self.seeded = False

    def backward(self, batches: Sequence[Any]) -> list[Tensor]:
        if not self.seeded:
            torch.manual_seed(self.settings.seed)
            self.seeded = True
        return super().backward(batches)


@fault(models.net_dropout, "loss", "micro-batch 0", "evaluation mode")
class LeftInEvaluationMode(AveragedRun):
    """After an evaluation nobody calls `train()`."""

    def backward(self, batches: Sequence[Any]) -> list[Tensor]:
        self.model.eval()
        return super().backward(batches)


@fault(models.net, "loss", "micro-batch 0", "data rank 0's batches", rank=1)
class SameBatchesOnAllRanks(AveragedRun):
    """There is no distributed sampler."""

    def backward(self, batches: Sequence[Any]) -> list[Tensor]:
        shared = [batch.clone() for batch in batches]
        for batch in shared:
            dist.broadcast(batch, 0)
        return super().backward(shared)


@fault(models.net, "gradient", "layers.1.down.weight", "rounded to bfloat16")
class ReducedInHalfPrecision(AveragedRun):
    """One gradient travels in bf16."""

    def reduce(self) -> None:
        super().reduce()
        gradient = self.model.get_parameter("layers.1.down.weight").grad
        assert gradient is not None
        gradient.copy_(gradient.bfloat16())


@fault(models.net_sgd, "optimizer state", "momentum_buffer of layers.0.up.weight", "0.5 times", step=0)
class StateHalved(AveragedRun):
    """Weights are right, and the momentum that the next step begins with is not."""

    def update(self) -> None:
        super().update()
        self.optimizer.state[self.model.get_parameter("layers.0.up.weight")]["momentum_buffer"] /= 2


@fault(models.net, "gradient", "layers.0.up.weight", "in [8:16] of dimension 0")
class ShardNotReduced(FSDP2Run):
    """One rank's shard of a weight keeps zeros."""

    def reduce(self) -> None:
        gradient: Any = self.model.get_parameter("layers.0.up.weight").grad
        if dist.get_rank() == 1:
            gradient.to_local().zero_()


@fault(models.net, "clipped gradient", "layers.0.up.weight", "on this parameter alone", settings=CLIPPED)
class ChangedAfterClipping(right.Monolithic):
    """A step in one call doubles a gradient that it has clipped."""

    def clip(self, max_norm: float) -> Tensor:
        norm = super().clip(max_norm)
        gradient = self.model.get_parameter("layers.0.up.weight").grad
        assert gradient is not None
        gradient *= 2
        return norm


@fault(models.net, "parameter", "embedding.weight", "not moved on rank 1", rank=1)
class StepsOnOneRankOnly(AveragedRun):
    """A rank skips its update, as one whose overflow check saw only its own gradients."""

    def update(self) -> None:
        if dist.get_rank() == 0:
            super().update()

    def state(self) -> dict[str, dict[str, Any]]:
        return {}
