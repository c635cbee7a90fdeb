"""Sources of settings: files, mappings, Hydra nodes, presets; and what to say about an unknown key.

The message for an unknown key says which framework owns it, or what was probably meant.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_strategy.config.bounds import MOST_BYTES, check_yaml
from zero_strategy.config.section import Section, from_origin, is_section, typed_fields, wrong_type
from zero_strategy.runtime.regular_files import read_text
from zero_strategy.runtime.shown import shown

_PRESETS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero_auto": {"auto": {"enabled": True}},
    "zero2_offload": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "zero3_offload": {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "zero3_nvme": {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
}
_ON_DRIVES = ("zero3_nvme", "zero_auto")
"""Names that use drives, or may."""
NVME_PATH = "ZERO_STRATEGY_NVME_PATH"
"""Environment variable with the directories that a name such as "zero3_nvme" uses, separated as in PATH."""


class Layer(NamedTuple):
    """Settings from one place. Of several layers the later ones win, key by key."""

    values: Mapping[str, Any]
    """Nested mappings of settings."""
    origin: str
    """Where they came from, such as ``user: zero.yaml`` or ``Trainer(strategy="zero2")``."""
    spells_defaults: bool = False
    """True if the source holds all keys, set or not (a structured config): values equal to the default then
    count as default."""
    is_deepspeed: bool = False
    """True if the values are those of DeepSpeed's JSON."""


def preset(name: str) -> dict[str, Any]:
    """The settings that a strategy name such as ``"zero2"`` stands for, as a fresh mapping.

    Raises:
        ValueError: If there is no such name.
    """
    if name not in _PRESETS:
        raise ValueError(f"unknown strategy name {name!r}; accepted: {', '.join(map(repr, _PRESETS))}")
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in _PRESETS[name].items()}
    if name in _ON_DRIVES and (paths := nvme_paths()):
        made.setdefault("offload", {})["nvme_path"] = paths
    return made


def nvme_paths() -> list[str]:
    """The directories that the environment variable names."""
    return [path for path in os.environ.get(NVME_PATH, "").split(os.pathsep) if path]


def read_mapping(source: Mapping[str, Any]) -> Layer:
    """Makes a layer of a plain mapping or of a DictConfig, whose interpolations are resolved."""
    if not _of_omegaconf(source):
        return Layer(source, "user: mapping")
    from omegaconf import OmegaConf

    origin, node_type = "user: DictConfig", OmegaConf.get_type(source)
    structured = isinstance(node_type, type) and issubclass(node_type, Section)
    return Layer(_plain_mapping(source, origin), origin, spells_defaults=structured)


def read_file(source: str | os.PathLike[str]) -> Layer:
    """Makes a layer of a YAML file. Interpolations, such as ``${oc.env:NAME}``, are resolved.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If the file holds something other than a mapping.
        ValueError: If it is no regular file, no text in UTF-8 or no valid YAML, or an interpolation cannot be resolved.
    """
    # PyYAML is what omegaconf itself reads files with.
    import yaml  # type: ignore[import-untyped, unused-ignore]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path, name = Path(source).expanduser(), os.fspath(source)
    if not path.exists():
        hint = f" ({name!r} is a strategy name; as a config it is {_PRESETS[name]})" if name in _PRESETS else ""
        raise FileNotFoundError(errno.ENOENT, f"no config file{hint}", name)
    origin = f"user: {shown(name)}"
    text = read_text(path, MOST_BYTES)
    try:
        check_yaml(text)
        # PyYAML tells the kind of document: OmegaConf would read the bare word `foo` as {foo: null}.
        document = yaml.compose(text)
        if document is not None and not isinstance(document, yaml.MappingNode):
            raise TypeError(f"the config file {shown(name)} holds a {document.id}; expected a mapping of settings")
        return Layer(_plain_mapping(OmegaConf.create(text), origin), origin)
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        if str(error).startswith("the config [") or origin in str(error):
            raise
        raise ValueError(f"the config file {shown(name)} cannot be read as YAML: {error}") from error


def plain(value: Any, key: str, origin: str) -> Any:
    """Turns an OmegaConf container into dicts and lists, interpolations resolved; other values pass through.

    Raises:
        ValueError: If a mandatory value is missing or an interpolation cannot be resolved.
    """
    if not _of_omegaconf(value):
        return value
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except RecursionError:
        raise ValueError(f"{key or 'the config'} [{origin}] cannot be resolved: it is nested too deeply") from None
    except OmegaConfBaseException as error:
        at = error.full_key or key or "the config"
        raise ValueError(f"{at} [{origin}] cannot be resolved: {error.msg or error}") from error


def _of_omegaconf(value: Any) -> bool:
    """True if it is a container of OmegaConf's. There is none before OmegaConf is loaded: 0.1 s for who has another."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def _plain_mapping(source: Any, origin: str) -> Mapping[str, Any]:
    values = plain(source, "", origin)
    if not isinstance(values, Mapping):
        raise TypeError(wrong_type("config", values, "a mapping of settings", origin))
    return values


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
    "torch_autocast": _PRECISION,
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
    where = f"'{section.prefix}{shown(name)}'{from_origin(origin)}"
    if "." in name:
        return f"dotted key {where} is not accepted; nest it: {nested(section.prefix + name)}"
    owned = owned_key(section, name, origin)
    if owned is not None:
        return owned
    meant = _nearest(root, section, name)
    # A mapping under this name is likelier meant for the optimizer itself: we have the form of its states alone.
    if section.prefix == "optimizer." and not (meant or "").startswith(section.prefix):
        owned = owned_key(root, "optimizer", origin) or ""
        return f"{owned}. Settings of ours there: {', '.join(field.name for field, _ in typed_fields(section))}"
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
    """Owner of a key that is no setting, and where to set it; empty if nobody else does."""
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
    # Siblings first: a misspelt name is likelier than a misplaced one, unless the name is right elsewhere.
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
    """True if a key is a setting of an earlier version, with a value that may be left out; says so in a warning.

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
