"""Norms of the gradients that the next steps will use, and what is done to them before: clipping, factors, clamps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor, nn

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.ops.library import norm_order
from zero_strategy.optim.grad_norm import GradientNorm, GradientStats, OwnGradients, global_norm
from zero_strategy.optim.loss_scale import IGNORE, NonfiniteSteps
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class Clipping:
    """Looks at, and changes, the gradients of one model's optimizers, each gradient once. Ranks do the same.

    In all methods `optimizer` says whose gradients (None: those of all attached optimizers, or of all parameters where
    none is attached), and `only` has the ids of the parameters whose gradients count (None: of all).

    Args:
        model: The sharded model.
        optimizers: The attached optimizers, as they are at each call.
        nonfinite: Told of gradients that are not finite, where it decides about steps.

    Attributes:
        watchers: Called on all ranks with what every norm found, before anything is scaled.
    """

    def __init__(self, model: ShardedModel, optimizers: Sequence[ShardedOptimizer], nonfinite: NonfiniteSteps) -> None:
        self._model, self._optimizers, self._nonfinite = model, optimizers, nonfinite
        self.watchers: list[Callable[[GradientStats], None]] = []

    def norm(
        self,
        norm_type: float | str = 2.0,
        optimizer: ShardedOptimizer | None = None,
        only: Collection[int] | None = None,
        *,
        decides: bool = True,
    ) -> GradientNorm:
        """The norm of the mean gradients over all ranks. A collective.

        Args:
            norm_type: Any positive p, or inf, also as the string "inf".
            optimizer, only: See the class.
            decides: What is not finite may end in a skipped step or an error; a loss scale decides by itself.
        """
        norm_type = norm_order(norm_type)
        self._model.reducer.settle()
        parts = [gradients.shards(norm_type, only) for gradients in self._chosen(optimizer)]
        shards = [shard for found, _, _ in parts for shard in found]
        factors = [factor for _, found, _ in parts for factor in found]
        seen: list[tuple[Tensor, Tensor]] = []
        norm = global_norm(
            shards,
            norm_type,
            self._model.norm_groups,
            factors,
            lambda *stats: seen.append(stats),
            exact=self._model.exact_norms,
        )
        decides = decides and self._nonfinite.choice != IGNORE and bool(self._optimizers)
        # Gradients of shared parameters are taken once, so their parts do not tell whose they are: no optimizer is
        # judged by them.
        if decides and not (optimizer is None and self._is_shared()):
            chosen = self._optimizers if optimizer is None else [optimizer]
            each = seen[0][1].split([len(names) for _, _, names in parts])
            looked_at = [(one, (names, counts)) for one, (_, _, names), counts in zip(chosen, parts, each, strict=True)]
            self._nonfinite.note(looked_at, only, finite=norm.finite)
        for watch in list(self.watchers):
            watch(GradientStats([name for _, _, found in parts for name in found], norm_type, *seen[0], norm))
        return norm

    def clip(
        self,
        max_norm: float,
        norm_type: float | str,
        optimizer: ShardedOptimizer | None = None,
        only: Collection[int] | None = None,
        *,
        error_if_nonfinite: bool = False,
        decides: bool = True,
    ) -> GradientNorm:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`. A collective.

        Returns:
            The norm before.

        Raises:
            RuntimeError: On every rank, if the norm is not finite and `error_if_nonfinite`; nothing is scaled.
        """
        norm = self.norm(norm_type, optimizer, only, decides=decides)
        if error_if_nonfinite and not norm.finite:
            problem = f"the gradient norm of order {norm_type} is {norm.value}"
            raise RuntimeError(f"{problem}; gradients were not clipped")
        self.scale(norm.coefficient(max_norm), optimizer, only)
        return norm

    def scale(
        self, factor: float, optimizer: ShardedOptimizer | None = None, only: Collection[int] | None = None
    ) -> None:
        """Multiply reduced gradients by a factor that is equal on all ranks; nothing is sent."""
        for gradients in self._chosen(optimizer):
            gradients.scale(factor, only)

    def clamp(
        self, limit: float, optimizer: ShardedOptimizer | None = None, only: Collection[int] | None = None
    ) -> None:
        """Clamp every element of the gradients to [-limit, limit]."""
        for gradients in self._chosen(optimizer):
            gradients.clip_values(limit, only)

    def _chosen(self, optimizer: ShardedOptimizer | None) -> list[OwnGradients]:
        if optimizer is not None:
            return [optimizer.gradients]
        if not self._optimizers:
            return [OwnGradients(self._model, self._all_parameters)]
        if self._is_shared():
            # Each once, or the norm would count it twice, and the clip scale it twice.
            held = {id(p): p for sharded in self._optimizers for p in sharded.parameters()}
            return [OwnGradients(self._model, lambda: iter(held.values()))]
        return [sharded.gradients for sharded in self._optimizers]

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._model.names())

    def _is_shared(self) -> bool:
        """True if a parameter is in two optimizers."""
        if len(self._optimizers) < 2:
            return False
        held = [id(parameter) for sharded in self._optimizers for parameter in sharded.parameters()]
        return len(set(held)) < len(held)
