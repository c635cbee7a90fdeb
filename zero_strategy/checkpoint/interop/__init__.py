"""Checkpoints of other libraries, in and out.

Each module here has `detect(path: Path) -> bool`, `read(path: Path, **options) -> PortableState`, or
`write(state: PortableState, path: Path, **options) -> None`, or all of them. They are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType

_HERE = "zero_strategy.checkpoint.interop"


@dataclass(frozen=True)
class Format:
    """One foreign format.

    Attributes:
        name: As on the command line.
        module: Where its functions are.
        what: One line for people.
        reads: Whether `read` exists.
        writes: Whether `write` exists.
        whole: Whether it lets its target appear whole or not at all.
    """

    name: str
    module: str
    what: str
    reads: bool = True
    writes: bool = False
    whole: bool = False

    def load(self) -> ModuleType:
        """The module.

        Raises:
            ImportError: If it, or a library that it needs, is missing.
        """
        return import_module(f"{_HERE}.{self.module}")


_ALL = (
    Format("deepspeed-universal", "deepspeed_universal", "DeepSpeed's universal checkpoint", writes=True, whole=True),
    Format("deepspeed", "deepspeed", "a checkpoint of DeepSpeed: any ZeRO stage, pipelines, tensor parallel ranks"),
    Format("accelerate", "accelerate", "a state directory of Accelerate: DDP or FSDP"),
    Format("lightning", "lightning", "a checkpoint of Lightning: .ckpt, or a directory of FSDP (read)", writes=True),
    Format("dcp", "dcp", "a directory of torch.distributed.checkpoint", writes=True),
    Format("torch", "torch_file", "a file of torch.save with a state dict and, maybe, optimizer states", writes=True),
)

FORMATS: Mapping[str, Format] = MappingProxyType({entry.name: entry for entry in _ALL})
"""By name, in the order in which they are detected: one that contains another comes first."""


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: If there is none; lists those there are.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown checkpoint format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def detect(path: Path) -> Format | None:
    """The foreign format that a path has, or None."""
    for entry in _ALL:
        if not entry.reads:
            continue
        try:
            module = entry.load()
        except ModuleNotFoundError as error:
            if error.name != f"{_HERE}.{entry.module}":
                raise
            continue
        if module.detect(path):
            return entry
    return None
