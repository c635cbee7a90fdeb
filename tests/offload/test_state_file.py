"""Records on a drive: any sizes, several directories, full disks, corruption, torn records."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.offload.files import aligned, every_backend, need, nothing_left, random_bytes
from zero_strategy.offload import file_io as direct_io
from zero_strategy.offload import part_file
from zero_strategy.offload.file_queues import Backend, open_queue
from zero_strategy.offload.part_file import CorruptRecordError
from zero_strategy.offload.state_file import PartialRecordError, StateFile, StateLayout

SIZES = {"zero": 0, "one": 1, "odd": 4097, "page": 4096, "prime": 99_991, "even": 131_072, "large": 300_007}


@pytest.fixture(params=["direct", "plain"])
def manner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Past the page cache as far as the file system allows, or not at all."""
    if request.param == "plain":
        monkeypatch.setattr(part_file, "O_DIRECT", 0)
    return str(request.param)


def contents(seed: int = 0) -> dict[str, Tensor]:
    return {name: random_bytes(nbytes, seed + number) for number, (name, nbytes) in enumerate(SIZES.items())}


def memory_for(state: StateFile, name: str, how: str) -> Tensor:
    """Fresh memory: padded to whole pages, of the exact size, or at an odd address."""
    nbytes = state.nbytes_of(name)
    if how == "padded":
        return aligned(-(-nbytes // state.alignment) * state.alignment)
    return aligned(nbytes) if how == "exact" else aligned(nbytes + 3)[3:]


@every_backend
@pytest.mark.parametrize("directories", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_records_of_any_size_from_any_memory(
    tmp_path: Path, backend: Backend, directories: int, seed: int, manner: str
) -> None:
    need(backend)
    draw, latest = random.Random(seed), contents()
    places = [tmp_path / str(number) for number in range(directories)]
    with open_queue(backend, depth=3, block_bytes=16_384) as queue:
        with StateFile(places, SIZES, queue=queue, stripe_bytes=20_480, checksums=seed == 1) as state:
            if manner == "plain":
                assert state.direct == [False] * directories
            assert state.nbytes == sum(SIZES.values()) and state.alignment % 4096 == 0
            for round_number in range(3):
                latest = contents(100 * round_number)
                moving = []
                for name in draw.sample(list(SIZES), len(SIZES)):
                    memory = memory_for(state, name, draw.choice(["padded", "exact", "odd"]))
                    memory[: SIZES[name]] = latest[name]
                    moving.append(state.write(name, memory))
                draw.shuffle(moving)
                for transfer in moving[: draw.randrange(len(moving))]:
                    transfer.wait()  # the others are waited for by what reads them
                for name in draw.sample(list(SIZES), len(SIZES)):
                    memory = memory_for(state, name, draw.choice(["padded", "exact", "odd"]))
                    state.read(name, memory).wait()
                    assert torch.equal(memory[: SIZES[name]], latest[name]), name
    for place in places:
        assert list(place.iterdir()) == []


def test_parts_of_records(tmp_path: Path) -> None:
    content = random_bytes(300_007)
    with StateFile([tmp_path / "a", tmp_path / "b"], {"r": 300_007}, stripe_bytes=12_288, checksums=True) as state:
        for start in (200_704, 0, 102_400):
            memory = aligned(min(102_400, 300_007 - start)).copy_(content[start : start + 102_400])
            if start == 200_704:
                memory = aligned(99_303).copy_(content[200_704:])
            state.write("r", memory, start)
        for start, nbytes in ((0, 300_007), (4096, 1), (8192, 150_001), (299_008, 999), (299_008, 4096)):
            found = aligned(nbytes)
            state.read("r", found, start).wait()
            assert torch.equal(found[: 300_007 - start], content[start : start + nbytes])


def test_records_that_were_never_written_are_zeros(tmp_path: Path) -> None:
    with StateFile(tmp_path, {"r": 100_001}) as state:
        found = random_bytes(100_001)
        state.read("r", found).wait()
        assert not found.any()


def test_any_dtype_and_shape(tmp_path: Path) -> None:
    values = torch.randn(33, 7, generator=torch.Generator().manual_seed(0))
    with StateFile(tmp_path, {"r": values.numel() * 4}) as state:
        state.write("r", values).wait()
        found = torch.empty(33, 7)
        state.read("r", found).wait()
        assert torch.equal(found, values)


def test_transfers_of_the_same_bytes_keep_their_order(tmp_path: Path) -> None:
    with StateFile(tmp_path, {"r": 200_000}) as state:
        for value in range(30):
            state.write("r", torch.full((200_000,), value, dtype=torch.uint8))
            found = torch.empty(200_000, dtype=torch.uint8)
            state.read("r", found).wait()
            assert (found == value).all()


def test_ranges_that_are_none(tmp_path: Path) -> None:
    with StateFile(tmp_path, {"layers.0": 10_000}) as state:
        with pytest.raises(ValueError, match=r"no record 'layer.0' in .*; the nearest is 'layers\.0'"):
            state.read("layer.0", aligned(1))
        for start, nbytes in ((1, 5), (0, 10_001), (-4096, 10), (12_288, 1), (4096, 10_000)):
            with pytest.raises(ValueError, match=r"are no range of record 'layers\.0', which has 10000 bytes"):
                state.read("layers.0", aligned(nbytes), start)
        with pytest.raises(ValueError, match="a write must end at a multiple of 4096 bytes or at the record's end"):
            state.write("layers.0", aligned(5000))
        with pytest.raises(ValueError, match="contiguous and on the CPU"):
            state.write("layers.0", aligned(9998)[::2])
        with pytest.raises(ValueError, match="contiguous and on the CPU, not on meta"):
            state.read("layers.0", torch.empty(10_000, dtype=torch.uint8, device="meta"))
    with pytest.raises(ValueError, match="is closed"):
        state.read("layers.0", aligned(1))
    with pytest.raises(ValueError, match="needs at least one directory"):
        StateFile([], {})
    with pytest.raises(ValueError, match="is named twice"):
        StateFile([tmp_path, str(tmp_path)], {})
    with pytest.raises(ValueError, match="record 'r' cannot have -1 bytes"):
        StateFile(tmp_path, {"r": -1})
    with pytest.raises(ValueError, match="stripe_bytes must be a positive multiple of 4096, got 100"):
        StateFile(tmp_path, {"r": 1}, stripe_bytes=100)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("directories", [1, 2, 5])
def test_places_are_disjoint_and_divided_evenly(directories: int) -> None:
    draw = random.Random(directories)
    records = {str(number): draw.choice([0, 1, 4096, 5000, 70_000, 200_001]) for number in range(60)}
    layout = StateLayout(records, directories, 4096, 8192)
    taken: list[set[int]] = [set() for _ in range(directories)]
    for name, nbytes in records.items():
        places = layout.places(name, 0, layout.padded(nbytes))
        assert [place.begin for place in places[1:]] == [place.end for place in places[:-1]]
        assert sum(place.end - place.begin for place in places) == layout.padded(nbytes)
        for place in places:
            units = set(range(place.offset // 4096, (place.offset + place.end - place.begin) // 4096))
            assert place.offset % 4096 == 0 and not units & taken[place.directory]
            taken[place.directory] |= units
    assert [4096 * len(units) for units in taken] == list(layout.sizes)  # no gaps
    assert max(layout.sizes) - min(layout.sizes) <= 8192 * 2


# --------------------------------------------------------------------------------------------------- disks and files


def test_space_is_taken_at_the_start(tmp_path: Path) -> None:
    with StateFile(tmp_path, {"r": 8 << 20}) as state:
        fd = state._parts[0]._fd
        assert os.fstat(fd).st_size == 8 << 20 == state.disk_nbytes[0]
        assert os.fstat(fd).st_blocks * 512 >= 8 << 20


def test_a_disk_that_is_too_small_is_an_error_at_the_start(tmp_path: Path) -> None:
    with nothing_left(), pytest.raises(OSError, match=r"No space left on device: the state needs 1,125,8") as caught:
        StateFile([tmp_path / "a", tmp_path / "b"], {"r": 1 << 51}, queue=None)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "a")
    for part in ("bytes here, and", "are free", "offload.nvme_path", "offload.optimizer"):
        assert part in str(caught.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_limit_of_file_sizes_is_found_at_the_start(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large: the state needs 2,097,152 bytes here") as caught:
            StateFile(tmp_path, {"r": 2 << 20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_file_system_that_fills(small_disk: Path) -> None:
    with pytest.raises(OSError, match=r"needs 2,097,152 bytes here, and 1,0\d\d,\d\d\d are free"):
        StateFile(small_disk, {"r": 2 << 20})
    with StateFile(small_disk, {"r": 700_001}) as state:
        with pytest.raises(OSError, match="No space left"):  # the first one's bytes are taken, with or without a name
            StateFile(small_disk, {"r": 700_001})
        content, found = random_bytes(700_001), aligned(700_001)
        state.write("r", content).wait()
        state.read("r", found).wait()
        assert torch.equal(found, content)
    StateFile(small_disk, {"r": 700_001}).close()  # and given back


@every_backend
def test_a_disk_that_fills_later_where_space_cannot_be_reserved(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(backend)
    monkeypatch.setattr(part_file, "_allocate", lambda fd, nbytes: None)
    state = StateFile(tmp_path, {"a": 1 << 20, "b": 1 << 20}, queue=open_queue(backend), checksums=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_458_688, limits[1]))
    try:
        state.write("a", aligned(1 << 20)).wait()
        with pytest.raises(OSError, match=r"write of \d+ bytes at byte offset \d+: File too large \(record 'b'\)") as e:
            state.write("b", aligned(1 << 20)).wait()
        assert e.value.filename == str(state.paths[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(PartialRecordError, match=r"'b' .* is partially written: a write failed: .*File too large"):
        state.read("b", aligned(1 << 20))
    content, found = random_bytes(1 << 20), aligned(1 << 20)
    state.write("b", content[:524_288]).wait()
    with pytest.raises(PartialRecordError):
        state.read("b", found)
    state.write("b", content[524_288:], 524_288).wait()  # whole again
    state.read("b", found).wait()
    assert torch.equal(found, content) and not state.partially_applied
    state.close()
    state.queue.close()


def test_where_direct_io_is_refused_the_page_cache_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & direct_io.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    real = os.open
    monkeypatch.setattr(os, "open", refused)
    with StateFile(tmp_path, {"r": 10_001}) as state:
        assert state.direct == [False]
        content, found = random_bytes(10_001), aligned(10_001)
        state.write("r", content).wait()
        state.read("r", found).wait()
        assert torch.equal(found, content)


def test_the_alignment_is_asked_for_and_tried(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(8192))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("no direct I/O here")
    rules = direct_io.direct_rules(fd)
    assert rules is not None and direct_io.can_read(fd, rules)
    assert rules.offset >= 512 and rules.offset & (rules.offset - 1) == 0
    os.close(fd)


@every_backend
def test_a_file_that_is_cut_short_under_the_reader(tmp_path: Path, backend: Backend) -> None:
    need(backend)
    with open_queue(backend) as queue, StateFile(tmp_path, {"r": 1 << 20}, queue=queue, keep_name=True) as state:
        state.write("r", aligned(1 << 20)).wait()
        os.truncate(state.paths[0], 300_000)
        with pytest.raises(OSError, match=r"the file ends before that \(record 'r'\)") as caught:
            state.read("r", aligned(1 << 20)).wait()
        assert caught.value.filename == str(state.paths[0])


@pytest.mark.parametrize("byte", [0, 5000, 99_990])
def test_a_changed_byte_is_found_and_named(tmp_path: Path, byte: int) -> None:
    with StateFile(tmp_path, {"a": 4096, "b": 99_991}, keep_name=True, checksums=True) as state:
        state.write("a", random_bytes(4096)).wait()
        state.write("b", random_bytes(99_991)).wait()
        with open(state.paths[0], "r+b") as file:
            file.seek(4096 + byte)
            old = file.read(1)
            file.seek(4096 + byte)
            file.write(bytes([old[0] ^ 1]))
        state.read("a", aligned(4096)).wait()
        reading = state.read("b", aligned(99_991))
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=r"record 'b': bytes 0 to 99991 are not .*") as caught:
                reading.wait()
        assert str(state.paths[0]) in str(caught.value)
        state.write("b", random_bytes(99_991, 1)).wait()
        state.read("b", aligned(99_991)).wait()


# ----------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("keep_name", [False, True])
def test_nothing_is_left_behind(tmp_path: Path, keep_name: bool) -> None:
    with nothing_left():
        state = StateFile(tmp_path, {"r": 100_000}, keep_name=keep_name, label="run 7/a", rank=3)
        assert [path.exists() for path in state.paths] == [keep_name]
        assert ".run-7-a.rank3." in state.paths[0].name
        state.write("r", random_bytes(100_000))  # closing waits for it
        state.close()
        state.close()
        with pytest.raises(KeyError, match="the user's"), StateFile(tmp_path, {"r": 1 << 20}, keep_name=keep_name) as s:
            s.write("r", random_bytes(1 << 20))
            raise KeyError("the user's")
        forgotten = StateFile(tmp_path, {"r": 10}, keep_name=keep_name)
        forgotten.write("r", random_bytes(10)).wait()
        del forgotten
    assert list(tmp_path.iterdir()) == []


@every_backend
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_is_forgotten_ends_its_transfers_first(
    tmp_path: Path, backend: Backend, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(backend)
    monkeypatch.setenv("ZERO_STRATEGY_IO", backend)
    victim = tmp_path / "victim"
    with nothing_left():
        queue = open_queue(depth=1, block_bytes=4096) if shared else None
        for _ in range(10):
            state = StateFile(tmp_path / "state", {"r": 4 << 20}, queue=queue)
            for start in range(0, 4 << 20, 1 << 20):
                state.write("r", aligned(1 << 20).fill_(7), start)
            del state
            gc.collect()  # transfers and their file refer to one another
            # Were blocks still to come, this file would get them: it takes the descriptors' numbers.
            fds = [os.open(victim, os.O_RDWR | os.O_CREAT) for _ in range(3)]
            for fd in fds:
                os.close(fd)
        if queue is not None:
            queue.close()
    assert victim.stat().st_size == 0 and list((tmp_path / "state").iterdir()) == []


def test_a_name_goes_at_exit_too(tmp_path: Path) -> None:
    script = (
        "import sys; from zero_strategy.offload.state_file import StateFile\n"
        "state = StateFile(sys.argv[1], {'r': 10}, keep_name=True); assert state.paths[0].exists()\n"
        "raise RuntimeError('the end')"
    )
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert "the end" in done.stderr and list(tmp_path.iterdir()) == []
