"""Where a layer's dropout masks come from.

A mask is a function of a key, an offset and an element's index (`ops/philox.py`). The key is the config's `seed`; the
offset is drawn from torch's default generator of the CPU, one for each of a layer's three dropouts in every forward. So
`torch.manual_seed` makes a run repeatable whatever the device, a recomputation that restores the generator
(`torch.utils.checkpoint`) meets the same masks, masks do not depend on how many layers a process has built, and nothing
waits for the device. A captured CUDA graph would replay one draw. Inductor draws numbers of its own in compiled code,
as it does for torch's dropout; with its `fallback_random` they are those of eager runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 2**63 - 1


def draw_states(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """States of the dropouts of attention probabilities, attention output and layer output, in this order.

    Args:
        seed: The key, 64 bits with sign.

    Returns:
        Three int64 tensors of shape (2,) on the CPU, as `ops.random_state` makes them.
    """
    offsets = torch.randint(-_LARGEST, _LARGEST, (3, 1), device="cpu")
    states = torch.cat((torch.full_like(offsets, seed), offsets), 1)
    return states[0], states[1], states[2]


def no_states() -> tuple[Tensor, Tensor, Tensor]:
    """The same where nothing is dropped; no number is drawn."""
    state = torch.zeros(2, dtype=torch.int64, device="cpu")
    return state, state, state
