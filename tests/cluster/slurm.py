"""A Slurm cluster for tests: its own daemons on two hosts (`tests.cluster.hosts`), each with two CPUs and two GPUs.

The GPUs are files that are there on every machine: Slurm counts them, and nobody opens them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import hosts
from tests.cluster.hosts import Host, two_hosts

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
_PATH = f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"
_ASKED = "ZERO_STRATEGY_TEST_SLURM"
_NAMES = Path("/etc/netns")
"""`ip netns exec` gives a network the files of its folder here in place of those in /etc."""


def why_not() -> str:
    """Reason that no cluster is started here; empty if one is."""
    if not os.environ.get(_ASKED):
        return "`make cluster` runs it: a quarter of an hour on two cores"
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]:
        return f"{missing[0]} not found: `make cluster` installs Debian's slurmctld, slurmd and slurm-client"
    return "not root: daemons and networks are root's" if os.geteuid() else hosts.why_not()


@dataclass
class Cluster:
    """Daemons that run.

    Attributes:
        folder: Configuration, logs and state.
        hosts: The controller's, and the other one.
        env: Of all programs.
    """

    folder: Path
    hosts: tuple[Host, Host]
    env: dict[str, str]

    def run(self, *words: str) -> str:
        """A command on the first host; what it prints."""
        command = ["ip", "netns", "exec", self.hosts[0].namespace, *words]
        done = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start_node(self, host: Host) -> None:
        """Start a host's slurmd."""
        # It looks for a mount there, whether it uses control groups or not.
        words = ["sh", "-c", f"mount -t tmpfs none /sys/fs/cgroup && exec slurmd -D -N {host.name}"]
        host.start(words, self.env, self.folder / f"slurmd-{host.name}.log")

    def wait(self, what: str, there: Callable[[], object], seconds: float = 240) -> None:
        """Return when something is so.

        Raises:
            AssertionError: If it takes longer; with what the logs and the queue say.
        """
        end = time.monotonic() + seconds
        while not there():
            if time.monotonic() > end:
                raise AssertionError(f"no {what} in {seconds} s; {self.run('squeue')}; {self.logs()}")
            time.sleep(0.25)

    def logs(self, pattern: str = "*.log") -> dict[str, str]:
        """Ends of logs by their files' names."""
        return {path.name: path.read_text(errors="replace")[-2000:] for path in self.folder.glob(pattern)}

    def submit(self, name: str, script: str, *options: str) -> str:
        """Number of a new job of the lines of a bash script. Its log, or those of its array, is `NAME-*.log`."""
        (self.folder / f"{name}.sbatch").write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{script}\n")
        words = ("--parsable", f"--job-name={name}", f"--output={name}-%j.log", "--open-mode=append", *options)
        return self.run("sbatch", *words, f"{name}.sbatch")

    def state(self, job: str) -> str:
        """State of a job in the queue, such as R or PD; empty if it has ended."""
        return self.run("squeue", "--noheader", "--format=%t", f"--jobs={job}")


@contextlib.contextmanager
def slurm_cluster(folder: Path, names: tuple[str, str] | None = None, **env: str) -> Iterator[Cluster]:
    """A cluster whose nodes are idle; nothing is left of it at the end.

    Args:
        folder: For its files.
        names: Of the nodes; default: some of their own.
        **env: Further variables of jobs.
    """
    # slurmstepd binds a socket in its spool folder, and ends without a word if the path is longer than 107 characters.
    with two_hosts(names) as pair, tempfile.TemporaryDirectory(prefix="spool") as spool:
        table = "".join(f"{host.address} {host.name}\n" for host in pair)
        configured = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH, **env}
        cluster = Cluster(folder, pair, configured)
        try:
            for host in pair:
                (_NAMES / host.namespace).mkdir(parents=True)
                (_NAMES / host.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
                Path(spool, host.name).mkdir()
            _configure(folder, spool, pair)
            pair[0].start(["slurmctld", "-D"], configured, folder / "slurmctld.log")
            for host in pair:
                cluster.start_node(host)
            answers = ("sinfo", "--noheader", "--Node", "--format=%t")
            cluster.wait("controller", lambda: _answers(cluster))
            cluster.wait("idle nodes", lambda: cluster.run(*answers).split() == ["idle", "idle"])
            yield cluster
        finally:
            for host in pair:
                shutil.rmtree(_NAMES / host.namespace, ignore_errors=True)


def _answers(cluster: Cluster) -> bool:
    try:
        return bool(cluster.run("sinfo", "--noheader"))
    except AssertionError:
        return False


def _configure(folder: Path, spool: str, pair: tuple[Host, Host]) -> None:
    nodes = "".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs=2 SocketsPerBoard=1 CoresPerSocket=2 RealMemory=1000 "
        "Gres=gpu:2\n"
        for host in pair
    )
    (folder / "state").mkdir()
    # cred_expire: a requeued job starts when the credentials of the start before have run out, two minutes by default.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={pair[0].name}({pair[0].address})
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
{nodes}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
