"""Settings that the Trainer owns, as facts for the config's explanation: value and the flag it was set by."""

from __future__ import annotations

from typing import Any

from zero_strategy.config import Fact, batch_fact


def trainer_facts(trainer: Any, world_size: int, tensor: int = 1) -> dict[str, Fact]:
    """The Trainer's settings that decide how steps are taken.

    Args:
        trainer: A Trainer of either namespace.
        world_size: Number of ranks.
        tensor: Those of them that see the same data.
    """
    devices, nodes = trainer.num_devices, trainer.num_nodes
    facts = {
        "world_size": Fact(world_size, f"Trainer(devices={devices}, num_nodes={nodes})"),
        "accumulate_grad_batches": _flag("accumulate_grad_batches", trainer.accumulate_grad_batches),
        "gradient_clip_val": _flag("gradient_clip_val", trainer.gradient_clip_val),
        "gradient_clip_algorithm": _flag("gradient_clip_algorithm", _text(trainer.gradient_clip_algorithm)),
        "training_precision": _flag("precision", trainer.precision),
        "max_steps": _flag("max_steps", trainer.max_steps),
        "max_epochs": _flag("max_epochs", trainer.max_epochs),
    }
    if devices * nodes != world_size:
        facts.pop("world_size")
    micro_batch = _micro_batch(trainer)
    if micro_batch is not None:
        facts["micro_batch_per_rank"] = Fact(micro_batch, "train_dataloader.batch_size")
        copies = max(1, world_size // tensor)
        facts["samples_per_step"] = batch_fact(copies, micro_batch, trainer.accumulate_grad_batches)
    return facts


def _flag(name: str, value: Any) -> Fact:
    return Fact(value, f"Trainer({name}={value!r})")


def _text(algorithm: Any) -> str | None:
    return None if algorithm is None else str(getattr(algorithm, "value", algorithm))


def _micro_batch(trainer: Any) -> int | None:
    """Batch size of the training loader, where there is one loader that has a batch size."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None
