"""The protocol of a distributed training that is compared with one process, and what is read of one.

A script has a function that every rank calls. It is given the subject, fresh from the factory and the same on all
ranks, and the settings; it returns this rank's part of the training:

    class Mine:
        def __init__(self, subject, settings):
            self.model = divide(subject.model)                     # however it is done
            self.optimizer = subject.optimizer(self.model)

        def backward(self, batches):                               # forward and backward of this rank's micro-batches
            ...                                                    # gradients are complete afterwards
            return losses

        def update(self):                                          # clip, step
            ...

        def weights(self):                                         # whole tensors, by the names of the factory's model
            return dict(self.model.named_parameters())             # DTensors are gathered

Everything else is optional, and compared where it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from zero_strategy.fsdp.dtensor import is_dtensor
from zero_strategy.verify.reference_run import Tensors, flat_state
from zero_strategy.verify.subject import Subject, VerifySettings, named

Reduction = Literal["mean", "sum", "tokens"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "tokens")


class DistributedRun(Protocol):
    """One rank's part of a distributed training.

    `weights` is required, and either `backward` and `update`, or `step(batches)`, which does both. Whatever else there
    is gets compared; a rank leaves out names that it does not have, such as those of another pipeline stage:

    | member | meaning |
    | --- | --- |
    | `gradients()` | whole mean gradients by name, None where there is none; with `step`: those that it has clipped |
    | `norm()` | gradient norm of the last step, before clipping; None: none was computed |
    | `state()` | the optimizer's state, whole: {name: {key: value}} |
    | `buffers()` | this rank's buffers, by name |
    | `data_rank`, `data_ranks` | which micro-batches this rank gets, of how many; default: rank and world size |
    | `reduction` | the loss of a step: "mean" of all micro-batches' (default), "sum", or "tokens": mean by weight |
    | `tokens(batch)` | of "tokens": the weight of a micro-batch |
    | `shares_buffers` | True: every step begins with data rank 0's buffers, as DistributedDataParallel's do |
    """

    def backward(self, batches: Sequence[Any]) -> Any:
        """Forward and backward of a step. Afterwards gradients are what the optimizer is to take, before clipping.

        Args:
            batches: The micro-batches of this rank's data rank.

        Returns:
            The loss of each; or one scalar, their mean; or None, on ranks that have none.
        """
        ...

    def update(self) -> Any:
        """Clip (`VerifySettings.clip_norm`), and let the optimizer step."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Whole weights that the optimizer updates, by the names that they have in the factory's model."""
        ...


MakeRun = Callable[[Subject, VerifySettings], Any]
"""A script's function."""

_ASKED = "its function(subject, settings) returns an object with weights(), and backward(batches) and update(), or step"


class RunOfRank:
    """A `DistributedRun` as it is compared: what it returns, checked and as whole tensors on the host.

    Args:
        made: What the script's function returned.
        rank: This rank.
        ranks: How many there are.
        micros: Micro-batches of a step.

    Attributes:
        data_rank: Whose micro-batches it trains on.
        data_ranks: How many have micro-batches of their own.
        reduction: See `DistributedRun`.
        shares_buffers: Likewise.
        split: Whether gradients can be looked at between backward and update.

    Raises:
        ValueError: If a member is missing, or is not what it has to be.
    """

    def __init__(self, made: Any, rank: int, ranks: int, micros: int) -> None:
        self._made, self._micros = made, micros
        self.split = callable(getattr(made, "backward", None)) and callable(getattr(made, "update", None))
        if not callable(getattr(made, "weights", None)) or not (self.split or callable(getattr(made, "step", None))):
            raise ValueError(f"the distributed run is {named(made)}: {_ASKED}(batches)")
        self.data_rank, self.data_ranks = getattr(made, "data_rank", rank), getattr(made, "data_ranks", ranks)
        self.reduction: Reduction = getattr(made, "reduction", "mean")
        self.shares_buffers = bool(getattr(made, "shares_buffers", False))
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"the run's reduction is {self.reduction!r}; accepted: {', '.join(REDUCTIONS)}")
        if self.reduction == "tokens" and not callable(getattr(made, "tokens", None)):
            raise ValueError("the run's reduction is 'tokens': give it tokens(batch), the weight of a micro-batch")
        if not 0 <= self.data_rank < self.data_ranks <= ranks:
            raise ValueError(
                f"the run is data rank {self.data_rank} of {self.data_ranks} on {ranks} rank(s); accepted: "
                "data_rank from 0, data_ranks from 1 to the number of ranks"
            )

    def tokens(self, batch: Any) -> float:
        """Weight of a micro-batch."""
        return float(self._made.tokens(batch))

    def backward(self, batches: Sequence[Any]) -> Tensors:
        """Train up to the update, or with it where they are one; returns losses.

        Raises:
            ValueError: If these are something else.
        """
        found = self._made.backward(batches) if self.split else self._made.step(batches)
        if found is None:
            return {}
        if isinstance(found, (int, float)) or (isinstance(found, Tensor) and found.dim() == 0):
            return {MEAN_LOSS: _whole(found)}
        if not isinstance(found, (Sequence, Tensor)) or isinstance(found, str) or len(found) != self._micros:
            raise ValueError(
                f"the run's losses are {named(found)} for {self._micros} micro-batch(es): return the loss of each, or "
                "their mean as one scalar, or None on ranks that have no losses"
            )
        return {loss_name(micro): _whole(loss) for micro, loss in enumerate(found)}

    def update(self) -> None:
        """Clip and step, where backward has not done it."""
        if self.split:
            self._made.update()

    def weights(self) -> Tensors:
        """Whole weights. A collective, like the others."""
        return self._tensors("weights")

    def gradients(self) -> Tensors:
        """Whole gradients; empty where the run shows none."""
        return self._tensors("gradients")

    def buffers(self) -> Tensors:
        """Buffers of this rank."""
        return self._tensors("buffers")

    def norm(self) -> Tensors:
        """The gradient norm, or nothing."""
        found = self._made.norm() if hasattr(self._made, "norm") else None
        return {} if found is None else {NORM: _whole(found)}

    def state(self) -> Tensors:
        """The optimizer's state by "key of parameter"."""
        if not hasattr(self._made, "state"):
            return {}
        return flat_state(
            {name: {key: _whole(value) for key, value in of.items()} for name, of in self._made.state().items()}
        )

    def _tensors(self, member: str) -> Tensors:
        if not hasattr(self._made, member):
            return {}
        found = getattr(self._made, member)()
        if not isinstance(found, Mapping):
            raise ValueError(f"the run's {member}() returned {named(found)}; return tensors by name")
        return {name: None if value is None else _whole(value) for name, value in found.items()}


MEAN_LOSS = "mean loss"
NORM = "gradient norm"


def loss_name(micro: int) -> str:
    """Name of a micro-batch's loss."""
    return f"loss of micro-batch {micro}"


@torch.no_grad()
def _whole(value: Any) -> Tensor:
    """The whole tensor of a DTensor, any other tensor or number as one; a copy on the host."""
    if isinstance(value, Tensor):
        whole: Tensor = cast(Any, value).full_tensor() if is_dtensor(value) else value
        return whole.detach().to("cpu", copy=True)
    return torch.as_tensor(value, dtype=torch.float64)
