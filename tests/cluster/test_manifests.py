"""Programs that `examples/cluster/` starts: names, ports and variables agree, and the script takes its options."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import get_args_parser

import cluster_gpt

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])
PROGRAMS = ("srun", "scontrol", "scancel", "torchrun", "python")
JOB = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[03-06]", "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "16",
}  # fmt: skip


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def torchrun(words: list[str]) -> Any:
    """Variables that torchrun makes of its options, and arguments that it leaves to the script."""
    parsed = get_args_parser().parse_args(words)
    assert (ROOT / parsed.training_script).name == "cluster_gpt.py" and (ROOT / parsed.training_script).is_file()
    parsed.script = cluster_gpt.parse(parsed.training_script_args)
    return parsed


def substituted(words: list[str], env: dict[str, str]) -> list[str]:
    """$(NAME) as Kubernetes replaces it; a name that is not there would stay as it is."""
    replaced = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in words]
    assert not any("$" in word for word in replaced)
    return replaced


def check_pod(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The container and its environment; volumes that are mounted are there."""
    (container,) = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert all(isinstance(value, str) for value in env.values()), "Kubernetes refuses numbers"
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"]
    assert spec["terminationGracePeriodSeconds"] > 30, "torchrun waits 30 seconds for its ranks"
    return container, env


def test_job_and_service_agree() -> None:
    service, job = documents("kubernetes_job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    container, env = check_pod(pod)
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    program, *words = substituted(container["command"], env)
    started = torchrun(words)
    (port,) = service["spec"]["ports"]
    host, _, rendezvous_port = started.rdzv_endpoint.partition(":")
    assert program == "torchrun" and started.rdzv_backend == "c10d"
    assert host == f"{name}-0.{service['metadata']['name']}", "the first pod, by its name in the service"
    assert int(rendezvous_port) == port["port"] == container["ports"][0]["containerPort"]
    assert int(started.nnodes) == spec["completions"] == started.script.replicate
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(started.nproc_per_node) == gpus and started.script.batch_size % (gpus * spec["completions"]) == 0
    assert any(str(started.script.folder).startswith(m["mountPath"]) for m in container["volumeMounts"])


def test_pytorchjob_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = documents("kubernetes_pytorchjob.yaml")
    spec, worker = job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    container, _ = check_pod(worker["template"]["spec"])
    elastic = spec["elasticPolicy"]
    assert container["name"] == "pytorch" and elastic["minReplicas"] <= worker["replicas"] == elastic["maxReplicas"]
    assert container["ports"][0]["containerPort"] == elastic["rdzvPort"]
    # What the operator sets.
    monkeypatch.setenv("PET_NNODES", f"{elastic['minReplicas']}:{elastic['maxReplicas']}")
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    monkeypatch.setenv("PET_RDZV_ENDPOINT", f"{job['metadata']['name']}-worker-0:{elastic['rdzvPort']}")
    program, *words = container["command"]
    started = torchrun(words)
    assert program == "torchrun" and started.nnodes == "1:4" and started.rdzv_endpoint == "zero-gpt-worker-0:29400"
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(started.nproc_per_node) == gpus
    for hosts in range(elastic["minReplicas"], elastic["maxReplicas"] + 1):
        assert started.script.batch_size % (gpus * hosts) == 0, "it has to go on with any number of hosts"


@pytest.mark.parametrize(
    ("name", "kind", "wrong"),
    [
        ("kubeflow_trainjob.yaml", "TrainingRuntime", ("spec", "replicas")),
        ("kubeflow_trainjob.yaml", "TrainJob", ("spec", "replicas")),
        ("hyperpod_pytorchjob.yaml", "HyperPodPyTorchJob", ("spec", "runPolicy", "backoffLimit")),
        ("skypilot.yaml", "SkyPilotTask", ("resources", "spot")),
    ],
)
def test_a_manifest_has_documented_fields_alone(name: str, kind: str, wrong: tuple[str, ...]) -> None:
    schema = json.loads((Path(__file__).parent / "schemas" / f"{kind}.json").read_text())
    (document,) = (each for each in documents(name) if each.get("kind", kind) == kind)
    jsonschema.validate(document, schema)
    changed = copy.deepcopy(document)
    place = functools.reduce(lambda place, key: place[key], wrong[:-1], changed)
    place[wrong[-1]] = 4
    with pytest.raises(jsonschema.ValidationError, match=wrong[-1]):
        jsonschema.validate(changed, schema)


def test_trainjob_and_runtime_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, job = documents("kubeflow_trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    queued = "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    assert queued == job["spec"]["suspend"], "Kueue starts what is suspended, and nobody else does"
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Names by which the controller finds what to fill in.
    step = replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    container, env = check_pod(replicated["template"]["spec"]["template"]["spec"])
    assert (replicated["name"], container["name"], step) == ("node", "node", "trainer")
    trainer = job["spec"]["trainer"]
    assert not set(env) & {"PET_NNODES", "PET_NPROC_PER_NODE"} and "env" not in trainer
    # What the controller sets.
    monkeypatch.setenv("PET_NNODES", str(trainer["numNodes"]))
    monkeypatch.setenv("PET_NPROC_PER_NODE", str(trainer["numProcPerNode"]))
    monkeypatch.setenv("PET_NODE_RANK", "0")
    monkeypatch.setenv("PET_MASTER_ADDR", "zero-gpt-node-0-0.zero-gpt")
    monkeypatch.setenv("PET_MASTER_PORT", "29500")
    program, *words = [*trainer["command"], *trainer["args"]]
    started = torchrun(words)
    assert program == "torchrun" and started.nnodes == "4" and started.master_addr == "zero-gpt-node-0-0.zero-gpt"
    gpus = int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    assert int(started.nproc_per_node) == gpus and started.script.replicate == trainer["numNodes"]
    assert started.script.batch_size % (gpus * trainer["numNodes"]) == 0
    assert any(str(started.script.folder).startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_hyperpod_job_agrees() -> None:
    (job,) = documents("hyperpod_pytorchjob.yaml")
    (replicas,) = job["spec"]["replicaSpecs"]
    container, env = check_pod(replicas["template"]["spec"])
    queued = "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    assert queued == ("spares" in replicas), "Kueue reserves the spares"
    program, *words = substituted(container["command"], env)
    started = torchrun(words)  # whose options the agent has
    assert program == "hyperpodrun" and int(started.nnodes) == replicas["replicas"] == started.script.replicate
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(started.nproc_per_node) == int(job["spec"]["nprocPerNode"]) == gpus
    assert started.script.batch_size % (gpus * replicas["replicas"]) == 0
    assert any(str(started.script.folder).startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_skypilot_starts_a_torchrun_per_host(programs: Path, tmp_path: Path) -> None:
    (task,) = documents("skypilot.yaml")
    hosts, gpus = task["num_nodes"], task["resources"]["accelerators"].partition(":")[2]
    addresses = "\n".join(f"10.0.0.{host}" for host in range(4, 4 + hosts))
    variables = {
        "SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_NODES": str(hosts), "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": gpus, **task["envs"],
    }  # fmt: skip
    env = environment(programs, **variables)
    subprocess.run(["bash", "-euo", "pipefail", "-c", task["run"]], env=env, cwd=ROOT, check=True, timeout=30)
    started = torchrun(calls(tmp_path)[0][1:])
    assert started.master_addr == "10.0.0.4" and started.node_rank == 2 and started.nnodes == str(hosts)
    assert started.nproc_per_node == gpus and started.script.replicate == hosts
    assert started.script.batch_size % (int(gpus) * hosts) == 0
    assert any(str(started.script.folder).startswith(path) for path in task["volumes"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """SLURM's programs and torchrun, which note how they were called; srun starts what it is given, once."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        then = {"scontrol": "[ $1 != show ] || printf 'node03\\nnode04\\nnode05\\nnode06\\n'", "srun": '"${@:2}"'}
        note = (
            f"#!/usr/bin/env bash\n{{ printf '%s\\0' {name} \"$@\"; printf '\\n'; }} >> {tmp_path}/calls\n"
            f"env > {tmp_path}/env.{name}\n{then.get(name, 'sleep ${SECONDS_OF_WORK:-0}')}\n"
        )
        (folder / name).write_text(note)
        (folder / name).chmod(0o755)
    return folder


def environment(programs: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{programs}:{os.environ['PATH']}", "REPOSITORY": str(ROOT), **more}


def calls(folder: Path) -> list[list[str]]:
    lines = (folder / "calls").read_text().split("\0\n")
    return [line.split("\0") for line in lines if line]


def noted(folder: Path, program: str) -> dict[str, str]:
    lines = (folder / f"env.{program}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def run_script(name: str, env: dict[str, str], folder: Path) -> None:
    done = subprocess.run(["bash", str(FOLDER / name)], env=env, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_srun_starts_a_rank_per_gpu(programs: Path, tmp_path: Path) -> None:
    run_script("slurm_srun.sbatch", environment(programs, **JOB), tmp_path)
    (call,) = [call for call in calls(tmp_path) if call[0] == "python"]
    options = cluster_gpt.parse(call[2:])
    assert Path(call[1]).samefile(ROOT / "examples" / "cluster_gpt.py")
    assert options.replicate == 4 and options.batch_size % 32 == 0
    env = noted(tmp_path, "python")
    assert env["MASTER_ADDR"] == "node03" and 1024 < int(env["MASTER_PORT"]) < 65536 and env["OMP_NUM_THREADS"] == "16"


def test_srun_starts_a_torchrun_per_host(programs: Path, tmp_path: Path) -> None:
    run_script("slurm_torchrun.sbatch", environment(programs, **JOB, GPUS_PER_NODE="8"), tmp_path)
    (call,) = [call for call in calls(tmp_path) if call[0] == "torchrun"]
    started = torchrun(call[1:])
    assert started.nnodes == "4" and started.nproc_per_node == "8" and started.rdzv_id == "4711"
    host, _, port = started.rdzv_endpoint.partition(":")
    assert host == "node03" and 1024 < int(port) < 65536
    assert started.script.replicate == 4 and started.script.batch_size % 32 == 0


def test_torchrun_by_hand(programs: Path, tmp_path: Path) -> None:
    env = environment(programs, RDZV_HOST="first", FOLDER="/shared/run")
    run_script("torchrun_elastic.sh", env, tmp_path)
    started = torchrun(calls(tmp_path)[0][1:])
    assert started.nnodes == "1:4" and started.rdzv_endpoint == "first:29400" and started.rdzv_backend == "c10d"
    assert str(started.script.folder) == "/shared/run"
    assert started.local_addr is None and "is_host" not in started.rdzv_conf
    assert all(started.script.batch_size % (8 * hosts) == 0 for hosts in range(1, 5))
    done = subprocess.run(
        ["bash", str(FOLDER / "torchrun_elastic.sh")], env=environment(programs), capture_output=True, text=True
    )
    assert done.returncode != 0 and "RDZV_HOST" in done.stderr


@pytest.mark.parametrize(("address", "meets_here"), [("10.0.0.1", "1"), ("10.0.0.2", "0")])
def test_torchrun_where_names_do_not_resolve(address: str, meets_here: str, programs: Path, tmp_path: Path) -> None:
    """`tests/cluster/test_two_hosts.py` runs the same options between hosts."""
    env = environment(programs, RDZV_HOST="10.0.0.1", FOLDER="/run", LOCAL_ADDR=address, INTERFACE="eth7")
    run_script("torchrun_elastic.sh", env, tmp_path)
    started = torchrun(calls(tmp_path)[0][1:])
    assert started.local_addr == address
    assert started.rdzv_conf == f"join_timeout=3600,last_call_timeout=30,is_host={meets_here}"
    found = noted(tmp_path, "torchrun")
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("script", "signal", "ends"), [("slurm_srun.sbatch", "TERM", True), ("slurm_torchrun.sbatch", "USR1", False)]
)
def test_a_job_whose_time_is_up_saves_and_is_requeued(
    script: str, signal: str, ends: bool, programs: Path, tmp_path: Path
) -> None:
    env = environment(programs, **JOB, SECONDS_OF_WORK="30", SAVE_SECONDS="0")
    # As SLURM does: the tasks get what scancel sends, the batch script alone the warning.
    (programs / "scancel").write_text(
        f"#!/usr/bin/env bash\nprintf 'scancel\\0%s\\0%s\\0\\n' \"$@\" >> {tmp_path}/calls\n"
        + (f"kill -TERM $(cat {tmp_path}/task)\n" if ends else "")
    )
    task = f"#!/usr/bin/env bash\necho $$ > {tmp_path}/task\nexec sleep 30\n"
    for name in ("python", "torchrun"):
        (programs / name).write_text(task)
    job = subprocess.Popen(["bash", str(FOLDER / script)], env=env, cwd=tmp_path, start_new_session=True)
    try:
        while not (tmp_path / "task").exists() or not (tmp_path / "task").read_text():
            assert job.poll() is None
        subprocess.run(["kill", "-USR1", str(job.pid)], check=True)
        assert job.wait(20) == 0
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{job.pid}"], check=False, capture_output=True)
        job.wait()
    asked = [call for call in calls(tmp_path) if call[0] in ("scancel", "scontrol")][1:]
    assert asked[0][:3] == ["scancel", f"--signal={signal}", "4711"]
    assert asked[1][:3] == ["scontrol", "requeue", "4711"]


def test_readme_names_every_file() -> None:
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{path.name}`" in text for path in FOLDER.iterdir() if path.name != "README.md")
    assert re.findall(r"--rdzv-endpoint first-host:29400", text)
    command = re.search(r"```bash\n(torchrun .*?)```", text, re.DOTALL)
    assert command is not None
    started = torchrun(shlex.split(command[1].replace("\\\n", " "))[1:])
    assert started.nnodes == "1:4" and started.script.batch_size == 96


def test_rows_are_divided_evenly() -> None:
    rows = [row for rank in range(4) for row in cluster_gpt.rows_of(32, rank, 4)]
    assert rows == list(range(32))
    with pytest.raises(ValueError, match=r"--batch-size 32 is no multiple of the 3 ranks"):
        cluster_gpt.rows_of(32, 0, 3)
    assert json.dumps(vars(cluster_gpt.parse(["--folder=x"])), default=str)
