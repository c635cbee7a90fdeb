"""Memory and first values of a model's parameters: from the meta device, and between devices, unit by unit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zero_strategy.fsdp.dtensor import held_by, is_dtensor, like, part_of, recast
from zero_strategy.fsdp.layout import UnitSpec
from zero_strategy.runtime.torch_private import buffers_of, parameters_of, swap_values


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters are empty, on the meta device; buffers stay real.

    Values that code gives these parameters are lost, as they are on the meta device anyway: they get theirs from
    `reset_parameters`, or from a checkpoint.
    """

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast(Any, move))
    try:
        yield
    finally:
        handle.remove()


def materialize_unit(spec: UnitSpec, device: torch.device, *, initialise: bool = True) -> None:
    """Give the meta parameters of a unit memory on `device` and values from their modules' `reset_parameters`.

    Objects keep their identity. Values come from the default random generator, module by module in registration
    order; rank 0's are the ones that count.

    Args:
        spec: The unit. Parameters of its modules that belong to other units (ties) become real with them.
        device: Where the memory is.
        initialise: Call `reset_parameters`; else the values are arbitrary, to be loaded.

    Raises:
        ValueError: If a module with meta parameters has no `reset_parameters`, or has meta buffers; names it.
    """
    meta = {id(parameter): name for name, parameter in spec.parameters if parameter.is_meta}
    if not meta:
        return
    for prefix, module in spec.module.named_modules(prefix=spec.name):
        direct = dict(module.named_parameters(recurse=False))
        if not any(parameter.is_meta and id(parameter) in meta for parameter in direct.values()):
            continue
        mine = {key: parameter for key, parameter in direct.items() if parameter.is_meta}
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {prefix}.{key} is on the meta device and cannot be initialised; build the model under "
                    "zero_strategy.sharding.Init(), which leaves buffers real"
                )
        if initialise and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"module {prefix or 'root'!r} ({type(module).__name__}) has parameters {sorted(mine)} on the meta "
                "device and no reset_parameters(); give it one, build it under sharding.Init() instead, or load its "
                "values: ZeroEngine(module, config, weights=CHECKPOINT)"
            )
        for parameter in mine.values():
            values = torch.empty_like(held_by(parameter), device=device)
            swap_values(parameter, like(parameter, values))
        if initialise:
            _initialise(module, mine.keys())


@torch.no_grad()
def move_unit(spec: UnitSpec, device: torch.device) -> None:
    """Bring a unit's parameters that have values to `device`, keeping their objects; the whole model may not fit."""
    for _, parameter in spec.parameters:
        if not parameter.is_meta and parameter.device != device:
            if is_dtensor(parameter):
                recast(parameter, parameter.dtype, device)
            else:
                parameter.data = parameter.data.to(device)


@torch.no_grad()
def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring all buffers to `device`."""
    for owner in module.modules():
        for key, buffer in list(owner.named_buffers(recurse=False)):
            if not buffer.is_meta and buffer.device != device:
                buffers_of(owner)[key] = buffer.to(device)


def drop_unset(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Give up the memory that `materialize_unit` has made for values which are yet to be read."""
    for tensor in map(held_by, parameters):
        if tensor.dtype == dtype:  # else the bucket casts it first
            tensor.untyped_storage().resize_(0)


def _initialise(module: nn.Module, new: Collection[str]) -> None:
    """Call `reset_parameters` with a lasting effect on the parameters `new` only: tied ones may have values already.

    Where parameters are divided it sees whole ones, and each rank keeps its part: the values do not depend on the
    number of parts.
    """
    direct = dict(module.named_parameters(recurse=False))
    divided = {key: parameter for key, parameter in direct.items() if is_dtensor(parameter)}
    settled = [parameter for key, parameter in direct.items() if key not in new and key not in divided]
    values = [parameter.data for parameter in settled]
    for parameter in settled:
        # For `reset_parameters`, which writes to all parameters of its module.
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    for key, parameter in divided.items():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        parameters_of(module)[key] = nn.Parameter(whole, parameter.requires_grad)
    try:
        module.reset_parameters()  # type: ignore[operator]
        for key in divided.keys() & new:
            made = parameters_of(module)[key]
            assert made is not None
            held_by(divided[key]).copy_(part_of(divided[key]).of_whole(made.data))
    finally:
        parameters_of(module).update(divided)
        for parameter, value in zip(settled, values, strict=True):
            parameter.data = value


@torch.no_grad()
def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Floating-point buffers follow the parameters, as with `module.to(dtype)`."""
    for owner in module.modules():
        for key, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(owner, key, buffer.to(dtype))


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's tensors, those on the meta device left out; the CPU if there are no others."""
    tensors = [*module.parameters(), *module.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
