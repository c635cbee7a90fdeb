"""`deepspeed.profiling.flops_profiler`: what forwards of a module take, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_strategy.diagnostics.profiles import ModuleProfile, number, parameters_of

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler:
    """Measures the forwards of a model between `start_profile` and `stop_profile`.

    Operations are those of products and attention.

    Args:
        model: The model.
        ds_engine: Accepted without effect.
        recompute_fwd_factor: Forwards that are computed again in backward.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.recompute_fwd_factor = model, recompute_fwd_factor
        self._profile = ModuleProfile(model)

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin to measure.

        Raises:
            ValueError: If modules shall be left out, which is not done here.
        """
        _check_ignored("ignore_list", ignore_list)
        self._profile.stop()
        self._profile = ModuleProfile(self.model)
        self._profile.start()

    def stop_profile(self) -> None:
        """Measure no more."""
        self._profile.stop()

    def reset_profile(self) -> None:
        """Forget what was measured."""
        running = self._profile.running
        self._profile.stop()
        self._profile = ModuleProfile(self.model)
        if running:
            self._profile.start()

    def end_profile(self) -> None:
        """Stop, and forget what was counted."""
        self._profile.stop()
        self._profile = ModuleProfile(self.model)

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the forwards."""
        return _shown(self._profile.whole.operations, "FLOPS", as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-adds of the forwards: half of the operations."""
        return _shown(self._profile.whole.operations // 2, "MACs", as_string)

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of the parameters."""
        return _shown(parameters_of(self.model), "", as_string)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forwards."""
        seconds = self._profile.whole.seconds
        return f"{1000 * seconds:.2f} ms" if as_string else seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print what was measured, or write it to a file.

        Args:
            profile_step: For the title.
            module_depth: Of the modules whose classes are compared; -1 is the deepest.
            top_modules: Classes that are listed at each depth.
            detailed: With a line for each module.
            output_file: The file; its folder is made if need be.
        """
        text = self._profile.report(
            f"flops_profiler: step {profile_step}",
            [],
            depth=module_depth,
            top=top_modules,
            detailed=detailed,
            again=self.recompute_fwd_factor,
        )
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text + "\n")
        else:
            print(text, flush=True)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-adds and parameters of one forward.

    Args:
        model: The model.
        input_shape: Of one tensor of ones, in the model's dtype and on its device, which is the only input; or else
            `args` and `kwargs`.
        args: Inputs.
        kwargs: Inputs by name.
        print_profile: Print the profile, or write it to `output_file`.
        detailed: With a line for each module.
        module_depth: See `FlopsProfiler.print_model_profile`.
        top_modules: Likewise.
        warm_up: Forwards before that one.
        as_string: Texts for people in place of numbers.
        output_file: See `print_profile`.
        ignore_modules: None; modules are not left out here.
        mode: "forward", or "generate", which calls `model.generate`.

    Returns:
        (operations, multiply-adds, parameters).

    Raises:
        ValueError: If there is no input, the mode is another one, or modules shall be left out.
    """
    _check_ignored("ignore_modules", ignore_modules)
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode is {mode!r}; accepted: 'forward', 'generate'")
    inputs, named = list(args), dict(kwargs or {})
    if input_shape is not None:
        parameter = next(model.parameters(), torch.empty(0))
        inputs = [torch.ones(tuple(input_shape), dtype=parameter.dtype, device=parameter.device)]
    if not inputs and not named:
        raise ValueError("get_model_profile() needs inputs: input_shape, args or kwargs")
    call: Any = model if mode == "forward" else model.generate
    model.eval()
    profiler = FlopsProfiler(model)
    for number_of_call in range(warm_up + 1):
        if number_of_call == warm_up:
            profiler.start_profile()
        call(*inputs, **named)
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string),
    )  # fmt: skip


def _shown(value: int, unit: str, as_string: bool) -> Any:
    if not as_string:
        return value
    figure, _, prefix = number(value).partition(" ")
    return f"{figure} {prefix}{unit}".rstrip()


def _check_ignored(name: str, value: Sequence[type[nn.Module]] | None) -> None:
    if value:
        raise ValueError(f"{name}={value!r} is not done here: all modules are measured; leave it out")
