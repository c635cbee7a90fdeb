"""Writes past the page cache: any ranges in any order and of any memory, errors by name, and a bound on the speed."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from zero_strategy.checkpoint import disk
from zero_strategy.checkpoint.disk import DiskWriter, all_beside, beside, by_age, create_file, replace_file
from zero_strategy.runtime.host_bytes import PAGE, AlignedArena, is_aligned

SIZE = 300_000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CHUNK_BYTES", 16384)
    monkeypatch.setattr(disk, "_BORROW_BYTES", 10_000)


def content(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def placed(data: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose address is congruent to the offset."""
    arena = AlignedArena()
    arena.reserve(data.numel() + PAGE)
    copy = arena.take(data.numel(), offset).copy_(data)
    assert is_aligned(copy, offset)
    return copy


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_ranges_in_any_order_from_any_memory(tmp_path: Path, seed: int, threads: int) -> None:
    generator = random.Random(seed)
    whole = {name: content(number) for number, name in enumerate(("a", "b"))}
    cuts = {name: sorted({0, SIZE, *(generator.randrange(SIZE) for _ in range(12))}) for name in whole}
    ranges = [(name, a, b) for name, at in cuts.items() for a, b in pairwise(at)]
    if seed % 2:
        generator.shuffle(ranges)
    for name in whole:
        create_file(tmp_path / name, b"head", SIZE)
    seen: list[bytes] = []
    borrowed = []
    writer = DiskWriter(tmp_path, threads=threads)
    for name, a, b in ranges:
        data = whole[name][a:b].clone()
        if generator.random() < 0.5:
            data = placed(data, a)
        if not is_aligned(data, a) or data.numel() < disk._BORROW_BYTES:
            writer.write(name, data, a, lambda memory: seen.append(bytes(memory)))
            data.zero_()  # it was copied
        else:
            borrowed.append(data)
            writer.write(name, data, a, lambda memory: seen.append(bytes(memory)))
    writer.finish()
    assert borrowed or seed % 2 == 0
    assert b"".join(seen) == b"".join(bytes(whole[name][a:b].numpy()) for name, a, b in ranges)
    for name in whole:
        assert (tmp_path / name).read_bytes() == bytes(whole[name].numpy())


def test_without_direct_writes_everything_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, refused = os.pwrite, []

    def refusing(fd: int, data: memoryview, offset: int) -> int:
        if os.get_blocking(fd) and fd in direct_files():
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, data, offset)

    def direct_files() -> list[int]:
        return [file._direct for file in writer._files.values() if file._direct is not None]

    create_file(tmp_path / "a", b"", SIZE)
    writer = DiskWriter(tmp_path)
    monkeypatch.setattr(os, "pwrite", refusing)
    writer.write("a", content(0), 0)
    writer.finish()
    assert (tmp_path / "a").read_bytes() == bytes(content(0).numpy())
    assert refused


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_says_where_and_stops_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    create_file(tmp_path / "a", b"", SIZE)
    writer = DiskWriter(tmp_path, threads=threads)
    pwrite = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset >= 32768:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        writer.write("a", content(0), 0)
        writer.finish()
    writer.close()
    assert caught.value.filename == str(tmp_path / "a")
    assert writer.failed_at is not None and writer.failed_at[0] == "a" and writer.failed_at[1] >= 32768


def test_space_is_reserved_before_the_first_byte(tmp_path: Path) -> None:
    create_file(tmp_path / "a", b"head", 1 << 20)
    status = (tmp_path / "a").stat()
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20 or status.st_blocks * 512 < 1 << 16  # a file system that cannot reserve
    with pytest.raises(OSError, match=r"No space|too large"):
        create_file(tmp_path / "b", b"", 1 << 60)


def test_the_speed_is_bounded(tmp_path: Path) -> None:
    create_file(tmp_path / "a", b"", SIZE)
    writer = DiskWriter(tmp_path, bytes_per_second=1e6)
    begin = time.monotonic()
    writer.write("a", content(0), 0)
    writer.finish()
    assert time.monotonic() - begin >= 0.25  # a lower bound cannot flake


def test_an_arena_is_reused_and_never_shrinks() -> None:
    arena = AlignedArena()
    arena.reserve(100_000)
    first = arena.take(50_000, 17)
    assert is_aligned(first, 17)
    address = first.data_ptr()
    arena.reserve(60_000)
    assert arena.take(50_000, 17).data_ptr() == address
    assert arena.nbytes == 100_000


def test_what_is_removed_while_a_folder_is_looked_through_is_left_out(tmp_path: Path) -> None:
    """A save before it may still be removing what its checkpoint was before."""
    paths = [beside(tmp_path / "c", f"t{number}", "tmp") for number in range(3)]
    for number, path in enumerate(paths):
        path.mkdir()
        os.utime(path, ns=(0, 1000 - number))
    listed = list(paths)
    paths[1].rmdir()
    assert by_age(listed) == [paths[2], paths[0]] == all_beside(tmp_path / "c", "tmp")
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            paths[1].mkdir()
            paths[1].rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            assert {paths[0], paths[2]} <= set(all_beside(tmp_path / "c", "tmp"))
    finally:
        ended.set()
        thread.join()


def test_two_that_replace_a_file_at_once_do_not_take_each_other_s(tmp_path: Path) -> None:
    errors: list[OSError] = []

    def replace(content: bytes) -> None:
        for _ in range(100):
            try:
                replace_file(tmp_path / "latest", content)
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=replace, args=(content,)) for content in (b"one", b"two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert os.listdir(tmp_path) == ["latest"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "latest", b"step-1")
    assert os.listdir(tmp_path) == ["latest"]
