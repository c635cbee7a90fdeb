"""The random state of each rank: torch (host and devices), Python's `random`, NumPy's legacy generator.

Resuming with as many ranks gives each rank its own state back. With another number of ranks there is no right state, so
it is drawn anew by a rule: rank r of W ranks is seeded with the first eight bytes of
SHA-256("{digest of the saved rank 0's file} {W} {r}"), the same every time the checkpoint is loaded so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from zero_strategy.checkpoint import StateReader

_DIRECTORY = "random"


def path_of(rank: int) -> str:
    """The file of a rank, relative to the checkpoint."""
    return f"{_DIRECTORY}/rank-{rank:05d}.json"


def capture() -> bytes:
    """This process's random state, as the content of its file."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in _cuda_states()],
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    return json.dumps(state).encode()


def restore(content: bytes) -> None:
    """Set this process's random state to what `capture` gave."""
    state = json.loads(content)
    torch.set_rng_state(_tensor(state["torch"]))
    if len(state["cuda"]) == len(_cuda_states()):
        for device, device_state in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(_tensor(device_state), device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def load(reader: StateReader, rank: int, world_size: int) -> bool:
    """Set this rank's random state from a checkpoint, by the rule above.

    Returns:
        Whether the checkpoint has random states.
    """
    files = reader.manifest.files if reader.has_manifest else {}
    saved = sum(path.startswith(f"{_DIRECTORY}/") for path in files)
    if not saved:
        return False
    if saved == world_size and path_of(rank) in files:
        restore(reader.extra(path_of(rank)))
        return True
    digest = hashlib.sha256(reader.extra(path_of(0))).hexdigest()
    drawn = hashlib.sha256(f"{digest} {world_size} {rank}".encode()).digest()
    seed = int.from_bytes(drawn[:8], "little")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return True


def _cuda_states() -> list[torch.Tensor]:
    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
