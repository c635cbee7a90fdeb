"""Saves checkpoints in pieces from virtual ranks: a thread each, and a store in this process between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.checkpoint.saving import States, Tensors, plan_of, slices
from zero_strategy.checkpoint import CheckpointPlan, CheckpointWriter, FileKind, Piece, SaveWriter
from zero_strategy.checkpoint.piece_writer import HostPieceWriter
from zero_strategy.checkpoint.save_job import SaveJob
from zero_strategy.checkpoint.storage import RemotePieceWriter
from zero_strategy.comm.store import SaveBoard

MakeWriter = Callable[[int, SaveBoard], SaveWriter]


def own_file(rank: int) -> dict[str, bytes]:
    return {f"random/rank-{rank:05d}.json": b"state of rank %d" % rank}


def run_jobs(jobs: Sequence[SaveJob], threads: int = 1) -> dict[int, BaseException]:
    """Rank -> what went wrong."""
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            jobs[rank].run(threads=threads, bytes_per_second=None)
        except BaseException as error:
            failures[rank] = error

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    return failures


def jobs_of(
    make: MakeWriter,
    weights: Tensors,
    states: States | None = None,
    *,
    world_size: int = 2,
    extra_files: Mapping[str, bytes] | None = None,
    update_latest: bool = True,
    **options: Any,
) -> list[SaveJob]:
    plan: CheckpointPlan = plan_of(weights, states, **options)
    kinds: dict[FileKind, Tensors] = {"model": weights}
    kinds |= {(o, kind): tensors for o, by_kind in (states or {}).items() for kind, tensors in by_kind.items()}
    store = dist.HashStore()
    jobs = []
    for rank in range(world_size):
        pieces: list[tuple[FileKind, Piece]] = [
            (kind, piece) for kind, tensors in kinds.items() for piece in slices(tensors, rank, world_size)
        ]
        board = SaveBoard(rank, world_size, 5.0, "test", store)
        jobs.append(
            SaveJob(
                writer=make(rank, board),
                board=board,
                plan=plan,
                pieces=pieces,
                own_files=own_file(rank),
                manifest=plan.manifest(world_size=world_size, stage=0),
                extra_files=extra_files or {},
                update_latest=update_latest,
                committed=lambda: None,
            )
        )
    return jobs


def in_place(directory: Path, world_size: int, token: str = "t") -> MakeWriter:
    return lambda rank, board: CheckpointWriter(directory, rank=rank, world_size=world_size, token=token)


def on_hosts(directories: Sequence[Path], token: str = "t") -> MakeWriter:
    """Rank r's directory is directories[r]; equal ones are on one host."""
    leaders = [list(directories).index(directory) for directory in directories]
    return lambda rank, board: HostPieceWriter(
        directories[rank],
        rank=rank,
        world_size=len(directories),
        token=token,
        board=board,
        leader=leaders[rank],
    )


def remote(url: str, world_size: int, token: str = "t") -> MakeWriter:
    return lambda rank, board: RemotePieceWriter(url, rank=rank, world_size=world_size, token=token, board=board)


def save(make: MakeWriter, weights: Tensors, states: States | None = None, **options: Any) -> None:
    jobs = jobs_of(make, weights, states, **options)
    for error in run_jobs(jobs).values():
        raise error
    for job in jobs:
        job.clean_up()
