"""One decision of all ranks: rank 0 chooses for the scarcest memory and the slowest rank, and the others are told.

each rank    memory that it may take, its speeds      gathered
rank 0       the choice, or why there is none         broadcast
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zero_strategy.activation.units import outermost_names
from zero_strategy.auto.candidates import pinned
from zero_strategy.auto.choice import SHOWN, Choice, choose, shares_of
from zero_strategy.auto.example import Example
from zero_strategy.auto.foreseen import UnforeseenError
from zero_strategy.auto.fullest import MOST_OWN_BYTES
from zero_strategy.auto.micro_batches import ForeseenRows, MicroBatches, Tiles, may_tile
from zero_strategy.auto.roof import Roof, measure, measure_drive, measure_link, probed_bytes
from zero_strategy.config import ZeroConfig
from zero_strategy.planning.held import resident
from zero_strategy.planning.machine import THREADS, THREADS_ALONE, Machine
from zero_strategy.planning.memory_plan import MemoryPlan, plan_model
from zero_strategy.planning.model_shape import OptimizerState
from zero_strategy.planning.room import Budget
from zero_strategy.runtime.terminal import report

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """A choice as all ranks know it.

    Attributes:
        config: With the chosen settings.
        rows: Of a micro-batch of a rank; 0: as it comes.
        accumulation: Micro-batches of a step.
        table: See `Choice.table`.
        figures: See `Choice.to_json`.
        pinned: See `Choice.pinned_yaml`.
    """

    config: ZeroConfig
    rows: int
    accumulation: int
    table: str
    figures: dict[str, Any]
    pinned: str


def decide(
    asked: ZeroConfig,
    module: nn.Module,
    *,
    world_size: int,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    optimizer: str | OptimizerState = "AdamW",
    accumulation: int = 1,
    example: Example | None = None,
    rows: int = 0,
    told: int = SHOWN,
    tiles: Tiles | None = None,
) -> Decision:
    """Choose what nobody has set. A collective of the default process group, if there is one.

    Args:
        asked: The config as it was given, with `auto.enabled`.
        module: The model, whole.
        world_size: Number of ranks.
        compute_dtype: Dtype that floating-point parameters take, or None to keep theirs.
        device: Where it computes; default: the CPU.
        optimizer: What it keeps; a class name, or an `OptimizerState`.
        accumulation: Micro-batches of a step, where `auto.global_batch` does not make them.
        example: A batch, by which activations are foreseen; of rank 0.
        rows: Of a micro-batch, where there is no example.
        told: Candidates of which there are figures, at most.
        tiles: In which the model computes in tiles, if that is chosen, as it will then do; None: it will not.

    Raises:
        ValueError: On all ranks alike: if nothing fits, or settings contradict each other; names a way out.
    """
    place, first = device or torch.device("cpu"), _rank() == 0

    def foreseen() -> Callable[[Budget, int, Roof], Choice]:
        plan = plan_model(
            module, without_auto(asked), world_size=world_size, compute_dtype=compute_dtype, optimizer=optimizer,
            device=place, accumulation=accumulation,
        )  # fmt: skip
        batches, unknown = micro_batches(asked, plan, module, example, tiles)
        given = rows if example is None else example.rows

        def chosen(budget: Budget, per_host: int, roof: Roof) -> Choice:
            here = replace(plan, ranks_per_host=per_host)
            return choose(without_drive if budget.disk is None else asked, here, budget, roof, batches, rows=given,
                          unknown=unknown)  # fmt: skip

        return chosen

    # First, as it takes memory for torch's tracing; what then is left may be planned with. Later runs take little.
    choose_by, refused = _or_refusal(foreseen) if first else (None, "")
    drives = _made_by_all(partial(_drive_of, asked))
    drive = drives[_rank()] if all(drives) else None  # else some ranks would find no place for their files
    without_drive = deepcopy(asked)
    without_drive.offload.nvme_path = []
    roof = _slowest(place, compute_dtype or torch.float32, drive)
    machine = Machine.here(drive, threads=THREADS if world_size > 1 else THREADS_ALONE)
    rooms = _gathered((os.uname().nodename, machine, present_bytes(module, place)))
    budget, per_host = least_room(rooms, asked.auto.margin, on_host=place.type == "cpu")
    answer: Any = refused
    if choose_by is not None:
        choice, refused = _or_refusal(lambda: choose_by(budget, per_host, roof))
        answer = refused if choice is None else _answer(choice, told)
    answer = _broadcast(answer)
    if isinstance(answer, str):
        raise ValueError(answer)
    settings, rows, count, text, figures, yaml = answer
    config = pinned(asked, settings)
    now, most = resident()
    config._chosen = {**figures, "resident": now - present_bytes(module, place), "resident peak": most}  # of this rank
    if _rank() == 0:
        report(_logger, "settings that were chosen (auto.enabled):\n%s", text)
    return Decision(config, rows, count, text, figures, yaml)


def _slowest(device: torch.device, dtype: torch.dtype, drive: str | None) -> Roof:
    """The roof of the slowest rank.

    Args:
        device: Where the ranks compute.
        dtype: In which.
        drive: A directory for offload.
    """
    here = Machine.here(drive)
    rooms = [here.process_free, here.host_free if device.type == "cpu" else here.gpu_free]
    room = min((each for each in rooms if each is not None), default=None)

    def own() -> tuple[Roof, str]:
        found = measure(device, dtype, room)
        if drive is not None and _rank() == 0:
            write, read = measure_drive(drive)
            found = replace(found, write=write, read=read)
        return found, os.uname().nodename

    _gathered(None)  # that all begin now
    everyone = _made_by_all(own)
    roofs: list[Roof] = [found for found, _ in everyone]
    hosts = {host for _, host in everyone}
    means = roofs
    if device.type == "cpu":
        shared = [[found for found, other in everyone if other == host] for host in hosts]
        means = [found[0].mean(found[1:]) for found in shared]
    roof = means[0].slowest(means[1:])
    roof = replace(roof, write=roofs[0].write, read=roofs[0].read)  # of rank 0's host; others' drives are like it
    if len(roofs) > 1 and (len(hosts) > 1 or device.type != "cpu"):
        nbytes = min(_gathered(probed_bytes(room)))
        roof = replace(roof, link=min(_made_by_all(lambda: measure_link(device, nbytes))))
    return roof


def _drive_of(config: ZeroConfig) -> str:
    """The directory for offload, which is there afterwards; "": there is none."""
    if not config.offload.nvme_path:
        return ""
    os.makedirs(config.offload.nvme_path[0], exist_ok=True)
    return config.offload.nvme_path[0]


def _made_by_all(make: Callable[[], Any]) -> list[Any]:
    """Results of all ranks; where one of them raises, all do."""
    own, error = _or_refusal(make)
    found = _gathered((own, error))
    errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
    if errors:
        raise ValueError(f"settings cannot be chosen (auto.enabled): {'; '.join(errors)}")
    return [each for each, _ in found]


def check_batches_come(config: ZeroConfig, whose: str) -> None:
    """Raise if micro-batches were to be made where they come from a loader.

    Raises:
        ValueError: Naming the way out.
    """
    if config.auto.global_batch:
        raise ValueError(
            f"auto.global_batch is {config.auto.global_batch} [{config.origin_of('auto.global_batch')}], and batches "
            f"are those of {whose}: leave it out, and give the loader the rows that `zero-strategy plan --auto "
            "--global-batch` prints"
        )


def micro_batches(
    asked: ZeroConfig, plan: MemoryPlan, module: nn.Module, example: Example | None, tiles: Tiles | None = None
) -> tuple[MicroBatches | None, str]:
    """Micro-batches of a module, foreseen by an example, or why they are not known."""
    if example is None:
        return None, "not known, as there is no example of a batch: keep memory free by auto.margin"
    wanted = asked.auto.global_batch // shares_of(plan)
    most = max(1, wanted) if wanted and example.rows else example.rows
    try:
        units, given = units_of(module, plan), tiles if may_tile(asked) else None
        return ForeseenRows(module, example, units, most, plan.compute_dtype, given), ""
    except UnforeseenError as error:
        return None, f"not known: {error}; keep memory free by auto.margin"


def units_of(module: nn.Module, plan: MemoryPlan) -> list[str]:
    """Names of units that can be computed again, as an engine would find them."""
    return outermost_names([(unit.name, module.get_submodule(unit.name)) for unit in plan.model.units])


def without_auto(asked: ZeroConfig) -> ZeroConfig:
    """A config that can be resolved as it is: that of which a plan is made before anything is chosen."""
    found = replace(asked)
    found.auto = replace(asked.auto, enabled=False)
    return found


def least_room(rooms: list[tuple[str, Machine, int]], margin: float, *, on_host: bool) -> tuple[Budget, int]:
    """Memory of the scarcest rank or host, and the most ranks of a host.

    Args:
        rooms: Of each rank: a name of its host, its machine, and bytes of its model that make way for what is planned.
        margin: That stays free.
        on_host: Ranks compute there; else on devices of their own.
    """
    names = [name for name, *_ in rooms]
    per_host = max(names.count(name) for name in names)

    def least(values: list[int | None]) -> int | None:
        return min((value for value in values if value is not None), default=None)

    present = min(nbytes for *_, nbytes in rooms)
    host = least([machine.host_free for _, machine, _ in rooms])
    process = least([machine.process_free for _, machine, _ in rooms])
    device = least([machine.gpu_free for _, machine, _ in rooms])
    more = (present if on_host else 0) - MOST_OWN_BYTES
    budget = Budget(
        device=None if device is None else device + (0 if on_host else present),
        host=None if host is None else max(0, host + more * per_host),
        disk=least([machine.disk_free for _, machine, _ in rooms]),
        margin=margin,
        process=None if process is None else max(0, process + more),
    )
    return budget, per_host


def present_bytes(module: nn.Module, device: torch.device) -> int:
    """Bytes of parameters that lie where the model computes, in memory that is this process's alone."""
    return sum(
        p.numel() * p.itemsize for p in module.parameters() if p.device.type == device.type and not p.is_shared()
    )  # fmt: skip


def _or_refusal(make: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or the text of an error: other ranks wait for this one, and are told."""
    try:
        return make(), ""
    except ValueError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _answer(choice: Choice, told: int) -> Any:
    candidate, figures = choice.chosen.candidate, choice.to_json(told)
    batch = candidate.rows, candidate.accumulation
    return (choice.settings, *batch, choice.table(), figures, choice.pinned_yaml())


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _gathered(own: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _broadcast(value: Any) -> Any:
    if dist.is_available() and dist.is_initialized():
        found = [value]
        dist.broadcast_object_list(found)
        return found[0]
    return value
