"""Both sbatch files on a real Slurm of two nodes: train, save and requeue at the end of their time, lose a node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.hosts import INTERFACE
from tests.cluster.slurm import Cluster, slurm_cluster, why_not
from tests.cluster.test_two_hosts import write_text

ROOT = Path(__file__).parents[2]
MARKED = {
    "--nodes=4": "--nodes=2",
    "--gpus-per-node=8": "--gpus-per-node=2",
    "--ntasks-per-node=8": "--ntasks-per-node=2",
    "--cpus-per-task=8": "--cpus-per-task=1",
    "--cpus-per-task=64": "--cpus-per-task=2",
    "--time=24:00:00": "--time=00:20:00",
}
"""Lines that the files ask their readers to change."""
SMALL = """
import runpy, sys
sys.argv += ["--text={text}", "--n-layer=1", "--n-head=2", "--d-model=16", "--block-size=16", "--timeout-seconds=30"]
sys.path.insert(0, "{examples}")
runpy.run_path("{examples}/cluster_gpt.py", run_name="__main__")
"""


def changed(name: str) -> str:
    """An sbatch file with its marked lines changed, and no others."""
    lines = []
    for line in (ROOT / "examples" / "cluster" / name).read_text().splitlines():
        marked = line
        for old, new in MARKED.items() if "<-" in line else ():
            marked = re.sub(rf"{old}\b", new, marked)
        lines.append(marked)
    return "\n".join(lines) + "\n"


def repository(folder: Path) -> Path:
    """A place with the example in it, for a model that two cores can train."""
    (folder / "examples").mkdir(parents=True)
    text = SMALL.format(text=write_text(folder / "text"), examples=ROOT / "examples")
    (folder / "examples" / "cluster_gpt.py").write_text(text)
    return folder


def starts(cluster: Cluster) -> list[int]:
    """Steps after which the job's starts went on."""
    logs = "".join(path.read_text(errors="replace") for path in cluster.folder.glob("zero-gpt-*.log"))
    return [int(step) for step in re.findall(r"4 ranks go on after step (\d+)", logs)]


def steps(cluster: Cluster) -> int:
    logs = "".join(path.read_text(errors="replace") for path in cluster.folder.glob("zero-gpt-*.log"))
    return max([0, *(int(step) for step in re.findall(r"^step +(\d+)", logs, re.MULTILINE))])


@pytest.mark.parametrize("name", ["slurm_srun.sbatch", "slurm_torchrun.sbatch"])
def test_marked_lines_alone_are_changed(name: str) -> None:
    before = (ROOT / "examples" / "cluster" / name).read_text().splitlines()
    different = [old for old, new in zip(before, changed(name).splitlines(), strict=True) if old != new]
    assert len(different) >= 4 and all("<-" in line for line in different)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["slurm_srun.sbatch", "slurm_torchrun.sbatch"])
def test_a_job_trains_is_requeued_loses_a_node_and_goes_on(tmp_path: Path, name: str) -> None:
    env = {
        "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(ROOT), "FOLDER": str(tmp_path / "checkpoints"),
        "REPOSITORY": str(repository(tmp_path / "repository")), "GPUS_PER_NODE": "2", "SAVE_SECONDS": "10",
    }  # fmt: skip
    with slurm_cluster(tmp_path, **env) as cluster:
        (tmp_path / name).write_text(changed(name))
        job = cluster.run("sbatch", "--parsable", name)
        cluster.wait("training", lambda: steps(cluster) >= 20, 240)
        assert starts(cluster) == [0]
        # As at the end of its time: to the script, which tells the ranks to save.
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        cluster.wait("second start", lambda: len(starts(cluster)) == 2, 240)
        saved = starts(cluster)[1]
        assert saved >= 20
        cluster.wait("training of the second start", lambda: steps(cluster) >= saved + 10, 240)
        lost = cluster.hosts[1]
        lost.kill()
        lost.processes.clear()
        cluster.wait("requeued job", lambda: cluster.state(job) == "PD", 90)
        cluster.start_node(lost)
        cluster.wait("third start", lambda: len(starts(cluster)) == 3, 240)
        assert starts(cluster)[2] >= saved
        cluster.run("scancel", job)
        cluster.wait("end", lambda: not cluster.state(job), 60)
