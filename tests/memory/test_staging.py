"""Passes over records through a few buffers: exact for any sizes, bounded, and never half done without saying so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.memory.files import every_backend, need, nothing_left, random_bytes
from zero_strategy.memory.backends import Backend, open_queue
from zero_strategy.memory.host_memory import HostMemory
from zero_strategy.memory.spans import Span, parts_of
from zero_strategy.memory.staging import StagingRing
from zero_strategy.memory.state_file import StateFile, TornRecordError

SIZES = {"zero": 0, "one": 1, "odd": 8191, "larger": 100_003, "page": 4096, "largest": 300_001, "last": 12_288}


def fill(ring: StagingRing, state: StateFile, seed: int = 0) -> dict[str, torch.Tensor]:
    contents = {name: random_bytes(nbytes, seed + i) for i, (name, nbytes) in enumerate(state.records.items())}
    with ring.write(state, state.records) as parts:
        for part in parts:
            (span,) = part.spans
            part.view.copy_(contents[span.record][span.start : span.stop])
    return contents


def found_in(ring: StagingRing, state: StateFile) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros(nbytes, dtype=torch.uint8) for name, nbytes in state.records.items()}
    with ring.read(state, state.records) as parts:
        for part in parts:
            (span,) = part.spans
            found[span.record][span.start : span.stop] = part.view
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@every_backend
@pytest.mark.parametrize("buffers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("buffer_bytes", [4096, 16_000])
def test_passes_are_exact(tmp_path: Path, backend: Backend, buffers: int, buffer_bytes: int) -> None:
    need(backend)
    ring = StagingRing(buffers, buffer_bytes)
    assert ring.nbytes == buffers * -(-buffer_bytes // 4096) * 4096
    places = [tmp_path / "a", tmp_path / "b"]
    with open_queue(backend, depth=5, block_bytes=8192) as queue:
        with StateFile(places, SIZES, queue=queue, stripe_bytes=12_288, checksums=True) as state:
            contents = fill(ring, state)
            assert same(found_in(ring, state), contents)
            order = list(reversed(SIZES))
            with ring.update(state, order) as parts:
                seen = []
                for part in parts:
                    seen.append(part.spans[0].record)
                    part.view.add_(1)
                assert list(dict.fromkeys(seen)) == order
                assert parts.counts.parts == len(parts) == len(seen)
                assert parts.counts.bytes_read == parts.counts.bytes_written == sum(SIZES.values())
            assert same(found_in(ring, state), {name: content + 1 for name, content in contents.items()})


def test_several_records_at_once(tmp_path: Path) -> None:
    sizes = {"p": 40_004, "m": 40_004, "v": 40_004, "step": 4}
    ring = StagingRing(3, 24_576)
    with StateFile(tmp_path, sizes) as state:
        contents = fill(ring, state)
        expected = {name: content.clone() for name, content in contents.items()}
        expected["p"] = (expected["p"].view(torch.int32) + expected["m"].view(torch.int32)).view(torch.uint8)
        expected["v"].zero_()
        with ring.update(state, ["step", ("p", "m", "v")]) as parts:
            for part in parts:
                if len(part.spans) == 1:
                    part.changed = False
                    part.view.zero_()  # nobody sees that
                    continue
                assert len({(span.start, span.stop) for span in part.spans}) == 1
                p, m, v = (view.view(torch.int32) for view in part.views)
                p += m
                v.zero_()
        assert same(found_in(ring, state), expected)


def test_parts_of_items() -> None:
    sizes = {"a": 10_000, "b": 10_000, "c": 5}
    assert parts_of(["c", Span("a", 4096, 10_000)], sizes, 8192, 4096) == [
        (Span("c", 0, 5),),
        (Span("a", 4096, 10_000),),
    ]
    assert parts_of([["a", "b"]], sizes, 8192, 4096) == [
        (Span("a", begin, end), Span("b", begin, end)) for begin, end in ((0, 4096), (4096, 8192), (8192, 10_000))
    ]
    for items, error in (
        ([["a", "b", "c"]], r"'a' \(10000 bytes\), .* do not fit into a staging buffer of 8192 bytes together"),
        (["d"], "there is no record 'd'"),
        ([Span("a", 1, 10)], "is no span of a record of 10000 bytes"),
        ([Span("a", 0, 10)], "must begin at a multiple of 4096, and end at one or with the record"),
        ([Span("a", 8192, 12_288)], "is no span"),
        (["a", Span("a", 8192, 10_000)], "bytes 8192 to 10000 of record 'a' are asked for twice"),
    ):
        with pytest.raises(ValueError, match=error):
            parts_of(items, sizes, 8192, 4096)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ ends in the middle


def stopping(ring: StagingRing, state: StateFile, at: str) -> None:
    with ring.update(state, state.records) as parts:
        for part in parts:
            part.view.add_(1)
            if part.spans[0].record == at:
                raise KeyboardInterrupt("no more")


@every_backend
def test_an_exception_before_anything_was_written_changes_nothing(tmp_path: Path, backend: Backend) -> None:
    need(backend)
    ring = StagingRing(3, 1 << 20)
    with open_queue(backend) as queue, StateFile(tmp_path, SIZES, queue=queue) as state:
        contents = fill(ring, state)
        with pytest.raises(KeyboardInterrupt, match="no more"):
            stopping(ring, state, "zero")
        assert not state.torn and same(found_in(ring, state), contents)


@every_backend
def test_an_exception_in_the_middle_tears_the_records_of_the_pass(tmp_path: Path, backend: Backend) -> None:
    need(backend)
    ring = StagingRing(3, 16_384)
    with open_queue(backend) as queue, StateFile(tmp_path, {**SIZES, "other": 9}, queue=queue, checksums=True) as state:
        fill(ring, state)
        with pytest.raises(KeyboardInterrupt, match="no more"):
            with ring.update(state, SIZES) as parts:
                for part in parts:
                    if part.spans[0].record == "page":
                        raise KeyboardInterrupt("no more")
        assert set(state.torn) == set(SIZES)
        state.read("other", random_bytes(9)).wait()
        reason = r"'odd' in .* is torn: a pass over 7 records ended at part \d+ of \d+: KeyboardInterrupt: no more"
        with pytest.raises(TornRecordError, match=reason), ring.update(state, ["odd"]) as parts:
            next(parts)
        contents = fill(ring, state, 50)  # as loading a checkpoint does
        assert not state.torn and same(found_in(ring, state), contents)


def test_leaving_a_loop_early_is_no_full_pass(tmp_path: Path) -> None:
    ring = StagingRing(2, 16_384)
    with StateFile(tmp_path, SIZES) as state:
        fill(ring, state)
        with ring.update(state, SIZES) as parts:
            for part in parts:
                if part.spans[0].record == "odd":
                    break
        assert "it was left" in state.torn["odd"]
        fill(ring, state)
        with ring.read(state, SIZES) as parts:
            next(parts)
        assert not state.torn


def failing(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> Callable[..., int]:
    """Makes os.`name` fail with EIO from its n-th call on."""
    real, calls = getattr(os, name), iter(range(1 << 30))

    def call(fd: int, memory: list[memoryview], at: int) -> int:
        if next(calls) >= after:
            raise OSError(5, "Input/output error")
        return int(real(fd, memory, at))

    monkeypatch.setattr(os, name, call)
    return call


def test_a_drive_that_fails_in_mid_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = StagingRing(3, 16_384)
    with open_queue("python") as queue, StateFile(tmp_path, SIZES, queue=queue) as state:
        contents = fill(ring, state)
        with monkeypatch.context() as patch, pytest.raises(OSError, match=r"read of .* Input/output error \(record '"):
            failing(patch, "preadv", 3)
            found_in(ring, state)
        assert not state.torn and same(found_in(ring, state), contents)
        with monkeypatch.context() as patch, pytest.raises(OSError, match=r"write of .* Input/output error \(record '"):
            failing(patch, "pwritev", 3)
            with ring.update(state, SIZES) as parts:
                for _ in parts:
                    pass
        assert set(state.torn) == set(SIZES)
        contents = fill(ring, state, 9)
        assert same(found_in(ring, state), contents)


def test_one_pass_at_a_time(tmp_path: Path) -> None:
    ring = StagingRing(2, 4096)
    with StateFile(tmp_path, SIZES) as state:
        with ring.read(state, ["odd"]) as parts:
            with pytest.raises(RuntimeError, match="in a pass already"), ring.read(state, ["one"]):
                pass
            assert next(parts).view.numel() == 4096
        with pytest.raises(RuntimeError, match="enter the pass first"):
            next(ring.read(state, ["odd"]))
    with pytest.raises(ValueError, match="got 0 of 10 bytes"):
        StagingRing(0, 10)


def test_buffers_are_given_back(tmp_path: Path) -> None:
    def mapped() -> int:
        with open("/proc/self/smaps_rollup") as file:
            return int(next(line for line in file if line.startswith("Rss")).split()[1])

    def use() -> None:
        ring = StagingRing(2, 16 << 20)
        ring.memory.bytes.fill_(1)
        with StateFile(tmp_path, {"r": 40 << 20}) as state:
            fill(ring, state)

    use()
    with nothing_left():
        before = mapped()
        use()
        assert mapped() - before < 16 << 10


def test_pinned_where_there_is_a_device() -> None:
    memory = HostMemory(10_000, pinned=True)
    assert memory.nbytes == 12_288 == memory.bytes.numel() and memory.bytes.data_ptr() % 4096 == 0
    if torch.cuda.is_available():
        assert memory.pinned and memory.bytes.is_pinned()
    else:
        assert not memory.pinned and memory.reason == "this torch sees no CUDA device"
    with pytest.raises(ValueError, match="positive number of bytes, got 0"):
        HostMemory(0)
