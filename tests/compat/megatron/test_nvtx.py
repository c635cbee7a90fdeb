"""Ranges in a profiler: their names, their nesting, and that a mistake shows."""

from __future__ import annotations

import threading

import pytest
import torch

from zero_strategy.compat.megatron.diagnostics import NvtxRanges, _nvtx_decorator_get_func_path


def recorded(ranges: NvtxRanges) -> dict[str, int]:
    """Number of times that each range of `work` is in a profile."""

    @ranges.decorator(message="Custom Range", color="blue")
    def custom() -> torch.Tensor:
        return torch.ones(2) + 1

    def pushes() -> None:
        ranges.push()
        custom()
        ranges.push("inner", suffix="part")
        ranges.pop("inner", suffix="part")
        ranges.pop()

    @ranges.decorator()
    def named() -> None:
        pushes()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        named()
        named()
    return {event.key: event.count for event in profile.key_averages() if not event.key.startswith("aten::")}


def test_ranges_are_in_the_profile_when_they_are_enabled() -> None:
    if torch.cuda.is_available():
        pytest.skip("ranges go to NVTX")
    ranges = NvtxRanges()
    assert "inner.part" not in recorded(ranges) and ranges.messages == []
    ranges.configure(True)
    found = recorded(ranges)
    expected = dict.fromkeys((f"{__name__}.named", f"{__name__}.pushes", "Custom Range", "inner.part"), 2)
    assert {name: found.get(name) for name in expected} == expected
    ranges.configure(enabled=False)
    assert "inner.part" not in recorded(ranges)


def test_a_pop_names_what_it_ends() -> None:
    ranges = NvtxRanges(enabled=True)
    ranges.push("outer")
    ranges.push()
    here = f"{__name__}.test_a_pop_names_what_it_ends"
    assert ranges.messages == ["outer", here]
    with pytest.raises(ValueError, match=r"pop of range 'outer', but the innermost open one is '.*what_it_ends'"):
        ranges.pop("outer")
    assert ranges.messages == ["outer", here]
    ranges.configure(False)
    ranges.push("not made")
    ranges.pop()  # was open before
    ranges.pop("outer")
    ranges.pop("nothing is open, and nothing is made")
    ranges.configure(True)
    with pytest.raises(RuntimeError, match="'outer': no range is open"):
        ranges.pop("outer")


def test_threads_have_ranges_of_their_own() -> None:
    ranges, seen = NvtxRanges(enabled=True), list[list[str]]()
    ranges.push("main")
    thread = threading.Thread(target=lambda: seen.append(ranges.messages))
    thread.start()
    thread.join()
    assert seen == [[]] and ranges.messages == ["main"]
    ranges.pop("main")


def test_a_decorated_function_is_itself_and_closes_what_an_exception_left_open() -> None:
    ranges = NvtxRanges(enabled=True)

    @ranges.decorator()
    def fails(value: int) -> None:
        """Fails."""
        ranges.push("left open")
        raise KeyError(value)

    assert fails.__name__ == "fails" and fails.__doc__ == "Fails."
    with pytest.raises(KeyError):
        fails(3)
    assert ranges.messages == []
    assert _nvtx_decorator_get_func_path(recorded) == f"{__name__}.recorded"
