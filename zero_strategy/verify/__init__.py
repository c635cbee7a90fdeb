"""Proof, on the user's own model, that sharded training is what one plain process trains.

    report = verify("train.py:factory", load_config(stage=3), ranks=2, steps=5)
    print(report); report.raise_if_failed()

Rank 0 trains a plain reference run beside its shards, phase by phase, so it needs the memory of a whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from zero_strategy.activation.rng import kept_random_state
from zero_strategy.comm.local_ranks import run_local_ranks
from zero_strategy.comm.process_group import has_process_group, world_size
from zero_strategy.config import ResolvedConfig, load_config, resolve
from zero_strategy.verify.compare import VerifyReport
from zero_strategy.verify.session import ShardedRun, Verification, place_to_train
from zero_strategy.verify.subject import Factory, VerifySettings, check_place, place_of


def verify(
    factory: Factory,
    config: Any = None,
    *,
    ranks: int | None = None,
    steps: int = 5,
    accumulation: int = 1,
    clip_norm: float | None = None,
    compute_dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    timeout: float = 1800.0,
) -> VerifyReport:
    """Train a few steps sharded and plain, and compare all there is.

    Inside of a process group all ranks call it, and it uses those. Else it starts `ranks` processes on this host.

    Args:
        factory: Makes model, optimizer, batches and loss; see `verify_subject`, and `verify_pipeline` for pipelines. In
            processes of their own it is found by its place, so it has to be at the top of a module then.
        config: Anything `load_config` takes.
        ranks: How many to start; default: those there are, else 2.
        steps: Optimizer steps.
        accumulation: Micro-batches per step and rank. Of pipelines: `pipeline.micro_batches` says it.
        clip_norm: Bound of the gradient norm, or None.
        compute_dtype: What parameters are computed with (bf16 or fp16 with fp32 master weights), None for their own.
        autocast: Dtype of autocast, or None.
        seed: Of the factory; rank r draws from seed + r afterwards.
        tolerance: See `VerifySettings`.
        timeout: Seconds until the processes that were started are given up.

    Raises:
        ValueError: If an argument or the factory is not as described.
        LocalRankError: If a rank that was started failed.
    """
    loaded = config if isinstance(config, ResolvedConfig) else load_config(config)
    options = dict(
        steps=steps, accumulation=accumulation, clip_norm=clip_norm, compute_dtype=compute_dtype, autocast=autocast,
        seed=seed, tolerance=tolerance,
    )  # fmt: skip
    VerifySettings(**options)  # type: ignore[arg-type]  # refused here, not on some rank
    if has_process_group() or ranks == 1:
        if ranks not in (None, world_size()):
            raise ValueError(f"ranks={ranks}, but this process group has {world_size()}: leave the argument out")
        return verify_here(factory, loaded, VerifySettings(**options, device=place_to_train(1)))  # type: ignore[arg-type]
    if isinstance(loaded, ResolvedConfig):
        raise ValueError("a resolved config is for the ranks there are: give the config itself, or start ranks before")
    return verify_on_new_ranks(place_of(factory), loaded, options, 2 if ranks is None else ranks, timeout)


def verify_on_new_ranks(
    factory: str, config: Any, options: dict[str, Any], ranks: int, timeout: float = 1800.0
) -> VerifyReport:
    """Start ranks on this host and let them verify; see `verify` for the arguments."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; accepted: 1 or more")
    place, attribute = check_place(factory)
    if place.endswith(".py"):
        factory = f"{os.path.abspath(os.path.expanduser(place))}:{attribute}"
    backend = "nccl" if place_to_train(ranks).type == "cuda" else "gloo"
    call = (factory, config, options, ranks)
    reports = run_local_ranks(f"{__name__}:_on_rank", call, ranks, timeout=timeout, backend=backend)
    found: VerifyReport = reports[0]
    return found


def _on_rank(factory: str, config: Any, options: dict[str, Any], ranks: int) -> VerifyReport:
    return verify_here(factory, config, VerifySettings(**options, device=place_to_train(ranks)))


def verify_here(
    factory: Factory, config: Any, settings: VerifySettings, run_class: Callable[..., ShardedRun] | None = None
) -> VerifyReport:
    """Verify on the ranks of this process group, or on this process alone. A collective.

    Args:
        factory: Makes what is trained; called once on every rank, and for each reference run. Of pipelines: its layers.
        config: A config, or a resolved one.
        settings: How to train.
        run_class: What trains the sharded side: `ShardedRun` or a subclass; of pipelines, `PipelineRun` or one.

    Raises:
        ValueError: See `verify`.
    """
    resolved = config if isinstance(config, ResolvedConfig) else resolve(config, world_size())
    with kept_random_state():
        if resolved.config.pipeline.stages > 1:
            from zero_strategy.verify.pipeline import PipelineVerification  # not for everybody

            return PipelineVerification(factory, resolved, settings, run_class).run()
        return Verification(factory, resolved, settings, run_class or ShardedRun).run()
