"""Defects of the kinds that users report, put into one rank's training or into parts of its engine, from outside.

Each is a `ShardedRun` that goes wrong in one way. `caught_as` is what `verify` has to say first: the phase, and a part
of the tensor's name; `on` the ranks that may be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.activation.rng import RandomState
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.verify.pipeline import PipelineRun
from zero_strategy.verify.reference_run import Tensors
from zero_strategy.verify.session import ShardedRun


@dataclass(frozen=True)
class Defect:
    """One seeded defect, and what has to be said of it."""

    run: type[ShardedRun]
    phase: str
    name: str = ""
    config: dict[str, Any] = field(default_factory=lambda: {"stage": 3})
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int | None, ...] = (None, 0, 1)


DEFECTS: dict[str, Defect] = {}
BF16 = {"compute_dtype": torch.bfloat16}
CLIPPED = {"clip_norm": 0.5}
TWO = {"accumulation": 2}


def defect(phase: str, name: str = "", **expected: Any) -> Callable[[type[ShardedRun]], type[ShardedRun]]:
    def keep(run: type[ShardedRun]) -> type[ShardedRun]:
        DEFECTS[run.__name__] = Defect(run, phase, name, **expected)
        return run

    return keep


PIPELINE_DEFECTS: dict[str, Defect] = {}
"""Of pipelines of two stages."""

FP16 = {"compute_dtype": torch.float16, "clip_norm": 0.5}
OVERFLOWS = {"initial": 2.0**24, "backoff_factor": 2.0**-12}
"""The first step overflows, and no other."""


def pipeline_defect(phase: str, name: str = "", **expected: Any) -> Callable[[type[PipelineRun]], type[PipelineRun]]:
    def keep(run: type[PipelineRun]) -> type[PipelineRun]:
        PIPELINE_DEFECTS[run.__name__] = Defect(run, phase, name, **{"config": {"stage": 1}, **expected})
        return run

    return keep


def gradients_of(run: ShardedRun, name: str) -> tuple[GradientBucket, int]:
    place = run.engine.model.place(dict(run.model.named_parameters())[name])
    assert place is not None
    return run.engine.model.gradient_of(place[0]), place[1]


# ------------------------------------------------------------------------------------------------------- gradients


@defect("gradient", "blocks.0.", config={"stage": 2})
class SkippedBucket(ShardedRun):
    """One bucket keeps what its own rank has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        bucket, _ = gradients_of(self, "blocks.0.up.weight")
        launch = bucket.launch

        def skip() -> None:
            if self.rank == 1:
                for index in bucket.own.live:
                    bucket.own.zero(index)
            launch()

        bucket.launch = skip  # type: ignore[method-assign]


@defect("gradient", "scale", config={"stage": 1})
class WrongScale(ShardedRun):
    """The root's sums are not divided by the number of ranks."""

    def train(self, step: int) -> Tensors:
        losses = super().train(step)
        bucket, _ = gradients_of(self, "embedding.weight")
        for index in sorted(bucket.live):
            bucket.change(index, lambda values: values.mul_(self.ranks))
        return losses


@defect("gradient", "", settings=TWO, config={"stage": 0})
class LastMicroBatchOnly(ShardedRun):
    """Gradients of earlier micro-batches are dropped."""

    def micro_batch(self, step: int, micro: int) -> Tensor:
        self.optimizer.zero_grad()
        return super().micro_batch(step, micro)


@defect("gradient", "", settings=TWO)
class NotDividedByAccumulation(ShardedRun):
    """Gradients are the sum over micro-batches, not their mean."""

    def micro_batch(self, step: int, micro: int) -> Tensor:
        batch = self.subject.batch(self.settings.number(step, micro, self.rank, self.ranks), self.settings.device)
        loss = self.subject.loss(self.model, batch)
        loss.backward()
        return loss.detach().clone()


@defect("gradient", "")
class GradientsOfLastStepStay(ShardedRun):
    """`zero_grad` does nothing."""

    def zero_grad(self) -> None:
        pass


@defect("gradient", "blocks.1.down.weight", config={"stage": 2})
class RoundedInReduction(ShardedRun):
    """A gradient was sent in bf16."""

    def train(self, step: int) -> Tensors:
        losses = super().train(step)
        bucket, index = gradients_of(self, "blocks.1.down.weight")
        bucket.change(index, lambda values: values.copy_(values.bfloat16().float()))
        return losses


@defect("gradient", "blocks.0.norm.weight", ranks=(1, 0))
class LastElementOfASliceMissed(ShardedRun):
    """A loop over a slice ends one element early."""

    def train(self, step: int) -> Tensors:
        losses = super().train(step)
        bucket, index = gradients_of(self, "blocks.0.norm.weight")

        def cut(values: Tensor) -> None:
            values[-1:] = 0

        bucket.change(index, cut)
        return losses


@defect("gradient", "unused")
class UnusedGetsAGradient(ShardedRun):
    """Zeros for an absent gradient: the optimizer decays a parameter that nobody used."""

    def train(self, step: int) -> Tensors:
        losses = super().train(step)
        bucket, index = gradients_of(self, "unused")
        bucket.replace(index, torch.zeros(5))
        return losses


@defect("gradient", "sometimes", config={"stage": 0})
class AbsentGradientDropped(ShardedRun):
    """Parameters that only one rank used are left out."""

    def train(self, step: int) -> Tensors:
        losses = super().train(step)
        dict(self.model.named_parameters())["sometimes"].grad = None
        return losses


# -------------------------------------------------------------------------------------------------------- clipping


@defect("clipped gradient", "", settings=CLIPPED)
class DroppedClip(ShardedRun):
    """The norm is reported and nothing is scaled."""

    def clip(self, max_norm: float) -> Tensor:
        return torch.tensor(self.engine.grad_norm().value, dtype=torch.float32)


@defect("norm", "gradient norm", settings=CLIPPED, config={"stage": 2})
class NormOfOwnShards(ShardedRun):
    """Each rank clips by the norm of what it owns."""

    def clip(self, max_norm: float) -> Tensor:
        self.engine.model.norm_groups.clear()
        return super().clip(max_norm)


@defect("clipped gradient", "", settings=CLIPPED)
class ClippedTwice(ShardedRun):
    """The coefficient is applied once more."""

    def clip(self, max_norm: float) -> Tensor:
        norm = super().clip(max_norm)
        for sharded in self.engine.optimizers:
            sharded.gradients.scale(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm


# -------------------------------------------------------------------------------------------------- forward, random


@defect("start", "head.weight", config={"stage": 1})
class BrokenTie(ShardedRun):
    """The head has a weight of its own, as drawn."""

    def __init__(self, subject: Any, *args: Any) -> None:
        subject.model.head.weight = nn.Parameter(subject.model.head.weight.detach() + 0.01)
        super().__init__(subject, *args)


@defect("loss", "micro-batch 0", ranks=(1,))
class RandomNumbersReused(ShardedRun):
    """All ranks drop out the same elements."""

    def seed(self) -> None:
        RandomState.seeded(self.settings.seed).restore()


@defect("loss", "micro-batch 0", ranks=(1,))
class BatchReadTwice(ShardedRun):
    """Rank 1 trains on rank 0's batches."""

    def micro_batch(self, step: int, micro: int) -> Tensor:
        rank, self.rank = self.rank, 0
        try:
            return super().micro_batch(step, micro)
        finally:
            self.rank = rank


@defect("loss", "micro-batch 0")
class OtherUnitsWeights(ShardedRun):
    """A gather brings one block the weights of the other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        other = self.engine.full_state_dict(["blocks.0.up.weight"])["blocks.0.up.weight"]

        def swap(module: Any, args: Any) -> None:
            module.up.weight.data.copy_(other)

        self.model.blocks[1].register_forward_pre_hook(swap)  # type: ignore[index, union-attr]


@defect("buffer", "seen", ranks=(1,))
class BufferNotKept(ShardedRun):
    """A buffer that forwards write to is set back on one rank."""

    def update(self) -> None:
        super().update()
        if self.rank == 1:
            dict(self.model.named_buffers())["seen"].zero_()


# ------------------------------------------------------------------------------------------------------ the update


@defect("master weight", "", settings=BF16, config={"stage": 2})
class StaleMaster(ShardedRun):
    """The master weights of a bucket do not take the step."""

    def update(self) -> None:
        bucket = gradients_of(self, "blocks.1.up.weight")[0].bucket
        before = bucket.master.values.clone()
        super().update()
        bucket.master.values.copy_(before)


@defect("parameter", "", config={"stage": 1}, ranks=(1,))
class OldWeightsOnOneRank(ShardedRun):
    """A rank does not get the other one's new weights."""

    def update(self) -> None:
        bucket = gradients_of(self, "blocks.0.up.weight")[0].bucket
        before = bucket.flat.clone()
        super().update()
        if self.rank == 1:
            bucket.flat[: bucket.slice.start] = before[: bucket.slice.start]


@defect("parameter", "")
class DecayOnTheWrongGroup(ShardedRun):
    """Norms and biases are decayed, matrices are not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        matrices, others = self.optimizer.param_groups
        matrices["weight_decay"], others["weight_decay"] = others["weight_decay"], matrices["weight_decay"]


@defect("parameter", "scale")
class OneLearningRateForAll(ShardedRun):
    """The second group's own is ignored."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizer.param_groups[1]["lr"] = self.optimizer.param_groups[0]["lr"]


@defect("parameter", "position")
class FrozenIsTrained(ShardedRun):
    """A frozen parameter moves with the rest of its bucket."""

    def update(self) -> None:
        super().update()
        bucket = gradients_of(self, "position")[0].bucket
        bucket.shard.values.mul_(1.001)


@defect("optimizer state", "exp_avg of blocks.1.up.weight")
class MomentsNotDividedRight(ShardedRun):
    """One element too far: a moment belongs to its neighbour."""

    def update(self) -> None:
        super().update()
        parameter = dict(self.model.named_parameters())["blocks.1.up.weight"]
        sharded = self.engine.optimizers[0]
        if state := sharded.state_of(parameter):
            state["exp_avg"].copy_(state["exp_avg"].roll(1))


@defect("optimizer state", "step of")
class StepCountedTwice(ShardedRun):
    """The bias correction runs ahead."""

    def update(self) -> None:
        super().update()
        for state in self.engine.optimizers[0].state.values():
            state["step"] += 1


@defect("optimizer state", "")
class StateLost(ShardedRun):
    """The moments start anew in the second step."""

    def update(self) -> None:
        if self.engine.steps.taken == 1:
            for state in self.engine.optimizers[0].state.values():
                state["exp_avg"].zero_()
        super().update()


@defect("optimizer state", "")
class StepSkippedOnOneRank(ShardedRun):
    """One rank sees an overflow and skips its part of the step."""

    def update(self) -> None:
        self.engine.optimizers[0].skip_next = self.rank == 1
        super().update()


@defect("optimizer state", "", config={"stage": 2, "offload": {"optimizer": "cpu"}})
class ChunkNotWrittenBack(ShardedRun):
    """Updates of a chunk of a tier are lost."""

    def update(self) -> None:
        parameter = dict(self.model.named_parameters())["blocks.0.down.weight"]
        sharded = self.engine.optimizers[0]
        state = sharded.state_of(parameter)
        before = state["exp_avg_sq"].clone() if "exp_avg_sq" in state else None
        super().update()
        if (now := sharded.state_of(parameter)) and "exp_avg_sq" in now:
            old = torch.zeros_like(now["exp_avg_sq"]) if before is None else before
            sharded.write_state_of(parameter, "exp_avg_sq", old)


# ------------------------------------------------------------------------------------------------------ loss scales


@defect("optimizer state", settings=FP16, config={"stage": 1, "loss_scale": OVERFLOWS})
class OverflowIsNoReason(ShardedRun):
    """The plain run skips the step, and this one takes it."""

    def unscale(self) -> Tensors:
        found = super().unscale()
        self.engine.optimizers[0].skip_next = False
        return found


@defect("loss scale", "step taken", settings=FP16, config={"stage": 2, "loss_scale": {"initial": 1024.0}}, ranks=(1,))
class SkippedWithoutOverflow(ShardedRun):
    """One rank skips a step that the others take."""

    def unscale(self) -> Tensors:
        found = super().unscale()
        if self.rank == 1:
            self.taken, found["step taken"] = False, torch.tensor(False)
            self.engine.optimizers[0].skip_next = True
        return found


@defect("norm", "gradient norm", settings=FP16, config={"stage": 3, "loss_scale": {"initial": 1024.0}})
class NotUnscaled(ShardedRun):
    """Gradients keep the loss scale."""

    def unscale(self) -> Tensors:
        assert self.engine.scaler is not None
        return {"step taken": torch.tensor(True), "loss scale": torch.tensor(self.engine.scaler.scale)}


@defect("gradient", settings=FP16, config={"stage": 2, "loss_scale": OVERFLOWS})
class ScaleStaysAfterOverflow(ShardedRun):
    """The scale is not lowered."""

    def update(self) -> None:
        self.optimizer.step()


# -------------------------------------------------------------------------------------------------------- pipelines


@pipeline_defect("loss", "micro-batch 2", ranks=(1,))
class LastMicroBatchDropped(PipelineRun):
    """The last micro-batch of a step is not run."""

    def train(self, step: int) -> Tensors:
        self._losses = {}
        fewer = self.settings.accumulation - 1
        self.mean_loss = self.engine.forward_backward(self.batches(step), fewer, forwarded=self._keep_loss)
        return self._losses


@pipeline_defect("gradient", "tied_modules.words.weight", ranks=(0,))
class TiedGradientNotSummed(PipelineRun):
    """Gradients that the last stage gives to the embedding are lost."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.engine.reduce_tied_gradients = lambda: None  # type: ignore[method-assign]


@pipeline_defect("parameter", "tied_modules.words.weight", ranks=(1,))
class ReplicaIsStale(PipelineRun):
    """The last stage's copy of the embedding stays as it was."""

    def update(self) -> None:
        before = {name: tensor.detach().clone() for name, tensor in self.engine.replicas().items()}
        super().update()
        for name, tensor in self.engine.replicas().items():
            tensor.data.copy_(before[name])


@pipeline_defect("parameter", ranks=(1,))
class StageIsStale(PipelineRun):
    """The second stage does not take the step."""

    def update(self) -> None:
        before = [bucket.flat.clone() for bucket in self.engine.model.buckets]
        super().update()
        for bucket, values in zip(self.engine.model.buckets, before, strict=True):
            if self.rank_in_world == 1:
                bucket.flat.copy_(values)

    @property
    def rank_in_world(self) -> int:
        return self.control.rank


@pipeline_defect("gradient")
class ScaledByTheWrongCount(PipelineRun):
    """Losses are divided by one micro-batch less than there are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        count = self.settings.accumulation
        self.engine.scale_loss = lambda loss: loss * (count / (count - 1))  # type: ignore[method-assign]


@pipeline_defect("loss", "micro-batch 0", ranks=(1,))
class LabelsOfTheNextMicroBatch(PipelineRun):
    """The last stage is one micro-batch ahead of the first one."""

    def batches(self, step: int) -> Iterator[Any]:
        found = list(super().batches(step))
        return iter(found if self.control.rank == 0 else [*found[1:], found[0]])


@pipeline_defect("norm", "gradient norm", settings=CLIPPED)
class NormOfOneStage(PipelineRun):
    """Each stage clips by the norm of its own gradients."""

    def clip(self, max_norm: float) -> Tensor:
        self.engine.model.norm_groups.remove(self.engine.pipe)
        try:
            return super().clip(max_norm)
        finally:
            self.engine.model.norm_groups.append(self.engine.pipe)


@pipeline_defect("loss", "micro-batch 0", ranks=(1,))
class ActivationsRounded(PipelineRun):
    """Messages from one stage to the next are sent in bf16."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.control.rank == 0:
            self.model.register_forward_hook(lambda module, args, out: out.bfloat16().float())


@pipeline_defect("gradient", ranks=(1,), config={"stage": 2})
class MicroBatchOfOneStageMissed(PipelineRun):
    """The second stage drops what its first micro-batch gave."""

    def train(self, step: int) -> Tensors:
        losses = super().train(step)
        if self.control.rank == 1:
            for gradients in self.engine.model.gradients:
                for index in sorted(gradients.live):
                    gradients.change(index, lambda values: values.mul_(2 / 3))
        return losses
