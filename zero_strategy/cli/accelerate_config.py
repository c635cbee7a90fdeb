"""`zero-strategy accelerate-config`: the file that `accelerate launch --config_file` takes, for this machine or others.

`accelerate config` asks a dozen questions, of which most are about other ways of sharding, and its answer for several
processes on CPUs is MPI. The files written here start one process for each device, and nothing else; what is sharded,
and how, is the script's `ZeroAccelerator`, or the file that `ZERO_STRATEGY_CONFIG` names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DEFAULT_FILE = "accelerate.yaml"
PRECISIONS = ("no", "bf16", "fp16")
_CPU_PROCESSES = 2
_NODE_GPUS = 8
"""Of the hosts that a file is for, where it is written on a machine without a GPU."""
_NODES_PORT = 29500

_TEMPLATE = """{head}
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_machines: {nodes}
num_processes: {processes}{processes_note}
machine_rank: 0{rank_note}
{address}main_process_port: {port}
main_training_function: main
mixed_precision: {precision}
gpu_ids: all
rdzv_backend: static
same_network: true
use_cpu: false
debug: false
"""


def launch_file(
    processes: int, nodes: int = 1, precision: str = "no", cpu: bool = False, address: str = "localhost", path: str = ""
) -> str:
    """Text of a launch file.

    Args:
        processes: Of all nodes together, one for each device; a multiple of `nodes`.
        nodes: Hosts of the run.
        precision: Accelerate's `mixed_precision`, one of `PRECISIONS`.
        cpu: Processes on CPUs, over gloo.
        address: Of the first node, as the others reach it.
        path: The file's name in the command that its first line shows.

    Raises:
        ValueError: `processes` is not a positive multiple of `nodes`.
    """
    if nodes < 1 or processes < 1 or processes % nodes:
        raise ValueError(
            f"{processes} processes on {nodes} nodes: the number of processes is that of all nodes together, "
            f"the same on each; with {nodes} nodes take for example --processes {max(nodes, 1) * _NODE_GPUS}"
        )
    path = path or DEFAULT_FILE
    if nodes > 1:
        head = (
            f"# On each node: accelerate launch --config_file {path} --machine_rank N \\\n"
            "#     --main_process_ip FIRST_NODE SCRIPT"
        )
    elif processes == 1:
        head = f"# accelerate launch --config_file {path} SCRIPT: one process."
    elif cpu:
        head = (
            f"# accelerate launch --config_file {path} SCRIPT: {processes} processes on the CPU (gloo).\n"
            '# MULTI_GPU only means "start one process per device": ZeroAccelerator sees that there is no device and '
            "takes the CPU."
        )
    else:
        head = f"# accelerate launch --config_file {path} SCRIPT: {processes} GPUs of one machine."
    return _TEMPLATE.format(
        head=head,
        kind="MULTI_GPU" if processes > 1 else "'NO'",
        nodes=nodes,
        processes=processes,
        processes_note="  # of all nodes together" if nodes > 1 else "",
        rank_note="  # 0 on the first node, 1 on the second, ..." if nodes > 1 else "",
        address=f"main_process_ip: {address}  # of the first node\n" if nodes > 1 else "",
        port=f"{_NODES_PORT}  # free on the first node" if nodes > 1 else "0  # any free one",
        precision="'no'" if precision == "no" else precision,
    )


def add_accelerate_config_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `accelerate-config` to the parser of `zero-strategy`."""
    parser = commands.add_parser(
        "accelerate-config",
        help="write a launch file for accelerate launch",
        description="Write the file that `accelerate launch --config_file` takes: one process for each device.",
    )
    parser.add_argument("file", nargs="?", default=DEFAULT_FILE, help=f"default: {DEFAULT_FILE}; -: standard output")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="of all nodes together; default: this machine's GPUs on each node, or 8 where it has none; on a CPU 2",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="hosts of the run; default: 1")
    parser.add_argument("--address", default="localhost", help="of the first node, as the others reach it")
    parser.add_argument("--mixed-precision", choices=PRECISIONS, help="default: bf16 on GPUs, no on a CPU")
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU, also where there are GPUs")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")


def run_accelerate_config_command(options: argparse.Namespace) -> int:
    """Write the file; returns the exit status."""
    import torch

    devices = 0 if options.cpu else torch.cuda.device_count()
    gpus = devices > 0 or (options.nodes > 1 and not options.cpu)
    processes = options.processes
    if processes is None:
        processes = (devices or (_NODE_GPUS if gpus else _CPU_PROCESSES)) * options.nodes
    precision = options.mixed_precision or ("bf16" if gpus else "no")
    name = options.file if options.file != "-" else DEFAULT_FILE
    try:
        text = launch_file(processes, options.nodes, precision, not gpus, options.address, name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.file == "-":
        print(text, end="")
        return 0
    path = Path(options.file)
    try:
        with path.open("w" if options.force else "x", encoding="ascii") as file:
            file.write(text)
    except FileExistsError:
        print(f"{path} exists already: --force replaces it, and another name leaves it", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{path}: processes {processes}, nodes {options.nodes}, mixed precision {precision}. Start them with")
    print(f"accelerate launch --config_file {path} SCRIPT")
    return 0
