"""`zero-strategy config ...`: explain, convert; `zero-strategy accelerate-config`: files for `accelerate launch`.

`accelerate config` asks a dozen questions, of which most are about other ways of sharding, and its answer for several
processes on CPUs is MPI. The files written here start one process for each device, and nothing else; what is sharded,
and how, is the script's `ZeroAccelerator`, or the file that `ZERO_STRATEGY_CONFIG` names.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from zero_strategy.config import DeepSpeedSettings, Setting, ZeroConfig, load_config, resolve
from zero_strategy.config.deepspeed.read import inspect_deepspeed
from zero_strategy.config.load import config_of, read_layer
from zero_strategy.config.section import DEFAULT
from zero_strategy.config.sources import owner_of
from zero_strategy.runtime.shown import shown
from zero_strategy.runtime.terminal import complain, table


def add_config_commands(commands: Any) -> None:
    """Adds `config` to the parser's commands."""
    parser = commands.add_parser("config", help="what a config file means")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for add, _ in _ACTIONS.values():
        add(actions)


def run_config_command(options: argparse.Namespace) -> int:
    """Runs the chosen action; returns the exit status: 2, and a message on stderr, where it cannot be done."""
    try:
        status = _ACTIONS[options.action][1](options)
    except (ValueError, TypeError, OSError) as error:
        if getattr(options, "json", False):
            print(json.dumps({"error": str(error)}, indent=1))
        complain(error)
        return 2
    return status


def add_convert(actions: Any) -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "convert",
        help="write DeepSpeed's JSON as a YAML file of ours",
        description=(
            "Writes the settings that a DeepSpeed JSON sets as a YAML file for ZeroStrategy(config=...). What the\n"
            "framework owns (batch size, clipping, precision, optimizer) is noted in comments, with its own argument.\n"
            "Exit status: 0, or 2 if a key is rejected or the file cannot be read."
        ),
        epilog="examples:\n  zero-strategy config convert ds_config.json -o zero.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="DeepSpeed's JSON (also as base64)")
    parser.add_argument("-o", "--output", metavar="OUT", help="where to write; default: standard output")


def run_convert(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    if options.output is not None and os.path.exists(options.output):
        raise ValueError(f"{options.output} exists already; remove it, or give another name to -o")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = load_config(options.file)
    if config.deepspeed is None:
        raise ValueError(f"{options.file} is no DeepSpeed JSON; its settings are ours already")
    for warning in said:
        complain(warning.message)
    text = as_yaml(config, config.deepspeed)
    if options.output is None:
        print(text, end="")
    else:
        with open(options.output, "x", encoding="utf-8") as file:
            file.write(text)
    return 0


def as_yaml(config: ZeroConfig, found: DeepSpeedSettings) -> str:
    """The settings that are set, as YAML that `load_config` reads, with what others own in comments."""
    values: dict[str, Any] = {}
    for key, setting in config.settings():
        if setting.origin == DEFAULT:
            continue
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = setting.value
    lines = [f"# From {found.origin.removeprefix('user: ')}. Settings that are not here have zero_strategy's defaults."]
    for key, setting in found.owned.items():
        named = {"optimizer": found.optimizer, "scheduler": found.scheduler}.get(key)
        value = setting.value if named is None else f"{named.type} {dict(named.params)}"
        lines.append(f"# {key}: {value} is not set here: {owner_of(key)}")
    text: str = yaml.safe_dump(values, sort_keys=False)
    return "\n".join(lines) + "\n" + text


_AUTO = "auto"


def add_explain(actions: Any) -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "explain",
        help="every setting that a file leads to, and what becomes of its keys",
        description=(
            "Shows the settings that a config file leads to and where each comes from; for DeepSpeed's JSON also the\n"
            "batch sizes, and for every key whether it is translated, accepted without effect, or rejected.\n"
            "Exit status: 0; 1 if a key is rejected, so that training would refuse the file; 2 if it cannot be read."
        ),
        epilog=(
            "examples:\n  zero-strategy config explain ds_config.json --world 8\n"
            "  zero-strategy config explain zero.yaml --json"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="DeepSpeed's JSON (also as base64), or a YAML file of ours")
    parser.add_argument("--world", type=int, metavar="RANKS", help="number of ranks, to derive what depends on it")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run_explain(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    layer = read_layer(options.file)
    deepspeed = inspect_deepspeed(layer) if layer.is_deepspeed else None
    if deepspeed is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = load_config(options.file)
    else:
        config = config_of(deepspeed)
    settings = dict(_settings(config, options.world))
    owned = {} if deepspeed is None else dict(_owned(deepspeed, options.world))
    print(_json(settings, owned, deepspeed) if options.json else _text(settings, owned, deepspeed))
    return int(deepspeed is not None and bool(deepspeed.rejected()))


def _settings(config: ZeroConfig, world: int | None) -> Iterator[tuple[str, Setting]]:
    if world is None:
        yield from config.settings()
        return
    for key, setting in resolve(config, world).settings():
        yield key, setting._replace(origin="--world") if key == "world_size" else setting


def _owned(found: DeepSpeedSettings, world: int | None) -> Iterator[tuple[str, Setting]]:
    """Settings that a framework or a script owns, as far as the file says it."""
    batch, reports = found.batch, {report.key: report for report in found.found}
    enough = batch.train_batch_size is not None or batch.train_micro_batch_size_per_gpu is not None
    stages = found.zero["pipeline.stages"].value if "pipeline.stages" in found.zero else 1
    resolved = batch.resolve(world // stages) if world is not None and enough else batch
    derived = f"derived: world size {world}" + (f" / {stages} pipeline stages" if stages > 1 else "")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = getattr(resolved, name)
        if name in reports and (value is None or getattr(batch, name) is not None):
            yield name, Setting(_AUTO if value is None else value, f"{found.origin}: {reports[name].path}")
        else:
            yield name, Setting(value, "not set" if value is None else derived)
    for name, setting in (("gradient_clipping", found.gradient_clipping), ("computation", found.precision)):
        yield name, setting._replace(value=_AUTO) if setting.value is None else setting
    for name, named in (("optimizer", found.optimizer), ("scheduler", found.scheduler)):
        if named is not None:
            arguments = ", ".join(f"{key}={value!r}" for key, value in named.params.items())
            yield name, Setting(f"{named.type}({arguments})", named.origin)


def _json(settings: dict[str, Setting], owned: dict[str, Setting], found: DeepSpeedSettings | None) -> str:
    made: dict[str, Any] = {"settings": {key: setting._asdict() for key, setting in settings.items()}}
    if found is not None:
        made["owned by the framework or the script"] = {key: setting._asdict() for key, setting in owned.items()}
        names = ("path", "value", "classification", "note", "ours")
        made["keys"] = [{name: getattr(report, name) for name in names} for report in found.found]
    return json.dumps(made, indent=1, default=str)


def _text(settings: dict[str, Setting], owned: dict[str, Setting], found: DeepSpeedSettings | None) -> str:
    parts = [_rows(settings)]
    if found is not None:
        rows = [
            (report.path, _cell(report.value), report.classification, _becomes(report.ours, report.note))
            for report in found.found
        ]
        parts += [
            "\nowned by the framework or the script; what is not auto must agree with theirs:\n" + _rows(owned),
            "\nkeys of the file:\n" + table(rows, ("key", "value", "what becomes of it", "how, or why")),
        ]
        rejected = len(found.rejected())
        if rejected:
            parts.append(f"\n{rejected} key(s) rejected: training refuses this file")
    return "\n".join(parts)


def _rows(settings: dict[str, Setting]) -> str:
    rows = [(key, _cell(setting.value), setting.origin) for key, setting in settings.items()]
    return table(rows, ("key", "value", "origin"))


def _cell(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _becomes(ours: str, note: str) -> str:
    return f"{ours}: {note}" if ours and note else ours or note


_ACTIONS: dict[str, tuple[Callable[[Any], None], Callable[[argparse.Namespace], int]]] = {
    "explain": (add_explain, run_explain),
    "convert": (add_convert, run_convert),
}
"""What adds an action to the parser, and what runs it."""


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
        complain(error)
        return 2
    if options.file == "-":
        print(text, end="")
        return 0
    path = Path(options.file)
    try:
        with path.open("w" if options.force else "x", encoding="ascii") as file:
            file.write(text)
    except FileExistsError:
        complain(f"{path} exists already: --force replaces it, and another name leaves it")
        return 1
    except OSError as error:
        complain(f"{path} cannot be written: {error.strerror}")
        return 1
    print(f"{shown(path)}: processes {processes}, nodes {options.nodes}, mixed precision {precision}. Start them with")
    print(f"accelerate launch --config_file {shown(path)} SCRIPT")
    return 0
