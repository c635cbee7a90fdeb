"""Dynamic loss scaling for fp16, and the choice about steps whose gradients are not finite.

The scale lifts small gradients above underflow, and ranks agree on skipping a step.

Source: Micikevicius et al., "Mixed Precision Training", 2018; the growth rule is torch.amp.GradScaler's.

A step whose gradients are not all finite is taken, skipped, or an error.

All ranks decide alike. A norm that was taken since the gradients were reduced (clipping, `engine.grad_norm()`) has told
already; where there was none, one is taken before the step: a pass over the gradients and one small message.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from zero_strategy.config import LossScaleConfig
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.grad_norm import global_norm
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class LossScaler:
    """Scale factor that halves after a step with non-finite gradients and doubles after a run of good ones.

    Attributes:
        scale: What losses are multiplied by before backward.
        skipped: Steps skipped so far.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.scale = float(config.initial)
        self.skipped = 0
        # Steps that do not count toward the growth are counted below zero.
        self._good_steps = -config.growth_delay
        # Overflows that leave the scale as it is, plus the one that lowers it.
        self._until_lower = config.hysteresis

    def update(self, *, finite: bool) -> None:
        """Follow a step; `finite` must be the same on all ranks.

        Raises:
            FloatingPointError: If the scale is at its minimum and gradients still overflow.
        """
        if not finite:
            self.skipped += 1
            self._good_steps = -self.config.growth_delay
            # Before the look at the minimum: an overflow that is tolerated ends no run.
            if self._until_lower > 1:
                self._until_lower -= 1
                return
            if self.scale <= self.config.minimum:
                raise FloatingPointError(
                    f"gradients are not finite at the smallest loss scale {self.scale:g}: this is no overflow of fp16 "
                    "but a diverged model or bad data. Lower the learning rate, clip gradients, or train in bf16."
                )
            self.scale = max(self.scale * self.config.backoff_factor, self.config.minimum)
            return
        self._good_steps += 1
        if self.config.consecutive_hysteresis:
            self._until_lower = self.config.hysteresis
        if self._good_steps >= self.config.growth_interval:
            self.scale *= self.config.growth_factor
            self._good_steps = 0
            self._until_lower = self.config.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters."""
        state = {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}
        if self.config.hysteresis > 1:
            state["until_lower"] = self._until_lower
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, or what torch.amp.GradScaler's gave."""
        self.scale = float(state["scale"])
        self._good_steps = int(state.get("good_steps", state.get("_growth_tracker", 0)))
        self.skipped = int(state.get("skipped", 0))
        # A state may come from a run that tolerated more overflows than this one.
        until_lower = int(state.get("until_lower", self.config.hysteresis))
        self._until_lower = min(max(until_lower, 1), self.config.hysteresis)


_log = logging.getLogger(__name__)
IGNORE, SKIP, RAISE = "ignore", "skip", "raise"
Counts = tuple[Sequence[str], Tensor]
"""The parameters of this rank's parts, and how many values of each part are not finite."""


class NonfiniteSteps:
    """Decides about the steps of an engine's optimizers.

    Args:
        choice: `ignore`, `skip` or `raise`.
        model: The sharded model.
    """

    def __init__(self, choice: str, model: ShardedModel) -> None:
        self.choice, self._model = choice, model
        self._known: dict[int, tuple[int, dict[str, list[int]]]] = {}
        """By the id of an optimizer: after which reduction its gradients were looked at, what was found."""
        self._in_a_row: dict[int, int] = {}

    def note(
        self, looked_at: Sequence[tuple[ShardedOptimizer, Counts]], only: Collection[int] | None, *, finite: bool
    ) -> None:
        """A norm was taken on all ranks.

        Args:
            looked_at: Optimizers, and what was found of the gradients of each on this rank.
            only: Ids of the parameters that were looked at; None: all.
            finite: Whether all gradients of all ranks are finite.
        """
        for sharded, counts in looked_at:
            # A norm of some of its parameters tells nothing of the others.
            if only is None or all(id(parameter) in only for parameter in sharded.parameters()):
                # `finite` is agreed, so all ranks exchange names here, or none does.
                found = {} if finite else self._named(counts)
                self._known[id(sharded)] = (self._model.reducer.reductions, found)

    def skips(self, sharded: ShardedOptimizer, step: int) -> bool:
        """True if an optimizer's step is not to be taken. A collective, where no norm has told.

        Args:
            sharded: The optimizer; its gradients are reduced.
            step: Its number, for messages.

        Raises:
            FloatingPointError: On all ranks, if gradients are not finite and that was chosen to be an error.
        """
        if self.choice == IGNORE:
            return False
        reduction, found = self._known.get(id(sharded), (-1, {}))
        # A norm from before the last reduction was of other gradients.
        if reduction != self._model.reducer.reductions:
            found = self._look(sharded)
        if not found:
            self._in_a_row.pop(id(sharded), None)
            return False
        text = f"step {step}: gradients are not finite ({_in_words(found)})"
        if self.choice == RAISE:
            raise FloatingPointError(
                f"{text}. No parameter has changed (nonfinite_gradients: raise). NonFiniteWatch(engine) of "
                "zero_strategy.diagnostics.nonfinite finds the module that they come from; nonfinite_gradients: skip "
                "goes on with the next batch."
            )
        count = self._in_a_row[id(sharded)] = self._in_a_row.get(id(sharded), 0) + 1
        if self._model.mesh.world_group.rank == 0:
            row = f", {count} in a row" if count > 1 else ""
            _log.warning("%s; the step is skipped on all ranks%s (nonfinite_gradients: skip)", text, row)
        return True

    def _look(self, sharded: ShardedOptimizer) -> dict[str, list[int]]:
        # The largest magnitude: one pass tells, as finite numbers cannot overflow in it.
        shards, factors, names = sharded.gradients.shards(math.inf)
        seen: list[Tensor] = []
        groups = self._model.norm_groups
        norm = global_norm(shards, math.inf, groups, factors, lambda sums, counts: seen.append(counts))
        return {} if norm.finite else self._named((names, seen[0]))

    def _named(self, counts: Counts) -> dict[str, list[int]]:
        """The ranks of all parts of the model that hold values which are not finite, by parameter. A collective."""
        mine = [name for name, count in zip(counts[0], counts[1].tolist(), strict=True) if count]
        found: dict[str, list[int]] = {}
        for rank, names in enumerate(self._model.mesh.world_group.control.all_gather_objects(mine)):
            for name in names:
                found.setdefault(name, []).append(rank)
        return found


def _in_words(found: dict[str, list[int]]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    ranks = sorted({rank for ranks in found.values() for rank in ranks})
    where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"{', '.join(map(repr, list(found)[:3]))}{more}, in the part{'s' if len(ranks) > 1 else ''} of {where}"
