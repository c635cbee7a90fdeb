"""Where settings are read from: files, mappings, Hydra nodes, presets. Each becomes a `Layer`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_strategy.runtime.regular_files import read_text

from .rules import wrong_type
from .section import Section

_PRESETS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_offload": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "zero3_offload": {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "zero3_nvme": {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
}
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
    if "nvme" in name and (paths := nvme_paths()):
        made["offload"]["nvme_path"] = paths
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

    path, shown = Path(source).expanduser(), os.fspath(source)
    if not path.exists():
        hint = f" ({shown!r} is a strategy name; as a config it is {_PRESETS[shown]})" if shown in _PRESETS else ""
        raise FileNotFoundError(errno.ENOENT, f"no config file{hint}", shown)
    origin = f"user: {shown}"
    try:
        text = read_text(path)
        # PyYAML tells the kind of document: OmegaConf would read the bare word `foo` as {foo: null}.
        document = yaml.compose(text)
        if document is not None and not isinstance(document, yaml.MappingNode):
            raise TypeError(f"the config file {shown} holds a {document.id}; expected a mapping of settings")
        node = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"the config file {shown} cannot be read as YAML: {error}") from error
    return Layer(_plain_mapping(node, origin), origin)


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
    except OmegaConfBaseException as error:
        at = error.full_key or key or "the config"
        raise ValueError(f"{at} [{origin}] cannot be resolved: {error.msg or error}") from error


def _of_omegaconf(value: Any) -> bool:
    """Whether it is a container of OmegaConf's. There is none before OmegaConf is loaded: 0.1 s for who has another."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def _plain_mapping(source: Any, origin: str) -> Mapping[str, Any]:
    values = plain(source, "", origin)
    if not isinstance(values, Mapping):
        raise TypeError(wrong_type("config", values, "a mapping of settings", origin))
    return values
