"""A model as a sequence of layers, of which a rank has those of its stages.

A batch, as a data loader gives it, is divided into micro-batches.

`PipelineModule.loss(batch)` is one call with two ways to go: where the module has the whole model and nothing trains it
as a pipeline, it is forward and loss function; else a `BatchRunner` carries out a schedule.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from zero_strategy.activation.functional import checkpoint
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.process_group import ProcessGroup, from_first_rank, world_size
from zero_strategy.comm.store import together
from zero_strategy.fsdp.tensor_plan import Plan, division_by
from zero_strategy.pipeline.building import (
    BuiltLayer,
    LayerSeeds,
    NamedLayer,
    Parallelize,
    build_layers,
    draw_seed,
    name_layers,
    parallelize_together,
    register,
)
from zero_strategy.pipeline.partition import LayerProfile, divide, uniform_bounds
from zero_strategy.pipeline.schedules import Placement, Shape, placement_of
from zero_strategy.pipeline.state import layer_path, layer_paths, layers_with_files, load_layers, save_layers
from zero_strategy.pipeline.ties import Tie, own_ties, plan_ties
from zero_strategy.pipeline.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from zero_strategy.reproducible.streams import SlotStreams
from zero_strategy.runtime.torch_private import tree_flatten, tree_flatten_with_path, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class BatchRunner(Protocol):
    """Trainer of a module in parts."""

    def loss(self, batch: Any) -> Tensor:
        """See `PipelineModule.loss`."""

    def outputs(self, inputs: Any, everywhere: bool) -> Any:
        """See `PipelineModule.outputs`."""


def rows_of(batch: Any) -> int:
    """The size of the first dimension, which all tensors of a batch share.

    Raises:
        ValueError: If they do not, or there is no tensor with dimensions; names places and sizes.
    """
    sizes: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            sizes.setdefault(leaf.shape[0], "batch" + "".join(map(str, path)))
    if not sizes:
        raise ValueError(f"a pipeline divides the rows of a batch, and this one ({type(batch).__name__}) has no tensor")
    if len(sizes) > 1:
        found = ", ".join(f"{place} has {size}" for size, place in sizes.items())
        raise ValueError(f"a pipeline divides a batch by rows, dimension 0 of all its tensors, but {found}")
    return next(iter(sizes))


def split_batch(batch: Any, parts: int) -> list[Any]:
    """A batch in parts along dimension 0, of equal size, or by one row larger at the beginning.

    Args:
        batch: Tensors in tuples, lists, dicts. What is no tensor, and tensors without dimensions, are in every part.
        parts: How many.

    Raises:
        ValueError: If there are fewer rows than parts, or tensors have different numbers of rows.
    """
    rows = rows_of(batch)
    if rows < parts:
        raise ValueError(
            f"a batch of {rows} row(s) cannot be divided into {parts} micro-batches (pipeline.micro_batches); set "
            "drop_last=True on the DataLoader if it is the last one of an epoch, or make batches larger"
        )
    leaves, tree = tree_flatten(batch)
    divided = [
        leaf.tensor_split(parts) if isinstance(leaf, Tensor) and leaf.dim() > 0 else [leaf] * parts for leaf in leaves
    ]
    return [tree_unflatten([leaf[part] for leaf in divided], tree) for part in range(parts)]


def join_parts(parts: Sequence[Any]) -> Any:
    """Outputs of micro-batches as one: tensors joined along dimension 0, 0-d ones stacked, the rest in lists."""
    leaves, trees = zip(*(tree_flatten(part) for part in parts), strict=True)
    return tree_unflatten([_join(found) for found in zip(*leaves, strict=True)], trees[0])


def _join(values: Sequence[Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values))
    return values[0] if all(value is None for value in values) else list(values)


class PipelineModule(nn.Module):
    """A sequence of layers, divided into stages of consecutive ones. A rank builds and holds its own alone.

    The forward of the whole is layer after layer, each called with what the one before returned: a tensor, or tensors
    in tuples, lists and dicts. Parameters have the names of the whole model on every rank: "3.weight" is the weight of
    the layer with number 3, as in the `nn.Sequential` of the layers; members of an `nn.Sequential` that is passed, and
    layers made of a model's modules, keep their names.

    Initial weights do not depend on the number of stages: see `seed_layers`. Making the module is a collective over
    all ranks.

    Args:
        layers: `LayerSpec`s, which are built on their stage only, modules, functions of one input; or an
            `nn.Sequential`.
        num_stages: Ranks of a pipeline. Needed without a topology; the other ranks make more pipelines.
        topology: Which rank is where; it has an axis "pipe".
        loss_fn: Called with the last stage's outputs and the labels.
        seed_layers: Layer i is built with the seed base_seed + i, and each forward of it draws from the seed
            base_seed x (2 + forwards so far) + i; the generators are put back. Otherwise the seed of layer i is
            r + base_seed + i, where r is drawn from torch's CPU generator on the first rank: one draw, so that a
            script's seed decides; and a forward draws from the generators as they are, each rank from its own. Slices
            of tensor parallelism are built with one seed; what they divide draws from the tracker's state. Under
            `reproducible.slots` a training forward of a layer draws by step, slot and layer, with and without it.
        seed_fn: Seeds the generators with a number; default: Python's, NumPy's and torch's.
        base_seed: See `seed_layers`.
        partition_method: "parameters" (trainable ones; largest stage as small as can be), "uniform" (numbers of
            layers), "type:REGEX" (numbers of layers whose class name matches, in any case), "profile" (time), or the
            bounds themselves, such as [0, 3, 7].
        activation_checkpoint_interval: Layers that are computed again in backward together; 0: none are.
        activation_checkpoint_func: Called with a function and its inputs; default: `deepspeed.checkpointing.checkpoint`
            of this package.
        checkpointable_layers: Class names; only runs of layers of these are computed again. None: all that have
            parameters.
        dynamic_shape: Accepted and without effect: shapes may always change.
        chunks: Stages of each rank, for schedules that interleave them; default: what `schedule` has at least, else 1.
        placement: Which stages those are: "loop", every `num_stages`-th, or "v", down the ranks and back up; see
            `Placement`. Default: that of `schedule`, else "loop".
        schedule: Name of the schedule that the module is made for, which decides on chunks and placement.
        rank: Build what this rank has without any communication, such as to look at a stage; None: this process's.
        profile: Of each layer, for "profile".
        profile_sample: An input of the first layer, for "profile": the first rank measures all layers with it.
        stage_bytes: For "profile": most bytes of a stage.
        parallelize: Divides a layer in place among the ranks of the topology's axis "model", by torch's
            `parallelize_module`: called with each of this rank's modules when it is built, its name in the whole model,
            and their device mesh. Or a plan: {pattern of names in the whole model: a style}. None: by the plan of the
            Hugging Face model that layers were made of.

    Attributes:
        num_stages, chunks, placement: As above.
        parts: Bounds of all num_stages x chunks stages in the layers.
        stage_id: This rank's place in its pipeline.
        stages: This rank's global stages, by chunk.
        local_layers: Numbers of this rank's layers, by chunk.
        ties: Weights that other ranks hold, too.
        tied_modules: Modules of `TiedLayerSpec`s, by their keys.
        loss_fn: As passed.
        runner: Carries out batches; None: the module itself, which then has to have all layers.
        curr_layer: Number of the layer that ran last, or runs.

    Raises:
        TypeError, ValueError: If an argument does not fit; names it, its value, and what would.
    """

    runner: BatchRunner | None = None

    built_apart = True
    """Ranks build different layers: see `sharding.Init`."""

    def __init__(
        self,
        layers: Iterable[Any] | nn.Sequential | nn.ModuleList,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        chunks: int | None = None,
        placement: Shape | None = None,
        schedule: str | None = None,
        rank: int | None = None,
        profile: Sequence[LayerProfile] | None = None,
        profile_sample: Any = None,
        stage_bytes: int | None = None,
        parallelize: Parallelize | Plan | None = None,
    ) -> None:
        super().__init__()
        named = name_layers(layers)
        self._topo = _topology(num_stages, topology, alone=rank is not None)
        self._grid = PipelineParallelGrid(self._topo, rank=rank)
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.global_rank, self.world_size = self._grid.global_rank, self._grid.world_size
        self.placement = _placement(self.num_stages, chunks, placement, schedule)
        self.chunks = self.placement.chunks
        uniform_bounds(len(named), self.placement.stages)  # too few layers are an error before anything is measured

        self.loss_fn, self.dynamic_shape, self.checkpoint_parallel_write_pipeline = loss_fn, dynamic_shape, False
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self._together = rank is None
        if isinstance(parallelize, Mapping):
            parallelize = division_by(parallelize, "the PipelineModule")
        self._parallelize = parallelize
        # Before layers are divided: those that are measured are built under their seeds.
        self._seeds = self._make_seeds()
        self.parts = divide(
            named,
            self.placement.stages,
            partition_method,
            profile=profile,
            sample=profile_sample,
            stage_bytes=stage_bytes,
            seeds=self._seeds,
            together=self._together,
        )
        self._micro_offsets, self.curr_layer = [0] * self.chunks, 0
        self._streams: SlotStreams | None = None
        self.activation_checkpoint_func = activation_checkpoint_func or checkpoint
        self.checkpointable_layers = _class_names(checkpointable_layers)
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self._build(named)

    def _make_seeds(self) -> LayerSeeds:
        drawn = draw_seed()  # also where it is not used, so that the script's next draw is the same either way
        if self.seed_layers:
            return LayerSeeds(self.base_seed, self.seed_fn)
        return LayerSeeds((from_first_rank(drawn) if self._together else drawn) + self.base_seed, self.seed_fn)

    def _build(self, named: Sequence[NamedLayer]) -> None:
        self.stages = [self.placement.stage_of(self.stage_id, chunk) for chunk in range(self.chunks)]
        bounds = [(self.parts[stage], self.parts[stage + 1]) for stage in self.stages]
        self._local_start, self._local_stop = bounds[0][0], bounds[-1][1]
        self.local_layers = [layer for start, stop in bounds for layer in range(start, stop)]
        self._num_layers, self._tied_files = len(named), layers_with_files(named)
        self.layer_classes = [layer.class_name for layer in named]
        self.ties: list[Tie] = []
        self.tied_modules = nn.ModuleDict()  # before all layers: `module_order` lists it first
        # Before layers are built or divided, while equal parameters are one object.
        plans = self._tie_plans = plan_ties(named)

        control = self._grid.control()
        # Before anything is built, which may take long, and before groups are made that other ranks would not make.
        _check_same_model(control, self.describe())
        # Together: ranks whose layers can be built would wait in what follows for one whose constructor has failed.
        self._built = together(control, lambda: self._build_own([named[layer] for layer in self.local_layers], named))
        # Before ties are made, which hold parameters: dividing puts others in their place.
        mesh = self.tensor_mesh()
        if mesh is not None and (self._parallelize is not None or mesh.size() > 1):
            parallelize_together(control, self._built, self._parallelize, mesh)
        lengths = [stop - start for start, stop in bounds]
        starts = [sum(lengths[:chunk]) for chunk in range(self.chunks)]
        self._chunks = [self._built[start : start + length] for start, length in zip(starts, lengths)]

        stage_of_layer = {layer: self.stage_owner(layer) for layer in range(self._num_layers)}
        rank_of_stage = {stage: self.placement.rank_of(stage) for stage in range(self.placement.stages)}
        # After all modules are registered: parameters are found here by their names in the whole model.
        self.ties = own_ties(plans, self, self._grid, stage_of_layer, rank_of_stage)
        self.synchronize_tied_weights()

    def _build_own(self, own: Sequence[NamedLayer], everyone: Sequence[NamedLayer]) -> list[BuiltLayer]:
        built = build_layers(own, everyone, self._seeds)
        self._built, self._chunks = built, []  # before what is registered, so that a name that is taken is noticed
        for layer in built:
            for name, module in layer.modules.items():
                register(self, name, module)
        return built

    # ---- running layers ----

    def forward(self, inputs: Any, chunk: int | None = None) -> Any:
        """Run the layers of one chunk, or all layers where all are here.

        Args:
            inputs: What the first of them takes.
            chunk: Which of this rank's chunks; None where there is one, or the rank has the whole model.

        Raises:
            ValueError: If it does not follow which layers are meant.
        """
        if chunk is not None:
            if not 0 <= chunk < self.chunks:
                raise ValueError(f"chunk {chunk} is not one of this rank's {self.chunks} chunks")
            return self._run_chunk(chunk, inputs)
        if self.num_stages > 1 and self.chunks > 1:
            raise ValueError(
                f"this rank has {self.chunks} chunks, with other ranks' layers between them; use forward_chunk(chunk, "
                "inputs)"
            )
        for each in range(self.chunks):
            inputs = self._run_chunk(each, inputs)
        return inputs

    def forward_chunk(self, chunk: int, inputs: Any) -> Any:
        """Run the layers of a chunk, hooks on this module's forward included.

        Args:
            chunk: Which of this rank's chunks.
            inputs: What the first layer takes.

        Returns:
            What the last layer returns.
        """
        return self(inputs, chunk=chunk)

    def chunk_functions(self) -> list[Callable[[Any], Any]]:
        """This rank's chunks in their order, each a function of its input, for an `Executor`."""
        return [partial(self.forward_chunk, chunk) for chunk in range(self.chunks)]

    def _run_chunk(self, chunk: int, inputs: Any) -> Any:
        layers, interval = self._chunks[chunk], self.activation_checkpoint_interval or self._num_layers
        # Numbers as DeepSpeed has them: one is added here, and one below.
        self._micro_offsets[chunk] += 1
        begins = self._streams_of_layers()
        for start in range(0, len(layers), interval):
            # An object that keeps its number: a checkpoint calls it again in the backward, after later forwards.
            run = _Run(self, layers[start : start + interval], self._micro_offsets[chunk] + 1, begins)
            if self.activation_checkpoint_interval == 0 or not self._is_checkpointable(run.layers):
                inputs = run(inputs)
            elif isinstance(inputs, tuple):
                # Re-entrant checkpoints see tensors among their arguments only, and not inside of a tuple.
                inputs = self.activation_checkpoint_func(run.unpacked, *inputs)
            else:
                inputs = self.activation_checkpoint_func(run, inputs)
        if begins is not None and layers[-1].index == self._num_layers - 1:
            begins(self._num_layers)  # what a loss draws, of these outputs
        return inputs

    def follow_streams(self, streams: SlotStreams | None) -> None:
        """See `NumberedLayers`."""
        self._streams = streams

    def _streams_of_layers(self) -> Callable[[int], None] | None:
        # Asked before layers run: a re-entrant checkpoint runs them without gradients.
        trains = self.training and torch.is_grad_enabled()
        return self._streams.of_layers() if self._streams is not None and trains else None

    def set_checkpoint_interval(self, interval: int) -> None:
        """Change how many layers are computed again together; 0: none are."""
        if not isinstance(interval, int) or interval < 0:
            raise ValueError(f"activation_checkpoint_interval {interval!r} must be a number of layers, or 0 for none")
        self.activation_checkpoint_interval = interval

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """Runner of this rank's layers, in their order."""
        return [layer.call for layer in self._built]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.compile` each layer of this rank by itself.

        Args:
            *args: For `torch.compile`.
            **kwargs: Likewise.
        """
        for layer in self._built:
            # A layer that borrows a module does not call its forward: there the function is compiled.
            if layer.module is not None and not layer.borrows:
                layer.module.compile(*args, **kwargs)
            else:
                layer.call = torch.compile(layer.call, *args, **kwargs)

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Losses beside the one of `loss_fn`, by name, to be reported; for subclasses."""
        return None

    def _is_checkpointable(self, layers: Sequence[BuiltLayer]) -> bool:
        if self.checkpointable_layers is not None:
            return all(layer.class_name in self.checkpointable_layers for layer in layers)
        return any(layer.has_parameters for layer in layers)

    # ---- where things are ----

    def topology(self) -> ProcessTopology:
        """Topology of the ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place, and its process groups."""
        return self._grid

    def tensor_mesh(self) -> DeviceMesh | None:
        """The device mesh of the ranks that divide this rank's layers; None without process groups."""
        return self._grid.tensor_mesh()

    def num_pipeline_stages(self) -> int:
        """Ranks of a pipeline."""
        return self.num_stages

    def partitions(self) -> list[int]:
        """Bounds of all stages in the layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The global stage of a layer."""
        if not 0 <= layer_idx < self._num_layers:
            raise ValueError(f"layer {layer_idx} is not one of {self._num_layers}")
        return next(stage for stage, stop in enumerate(self.parts[1:]) if layer_idx < stop)

    def layer_names(self) -> list[str]:
        """Names of the modules of this rank's layers, in their order, each once."""
        return list(dict.fromkeys(name for layer in self._built for name in layer.modules))

    def layer_modules(self) -> list[dict[str, nn.Module]]:
        """The modules of each of this rank's layers, by name."""
        return [dict(layer.modules) for layer in self._built]

    def chunk_parameters(self, chunk: int) -> list[nn.Parameter]:
        """The parameters of one of this rank's chunks, each once."""
        modules = [module for layer in self._chunks[chunk] for module in layer.modules.values()]
        return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))

    def layer_of(self, name: str) -> int:
        """The layer, of this rank's, that has a parameter or buffer first.

        Args:
            name: Of the tensor, in this module.

        Raises:
            ValueError: If no layer has it.
        """
        for layer in self._built:
            # With the dot, or "10.weight" would be in layer 1.
            if any(name.startswith(f"{module}.") for module in layer.modules):
                return layer.index
        raise ValueError(f"{name!r} is in none of this rank's layers")

    def unit_names(self) -> list[str]:
        """Units whose own forward runs: parameters that are gathered for a module may be there.

        Tied modules are left out that a layer uses by a function of its own, such as one that reads their weight.
        """
        # Reading a module's weight runs no hook of the module, and so would gather nothing.
        borrowed = {name for layer in self._built if layer.borrows for name in layer.modules}
        return [name for name in self.layer_names() if name not in borrowed]

    def describe(self) -> str:
        """All stages and their layers, one line each."""
        lines = []
        for stage in range(self.placement.stages):
            start, stop = self.parts[stage], self.parts[stage + 1]
            place = f"stage {stage} on rank {self.placement.rank_of(stage)}"
            lines.append(f"{place}: layers {start} to {stop - 1}: {', '.join(self.layer_classes[start:stop])}")
        return "\n".join(lines)

    # ---- tied weights ----

    def ties_over_stages(self) -> dict[str, list[int]]:
        """The global stages of each tied weight of the whole model that several stages use, by its key or name."""
        found = {plan.key: sorted({self.stage_owner(layer) for layer in plan.layers}) for plan in self._tie_plans}
        return {key: stages for key, stages in found.items() if len(stages) > 1}

    def allreduce_tied_weight_gradients(self) -> None:
        """Add up the gradients of each tied weight over its holders. A collective over those."""
        for tie in self.ties:
            tie.reduce_gradients()

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, ProcessGroup | None]]:
        """Each tied weight of this rank with the group of its holders."""
        found = []
        for tie in self.ties:
            group = None if tie.reduce is None else tie.reduce.group
            found += [(weight, group) for weight in tie.weights.values()]
        return found

    def synchronize_tied_weights(self) -> None:
        """Give all holders of tied weights their owners' values. A collective over those.

        Done when the module is made; to be called again by whoever gives values to parameters later, such as to those
        that were made on the meta device.
        """
        for tie in self.ties:
            tie.broadcast()

    _synchronize_tied_weights = synchronize_tied_weights

    # ---- layer files ----

    def ckpt_prefix(self, checkpoints_path: str | Path, tag: object) -> str:
        """Prefix of this rank's files in a checkpoint, path included; the same for all copies."""
        place = self._topo.get_rank_repr(self.global_rank, omit_axes=["data"])
        return os.path.join(checkpoints_path, str(tag), f"module-{place}" if place else "module")

    def ckpt_layer_path(self, ckpt_dir: str | Path, local_layer_idx: int) -> str:
        """The file of this rank's layer with that number among its own, from 0."""
        return layer_path(ckpt_dir, self.local_layers[local_layer_idx], self._topo, self.global_rank)

    def ckpt_layer_path_list(self, ckpt_dir: str | Path, local_layer_idx: int) -> list[str]:
        """The files that there are of that layer, one for each tensor-parallel slice."""
        return layer_paths(ckpt_dir, self.local_layers[local_layer_idx])

    def save_state_dict(
        self, save_dir: str | Path, checkpoint_engine: Any = None, exclude_frozen_params: bool = False
    ) -> None:
        """Write the weights of this rank's layers, one file each, as DeepSpeed has them; see `layer_files`.

        The first copy of the pipeline writes; with `checkpoint_parallel_write_pipeline = True` all copies share it.

        Args:
            save_dir: The directory; made if it is missing.
            checkpoint_engine: A DeepSpeed checkpoint engine; None: files are replaced in one step.
            exclude_frozen_params: Leave parameters out that are not trained.
        """
        number, bounds = self._grid.data_parallel_id, [0, len(self._built)]
        if self.checkpoint_parallel_write_pipeline:
            copies = min(self._grid.data_parallel_size, len(self._built))
            bounds = uniform_bounds(len(self._built), copies)
        if number + 1 >= len(bounds):  # another copy writes
            return
        if checkpoint_engine is None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
        else:
            checkpoint_engine.makedirs(save_dir, exist_ok=True)
        own = range(bounds[number], bounds[number + 1])
        paths = [self.ckpt_layer_path(save_dir, index) for index in own]
        layers = [self._built[index] for index in own]
        save_layers(layers, paths, self._tied_files, checkpoint_engine, exclude_frozen_params)

    def load_state_dir(self, load_dir: str | Path, checkpoint_engine: Any = None, strict: bool = True) -> None:
        """Read the weights of this rank's layers from files of `save_state_dict`, or DeepSpeed's, of any stages.

        Args:
            load_dir: The directory.
            checkpoint_engine: A DeepSpeed checkpoint engine.
            strict: Refuse missing and unexpected names.

        Raises:
            FileNotFoundError: If a layer's file is missing.
            ValueError: If the files are of another number of tensor-parallel slices.
        """
        slices = self._grid.get_slice_parallel_rank(), self._grid.get_slice_parallel_world_size()
        load_layers(self._built, load_dir, self._tied_files, checkpoint_engine, strict, slices)

    def loss(self, batch: Any) -> Tensor:
        """The loss of a pair of inputs and labels, 0-d, on every rank.

        Where a pipeline is trained, all ranks call it, those of one pipeline with the same batch. With gradients
        enabled it runs the backwards as well, for in a pipeline these come before the last forwards.

        Raises:
            ValueError: If the batch cannot be divided, or this rank has a part of the layers and nobody runs them.
        """
        # Also where all layers are here: a runner sets gradients aside until the framework's own backward.
        if self.runner is not None:
            return self.runner.loss(batch)
        self._check_whole("loss")
        inputs, labels = batch
        outputs = self(inputs)
        loss: Tensor = outputs if self.loss_fn is None else self.loss_fn(outputs, labels)
        return loss

    def outputs(self, inputs: Any, *, everywhere: bool = False) -> Any:
        """Outputs of the last layer for a batch of inputs, without gradients; all ranks call it.

        Args:
            inputs: What the first layer takes.
            everywhere: On all ranks of the pipeline. Else on that of the last layer, and None on the others.
        """
        if self.runner is not None:
            return self.runner.outputs(inputs, everywhere)
        self._check_whole("outputs")
        with torch.no_grad():
            return self(inputs)

    def _check_whole(self, call: str) -> None:
        if self.num_stages > 1:
            raise ValueError(
                f"PipelineModule.{call}() runs all {self.num_stages} stages, of which this rank has one, and no "
                "strategy has set the module up; call it in the steps of a Trainer with PipelineStrategy, or train "
                "with a PipelineEngine"
            )


class _Run:
    """Some layers of a chunk in a row; the same when it is called again."""

    def __init__(
        self,
        module: PipelineModule,
        layers: Sequence[BuiltLayer],
        micro_offset: int,
        begins: Callable[[int], None] | None,
    ) -> None:
        self.layers, self._module, self._micro_offset, self._begins = layers, module, micro_offset, begins

    def __call__(self, inputs: Any) -> Any:
        module = self._module
        for layer in self.layers:
            module.curr_layer = layer.index
            if self._begins is not None:
                self._begins(layer.index)
            if self._begins is not None or not module.seed_layers:
                inputs = layer.call(inputs)
                continue
            with module._seeds.forward(layer.index, module.base_seed, self._micro_offset):
                inputs = layer.call(inputs)
        return inputs

    def unpacked(self, *inputs: Any) -> Any:
        """Call it with the members of a tuple one by one, as checkpoint functions want them."""
        return self(inputs)


def _placement(ranks: int, chunks: int | None, shape: Shape | None, schedule: str | None) -> Placement:
    if schedule is None:
        return Placement(ranks, 1 if chunks is None else chunks, shape or "loop")
    found = placement_of(schedule, ranks, chunks)
    if shape not in (None, found.shape):
        raise ValueError(
            f"schedule {schedule!r} places stages in the shape {found.shape!r}, and placement is {shape!r}; leave "
            "one of them out"
        )
    return found


def _topology(num_stages: int | None, topology: ProcessTopology | None, *, alone: bool) -> ProcessTopology:
    if topology is not None:
        found = topology.get_dim("pipe")
        if found == 0:
            raise ValueError(f"the topology {topology} has no axis 'pipe', along which layers are divided")
        if num_stages is not None and num_stages != found:
            raise ValueError(f"num_stages is {num_stages}, but the topology {topology} has {found}; leave one out")
        return topology
    if num_stages is None:
        raise ValueError("PipelineModule needs num_stages or topology")
    ranks = num_stages if alone else world_size()
    if not isinstance(num_stages, int) or num_stages < 1 or ranks % num_stages:
        raise ValueError(
            f"num_stages {num_stages} does not divide the {ranks} ranks that take part; start a multiple of it, or "
            "change num_stages"
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=ranks // num_stages)


def _check_same_model(control: Communicator, description: str) -> None:
    """See that all ranks divide the same model in the same way; else they would wait for each other later."""
    # Every rank compares, and so every rank raises.
    for rank, other in enumerate(control.all_gather_objects(description)):
        if other != description:
            raise ValueError(
                f"ranks have different models: rank {rank} has\n{other}\nand rank {control.rank}\n{description}\n"
                "pass the same layers and options on all ranks"
            )


def _class_names(names: Sequence[str] | None) -> list[str] | None:
    if isinstance(names, str):
        raise TypeError(f"checkpointable_layers takes a list of class names, not {names!r}")
    return None if names is None else list(names)


if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object
