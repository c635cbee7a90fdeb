"""Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011) in integer tensors: the same bits as cpp/philox.h.

A tensor's element i takes word i % 4 of the block with counter (i / 4, offset), low words first, and key `seed`. So a
mask is a function of seed, offset and index: forward, recomputation and backward agree, for any number of threads and
on every device, and nothing is stored. Two dropouts of one step must differ in `offset` (or `seed`), by any amount.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_strategy.ops.arguments import check_tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


def random_state(seed: int, offset: int = 0) -> Tensor:
    """Seed and offset as the ops take them: int64 of shape (2,), so that a compiled graph does not depend on them.

    Args:
        seed: From -2^63 to 2^64 - 1; taken modulo 2^64.
        offset: Likewise.
    """
    signed = []
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{name} must fit into 64 bits; it is {value}")
        signed.append(value - 2**64 if value >= 2**63 else value)
    return torch.tensor(signed, dtype=torch.int64)


def check_state(state: Tensor) -> None:
    """`state` is what `random_state` returns.

    Raises:
        TypeError, ValueError: If not.
    """
    check_tensor("state", state, dtypes=(torch.int64,), shape=(2,))
    if state.device.type != "cpu":
        raise ValueError(f"state must be on the CPU, not on {state.device}")


def philox_words(state: Tensor, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """The random words of elements 0 to numel - 1, as int64 from 0 to 2^32 - 1."""
    seed, offset = (int(number) for number in state)
    block = torch.arange((numel + 3) // 4, device=device, dtype=torch.int64)
    constants = (torch.full_like(block, part) for part in ((offset & WORD), (offset >> 32) & WORD))
    return torch.stack(philox(block & WORD, block >> 32, *constants, seed=seed), 1).reshape(-1)[:numel]


def philox(a: Tensor, b: Tensor, c: Tensor, d: Tensor, *, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of every counter (a, b, c, d); int64 tensors of 32-bit words."""
    keys = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(10):
        (high, low), (second_high, second_low) = _product(a, _MULTIPLIERS[0]), _product(c, _MULTIPLIERS[1])
        a, b, c, d = second_high ^ b ^ keys[0], second_low, high ^ d ^ keys[1], low
        keys = [(key + step) & WORD for key, step in zip(keys, _STEPS, strict=True)]
    return a, b, c, d


def kept(state: Tensor, p: float, like: Tensor) -> Tensor:
    """Where dropout with probability p keeps an element, in the shape and on the device of `like`."""
    threshold = min(int(p * 2.0**32 + 0.5), WORD)
    return (philox_words(state, like.numel(), like.device) >= threshold).view(like.shape)


def keep_scale(p: float) -> float:
    """What the kept elements are multiplied by, a float32."""
    return 0.0 if p >= 1 else float(torch.tensor(1 / (1 - p), dtype=torch.float32))


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low half of a 64-bit product, without leaving 63 bits."""
    upper, lower = (word >> 16) * factor, (word & 0xFFFF) * factor
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & WORD
