"""Named states of random generators, and the seeds of model-parallel training.

    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", seed + 2718 + model_parallel_rank)
    with tracker.fork():                # dropout in here draws from that state, which moves on
        ...                             # after it the generator goes on where it was

A state is the generator's bytes. The graph-safe form keeps generators instead, which share their state with those that
a CUDA graph has been captured with; the CPU knows no graphs, and has one form.

Dropout where weights are whole must be the same on all ranks of a model-parallel group (they compute the same), and
differ from group to group, which see different data: the device's default state. Where weights are divided it must
differ inside a group, and be the same across groups: the tracker's model-parallel state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_strategy.activation.settings import ModelParallel
from zero_strategy.runtime.compute_device import current_gpu, with_index

DEFAULT_NAME = "model-parallel-rng"
"""The state for regions whose weights are divided among model-parallel ranks."""

State = Tensor | torch.Generator


def rng_device(device: torch.device | str | int | None = None) -> torch.device:
    """The device whose generator is meant; where there is no CUDA device, the CPU stands in for it.

    Args:
        device: Its name; an index of a CUDA device, -1 for the current one; None: the current CUDA device.
    """
    if isinstance(device, int):
        device = "cuda" if device < 0 else torch.device("cuda", device)
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return with_index(chosen)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # its generators are made then
    generators: tuple[torch.Generator, ...] = torch.cuda.default_generators
    return generators[device.index]


def _get_cuda_rng_state(
    device: torch.device | str | int = "cuda", clone: bool = False, graph_safe: bool = False
) -> State:
    """The state of a device's generator.

    Args:
        device: See `rng_device`.
        clone: A copy that does not move on with the generator.
        graph_safe: A generator that shares the state instead of bytes; on the CPU bytes all the same.

    Returns:
        uint8, 1-D, on the CPU; or a generator.
    """
    place = rng_device(device)
    generator = _generator(place)
    if graph_safe and place.type == "cuda":
        return generator.clone_state() if clone else generator.graphsafe_get_state()
    state = generator.get_state()
    return state.clone() if clone else state


def _set_cuda_rng_state(new_state: State, device: torch.device | str | int = -1, graph_safe: bool = False) -> None:
    """Put a state into a device's generator, without copying it first.

    Args:
        new_state: What `_get_cuda_rng_state` gave, in the same form.
        device: See `rng_device`.
        graph_safe: The form.

    Raises:
        TypeError: If the state has the other form.
    """
    place = rng_device(device)
    shared = graph_safe and place.type == "cuda"
    if isinstance(new_state, torch.Generator) is not shared:
        form = "a generator" if shared else "a tensor of bytes"
        raise TypeError(f"graph_safe={graph_safe} on {place} takes {form}, not {type(new_state).__name__}")
    generator = _generator(place)
    if isinstance(new_state, torch.Generator):
        generator.graphsafe_set_state(new_state)
    else:
        generator.set_state(new_state)


class CudaRNGStatesTracker:
    """Named states of one device's generator.

    Args:
        device: See `rng_device`: the CPU where there is no CUDA device, so that a script runs on both.
        graph_safe: Keep generators, whose use CUDA graphs can capture; without effect on the CPU.

    Attributes:
        device: Whose generator.
        graph_safe: Whether generators are kept.
    """

    def __init__(self, device: torch.device | str | int | None = None, *, graph_safe: bool = False) -> None:
        self.device = rng_device(device)
        self.graph_safe = graph_safe and self.device.type == "cuda"
        self._states: dict[str, State] = {}
        self._seeds: dict[str, int] = {}

    def reset(self) -> None:
        """Forget all states and seeds."""
        self._states.clear()
        self._seeds.clear()

    def is_initialized(self) -> bool:
        """True if there is any state."""
        return bool(self._states)

    def names(self) -> list[str]:
        """The states' names, in the order in which they were added."""
        return list(self._states)

    def seed_of(self, name: str) -> int | None:
        """Seed of a state; None if it came by `set_states`."""
        return self._seeds.get(name)

    def get_states(self) -> dict[str, State]:
        """The states by name: a dict of the caller's own. The states themselves are not copied."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, State]) -> None:
        """Replace all states; seeds of names that stay are remembered.

        Raises:
            TypeError: If it is no mapping from names to states of this tracker's form.
        """
        if not isinstance(states, Mapping):
            raise TypeError(f"set_states takes a mapping from names to states, not {type(states).__name__}")
        for name, state in states.items():
            self._check_form(name, state)
        self._states = dict(states)
        self._seeds = {name: seed for name, seed in self._seeds.items() if name in self._states}

    def add(self, name: str, seed: int) -> None:
        """Begin a state of a seed; the device's own state stays as it is.

        Raises:
            TypeError: If the seed is no integer.
            ValueError: If the name or the seed is taken.
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"the seed of the random state {name!r} must be an integer, not {seed!r}")
        if name in self._states:
            raise ValueError(f"the random state {name!r} is there already; call reset() first, or choose another name")
        for other, taken in self._seeds.items():
            if taken == seed:
                raise ValueError(
                    f"seed {seed} of the random state {name!r} is that of {other!r}, so both would draw the same "
                    "numbers; choose another seed"
                )
        self._states[name] = self._seeded(seed)
        self._seeds[name] = seed

    @contextmanager
    def fork(self, name: str = DEFAULT_NAME) -> Iterator[None]:
        """Draw from a named state inside; it moves on, and the device's own state is back afterwards. May be nested.

        Raises:
            ValueError: If there is no such state; names those that there are.
        """
        if name not in self._states:
            raise ValueError(
                f"there is no random state {name!r}; accepted: {', '.join(map(repr, self._states)) or 'none so far'} "
                "(add(name, seed) makes one)"
            )
        before = self._get()
        self._set(self._states[name])
        try:
            yield
        finally:
            # After an exception, too, or the numbers that were drawn would come a second time.
            self._states[name] = self._get()
            self._set(before)

    def snapshot(self) -> dict[str, Tensor]:
        """The states by name as bytes that nothing changes any more: uint8, 1-D, on the CPU."""
        return {
            name: state.get_state() if isinstance(state, torch.Generator) else state
            for name, state in self._states.items()
        }

    def restore(self, states: Mapping[str, Tensor], seeds: Mapping[str, int] | None = None) -> None:
        """Take states from a `snapshot`; names that are not in it stay as they are.

        Args:
            states: Of a generator of the same kind of device.
            seeds: What new names were seeded with.
        """
        for name, state in states.items():
            live = self._states.get(name)
            if isinstance(live, torch.Generator):  # a graph may hold it
                live.set_state(state)
            else:
                self._states[name] = self._of_bytes(state)
        self._seeds.update(seeds or {})

    @contextmanager
    def rewound(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the states are those of a `snapshot`, for computing again what was computed then."""
        now = self.snapshot()
        self.restore(states)
        try:
            yield
        finally:
            self.restore(now)

    def _get(self) -> State:
        return _get_cuda_rng_state(self.device, graph_safe=self.graph_safe)

    def _set(self, state: State) -> None:
        _set_cuda_rng_state(state, self.device, self.graph_safe)

    def _seeded(self, seed: int) -> State:
        generator = torch.Generator(self.device)  # of its own: the device's need not be touched
        generator.manual_seed(seed)
        return generator if self.graph_safe else generator.get_state()

    def _of_bytes(self, state: Tensor) -> State:
        if not self.graph_safe:
            return state
        generator = torch.Generator(self.device)
        generator.set_state(state)
        return generator

    def _check_form(self, name: Any, state: Any) -> None:
        wanted = torch.Generator if self.graph_safe else Tensor
        if not isinstance(name, str) or not isinstance(state, wanted):
            raise TypeError(
                f"the random state {name!r} must be a {wanted.__name__} here (graph_safe={self.graph_safe}), not "
                f"{type(state).__name__}"
            )


class InferenceRNGStatesTracker(CudaRNGStatesTracker):
    """For inference, which draws nothing: accepts every call and keeps no state."""

    def add(self, name: str, seed: int) -> None:
        """Nothing."""

    def set_states(self, states: Mapping[str, State]) -> None:
        """Nothing."""

    @contextmanager
    def fork(self, name: str = DEFAULT_NAME) -> Iterator[None]:
        """Nothing: inside, the device's own state is used."""
        yield


_MODEL_PARALLEL = 2718
"""What scripts expect between the seeds of the two states."""
_NEXT_GROUP = 100_003
"""Between the default seeds of neighbouring groups: farther than any group has ranks. The CPU's generator takes 32 bits
of a seed, so it may not be a power of two."""


def set_random_seed(seed: int) -> None:
    """Seed Python's `random`, NumPy's legacy generator, and torch on the CPU and all devices.

    Raises:
        TypeError: If the seed is no integer.
        ValueError: If it is not between 0 and 2**32 - 1, which is what NumPy takes.
    """
    _check_seed("set_random_seed", seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"set_random_seed({seed}): accepted: 0 to 2**32 - 1")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_model_parallel(tracker: CudaRNGStatesTracker, seed: int, place: ModelParallel) -> None:
    """Seed the default state of the tracker's device, and the tracker's only state; see above.

    Args:
        tracker: Is reset first.
        seed: The same on all ranks. The first group's default state has it.
        place: Of this process.
    """
    _check_seed("model_parallel_cuda_manual_seed", seed)
    own = seed + _NEXT_GROUP * place.data_rank
    # `torch.manual_seed` would seed the other devices' generators and the host's as well.
    if tracker.device.type == "cuda":
        _generator(tracker.device).manual_seed(own)
    else:
        torch.default_generator.manual_seed(own)
    # An earlier call may have taken the same seed, which `add` refuses.
    tracker.reset()
    tracker.add(DEFAULT_NAME, seed + _MODEL_PARALLEL + place.rank)


def _check_seed(call: str, seed: int) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{call} takes an integer, not {seed!r}")


@dataclass(frozen=True)
class RandomState:
    """States of the generators of a process.

    Attributes:
        host: Of torch.
        python: Of Python.
        device: Of torch on a GPU, and which one; None: there is none.
    """

    host: Tensor
    python: Any
    device: tuple[torch.device, Tensor] | None

    @classmethod
    def now(cls) -> RandomState:
        """The present state of torch on the host and on the current CUDA device, and of Python."""
        device = current_gpu() if torch.cuda.is_available() else None
        state = None if device is None else (device, torch.cuda.get_rng_state(device))
        return cls(torch.get_rng_state(), random.getstate(), state)

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        """The state after seeding; the generators stay where they are."""
        with kept_random_state():
            torch.manual_seed(seed)
            random.seed(seed)
            return cls.now()

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.host)
        random.setstate(self.python)
        if self.device is not None:
            device, state = self.device
            torch.cuda.set_rng_state(state, device)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """The generators are afterwards where they were before."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()
