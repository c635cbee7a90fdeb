"""Memory of a machine, read from trees of files like those of the kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

from zero_strategy.planning.machine import Machine

GB = 10**9


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


MEMINFO = {"proc/meminfo": f"MemTotal:  64000000 kB\nMemAvailable: {40 * GB // 1024} kB"}


def test_without_control_groups_it_is_what_is_available(tmp_path: Path) -> None:
    found = Machine.here(root=tree(tmp_path, MEMINFO))
    assert (found.host_free, found.host_bound) == (40 * GB // 1024 * 1024, "MemAvailable")


def test_the_tightest_group_counts_and_idle_cache_is_free(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": str(2 * GB),
        "sys/fs/cgroup/a/memory.max": str(8 * GB),
        "sys/fs/cgroup/a/memory.current": str(5 * GB),
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GB}\nactive_file 7",
    }
    found = Machine.here(root=tree(tmp_path, files))
    assert found.host_free == 4 * GB
    assert found.host_bound == f"limit of the control group ({tmp_path / 'sys/fs/cgroup/a'})"


def test_version_1_and_its_way_to_say_none(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GB),
    }
    assert Machine.here(root=tree(tmp_path, files)).host_free == 2 * GB


def test_a_path_of_the_host_leads_to_the_mount(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/docker/123",
        "sys/fs/cgroup/memory.max": str(6 * GB),
        "sys/fs/cgroup/memory.current": str(GB),
    }
    assert Machine.here(root=tree(tmp_path, files)).host_free == 5 * GB


def test_a_full_group_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": "100",
        "sys/fs/cgroup/memory.current": "200",
    }
    assert Machine.here(root=tree(tmp_path, files)).host_free == 0


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    found = Machine.here(tmp_path / "not" / "yet", root=tmp_path)
    assert found.disk_path == str(tmp_path / "not" / "yet")
    assert found.disk_free is not None and abs(found.disk_free - shutil.disk_usage(tmp_path).free) < GB
    assert found.host_free is None and found.shm_free is not None, "no files of the kernel there"


def test_this_machine() -> None:
    found = Machine.here()
    assert found.host_free is None or found.host_free > 0
    assert found.disk_free is None
