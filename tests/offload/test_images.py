"""Images of vectors: the values of one moment, however and in whatever order the vectors change afterwards."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.offload.files import nothing_left
from zero_strategy.offload.chunk_store import PART_BYTES, Allowance, ChunkStore, FileCopies, StateImages
from zero_strategy.offload.chunks import Chunk, ChunkSlots, OffloadedVector, VectorSpec
from zero_strategy.offload.state_file import PartialRecordError
from zero_strategy.offload.tier import NvmeTier

CPU, SIZE = torch.device("cpu"), 1000
NUMEL = 5300


def whole(vector: OffloadedVector) -> Tensor:
    return vector.read(0, vector.numel)


class Random:
    """Vectors that change by chance."""

    def __init__(self, tier: NvmeTier, seed: int) -> None:
        self.chance, self.slots = random.Random(seed), ChunkSlots(3)
        ratio, stays = self.chance.choice([(1.0, 0), (0.5, 0), (0.5, 9000), (1.0, 9000)])
        self.store = ChunkStore(tier, SIZE, cached_chunks=2, ratio=ratio, allowance=Allowance(stays))
        head = self.chance.choice([CPU, None])
        self.vectors = self.store.add(
            {
                f"{seed} a": VectorSpec(NUMEL, torch.float32, 0.5, head),
                f"{seed} b": VectorSpec(NUMEL, torch.bfloat16, 2.0, head),
            }
        )

    @property
    def first(self) -> OffloadedVector:
        return next(iter(self.vectors.values()))

    def chunks(self, numbers: list[int]) -> list[Chunk]:
        return [Chunk(n, *self.first.chunks[n], self.vectors) for n in numbers]

    def change(self) -> None:
        """An edit of a range, or a pass over some chunks."""
        amount = self.chance.randint(1, 9)

        def add(_: Chunk, held: dict[str, Tensor]) -> None:
            for values in held.values():
                values.add_(amount)

        what = self.chance.choice(["write", "change", "pass"])
        vector = self.chance.choice(list(self.vectors.values()))
        low, high = sorted(self.chance.randint(0, NUMEL) for _ in range(2))
        if what == "write":
            vector.write(low, torch.full((high - low,), float(amount)))
        elif what == "change":
            vector.change(low, high, lambda values: values.mul_(0.5))
        else:
            self.store.flush()
            known = range(len(self.first.chunks))
            numbers = sorted(self.chance.sample(known, self.chance.randint(0, len(known))))
            self.slots.run(self.chunks(numbers), add)


def test_images_hold_what_vectors_were(tmp_path: Path) -> None:
    with nothing_left():
        tier = NvmeTier([str(tmp_path)], block_bytes=4096)
        copies = FileCopies(tier, "copies")
        for seed in range(12):
            run = Random(tier, seed)
            live = {name: whole(vector) for name, vector in run.vectors.items()}
            for _ in range(4):
                for _ in range(run.chance.randint(0, 3)):
                    run.change()
                low, high = sorted(run.chance.randint(0, NUMEL) for _ in range(2))
                images = StateImages(copies)
                readers = {name: images.reader(vector, low, high) for name, vector in run.vectors.items()}
                images.reserve({})
                live = {name: whole(vector) for name, vector in run.vectors.items()}
                images.take()
                for _ in range(6):
                    run.change()
                    start, stop = sorted(run.chance.randint(low, high) for _ in range(2))
                    for name, read in readers.items():
                        assert torch.equal(read(start, stop), live[name][start:stop]), seed
            copies.clear()
            run.store.remove(run.vectors.values())
        tier.close()
    assert os.listdir(tmp_path) == []


def test_changes_are_those_without_an_image(tmp_path: Path) -> None:
    tier = NvmeTier([str(tmp_path)])
    for seed in range(6):
        found = []
        for imaged in (False, True):
            run = Random(tier, seed)
            for _ in range(12):
                run.change()
                if imaged:
                    images = StateImages(FileCopies(tier, "copies"))
                    for vector in run.vectors.values():
                        images.reader(vector, 0, NUMEL)
                    images.reserve({})
                    images.take()
                    images._copies.clear()
            found.append([whole(vector) for vector in run.vectors.values()])
            run.store.remove(run.vectors.values())
        assert all(map(torch.equal, *found)), seed
    tier.close()


def test_a_pass_that_stops_half_way_leaves_the_image(tmp_path: Path) -> None:
    tier = NvmeTier([str(tmp_path)])
    store = ChunkStore(tier, SIZE)
    (vector,) = store.add({"a": VectorSpec(NUMEL, torch.float32)}).values()
    vector.write(0, torch.arange(NUMEL))
    images = StateImages(FileCopies(tier, "copies"))
    read = images.reader(vector, 0, NUMEL)
    images.reserve({})
    images.take()

    def fail(chunk: Chunk, held: dict[str, Tensor]) -> None:
        if chunk.number == 3:
            raise KeyError("half-way")
        held["a"].zero_()

    store.flush()
    with pytest.raises(KeyError, match="half-way"):
        ChunkSlots(2).run([Chunk(n, *place, {"a": vector}) for n, place in enumerate(vector.chunks)], fail)
    assert torch.equal(read(0, NUMEL), torch.arange(NUMEL, dtype=torch.float32))
    with pytest.raises(PartialRecordError):
        whole(vector)
    vector.write(0, torch.ones(NUMEL))
    store.flush()
    assert torch.equal(whole(vector), torch.ones(NUMEL))
    tier.close()


def test_copies_of_any_size_and_of_no_more_memory_than_two_parts(tmp_path: Path) -> None:
    tier = NvmeTier([str(tmp_path)])
    copies = FileCopies(tier, "copies")
    tensors = {
        "none": torch.empty(0),
        "one": torch.tensor([3.5], dtype=torch.float64),
        "odd": torch.arange(4099, dtype=torch.bfloat16)[1:],
        "parts": torch.arange(PART_BYTES // 4 + 5),
        "rows": torch.arange(24).view(4, 6).t(),
    }
    sizes = {name: values.numel() * values.itemsize for name, values in tensors.items()}
    for _ in range(2):
        copies.reserve(sizes)
        copies.write(tensors.items())
        for name, values in tensors.items():
            assert torch.equal(copies.read(name, values.dtype), values.reshape(-1)), name
    assert copies.nbytes[0] == sum(sizes.values()) and copies.nbytes[1] % 4096 == 0
    copies.clear()
    assert copies.nbytes == (0, 0)
    tier.close()
