"""DeepSpeed's estimators of memory, answered by the plan: bytes that are counted, padding and staging included.

What is estimated is a run in bf16 with fp32 master weights and Adam. Names, arguments and return values are
DeepSpeed's, but for `additional_buffer_factor`: there it is 1.5 by default, for what its estimate leaves out; here
nothing of model state is left out, and 1.0 is the default.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import nn

from zero_strategy.config import load_config
from zero_strategy.planning.buckets import Offload
from zero_strategy.planning.ledger import Ledger
from zero_strategy.planning.memory_plan import plan_model
from zero_strategy.planning.shapes import ModelShape, ParameterShape, UnitShape

_UNITS = 32
"""Equal units that a model is taken to have of which only the number of parameters is known."""
_BUILT = 4
"""Bytes per parameter while every rank builds the module in fp32, in host memory."""


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Bytes that model state takes under stage 2.

    Args:
        total_params: Number of parameters.
        num_gpus_per_node: Ranks per host.
        num_nodes: Hosts.
        cpu_offload: Optimizer state and master weights are in host memory; gradients stay on the device.
        additional_buffer_factor: Factor on the bytes of the host.

    Returns:
        Bytes per host, bytes per GPU.
    """
    shape = _equal_units(total_params, None)
    return _zero2(shape, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print what a model's state takes under stage 2, with and without offload; the model may be on the meta device."""
    _print_zero2(ModelShape.of(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """The same of a number of parameters."""
    _print_zero2(_equal_units(total_params, None), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Bytes that model state takes under stage 3.

    Args:
        total_params: Number of parameters.
        largest_layer_params: Those of the largest layer, which is taken to be gathered as one unit.
        num_gpus_per_node: Ranks per host.
        num_nodes: Hosts.
        cpu_offload: Optimizer state and master weights are in host memory; gradients stay on the device.
        cpu_offload_params: With `cpu_offload`, the parameters too; alone it has no effect.
        zero_init: The model is built under `zero.Init`.
        additional_buffer_factor: Factor on the bytes of the host.

    Returns:
        Bytes per host, bytes per GPU, bytes of the largest unit while it is whole with its gradients.

    Raises:
        ValueError: If the largest layer has more parameters than the model.
    """
    shape = _equal_units(total_params, largest_layer_params)
    return _zero3(
        shape, num_gpus_per_node, num_nodes, cpu_offload, cpu_offload_params, zero_init, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print what a model's state takes under stage 3, for every offload; the model may be on the meta device."""
    _print_zero3(ModelShape.of(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """The same of numbers of parameters."""
    shape = _equal_units(total_params, largest_layer_params)
    _print_zero3(shape, num_gpus_per_node, num_nodes, additional_buffer_factor)


def _equal_units(total: int, largest: int | None) -> ModelShape:
    """A model of units of the given size, and what is left at its root."""
    total = int(total)
    size = -(-total // _UNITS) if largest is None else int(largest)
    if not 0 < size <= total:
        raise ValueError(
            f"total_params is {total} and largest_layer_params {largest}; both must be positive, and the largest layer "
            "is a part of the model"
        )
    count, rest = divmod(total, size)
    sizes = [rest, *[size] * count]
    return ModelShape(
        tuple(
            UnitShape(name, ((f"{name or 'root'}.weight", ParameterShape((numel,))),) if numel else ())
            for name, numel in zip(["", *(f"units.{index}" for index in range(count))], sizes, strict=True)
        ),
        title=f"{total / 1e6:,.0f}M parameters",
    )


def _ledger(shape: ModelShape, stage: int, per_node: int, nodes: int, offload: Offload) -> Ledger:
    plan = plan_model(
        shape,
        load_config(stage=stage),
        world_size=per_node * nodes,
        compute_dtype=torch.bfloat16,
        offload=offload,
        device="cuda",
        ranks_per_host=per_node,
        snapshots=False,
    )
    return plan.ledger()


def _zero2(shape: ModelShape, per_node: int, nodes: int, cpu_offload: bool, factor: float) -> tuple[int, int]:
    ledger = _ledger(shape, 2, per_node, nodes, Offload("cpu" if cpu_offload else "none"))
    # Building is over when state is made, so the larger one counts.
    host = max(ledger.tier_bytes("host"), _BUILT * shape.parameters) * per_node
    return int(host * factor), ledger.tier_bytes("device")


def _zero3(
    shape: ModelShape, per_node: int, nodes: int, optimizer: bool, parameters: bool, zero_init: bool, factor: float
) -> tuple[int, int, int]:
    offload = Offload("cpu" if optimizer else "none", "cpu" if optimizer and parameters else "none")
    ledger = _ledger(shape, 3, per_node, nodes, offload)
    largest = max(sum(parameter.numel for _, parameter in unit.parameters) for unit in shape.units)
    built = _BUILT * (largest if zero_init else shape.parameters)
    host = max(ledger.tier_bytes("host"), built) * per_node
    return int(host * factor), ledger.tier_bytes("device"), 2 * torch.bfloat16.itemsize * largest


def _print_zero2(shape: ModelShape, per_node: int, nodes: int, factor: float) -> None:
    rows = [
        (*_zero2(shape, per_node, nodes, offload, factor), f"offload_optimizer={'cpu' if offload else 'none'}")
        for offload in (True, False)
    ]
    _print(f"stage 2 of a model with {shape.parameters / 1e6:,.0f}M parameters", per_node, nodes, rows)


def _print_zero3(shape: ModelShape, per_node: int, nodes: int, factor: float) -> None:
    rows, largest = [], 0
    for (parameters, optimizer), zero_init in product([(True, True), (False, True), (False, False)], (True, False)):
        host, device, largest = _zero3(shape, per_node, nodes, optimizer, parameters, zero_init, factor)
        options = [f"{name}={'cpu' if on else 'none'}" for name, on in zip(_OFFLOADS, (parameters, optimizer))]
        rows.append((host, device, ", ".join([*options, f"zero_init={int(zero_init)}"])))
    what = f"stage 3 of a model with {shape.parameters / 1e6:,.0f}M parameters"
    _print(f"{what}, {largest / 4e6:,.0f}M in its largest unit", per_node, nodes, rows)


_OFFLOADS = ("offload_param", "offload_optimizer")


def _print(what: str, per_node: int, nodes: int, rows: list[Any]) -> None:
    print(f"Memory for parameters, gradients and optimizer state: {what},")
    print(f"on {nodes} node(s) of {per_node} GPU(s); activations come on top.")
    print("  per CPU  |  per GPU  | options")
    for host, device, options in rows:
        print(f"{host / 2**30:8.2f}GB | {device / 2**30:7.2f}GB | {options}")
