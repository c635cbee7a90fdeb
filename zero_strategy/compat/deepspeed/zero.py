"""`deepspeed.zero` and `deepspeed.runtime.zero`: sharded parameters, the config's section, estimators of memory.

Names, arguments and return values are DeepSpeed's. The estimators are answered by the plan: bytes that are counted,
padding and staging included, of a run in bf16 with fp32 master weights and Adam. `additional_buffer_factor` is 1.5 by
default there, for what the estimate leaves out; here nothing of model state is left out, and 1.0 is the default.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, IntEnum
from itertools import product
from typing import Any, ClassVar

import torch
from torch import nn

from zero_strategy import fsdp as sharding
from zero_strategy.comm.process_group import init_distributed
from zero_strategy.config import load_config
from zero_strategy.config.deepspeed.classify import classify
from zero_strategy.config.deepspeed.keys import ZERO, Group, Key
from zero_strategy.config.sources import Layer
from zero_strategy.fsdp.model import sharded_model_of
from zero_strategy.planning.buckets import Offload
from zero_strategy.planning.ledger import Ledger
from zero_strategy.planning.memory_plan import plan_model
from zero_strategy.planning.model_shape import ModelShape, ParameterShape, UnitShape
from zero_strategy.runtime.torch_private import forward_pre_hooks_of

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]


class Init(sharding.Init):
    """Build a model of which each rank keeps its slices alone; see `zero_strategy.sharding.Init`.

    The process group is started on entry where it is not yet, as DeepSpeed does.

    Args:
        module: None; a module that exists already is sharded by `initialize`.
        data_parallel_group: None; the mesh is made of all ranks.
        mem_efficient_linear: Accepted; linear layers keep no gathered weights here in any case.
        remote_device: None, "none" or "cpu"; nothing is on a device yet.
        pin_memory: Accepted; there is no memory to pin yet.
        config_dict_or_path: Accepted; the config that counts is that of `initialize`.
        config: The same under an old name.
        enabled: Do nothing if False.
        dtype: None; `bf16` and `fp16` of the config decide.
        mpu: None.

    Raises:
        ValueError: If one of them asks for what is not done; names it and the way out.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        refused = {
            "module": (module, "pass it to initialize(), which shards a module that exists"),
            "data_parallel_group": (data_parallel_group, "lay the ranks out with the config's 'mesh'"),
            "dtype": (dtype, "set bf16.enabled or fp16.enabled in the config"),
            "mpu": (mpu, "leave it out; layers are divided by torch's parallelize_module"),
        }
        if remote_device not in (None, "none", "cpu"):
            raise ValueError(f"zero.Init(remote_device={remote_device!r}) is not done here; leave it out")
        for name, (value, way_out) in refused.items():
            if enabled and value is not None:
                raise ValueError(f"zero.Init({name}=...) has no effect here: {way_out}")
        super().__init__(enabled)

    def __enter__(self) -> None:
        if self._enabled and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            init_distributed()
        super().__enter__()


class GatheredParameters(sharding.GatheredParameters):
    """Full parameters inside a `with` block; see `zero_strategy.sharding.GatheredParameters`.

    Args:
        params: One parameter, or any iterable of them.
        modifier_rank: The rank whose changes are kept.
        fwd_module: Accepted; which module uses a parameter is noticed without.
        enabled: Do nothing if False.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__(params, modifier_rank, enabled)


class _ExternalParameters:
    """Forward pre-hook of a module: parameters of other modules that its forward uses are gathered with it."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        for parameter in self.parameters:
            model = sharded_model_of(parameter)
            if model is not None:  # else the engine is made later, or is gone
                model.unshard_on_demand([parameter])

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExternalParameters:
        copied = _ExternalParameters()
        copied.parameters = [memo.get(id(parameter), parameter) for parameter in self.parameters]
        return copied


def _external_parameters(module: nn.Module, parameter: nn.Parameter) -> _ExternalParameters | None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter takes a module and a parameter, not {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )
    return next((hook for hook in forward_pre_hooks_of(module) if isinstance(hook, _ExternalParameters)), None)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather a parameter of another module whenever this module's forward begins, and keep it until its backward.

    Without it the parameter is gathered when it is read, which is later.

    Args:
        module: The module whose forward uses it.
        parameter: A parameter of any module of the same model.

    Raises:
        TypeError: If it is called with something else than a module and a parameter.
    """
    hook = _external_parameters(module, parameter)
    if hook is None:
        module.register_forward_pre_hook(hook := _ExternalParameters())
    if not any(known is parameter for known in hook.parameters):
        hook.parameters.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Raises:
        TypeError: If it is called with something else than a module and a parameter.
        RuntimeError: If the parameter is not registered for the module.
    """
    hook = _external_parameters(module, parameter)
    if hook is None or not any(known is parameter for known in hook.parameters):
        raise RuntimeError(f"the parameter of shape {tuple(parameter.shape)} is not registered for this module")
    hook.parameters = [known for known in hook.parameters if known is not parameter]


# ---- kinds of state, and the section of a config ----


class ZeroParamStatus(Enum):
    """States of a parameter under DeepSpeed; nothing here has an attribute of this kind (`ds_status`)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that `engine.offload_states(include=...)` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, Enum):
    """Places for state; a config takes them as it takes their names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class ZeroStageEnum(IntEnum):
    """Stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class _ConfigSection:
    """Keys of a section, checked as in a file; what is not given has DeepSpeed's default.

    Raises:
        TypeError: If a value is not of its key's type.
        ValueError: If a key is unknown (names the nearest), or a value is not accepted.
    """

    _keys: ClassVar[Group]
    _path: ClassVar[tuple[str, ...]]

    def __init__(self, **values: Any) -> None:
        given: dict[str, Any] = {name: _plain(value) for name, value in values.items() if value is not None}
        content: dict[str, Any] = given
        for name in reversed(self._path):
            content = {name: content}
        prefix = ".".join(self._path) + "."
        reports = classify(Layer(content, f"user: {type(self).__name__}"))
        found = {key.removeprefix(prefix): report.value for key, report in reports.items()}
        for name, key in self._keys.keys.items():
            if isinstance(key, Key):
                setattr(self, name, found.get(name, key.default))
            else:
                inner = given.get(name)
                made = _SECTIONS.get(name)
                setattr(self, name, inner if made is None or inner is None else made(**inner))

    def model_dump(self) -> dict[str, Any]:
        """The values as plain ones, those not given included."""
        return {name: value for name, value in _plain(self).items()}

    dict = model_dump

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _group(name: str) -> Group:
    found = ZERO.keys[name]
    assert isinstance(found, Group)
    return found


class DeepSpeedZeroOffloadParamConfig(_ConfigSection):
    """`offload_param`."""

    _keys, _path = _group("offload_param"), ("zero_optimization", "offload_param")


class DeepSpeedZeroOffloadOptimizerConfig(_ConfigSection):
    """`offload_optimizer`."""

    _keys, _path = _group("offload_optimizer"), ("zero_optimization", "offload_optimizer")


class DeepSpeedZeroConfig(_ConfigSection):
    """`zero_optimization`; attributes have the present spelling of their keys (`stage3_...`)."""

    _keys, _path = ZERO, ("zero_optimization",)


_SECTIONS: dict[str, type[_ConfigSection]] = {
    "offload_param": DeepSpeedZeroOffloadParamConfig,
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
}


def _plain(value: Any) -> Any:
    if isinstance(value, _ConfigSection):
        return {name: _plain(inner) for name, inner in vars(value).items() if inner is not None}
    return value.value if isinstance(value, Enum) else value


# ---- estimators of memory ----

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
    """Estimate from a number of parameters."""
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
    """Estimate from numbers of parameters."""
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
    return replace(plan, communicator_bytes=0).ledger()  # of model states, as these functions say


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
