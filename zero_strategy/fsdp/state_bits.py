"""Choice of the parameters whose optimizer states have 8 bits, and what that asks of the layout.

A state of 8 bits has a scale for each block of 256 elements (`ops.dynamic_codes`), counted in the flattened parameter.
Where the setting is on, every parameter and every slice begins at a multiple of 256 elements of its bucket. So each cut
of a parameter between ranks lies between two blocks, and no number of ranks changes a block.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from zero_strategy.ops.dynamic_codes import BLOCK

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig

LEAST_NUMEL = 4096
"""Elements of a whole parameter from which on its states have 8 bits, as in bitsandbytes: smaller ones save nothing."""


def block_of(config: ZeroConfig) -> int:
    """Elements at whose multiples parameters and slices of a layout begin; 1: the setting asks for nothing."""
    return BLOCK if config.optimizer.state_bits == 8 else 1


def may_be_coded(config: ZeroConfig, name: str, numel: int) -> bool:
    """True if the states of a parameter may have 8 bits: it is large enough, and no pattern excepts it.

    Args:
        config: Its `optimizer.keep_32_bits` has the patterns.
        name: Of the parameter.
        numel: Elements of all of it, whatever a rank has of it.
    """
    return numel >= LEAST_NUMEL and not any(fnmatchcase(name, pattern) for pattern in config.optimizer.keep_32_bits)


def is_coded(asked: int | None, setting: int, numel: int) -> bool:
    """True if the states of a parameter have 8 bits.

    Args:
        asked: `state_bits` of its param group; None: the setting decides.
        setting: `optimizer.state_bits`, or 32 for a parameter that `may_be_coded` excepts.
        numel: Elements of all of it.
    """
    return numel >= LEAST_NUMEL and (setting if asked is None else asked) == 8


def lies_apart_by_bits(config: ZeroConfig, name: str, numel: int) -> bool:
    """True if a parameter shares a bucket only with others whose states have 8 bits.

    Where states are in a tier they are vectors over whole buckets, which would be kept in both forms otherwise.
    """
    return config.optimizer.state_bits == 8 and config.offload.optimizer != "none" and may_be_coded(config, name, numel)
