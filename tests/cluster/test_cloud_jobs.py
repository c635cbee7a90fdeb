"""Commands of the jobs for clouds, on two processes of this machine that stand in for their hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.warm import plain_environment
from zero_strategy.checkpoint import LATEST_NAME

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
SMALL = ("--batch-size=4", "--block-size=16", "--n-layer=1", "--n-head=2", "--d-model=16", "--log-every=2")
SECONDS = 240.0


@pytest.fixture
def text(tmp_path: Path) -> str:
    """An option for a small text, in enough files that some are held out."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"module{number}.py").write_text(f"value_{number} = [{number}] * {number}\n" * 20)
    return f"--text={folder}"


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return plain_environment(PYTHONPATH=str(ROOT), PATH=path, OMP_NUM_THREADS="1", **more)


def document(name: str) -> dict[str, Any]:
    (found,) = yaml.safe_load_all((FOLDER / name).read_text())
    assert isinstance(found, dict)
    return found


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def saved_step(folder: Path) -> int:
    return int((folder / LATEST_NAME).read_text().strip().removeprefix("global_step"))


def logged_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "losses.jsonl").read_text().splitlines()]


def descendants(process: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [pid for child in map(int, found) for pid in (child, *descendants(child))]


# ---- SkyPilot ----


def skypilot_hosts(task: dict[str, Any], **envs: str) -> list[subprocess.Popen[str]]:
    """The task's commands on two hosts of one GPU each, with SkyPilot's variables."""
    port = free_port()
    hosts = []
    for host in range(2):
        env = environment(
            SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
            SKYPILOT_NUM_NODES="2",
            SKYPILOT_NODE_RANK=str(host),
            SKYPILOT_NUM_GPUS_PER_NODE="1",
            MASTER_PORT=port,
            **{**task["envs"], **envs},
        )
        command = ["bash", "-c", task["run"]]
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        hosts.append(subprocess.Popen(command, env=env, cwd=ROOT, text=True, **streams))
    return hosts


def test_a_skypilot_job_resumes_after_its_hosts_were_taken_away(text: str, tmp_path: Path) -> None:
    task, folder = document("skypilot.yaml"), tmp_path / "run"
    options = " ".join((text, *SMALL, "--stage=2", "--save-every=1000000"))
    hosts = skypilot_hosts(task, FOLDER=str(folder), OPTIONS=f"{options} --steps 1000000")
    try:
        end = time.monotonic() + SECONDS
        while not (folder / "losses.jsonl").exists():
            assert all(host.poll() is None for host in hosts), [host.communicate() for host in hosts]
            assert time.monotonic() < end, "the hosts have not begun"
            time.sleep(0.05)
        # As a host does that goes down: to all that runs there.
        for host in hosts:
            for pid in (host.pid, *descendants(host.pid)):
                os.kill(pid, signal.SIGTERM)
        for host in hosts:
            host.wait(SECONDS)
    finally:
        for host in hosts:
            for pid in (*descendants(host.pid), host.pid) if host.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            host.communicate()
    saved = saved_step(folder)
    assert saved >= 2
    # SkyPilot runs the same commands on other hosts.
    again = skypilot_hosts(task, FOLDER=str(folder), OPTIONS=f"{options} --steps {saved + 2}")
    said = [host.communicate(timeout=SECONDS)[0] for host in again]
    assert [host.returncode for host in again] == [0, 0], said
    assert f"2 ranks go on after step {saved}" in said[0]
    assert logged_steps(folder)[-2:] == [saved + 1, saved + 2]


# ---- HyperPod ----


def test_a_hyperpod_job_says_what_is_watched_and_resumes(text: str, tmp_path: Path) -> None:
    job, folder = document("hyperpod_pytorchjob.yaml"), tmp_path / "run"
    # The agent takes torchrun's options.
    agent = tmp_path / "bin" / "hyperpodrun"
    agent.parent.mkdir()
    agent.write_text(f'#!/usr/bin/env bash\nexec "{Path(sys.executable).parent}/torchrun" "$@"\n')
    agent.chmod(0o755)
    env = environment()
    env["PATH"] = f"{agent.parent}:{env['PATH']}"
    (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    here = {"--nnodes=4": "--nnodes=1", "--nproc-per-node=8": "--nproc-per-node=2"}
    here |= {"--log-dir=/tmp/hyperpod": f"--log-dir={tmp_path}/logs"}
    program, *words = [here.get(word, word) for word in container["command"]]
    words.insert(0, f"--master-port={free_port()}")
    words += [text, *SMALL, f"--folder={folder}", "--replicate=1", "--save-every=2"]
    (rule,) = job["spec"]["runPolicy"]["logMonitoringConfiguration"]
    for steps, first in ((4, 0), (6, 4)):
        command = [program, *words, f"--steps={steps}"]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"2 ranks go on after step {first}" in done.stdout
        watched = [line for line in done.stdout.splitlines() if re.fullmatch(rule["logPattern"], line)]
        assert len(watched) == (steps - first) // 2
    assert saved_step(folder) == 6 and logged_steps(folder) == [1, 2, 3, 4, 5, 6]
