"""Named random states against a generator of their own, and the two streams of model-parallel ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zero_strategy.activation.functional import (
    PROCESS,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from zero_strategy.activation.rng import (
    DEFAULT_NAME,
    CudaRNGStatesTracker,
    InferenceRNGStatesTracker,
    _get_cuda_rng_state,
    _set_cuda_rng_state,
    rng_device,
    seed_model_parallel,
    set_random_seed,
)
from zero_strategy.activation.settings import ModelParallel


def numbers(seed: int, *counts: int) -> list[Tensor]:
    """Numbers that a generator of this seed draws."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, generator=generator) for count in counts]


@pytest.fixture
def tracker() -> CudaRNGStatesTracker:
    made = CudaRNGStatesTracker("cpu")
    made.add("a", 1)
    made.add("b", 2)
    return made


def test_fork_draws_from_the_named_state_which_moves_on(tracker: CudaRNGStatesTracker) -> None:
    torch.manual_seed(0)
    first, second = numbers(1, 3, 4)
    own = numbers(0, 2, 5)
    assert torch.equal(torch.rand(2), own[0])
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(5), own[1])
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4), second)


def test_forks_nest(tracker: CudaRNGStatesTracker) -> None:
    a, b = numbers(1, 2, 2), numbers(2, 3)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), a[0])
        with tracker.fork("b"):
            assert torch.equal(torch.rand(3), b[0])
        assert torch.equal(torch.rand(2), a[1])


def test_an_exception_in_a_fork_leaves_the_device_s_state_as_it_was(tracker: CudaRNGStatesTracker) -> None:
    before = torch.get_rng_state()
    with pytest.raises(MemoryError), tracker.fork("a"):
        torch.rand(2)
        raise MemoryError
    assert torch.equal(torch.get_rng_state(), before)


def test_adding_does_not_touch_the_device_s_state() -> None:
    before = torch.get_rng_state()
    CudaRNGStatesTracker("cpu").add("a", 7)
    assert torch.equal(torch.get_rng_state(), before)


def test_states_are_got_and_set(tracker: CudaRNGStatesTracker) -> None:
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    states["a"], moved = states["a"], tracker.get_states()["a"]
    assert not torch.equal(states["a"], moved)  # what was got does not move on
    tracker.set_states({"a": states["a"]})
    assert tracker.names() == ["a"]
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    tracker.add("b", 2)  # its seed went with it
    with pytest.raises(ValueError, match=r"seed 1 .* is that of 'a'"):
        tracker.add("c", 1)


def test_reset_forgets_names_and_seeds(tracker: CudaRNGStatesTracker) -> None:
    tracker.reset()
    assert tracker.get_states() == {} and not tracker.is_initialized()
    tracker.add("a", 1)


def test_snapshots_are_restored_and_rewound(tracker: CudaRNGStatesTracker) -> None:
    snapshot = tracker.snapshot()
    with tracker.fork("a"):
        first = torch.rand(3)
    now = tracker.get_states()["a"]
    with tracker.rewound(snapshot), tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(tracker.get_states()["a"], now)


WRONG: dict[str, tuple[Callable[[CudaRNGStatesTracker], Any], type[Exception], str]] = {
    "name twice": (lambda t: t.add("a", 9), ValueError, "'a' is there already"),
    "seed twice": (lambda t: t.add("c", 2), ValueError, "seed 2 of the random state 'c' is that of 'b'"),
    "no such name": (lambda t: t.fork("c").__enter__(), ValueError, "no random state 'c'; accepted: 'a', 'b'"),
    "default name": (lambda t: t.fork().__enter__(), ValueError, "'model-parallel-rng'; accepted: 'a', 'b'"),
    "seed of a wrong type": (lambda t: t.add("c", 1.5), TypeError, "'c' must be an integer, not 1.5"),
    "no mapping": (lambda t: t.set_states([]), TypeError, "a mapping from names to states, not list"),
    "no state": (lambda t: t.set_states({"a": 3}), TypeError, "'a' must be a Tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_refused_by_name(case: str, tracker: CudaRNGStatesTracker) -> None:
    call, kind, message = WRONG[case]
    before = tracker.snapshot()
    with pytest.raises(kind, match=message):
        call(tracker)
    assert tracker.snapshot() == before


def test_raw_states_are_got_and_set_without_a_copy_and_without_cuda() -> None:
    # `_get_cuda_rng_state(device='cuda', clone=False, graph_safe=False)`, `_set_cuda_rng_state(new_state, device=-1)`
    for device in ("cpu", torch.device("cpu"), *([] if torch.cuda.is_available() else ["cuda", 0, -1])):
        for clone, graph_safe in ((False, False), (True, False), (False, True)):
            state = _get_cuda_rng_state(device, clone, graph_safe)
            assert isinstance(state, Tensor) and torch.equal(state, torch.get_rng_state())
            drawn = torch.rand(3)
            _set_cuda_rng_state(state, device, graph_safe)
            assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(TypeError, match="takes a tensor of bytes, not Generator"):
        _set_cuda_rng_state(torch.Generator(), "cpu")


def test_initialize_makes_a_tracker_once_and_anew_when_forced() -> None:
    assert PROCESS.tracker is None
    initialize_rng_tracker()
    first = get_cuda_rng_tracker()
    assert type(first) is CudaRNGStatesTracker and first is PROCESS.tracker
    first.add("a", 1)
    initialize_rng_tracker()
    assert get_cuda_rng_tracker(use_cudagraphable_rng=True) is first  # of whatever kind it is
    with pytest.warns(UserWarning, match="another kind already.*force_reset=True"):
        initialize_rng_tracker(inference_rng_tracker=True)
    initialize_rng_tracker(force_reset=True)
    assert get_cuda_rng_tracker() is not first and not get_cuda_rng_tracker().is_initialized()


@pytest.mark.parametrize("flag", ["use_te_rng_tracker", "use_cudagraphable_rng"])
def test_flags_ask_for_the_graph_safe_form(flag: str) -> None:
    tracker = get_cuda_rng_tracker(**{flag: True})
    assert tracker.graph_safe is torch.cuda.is_available()  # the CPU knows no graphs
    tracker.add("a", 1)
    with tracker.fork("a"):
        pass


def test_the_inference_tracker_draws_nothing_of_its_own() -> None:
    initialize_rng_tracker(inference_rng_tracker=True)
    tracker = get_cuda_rng_tracker()
    assert isinstance(tracker, InferenceRNGStatesTracker)
    tracker.add("a", 1)
    tracker.add("a", 1)
    tracker.set_states({"x": torch.zeros(3)})
    torch.manual_seed(0)
    with tracker.fork("nobody"):
        assert torch.equal(torch.rand(2), numbers(0, 2)[0])


def test_the_default_state_is_that_of_a_group_and_the_model_parallel_state_that_of_a_place() -> None:
    default: dict[tuple[int, int], tuple[float, ...]] = {}
    divided: dict[tuple[int, int], tuple[float, ...]] = {}
    for group in range(3):
        for place in range(2):
            tracker = CudaRNGStatesTracker("cpu")
            tracker.add("old", 2719)  # goes
            seed_model_parallel(tracker, 10, ModelParallel(place, 2, group, None))
            default[group, place] = tuple(torch.rand(3).tolist())
            with tracker.fork():
                divided[group, place] = tuple(torch.rand(3).tolist())
            assert tracker.names() == [DEFAULT_NAME]
    assert len(set(default.values())) == 3 and len(set(divided.values())) == 2
    assert all(default[group, 0] == default[group, 1] for group in range(3))
    assert all(divided[0, place] == divided[2, place] for place in range(2))
    assert default[0, 0] == tuple(numbers(10, 3)[0].tolist())
    assert divided[0, 1] == tuple(numbers(10 + 2718 + 1, 3)[0].tolist())  # the seeds that scripts expect


def test_model_parallel_cuda_manual_seed_replaces_the_device_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model_parallel_cuda_manual_seed(123)
    tracker = get_cuda_rng_tracker()
    if tracker.device.type == "cpu":
        assert torch.equal(torch.rand(4), numbers(123, 4)[0])
    with tracker.fork():
        pass
    model_parallel_cuda_manual_seed(123)  # again: begins again
    assert tracker.seed_of(DEFAULT_NAME) == 123 + 2718
    with pytest.raises(TypeError, match="takes an integer, not '1'"):
        model_parallel_cuda_manual_seed("1")  # type: ignore[arg-type]


def test_set_random_seed_seeds_python_numpy_and_torch() -> None:
    found = []
    for _ in range(2):
        set_random_seed(11)
        found.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert found[0] == found[1]
    assert found[0] == (random.Random(11).random(), float(np.random.RandomState(11).rand()), float(numbers(11, 1)[0]))
    with pytest.raises(ValueError, match=r"set_random_seed\(-1\): accepted: 0 to"):
        set_random_seed(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("graph_safe", [False, True])
def test_on_a_gpu_forks_nest_and_rewind(graph_safe: bool) -> None:
    tracker = CudaRNGStatesTracker(graph_safe=graph_safe)
    assert tracker.device == rng_device("cuda")
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.cuda.manual_seed(0)
    wanted = {seed: torch.Generator("cuda").manual_seed(seed) for seed in (0, 1, 2)}

    def check(seed: int) -> None:
        assert torch.equal(torch.rand(5, device="cuda"), torch.rand(5, device="cuda", generator=wanted[seed]))

    check(0)
    snapshot = tracker.snapshot()
    with tracker.fork("a"):
        check(1)
        with tracker.fork("b"):
            check(2)
        check(1)
    check(0)
    with tracker.rewound(snapshot), tracker.fork("a"):
        wanted[1] = torch.Generator("cuda").manual_seed(1)
        check(1)
    wanted[1] = torch.Generator("cuda").manual_seed(1)
    torch.rand(5, device="cuda", generator=wanted[1]), torch.rand(5, device="cuda", generator=wanted[1])
    with tracker.fork("a"):
        check(1)
