"""Lightning, Accelerate, transformers and loops on a real Slurm of two nodes, as the guide starts them there.

What they train has the bits of ranks of one host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.faces import LONG
from tests.cluster.hosts import INTERFACE
from tests.cluster.one_host import FACES, ROOT, Results, on_one_host, read_results, trained
from tests.cluster.slurm import Cluster, slurm_cluster, why_not
from zero_strategy.comm.process_group import first_host, port_of_job

GUIDE = ROOT / "docs" / "guides" / "multi_node.md"
needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not())


def commands() -> list[str]:
    """Blocks of the guide's section about Slurm: the first host and the port; Lightning; Accelerate; torchrun."""
    section = GUIDE.read_text().partition("## SLURM: ")[2].partition("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


def as_guided(which: int, folder: Path, face: str, processes: int = 1) -> str:
    """The guide's lines for this script and that many processes on each host."""
    line = commands()[which].replace("train.py", f"{FACES} {face} {folder}")
    line = line.replace("--nproc-per-node 8", f"--nproc-per-node {processes}").replace("((8 *", f"(({processes} *")
    config = ROOT / "configs" / "accelerate" / "several_nodes.yaml"
    line = line.replace("--config_file accelerate.yaml", f"--config_file {config} --mixed_precision no")
    return commands()[0] + line


def test_commands_of_the_guide_are_those_that_are_run() -> None:
    head, lightning, accelerate, torchrun = (as_guided(which, Path("/f"), "face") for which in range(4))
    assert head.count("MASTER") == 0 and "scontrol show hostnames" in head
    assert f"srun python {FACES} face /f" in lightning
    assert "several_nodes.yaml" in accelerate and "$((1 * SLURM_NNODES))" in accelerate
    assert "--nproc-per-node 1 " in torchrun
    assert all(f"{FACES} face /f" in each and "train.py" not in each for each in (lightning, accelerate, torchrun))


@pytest.mark.parametrize("names", ["n-1x[07-08].sub", "n-1x07.sub,n-1x08.sub"])
def test_first_of_odd_names(names: str) -> None:
    assert first_host(names) == "n-1x07.sub"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nodes whose names Slurm shortens to `n-1x[07-08]`."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), ("n-1x07", "n-1x08"), **ENV) as made:
        yield made


ENV = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def results(cluster: Cluster, job: str, folder: Path, count: int, seconds: float = 500) -> Results:
    """Results by rank, when the job has ended."""
    cluster.wait("end", lambda: not cluster.state(job), seconds)
    found = read_results(folder)
    assert len(found) == count, cluster.logs(f"*-{job}.log")
    return found


@needs_slurm
@pytest.mark.timeout(900)
def test_the_trainer_of_lightning_under_srun(cluster: Cluster, tmp_path: Path) -> None:
    script = as_guided(1, tmp_path / "run", "lightning")
    job = cluster.submit("lightning", script, "--nodes=2", "--ntasks-per-node=1")
    found = results(cluster, job, tmp_path / "run", 2)
    assert len(found[0]["losses"]) == 20
    assert [one["environment"]["SLURM_NODEID"] for one in found] == ["0", "1"]
    assert trained(found) == trained(on_one_host(tmp_path, "lightning", 2))


@needs_slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("which", "face", "processes"), [(2, "accelerate", 2), (2, "transformers", 1), (3, "transformers", 1)]
)
def test_a_launcher_of_each_node_under_srun(
    cluster: Cluster, tmp_path: Path, which: int, face: str, processes: int
) -> None:
    script = as_guided(which, tmp_path / "run", face, processes)
    job = cluster.submit(f"{face}{which}", script, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2")
    found = results(cluster, job, tmp_path / "run", 2 * processes)
    assert trained(found) == trained(on_one_host(tmp_path, face, 2 * processes))


@needs_slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("face", ["accelerate", "transformers"])
def test_tasks_of_srun_that_start_their_group_themselves(cluster: Cluster, tmp_path: Path, face: str) -> None:
    script = f"srun python {FACES} {face} {tmp_path / 'run'} tasks"
    job = cluster.submit(f"tasks-{face}", script, "--nodes=2", "--ntasks-per-node=1")
    found = results(cluster, job, tmp_path / "run", 2)
    ports = {one["environment"]["MASTER_PORT"] for one in found}
    assert ports == {str(port_of_job({"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}))}
    assert trained(found) == trained(on_one_host(tmp_path, face, 2))


@needs_slurm
@pytest.mark.timeout(900)
def test_tasks_of_srun_without_a_group_are_told_by_accelerate(cluster: Cluster, tmp_path: Path) -> None:
    script = f"srun python {FACES} accelerate {tmp_path / 'run'}"
    job = cluster.submit("alone", script, "--nodes=2", "--ntasks-per-node=1")
    cluster.wait("end", lambda: not cluster.state(job))
    (log,) = cluster.logs("alone-*.log").values()
    assert "srun started 2 processes, but Accelerate does not read its variables" in log, log
    assert not list((tmp_path / "run").glob("*.json"))


@needs_slurm
@pytest.mark.timeout(900)
def test_two_tasks_of_an_array_on_the_same_nodes_at_the_same_time(cluster: Cluster, tmp_path: Path) -> None:
    script = f"export TOGETHER=4\nsrun python {FACES} loop {tmp_path / 'run'}"
    array = cluster.submit("array", script, "--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    found = results(cluster, array, tmp_path / "run", 4)
    places = {(one["environment"]["SLURM_JOB_ID"], one["environment"]["MASTER_PORT"]) for one in found}
    assert len(places) == len({job for job, _ in places}) == len({port for _, port in places}) == 2, places
    assert {one["environment"]["MASTER_ADDR"] for one in found} == {"n-1x07"}
    expected = trained(on_one_host(tmp_path, "loop", 2))
    assert trained(found) == [each for each in expected for _ in range(2)], "each of two ranks"


@needs_slurm
@pytest.mark.timeout(900)
def test_nodes_with_dots_in_their_names(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path, ("n-1x07.sub", "n-1x08.sub"), **ENV) as dotted:
        job = dotted.submit("dots", f"srun python {FACES} loop {tmp_path / 'run'}", "--nodes=2", "--ntasks-per-node=1")
        found = results(dotted, job, tmp_path / "run", 2)
    assert [one["environment"]["MASTER_ADDR"] for one in found] == ["n-1x07.sub"] * 2
    assert trained(found) == trained(on_one_host(tmp_path, "loop", 2))


def batches(folder: Path) -> list[list[int]]:
    """Start and step of each batch of rank 0, in their order."""
    path = folder / "batches-0"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


@needs_slurm
@pytest.mark.timeout(900)
def test_a_trainer_is_saved_and_requeued_at_a_signal_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = f"srun python {FACES} lightning {folder} slowly"
    job = cluster.submit("requeued", script, "--nodes=2", "--ntasks-per-node=1", "--requeue")
    cluster.wait("training", lambda: len(batches(folder)) > 5)
    # As `--signal=USR1@300` does it: to the tasks.
    cluster.run("scancel", "--signal=USR1", job)
    cluster.wait("checkpoint", lambda: (folder / "hpc_ckpt_1.ckpt").exists(), 30)
    found = results(cluster, job, folder, 2)
    starts = {start for start, _ in batches(folder)}
    first = next(step for start, step in batches(folder) if start == 1)
    assert starts == {0, 1} and 5 < first < LONG - 1
    expected = on_one_host(tmp_path, "lightning", 2, "long")
    for one, whole in zip(found, expected, strict=True):
        assert one["first"] == first and one["losses"] == whole["losses"][first:]
