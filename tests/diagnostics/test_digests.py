"""Digests that add up: against their formula in Python's integers, over parts, dtypes and changes."""

from __future__ import annotations

import random
from itertools import pairwise
from operator import mul

import pytest
import torch

from zero_strategy.diagnostics.digests import BLOCK, MASK, Digester, factor, mixed, signed, words_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


TABLE = [(mixed(word // 2) | 1) << 32 * (word % 2) for word in range(BLOCK)]


def formula(words: list[int], start: int, salt: int) -> int:
    """Of words with or without a sign; modulo 2^64."""
    total = 0
    for block in range(start // BLOCK, (start + len(words)) // BLOCK + 1):
        first, last = max(block * BLOCK, start), min((block + 1) * BLOCK, start + len(words))
        own = [word & 0xFFFFFFFF for word in words[first - start : max(last, first) - start]]
        total += factor(salt, block) * sum(map(mul, own, TABLE[first - block * BLOCK :]))
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_its_formula(dtype: torch.dtype) -> None:
    values = (torch.arange(301) * 7919 % 251 - (0 if dtype in (torch.uint8, torch.bool) else 100)).to(dtype)
    per = 2 if dtype.itemsize == 8 else 1
    for start in (0, 5, 6, BLOCK // per - 17):
        found = int(Digester(torch.device("cpu")).of(values, start, 99))
        assert found == signed(formula(words_of(values).tolist(), start * per, 99))


def test_digests_of_parts_add_up_to_that_of_the_whole() -> None:
    digester, rng = Digester(torch.device("cpu")), random.Random(1)
    values = torch.randn(9 * BLOCK + 123, generator=torch.Generator().manual_seed(0))
    whole = int(digester.of(values, 0, 5))
    assert whole == signed(formula(values.view(torch.int32).tolist(), 0, 5))
    for parts in (2, 3, 7):
        cuts = [0, *sorted(rng.randrange(values.numel()) for _ in range(parts - 1)), values.numel()]
        each = [int(digester.of(values[low:high], low, 5)) for low, high in pairwise(cuts)]
        assert sum(each) & MASK == whole & MASK


def test_a_change_of_one_bit_or_of_places_changes_a_digest() -> None:
    digester, rng = Digester(torch.device("cpu")), random.Random(2)
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    whole = int(digester.of(values, 0, 5))
    for _ in range(40):
        other, place, bit = values.clone(), rng.randrange(values.numel()), rng.randrange(31)
        other.view(torch.int32)[place] ^= 1 << bit
        found = int(digester.of(other, 0, 5))
        assert found != whole and ((found ^ whole) & 0xFFFFFFFF or place % 2)
    swapped = values.clone()
    swapped[[3, 77777]] = values[[77777, 3]]
    negative = int(digester.of(-values, 0, 5))
    assert negative != whole  # an even number of signs
    assert int(digester.of(swapped, 0, 5)) != whole
    assert int(digester.of(values, 0, 6)) != whole


def test_a_digest_of_anything_knows_shapes_keys_and_order() -> None:
    digester, x = Digester(torch.device("cpu")), torch.arange(6)
    given = [x, x.view(2, 3), [x, 1.5], [1.5, x], {"a": x}, {"b": x}, "x", x.float(), torch.nn.ReLU()]
    found = [int(digester.of_any(value, 0)) for value in given]
    assert len(set(found)) == len(found)
    assert found == [int(digester.of_any(value, 0)) for value in given]
    assert found[0] == int(digester.of_any(((x, 3), {}), 0))  # batches are counted by rank
