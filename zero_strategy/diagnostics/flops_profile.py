"""A profile of one forward of an engine's module: `flops_profiler` of a DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from zero_strategy.diagnostics.module_profile import ModuleProfile

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


class FlopsProfile:
    """Measures the first forward with gradients of one step, and prints what it finds when that is over.

    Args:
        engine: The engine.
        options: `profile_step` (counted from 0), `module_depth` (-1: the deepest), `top_modules`, `detailed`,
            `recompute_fwd_factor`, `output_file` (None: standard output).

    Raises:
        ValueError: If the engine trains stages of a pipeline, which are in no single forward.
    """

    def __init__(self, engine: ZeroEngine, options: Mapping[str, Any]) -> None:
        if not _has_forward(engine.module):
            raise ValueError(
                "flops_profiler.enabled is true, and a pipeline has no forward of the whole module to profile; turn it "
                "off, and set diagnostics.run_dir for what each stage computes"
            )
        self._engine, self._options = ref(engine), options
        self._profile: ModuleProfile | None = None
        self._hooks = [
            engine.module.register_forward_pre_hook(self._begin, prepend=True),
            engine.module.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Measure nothing any more."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._profile is not None:
            self._profile.stop()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlopsProfile:
        return self  # hooks of a copied module find that this is not theirs

    def _begin(self, module: nn.Module, args: Any) -> None:
        engine = self._engine()
        if engine is None or module is not engine.module or self._profile is not None or not torch.is_grad_enabled():
            return
        steps = engine.steps.taken + engine.steps.skipped
        if steps == self._options["profile_step"]:
            self._profile = ModuleProfile(module)
            self._profile.start(in_forward=True)
        elif steps > self._options["profile_step"]:
            self.close()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        engine, profile = self._engine(), self._profile
        if engine is None or profile is None or module is not profile.module:
            return
        self.close()
        options = self._options
        text = profile.report(
            f"flops_profiler: step {options['profile_step']}, one micro-batch of rank {engine.mesh.team.rank}",
            [("data-parallel ranks", str(engine.mesh.world_size))],
            depth=options["module_depth"],
            top=options["top_modules"],
            detailed=options["detailed"],
            again=options["recompute_fwd_factor"],
        )
        if options["output_file"]:
            place = Path(options["output_file"])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text + "\n")
        else:
            print(text, flush=True)


def _has_forward(module: nn.Module) -> bool:
    from zero_strategy.pipeline.module import PipelineModule

    return not isinstance(module, PipelineModule)
