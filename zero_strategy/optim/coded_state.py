"""States of 8 bits as an optimizer keeps them, and their way from and to states of 32 bits.

    32 bits     exp_avg          float32, of the parameter's shape
    8 bits      exp_avg_codes    uint8, of the parameter's shape
                exp_avg_scale    float32, (ceil(numel / 256),): one for each block of the flattened parameter

The keys differ so that no code of 32-bit states can take codes for numbers. A state of the other form is converted by
the step, the load or the attachment that finds it: codes are decoded exactly, float32 states are rounded to codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zero_strategy.ops.dynamic_codes import BLOCK, blocks_of, decode, encode

SIGNED: Mapping[str, bool] = {"exp_avg": True, "exp_avg_sq": False, "momentum_buffer": True}
"""States that can have 8 bits, and whether by the signed map."""
_CODES, _SCALE = "_codes", "_scale"


def codes_key(key: str) -> str:
    """The key of a state's codes."""
    return key + _CODES


def scale_key(key: str) -> str:
    """The key of a state's scales."""
    return key + _SCALE


SCALES = frozenset(map(scale_key, SIGNED))
"""Keys of states with a value for each block."""
_ALL = SCALES | frozenset(map(codes_key, SIGNED))


def is_coded_key(key: str) -> bool:
    """True if it is the key of codes or scales."""
    return key in _ALL


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """One of these states; of one with 8 bits, asked for by the key of 32, what the codes stand for. None: no such."""
    if key in values or codes_key(key) not in values:
        return values.get(key)
    return decode(values[codes_key(key)], values[scale_key(key)], signed=SIGNED[key])


def blocks_within(start: int, stop: int) -> tuple[int, int]:
    """First and one-past-last block of those that begin inside of elements [start, stop)."""
    return blocks_of(start), blocks_of(stop)


def fresh(like: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of zeros for a tensor."""
    codes = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
    return codes, torch.zeros(blocks_of(like.numel()), device=like.device)


def in_form(values: Mapping[str, Any], keys: Iterable[str], *, coded: bool) -> dict[str, Any]:
    """States of a whole parameter, or of a piece of whole blocks, in the form that is wanted.

    Args:
        values: By key; nothing is changed in place.
        keys: Those that can have 8 bits (`UpdateRule.coded_states`).
        coded: Whether they shall.

    Raises:
        ValueError: If codes and scales do not fit each other.
    """
    found = dict(values)
    for key in keys if coded else SIGNED:
        if coded and isinstance(value := found.get(key), Tensor):
            del found[key]
            found[codes_key(key)], found[scale_key(key)] = encode(value.float().contiguous(), signed=SIGNED[key])
        elif not coded and codes_key(key) in found:
            codes, scale = found.pop(codes_key(key)), found.pop(scale_key(key), None)
            if scale is None:
                raise ValueError(f"a state has {codes_key(key)!r} and no {scale_key(key)!r}")
            found[key] = decode(codes.contiguous(), scale, signed=SIGNED[key])
    return found


def spread(scale: Tensor, numel: int) -> Tensor:
    """Scales as a float32 state with a value for each of `numel` elements, to be put together like any other."""
    return scale.repeat_interleave(BLOCK)[:numel]


def gathered(whole: Tensor) -> Tensor:
    """Scales from the state that `spread` made, put together."""
    return whole.reshape(-1)[::BLOCK].clone()
