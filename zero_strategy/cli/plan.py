"""`zero-strategy plan`: the settings of a plan, and the command."""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zero_strategy.cli.plan_largest import (
    largest_json,
    largest_models,
    largest_table,
    longest_json,
    longest_sequences,
    longest_table,
)
from zero_strategy.cli.plan_model import VOCABULARY, Built, Finetuning, built_model, family_shape, shape_of_numbers
from zero_strategy.config import DEFAULT, ZeroConfig, load_config
from zero_strategy.config.deepspeed.read import inspect_deepspeed
from zero_strategy.config.deepspeed.settings import DeepSpeedSettings
from zero_strategy.config.load import config_of, read_layer
from zero_strategy.planning.buckets import Offload
from zero_strategy.planning.room import Budget
from zero_strategy.quantized.foreseen import QUANTISATIONS
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.terminal import complain, parse_size

_DTYPE_OF_PRECISION = {"fp16": "float16", "bf16": "bfloat16"}


class PlannedSettings(NamedTuple):
    """Inputs of a plan from files and options."""

    config: ZeroConfig
    """The config."""
    offload: Offload
    """What lies outside of the device."""
    dtype: str | None = None
    """Of the computation, as far as the file says it."""
    optimizer: str | None = None
    """Its class name, likewise."""
    accumulation: int = 1
    """Micro-batches of a step, likewise."""


def planned_settings(options: argparse.Namespace) -> PlannedSettings:
    """Read `--config` and put the options on top of it.

    Raises:
        ValueError: If a key or an option is not accepted; names it.
        OSError: If the file cannot be read.
    """
    config, deepspeed = _config(options.config)
    changes: dict[str, Any] = {"stage": options.stage, "gradient_reduction": options.gradient_reduction}
    sizes = {"replicate": options.replicate, "tensor": options.tensor, "expert": options.expert}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    changes = {key: value for key, value in changes.items() if value is not None}
    if sizes:
        changes["mesh"] = {**sizes, "shard": None}
    if changes:
        config = load_config(config, **changes)
    given = {
        "optimizer": options.offload_optimizer,
        "ratio": options.optimizer_ratio,
        "gradients": options.offload_gradients,
        "parameters": options.offload_parameters,
        "resident_bytes": options.resident,
    }
    offload = replace(Offload.of(config.offload), **{key: value for key, value in given.items() if value is not None})
    if deepspeed is None:
        return PlannedSettings(config, offload)
    named = deepspeed.optimizer
    return PlannedSettings(
        config,
        offload,
        _DTYPE_OF_PRECISION.get(deepspeed.precision.value),
        None if named is None else named.type,
        _accumulation(deepspeed, config, options.world),
    )


def _accumulation(deepspeed: DeepSpeedSettings, config: ZeroConfig, world_size: int) -> int:
    """Micro-batches of a step; 1 where the file leaves it open.

    Raises:
        ValueError: If its batch sizes do not fit the ranks.
    """
    copies = world_size // (config.pipeline.stages * (config.mesh.tensor or 1))
    return deepspeed.batch.derive(max(1, copies)).gradient_accumulation_steps or 1


def _config(path: str | None) -> tuple[ZeroConfig, DeepSpeedSettings | None]:
    if path is None:
        return load_config(), None
    layer = read_layer(path)
    if layer.is_deepspeed:
        found = inspect_deepspeed(layer)
        return config_of(found), found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_config(path), None


_DESCRIPTION = """\
Computes what every rank of a run will hold, before anything is allocated: by tier (device, host, nvme) and category,
padding included. Held against what this machine has, or the sizes you give, it says whether that fits, and if not the
smallest change after which it does.

Categories: parameters, gradients, master weights (fp32 copies of low-precision parameters), optimizer state,
buffers (of modules), gather buffers (units that are whole under stage 3), gradient buckets (local gradients on their
way), staging (between tiers), snapshot (a checkpoint written in the background), communication (gloo's exchanges),
handles.
What lives "inside a step" is counted at its largest. Activations are computed for plain numbers, with --micro-batch (no
matrix of attention scores is kept). Of models they are foreseen by a forward and backward without memory: of a factory
that returns a batch, and with --micro-batch of models of transformers. Else reserve them with --activations.

Exit status: 0 if it fits, as far as the machine's memory is known; 1 if it does not fit; 2 if it cannot be planned."""

_EXAMPLES = """\
examples:
  zero-strategy plan train.py:factory --world 8 --dtype bf16
  zero-strategy plan my_package.models:build --world 8 --dtype bf16
  zero-strategy plan my_package.models:GPT --args '{"depth": 24}' --config zero.yaml --world 4
  zero-strategy plan path/to/hugging_face/config.json --world 8 --dtype bf16 --gpu-mem 80GB --host-mem 1TB
  zero-strategy plan path/to/hugging_face/config.json --quantize nf4 --lora 16 --gpu-mem 24GB --host-mem 64GB
  zero-strategy plan --params 7e9 --layers 32 --hidden 4096 --world 2 --dtype bf16 --gpu-mem 24GB --host-mem 128GB
  zero-strategy plan --params 7e9 --dtype bf16 --gpu-mem 24GB --offload-optimizer cpu --png plan.png
  zero-strategy plan train.py:factory --auto --world 2 --global-batch 64 --host-mem 16GB
  zero-strategy plan --largest --dtype bf16 --gpu-mem 24GB --host-mem 64GB --disk 1TB
  zero-strategy plan --largest --params 8e9 --world 8 --dtype bf16 --gpu-mem 80GB --host-mem 1TB
"""

_RANKS_PER_HOST = 8
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _gigabits(text: str) -> float:
    if (found := float(text)) > 0:
        return found
    raise ValueError


def add_plan_command(commands: Any) -> None:
    """Adds `plan` to the parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="what every rank of a run will hold, and whether it fits",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "model",
        nargs="?",
        help="path.py:factory or module:factory (built without memory), whose result may be what verify takes, or a "
        "Hugging Face config.json or its directory",
    )
    model.add_argument("--args", default="{}", metavar="JSON", help="keywords for the factory, as a JSON object")
    model.add_argument("--params", type=float, metavar="7e9", help="plain numbers: a GPT with so many parameters")
    model.add_argument("--layers", type=int, help="its blocks")
    model.add_argument("--hidden", type=int, help="its width")
    model.add_argument("--vocabulary", type=int, help="rows of its embedding; default: what --params leaves, or 50304")
    model.add_argument(
        "--quantize",
        choices=tuple(QUANTISATIONS),
        help="weights of linear layers as transformers quantises them by bitsandbytes, frozen; nf4 and fp4 with "
        "quantised scales, -single without",
    )
    model.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="a float32 adapter on every linear layer but the output embedding (PEFT's all-linear); all else is frozen",
    )
    _add_run(parser.add_argument_group("the run"))
    _add_offload(parser.add_argument_group("offload"))
    there = parser.add_argument_group("the memory there is (default: this machine's, now)")
    there.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one or --gpu-mem is given")
    there.add_argument("--gpu-mem", type=parse_size, metavar="24GB", help="of each GPU")
    there.add_argument("--host-mem", type=parse_size, metavar="64GB", help="of each host")
    there.add_argument("--disk", type=parse_size, metavar="1TB", help="of each host, for NVMe offload")
    there.add_argument("--nvme-path", metavar="DIR", help="directory for NVMe offload, whose free bytes count")
    there.add_argument("--margin", type=float, default=0.05, help="fraction that stays free (default: %(default)s)")
    output = parser.add_argument_group("the answer")
    output.add_argument(
        "--auto",
        action="store_true",
        help="choose what is not set: stage, tiers, what is computed again; why, and a config file to pin it",
    )
    output.add_argument("--global-batch", type=int, metavar="N", help="rows of a step, of which --auto makes batches")
    output.add_argument("--rank", type=int, help="the ledger of this rank; default: of the fullest")
    output.add_argument("--by-unit", action="store_true", help="the table by unit")
    output.add_argument("--json", action="store_true", help="print it as JSON, with every buffer")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw stacked bars (needs matplotlib)")
    output.add_argument("--dark", action="store_true", help="the picture for a dark page")
    output.add_argument(
        "--largest",
        action="store_true",
        help="instead: the largest GPT-like model (hidden = 128 x layers) for every stage and offload, with saves that "
        "are not in the background; with --params or --layers and --hidden: the longest sequences of that model",
    )
    output.add_argument("--hidden-per-layer", type=int, default=128, help="that ratio (default: %(default)s)")


def _add_run(run: Any) -> None:
    run.add_argument("--config", metavar="FILE", help="our YAML or DeepSpeed's JSON, as for training")
    run.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="default: the config's, 3")
    run.add_argument("--world", type=int, default=1, metavar="RANKS", help="number of ranks (default: 1)")
    run.add_argument("--ranks-per-host", type=int, metavar="N", help="default: all, but at most this host's GPUs, or 8")
    run.add_argument("--replicate", type=int, metavar="N", help="mesh.replicate: copies of the sharded state")
    run.add_argument("--tensor", type=int, metavar="N", help="mesh.tensor: ranks that divide each layer")
    run.add_argument("--expert", type=int, metavar="N", help="mesh.expert: ranks that divide the experts of each layer")
    run.add_argument("--gradient-reduction", choices=("per_step", "per_micro_batch"), help="default: by stage")
    run.add_argument(
        "--link", type=_gigabits, metavar="GBIT", help="measured speed between ranks: the quicker gather after a step"
    )
    run.add_argument("--dtype", choices=tuple(_DTYPES), help="of the parameters in computation; default: as built")
    run.add_argument("--optimizer", default=None, help="class name, such as AdamW (default), SGD, Lion")
    run.add_argument("--momentum", action="store_true", help="SGD or RMSprop with momentum")
    run.add_argument("--average", action="store_true", help="a running average of the weights (EMA, SWA) is kept, too")
    run.add_argument("--optimizer-bytes", type=int, metavar="N", help="state of an optimizer of yours, per element")
    run.add_argument("--activations", type=parse_size, default=0, metavar="4GB", help="device bytes reserved, per rank")
    run.add_argument("--micro-batch", type=int, metavar="N", help="rows, by which activations are computed")
    run.add_argument("--accumulation", type=int, metavar="N", help="micro-batches of a step; default: the config's, 1")
    run.add_argument("--sequence", type=int, default=2048, metavar="N", help="tokens of a row (default: %(default)s)")
    run.add_argument("--recompute", action="store_true", help="blocks are run again in backward")
    run.add_argument("--no-snapshots", action="store_true", help="checkpoints are not written in the background")


def _add_offload(offload: Any) -> None:
    tiers = ("none", "cpu", "nvme")
    offload.add_argument("--offload-optimizer", choices=tiers, help="optimizer state and master weights")
    offload.add_argument("--optimizer-ratio", type=float, metavar="0.5", help="part of it that leaves the device")
    offload.add_argument("--offload-gradients", choices=tiers, help="reduced gradients; default: as the optimizer")
    offload.add_argument("--offload-parameters", choices=tiers, help="owned slices of parameters (stage 3)")
    offload.add_argument(
        "--resident", type=parse_size, metavar="4GB", help="of parameters and gradients in files, kept in host memory"
    )


def run_plan_command(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, with a message on stderr where it is 2."""
    try:
        return _run(options)
    except (ValueError, TypeError, OSError) as error:
        if options.json:
            print(json.dumps({"error": str(error)}, indent=1))
        complain(error)
        return 2


def _run(options: argparse.Namespace) -> int:
    from zero_strategy.cli.plan_report import report, report_text
    from zero_strategy.planning.machine import Machine

    machine = Machine.here(options.nvme_path)
    given = {"device": options.gpu_mem, "host": options.host_mem, "disk": options.disk}
    if not 0 <= options.margin < 1:
        raise ValueError(f"--margin is {options.margin}; accepted: 0 or more, below 1")
    known = Budget.of(machine)
    if options.gpu_mem is not None or options.host_mem is not None:  # the plan is for another machine
        known = replace(known, gpus=0)
        machine = Machine(disk_free=machine.disk_free, disk_path=machine.disk_path)
    budget = replace(known, margin=options.margin, **{key: value for key, value in given.items() if value is not None})
    settings = planned_settings(options)
    model = _model(options)
    plan = _plan(options, settings, model.shape(settings.config.units) if isinstance(model, Built) else model)
    if options.auto or settings.config.auto.enabled:
        from zero_strategy.cli.plan_auto import choose_and_tell

        return choose_and_tell(plan, settings.config, budget, model if isinstance(model, Built) else None, options)
    note = ""
    if isinstance(model, Built) and not options.activations:
        from zero_strategy.cli.plan_example import foreseen_activations

        nbytes, note = foreseen_activations(model, plan, options.micro_batch, options.sequence)
        plan = replace(plan, activations=nbytes)
    if options.largest:
        return _largest(plan, budget, options)
    if options.png is not None:
        from zero_strategy.cli.plan_report import draw

        draw(plan, budget, options.png, dark=options.dark)
    if options.disk is not None:
        machine = replace(machine, disk_free=options.disk, disk_path=machine.disk_path or "--disk")
    found = report(plan, budget, machine, options.rank, options.link)
    keys: Any = ("tier", "unit", "category") if options.by_unit else ()
    if note:
        found["notes"].append(note)
    print(json.dumps(found, indent=1) if options.json else report_text(plan, found, machine, keys))
    return int(not found["fits"])


def _plan(options: argparse.Namespace, settings: PlannedSettings, model: Any) -> Any:
    import torch

    from zero_strategy.auto.decide import without_auto
    from zero_strategy.planning.memory_plan import plan_model
    from zero_strategy.planning.model_shape import OptimizerState, optimizer_state

    if options.optimizer_bytes is not None:
        if options.optimizer is not None:
            raise ValueError("--optimizer and --optimizer-bytes: give one of them")
        if options.optimizer_bytes < 0:
            raise ValueError(f"--optimizer-bytes is {options.optimizer_bytes}; accepted: 0 or more")
        state = OptimizerState(f"{options.optimizer_bytes} bytes per element", options.optimizer_bytes, 1, torch.uint8)
    else:
        state = optimizer_state(options.optimizer or settings.optimizer or "AdamW", momentum=options.momentum)
    state = replace(state, average=options.average)
    present = torch.cuda.device_count() if options.gpu_mem is None else 0
    per_host = options.ranks_per_host
    if per_host is None:
        per_host = min(options.world, present or _RANKS_PER_HOST)
    checkpoints = settings.config.checkpoint
    if options.lora is not None and dict(checkpoints.settings())["checkpoint.frozen"].origin == DEFAULT:
        checkpoints.record("frozen", "reference", "--lora: as ZeroTrainer's checkpoints of adapters")
    device = options.device or ("cuda" if options.gpu_mem is not None or torch.cuda.is_available() else "cpu")
    name = _DTYPES[options.dtype] if options.dtype else settings.dtype
    return plan_model(
        model,
        without_auto(settings.config),
        world_size=options.world,
        compute_dtype=None if name is None else getattr(torch, name),
        optimizer=state,
        offload=settings.offload,
        device=device,
        ranks_per_host=per_host,
        snapshots=False if options.no_snapshots or options.largest else None,
        activations=options.activations,
        tokens=_tokens(options) if model.costs is not None else 0,
        recompute=options.recompute,
        accumulation=settings.accumulation if options.accumulation is None else options.accumulation,
    )


def _tokens(options: argparse.Namespace) -> int:
    for name in ("micro_batch", "sequence"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; accepted: 1 or more")
    return 0 if options.micro_batch is None else int(options.micro_batch * options.sequence)


def _model(options: argparse.Namespace) -> Any:
    """A shape of plain numbers, or a `Built`."""
    numbers = (options.params, options.layers, options.hidden, options.vocabulary)
    finetuning = Finetuning(options.quantize, options.lora)
    if options.largest:
        if options.model is not None:
            raise ValueError("--largest looks for a model, or the sequences of one of --params: leave out the model")
        if any(number is not None for number in numbers[:3]):
            return finetuning.gpt(shape_of_numbers(*numbers))
        if options.hidden_per_layer < 1:
            raise ValueError(f"--hidden-per-layer is {options.hidden_per_layer}; accepted: 1 or more")
        return finetuning.gpt(family_shape(1, options.vocabulary or VOCABULARY, options.hidden_per_layer))
    if options.model is None:
        return finetuning.gpt(shape_of_numbers(*numbers))
    if any(number is not None for number in numbers):
        raise ValueError("--params, --layers, --hidden and --vocabulary stand for a model; one is given already")
    try:
        arguments = bounded_json.parse(options.args, "--args")
    except ValueError as error:
        raise ValueError(f"--args {options.args!r} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"--args {options.args!r}: give a JSON object, such as '{{\"depth\": 12}}'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constructors, about values that a meta tensor cannot have
        return built_model(options.model, arguments, finetuning)


def _longest(plan: Any, budget: Any, options: argparse.Namespace) -> int:
    batch = options.micro_batch or 1
    found = list(longest_sequences(plan, budget, batch))
    if options.json:
        print(json.dumps(longest_json(found), indent=1))
    else:
        ranks, per_host = plan.resolved.world_size, plan.ranks_per_host
        print(
            f"longest sequences, {batch} per micro-batch: {plan.model.title}, on {ranks} rank(s), {per_host} per host"
        )
        print(f"(bytes per rank, peaks included; {budget.margin:.0%} stays free)\n\n{longest_table(found)}")
    return int(all(entry.plan is None for entry in found))


def _largest(plan: Any, budget: Any, options: argparse.Namespace) -> int:
    if any(number is not None for number in (options.params, options.layers, options.hidden)):
        return _longest(plan, budget, options)
    vocabulary = options.vocabulary or VOCABULARY
    finetuning = Finetuning(options.quantize, options.lora)
    models = list(
        largest_models(
            plan, budget, lambda step: finetuning.gpt(family_shape(step, vocabulary, options.hidden_per_layer))
        )
    )
    if options.json:
        print(json.dumps(largest_json(models), indent=1))
    else:
        ranks, per_host = plan.resolved.world_size, plan.ranks_per_host
        print(f"largest GPT, hidden = {options.hidden_per_layer} x layers, on {ranks} rank(s), {per_host} per host")
        print(f"(bytes per rank, peaks included; {budget.margin:.0%} stays free)\n\n{largest_table(models)}")
    return int(all(entry.plan is None for entry in models))
