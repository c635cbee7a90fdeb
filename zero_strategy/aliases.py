"""Former import paths of modules, which go on working: `zero_strategy.sharding` is `zero_strategy.fsdp`, and so on.

A path of the table, and what lies below it, gives the module of today, the same object under both names. Nothing is
imported before it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import MappingProxyType

TYPE_CHECKING = False  # as in zero_strategy/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.abc import Loader, MetaPathFinder
    from types import CodeType, ModuleType
else:
    Loader = MetaPathFinder = object

_ROOT = "zero_strategy."


def moved(places: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module for names that were in it, and are in other modules now.

    Pickles of earlier versions, such as whole LightningModules, name them there.

    Args:
        places: Module below `zero_strategy`, by name.
    """

    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(f"no attribute {name!r}")
        return getattr(import_module(_ROOT + places[name]), name)

    return find


FORMER: Mapping[str, str] = MappingProxyType(
    {
        "activation.checkpoint": "activation.functional",
        "activation.checkpointer": "activation.functional",
        "activation.configure": "activation.functional",
        "activation.seeds": "activation.rng",
        "activation.timings": "activation.settings",
        "activation.tracking": "activation.functional",
        "checkpoint.checksums": "checkpoint.ranges",
        "checkpoint.compare": "cli.diff_checkpoints",
        "checkpoint.interop": "convert",
        "checkpoint.interop.deepspeed": "convert.deepspeed",
        "checkpoint.remote": "checkpoint.storage",
        "checkpoint.snapshot": "checkpoint.save",
        "checkpoint.verify": "cli.checkpoint_checks",
        "compat.deepspeed.transformer.vocabulary_loss": "sequence.tiling",
        "deferred": "checkpoint.deferred",
        "diagnostics.gradient_norms": "diagnostics.norms",
        "diagnostics.install": "diagnostics.recorder",
        "diagnostics.nvtx": "compat.megatron.diagnostics",
        "diagnostics.rank_logging": "compat.megatron.diagnostics",
        "diagnostics.replica_check": "compat.megatron.diagnostics",
        "diagnostics.straggler": "compat.megatron.straggler",
        "diagnostics.straggler_control": "compat.megatron.straggler",
        "diagnostics.straggler_data": "compat.megatron.straggler",
        "diagnostics.straggler_singleton": "compat.megatron.diagnostics",
        "diagnostics.verify": "verify",
        "distributed": "comm",
        "distributed.dense_groups": "compat.megatron.fsdp_utils",
        "distributed.desync": "watchdog.diagnosis",
        "distributed.dtensors": "fsdp.dtensor",
        "distributed.fsdp_index": "compat.megatron.fsdp_utils",
        "distributed.group_ranks": "compat.megatron.groups",
        "distributed.mesh_names": "compat.megatron.groups",
        "distributed.parallel_groups": "compat.megatron.groups",
        "distributed.start": "comm.process_group",
        "distributed.symmetric_memory": "compat.megatron.tensors",
        "distributed.tensor_parallel": "comm.mesh",
        "integrations.accelerate_launch": "integrations.accelerate.launch",
        "integrations.accelerate_models": "integrations.accelerate.models",
        "integrations.accelerate_saving": "integrations.accelerate.saving",
        "integrations.accelerate_uneven": "integrations.accelerate.uneven",
        "integrations.checkpoint_dict": "integrations.lightning.checkpoint_dict",
        "integrations.deepspeed": "compat.deepspeed",
        "integrations.fabric_strategy": "integrations.lightning.fabric_strategy",
        "integrations.joint_clip": "integrations.accelerate.joint_clip",
        "integrations.megatron": "compat.megatron",
        "integrations.namespaces": "integrations.lightning.namespaces",
        "integrations.precision": "integrations.lightning.precision",
        "integrations.pretrained": "integrations.huggingface.pretrained",
        "integrations.sequence_batches": "integrations.huggingface.sequence_batches",
        "integrations.sequence_models": "integrations.huggingface.sequence_models",
        "integrations.strategy_setup": "integrations.lightning.setup",
        "integrations.tensor_models": "integrations.huggingface.tensor_models",
        "integrations.trainer": "integrations.lightning.trainer",
        "integrations.trainer_averaging": "integrations.lightning.averaging",
        "integrations.trainer_callbacks": "integrations.lightning.callbacks",
        "integrations.trainer_checkpoint": "integrations.lightning.checkpoint",
        "integrations.trainer_pipeline": "integrations.lightning.pipeline",
        "integrations.uneven": "integrations.lightning.uneven",
        "joined": "fsdp.uneven_batches",
        "lifecycle": "compat.megatron.lifecycle",
        "loading": "checkpoint.load",
        "memory": "offload",
        "memory.chunked": "offload.chunk_store",
        "memory.indirect": "compat.megatron.tensors",
        "memory.opening": "offload.stores",
        "memory.reconcile": "planning.held",
        "memory.scratch": "compat.megatron.tensors",
        "memory.vectors": "offload.chunks",
        "memory.viewless": "compat.megatron.tensors",
        "ops.applier": "ops.multi_tensor",
        "ops.native": "ops.library",
        "ops.vocabulary_loss": "sequence.tiling",
        "optim.model_parallel_norm": "compat.megatron.gradients",
        "optim.no_optimizer": "optim.fused",
        "piece_exchange": "checkpoint.piece_reader",
        "pipeline.deferred_embedding": "compat.megatron.gradients",
        "pipeline.recipes": "pipeline.building",
        "pipeline.schedule": "pipeline.instructions",
        "pipeline.stages": "pipeline.partition",
        "pipeline_engine": "pipeline.engine",
        "scripts": "compat.deepspeed.scripts",
        "scripts.arguments": "compat.deepspeed.scripts.entry",
        "scripts.config_objects": "compat.deepspeed.scripts.settings",
        "scripts.data": "compat.deepspeed.scripts.data",
        "scripts.engine": "compat.deepspeed.scripts.engine",
        "scripts.engine_checkpoints": "compat.deepspeed.scripts.engine",
        "scripts.entry": "compat.deepspeed.scripts.entry",
        "scripts.named": "compat.deepspeed.optimizers",
        "scripts.ownership": "compat.deepspeed.scripts.data",
        "scripts.pipeline": "compat.deepspeed.scripts.pipeline",
        "scripts.plain_backward": "compat.deepspeed.scripts.data",
        "scripts.settings": "compat.deepspeed.scripts.settings",
        "sharding": "fsdp",
        "sharding.assemble": "fsdp.grad_view",
        "sharding.buffer_reuse": "fsdp.grad_accumulation",
        "sharding.construction": "fsdp.init",
        "sharding.context": "fsdp.gathered_parameters",
        "sharding.divide": "compat.megatron.models",
        "sharding.dtensors": "fsdp.dtensor",
        "sharding.edits": "fsdp.released",
        "sharding.gradient_reading": "fsdp.grad_view",
        "sharding.gradients": "fsdp.grad_bucket",
        "sharding.grouping": "fsdp.layout",
        "sharding.guards": "fsdp.guards",
        "sharding.handles": "fsdp.grad_view",
        "sharding.layout": "fsdp.layout",
        "sharding.leaf_modules": "fsdp.layout",
        "sharding.local_sums": "fsdp.grad_accumulation",
        "sharding.materialize": "fsdp.model",
        "sharding.model": "fsdp.model",
        "sharding.outside": "fsdp.gathered_parameters",
        "sharding.parallel_marks": "compat.megatron.models",
        "sharding.parameters": "fsdp.param_bucket",
        "sharding.placement": "fsdp.layout",
        "sharding.plan": "fsdp.reduction_plan",
        "sharding.power_sums": "fsdp.power_sums",
        "sharding.reducer": "fsdp.reduce",
        "sharding.reducer_hooks": "fsdp.reduction_plan",
        "sharding.reduction": "fsdp.reduction_plan",
        "sharding.registry": "fsdp.released",
        "sharding.released": "fsdp.released",
        "sharding.sharded_parameter": "fsdp.released",
        "sharding.shown": "fsdp.grad_view",
        "sharding.signatures": "compat.megatron.models",
        "sharding.tensor_part": "fsdp.dtensor",
        "sharding.units": "fsdp.layout",
        "sharding.unsharder": "fsdp.unshard",
        "sharding.waiting_factors": "fsdp.grad_accumulation",
        "sharding.wrapped_models": "compat.megatron.models",
        "transformer": "compat.deepspeed.transformer",
        "transformer.attention": "compat.deepspeed.transformer.layer",
        "transformer.block_weights": "compat.deepspeed.transformer.replacement",
        "transformer.config": "compat.deepspeed.transformer.config",
        "transformer.dropout_masks": "compat.deepspeed.transformer.layer",
        "transformer.feed_forward": "compat.deepspeed.transformer.layer",
        "transformer.inference": "compat.megatron.models",
        "transformer.initialization": "compat.megatron.models",
        "transformer.layer": "compat.deepspeed.transformer.layer",
        "transformer.replacement": "compat.deepspeed.transformer.replacement",
        "transformer.rotary": "compat.deepspeed.transformer.layer",
        "transformer.vocabulary_loss": "sequence.tiling",
        "versions": "compat.megatron.lifecycle",
    }
)
"""Former path -> path, both below `zero_strategy`."""


def install() -> None:
    """Let former paths be imported. Safe to call again."""
    if not any(isinstance(finder, FormerPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerPaths())


def present_path(name: str) -> str | None:
    """The path of today for a former one; None for any other.

    Args:
        name: With dots, from `zero_strategy` on.
    """
    if not name.startswith(_ROOT):
        return None
    head, rest = name[len(_ROOT) :], ""
    while head:
        if head in FORMER:
            return f"{_ROOT}{FORMER[head]}{rest}"
        head, _, tail = head.rpartition(".")
        rest = f".{tail}{rest}"
    return None


class FormerPaths(MetaPathFinder):
    """Finds modules by their former paths. It comes first, or a module would be loaded twice, under two names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias; None for other names."""
        present = present_path(fullname)
        return None if present is None else ModuleSpec(fullname, _AliasLoader(present))


class _AliasLoader(Loader):
    """Loads the module of another name, and leaves it as it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of today."""
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The import system has given it the alias's spec: its own comes back. It has been executed."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the module of today, for `python -m` with a former path."""
        from importlib.util import find_spec

        spec = find_spec(self._name)
        get_code = getattr(spec and spec.loader, "get_code", None)
        return None if get_code is None else get_code(self._name)
