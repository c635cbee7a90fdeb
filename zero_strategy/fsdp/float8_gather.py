"""Weights that reach forward and backward in float8, at stage 3, where their layers would cast them to it anyway.

A `Float8Linear` of torchao multiplies with codes of 8 bits and one scale per weight, which follows from the weight's
largest absolute value. Here each rank casts its slice, by the scale of the whole weight, and codes are gathered: half
the bytes of 16-bit values, and the bits that the layer would have made of the gathered values.

    slice (16 or 32 bits) --- largest values of all weights: one small message, once per forward ---> scales
    slice --cast by the scale--> codes of the slice --all-gather--> codes of the unit --> layers' `weight.t()`

A layer's forward asks its weight for `weight.t()`; that this code asks, and no other, is seen by its frame, and it is
given torchao's tensor. See `fsdp/gathered_codes.py` for who finds what.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import Communicator
from zero_strategy.fsdp.float8_codes import Transposed, codes_class
from zero_strategy.fsdp.gathered_codes import CodedBucket, GatheredCodes, WeightPart
from zero_strategy.quantized.float8 import float8_class
from zero_strategy.runtime.torch_private import callers, foreach_norm, in_transform


class WeightScales:
    """The scales of all weights of a model that are gathered in float8.

    Made anew at points that all ranks come to alike, whether or not a rank has seen a value change: at the first gather
    after a forward began, or after a step or a load.

    Args:
        communicator: The ranks that divide each weight.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._gathers: list[GatheredFloat8] = []
        self._count = 0
        self._stale = True
        self._places: Tensor | None = None
        """Numbers of the weights of which this rank has a part."""

    def add(self, gathers: GatheredFloat8) -> int:
        """Number of the first weight of these among all."""
        first, self._count = self._count, self._count + len(gathers.layers)
        self._gathers.append(gathers)
        return first

    def forget(self) -> None:
        """Values may have changed on any rank; called on all ranks alike."""
        self._stale = True

    def bring_up_to_date(self) -> None:
        """Make forgotten scales anew. A collective then, of four bytes per weight and rank."""
        if not self._stale:
            return
        ranks, rank = self._communicator.size, self._communicator.rank
        own = [numbered for gathers in self._gathers for numbered in gathers.own_values()]
        largest = torch.zeros(ranks * self._count, dtype=torch.float32, device=self._gathers[0].bucket.device)
        if own:
            # The norm of order infinity is the largest absolute value, and NaN if a value is.
            found = [each.float() for each in foreach_norm([values for _, values in own], float("inf"))]
            if self._places is None:  # they never change, and a copy in each forward might hold the host
                self._places = torch.tensor([number for number, _ in own], device=largest.device)
            largest[rank * self._count : (rank + 1) * self._count].index_copy_(0, self._places, torch.stack(found))
        self._communicator.all_gather(largest, of="largest values of float8 weights").wait()
        of_weights = largest.view(ranks, self._count).amax(0)
        for gathers in self._gathers:
            gathers.set_scales(of_weights)
        self._stale = False


class GatheredFloat8(GatheredCodes):
    """The whole weights of one bucket in float8, while a forward or a backward uses them.

    Args:
        bucket: Weights of such layers alone.
        layers: The layer of each parameter, in bucket order.
        scales: Of the model.
    """

    def __init__(self, bucket: CodedBucket, layers: Sequence[Any], scales: WeightScales) -> None:
        super().__init__(bucket, torch.uint8)
        self.layers, self.scales = list(layers), scales
        self._kinds = [
            (layer.config.cast_config_weight.target_dtype, layer.config.round_scales_to_power_of_2) for layer in layers
        ]
        self._readers: list[CodeType] = [float8_class(layer).forward.__code__ for layer in layers]
        # Those that slices are cast by, agreed among ranks; and those of the codes that are here, which graphs hold.
        self._agreed, self._shown = (
            {kind: torch.ones(len(layers), device=bucket.device) for kind in self._kinds} for _ in range(2)
        )
        self._first = scales.add(self)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Codes and scales."""
        yield from super().held()
        for scales in (*self._agreed.values(), *self._shown.values()):
            yield "handles", scales

    # ---- scales ----

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
        for kind, agreed in self._agreed.items():
            agreed.copy_(library.amax_to_scale(own, *kind))

    def invalidate(self) -> None:
        """Values are about to change, or have, on all ranks: so have scales."""
        super().invalidate()
        self.scales.forget()

    def wanted(self) -> bool:
        """True: such a layer casts wherever it is called."""
        return True

    def _prepare(self) -> None:
        self.scales.bring_up_to_date()
        for kind, agreed in self._agreed.items():
            self._shown[kind].copy_(agreed)

    def _prepare_whole(self, index: int, values: Tensor) -> None:
        library: Any = importlib.import_module("torchao.float8.float8_utils")
        kind, largest = self._kinds[index], torch.linalg.vector_norm(values, float("inf")).float()
        self._shown[kind][index] = library.amax_to_scale(largest, *kind)

    def _cast(self, index: int, values: Tensor, codes: Tensor) -> None:
        kind = self._kinds[index]
        _cast(values, self._shown[kind][index], codes.view(kind[0]))

    # ---- what layers are given ----

    def answer(self, index: int, func: Callable[..., Any], asker: FrameType | None) -> Tensor | None:
        """The weight as its layer's forward asks for it, by `weight.t()`: (in_features, out_features)."""
        if func is not Tensor.t or not self.gathered or in_transform() or not self._is_reader(index, asker):
            return None
        self.asked.add(index)
        found: Tensor = Transposed.apply(self.bucket.parameters[index], functools.partial(self._weight, index))
        return found

    def _is_reader(self, index: int, frame: FrameType | None) -> bool:
        asking = (caller for caller in callers(frame) if caller.f_code is self._readers[index])
        return any(caller.f_locals.get("self") is self.layers[index] for caller in asking)

    def _weight(self, index: int) -> Tensor:
        library: Any = importlib.import_module("torchao.float8.float8_training_tensor")
        segment, layer = self.bucket.layout.segments[index], self.layers[index]
        codes = self._codes[segment.offset : segment.stop].view(self._kinds[index][0]).view(segment.shape)
        weight: Any = codes_class()(
            # `.data` has a version of its own: a backward shall not take the gather before it for a write.
            codes.data.t(),
            self._shown[self._kinds[index]][index],
            self.bucket.dtype,
            linear_mm_config=layer.linear_mm_config,
            gemm_input_role=library.GemmInputRole.WEIGHT,
        )
        weight.part = WeightPart(self, index)
        found: Tensor = weight
        return found


_CAST_AT_ONCE = 1 << 22
"""Elements; each needs four bytes meanwhile, which no plan counts."""


def _cast(values: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Cast as torchao does: by the scale in fp32, and no further than the largest number of the codes' dtype."""
    most = torch.finfo(codes.dtype).max
    for part, place in zip(values.split(_CAST_AT_ONCE), codes.split(_CAST_AT_ONCE), strict=True):
        scaled = part * scale if part.dtype == torch.float32 else part.float().mul_(scale)
        place.copy_(scaled.clamp_(-most, most))


def gather_in_float8(buckets: Sequence[CodedBucket], layers: dict[int, nn.Module], ranks: Communicator) -> None:
    """Let the buckets of these layers' weights be gathered in float8.

    Args:
        buckets: Of a model.
        layers: By `id` of the weight; see `quantized.float8.weights_cast_whole`.
        ranks: Those that divide each weight.

    Raises:
        ValueError: If such a weight is of float64; names it.
    """
    scales = WeightScales(ranks)
    for bucket in buckets:
        if id(bucket.parameters[0]) in layers:
            if bucket.dtype == torch.float64:
                raise ValueError(
                    f"communication.parameters is 'float8', and parameter {bucket.names[0]!r} is of float64, whose "
                    "largest value has no place in a scale of float32: train in float32 or 16 bits, or take 'values'"
                )
            bucket.codes = GatheredFloat8(bucket, [layers[id(each)] for each in bucket.parameters], scales)
