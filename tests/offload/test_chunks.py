"""Vectors in tiers, and passes over their chunks: exact for any sizes and cuts, bounded, never half done in silence."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.offload.files import every_backend, need, nothing_left
from zero_strategy.offload.chunk_store import Allowance, ChunkStore
from zero_strategy.offload.chunks import Chunk, ChunkSlots, Cuts, OffloadedVector, VectorSpec, head_numel, visit
from zero_strategy.offload.file_queues import IO_VARIABLE, Backend
from zero_strategy.offload.part_file import CorruptRecordError
from zero_strategy.offload.state_file import PartialRecordError
from zero_strategy.offload.tier import HostMemory, HostTier, NvmeTier, NvmeTransfer, Tier

CPU = torch.device("cpu")
NUMELS = (0, 1, 999, 1000, 1001, 12_345)
RATIOS = (1.0, 0.5, 0.0)


def vectors(tier: Tier, ratio: float = 1.0, numel: int = 5000) -> dict[str, OffloadedVector]:
    store = ChunkStore(tier, 1000, ratio=ratio)
    specs = {"a": VectorSpec(numel, torch.float32, 0.0, CPU), "b": VectorSpec(numel, torch.bfloat16, 2.0, CPU)}
    return store.add(specs)


def chunks_of(made: dict[str, OffloadedVector], **keys: frozenset[str]) -> list[Chunk]:
    return [Chunk(number, *place, made, **keys) for number, place in enumerate(made["a"].chunks)]


def values_of(made: dict[str, OffloadedVector]) -> list[Tensor]:
    found = []
    for vector in made.values():
        found.append(torch.empty(vector.numel, dtype=vector.dtype))
        vector.read_all(found[-1])
        assert torch.equal(vector.read(0, vector.numel), found[-1])
    return found


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("numel", NUMELS)
def test_cuts_cover_every_element_once(numel: int, ratio: float) -> None:
    cuts = Cuts(numel, 1000, head_numel(numel, ratio))
    assert [element for chunk in cuts.chunks for element in range(*chunk)] == list(range(numel))
    assert all(stop <= cuts.head or start >= cuts.head for start, stop in cuts.chunks)
    assert all(cuts.chunks[number][1] <= cuts.head for number in range(cuts.heads))
    assert abs(cuts.head - (1 - ratio) * numel) < 64 and (cuts.head % 64 == 0 or cuts.head == numel)
    for start, stop in ((0, numel), (numel // 3, numel // 2), (numel // 2, numel // 2)):
        found = [(low, high) for _, low, high, _ in cuts.overlapping(start, stop)]
        assert [element for part in found for element in range(*part)] == list(range(start, stop))
        assert all(cuts.chunks[number][0] == first for number, _, _, first in cuts.overlapping(start, stop))


@every_backend
def test_passes_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    need(backend)
    monkeypatch.setenv(IO_VARIABLE, backend)

    def grow(chunk: Chunk, held: dict[str, Tensor]) -> None:
        place = torch.arange(chunk.start, chunk.stop)
        held["a"].add_(place)
        held["b"].add_(held["a"] % 7)

    with nothing_left():
        for tier in (NvmeTier([str(tmp_path)], block_bytes=4096), HostTier()):
            for numel in NUMELS:
                for ratio in RATIOS:
                    made = vectors(tier, ratio, numel)
                    expected = [torch.zeros(numel), torch.full((numel,), 2.0, dtype=torch.bfloat16)]
                    for slots in (ChunkSlots(1), ChunkSlots(2), ChunkSlots(5)):
                        slots.run(chunks_of(made), grow, wait=False)
                        slots.settle()
                        expected[0] += torch.arange(numel)
                        expected[1] += expected[0] % 7
                    assert all(map(torch.equal, values_of(made), expected))
                    made["a"].store.remove(made.values())
            tier.close()
    assert os.listdir(tmp_path) == []


def test_memory_is_that_of_the_slots(tmp_path: Path) -> None:
    tier, slots = NvmeTier([str(tmp_path)]), ChunkSlots(3)
    made = vectors(tier, numel=50_000)
    slots.run(chunks_of(made), lambda *_: None)
    assert slots.nbytes == 3 * 1000 * (4 + 2)
    tier.close()


class Counting(NvmeTier):
    """Notes what is read and written."""

    def __init__(self, folder: Path, moved: list[str]) -> None:
        super().__init__([str(folder)])
        self.moved = moved

    def read(self, record: str, memory: Tensor) -> NvmeTransfer:
        self.moved.append(f"read {record}")
        return super().read(record, memory)

    def write(self, record: str, memory: Tensor) -> NvmeTransfer:
        self.moved.append(f"write {record}")
        return super().write(record, memory)


def test_what_nobody_needs_is_not_read_and_what_did_not_change_is_not_written(tmp_path: Path) -> None:
    moved: list[str] = []
    tier = Counting(tmp_path, moved)
    made = vectors(tier, numel=2000)
    made["a"].write(0, torch.ones(2000))
    made["a"].store.flush()
    moved.clear()
    keys = {"unread": frozenset("b"), "unchanged": frozenset("a")}
    ChunkSlots(3).run(chunks_of(made, **keys), lambda _, held: held["b"].copy_(held["a"] + 1))
    assert sorted(moved) == ["read a/0", "read a/1", "write b/0", "write b/1"]
    assert torch.equal(values_of(made)[1].float(), torch.full((2000,), 2.0))
    tier.close()


@pytest.mark.parametrize("tier", ["nvme", "host"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sums_changes_and_blanks(tmp_path: Path, tier: str, ratio: float) -> None:
    where = NvmeTier([str(tmp_path)]) if tier == "nvme" else HostTier()
    vector = vectors(where, ratio, 3333)["a"]
    expected = torch.randn(3333)
    vector.add_all(expected, first=True)
    vector.add_all(expected, first=False)
    vector.change(900, 2100, lambda values: values.neg_())
    expected = expected * 2
    expected[900:2100].neg_()
    assert torch.equal(vector.read(0, 3333), expected)
    parts = [vector.part(10, (2000,)), vector.part(0, (0,)), vector.part(2900, (433,)).narrow(33, 433)]
    seen = [torch.zeros(0)] * 3

    def look(positions: list[int], values: list[Tensor]) -> None:
        for position, value in zip(positions, values, strict=True):
            seen[position] = torch.cat([seen[position], value])

    visit(parts, look)
    assert torch.equal(seen[0], expected[10:2010]) and not len(seen[1]) and torch.equal(seen[2], expected[2933:])
    vector.write(5, torch.ones(3))  # waits in the cache when all is forgotten
    vector.blank()
    assert not vector.read(0, 3333).any()
    vector.add_all(expected, first=False)
    assert torch.equal(vector.read(0, 3333), expected)
    where.close()


def failing(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """Makes os.`name` fail with EIO from its n-th call on."""
    real, calls = getattr(os, name), iter(range(1 << 30))

    def call(fd: int, memory: list[memoryview], at: int) -> int:
        if next(calls) >= after:
            raise OSError(5, "Input/output error")
        return int(real(fd, memory, at))

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_what_was_read_ahead_is_not_read_again_unless_it_changed(tmp_path: Path, count: int) -> None:
    moved: list[str] = []
    tier, slots = Counting(tmp_path, moved), ChunkSlots(count)
    made = vectors(tier)
    a, b, expected = made["a"], made["b"], torch.zeros(5000)

    def check(chunk: Chunk, held: dict[str, Tensor]) -> None:
        assert torch.equal(held["a"], expected[chunk.start : chunk.stop])
        assert held["b"].eq(expected[0] * 2 + 2).all()
        held["a"].add_(1)

    keys = {"unchanged": frozenset("b")}
    for step in range(6):
        slots.read_ahead(chunks_of(made, **keys) if step != 2 else chunks_of(made, **keys)[1:])
        if step == 5:
            slots.read_ahead(chunks_of(made, **keys))  # another micro-batch
        b.add_all(torch.full((5000,), float(expected[0] * 2 + 2)), first=True)  # as gradients do after that
        if step == 3:
            a.write(2500, torch.full((100,), 70.0))
            expected[2500:2600] = 70.0
        if step == 4:
            a.store.settle()
        a.store.flush()
        slots.check_ahead(chunks_of(made, **keys))
        slots.run(chunks_of(made, **keys), check, wait=False)
        expected += 1
        reads = [record for record in moved if record.startswith("read a/")]
        again = {2: min(count, 4), 3: min(count, 5)}.get(step, 0) + (step == 3)
        assert step == 0 or len(reads) == 5 + again, (step, reads)
        moved.clear()
    slots.read_ahead(chunks_of(made))
    slots.forget_ahead()
    slots.settle()
    assert torch.equal(values_of(made)[0], expected)
    tier.close()


def test_what_stays_in_memory_is_not_in_files(tmp_path: Path) -> None:
    moved: list[str] = []
    tier, allowance = Counting(tmp_path, moved), Allowance(10_000)
    store = ChunkStore(tier, 1024, allowance=allowance)
    made = store.add({name: VectorSpec(4000, torch.float32) for name in ("a", "b")})
    assert (made["a"].staying, made["b"].staying, allowance.left) == (2, 0, 10_000 - 8192)
    assert made["a"].nbytes == 4 * (4000 - 2048) and sum(made["a"].records_in(store.memory).values()) == 8192
    for value in (3.0, 4.0):
        made["a"].add_all(torch.full((4000,), value), first=True)
        store.settle()
        found = torch.empty(4000)
        made["a"].read_all(found)
        assert found.eq(value).all() and made["a"].read(2000, 2100).eq(value).all()
        made["a"].blank()
    assert {name.split()[1] for name in moved} == {"a/2", "a/3"}
    store.remove(made.values())
    assert allowance.left == 10_000
    allowance.left = 1 << 42
    store = ChunkStore(tier, 1 << 40, allowance=allowance)
    with pytest.raises(OSError, match="bytes"):
        store.add({"c": VectorSpec(1 << 44, torch.uint8)})
    assert allowance.left == 1 << 42 and "c" not in store.vectors
    tier.close()


def test_vectors_for_which_memory_is_short_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Scarce(HostMemory):
        def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
            made.append(nbytes)
            if len(made) == 2:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            super().__init__(nbytes, pinned=pinned)

    monkeypatch.setattr("zero_strategy.offload.tier.HostMemory", Scarce)
    tier, allowance, spec = NvmeTier([str(tmp_path)]), Allowance(16_384), VectorSpec(8000, torch.float32)
    store = ChunkStore(tier, 2048, allowance=allowance)
    with pytest.raises(OSError, match="allocate memory"):
        store.add({"a": spec})
    assert made == [8192, 8192] and allowance.left == 16_384 and not store.vectors
    assert not tier._files and not store.memory._records
    assert store.add({"a": spec})["a"].staying == 2
    tier.close()


def add_one(_: Chunk, held: dict[str, Tensor]) -> None:
    held["a"].add_(1)


@pytest.mark.parametrize("wait", [True, False])
def test_a_drive_that_fails_in_mid_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    monkeypatch.setenv(IO_VARIABLE, "python")
    tier = NvmeTier([str(tmp_path)])
    made, slots = vectors(tier), ChunkSlots(3)
    slots.run(chunks_of(made), add_one)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"read of .* Input/output error"):
        failing(patch, "preadv", 3)
        slots.run(chunks_of(made, unchanged=frozenset("ab")), lambda *_: None)
    assert torch.equal(values_of(made)[0], torch.ones(5000))  # a pass that only reads tears nothing
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"write of .* Input/output error"):
        failing(patch, "pwritev", 8)
        slots.run(chunks_of(made), add_one, wait=wait)
        slots.settle()
    with pytest.raises(PartialRecordError, match=r"stopped half-way \(OSError: .*Input/output error"):
        values_of(made)
    made["a"].write(0, torch.zeros(5000))  # as a checkpoint does
    made["b"].write(0, torch.zeros(5000))
    assert not any(values.any() for values in values_of(made))
    tier.close()


def test_no_write_under_way_takes_the_mark_of_a_torn_chunk_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IO_VARIABLE, "python")
    for after in range(1, 6):
        tier = NvmeTier([str(tmp_path)])
        store = ChunkStore(tier, 1000)
        vector, slots = store.add({"a": VectorSpec(6000, torch.float32)})["a"], ChunkSlots(5)
        vector.add_all(torch.zeros(6000), first=True)
        store.flush()
        with monkeypatch.context() as patch, pytest.raises(OSError, match=r"Input/output error"):
            failing(patch, "preadv", after)
            slots.run([Chunk(number, *place, {"a": vector}) for number, place in enumerate(vector.chunks)], add_one)
        refused = []
        for start in range(0, 6000, 1000):
            with contextlib.suppress(PartialRecordError):
                refused.append(not isinstance(vector.read(start, start + 1), Tensor))
        assert refused in ([], [False] * 6), after  # all of two states, or nothing begun
        tier.close()


def test_a_drive_that_changes_bytes(tmp_path: Path) -> None:
    tier = NvmeTier([str(tmp_path)], checksums=True)
    vector = vectors(tier)["a"]
    vector.add_all(torch.arange(5000.0), first=True)
    assert torch.equal(vector.read(0, 5000), torch.arange(5000.0))
    descriptors = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    ours = [link for link in descriptors if link.is_symlink() and str(tmp_path) in os.readlink(link)]
    with open(ours[0], "r+b", buffering=0) as file:
        file.seek(9000)
        file.write(b"other")
    with pytest.raises(CorruptRecordError, match="a/"):
        vector.read(0, 5000)
    tier.close()


def test_work_that_fails(tmp_path: Path) -> None:
    def fail(chunk: Chunk, held: dict[str, Tensor]) -> None:
        add_one(chunk, held)
        if chunk.number == 2:
            raise KeyError("mine")

    tier = NvmeTier([str(tmp_path)])
    made, slots = vectors(tier), ChunkSlots(3)
    slots.run(chunks_of(made), add_one)
    with pytest.raises(KeyError, match="mine"):
        slots.run(chunks_of(made), fail)
    with pytest.raises(PartialRecordError):
        made["a"].read(4500, 4501)
    tier.close()


def test_a_write_that_fails_leaves_no_other_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IO_VARIABLE, "python")
    tier = NvmeTier([str(tmp_path)])
    made, slots = vectors(tier), ChunkSlots(5)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"write of .* Input/output error"):
        failing(patch, "pwritev", 6)
        slots.run(chunks_of(made), add_one, wait=False)
        slots.settle()
    slots.settle()  # nothing is left that could fail in the place of something else
    tier.close()


@pytest.mark.parametrize("how", [lambda v: v.read(0, 10), lambda v: v.read_all(torch.empty(5000))])
def test_what_is_being_written_is_there_for_readers(
    tmp_path: Path, how: Callable[[OffloadedVector], Tensor | None]
) -> None:
    tier = NvmeTier([str(tmp_path)])
    vector = vectors(tier)["a"]
    for value in range(5):
        vector.add_all(torch.full((5000,), float(value)), first=True)
        how(vector)
        assert torch.equal(vector.read(0, 5000), torch.full((5000,), float(value)))
    tier.close()
