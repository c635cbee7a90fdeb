"""Resolution of a config: values left open are derived, those of the framework are checked.

Settings that were left open are derived; those that a framework owns are read from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zero_strategy.config.schema import DEFAULT_BUDGET, ZeroConfig
from zero_strategy.config.section import DEFAULT, Setting, table

WORLD_SIZE = "world_size"


class Fact(NamedTuple):
    """A value that somebody else owns, and where it was read."""

    value: Any
    """The value."""
    origin: str
    """Where it was read, such as ``Trainer(accumulate_grad_batches=4)``, or ``derived: ...``."""


@dataclass(frozen=True)
class ResolvedConfig:
    """The values that a run uses. Made by `resolve`."""

    config: ZeroConfig
    """The settings. No value is left None."""
    world_size: int
    """Number of ranks."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What the framework owns, by name."""

    @property
    def shard(self) -> int:
        """Ranks that the state is divided among."""
        shard = self.config.mesh.shard
        assert shard is not None, "resolve() derives mesh.shard"
        return shard

    @property
    def gradient_reduction(self) -> str:
        """Time of the reduction of gradients: ``per_step`` or ``per_micro_batch``."""
        reduction = self.config.gradient_reduction
        assert reduction is not None, "resolve() derives gradient_reduction"
        return reduction

    def settings(self) -> Iterator[tuple[str, Setting]]:
        """Yields the full key, value and origin of every setting, of the world size and of the facts."""
        inert = _without_effect(self.config)
        for key, setting in self.config.settings():
            note = f" (no effect: {inert[key]})" if key in inert else ""
            yield key, Setting(setting.value, setting.origin + note)
        yield WORLD_SIZE, Setting(self.world_size, "process group")
        for name, fact in self.facts.items():
            yield name, Setting(fact.value, fact.origin)

    def explain(self) -> str:
        """A table of everything that is in effect: key, value, origin."""
        # A fact about the world size takes the place of our own row.
        return table(dict(self.settings()).items())


def resolve(config: ZeroConfig, world_size: int, facts: Mapping[str, Fact] | None = None) -> ResolvedConfig:
    """Derives what the config leaves open.

    Args:
        config: The config; it is not changed.
        world_size: Number of ranks in the process group.
        facts: What the framework owns, by name. A fact named ``world_size`` says where that number was set.

    Raises:
        TypeError: If a value is not of its declared type.
        ValueError: If a value is not accepted, the mesh does not fit the world size, or a fact contradicts
            the world size or bears the name of a setting.
    """
    _check_count("world_size", world_size)
    if config.auto.enabled:
        raise ValueError(
            f"auto.enabled is True [{config.origin_of('auto.enabled')}], and nothing is chosen here: Trainers, "
            "Accelerate and ZeroEngine choose; elsewhere, as for pipelines, pin what `zero-strategy plan --auto` prints"
        )
    config = deepcopy(config)
    # Fields can be assigned after loading.
    config.check()
    _resolve_mesh(config, world_size)
    if config.gradient_reduction is None:
        reduction = "per_step" if config.stage < 2 else "per_micro_batch"
        config.record("gradient_reduction", reduction, f"derived: stage {config.stage}")
    _resolve_gradients(config)
    _resolve_pipeline(config)
    _check_slots(config, world_size)
    _resolve_watchdog(config)
    if config.activation_checkpointing.budget is None:
        origin = "derived: half, or more where units take more even if all are computed again"
        config.activation_checkpointing.record("budget", DEFAULT_BUDGET, origin)
    facts = {name: Fact(*fact) for name, fact in (facts or {}).items()}
    _check_facts(config, world_size, facts)
    return ResolvedConfig(config, world_size, facts)


def batch_fact(ranks: int, micro_batch: int, accumulation: int) -> Fact:
    """The samples of one optimizer step, from the numbers that make it up.

    Args:
        ranks: Data-parallel ranks.
        micro_batch: Samples that one rank takes in one forward pass.
        accumulation: Micro-batches per optimizer step.
    """
    for name, value in (("ranks", ranks), ("micro_batch", micro_batch), ("accumulation", accumulation)):
        _check_count(name, value)
    samples = ranks * micro_batch * accumulation
    return Fact(samples, f"derived: {ranks} ranks x {micro_batch} x {accumulation}")


def _resolve_mesh(config: ZeroConfig, world_size: int) -> None:
    mesh, stages = config.mesh, config.pipeline.stages
    if mesh.tensor is None:
        mesh.record("tensor", 1, "derived: layers are not divided")
    tensor = mesh.tensor or 1
    if world_size % stages:
        raise ValueError(
            f"pipeline.stages is {stages} [{config.origin_of('pipeline.stages')}]; accepted: a divisor of the world "
            f"size {world_size}: {_divisors(world_size)}"
        )
    world, world_size = world_size, world_size // stages
    size, divided = "world size", f"world size {world}"
    if stages > 1:
        divided += f" / pipeline.stages {stages}"
        size = f"number of data-parallel ranks ({divided})"
    if world_size % tensor:
        raise ValueError(
            f"mesh.tensor is {tensor} [{config.origin_of('mesh.tensor')}]; accepted: a divisor of the {size} "
            f"{world_size}: {_divisors(world_size)}"
        )
    if tensor > 1:
        world_size //= tensor
        divided += f" / tensor {tensor}"
        size = f"number of data-parallel ranks ({divided})"
    _resolve_sequence(config, world_size, size, tensor, stages)
    given = f"mesh.replicate is {mesh.replicate} [{config.origin_of('mesh.replicate')}]"
    if world_size % mesh.replicate:
        raise ValueError(f"{given}; accepted: a divisor of the {size} {world_size}: {_divisors(world_size)}")
    shard = world_size // mesh.replicate
    if mesh.shard is None:
        mesh.record("shard", shard, f"derived: {divided} / replicate {mesh.replicate}")
    elif mesh.shard != shard:
        both = f"mesh.shard is {mesh.shard} [{config.origin_of('mesh.shard')}] and {given}"
        ranks = f"{mesh.shard * mesh.replicate} ranks, but the {size} is {world_size}"
        raise ValueError(f"{both}, {ranks}; accepted: {shard}, None")
    if shard % mesh.expert:
        raise ValueError(
            f"mesh.expert is {mesh.expert} [{config.origin_of('mesh.expert')}]; accepted: a divisor of the {shard} "
            f"ranks that shard: {_divisors(shard)}"
        )


def _resolve_sequence(config: ZeroConfig, ranks: int, size: str, tensor: int, stages: int) -> None:
    mesh = config.mesh
    given = f"mesh.sequence is {mesh.sequence} [{config.origin_of('mesh.sequence')}]"
    if ranks % mesh.sequence:
        raise ValueError(f"{given}; accepted: a divisor of the {size} {ranks}: {_divisors(ranks)}")
    if mesh.sequence > 1 and stages > 1:
        raise ValueError(f"{given}, beside pipeline.stages {stages}: use one of the two, or mesh.tensor")
    if mesh.ulysses is None:
        mesh.record("ulysses", mesh.sequence, "derived: mesh.sequence")
    elif mesh.sequence % mesh.ulysses:
        raise ValueError(
            f"mesh.ulysses is {mesh.ulysses} [{config.origin_of('mesh.ulysses')}]; accepted: a divisor of "
            f"mesh.sequence {mesh.sequence}: {_divisors(mesh.sequence)}"
        )


def check_no_sequence(config: ZeroConfig, who: str) -> None:
    """Raise if ranks are to divide sequences where somebody else hands out samples and computes losses.

    Raises:
        ValueError: Naming the setting and the way out.
    """
    if config.mesh.sequence > 1:
        raise ValueError(
            f"mesh.sequence is {config.mesh.sequence} [{config.origin_of('mesh.sequence')}]: {who} gives every rank "
            "samples of its own; use ZeroEngine, ZeroAccelerator, ZeroTrainer or Lightning, or leave it at 1"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _resolve_gradients(config: ZeroConfig) -> None:
    """The tier of gradients: only reduced ones can leave the device."""
    offload, per_step = config.offload, config.gradient_reduction == "per_step"
    if offload.gradients is None and per_step:
        offload.record("gradients", "none", "derived: those of several micro-batches wait for the step on the device")
    elif offload.gradients is None:
        offload.record("gradients", offload.optimizer, "derived: offload.optimizer")
    elif offload.gradients != "none" and per_step:
        raise ValueError(
            f"offload.gradients is {offload.gradients!r} [{config.origin_of('offload.gradients')}] and "
            f"gradient_reduction is 'per_step' [{config.origin_of('gradient_reduction')}], where gradients of "
            "several micro-batches wait for the step, whole, on the device; use gradient_reduction: per_micro_batch "
            "(the default of stages 2 and 3), or leave offload.gradients out"
        )


def _check_slots(config: ZeroConfig, world_size: int) -> None:
    """Raise if a step of so many slots cannot be computed by these ranks, or not with the same bits."""
    slots, origin = config.reproducible.slots, config.origin_of("reproducible.slots")
    if not slots:
        if config.reproducible.seed is None:  # else rank 0's, which is not known here
            config.reproducible.record("seed", 0, "derived: reproducible.slots is 0")
        return
    ranks = config.mesh.replicate * (config.mesh.shard or 1)
    if slots % ranks:
        raise ValueError(
            f"reproducible.slots is {slots} [{origin}], and {ranks} data-parallel ranks do not divide it; accepted: a "
            f"multiple of the ranks, such as {-(-slots // ranks) * ranks}, or a number of ranks among "
            f"{_divisors(slots)}"
        )
    pipeline = config.pipeline
    if pipeline.stages > 1 and pipeline.micro_batches != slots // ranks:
        raise ValueError(
            f"reproducible.slots is {slots} [{origin}], and pipeline.micro_batches is {pipeline.micro_batches} "
            f"[{config.origin_of('pipeline.micro_batches')}]: micro-batches are slots; leave it out, or set it to "
            f"{slots // ranks}"
        )
    for key, wrong, why in (
        ("mesh.tensor", (config.mesh.tensor or 1) > 1, "parts of a product are summed over these ranks; use stage 3"),
        ("mesh.sequence", config.mesh.sequence > 1, "attention is summed over these ranks; use stage 3, or tiles"),
        ("mesh.expert", config.mesh.expert > 1, "tokens of these ranks come together; use stage 3"),
        (
            "precision.reduce_dtype",
            config.precision.reduce_dtype != "float32",
            "what travels is rounded, and more of it where there are more ranks; use float32",
        ),
        (
            "precision.gradient_dtype",
            config.precision.gradient_dtype != "float32",
            "partial sums are rounded where ranks meet; use float32",
        ),
        ("uneven_batches", config.uneven_batches != "error", "a step has all of its slots; let the sampler fill them"),
    ):
        if wrong:
            value = config.mesh.tensor if key == "mesh.tensor" else dict(config.settings())[key].value
            raise ValueError(f"reproducible.slots is {slots} [{origin}], and {key} is {value!r}: {why}")


_SOON = {"wait_seconds": 0.6, "silence_seconds": 2.0, "unheard_seconds": 5.0}
"""Settings of `watchdog` by which a death is noticed soon."""


def _resolve_watchdog(config: ZeroConfig) -> None:
    """Let a death be noticed soon where others go on after it."""
    if not config.survive.enabled:
        return
    if config.watchdog.mode == "off":
        raise ValueError(
            f"survive.enabled is True [{config.origin_of('survive.enabled')}], and watchdog.mode is 'off' "
            f"[{config.origin_of('watchdog.mode')}]: deaths are what the watchdog finds; leave watchdog out"
        )
    for name, seconds in _SOON.items():
        if config.origin_of(f"watchdog.{name}") == DEFAULT:
            config.watchdog.record(name, seconds, "derived: survive.enabled is True")


_ALL = 1 << 62
"""Bytes: more than there are."""


def _resolve_pipeline(config: ZeroConfig) -> None:
    pipeline = config.pipeline
    if pipeline.chunks is None:
        several = pipeline.stages > 1 and pipeline.schedule in ("interleaved_1f1b", "interleaved_zb", "zbv")
        pipeline.record("chunks", 2 if several else 1, f"derived: pipeline.schedule {pipeline.schedule}")
    if pipeline.micro_batches is None and config.reproducible.slots:  # one stage may be a pipeline, too
        ranks = config.mesh.replicate * (config.mesh.shard or 1)
        each = max(config.reproducible.slots // ranks, 1)
        pipeline.record("micro_batches", each, "derived: reproducible.slots / data-parallel ranks")
    if pipeline.micro_batches is None:
        pipeline.record("micro_batches", pipeline.stages, "derived: pipeline.stages, the fewest that keep all at work")
    if pipeline.gather_bytes is None:
        pipeline.record("gather_bytes", 0 if pipeline.gather == "per_micro_batch" else _ALL, "derived: pipeline.gather")


def _check_facts(config: ZeroConfig, world_size: int, facts: Mapping[str, Fact]) -> None:
    owned = dict(config.settings())
    for name, fact in facts.items():
        if name in owned:
            raise ValueError(f"fact {name!r} [{fact.origin}] is also a setting; a value has one owner")
    stated = facts.get(WORLD_SIZE)
    if stated is not None and stated.value != world_size:
        raise ValueError(f"world_size is {stated.value} [{stated.origin}]; the process group has {world_size} ranks")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected int")
    if value < 1:
        raise ValueError(f"{name} is {value}; accepted: 1 or more")


def _without_effect(config: ZeroConfig) -> dict[str, str]:
    """Settings that the other settings leave without effect, with the reason."""
    inert = {}
    if config.stage != 3:
        reason = f"stage {config.stage} keeps parameters whole"
        inert = {"prefetch": reason, "reshard_after_forward": reason, "reshard_after_backward": reason}
    section = config.activation_checkpointing
    mode = section.mode
    for key in ("every_n", "budget"):
        full = f"activation_checkpointing.{key}"
        if mode != key and config.origin_of(full) != DEFAULT and not section.is_derived(key):
            inert[full] = f"mode is {mode!r}"
    return inert
