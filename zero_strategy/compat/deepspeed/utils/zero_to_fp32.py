"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights of a checkpoint, ours or DeepSpeed's."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.disk import beside, remove
from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.convert.convert import cast_weights, foreign_format, open_any
from zero_strategy.convert.portable import (
    PortableOptimizer,
    PortableReader,
    PortableState,
    StoredTensor,
    loaded,
    portable_of,
    write_portable,
)
from zero_strategy.runtime.terminal import parse_size

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

_ALL_IN_ONE = 2**62


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Whole weights on the host, floating-point ones in fp32: master weights where there are any.

    Args:
        checkpoint_dir: The folder of checkpoints, or one of them.
        tag: Which; None: what `latest` names.
        exclude_frozen_parameters: Leave out what no optimizer trains; buffers are left out, too.
        lazy_mode: Without effect: tensors are read one after the other.

    Raises:
        ValueError: If there is no such checkpoint, it is damaged, or of no known kind.
    """
    state = _fp32(checkpoint_dir, tag, exclude_frozen_parameters)
    found = {name: loaded(tensor) for name, tensor in state.weights.items()}
    return {**found, **{alias: found[name] for alias, name in state.aliases.items() if name in found}}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load these weights into an ordinary model, moved to the CPU, and return it.

    Raises:
        RuntimeError: If names or shapes differ.
        ValueError: As above.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write these weights as files of a Hugging Face model.

    Args:
        checkpoint_dir: See above.
        output_dir: A folder, which may exist; files of these names in it are replaced.
        max_shard_size: Most bytes of a file; None: all in one.
        safe_serialization: Write `model*.safetensors` instead of `pytorch_model*.bin`.
        tag: See above.
        exclude_frozen_parameters: See above.
    """
    state = _fp32(checkpoint_dir, tag, exclude_frozen_parameters)
    most = _ALL_IN_ONE if max_shard_size is None else parse_size(str(max_shard_size))
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    temporary = beside(output / "weights", uuid.uuid4().hex[:12], "tmp")
    try:
        if safe_serialization:
            write_portable(state, temporary, max_file_bytes=most)
            (temporary / MANIFEST_NAME).unlink()
        else:
            _write_torch(state, temporary, most)
        for file in sorted(temporary.iterdir()):
            os.replace(file, output / file.name)
    finally:
        remove(temporary)


def _fp32(checkpoint_dir: str | os.PathLike[str], tag: str | None, trained_only: bool) -> PortableState:
    path = Path(checkpoint_dir)
    foreign = foreign_format(path)
    if tag is None:
        reader = open_any(path)
    elif foreign is not None and foreign.name == "deepspeed":
        reader = open_any(path, source=foreign.name, tag=tag)
    else:
        reader = open_any(path / tag)
    state = cast_weights(reader.state if isinstance(reader, PortableReader) else portable_of(reader), torch.float32)
    weights = state.weights
    if trained_only:
        trained = {name for optimizer in state.optimizers for name in _trained(optimizer)}
        weights = {name: tensor for name, tensor in weights.items() if name in trained}
    aliases = {alias: name for alias, name in state.aliases.items() if name in weights}
    return PortableState(weights=weights, aliases=aliases)


def _trained(optimizer: PortableOptimizer) -> set[str]:
    """Parameters that it has updated; a frozen one may be in its groups and has no state."""
    held = {name for group in optimizer.param_groups for name in group["params"]}
    stateful = set(optimizer.scalars).union(*(t for kind, t in optimizer.kinds.items() if kind != "master"))
    return held & stateful if stateful else held


def _write_torch(state: PortableState, directory: Path, most: int) -> None:
    directory.mkdir()
    shards = list(_shards(state.weights, most))
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = "pytorch_model.bin"
        if len(shards) > 1:
            file = f"pytorch_model-{number + 1:05d}-of-{len(shards):05d}.bin"
        tensors = {name: loaded(state.weights[name]) for name in names}
        tensors |= {alias: tensors[name] for alias, name in state.aliases.items() if name in tensors}
        torch.save(tensors, directory / file)
        places |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        size = sum(tensor.spec.nbytes for tensor in state.weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(weights: dict[str, StoredTensor], most: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in weights.items():
        if names and size + tensor.spec.nbytes > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.spec.nbytes
    yield names
