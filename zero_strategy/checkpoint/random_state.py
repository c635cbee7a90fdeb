"""The random state of each rank, saved and restored.

It covers torch (host and devices), Python's `random`, NumPy's legacy generator, and named states.

Resuming with as many ranks gives each rank its own state back. With another number of ranks there is no right state, so
it is drawn anew by a rule: rank r of W ranks is seeded with the first eight bytes of
SHA-256("{digest of the saved rank 0's file} {W} {r}"), the same every time the checkpoint is loaded so.

Named states (of the process's tracker, `activation/functional.py`) say by their seeds which ranks share them, so with
another number of ranks it goes by what the script has seeded before loading: a state of the name and seed that the
saved rank 0 had goes on from there; any other one is seeded from SHA-256("{digest} {name} {seed}"), so that equal seeds
stay equal and different ones different; one that the script has not added, from SHA-256("{digest} {W} {r} {name}").
That also holds where the saved state is of another kind of device.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zero_strategy.activation.functional import PROCESS, get_cuda_rng_tracker
from zero_strategy.checkpoint.layout import parse_object
from zero_strategy.runtime.shown import shown

if TYPE_CHECKING:
    from zero_strategy.activation.rng import CudaRNGStatesTracker
    from zero_strategy.checkpoint.reader import StateReader


DIRECTORY = "random"


def path_of(rank: int) -> str:
    """The file of a rank, relative to the checkpoint."""
    return f"{DIRECTORY}/rank-{rank:05d}.json"


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
    if PROCESS.tracker is not None and PROCESS.tracker.is_initialized():
        state["named"] = _named(PROCESS.tracker)
    return json.dumps(state).encode()


def restore(content: bytes) -> None:
    """Set this process's random state to what `capture` gave.

    Raises:
        ValueError: If it is something else.
    """
    try:
        _restore(content, parse_object(content, "random state"))
    except (LookupError, TypeError, RuntimeError, ValueError, OverflowError) as error:
        raise ValueError(f"the random state is damaged: {type(error).__name__}: {shown(error)}") from None


def _restore(content: bytes, state: dict[str, Any]) -> None:
    torch.set_rng_state(_tensor(state["torch"]))
    # With another number of devices nobody can say whose state is whose.
    if len(state["cuda"]) == len(_cuda_states()):
        for device, device_state in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(_tensor(device_state), device)
    version, internal, gauss = state["python"]
    # JSON made a list of the tuple that Python asks for.
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    named = state.get("named")  # not in checkpoints of earlier versions, nor where there were none
    if named is not None and named["device"] == get_cuda_rng_tracker().device.type:
        get_cuda_rng_tracker().restore({name: _tensor(text) for name, text in named["states"].items()}, named["seeds"])
    elif named is not None:
        _draw_named(named, hashlib.sha256(content).hexdigest(), "own")


def load(reader: StateReader, rank: int, world_size: int) -> bool:
    """Set this rank's random state from a checkpoint, by the rule above.

    Returns:
        Whether the checkpoint has random states.
    """
    files = reader.manifest.files if reader.has_manifest else {}
    saved = sum(path.startswith(f"{DIRECTORY}/") for path in files)
    if not saved:
        return False
    if saved == world_size and path_of(rank) in files:
        restore(reader.extra(path_of(rank)))
        return True
    first = reader.extra(path_of(0))
    digest = hashlib.sha256(first).hexdigest()
    seed = _seed(f"{digest} {world_size} {rank}")
    torch.manual_seed(seed)
    random.seed(seed)
    # NumPy takes 32 bits.
    np.random.seed(seed % 2**32)
    named = parse_object(first, path_of(0)).get("named")
    if named is not None:
        _draw_named(named, digest, f"{world_size} {rank}")
    return True


def _named(tracker: CudaRNGStatesTracker) -> dict[str, Any]:
    states = tracker.snapshot()
    seeds = {name: seed for name in states if (seed := tracker.seed_of(name)) is not None}
    texts = {name: _text(state) for name, state in states.items()}
    return {"device": tracker.device.type, "states": texts, "seeds": seeds}


def _draw_named(named: dict[str, Any], digest: str, place: str) -> None:
    """Set named states by the rule above; `place` tells this rank."""
    tracker = get_cuda_rng_tracker()
    same_device = named["device"] == tracker.device.type
    states: dict[str, torch.Tensor] = {}
    for name, text in named["states"].items():
        seed = tracker.seed_of(name)
        if same_device and seed is not None and named["seeds"].get(name) == seed:
            states[name] = _tensor(text)
            continue
        generator = torch.Generator(tracker.device)
        generator.manual_seed(_seed(f"{digest} {name} {seed}" if seed is not None else f"{digest} {place} {name}"))
        states[name] = generator.get_state()
    tracker.restore(states)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _cuda_states() -> list[torch.Tensor]:
    # Asked only where it runs: the question itself would start CUDA.
    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
