"""The optimizers of one engine: attached, checked against the model's parameters, let go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import nn
from torch.optim import Optimizer

from zero_strategy.fsdp.captured_units import warn_of_captures
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.muon import tell_shared_buckets
from zero_strategy.optim.optimizer_checks import check_all_held, check_order_of_sums, check_twice
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.optim.step_hooks import Hook, StepHooks
from zero_strategy.quantized.wrapped import leave_wrapped


class AttachedOptimizers:
    """Attaches torch optimizers to one sharded model, and knows which are.

    Args:
        model: The sharded model.
        attached: The list that this object keeps; others look at it.
        begin: Called before the `step()` of each, behind all pre hooks of the user.
        end: Called after it, before all post hooks of the user.
        declines: Asked by a step whether it is not to be taken.
    """

    def __init__(
        self,
        model: ShardedModel,
        attached: list[ShardedOptimizer],
        begin: Hook,
        end: Hook,
        declines: Callable[[ShardedOptimizer], bool],
    ) -> None:
        self._model, self._attached = model, attached
        self._begin, self._end, self._declines = begin, end, declines
        self._hooks: list[StepHooks] = []
        self._checked: list[int] | None = None

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Let these update shards; those that do already are left alone.

        Raises:
            TypeError, ValueError: See `ZeroEngine.attach`.
        """
        for optimizer in optimizers:
            if any(sharded.optimizer is optimizer for sharded in self._attached):
                continue
            leave_wrapped(optimizer.param_groups)
            if self._model.slots is not None:
                check_order_of_sums(optimizer)
            # Before room in the tier is made for it.
            if self._model.optimizer_store is not None:
                check_twice([*(sharded.optimizer for sharded in self._attached), optimizer], self._model.names())
            self._attached.append(ShardedOptimizer(optimizer, self._model, self._declines))
            self._hooks.append(StepHooks(optimizer, self._begin, self._end))
        self._checked = None

    def detach(self) -> None:
        """Let go of all; their states are dropped."""
        for sharded in self._attached:
            sharded.detach()
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()
        self._attached.clear()

    def of(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The shards behind an attached optimizer.

        Raises:
            ValueError: If it is not attached.
        """
        inner = getattr(optimizer, "optimizer", optimizer)  # LightningOptimizer and AcceleratedOptimizer wrap it
        for sharded in self._attached:
            if sharded.optimizer is optimizer or sharded.optimizer is inner:
                return sharded
        raise ValueError(f"{type(optimizer).__name__} is not attached to this engine; call engine.attach(optimizer)")

    @property
    def changed(self) -> bool:
        """True if there was no `check` since one was attached, or got more parameters."""
        # Asked in every step, so it compares sizes and looks at no parameter.
        return self._checked != self._group_sizes()

    def check(self, trained: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise if a trainable parameter is in no optimizer, or one in two whose state is offloaded.

        Args:
            trained: Those that an optimizer has to have, if they are trainable, by name.

        Raises:
            ValueError: Naming the parameters and the way out.
        """
        optimizers = [sharded.optimizer for sharded in self._attached]
        if self._model.optimizer_store is not None:
            check_twice(optimizers, self._model.names())
        check_all_held(optimizers, trained)
        if strangers := self._model.strangers():
            raise ValueError(
                f"parameters {strangers[:5]} came into the module after it was sharded (resize_token_embeddings, a new "
                "head), and no rank would send their gradients: end the engine first (engine.close(gather=True)), "
                "change the module, and prepare it again"
            )
        tell_shared_buckets(optimizers, self._model)
        stage, ranks = self._model.placement.stage, self._model.mesh.shard_size
        if stage == 3 and ranks > 1 and self._model.device.type == "cuda":
            warn_of_captures(self._model.module)
        self._checked = self._group_sizes()

    def left_inconsistent(self, phases: Collection[str]) -> str:
        """Work that an exception left unfinished, in words, where this rank's threads are in `phases`; "": none."""
        if self._model.reducer.in_backward and "backward" not in phases:
            return "has left a backward with an exception"
        partially_applied = [sharded for sharded in self._attached if sharded.partially_applied]
        if partially_applied and "step" not in phases:
            cause = next((f" ({sharded.stopped_by})" for sharded in partially_applied if sharded.stopped_by), "")
            return f"has left an optimizer step with an exception{cause}"
        return ""

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for sharded in self._attached for group in sharded.optimizer.param_groups]
