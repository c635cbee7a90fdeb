"""Frozen weights that a checkpoint names by their digest instead of holding them.

The digest is linear in the elements, so that ranks can add up those of their slices, whatever the slices are:

    digest = sum over elements i of (bits(i) + 1) * w(i mod 65536) * m(i div 65536)    modulo 2^64

with `w` and `m` odd numbers from the splitmix64 sequence (Steele, Lea, Flood, OOPSLA 2014). It tells other weights from
the right ones; it is no protection against somebody who wants to deceive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_strategy.checkpoint.contents import Catalog, catalog_of

if TYPE_CHECKING:
    from zero_strategy.checkpoint.state_reader import StateReader
    from zero_strategy.train_state import TrainState


KEY = "references"
"""In the engine's entry of the manifest's user metadata: name -> {"dtype", "shape", "digest"}."""
_BLOCK = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1


def digest(data: Tensor, start: int) -> int:
    """The digest's part of elements [start, start + n) of a tensor.

    Args:
        data: 1-D, any dtype of at most 8 bytes, any device.
        start: Index of its first element in the row-major flattened tensor.
    """
    bits = data.detach().contiguous().view(_INTEGERS[data.element_size()])
    weights = _weights(data.device)
    total, at = 0, 0
    while at < bits.numel():
        block, inner = divmod(start + at, _BLOCK)
        count = min(_BLOCK - inner, bits.numel() - at)
        part = ((bits[at : at + count].to(torch.int64) + 1) * weights[inner : inner + count]).sum()
        total += (int(part) & _MASK) * (_splitmix(block) | 1)
        at += count
    return total & _MASK


def own_digests(engine: TrainState, names: Collection[str]) -> dict[str, int]:
    """This rank's parts of the digests of parameters; those of the first replica count."""
    if engine.mesh.replicate.rank:
        return {}
    found: dict[str, int] = {}
    for bucket in engine.model.buckets:
        for piece in bucket.slice_pieces:
            name, part = bucket.names[piece.index], bucket.parts[piece.index]
            if name in names and part.counts:
                values = bucket.shard.read(piece.offset, piece.offset + piece.numel)
                spans = part.spans(piece.start, piece.stop)
                parts = (digest(values[s.local - piece.start :][: s.stop - s.start], s.start) for s in spans)
                found[name] = sum(parts) & _MASK
    return found


def total(parts: list[dict[str, int]], names: Collection[str]) -> dict[str, str]:
    """The digests, 16 hexadecimal digits each."""
    return {name: f"{sum(part.get(name, 0) for part in parts) & _MASK:016x}" for name in sorted(names)}


def describe(whole: Catalog, digests: Mapping[str, str]) -> dict[str, Any]:
    """The manifest's entry."""
    return {
        spec.name: {
            "dtype": str(spec.dtype).removeprefix("torch."),
            "shape": list(spec.shape),
            "digest": digests[spec.name],
        }
        for spec in whole.weights
        if spec.name in digests
    }


def references_of(reader: StateReader) -> dict[str, Any]:
    """References of a checkpoint."""
    if not reader.has_manifest:
        return {}
    return dict(reader.manifest.user.get("zero_strategy", {}).get(KEY, {}))


def check(engine: TrainState, reader: StateReader) -> set[str]:
    """Compare what a checkpoint refers to with what the model holds; a collective if there is anything.

    Returns:
        The names.

    Raises:
        ValueError: On all ranks; listing what the model lacks and what has other values.
    """
    wanted = references_of(reader)
    if not wanted:
        return set()
    here = {spec.name: str(spec.dtype).removeprefix("torch.") for spec in catalog_of(engine).weights}
    missing = sorted(wanted.keys() - here.keys())
    other_dtype = sorted(name for name, entry in wanted.items() if here.get(name, entry["dtype"]) != entry["dtype"])
    names = wanted.keys() - set(missing) - set(other_dtype)
    found = total(engine.mesh.world_group.control.all_gather_objects(own_digests(engine, set(names))), set(names))
    different = sorted(name for name in names if found[name] != wanted[name]["digest"])
    problems = {"missing in the model": missing, "of another dtype": other_dtype, "with other values": different}
    if any(problems.values()):
        lines = [f"\n  {what} ({len(n)}): " + ", ".join(n) for what, n in problems.items() if n]
        raise ValueError(
            f"{reader.directory} does not hold the frozen weights but refers to them (checkpoint.frozen: reference), "
            "and those of the model are not the same. Load the base weights that it was trained with into the model "
            "first." + "".join(lines)
        )
    return set(wanted)


def _splitmix(index: int) -> int:
    z = (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _weights(device: torch.device) -> Tensor:
    """w(0), w(1), ...: int64 that holds the 64 bits."""
    z = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
