"""Digests of tensors that add up: those of a tensor's parts, on whatever ranks, sum to that of the whole, modulo 2^64.

    digest = sum over pairs of words p[i] of  p[i] * r[i mod 32768] * m(salt, i div 32768)        modulo 2^64

A word is 32 bits of memory (an element of 16 or 8 bits is one word, of 64 bits two). A pair is the word of an even
place in the whole tensor and that of the odd place after it, the higher one; r is a fixed table of odd numbers, m an
odd number for each block, and the salt the tensor's name.

Factors are odd, so a change of one word always changes the digest. Of other changes one in 2^32 does not, or fewer;
only changes that are confined to odd places, and to the highest k bits there, cancel more easily, one in 2^k. Sums of
integers have no order: threads, devices and divisions of the elements give the same bits. Memory is read once, and
nothing is widened or written.

The numbers come from SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1
PAIRS = 1 << 15
BLOCK = 2 * PAIRS
"""Words that share a factor."""
_DEVICE_ROWS = 64
"""Blocks at a time on a GPU, where products take memory."""


def mixed(number: int) -> int:
    """The output of SplitMix64 for a state: 64 bits."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def salt_of(*parts: str | int) -> int:
    """A salt from names and numbers."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def factor(salt: int, block: int) -> int:
    """The odd factor of a block, as a signed number of 64 bits."""
    return signed(mixed(salt ^ mixed(block)) | 1)


def signed(number: int) -> int:
    """The number of int64 with these 64 bits."""
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


def short(number: int) -> int:
    """32 bits of a digest, for what is compared and not added up further."""
    return (number ^ (number >> 32)) & 0xFFFFFFFF


def words_of(values: Tensor) -> Tensor:
    """The memory of a tensor as int32, flat; elements of 8 or 16 bits are widened, a copy."""
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.element_size() >= 4:
        return flat.contiguous().view(torch.int32)
    narrow = torch.uint8 if flat.element_size() == 1 else torch.int16
    return flat.contiguous().view(narrow).to(torch.int32)


def words_per_element(dtype: torch.dtype) -> int:
    """Words that `words_of` makes of an element."""
    return max(1, dtype.itemsize // 4)


def leaves(value: Any) -> Iterator[Any]:
    """Tensors, texts and floating-point numbers in lists, tuples and mappings, in order; keys are texts.

    Integers are left out, for they may count a rank's batches, and of other objects there is the name of their class.
    """
    if isinstance(value, Mapping):
        for key in value:
            yield str(key)
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, (Tensor, str, bytes, float)):
        yield value
    elif not isinstance(value, int) and value is not None:
        yield type(value).__name__


class Digester:
    """Digests of tensors on one device.

    Args:
        device: Where they are.

    Attributes:
        device: As above.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._table = _table().to(device)

    def of(self, values: Tensor, start: int, salt: int) -> Tensor:
        """The digest of a part of a tensor.

        Args:
            values: Elements of it, one after the other; any shape and dtype.
            start: Place of the first of them.
            salt: Of the whole tensor.

        Returns:
            0-d int64, on the device.
        """
        words, at = words_of(values).to(self.device), start * words_per_element(values.dtype)
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        if at % 2 and words.numel():
            total += (words[0].to(torch.int64) << 32) * self._factor_of(at, salt)
            words, at = words[1:], at + 1
        if words.numel() % 2:
            low = words[-1].to(torch.int64) & 0xFFFFFFFF
            total += low * self._factor_of(at + words.numel() - 1, salt)
            words = words[:-1]
        if words.storage_offset() % 2 or words.data_ptr() % 8:
            words = words.clone()
        return total + self._of_pairs(words.view(torch.int64), at // 2, salt)

    @staticmethod
    def _factor_of(word: int, salt: int) -> int:
        block, inner = divmod(word // 2, PAIRS)
        return signed((mixed(inner) | 1) * factor(salt, block))

    def _of_pairs(self, pairs: Tensor, at: int, salt: int) -> Tensor:
        """The digest of pairs, of which the first is number `at` of the tensor."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        done = 0
        while done < pairs.numel():
            block, inner = divmod(at + done, PAIRS)
            if inner or pairs.numel() - done < PAIRS:  # the ends
                count = min(PAIRS - inner, pairs.numel() - done)
                part = pairs[done : done + count]
                total += self._dot(part, self._table[inner : inner + count]) * factor(salt, block)
            else:
                rows = (pairs.numel() - done) // PAIRS
                count = rows * PAIRS
                sums = self._row_sums(pairs[done : done + count].view(rows, PAIRS))
                factors = torch.tensor([factor(salt, block + row) for row in range(rows)], dtype=torch.int64)
                total += (sums * factors.to(self.device)).sum()
            done += count
        return total

    def of_rows(self, rows: Tensor) -> Tensor:
        """Digests of rows of words, without their factors.

        Args:
            rows: (rows, words) int32; at most `PAIRS` words.

        Returns:
            (rows,) int64.
        """
        return (rows.to(torch.int64) * self._table[: rows.shape[1]]).sum(1)

    def of_any(self, value: Any, salt: int) -> Tensor:
        """The digest of the `leaves` of a value; 0-d int64, on the device."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for number, leaf in enumerate(leaves(value)):
            own = salt_of(salt, number)
            if isinstance(leaf, Tensor):
                shape = signed(salt_of(own, *leaf.shape))
                total += self.of(_dense(leaf), 0, own) + shape
            else:
                total += signed(salt_of(own, repr(leaf)))
        return total

    def _dot(self, pairs: Tensor, factors: Tensor) -> Tensor:
        # Products of vectors of integers are there for the host alone.
        return torch.dot(pairs, factors) if self.device.type == "cpu" else (pairs * factors).sum()

    def _row_sums(self, rows: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return torch.mv(rows, self._table)
        return torch.cat([(part * self._table).sum(1) for part in rows.split(_DEVICE_ROWS)])


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _table() -> Tensor:
    """The outputs of SplitMix64 for the first numbers, made odd; (PAIRS,) int64."""
    state = np.arange(PAIRS, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    made = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(made.view(np.int64))
