"""`zero-strategy doctor`: what an installation has, what is wrong with it, and what to do.

Each finding says whether it is well, and if not what to do.

A `fail` keeps training from working; a `warn` costs time or memory, or keeps one feature from working.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.comm.local_ranks import LocalRankError, run_local_ranks
from zero_strategy.comm.store import all_gather_row
from zero_strategy.planning.machine import Machine
from zero_strategy.version import __version__


def factory() -> Any:
    """A small model, its optimizer, batches and loss, for `verify`."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4))
    return model, _optimizer, [torch.randn(4, 16) for _ in range(4)], _loss


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def all_reduce() -> int:
    """All ranks meet; returns how many they are."""
    return len(all_gather_row([1.0]))


State = Literal["ok", "warn", "fail"]
PACKAGES = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "transformers",
    "safetensors",
    "omegaconf",
    "ninja",
)
SMOKE_SECONDS = 30.0
"""What two ranks should need at most to start and to train."""
_LEAST_SHM = 1 << 30
_LEAST_MEMLOCK = 64 << 20


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: What was looked at.
        state: Whether it is well.
        what: What was found.
        advice: What to do, "" where nothing is.
        details: More lines, such as one per op.
    """

    name: str
    state: State
    what: str
    advice: str = ""
    details: list[str] = field(default_factory=list)


def findings(*, train: bool = True, timeout: float = 60.0) -> Iterator[Finding]:
    """All of them, one by one as they are found.

    Args:
        train: Train on two ranks, too.
        timeout: Seconds after which that is given up.
    """
    looks: list[Callable[[], Finding]] = [_system, _packages, _devices, _cores, _cache]
    looks += [lambda: _compiler("cpu"), lambda: _library("cpu"), lambda: _compiler("cuda"), lambda: _library("cuda")]
    looks += [_file_io, _direct_io, _memlock, _shared_memory, _memory, _gloo, _nccl]
    if train:
        looks.append(lambda: _smoke(timeout))
    for look in looks:
        yield look()


# ------------------------------------------------------------------------------------- what is installed


def _system() -> Finding:
    what = f"{__version__}, Python {platform.python_version()}, {platform.machine()}, {sys.platform}"
    if not sys.platform.startswith("linux"):
        return Finding("zero_strategy", "warn", what, "it is developed and tested on Linux")
    return Finding("zero_strategy", "ok", what)


def _packages() -> Finding:
    what = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    old = [text for text in _required() if not _fits(text)]
    if old:
        wanted = " ".join(f"'{text}'" for text in old)
        return Finding("packages", "fail", what, f"install what is missing or too old: pip install {wanted}")
    return Finding("packages", "ok", what)


def _required() -> list[str]:
    """This package's requirements, extras left out; none if it runs from a checkout that is not installed."""
    try:
        return [text for text in requires("zero-strategy") or [] if "extra ==" not in text]
    except PackageNotFoundError:
        return []


def _fits(requirement: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _devices() -> Finding:
    built = torch.version.cuda
    count = torch.cuda.device_count()
    what = f"{built or 'this torch has none'}, devices: {count}"
    if built and not count:
        return Finding("CUDA", "warn", what, "torch sees no GPU: look at nvidia-smi, the driver, CUDA_VISIBLE_DEVICES")
    if count:
        what += ": " + ", ".join(torch.cuda.get_device_name(device) for device in range(count))
    return Finding("CUDA", "ok", what)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cores", "ok", f"{cores}, torch threads: {torch.get_num_threads()}")


def _cache() -> Finding:
    from zero_strategy.ops.build import UntrustedCacheError, cache_directory, check_owner

    place = cache_directory()
    try:
        check_owner(place)
    except UntrustedCacheError as error:
        return Finding("cache", "warn", str(place), f"{error}; until then ops run in plain torch, more slowly")
    parent = next((folder for folder in (place, *place.parents) if folder.exists()), place)
    if not os.access(parent, os.W_OK):
        advice = f"{parent} cannot be written to: set ZERO_STRATEGY_CACHE to a directory that can"
        return Finding("cache", "warn", str(place), advice)
    return Finding("cache", "ok", str(place))


def _compiler(name: str) -> Finding:
    from zero_strategy.ops.build import carried_path, carried_recipe, recipe

    compiler = recipe(name).compiler
    if compiler:
        return Finding(f"{name} compiler", "ok", str(compiler))
    if carried_path(carried_recipe(name)).is_file() or (name == "cuda" and not torch.cuda.is_available()):
        return Finding("cuda compiler", "ok", "none found, none needed")
    advice = "install nvcc, or set CUDA_HOME" if name == "cuda" else "install g++ or clang++, or set CXX"
    advice += "; until then ops run in plain torch, more slowly"
    return Finding(f"{name} compiler", "warn", "none found", advice)


def _library(name: str) -> Finding:
    from zero_strategy.ops.library import libraries, ops_report

    status = libraries.ensure(name)
    ops_of: dict[str, list[str]] = {}
    for op, found in ops_report(name):
        ops_of.setdefault(found, []).append(op)
    details = [f"{found}: {', '.join(ops)}" for found, ops in ops_of.items()]
    if not status.path and len(ops_of) == 1:
        details = [f"all {len(ops)} ops: {found}" for found, ops in ops_of.items()]
    if status.path:
        return Finding(f"{name} library", "ok", str(status.path), details=details)
    needed = name == "cpu" or torch.cuda.is_available()
    advice = "run zero-strategy build --verbose; until then ops run in plain torch, more slowly" if needed else ""
    state: State = "warn" if needed else "ok"
    return Finding(f"{name} library", state, f"not loaded: {status.reason}", advice, details)


# ---------------------------------------------------------------------------------- files and memory


def _file_io() -> Finding:
    from zero_strategy.offload.file_queues import open_queue

    try:
        with open_queue() as queue:
            backend, reason = queue.backend, queue.reason
    except (OSError, RuntimeError, ValueError) as error:
        return Finding("file I/O", "fail", f"not available: {error}", "unset ZERO_STRATEGY_IO, or install a compiler")
    if not reason:
        return Finding("file I/O", "ok", backend)
    advice = "NVMe offload is slower than with io_uring: allow io_uring (kernel.io_uring_disabled=0, the container's "
    advice += "seccomp profile) and let zero-strategy build run"
    return Finding("file I/O", "warn", f"{backend}, since {reason}", advice)


def _direct_io() -> Finding:
    from zero_strategy.offload.file_io import O_DIRECT, can_read, direct_rules

    advice = "files go through the page cache here: offload to, and save on, a file system with O_DIRECT (ext4, xfs)"
    folder = os.environ.get("ZERO_STRATEGY_NVME_PATH", "").split(os.pathsep)[0] or tempfile.gettempdir()
    if not os.path.isdir(folder):
        missing = "make the directory that ZERO_STRATEGY_NVME_PATH names"
        return Finding("O_DIRECT", "warn", f"there is no {folder}", missing)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))
        file.flush()
        try:
            descriptor = os.open(file.name, os.O_RDONLY | O_DIRECT)
        except OSError as error:
            return Finding("O_DIRECT", "warn", f"not in {folder}: {error.strerror}", advice)
        try:
            rules = direct_rules(descriptor) if O_DIRECT else None
            if rules is None or not can_read(descriptor, rules):
                return Finding("O_DIRECT", "warn", f"not in {folder}", advice)
        finally:
            os.close(descriptor)
    return Finding("O_DIRECT", "ok", f"in {folder}, offsets by {rules.offset} bytes")


def _memlock() -> Finding:
    limit = Machine.here().memlock
    if limit is None:
        return Finding("memlock", "ok", "no limit")
    if limit >= _LEAST_MEMLOCK:
        return Finding("memlock", "ok", _size(limit))
    advice = "io_uring's and pinned memory count against it: ulimit -l unlimited, docker run --ulimit memlock=-1"
    return Finding("memlock", "warn", _size(limit), advice)


def _shared_memory() -> Finding:
    free = Machine.here().shm_free
    if free is None:
        return Finding("shared memory", "warn", "there is no /dev/shm", "DataLoader workers and NCCL need it: mount it")
    if free >= _LEAST_SHM:
        return Finding("shared memory", "ok", f"{_size(free)} free in /dev/shm")
    advice = "DataLoader workers and NCCL may run out of it: docker run --shm-size=8g (or --ipc=host)"
    return Finding("shared memory", "warn", f"{_size(free)} free in /dev/shm", advice)


def _memory() -> Finding:
    machine = Machine.here()
    if machine.host_free is None:
        return Finding("host memory", "ok", "not known")
    return Finding("host memory", "ok", f"{_size(machine.host_free)} free, by {machine.host_bound}")


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.0f} kB"


# -------------------------------------------------------------------------------------------- ranks


def _gloo() -> Finding:
    if not dist.is_gloo_available():
        return Finding("gloo", "fail", "this torch has none", "install a torch with gloo: all control messages use it")
    chosen, host = os.environ.get("GLOO_SOCKET_IFNAME"), socket.gethostname()
    names = [name for _, name in socket.if_nameindex()]
    if chosen and not set(chosen.split(",")) <= set(names):
        advice = f"set GLOO_SOCKET_IFNAME to one of {', '.join(names)}, or unset it"
        return Finding("gloo", "fail", f"GLOO_SOCKET_IFNAME is {chosen}, which is no interface here", advice)
    if chosen:
        return Finding("gloo", "ok", f"through {chosen}")
    try:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4]
        with socket.socket(socket.AF_INET6 if len(address) == 4 else socket.AF_INET) as probe:
            probe.bind((address[0], 0))
    except OSError as error:
        advice = f"name the interface in GLOO_SOCKET_IFNAME ({', '.join(names)}), or add {host} to /etc/hosts"
        return Finding("gloo", "warn", f"this host's name {host} leads to no address of its own: {error}", advice)
    local = str(address[0]).startswith("127.") or address[0] == "::1"
    reach = ", which only ranks of this host reach: set GLOO_SOCKET_IFNAME to train on several" if local else ""
    return Finding("gloo", "ok", f"{host} is {address[0]}{reach}")


def _nccl() -> Finding:
    gpus = torch.cuda.device_count()
    if not gpus:
        return Finding("NCCL", "ok", "not needed: there is no GPU")
    if not dist.is_nccl_available():
        return Finding("NCCL", "fail", "this torch has none", "install a torch with NCCL to train on more than one GPU")
    ranks = min(gpus, 2)
    try:
        run_local_ranks(f"{__name__}:all_reduce", (), ranks, timeout=60.0, backend="nccl")
    except LocalRankError as error:
        advice = "run with NCCL_DEBUG=INFO; in a container, --ipc=host; these ranks use the loopback alone"
        return Finding("NCCL", "fail", str(error).splitlines()[-1], advice, str(error).splitlines())
    return Finding("NCCL", "ok", f"{'.'.join(map(str, torch.cuda.nccl.version()))}, {ranks} rank(s) met")


def _smoke(timeout: float) -> Finding:
    from zero_strategy.config import load_config
    from zero_strategy.verify import verify_on_new_ranks

    name, begun = "two ranks", time.monotonic()
    try:
        config = load_config(stage=3, units={"min_numel": 0})
        report = verify_on_new_ranks(f"{__name__}:factory", config, {"steps": 2}, 2, timeout)
    except (LocalRankError, OSError) as error:
        advice = "two processes of this host do not meet on its loopback: see above, `ip link show lo`, a firewall"
        return Finding(name, "fail", (str(error).splitlines() or [""])[-1], advice, str(error).splitlines())
    seconds = time.monotonic() - begun
    if not report.passed:
        return Finding(name, "fail", str(report.first), "please report this with the output of doctor --json")
    what = f"trained what one process trains, in {seconds:.1f} s"
    if seconds > SMOKE_SECONDS:
        return Finding(name, "warn", what, "starting is slow: a busy machine, or packages on a slow file system")
    return Finding(name, "ok", what)


_DESCRIPTION = """\
Looks at what training needs here: versions, devices, compilers, native ops, file I/O, limits of memory, and whether two
ranks can train together. Each line is ok, warn (it costs time or memory, or one feature) or fail, with what to do.

Exit status: 0 if nothing fails, 1 if something does."""


def add_doctor_command(commands: Any) -> None:
    """Adds `doctor` to the parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="what this installation has, what is wrong with it, and what to do",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-train", action="store_true", help="do not train on two ranks, which takes some seconds")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="until that is given up")
    parser.add_argument("--json", action="store_true", help="print all as JSON")


def run_doctor_command(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""

    found = []
    for finding in findings(train=not options.no_train, timeout=options.timeout):
        found.append(finding)
        if options.json:
            continue
        print(f"{finding.state:<5} {finding.name}: {finding.what}", flush=True)
        for line in finding.details:
            print(textwrap.fill(line, 110, initial_indent=" " * 8, subsequent_indent=" " * 10, break_long_words=False))
        if finding.advice:
            print(f"      -> {finding.advice}", flush=True)
    failed = any(finding.state == "fail" for finding in found)
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}, indent=1))
    return int(failed)
