"""The plain twin of a pipeline: one process that runs all layers over the micro-batches of all copies.

Ranks of a pipeline draw random numbers in the order of their own forwards, and add gradients up in the order of their
own backwards. So forwards take the order of the schedule, each in the random state and with the buffers of its rank;
the backward of a micro-batch is one through all layers. A weight that several stages use is one leaf per stage, all of
one storage, so that what each stage gives is known: it is added up as `pipeline/replicas.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.activation.seeds import RandomState
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.verify_settings import VerifySettings
from zero_strategy.diagnostics.verify_subject import Subject
from zero_strategy.diagnostics.verify_twin import StepRecord, Tensors, Twin, add_gradients
from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.tables import Table
from zero_strategy.runtime.torch_private import buffers_of, parameters_of
from zero_strategy.sharding.grouping import gradient_dtypes

_GIVES_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
Parts = dict[tuple[int, int], dict[str, Tensor]]
"""Gradients by name, of each stage and micro-batch."""


@dataclass(frozen=True)
class Layout:
    """Who runs what.

    Attributes:
        table: What every rank of a pipeline computes, in order.
        parts: Bounds of the stages in the layers.
        pipes: World ranks of each copy of the pipeline, in its order.
    """

    table: Table
    parts: list[int]
    pipes: list[list[int]]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank of the world."""
        place = next(pipe.index(rank) for pipe in self.pipes if rank in pipe)
        return [self.table.placement.stage_of(place, chunk) for chunk in range(self.table.chunks)]


@dataclass
class _Stage:
    """Layers in a row.

    Attributes:
        calls: What runs them.
        leaves: What gradients come to, by the parameters' names.
        swaps: Where a leaf of its own stands while they run: module, key, parameter, leaf.
        buffers: Where buffers are: module, key, name.
    """

    calls: list[Any]
    leaves: dict[str, nn.Parameter] = field(default_factory=dict)
    swaps: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, str]] = field(default_factory=list)


class PipelineTwin(Twin):
    """One process that trains what all ranks of all copies of a pipeline train.

    Args:
        subject: Of its own; its model is a `PipelineModule` of one stage.
        config: The sharded side's settings.
        settings: How it trains; `accumulation` are the micro-batches.
        layout: Who runs what on the sharded side.
        jitter: See `Twin`.
    """

    def __init__(
        self,
        subject: Subject,
        config: ResolvedConfig,
        settings: VerifySettings,
        layout: Layout,
        jitter: int | None = None,
    ) -> None:
        super().__init__(subject, config, settings, jitter)
        assert isinstance(subject.model, PipelineModule)
        self.layout, self.copies = layout, len(layout.pipes)
        self._owners: dict[str, int] = {}
        """The place in a pipeline of the rank that owns each parameter: of the first stage that uses it."""
        self._stages = [self._stage(subject.model, number) for number in range(len(layout.parts) - 1)]

    def _stage(self, module: PipelineModule, number: int) -> _Stage:
        start, stop = self.layout.parts[number : number + 2]
        stage = _Stage(module.forward_funcs[start:stop])
        names = {id(parameter): name for name, parameter in self.named.items()}
        buffers = {id(buffer): name for name, buffer in module.named_buffers()}
        before = set(self._owners)
        modules = {name: one for layer in module.layer_modules()[start:stop] for name, one in layer.items()}
        for child in (child for one in modules.values() for child in one.modules()):
            for key, parameter in parameters_of(child).items():
                if parameter is None:
                    continue
                name = names[id(parameter)]
                self._owners.setdefault(name, self.layout.table.placement.rank_of(number))
                if name not in before:
                    stage.leaves[name] = parameter
                    continue
                if name not in stage.leaves:
                    stage.leaves[name] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                stage.swaps.append((child, key, parameter, stage.leaves[name]))
            own = buffers_of(child).items()
            stage.buffers += [(child, key, buffers[id(at)]) for key, at in own if id(at) in buffers]
        return stage

    # ---- gradients in the order of the schedule ----

    def _gradients(self, record: StepRecord) -> dict[str, Tensor]:
        parts = [self._copy(record, copy) for copy in range(self.copies)]
        self._mean_losses(record)
        total: dict[str, Tensor] = {}
        per_step = self.config.config.gradient_reduction == "per_step"
        if per_step:
            sums: list[dict[str, Tensor]] = [{} for _ in parts]
            for place, stage, micro in self._backwards():
                for found, part in zip(sums, parts, strict=True):
                    add_gradients(found, self._owned(part[stage, micro], place))
            add_gradients(total, self._averaged(sums))
        else:
            for place, stage, micro in self._backwards():
                add_gradients(total, self._averaged(self._owned(part[stage, micro], place) for part in parts))
        add_gradients(total, self._averaged(map(self._of_replicas, parts)))
        return total

    def _backwards(self) -> Iterator[tuple[int, int, int]]:
        """(place, stage, micro-batch) of what gives gradients, in each rank's order."""
        table = self.layout.table
        for place, row in enumerate(table.rows):
            for kind, micro, chunk in row:
                if kind in _GIVES_GRADIENTS:
                    yield place, table.placement.stage_of(place, chunk), micro

    def _owned(self, found: dict[str, Tensor], place: int) -> dict[str, Tensor]:
        return {name: gradient for name, gradient in found.items() if self._owners[name] == place}

    def _of_replicas(self, parts: Parts) -> dict[str, Tensor]:
        """What ranks give that hold copies of others' weights: each its own sum, added up in the ranks' order."""
        sums: dict[int, dict[str, Tensor]] = {}
        for place, stage, micro in self._backwards():
            found = parts[stage, micro]
            wide = {
                name: gradient.to(torch.promote_types(self.named[name].dtype, torch.float32))
                for name, gradient in found.items()
                if self._owners[name] != place
            }
            add_gradients(sums.setdefault(place, {}), wide)
        total: dict[str, Tensor] = {}
        for place in sorted(sums):
            add_gradients(total, sums[place])
        return {name: gradient.to(self._dtypes(name)[0]) for name, gradient in total.items()}

    # ---- one copy of the pipeline ----

    def _copy(self, record: StepRecord, copy: int) -> Parts:
        """Run all micro-batches of a copy, forwards in an order in which its ranks could."""
        table, ranks = self.layout.table, self.layout.pipes[copy]
        rows = [[action for action in row if action.kind is Kind.FORWARD] for row in table.rows]
        outputs: dict[tuple[int, int], Any] = {}
        labels: dict[int, Any] = {}
        parts: Parts = {}
        with self._disturbed():
            while any(rows):
                ready = False
                for place, row in enumerate(rows):
                    while row:
                        micro, stage = row[0].micro_batch, table.placement.stage_of(place, row[0].chunk)
                        if stage == 0:
                            number = self.settings.number(self.steps_taken, micro, copy, self.copies)
                            outputs[-1, micro], labels[micro] = self.subject.batch(number, self.settings.device)
                        if (stage - 1, micro) not in outputs:
                            break
                        row.pop(0)
                        ready = True
                        value = outputs.pop((stage - 1, micro))
                        with self._as_rank(ranks[place], stage), self.settings.forward_context():
                            for call in self._stages[stage].calls:
                                value = call(value)
                            if stage == len(self._stages) - 1:
                                value = self.subject.loss(value, labels.pop(micro))
                        outputs[stage, micro] = value
                        if stage == len(self._stages) - 1:
                            record.losses[ranks[place]][f"loss of micro-batch {micro}"] = value.detach().clone()
                            self._backward(outputs.pop((stage, micro)), micro, parts)
                assert ready, "rows of a table do not wait for each other"
        return parts

    def _backward(self, loss: Tensor, micro: int, parts: Parts) -> None:
        self._scaled(loss / self.settings.accumulation).backward()
        for number, stage in enumerate(self._stages):
            found = parts[number, micro] = {}
            for name, leaf in stage.leaves.items():
                if leaf.grad is not None:
                    dtype = gradient_dtypes(leaf.dtype, self.config.config.precision)[0]
                    gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
                    found[name] = self._noisy(gradient).to(dtype, copy=True)
                    leaf.grad = None

    @contextmanager
    def _as_rank(self, rank: int, number: int) -> Iterator[None]:
        """With a rank's random numbers and buffers, and a stage's own leaves."""
        stage, buffers = self._stages[number], self._buffers[rank]
        self._random[rank].restore()
        for child, key, _, leaf in stage.swaps:
            parameters_of(child)[key] = leaf
        for child, key, name in stage.buffers:
            buffers_of(child)[key] = buffers[name]
        try:
            yield
        finally:
            for child, key, name in stage.buffers:
                buffers[name] = buffers_of(child)[key]
            for child, key, parameter, _ in stage.swaps:
                parameters_of(child)[key] = parameter
            self._random[rank] = RandomState.now()

    def _mean_losses(self, record: StepRecord) -> None:
        means = []
        last = self.layout.table.placement.rank_of(len(self._stages) - 1)
        for ranks in self.layout.pipes:
            # In the order in which the last stage's rank made them.
            losses = [loss.float() for loss in record.losses[ranks[last]].values() if loss is not None]
            means.append((_summed(losses) / self.settings.accumulation).reshape(()).cpu())
        mean = means[0] if self.copies == 1 else torch.stack([one.double() for one in means]).mean().float()
        record.phases["mean loss"] = {"mean loss": mean}

    def step(self, follow: StepRecord | None = None) -> StepRecord:
        """See `Twin.step`."""
        record = super().step(follow)
        record.buffers = [self._buffers_of(rank) for rank in range(self.ranks)]
        return record

    def _buffers_of(self, rank: int) -> Tensors:
        names = {name for stage in self.layout.stages_of(rank) for _, _, name in self._stages[stage].buffers}
        found = self._buffers[rank]
        return {name: None if (value := found[name]) is None else value.detach().clone() for name in names}


def _summed(losses: list[Tensor]) -> Tensor:
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total
