"""What to say about a key that is no setting: who owns it, or what was probably meant."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator

from .rules import from_origin
from .section import Section, is_section, typed_fields

_ACCUMULATION = (
    "gradient accumulation is owned by the training loop; set Trainer(accumulate_grad_batches=...) or "
    "Accelerator(gradient_accumulation_steps=...)"
)
_CLIPPING = (
    "gradient clipping is owned by the training loop; set Trainer(gradient_clip_val=...), or call "
    "fabric.clip_gradients(...) or accelerator.clip_grad_norm_(...)"
)
_BATCH = (
    "the batch size is owned by the data loader; set DataLoader(batch_size=...), the micro-batch of one "
    "rank, from which the samples per step follow"
)
_PRECISION = (
    "the precision of the computation is owned by the framework; set Trainer(precision=...) or "
    "Accelerator(mixed_precision=...)"
)
_OPTIMIZER = (
    "the optimizer and its settings are owned by your code; set them in configure_optimizers, or pass the "
    "optimizer to accelerator.prepare(...)"
)
_SCHEDULER = (
    "the learning rate scheduler is owned by your code; return it from configure_optimizers, or pass it to "
    "accelerator.prepare(...)"
)
_WORLD = (
    "the number of ranks is owned by the launcher; set Trainer(devices=..., num_nodes=...) or the options of "
    "torchrun or accelerate launch"
)

_UNUSED = (
    "it is an option of DistributedDataParallel, and nothing here needs it: parameters that a step does not use are "
    "noticed by themselves; leave it out"
)
_DDP = (
    "it is an option of DistributedDataParallel, which is not used here; leave it out (gradients are reduced in the "
    "buckets of units, see 'units')"
)

_OWNERS = {
    "find_unused_parameters": _UNUSED,
    "ddp_find_unused_parameters": _UNUSED,
    "static_graph": _UNUSED,
    "gradient_as_bucket_view": _DDP,
    "bucket_cap_mb": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_comm_hook": _DDP,
    "gradient_accumulation_steps": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "gradient_clipping": _CLIPPING,
    "gradient_clip_val": _CLIPPING,
    "max_grad_norm": _CLIPPING,
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "batch_size": _BATCH,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "mixed_precision": _PRECISION,
    "precision": _PRECISION,
    "lr": _OPTIMIZER,
    "learning_rate": _OPTIMIZER,
    "weight_decay": _OPTIMIZER,
    "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULER,
    "lr_scheduler": _SCHEDULER,
    "world_size": _WORLD,
}

DEEPSPEED_KEY = "zero_optimization"
"""The key that gives a DeepSpeed JSON away."""


_REMOVED: dict[str, tuple[tuple[object, ...], str]] = {
    "offload.early_step": (
        ("off", "auto"),
        "optimizer steps are no longer begun while backward runs: where gradients are clipped that gained nothing",
    ),
}
"""Settings of earlier versions: the values that ask for what is done now, and why others are not accepted."""


def unknown_key(root: type[Section], section: type[Section], name: str, origin: str) -> str:
    """Message for a name that a section does not have.

    Args:
        root: The root of the config, in which similar names are looked for.
        section: The section in which the name was used.
        name: The name.
        origin: Where it was used.
    """
    where = f"'{section.prefix}{name}'{from_origin(origin)}"
    if "." in name:
        return f"dotted key {where} is not accepted; nest it: {nested(section.prefix + name)}"
    owned = owned_key(section, name, origin)
    if owned is not None:
        return owned
    meant = _nearest(root, section, name)
    if meant is None:
        names = ", ".join(field.name for field, _ in typed_fields(section))
        place = f"'{section.prefix[:-1]}'" if section.prefix else "the config"
        return f"unknown key {where}; {place} has: {names}"
    spelled = f", spelled {nested(meant)}" if "." in meant and not section.prefix else ""
    return f"unknown key {where}; did you mean '{meant}'{spelled}?"


def owned_key(section: type[Section], name: str, origin: str) -> str | None:
    """Message for a key that a framework owns; None if nobody else owns it."""
    owner = _OWNERS.get(name)
    return owner and f"'{section.prefix}{name}'{from_origin(origin)} cannot be set here: {owner}"


def owner_of(name: str) -> str:
    """Who owns a key that is no setting, and where to set it; empty if nobody else does."""
    if name == "dataloader_drop_last":
        return "set DataLoader(drop_last=True)"
    return _OWNERS.get(name, "")


def deepspeed_key(origin: str) -> str:
    """Message for DeepSpeed's main section where only settings of ours are read."""
    return (
        f"'{DEEPSPEED_KEY}'{from_origin(origin)} belongs to DeepSpeed's JSON, which is read as a whole: give it as the "
        "config itself, a mapping or a path. Our own spelling is a key at the top level, 'stage: 3'"
    )


def nested(key: str) -> str:
    """A dotted key as nested mappings, valid in Python and in YAML: ``{"mesh": {"shard": ...}}``."""
    spelled = "..."
    for part in reversed(key.split(".")):
        spelled = f'{{"{part}": {spelled}}}'
    return spelled


def _nearest(root: type[Section], section: type[Section], name: str) -> str | None:
    # Neighbours first: a misspelt name is likelier than a misplaced one, unless the name is right elsewhere.
    everywhere = {key.rpartition(".")[2]: key for key in _keys(root)}
    if name in everywhere:
        return everywhere[name]
    siblings = {field.name: section.prefix + field.name for field, _ in typed_fields(section)}
    for names in (siblings, everywhere):
        close = difflib.get_close_matches(name, names, n=1)
        if close:
            return names[close[0]]
    return None


def _keys(section: type[Section]) -> Iterator[str]:
    for field, hint in typed_fields(section):
        yield section.prefix + field.name
        if is_section(hint):
            yield from _keys(hint)


def is_removed(key: str, value: object, origin: str | None) -> bool:
    """Whether a key is a setting of an earlier version, with a value that may be left out; says so in a warning.

    Raises:
        ValueError: If it asks for what is no longer there.
    """
    if key not in _REMOVED:
        return False
    accepted, reason = _REMOVED[key]
    if value not in accepted:
        raise ValueError(f"{key} was removed, and is {value!r}{from_origin(origin)}: {reason}; leave it out")
    warnings.warn(f"{key} was removed{from_origin(origin)}: {reason}; leave it out", UserWarning, stacklevel=2)
    return True
