"""The same step under the frameworks' own loops: their DDP against ours there, and what a loop adds to ours.

    python -m benchmarks --only frameworks --regimes balanced --stages 2,3

    accelerate    a script's loop: `prepare`, `accelerator.backward`, `accelerator.clip_grad_norm_`
    lightning     a fit of the Trainer per block, whose first batches (construction, buffers) are not counted

Both sides, or a face and the bare engine, live in the same processes and take turns as A B B A, in float32. DDP has
`gradient_as_bucket_view=True` in both; a step is everything from one batch to the next.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.contenders import Contender, Workload, make, optimizer_of
from benchmarks.gpt import build, loss_fn
from benchmarks.ratios import TURNS, Ratio
from benchmarks.step import PairTimes, Plan, summarize
from benchmarks.suite import Options, Row, Suite, row_of, rows_of
from benchmarks.training_suites import plan_of, workload
from tests.launcher import RankPool

FACES = ("accelerate", "lightning")
WARM = 2
"""Batches of a fit that are not counted."""


class Side(Protocol):
    """Contenders that take turns."""

    def block(self, steps: int) -> tuple[list[float], list[float]]:
        """Some steps in a row; this rank's seconds and losses."""


class Bare:
    """Our engine in a plain loop."""

    def __init__(self, stage: int, workload: Workload) -> None:
        self._contender, self._workload = make(f"zero{stage}", workload), workload

    def block(self, steps: int) -> tuple[list[float], list[float]]:
        """See `Side`."""
        return timed(self._contender, self._workload, steps)


class Accelerated(Contender):
    """A script's loop under Accelerate.

    Args:
        stage: Of ours; None: Accelerate's own DDP.
        workload: In float32.
    """

    def __init__(self, stage: int | None, workload: Workload) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        from tests.integrations.accelerate.training import as_launched
        from zero_strategy.integrations.accelerate import ZeroAccelerator

        as_launched()
        if stage is None:
            self.accelerator = Accelerator(
                cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
            )
        else:
            self.accelerator = ZeroAccelerator(zero_config={"stage": stage})
        model = build(workload.model, workload.length)
        forward, optimizer = self.accelerator.prepare(model, optimizer_of(model, workload))
        super().__init__(forward, optimizer, self._clip, self.accelerator.no_sync)
        self._workload = workload

    def _clip(self, max_norm: float) -> None:
        self.accelerator.clip_grad_norm_(self.forward.parameters(), max_norm)

    def step(self, workload: Workload) -> float:
        """One step of the loop; returns this rank's loss."""
        ((inputs, targets),) = workload.data(self.steps)
        with self.accelerator.accumulate(self.forward):
            loss = loss_fn(self.forward(inputs).float(), targets)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients and workload.clip_norm is not None:
                self.clip(workload.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1
        return loss.item()

    def block(self, steps: int) -> tuple[list[float], list[float]]:
        """See `Side`."""
        return timed(self, self._workload, steps)


class Trained:
    """Fits of the Lightning Trainer.

    Args:
        stage: Of ours; None: Lightning's own DDP.
        workload: In float32.
    """

    def __init__(self, stage: int | None, workload: Workload) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import DDPStrategy

        from tests.integrations.lightning.trainers import PLAIN, join
        from zero_strategy import ZeroStrategy

        join()
        ddp = stage is None
        strategy = DDPStrategy(gradient_as_bucket_view=True) if ddp else ZeroStrategy(stage=stage)
        flags: dict[str, Any] = {**PLAIN, "devices": dist.get_world_size(), "max_epochs": -1, "max_steps": 0}
        flags |= {"enable_checkpointing": False, "use_distributed_sampler": False}
        self._trainer = pl.Trainer(strategy=strategy, gradient_clip_val=workload.clip_norm, **flags)
        self._module, self._workload = _module(workload), workload
        self._steps = 0

    def block(self, steps: int) -> tuple[list[float], list[float]]:
        """See `Side`."""
        module, count = self._module, WARM + steps
        module.ends, module.losses = [], []
        self._trainer.fit_loop.epoch_loop.max_steps = self._trainer.global_step + count
        batches = DataLoader(Batches(self._workload, self._steps, count), batch_size=None)
        self._trainer.fit(module, batches)
        self._steps += count
        ends = module.ends[WARM - 1 :]
        return [after - before for before, after in itertools.pairwise(ends)], module.losses


def _module(workload: Workload) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(workload.model, workload.length)
            self.ends: list[float] = []
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            loss = loss_fn(self.model(inputs).float(), targets)
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, workload)

    return Module()


class Batches(IterableDataset[Any]):
    """This rank's batches of some steps, in order."""

    def __init__(self, workload: Workload, first: int, count: int) -> None:
        self._workload, self._steps = workload, range(first, first + count)

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            yield from self._workload.data(step)


def timed(contender: Contender, workload: Workload, steps: int) -> tuple[list[float], list[float]]:
    """Steps of a contender."""
    seconds, losses, start = list[float](), list[float](), time.perf_counter()
    for _ in range(steps):
        losses.append(contender.step(workload))
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    return seconds, losses


def side(face: str, stage: int | None, workload: Workload) -> Side:
    """A face with ours at a stage, or its own DDP if None; "engine": our engine alone."""
    if face == "engine":
        assert stage is not None
        return Bare(stage, workload)
    return Accelerated(stage, workload) if face == "accelerate" else Trained(stage, workload)


def measure(face: str, stage: int, against: str, plan: Plan) -> PairTimes:
    """On every rank: `against` (the face's own DDP, "ddp", or "engine") and ours under the face, in turns."""
    torch.set_num_threads(plan.threads)
    theirs = side("engine", stage, plan.workload) if against == "engine" else side(face, None, plan.workload)
    sides = {"A": theirs, "B": side(face, stage, plan.workload)}
    losses: dict[str, list[float]] = {turn: _block(each, plan.warmup)[1] for turn, each in sides.items()}
    times = PairTimes(against, f"{face} zero{stage}")
    for _ in range(plan.rounds):
        blocks = []
        for turn in TURNS:
            seconds, found = _block(sides[turn], plan.block_steps)
            losses[turn] += found
            blocks.append(seconds)
        times.rounds.append(blocks)
    # A fit has more steps than are counted, and begins with a new optimizer.
    count = WARM + plan.warmup if against == "engine" else min(map(len, losses.values()))
    a, b = (torch.tensor(losses[turn][:count]) for turn in "AB")
    times.loss_difference = float(((a - b).abs() / b).max())
    return times


def _block(each: Side, steps: int) -> tuple[list[float], list[float]]:
    """On the slowest rank."""
    gc.collect()
    dist.barrier()
    seconds, losses = each.block(steps)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist(), losses


def run(options: Options) -> list[Row]:
    """Ours under each face against the face's own DDP, and against our engine without a face."""
    faces = [face for face in FACES if options.wants(face)]
    stages = [stage for stage in options.stages if stage]
    cases = list(itertools.product(faces, stages, ("ddp", "engine"), options.regimes, options.ranks))

    def compared(case: tuple[str, int, str, str, int]) -> list[Row]:
        face, stage, against, regime, ranks = case
        work = workload(options, regime, "fp32")
        pool = RankPool(ranks)
        try:
            arguments = (face, stage, against, plan_of(options, work))
            found = summarize(pool.run(measure, arguments, timeout=options.timeout)[0])
        finally:
            pool.close()
        what = f"step under {face}, zero{stage}, {regime}, fp32, {ranks} ranks"
        note = "" if found["same_training"] else f"losses differ by {found['loss_difference']:.2g}"
        details = {"workload": asdict(work), "ranks": ranks, "rounds": found["rounds"]}
        peer = f"{face}'s ddp" if against == "ddp" else "our engine alone"
        seconds = found["seconds_b"], found["seconds_a"]
        return [row_of("frameworks", what, peer, Ratio(**found["ratio"]), *seconds, "s", note=note, details=details)]

    return rows_of("frameworks", options, cases, lambda case: ", ".join(map(str, case)), compared)


SUITE = Suite("frameworks", "a step under Accelerate and the Lightning Trainer: their DDP, and our engine alone", run)
