"""`ShardedModel`: a module in units and buckets.

It is the one object that knows where every parameter lies.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.mesh import Mesh, ShardRanks
from zero_strategy.comm.store import together
from zero_strategy.config import ZeroConfig
from zero_strategy.fsdp.arrivals import Arrivals
from zero_strategy.fsdp.buffers import SharedBuffers
from zero_strategy.fsdp.changed_values import ChangedValues
from zero_strategy.fsdp.coded_weights import CodedWeights
from zero_strategy.fsdp.divided_experts import DividedExperts
from zero_strategy.fsdp.dtensor import TensorPart, check_placement, held_by, is_dtensor, tensor_ranks, whole_of
from zero_strategy.fsdp.grad_accumulation import BufferReuse, gradients_name
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.guards import ModuleGuards
from zero_strategy.fsdp.init import constructions_of
from zero_strategy.fsdp.layout import (
    LOW_PRECISION,
    UnitSpec,
    aliases,
    build_layout,
    find_units,
    gradient_dtypes,
    group_parameters,
    lies_apart,
    placement_for,
)
from zero_strategy.fsdp.materialize import (
    cast_buffers,
    device_of,
    drop_unset,
    materialize_unit,
    move_buffers,
    move_unit,
)
from zero_strategy.fsdp.ownership import check_unsharded, owner_of, register, unregister
from zero_strategy.fsdp.param_bucket import ParameterBucket, master_name, weights_name
from zero_strategy.fsdp.reduce import GradientReducer, StepAgreement, undivided
from zero_strategy.fsdp.reduction_plan import SideStream, Watcher
from zero_strategy.fsdp.shard_storage import GRADIENTS, IN_BACKWARD, MASTERS, OPTIMIZER, PARAMETERS, Move, MovedStates
from zero_strategy.fsdp.skipped_layers import SkippedLayers
from zero_strategy.fsdp.slot_sums import slots_of_rank
from zero_strategy.fsdp.state_bits import block_of
from zero_strategy.fsdp.unit import Unit
from zero_strategy.fsdp.unshard import Unsharder
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import VectorSpec
from zero_strategy.quantized.float8 import check_own_values
from zero_strategy.quantized.scales import QuantisedLayers, attach_scales, detach_scales
from zero_strategy.runtime.compute_device import with_index
from zero_strategy.runtime.terminal import each


class UpdatingOptimizer(Protocol):
    """An optimizer as the model that it updates sees it; see `optim.sharded_optimizer.ShardedOptimizer`."""

    @property
    def partially_applied(self) -> bool: ...

    def refresh_pieces(self) -> None: ...

    def relocate(self, move: Move) -> None: ...

    def follow_masters(self) -> None: ...

    def viewed(self) -> Iterable[int]: ...

    def reduction_begins(self) -> None: ...


class ValueRecorder(Protocol):
    """An observer of what the optimizers' steps change."""

    def before(self, buckets: Sequence[ParameterBucket]) -> None:
        """A step is about to change this rank's values of these."""

    def after(self, buckets: Sequence[ParameterBucket]) -> None:
        """A step has changed this rank's values of these."""


_MUCH_PADDING = 1.25
"""Elements of slices over those of their matrices from which on a warning is due."""


class ShardedModel:
    """Units, buckets and the machinery that moves them, for one module.

    Args:
        module: The module to shard, in place. Its parameter objects, names and shapes stay.
        mesh: The data-parallel ranks.
        config: A resolved config (no derived field is None).
        compute_dtype: Dtype that floating-point parameters take, or None to keep theirs.
        device: Where parameters are moved to, or become real, unit by unit; default: where the module's tensors are,
            else the CPU.
        initialise: Give meta parameters their initial values (else they are about to be loaded).
        partly: Not initialised, and only those that were on the meta device are about to be loaded.
        optimizer_store: Where master weights and optimizer state are kept; None: in memory.
        parameter_store: Where the own slices of sharded parameters are kept; None: in memory.
        gradient_store: Where reduced gradients are kept; None: in memory.
        optimizers: The list of those that update it, which its owner fills.
        agreement: What ranks tell each other at the end of a reduction.
        further_norm_groups: See `norm_groups`; beyond those of the mesh.
        divisor: See `GradientReducer`.

    Attributes:
        units: The root first.
        buckets: All parameter buckets, in unit order.
        gradients: Their gradient buckets, in the same order.
        optimizers: Those that update it.
        norm_groups: Groups over which gradients are spread.
        aliases: Further names of tied parameters: {alias: first name}.
        device: Where the module computes.
        moved: What is on the host for a while.
        arrivals: Gathers after a step that nobody has waited for.
        quantised: Layers with quantised weights.
        shared_buffers: The module's buffers, which ranks keep equal; None: each rank has its own.
        experts: Layers of experts that ranks divide.
        exact_norms: Whether norms of gradients have the same bits however these are divided.
        engine: The engine that this is of; None: there is none, or it has let the module go.
        slots: The slot at hand (`reproducible.slots`); None: gradients are summed in the order of ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        config: ZeroConfig,
        compute_dtype: torch.dtype | None = None,
        *,
        device: torch.device | None = None,
        initialise: bool = True,
        partly: bool = False,
        optimizer_store: ChunkStore | None = None,
        parameter_store: ChunkStore | None = None,
        gradient_store: ChunkStore | None = None,
        optimizers: Sequence[UpdatingOptimizer] = (),
        agreement: StepAgreement | None = None,
        further_norm_groups: Sequence[Communicator] = (),
        divisor: Callable[[], int] = undivided,
    ) -> None:
        self.optimizer_store, self._parameter_store = optimizer_store, parameter_store
        self._gradient_store = gradient_store

        # Refuse what cannot be sharded while the module is still as it was.
        _check_module(module)
        _check_tensor_ranks(module, mesh)
        _check_precision(config, compute_dtype)
        self.device, self._moves = with_index(device or device_of(module)), device is not None
        self.module, self.mesh, self.config, self.compute_dtype = module, mesh, config, compute_dtype
        self.placement = placement_for(config, mesh.shard_size)
        self.engine: object | None = None
        self.exact_norms = bool(config.reproducible.slots)
        self.recorders: weakref.WeakSet[ValueRecorder] = weakref.WeakSet()
        sends_changes = config.communication.parameters == "delta" and mesh.shard_size > 1
        self.changed_values = ChangedValues(mesh, self.device) if sends_changes else None
        if self.changed_values is not None:
            self.recorders.add(self.changed_values)
        check_unsharded(module.parameters())
        self.experts = DividedExperts(module, mesh)
        # Before names are collected: scales of quantised weights are parameters from here on.
        attach_scales(module)
        self.quantised = QuantisedLayers(module)
        self.aliases = aliases(module)

        # What was built under `sharding.Init` is in slices until its unit is built; what is whole just now stays so.
        self._constructions = constructions_of(module.parameters())
        for construction in self._constructions:
            construction.take([p for p in module.parameters() if type(p) is nn.Parameter], values=True)
        self.optimizers = optimizers
        self.norm_groups: list[Communicator] = [mesh.shard_control, mesh.tensor, *further_norm_groups]
        wanted = config.units
        try:
            # Before the first collective of values, which ranks with different modules would mix up, or wait for in
            # vain.
            _check_same_on_all_ranks(module, mesh)
            self.experts.divide(config)
            specs = find_units(module, classes=wanted.classes, patterns=wanted.patterns, min_numel=wanted.min_numel)
        except BaseException:
            detach_scales(module)  # a refusal leaves the module as it was
            self.experts.undivide()
            raise
        if device is not None:
            move_buffers(module, device)

        self._coded = CodedWeights(module, config, self.placement, self.compute_dtype, mesh)

        # Units: room in tiers for all of them at once, so that a full disk is told before any is built; then one after
        # the other, so that no more than one is whole at a time.
        self._turns = {spec.name: number for number, spec in enumerate(specs)}
        self._reserve(specs)
        units = each("building units", specs, mesh.world_group.rank)
        self.units = [self._build_unit(spec, initialise, partly) for spec in units]
        self.quantised.move_tables()
        # They hold the process group of `Init`, which ends with them.
        del self._constructions
        register(module.parameters(), self)
        self._share_buffers()
        self._tell_padding()
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        self._coded.gather(self.buckets)
        self._places = {
            id(parameter): (bucket, index)
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        }

        # Gradients: one bucket for each of parameters; memory that lives in a backward only goes from one to the next.
        per_step = config.gradient_reduction == "per_step"
        self.slots = slots_of_rank(config, mesh)
        reuse, side = BufferReuse(), SideStream()
        self.gradients = [self._gradient_bucket(bucket, per_step, reuse, side) for bucket in self.buckets]
        self._gradient_of = dict(zip(map(id, self.buckets), self.gradients, strict=True))
        backward_order = [*self.units[:0:-1], self.units[0]]  # the root's embedding comes last
        plan = [bucket for unit in backward_order for bucket in unit.buckets if _can_train(bucket)]

        # Hooks: what gathers a unit, what waits for a step's values, what reduces gradients, the guards of user code.
        self.unsharder: Unsharder | None = None
        if self.placement.shard_parameters:
            self.unsharder = Unsharder(
                self.units,
                config.prefetch,
                config.reshard_after_forward,
                config.reshard_after_backward,
                # By a method of the model: the reducer, which does it, is made later, and takes the unsharder.
                unit_done=self._unit_done,
            )
            if config.units.may_skip:
                _check_resharded(config)
                self.unsharder.skipped = SkippedLayers(self.unsharder)
        self.arrivals = Arrivals(module, self.units)
        self.moved = MovedStates(self)
        fixed = self.slots is not None
        shares = (config.broadcast_buffers and mesh.world_size > 1) or fixed
        self.shared_buffers = SharedBuffers(module, mesh, fixed=fixed) if shares else None
        self.reducer = GradientReducer(
            [self.gradient_of(bucket) for bucket in plan],
            mesh,
            per_step,
            self.unsharder,
            reuse=reuse,
            agreement=agreement or StepAgreement(),
            step_unfinished=self._step_unfinished,
            reduction_begins=self._reduction_begins,
            check_states=partial(self.moved.check, kinds=IN_BACKWARD),
            divisor=divisor,
            buffers=self.shared_buffers,
            slots=self.slots,
        )
        self.guards = ModuleGuards(self)
        self._watching = module.register_forward_pre_hook(Watcher(self.reducer, self.moved, self.quantised))

    def dissolve(self, *, values: bool = True) -> None:
        """Make the module plain: whole parameters in memory of their own, no hook, no gradient. A collective.

        Parameters stay the same objects, of the dtype in which the forward computes; master weights are lost. Units
        become whole one after the other, so that besides the whole model one unit is held. Where parameters are whole
        anyway (stages 0 to 2) nothing is sent.

        Args:
            values: Without, ranks are gone, and what they had: parameters have their shapes, and any values. Then it
                is no collective, and may be called wherever an exception has left the model.

        Raises:
            RuntimeError: In a forward, a backward or a step, or if one of these was left with an exception.
        """
        if values:
            self.come_to_rest(parameters=True, call="close(gather=True)")  # raises before anything has changed
        else:
            self.arrivals.forget()
        for gradients in self.gradients:  # first, for the whole parameters need room
            gradients.give_back(finish=values)
        for unit in self.units:
            if values:
                unit.gather()
            for bucket in unit.buckets:
                bucket.give_back(values=values)
                if values:
                    self.experts.join(bucket)
                else:
                    self.experts.join_shapes(bucket)
        self.reducer.unhook()
        self.guards.unhook()
        self._watching.remove()
        if self.unsharder is not None:
            self.unsharder.unhook()
        # While the buckets are there, which say which they are.
        unregister(self._parameters())
        detach_scales(self.module)
        self.experts.undivide()
        self.engine = None
        self.buckets, self.gradients = [], []
        self._gradient_of.clear()
        self._places.clear()

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.names())

    def in_tiers(self) -> dict[str, str]:
        """Kinds of state (see `MovedStates`) that are in a tier, with the setting that says so."""
        found: dict[str, str] = {}
        if self.optimizer_store is not None:
            found |= dict.fromkeys((OPTIMIZER, MASTERS), "offload.optimizer")
        if self._parameter_store is not None:
            found[PARAMETERS] = "offload.parameters"
        if self._gradient_store is not None:
            found[GRADIENTS[0]] = "offload.gradients"
        return found

    def check_gatherable(self, call: str) -> None:
        """Raise if parameters are divided and no connection is left to gather them.

        Args:
            call: What would gather them, for the message.

        Raises:
            RuntimeError: Naming the way out.
        """
        if self.mesh.closed and self.placement.shard_parameters:
            raise RuntimeError(
                f"{call} of an engine that was closed without it: at stage 3 each rank kept its slices, and no "
                "connection is left to gather them; build the module anew and load a checkpoint"
            )

    def come_to_rest(self, *, parameters: bool, call: str = "offload_states()") -> None:
        """Before states move: raise unless it is between steps, and release what is whole if `parameters` move.

        Args:
            parameters: They move, too.
            call: What moves them, for the message.

        Raises:
            RuntimeError: In a forward, a backward or a step, or if one of these was left with an exception.
        """
        self.reducer.check_whole()
        # A gather on its way writes to memory that may be about to move.
        self.arrivals.finish()
        busy = "a backward" if self.reducer.in_backward else ""
        busy = "an optimizer's step" if self._step_unfinished() else busy
        if any(unit.depth or unit.pinned for unit in self.units):
            busy = "a forward, or of GatheredParameters"
        if busy:
            raise RuntimeError(f"{call} inside of {busy}: call it between steps")
        if parameters and self.unsharder is not None:
            self.unsharder.release_idle()

    def relocate(self, kinds: Collection[str], move: Move) -> None:
        """Let every tensor of these kinds of state (see `MovedStates`) lie where `move` puts it."""
        sums, buffers = (kind in kinds for kind in GRADIENTS)
        for sharded in self.optimizers:
            sharded.refresh_pieces()  # pieces are views of the masters: they are made while these are where they were
            if OPTIMIZER in kinds:
                sharded.relocate(move)
        for bucket in self.buckets:
            bucket.relocate(move, masters=MASTERS in kinds, parameters=PARAMETERS in kinds)
            self.gradient_of(bucket).relocate(move, sums=sums, buffers=buffers)
        for sharded in self.optimizers:
            sharded.follow_masters()

    def _unit_done(self, buckets: Sequence[ParameterBucket]) -> None:
        self.reducer.unit_done(buckets)

    def _reduction_begins(self) -> None:
        for sharded in self.optimizers:
            sharded.reduction_begins()

    def _step_unfinished(self) -> bool:
        return any(sharded.partially_applied for sharded in self.optimizers)

    def _buckets_of(self, spec: UnitSpec) -> list[tuple[torch.dtype, bool, Sequence[tuple[str, nn.Parameter]]]]:
        """Parameters of a unit that share a bucket, their dtype, and whether each stays whole."""

        def apart(name: str, parameter: nn.Parameter) -> tuple[bool, bool, bool]:
            shape = self.experts.part_of(parameter).local_shape
            of_steps = lies_apart(self.config, spec.name, name, shape, parameter.requires_grad)
            return of_steps, parameter in self._coded, parameter in self.experts

        named = spec.parameters
        found = group_parameters(named, self.compute_dtype, self.device, everything=self._moves, apart=apart)
        packs = bool(self.config.matrix_optimizers)
        return [(dtype, of_steps and packs, members) for dtype, (of_steps, *_), members in found]

    def _reserve(self, specs: Sequence[UnitSpec]) -> None:
        """Make room in tiers for all weights, master weights and gradients, before anything is built.

        Raises:
            OSError: If there is none, with bytes needed and bytes free.
            RuntimeError: If another rank has none.
        """
        wanted: dict[ChunkStore, dict[str, VectorSpec]] = {}
        for unit, dtype, whole, named in ((spec, *bucket) for spec in specs for bucket in self._buckets_of(spec)):
            ranks = self._ranks_of(named)
            shapes = [(name, self.experts.part_of(parameter).local_shape) for name, parameter in named]
            turn = self._turns[unit.name]
            ways, replicas, block = ranks.shard_size, ranks.replicate.size, block_of(self.config)
            layout = build_layout(shapes, dtype.itemsize, ways, replicas, whole=whole, turn=turn, block=block)
            first, trainable = layout.segments[0].name, named[0][1].requires_grad
            if self._parameter_store is not None:
                spec = VectorSpec(layout.slice_numel, dtype)
                wanted.setdefault(self._parameter_store, {})[weights_name(first)] = spec
            if self.optimizer_store is not None and trainable and dtype in LOW_PRECISION:
                owned = layout.slice_numel if self.placement.shard_optimizer else layout.numel
                spec = VectorSpec(owned, torch.float32, device=self.device)
                wanted.setdefault(self.optimizer_store, {})[master_name(first)] = spec
            if self._gradient_store is not None and trainable:
                owned = layout.slice_numel if self.placement.shard_optimizer else layout.numel
                spec = VectorSpec(owned, gradient_dtypes(dtype, self.config.precision)[0], device=self.device)
                wanted.setdefault(self._gradient_store, {})[gradients_name(first)] = spec

        def reserve() -> None:
            for store, vectors in wanted.items():
                store.add(vectors)

        if self._parameter_store is not None or self.optimizer_store is not None:
            # All ranks fail together: one that fails alone would leave the others in the first collective.
            together(self.mesh.control, reserve)

    def cast_buffers(self, dtype: torch.dtype) -> None:
        """Let floating-point buffers follow the parameters, which is no change that other ranks have to hear of."""
        cast_buffers(self.module, dtype)
        if self.shared_buffers is not None:
            self.shared_buffers.note()

    def _build_unit(self, spec: UnitSpec, initialise: bool, partly: bool) -> Unit:
        # Asked now: later on none is on the meta device.
        meta = {id(parameter) for _, parameter in spec.parameters if parameter.is_meta}
        real = {id(parameter) for _, parameter in spec.parameters if partly and id(parameter) not in meta}
        for construction in self._constructions:
            construction.take([parameter for _, parameter in spec.parameters], values=initialise or partly)
        if not initialise:
            self.experts.cut_unset(parameter for _, parameter in spec.parameters)
        materialize_unit(spec, self.device, initialise=initialise)
        if self._moves:
            move_unit(spec, self.device)
        self.experts.cut(parameter for _, parameter in spec.parameters)
        master = self.config.precision.master_weights
        parts = [
            (dtype, whole, named, not initialise and not any(id(parameter) in real for _, parameter in named))
            for dtype, whole, named in self._buckets_of(spec)
        ]
        for dtype, _, named, blank in parts:
            if blank:  # before the buckets' memory comes: the unit would be there twice
                drop_unset((parameter for _, parameter in named if id(parameter) in meta), dtype)
        buckets = [
            ParameterBucket(
                named,
                self._ranks_of(named),
                placement_for(self.config, self._ranks_of(named).shard_size),
                dtype,
                master,
                blank=blank,
                store=self.optimizer_store,
                shard_store=self._parameter_store,
                whole=whole,
                turn=self._turns[spec.name],
                block=block_of(self.config),
                part_of=self.experts.part_of,
            )
            for dtype, whole, named, blank in parts
        ]
        unit = Unit(spec.name, spec.module, buckets)
        unit.release()  # before the next one is built, so that one unit at most is whole
        return unit

    def _ranks_of(self, named: Sequence[tuple[str, nn.Parameter]]) -> ShardRanks:
        """Ranks that share the bucket of some parameters."""
        return self.mesh.of_experts if named[0][1] in self.experts else self.mesh.of_dense

    def _tell_padding(self) -> None:
        """Warn where matrices that stay whole divide badly into slices."""
        packed = [bucket.layout for unit in self.units for bucket in unit.buckets if bucket.whole]
        elements = sum(segment.numel for layout in packed for segment in layout.segments)
        padded = sum(layout.numel for layout in packed)
        if elements and padded > _MUCH_PADDING * elements and self.mesh.world_group.rank == 0:
            warnings.warn(
                f"matrices that stay whole for {', '.join(self.config.matrix_optimizers)} divide badly among "
                f"{self.mesh.shard_size} ranks: slices are padded to {padded / elements:.2f} times their elements, "
                "in memory and in messages. Shard among fewer ranks (mesh.replicate), or make larger units "
                "(units.classes); torch.optim.Muon and MuonAdamW run without matrix_optimizers, and unpadded",
                stacklevel=2,
            )

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Start from rank 0's buffers, as from its parameters."""
        for held in self.module.buffers():
            buffer = held_by(held)
            if buffer.is_meta:
                continue
            values = buffer.clone(memory_format=torch.contiguous_format)
            if self.mesh.tensor.size > 1:
                # Tensor-parallel ranks are connected on the host.
                shared = values.cpu()
                self.mesh.tensor.broadcast(shared, 0)
                values.copy_(shared)
            self.mesh.gather.broadcast(values, 0)
            self.mesh.replicate.broadcast(values, 0)
            if not torch.equal(buffer, values):
                buffer.copy_(values)

    def _gradient_bucket(
        self, bucket: ParameterBucket, per_step: bool, reuse: BufferReuse, side: SideStream
    ) -> GradientBucket:
        dtypes = gradient_dtypes(bucket.dtype, self.config.precision)
        return GradientBucket(bucket, *dtypes, per_step, self._gradient_store, reuse, side, self.slots)

    def part_of(self, parameter: nn.Parameter) -> TensorPart:
        """This rank's part of a parameter, with the shape of the whole."""
        return self.experts.part_of(parameter)

    def whole_of(self, tensor: Tensor) -> Tensor:
        """The whole of a gathered parameter, or a buffer, from every rank's part. A collective if ranks divide it."""
        place, local = self._places.get(id(tensor)), held_by(tensor).detach()
        return whole_of(tensor, local) if place is None else place[0].whole_of(place[1], local)

    def place(self, parameter: nn.Parameter) -> tuple[ParameterBucket, int] | None:
        """The bucket of `parameter` and its index there, or None if it is not a parameter of this model."""
        return self._places.get(id(parameter))

    def unshard_on_demand(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Gather the units of released parameters that a forward or a backward under way reads. A collective.

        Returns:
            False outside of both, where nothing is gathered.
        """
        if self.unsharder is None:
            return False
        wanted = {id(place[0]) for parameter in parameters if (place := self.place(parameter)) is not None}
        # In the order of units, the same on all ranks.
        units = [unit for unit in self.units if any(id(bucket) in wanted for bucket in unit.buckets)]
        return self.unsharder.use_on_demand(units)

    def gradient_of(self, bucket: ParameterBucket) -> GradientBucket:
        """The gradient bucket that belongs to `bucket`."""
        return self._gradient_of[id(bucket)]

    def names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """First name and object of every parameter, bucket by bucket."""
        for bucket in self.buckets:
            yield from zip(bucket.names, bucket.parameters, strict=True)

    def strangers(self) -> list[str]:
        """Names of parameters that the module has got since it was sharded, and that nobody trains."""
        known = {id(parameter) for _, parameter in self.names()}
        return [name for name, parameter in self.module.named_parameters() if id(parameter) not in known]

    @contextmanager
    def root_in_use(self) -> Iterator[None]:
        """Inside, root parameters may be used outside of any module's forward."""
        if self.unsharder is None:
            yield
            return
        root = self.unsharder.units[0]
        self.unsharder.enter(root)
        try:
            yield
        finally:
            self.unsharder.leave(root, backward_follows=torch.is_grad_enabled())

    @torch.no_grad()
    def assemble(self, bucket: ParameterBucket, values: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
        """Put this rank's flat pieces (by parameter index) and the other ranks' together. A collective.

        Returns:
            The whole bucket, (layout.numel,), on every rank; zeros where no rank has a value.
        """
        flat = torch.zeros(bucket.layout.numel, dtype=dtype, device=bucket.device)
        start = bucket.owned.start
        for index, value in values.items():
            piece = bucket.piece_of[index]
            flat[start + piece.offset : start + piece.offset + piece.numel] = value.reshape(-1)
        if self.placement.shard_optimizer:
            bucket.ranks.gather.all_gather(flat).wait()
        return flat

    def follow_edits(self) -> None:
        """Carry what the user wrote into full parameters over to their master copies and slices."""
        if self.unsharder is not None:
            self.unsharder.follow_edits()
            return
        for bucket in self.buckets:
            bucket.follow_edits()

    def invalidate_unsharded(self, buckets: Iterable[ParameterBucket] | None = None, *, recorded: bool = False) -> None:
        """The values of these (None: of all) are about to change; call `forget_unsharded` when they have.

        With `recorded` the caller tells the `recorders`, too.
        """
        self.arrivals.finish()  # what is still being sent may be what is about to change
        changing = self.buckets if buckets is None else list(buckets)
        for bucket in () if recorded else changing:
            bucket.generation += 1
        if self.unsharder is not None:
            self.unsharder.invalidate_unsharded(changing)

    def show_step(self, stepped: Sequence[ParameterBucket], *, copied: bool) -> None:
        """Carry a step's new values to the parameters. A collective where these are whole; see `publish`."""
        if self.changed_values is not None:
            dense = [bucket for bucket in stepped if self.changed_values.takes(bucket)]
            # Changes of experts go as they are: few ranks have the same ones.
            others = [bucket.publish(copied=copied) for bucket in stepped if not self.changed_values.takes(bucket)]
            self.changed_values.gather(dense, copied=copied)
            for work in others:
                work.wait()
        elif (
            self.placement.shard_parameters  # nothing is gathered here: the next use does it
            or not self.placement.shard_optimizer  # each rank has updated all
            or self.mesh.shard_size == 1
            # Who records steps is told of all that a step has sent before it is over.
            or self.mesh.observed.observer is not None
            or not self.arrivals.are_seen()
        ):
            # Not one after the other: the next bucket is cast while this one is sent.
            for work in [bucket.publish(copied=copied) for bucket in stepped]:
                work.wait()
        else:
            # Views that optimizers hold are no strangers' in a bucket's memory.
            pieces = Counter(storage for sharded in self.optimizers for storage in sharded.viewed())
            for bucket in stepped:
                bucket.publish_later(pieces[id(bucket.weights)], copied=copied)
            self.arrivals.expect()

    def forget_unsharded(self, changed: Iterable[ParameterBucket] | None = None) -> None:
        """Parameters changed: release what nobody uses, bring the new values into what is held whole. A collective.

        Args:
            changed: The buckets that were `invalidate_unsharded` before; None: all.
        """
        if self.unsharder is not None:
            # First: what nobody uses need not be brought up to date.
            self.unsharder.forget_frozen()
            self.unsharder.release_unused()
            others = set() if changed is None else {id(b) for b in self.buckets if b.kept} - set(map(id, changed))
            for bucket in self.buckets:
                if id(bucket) not in others:
                    bucket.refresh()

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter] | None = None, *, until_step: bool = False
    ) -> Iterator[list[ParameterBucket]]:
        """Hold the units of `parameters` (default: all) whole inside the block; yields their buckets.

        `until_step`: and after it, until an optimizer's step changes them.
        """
        if parameters is None:
            units = self.units
        else:
            wanted = {id(parameter) for parameter in parameters}
            units = [
                unit
                for unit in self.units
                if any(id(parameter) in wanted for bucket in unit.buckets for parameter in bucket.parameters)
            ]
        self.arrivals.finish()
        # Before anything that may raise, as all pins are taken back at the end.
        for unit in units:
            unit.pinned += 1
        try:
            # Not one after the other, which would add their times up.
            for unit in units:
                unit.start_unshard()
            for unit in units:
                unit.gather()
            yield [bucket for unit in units for bucket in unit.buckets]
            if until_step and self.unsharder is not None:
                for unit in units:
                    self.unsharder.hold_until_step(unit)
        finally:
            for unit in units:
                unit.pinned -= 1
            # Once all pins are taken back: a release may raise, where a gather has failed.
            for unit in units:
                unit.release()


def _check_resharded(config: ZeroConfig) -> None:
    for name in ("reshard_after_forward", "reshard_after_backward"):
        if not getattr(config, name):
            raise ValueError(f"{name}=False keeps what a rank has used, and with units.may_skip ranks use other layers")


def _can_train(bucket: ParameterBucket) -> bool:
    """Integers never take gradients; a frozen float may be unfrozen later."""
    return bucket.dtype.is_floating_point


def _check_precision(config: ZeroConfig, compute_dtype: torch.dtype | None) -> None:
    if compute_dtype == torch.float16 and config.precision.gradient_dtype == "parameter":
        raise ValueError(
            "precision.gradient_dtype='parameter' would keep fp16 gradients, in which undoing the loss scale "
            "underflows; use 'float32' with fp16, or train in bf16"
        )


def _check_same_on_all_ranks(module: nn.Module, mesh: Mesh) -> None:
    mine = [
        f"parameter {name}: shape {tuple(p.shape)}, {p.dtype}, {_kind(p)}{_placed(p)}"
        for name, p in module.named_parameters()
    ]
    mine += [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in module.named_buffers()]
    # Hashes first: the lists are long, and nearly always equal.
    if len(set(mesh.control.all_gather_objects(hashlib.sha256("\n".join(mine).encode()).hexdigest()))) == 1:
        return
    everyone = mesh.control.all_gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            here, there = next((a, b) for a, b in zip_longest(everyone[0], theirs, fillvalue="nothing") if a != b)
            raise ValueError(
                f"ranks built different models: rank 0 has {here}, rank {rank} has {there}. Build the same module with "
                "the same frozen parameters and buffers on every rank."
            )


def _check_module(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is lazy and has no shape yet: run one forward before sharding")
        check_placement(name, parameter)
        if not is_dtensor(parameter):
            check_own_values(name, parameter)
        if parameter.is_complex():
            raise ValueError(f"parameter {name!r} is complex: train its real and imaginary parts as real parameters")
        if parameter.device.type == "mps":
            raise ValueError(f"parameter {name!r} is on MPS, which has no collectives; use the CPU or CUDA")


def _check_tensor_ranks(module: nn.Module, mesh: Mesh) -> None:
    ranks = tensor_ranks(module)
    if ranks is not None and len(ranks) != mesh.tensor.size:
        raise ValueError(
            f"the module's parameters are divided among {len(ranks)} tensor-parallel rank(s), but mesh.tensor is "
            f"{mesh.tensor.size}: call parallelize_module before the engine is made, and give mesh.tensor the size of "
            "its device mesh"
        )
    for name, buffer in module.named_buffers():
        if held_by(buffer).shape != buffer.shape:
            raise ValueError(f"buffer {name!r} is divided among tensor-parallel ranks; accepted: Replicate()")


def _kind(parameter: nn.Parameter) -> str:
    return "trainable" if parameter.requires_grad else "frozen"


def _placed(parameter: nn.Parameter) -> str:
    return f", {parameter.placements}" if is_dtensor(parameter) else ""  # type: ignore[attr-defined]


def sharded_model_of(parameter: nn.Parameter) -> ShardedModel | None:
    """The sharded model that holds `parameter`, or None."""
    owner = owner_of(parameter)
    assert owner is None or isinstance(owner, ShardedModel)
    return owner
