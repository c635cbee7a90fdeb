"""The reference run of a training that is not this package's: plain torch over all data ranks' micro-batches.

Its sums are in the order of micro-batches, and the optimizer steps by its own code; the compared side may take any
order. The loss of a step is the mean over all micro-batches, or what the compared side states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero_strategy.activation.rng import kept_random_state
from zero_strategy.config import ResolvedConfig, load_config, resolve
from zero_strategy.verify.distributed_run import MEAN_LOSS, NORM
from zero_strategy.verify.reference_run import ReferenceRun, StepRecord, Tensors, add_gradients
from zero_strategy.verify.subject import Subject, VerifySettings

Shares = Callable[[int], Mapping[tuple[int, int], float]]
"""Step -> the factor of each (data rank, micro-batch)'s loss in the loss of that step."""


def config_of(data_ranks: int, settings: VerifySettings) -> ResolvedConfig:
    """The settings by which a reference run sums as plain torch does: no ops of ours, masters only if cast."""
    masters = settings.compute_dtype is not None
    return resolve(
        load_config(stage=0, fused_optimizers=False, broadcast_buffers=False, precision={"master_weights": masters}),
        data_ranks,
    )


class WholeRun(ReferenceRun):
    """One process that trains on the micro-batches of all data ranks.

    Args:
        subject: Trained in place.
        settings: How it trains.
        data_ranks: How many have micro-batches of their own.
        shares: Factors of the losses; None: each counts the same.
        shares_buffers: Every step begins with data rank 0's buffers.
        jitter: Seed of the disturbance, or None for none.
        keep_parts: Keep the gradients of each micro-batch of the last step.

    Attributes:
        parts: Gradients of the last step by (data rank, micro-batch), with their factor; empty unless kept.
        before: Weights before the last step.
    """

    def __init__(
        self,
        subject: Subject,
        settings: VerifySettings,
        data_ranks: int,
        shares: Shares | None = None,
        shares_buffers: bool = False,
        jitter: int | None = None,
        keep_parts: bool = False,
    ) -> None:
        self._shares, self._shares_buffers, self._keeps = shares, shares_buffers, keep_parts
        self.parts: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.before: Tensors = {}
        super().__init__(subject, config_of(data_ranks, settings), settings, jitter)
        named = self.model.named_parameters(remove_duplicate=False)
        first = {id(parameter): name for name, parameter in self.named.items()}
        self.names = {name: first[id(parameter)] for name, parameter in named}

    def _cast_buffers(self, dtype: torch.dtype) -> None:
        """Leave buffers as they are, as FSDP2 does."""

    def step(self, follow: StepRecord | None = None) -> StepRecord:
        """Train one step; see `ReferenceRun.step`."""
        if self._keeps:
            self.before = self._parameters()
        record = super().step(follow)
        gradients = [gradient for gradient in record.phases["gradient"].values() if gradient is not None]
        squares = sum((gradient.double().square().sum() for gradient in gradients), torch.zeros(()).double())
        record.phases["norm"] = {NORM: squares.sqrt().float()}
        for losses in record.losses:
            losses[MEAN_LOSS] = torch.stack([loss.float() for loss in losses.values() if loss is not None]).mean()
        for phase in ("gradient", "clipped gradient"):
            record.phases[phase] = self._under_all_names(record.phases.get(phase, record.phases["gradient"]))
        record.phases["optimizer state"] = {
            f"{key} of {alias}": value
            for name, value in record.phases["optimizer state"].items()
            for key, _, of in [name.partition(" of ")]
            for alias in self.aliases(of)
        }
        return record

    def aliases(self, name: str) -> list[str]:
        """All names of a parameter, given its first."""
        return [alias for alias, first in self.names.items() if first == name]

    def _under_all_names(self, tensors: Tensors) -> Tensors:
        return {alias: tensors[first] for alias, first in self.names.items() if first in tensors}

    def _parameters(self) -> Tensors:
        """Tensors that the optimizer updates: master weights where there are some."""
        masters = {id(parameter): self._masters[name] for name, parameter in self.named.items()}
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: masters[id(parameter)].detach().clone() for name, parameter in named}

    def _gradients(self, record: StepRecord) -> dict[str, Tensor]:
        """The sum over micro-batches and data ranks, each times its factor."""
        if self._shares_buffers:
            self._share_buffers()
        micros = self.settings.accumulation
        every = [(rank, micro) for micro in range(micros) for rank in range(self.ranks)]
        equal = dict.fromkeys(every, 1.0 / len(every))
        shares = equal if self._shares is None else self._shares(self.steps_taken)
        total: dict[str, Tensor] = {}
        self.parts = {}
        for rank, micro in every:
            found = self._local(record, rank, [micro])  # of the loss / micro-batches
            for gradient in found.values():
                gradient.mul_(shares[rank, micro] * micros)
            if self._keeps:
                self.parts[rank, micro] = {name: gradient.clone() for name, gradient in found.items()}
            add_gradients(total, found)
        return total

    def buffers_of(self, data_rank: int) -> Tensors:
        """A data rank's buffers after the last step."""
        return self._buffers[data_rank]

    # ---- other ways to have computed a loss ----

    @torch.no_grad()
    def losses(
        self,
        data_rank: int,
        drawn_by: int | None = None,
        *,
        training: bool = True,
        scaled: tuple[nn.Parameter, float] | None = None,
    ) -> list[Tensor]:
        """Losses of a data rank's micro-batches of the step to come; nothing of the run changes.

        Args:
            data_rank: Whose batches.
            drawn_by: Data rank whose random numbers are drawn and whose buffers are there; None: the same.
            training: False: in evaluation mode, without dropout.
            scaled: A parameter, and the factor that it has meanwhile.
        """
        drawn_by = data_rank if drawn_by is None else drawn_by
        found = []
        with kept_random_state(), _evaluated(self.model, not training), _times(scaled):
            self._random[drawn_by].restore()
            self._put_buffers(self._buffers[drawn_by])
            for micro in range(self.settings.accumulation):
                number = self.settings.number(self.steps_taken, micro, data_rank, self.ranks)
                with self.settings.forward_context():
                    found.append(self.subject.loss(self.model, self.subject.batch(number, self.settings.device)))
        return found


@contextmanager
def _evaluated(model: nn.Module, wanted: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    if wanted:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _times(scaled: tuple[nn.Parameter, float] | None) -> Iterator[None]:
    if scaled is None:
        yield
        return
    parameter, factor = scaled
    before = parameter.detach().clone()
    parameter.mul_(factor)
    try:
        yield
    finally:
        parameter.copy_(before)
