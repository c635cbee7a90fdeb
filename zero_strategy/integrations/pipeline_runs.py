"""A pipeline's batches inside of a framework's steps: the Trainer's here, and Accelerate's likewise.

    Lightning                                  here
    training_step: self.pipeline.loss(batch)   all forwards and backwards; the gradients are put aside
    zero_grad                                  removes what is there: nothing
    backward: loss.backward()                  of a leaf without a graph; then the gradients come back
    clipping, optimizer.step                   as without a pipeline

Lightning removes old gradients between `training_step` and `backward`, when those of a pipeline are there already.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_strategy.aliases import moved
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.executor import Run
from zero_strategy.pipeline.module import join_parts, rows_of, split_batch
from zero_strategy.runtime.torch_private import tree_flatten, tree_map_only

_SAMPLED_BYTES = 1 << 20
"""Of a tensor, to tell whether ranks have the same data."""


class IntegrationRunner:
    """Runs the batches of a framework's steps; the `runner` of a `PipelineModule`.

    Args:
        engine: Of the module.
        to_pair: Makes pairs of inputs and labels of batches; None: they are such.

    Attributes:
        forward_context: Makes the context in which layers run.
        compares: The next batch is the first one of a loop: ranks of the pipeline make sure that they have the same.
        accumulation: Batches of an optimizer step.
    """

    def __init__(self, engine: PipelineEngine, to_pair: Callable[[Any], Any] | None) -> None:
        self.engine, self._to_pair = engine, to_pair
        self.forward_context: Callable[[], AbstractContextManager[Any]] | None = None
        self.compares, self.accumulation = True, 1
        self._leaves: list[Tensor] = []
        self._shadow: list[tuple[nn.Parameter, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module is not trained."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    # ---- the calls of user code ----

    def loss(self, batch: Any) -> Tensor:
        """See `PipelineModule.loss`."""
        pair = batch if self._to_pair is None else self._to_pair(batch)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            hint = "pipeline_batch()" if self._to_pair is not None else "the data loader"
            raise TypeError(
                f"{hint} gives a {type(pair).__name__}; a pipeline takes pairs of inputs and labels, which a method "
                "pipeline_batch(batch) of the LightningModule can make of other batches"
            )
        if not torch.is_grad_enabled():
            found = self._forward(tuple(pair)).loss
            if found is None:
                raise ValueError("the last layer gives no loss, and the PipelineModule has no loss_fn")
            return found.to(self.engine.model.device)
        if self.engine.slots.slots:
            self._check_slots(rows_of(pair))
        parts = split_batch(pair, self.engine.micro_batches)
        # Before the schedule, which would compute with activations of other batches.
        self._compare(pair)
        # A second loss in one step adds to the gradients of the first.
        self._put_back()
        with self._alone():
            loss = self.engine.forward_backward(parts, loss_weight=1 / self.accumulation)
        self._put_shadow()
        # A copy, so that the engine's own loss stays without a gradient.
        self._leaves.append(loss.to(self.engine.model.device, copy=True).requires_grad_())
        return self._leaves[-1]

    def _check_slots(self, rows: int) -> None:
        slots = self.engine.slots
        if rows % slots.count:
            raise ValueError(
                f"reproducible.slots is {slots.slots}, and a batch of {rows} rows is {slots.count} slots of this copy "
                f"of the pipeline: make its rows a multiple of {slots.count} (drop_last=True for an epoch's last one)"
            )
        if self.accumulation > 1:
            raise ValueError(
                f"reproducible.slots is {slots.slots}, and {self.accumulation} batches are accumulated: one batch of a "
                "pipeline has all slots of a step; accumulate nothing, or set more slots"
            )

    def outputs(self, inputs: Any, everywhere: bool) -> Any:
        """See `PipelineModule.outputs`."""
        found = self._forward((inputs,)).outputs
        mine = join_parts(found) if found else None
        if not everywhere:
            return mine
        pipe, device = self.engine.pipe, self.engine.model.device
        on_host = tree_map_only(Tensor, lambda tensor: tensor.cpu(), mine)
        last = self.engine.pipeline.placement.rank_of(self.engine.pipeline.placement.stages - 1)
        everyone = pipe.all_gather_objects(on_host)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), everyone[last])

    def _forward(self, batch: tuple[Any, ...]) -> Run:
        # Copies that gather each other's parameters do so equally often, whatever is left of an epoch for each.
        count = self.engine.evaluation.agree(min(self.engine.micro_batches, rows_of(batch)))
        parts = split_batch(batch, count)
        self._compare(batch)
        # Lightning evaluates in inference mode, whose tensors no later backward may use.
        with torch.inference_mode(False), self._alone():
            return self.engine.run_forward(parts, len(parts))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Forwards have a context of their own, backwards none. And no StopIteration ends Lightning's loop."""
        try:
            with torch.autocast(self.engine.model.device.type, enabled=False):
                yield
        except StopIteration as error:
            raise RuntimeError(f"a pipelined step ended early: {error}") from error

    def _compare(self, batch: Any) -> None:
        if not self.compares:
            return
        self.compares = False
        training = torch.is_grad_enabled()
        mine = torch.tensor([training, rows_of(batch), _digest(batch)], dtype=torch.int64)
        everyone = torch.stack(self.engine.pipe.all_gather_small(mine))
        if (everyone != mine).any():
            ranks = self.engine.pipeline.mpu().pp_group
            told = [
                f"rank {rank}: {rows} rows, digest {digest:08x}"
                for rank, (_, rows, digest) in zip(ranks, everyone.tolist(), strict=True)
            ]
            raise ValueError(
                "the ranks of a pipeline must be given the same batches, and the first ones of this loop differ: "
                f"{'; '.join(told)}. Leave use_distributed_sampler=True, or give each loader a generator or a sampler "
                "that is the same on these ranks (trainer.strategy.distributed_sampler_kwargs has what it needs)"
            )

    # ---- what the strategy calls ----

    def begin_step(self, *, first: bool) -> None:
        """A training step begins; the first one of an optimizer step removes the gradients of the one before."""
        self._leaves.clear()
        self._shadow.clear()
        if first:
            for parameter in self.engine.module.parameters():
                parameter.grad = None

    def begin_backward(self) -> None:
        """Let parameters have the gradients that were put aside.

        Raises:
            RuntimeError: If there are none, for the pipeline did not run.
        """
        if not self._leaves:
            raise RuntimeError("training_step did not call self.pipeline.loss(batch), which runs the pipeline")
        self._put_back()

    def _put_back(self) -> None:
        for parameter, gradient in self._shadow:
            parameter.grad = gradient
        self._shadow.clear()

    def end_backward(self, scale: float) -> None:
        """The backward of what `training_step` returned is over.

        Args:
            scale: Of the loss, in fp16.

        Raises:
            RuntimeError: If the result was computed from the loss in a way that its gradients know nothing of.
        """
        expected = scale / self.accumulation
        # Before they are looked at: under Accelerate no later step would drop those that are refused.
        leaves, self._leaves = self._leaves, []
        for leaf in leaves:
            factor = 0.0 if leaf.grad is None else float(leaf.grad) / expected
            # A factor in 16 bits is rounded by some tenths of a percent.
            if not math.isclose(factor, 1.0, rel_tol=1e-2):
                raise RuntimeError(
                    "training_step must return the loss of self.pipeline.loss(batch) as it is: its gradients are there "
                    f"already, and what was returned changes {factor:g} times as fast; put factors into the loss "
                    "function (pipeline_loss)"
                )

    def abandon_backward(self) -> None:
        """A backward has failed: gradients that were put aside show, for `zero_grad` to remove, and nobody waits."""
        self._put_back()
        self._leaves.clear()

    @property
    def waits(self) -> bool:
        """True if there is a loss of which no backward was called."""
        return bool(self._leaves)

    def begin(self, forward_context: Callable[[], AbstractContextManager[Any]]) -> None:
        """A run begins, perhaps after a step that was interrupted: its gradients are dropped.

        Args:
            forward_context: Makes the context in which layers run.
        """
        self.forward_context = forward_context
        self._shadow.clear()
        self._leaves.clear()

    def _put_shadow(self) -> None:
        for parameter in self.engine.module.parameters():
            if parameter.grad is not None:
                self._shadow.append((parameter, parameter.grad))
                parameter.grad = None


def _digest(batch: Any) -> int:
    """Tells batches apart: a checksum of shapes and values."""
    found = 0
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            flat = leaf.detach().reshape(-1)[: _SAMPLED_BYTES // leaf.element_size()].cpu().contiguous()
            found = zlib.crc32(f"{tuple(leaf.shape)}{leaf.dtype}".encode(), found)
            found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", found)
    return found


if not TYPE_CHECKING:
    __getattr__ = moved(
        {
            "AcceleratorRunner": "integrations.accelerate.pipelines",
            "check_dispatch": "integrations.accelerate.pipelines",
            "pipeline_engine": "integrations.accelerate.pipelines",
            "waiting_runners": "integrations.accelerate.pipelines",
        }
    )
