"""Weights that reach forward and backward in float8, at stage 3, where their layers would cast them to it anyway.

A `Float8Linear` of torchao multiplies with codes of 8 bits and one scale per weight, which follows from the weight's
largest absolute value. Here each rank casts its slice, by the scale of the whole weight, and codes are gathered: half
the bytes of 16-bit values, and the bits that the layer would have made of the gathered values.

    master, slice (16 or 32 bits) --- largest values of all weights: one small message after a change ---> scales
    slice --cast by the scale--> codes of the slice --all-gather--> codes of the unit --> layers' weights in a forward

The parameters themselves stay released meanwhile. Who reads one (an export, a penalty on all parameters) is given its
values, gathered in the dtype that they have, as with any released parameter. The layer's attribute is torchao's tensor
while the codes are there, whose gradient is the parameter's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import Communicator, PendingWork
from zero_strategy.runtime.torch_private import outside_transforms, without_grad

if TYPE_CHECKING:
    from zero_strategy.fsdp.param_bucket import ParameterBucket

_ATTRIBUTE = "weight"


class _OfParameter(torch.autograd.Function):
    """A weight in float8 as a function of the parameter that it was cast from; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, codes: Tensor, scale: Tensor, layer: Any) -> Tensor:
        """torchao's tensor of (out_features, in_features) in float8, and its scale, fp32, no dimensions."""
        library: Any = importlib.import_module("torchao.float8.float8_training_tensor")
        weight: Tensor = library.Float8TrainingTensor(
            codes,
            scale,
            parameter.dtype,
            linear_mm_config=layer.linear_mm_config,
            gemm_input_role=library.GemmInputRole.WEIGHT,
        )
        return weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient is the parameter's."""
        return gradients[0], None, None, None


class WeightScales:
    """The scales of all weights of a model that are gathered in float8.

    Args:
        communicator: The ranks that divide each weight.

    Attributes:
        stale: Values have changed since the scales were made, on all ranks alike.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.stale = True
        self._communicator = communicator
        self._gathers: list[GatheredFloat8] = []
        self._count = 0

    def add(self, gathers: GatheredFloat8) -> int:
        """Number of the first weight of these among all."""
        first, self._count = self._count, self._count + len(gathers.layers)
        self._gathers.append(gathers)
        return first

    def bring_up_to_date(self) -> None:
        """Make the scales anew if values have changed. A collective then."""
        if not self.stale:
            return
        ranks, rank = self._communicator.size, self._communicator.rank
        device = self._gathers[0].bucket.device
        largest = torch.zeros(ranks * self._count, dtype=torch.float32, device=device)
        own = largest[rank * self._count : (rank + 1) * self._count]
        for gathers in self._gathers:
            for number, values in gathers.own_values():
                # As a maximum, so that a NaN stays one. Exact in float32, whatever the weight's dtype.
                torch.maximum(own[number], values.abs().amax().to(device, torch.float32), out=own[number])
        self._communicator.all_gather(largest, of="largest values of float8 weights").wait()
        of_weights = largest.view(ranks, self._count).amax(0)
        # New tensors: a graph that a backward has not used yet holds the former ones.
        for gathers in self._gathers:
            gathers.set_scales(of_weights)
        self.stale = False


class GatheredFloat8:
    """The whole weights of one bucket in float8, while a forward or a backward uses them.

    Args:
        bucket: Weights of such layers alone.
        layers: The layer of each parameter, in bucket order.
        scales: Of the model.

    Attributes:
        gathered: All codes are here.
    """

    def __init__(self, bucket: ParameterBucket, layers: Sequence[Any], scales: WeightScales) -> None:
        self.bucket, self.layers, self.scales = bucket, list(layers), scales
        self.gathered = False
        self._kinds = [
            (layer.config.cast_config_weight.target_dtype, layer.config.round_scales_to_power_of_2) for layer in layers
        ]
        self._codes = torch.empty(bucket.layout.numel, dtype=torch.uint8, device=bucket.device)
        self._codes.untyped_storage().resize_(0)
        self._of_kind: dict[tuple[torch.dtype, bool], Tensor] = {}
        self._scales: list[Tensor] = []
        self._pending: PendingWork | None = None
        self._in_inference = False
        self._first = scales.add(self)

    @property
    def pending(self) -> bool:
        """True if a gather is under way."""
        return self._pending is not None

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with memory of its own, with its category in the ledger; codes may be without memory."""
        yield "gather buffers", self._codes
        for scales in self._of_kind.values():
            yield "handles", scales

    def own_values(self) -> list[tuple[int, Tensor]]:
        """This rank's part of each weight, flat, with the weight's number among all of the model."""
        shard = self.bucket.shard
        return [
            (self._first + piece.index, shard.read(piece.offset, piece.offset + piece.numel))
            for piece in self.bucket.slice_pieces
            if piece.numel
        ]

    def set_scales(self, largest: Tensor) -> None:
        """Take the scales that follow from the largest absolute values of the model's weights, (weights,), fp32."""
        library: Any = importlib.import_module("torchao.float8.float8_utils")
        own = largest[self._first : self._first + len(self.layers)]
        self._of_kind = {kind: library.amax_to_scale(own, *kind) for kind in dict.fromkeys(self._kinds)}
        self._scales = [self._of_kind[kind][index] for index, kind in enumerate(self._kinds)]

    def start_unshard(self) -> None:
        """Begin to gather, unless all is here or on its way."""
        if not self.gathered and self._pending is None:
            self._pending = self._gather(empty=True)

    def finish_unshard(self) -> None:
        """Wait until all is here, and show it to the layers."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            self.gathered = True
            self._show()
        elif self.gathered and self._in_inference != torch.is_inference_mode_enabled():
            self._show()

    def refresh(self) -> None:
        """Bring new values into what is held whole. A collective then."""
        if self.gathered:
            self._gather(empty=False).wait()
            self._show()

    def invalidate(self) -> None:
        """Values are about to change, or have, on all ranks."""
        self.finish_unshard()  # what is sent may be what changes
        self.scales.stale = True

    def release(self) -> None:
        """Free all codes."""
        self.finish_unshard()
        if self.gathered:
            self.gathered = False
            for layer in self.layers:
                vars(layer).pop(_ATTRIBUTE, None)
            self._codes.untyped_storage().resize_(0)

    def is_shown(self, value: object) -> bool:
        """True for what a layer has as its weight meanwhile."""
        return any(vars(layer).get(_ATTRIBUTE) is value for layer in self.layers)

    def _gather(self, *, empty: bool) -> PendingWork:
        with torch.inference_mode(False):  # whose tensors could not be saved for a backward
            return self._cast_and_gather(empty)

    @outside_transforms
    @without_grad
    def _cast_and_gather(self, empty: bool) -> PendingWork:
        self.scales.bring_up_to_date()
        if empty:
            self._codes.untyped_storage().resize_(self._codes.numel())
        own = self._codes[self.bucket.slice]
        shard = self.bucket.shard
        for piece in self.bucket.slice_pieces:
            values = shard.read(piece.offset, piece.offset + piece.numel).to(self._codes.device)
            codes = _cast(values, self._scales[piece.index], self._kinds[piece.index][0])
            own[piece.offset : piece.offset + piece.numel].copy_(codes.view(torch.uint8))
        return self.bucket.mesh.gather.all_gather(self._codes, of=self.bucket.names)

    def _show(self) -> None:
        # Beside the parameter, which keeps its name: an instance's own attribute comes before those that a module
        # looks up. With gradients, whoever gathers: what a recomputation reads may have been shown without. In
        # inference mode torch takes no views of a tensor of torchao's from outside of it.
        self._in_inference = torch.is_inference_mode_enabled()
        with torch.enable_grad():
            for index, layer in enumerate(self.layers):
                segment = self.bucket.layout.segments[index]
                codes = self._codes[segment.offset : segment.stop].view(self._kinds[index][0]).view(segment.shape)
                # `.data` has a version of its own: a backward shall not take the gather before it for a write.
                codes, parameter = codes.data, self.bucket.parameters[index]
                vars(layer)[_ATTRIBUTE] = _OfParameter.apply(parameter, codes, self._scales[index], layer)


def _cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as torchao does: by the scale in fp32, and no further than the largest number of the dtype."""
    most = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-most, most).to(dtype)


def gather_in_float8(buckets: Sequence[ParameterBucket], layers: dict[int, nn.Module], ranks: Communicator) -> None:
    """Let the buckets of these layers' weights be gathered in float8.

    Args:
        buckets: Of a model.
        layers: By `id` of the weight; see `quantized.float8.weights_cast_whole`.
        ranks: Those that divide each weight.
    """
    scales = WeightScales(ranks)
    for bucket in buckets:
        if id(bucket.parameters[0]) in layers:
            bucket.float8 = GatheredFloat8(bucket, [layers[id(each)] for each in bucket.parameters], scales)
