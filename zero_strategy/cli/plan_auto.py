"""`zero-strategy plan MODEL --auto`: the settings that are chosen, why not others, and a file to pin them."""

from __future__ import annotations

import argparse
import json
from copy import deepcopy
from dataclasses import replace

import torch

from zero_strategy.auto.choice import Choice, NothingFitsError, choose, shares_of
from zero_strategy.auto.decide import units_of
from zero_strategy.auto.example import Example
from zero_strategy.auto.foreseen import UnforeseenError
from zero_strategy.auto.micro_batches import CountedRows, ForeseenRows, MicroBatches, may_tile
from zero_strategy.auto.roof import ASSUMED_GPU, Roof, measure, measure_drive
from zero_strategy.cli.plan_example import example_of
from zero_strategy.cli.plan_model import Built
from zero_strategy.config import ZeroConfig
from zero_strategy.integrations.huggingface.sequence_models import tiles_of
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.planning.room import Budget
from zero_strategy.runtime.terminal import table


def choose_and_tell(
    plan: MemoryPlan, given: ZeroConfig, budget: Budget, built: Built | None, options: argparse.Namespace
) -> int:
    """Choose, and print the answer; the exit status.

    Args:
        plan: Of the settings as they were given.
        given: Those settings.
        budget: What there is.
        built: The model; None: plain numbers.
        options: Of the command.

    Raises:
        ValueError: If the ranks do not divide the batch.
    """
    asked = _with_options(given, options)
    example = None if built is None else example_of(built, options.micro_batch, options.sequence)
    rows = options.micro_batch or (0 if example is None else example.rows) or 1
    roof, source = _roof(plan, asked, options.link)
    foreseen, unknown = _foreseen(plan, asked, example, built, rows, options.sequence)
    try:
        found = choose(asked, plan, budget, roof, foreseen, rows=rows, unknown=unknown, speeds=source)
    except NothingFitsError as error:
        print(json.dumps({"fits": False, "why": str(error)}, indent=1) if options.json else error)
        return 1
    if options.json:
        print(json.dumps({**found.to_json(), "speeds": vars(roof), "pinned": found.pinned_yaml()}, indent=1))
    else:
        print(_text(plan, found, source))
    return 0


def _with_options(given: ZeroConfig, options: argparse.Namespace) -> ZeroConfig:
    """The config with what options say of it, which are constraints."""
    asked = deepcopy(given)
    for owner, name, value in (
        (asked.offload, "optimizer", options.offload_optimizer),
        (asked.offload, "parameters", options.offload_parameters),
        (asked.offload, "nvme_path", [options.nvme_path] if options.nvme_path else None),
        (asked.activation_checkpointing, "mode", "full" if options.recompute else None),
        (asked.checkpoint, "asynchronous", False if options.no_snapshots else None),
        (asked.auto, "global_batch", options.global_batch),
    ):
        if value is not None:
            owner.record(name, value, "user: option")
    return asked


def _text(plan: MemoryPlan, found: Choice, source: str) -> str:
    facts = [
        ("model", plan.model.title),
        ("parameters", f"{plan.model.parameters:,}"),
        ("ranks", f"{plan.resolved.world_size}, {plan.ranks_per_host} per host"),
        ("optimizer", plan.optimizer.name),
        ("speeds", source),
    ]
    return f"{table(facts)}\n\n{found.table()}\n\n# to pin it:\n{found.pinned_yaml()}".rstrip()


def _roof(plan: MemoryPlan, asked: ZeroConfig, gigabits: float | None) -> tuple[Roof, str]:
    dtype = plan.compute_dtype or torch.float32
    drive = asked.offload.nvme_path[0] if asked.offload.nvme_path else None
    if plan.device_type == "cpu" or torch.cuda.is_available():
        device = torch.device("cpu" if plan.device_type == "cpu" else "cuda")
        roof, source = measure(device, dtype), "measured on this machine, by one rank"
        if drive is not None:
            write, read = measure_drive(drive)
            roof = replace(roof, write=write, read=read)
    else:
        roof, source = ASSUMED_GPU, "assumed, of an H100"
    if gigabits is not None:
        roof, source = replace(roof, link=gigabits * 1e9 / 8), f"{source}; links as given"
    return roof, source


def _foreseen(
    plan: MemoryPlan, asked: ZeroConfig, example: Example | None, built: Built | None, rows: int, tokens: int
) -> tuple[MicroBatches | None, str]:
    """Micro-batches, or why they are not known."""
    if plan.model.costs is not None:
        return CountedRows(plan, tokens), ""
    if example is None or built is None:
        return None, "not known: let the factory return (model, optimizer, batches, loss), or reserve --activations"
    most = max(rows, asked.auto.global_batch // shares_of(plan))
    try:
        units, tiles = units_of(built.module, plan), tiles_of(built.module) if may_tile(asked) else None
        return ForeseenRows(built.module, example, units, most, plan.compute_dtype, tiles), ""
    except UnforeseenError as error:
        return None, f"not known: {error}; reserve --activations"
