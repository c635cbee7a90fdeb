"""The code of changes: exact for any bits, small where little changes, and refused where it is damaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zero_strategy.comm.delta import apply, encode, words_of

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]


def values_of(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Any bits, NaNs and infinities among them."""
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    return bits.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.3, 1.0])
def test_changes_are_exact(dtype: torch.dtype, share: float) -> None:
    for numel in (1, 7, 5000):
        old, other = values_of(dtype, numel, 1), values_of(dtype, numel, 2)
        chosen = torch.rand(numel, generator=torch.Generator().manual_seed(3)) < share
        new = torch.where(chosen, other, old) if numel > 1 or share else old
        payload = encode(words_of(old), words_of(new))
        found = old.clone()
        changed = apply(payload, words_of(found))
        assert np.array_equal(words_of(found), words_of(new))
        assert changed == int((words_of(old) != words_of(new)).sum())
        assert len(payload) <= 64 + new.nbytes and (changed > 0) == (len(payload) > 0)


@pytest.mark.parametrize("share, bits", [(0.011, 0.4), (0.069, 1.6), (0.35, 6.0)])
def test_small_steps_take_few_bits(share: float, bits: float) -> None:
    """Changes of the last bit, as steps of fine-tuning make them."""
    chance = torch.Generator().manual_seed(0)
    old = torch.randn(200_000, generator=chance).bfloat16()
    new = old.clone()
    chosen = torch.rand(old.shape, generator=chance) < share
    words_of(new)[chosen.numpy()] += 1
    assert 8 * len(encode(words_of(old), words_of(new))) <= bits * old.numel()


def test_damage_is_refused_and_changes_nothing() -> None:
    old, new = torch.zeros(3000).bfloat16(), torch.zeros(3000).bfloat16()
    new[::300] = 1.0
    new[5] = 2.0
    payload, other = encode(words_of(old), words_of(new)), words_of(torch.zeros(2999).bfloat16())
    with pytest.raises(ValueError, match="for 3000 elements of 2 bytes, where 2999"):
        apply(payload, other)
    for damaged in (payload[:10], payload[:-4], payload[:64] + b"\xff" * 8 + payload[72:]):
        found = old.clone()
        with pytest.raises(ValueError, match="payload"):
            apply(damaged, words_of(found))
        assert torch.equal(found, old)
    chance = np.random.default_rng(0)
    for _ in range(300):  # any flipped byte: refused, or other values of the same number (digests tell those)
        flipped = bytearray(payload)
        flipped[chance.integers(len(flipped))] ^= 1 << chance.integers(8)
        found = old.clone()
        try:
            apply(bytes(flipped), words_of(found))
        except ValueError:
            assert torch.equal(found, old)
