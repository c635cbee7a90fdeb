"""The probe: what it chooses, and that it leaves nothing. No speeds are asserted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.offload.files import every_backend, need, nothing_left
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
