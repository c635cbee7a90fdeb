"""The probe: what it chooses, and that it leaves nothing. No speeds are asserted."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.offload.files import every_backend, need, nothing_left
from zero_strategy.offload import stores
from zero_strategy.offload.file_io import Extent, Kind
from zero_strategy.offload.file_queues import Backend, open_queue
from zero_strategy.offload.stores import BLOCKS, DEPTHS, Trial, choose, probe


@every_backend
def test_a_drive_is_measured(tmp_path: Path, backend: Backend) -> None:
    need(backend)
    open_queue(backend).close()
    with nothing_left():
        found = probe(tmp_path / "new", seconds=0.3, backend=backend)
    assert list((tmp_path / "new").iterdir()) == []
    assert found.backend == backend and found.trials
    assert all(trial.read > 0 and trial.write > 0 for trial in [*found.trials, found.chosen])
    assert {trial.block_bytes for trial in found.trials} <= set(BLOCKS)
    assert {trial.depth for trial in found.trials} == set(DEPTHS)
    assert str(found).startswith(f"{tmp_path / 'new'}: reads ") and f"by {backend}" in str(found)
    expected = 1e9 / found.chosen.read + 2e9 / found.chosen.write
    assert found.seconds(10**9, 2 * 10**9) == pytest.approx(expected)


class SteadyDrive:
    """A queue to a drive of one speed, and the clock of which only its transfers take time."""

    backend = "steady"

    def __init__(self, speed: float) -> None:
        self.speed, self.now, self.ends = speed, 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def submit(self, kind: Kind, extents: Sequence[Extent]) -> SimpleNamespace:
        end = self.ends = max(self.ends, self.now) + sum(extent.memory.numel() for extent in extents) / self.speed

        def wait() -> None:
            self.now = max(self.now, end)

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(("speed", "most"), [(5e7, 3.2), (2e8, 3.2), (1e9, 1.8), (6e9, 1.1)])
def test_a_probe_keeps_to_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float, most: float) -> None:
    drive = SteadyDrive(speed)
    monkeypatch.setattr(stores, "time", drive)
    monkeypatch.setattr(stores, "open_queue", lambda *args, **kwargs: nullcontext(drive))
    found = probe(tmp_path, seconds=1.5)
    assert found.chosen.read == pytest.approx(speed) and found.chosen.write == pytest.approx(speed)
    assert drive.now < most * 1.5


def test_the_least_that_is_nearly_as_fast_is_chosen() -> None:
    slow, small, best = Trial(1 << 20, 1, 5e8, 1e9), Trial(1 << 20, 8, 0.97e9, 1.9e9), Trial(4 << 20, 32, 1e9, 1.9e9)
    assert choose([slow, best, small]) == small
    assert slow.both == pytest.approx(2 * 5e8 * 1e9 / 1.5e9)
    one_sided = Trial(1 << 18, 1, 3e9, 1e8)  # fast reads do not make up for slow writes
    assert choose([one_sided, best]) == best


def test_a_drive_with_little_room(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        assert probe(tmp_path, seconds=0.1).chosen.read > 0
        (tmp_path / "full").write_bytes(bytes(9 << 19))
        with pytest.raises(OSError, match="needs 1,048,576 bytes here"):
            probe(tmp_path, seconds=0.1)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_no_time_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="positive number of seconds, got 0"):
        probe(tmp_path, seconds=0)
