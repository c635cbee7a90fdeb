"""A batch of a model that `zero-strategy plan` is asked about, and the activations that are foreseen by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_strategy.auto.decide import units_of
from zero_strategy.auto.example import Example
from zero_strategy.auto.foreseen import MicroBatch, UnforeseenError
from zero_strategy.auto.recomputation import Recomputation
from zero_strategy.cli.plan_model import Built, Finetuning
from zero_strategy.planning.memory_plan import MemoryPlan


def example_of(built: Built, rows: int | None, tokens: int) -> Example | None:
    """A batch; None: there is none, or layers compute nothing, as those that stand for quantised ones.

    Args:
        built: The model.
        rows: Of the batch; None: as many as the factory's has, of transformers' models one.
        tokens: Of a row, for models of transformers.
    """
    if built.finetuning != Finetuning():
        return None
    if built.made is None:
        return _tokens(rows or 1, tokens)
    found = _of_factory(built.made, built.module)
    return found if found is None or rows is None or not found.rows else found.of_rows(rows)


def foreseen_activations(built: Built, plan: MemoryPlan, rows: int | None, tokens: int) -> tuple[int, str]:
    """(bytes, how they are known) of a micro-batch; (0, "") where there is no batch to look at.

    Args:
        built: The model.
        plan: Of it; its mode of activation checkpointing counts.
        rows, tokens: See `example_of`; models of transformers need `rows`.

    Raises:
        ValueError: If there are rows, and no batch.
    """
    example = None if built.made is None and rows is None else example_of(built, rows, tokens)
    if example is None and rows is not None:
        raise ValueError(
            f"--micro-batch {rows}: activations are computed for plain numbers (--params ...), models of transformers "
            "and factories that return (model, optimizer, batches, loss); for others reserve bytes: --activations 4GB"
        )
    if example is None:
        return 0, ""
    way = Recomputation("full") if plan.recompute else Recomputation.of(plan.resolved.config)
    units = units_of(built.module, plan)
    try:
        found = way.foresee(MicroBatch(built.module, example.batch, example.loss, units, plan.compute_dtype))
    except UnforeseenError as error:
        return 0, f"activations are not known: {error}; reserve --activations"
    return found.peak, f"activations: foreseen without memory, of a micro-batch of {example.rows or '?'} row(s)"


def _of_factory(made: Any, module: nn.Module) -> Example | None:
    """The example in what a factory returned; None: there is none."""
    from zero_strategy.verify.subject import subject_of

    try:
        subject = subject_of(made, 1)
    except ValueError:
        return None
    return Example(subject.batches[0], subject.loss) if subject.model is module else None


def _tokens(rows: int, tokens: int) -> Example:
    """An example for a model of transformers: tokens that are their own labels."""
    ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    return Example({"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss)
