"""One case of each module of `torch.nn`, in a unit behind a product whose result it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.unshard import tensors_in

Make = Callable[[torch.Generator], Tensor]


def _as_it_is(product: Tensor) -> Tensor:
    return product


@dataclass(frozen=True)
class Floats:
    """An input of the unit that gets a gradient; `then` is done to the product that the module is given."""

    shape: tuple[int, ...]
    then: Callable[[Tensor], Tensor] = _as_it_is


def floats(*shape: int) -> Floats:
    return Floats(shape)


def whole(high: int, *shape: int) -> Make:
    return lambda generator: torch.randint(high, shape, generator=generator)


def positive(*shape: int) -> Make:
    return lambda generator: torch.rand(shape, generator=generator)


def signs(*shape: int) -> Make:
    return lambda generator: 2.0 * torch.randint(2, shape, generator=generator) - 1


def exactly(*values: int) -> Make:
    return lambda generator: torch.tensor(values)


def plain_call(module: nn.Module, *inputs: Tensor) -> Any:
    return module(*inputs)


@dataclass(frozen=True)
class Case:
    """Arguments of a module's class, and of its forward: inputs with gradients, and others."""

    args: tuple[Any, ...] = ()
    inputs: tuple[Floats | Make, ...] = (Floats((2, 4, 8)),)
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] = plain_call


class Stock(nn.Module):
    """A unit: a product of each input, then the module."""

    def __init__(self, kind: Callable[..., nn.Module], case: Case) -> None:
        super().__init__()
        self.case = case
        wide = [one.shape[-1] for one in case.inputs if isinstance(one, Floats)]
        self.mix = nn.ModuleList(nn.Linear(width, width) for width in wide)
        self.scale = nn.Parameter(torch.ones(()))
        self.module = kind(*case.args, **case.kwargs)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        mix = iter(self.mix)
        given = [
            one.then(next(mix)(value)) if isinstance(one, Floats) else value
            for one, value in zip(self.case.inputs, inputs, strict=True)
        ]
        found = [tensor for tensor in tensors_in(self.case.call(self.module, *given)) if tensor.is_floating_point()]
        return [tensor * self.scale for tensor in found]


class Around(nn.Module):
    """The root around the unit."""

    def __init__(self, kind: Callable[..., nn.Module], case: Case) -> None:
        super().__init__()
        self.stem, self.unit = nn.Parameter(torch.full((), 1.5)), Stock(kind, case)

    def forward(self, *inputs: Tensor) -> Tensor:
        found = self.unit(*[value * self.stem if value.requires_grad else value for value in inputs])
        return sum((tensor.square().mean() for tensor in found), torch.zeros(()))


def inputs_of(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(one.shape, generator=generator).requires_grad_() if isinstance(one, Floats) else one(generator)
        for one in case.inputs
    ]


def unpooled(pool: type[nn.Module]) -> Callable[..., Any]:
    return lambda module, x: module(*pool(2, return_indices=True)(x))


def attended(module: nn.Module, x: Tensor) -> Any:
    return module(x, x, x)


def packed(module: nn.Module, x: Tensor) -> Any:
    sequence = nn.utils.rnn.pack_padded_sequence(x, [4, 2], batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(module(sequence)[0], batch_first=True)[0]


_LINE, _IMAGE, _VOLUME = floats(2, 4, 8), floats(2, 4, 8, 8), floats(2, 4, 6, 6, 6)
_BY_DIMENSION = {1: _LINE, 2: _IMAGE, 3: _VOLUME}
_ROWS = floats(6, 8)
_POSITIVE, _SHARES, _LOGS = Floats((6, 8), torch.exp), Floats((6, 8), torch.sigmoid), Floats((6, 8), nn.LogSoftmax(-1))

_ACTIVATIONS = [
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "PReLU", "RMSNorm", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
    "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Dropout", "AlphaDropout",
]  # fmt: skip
_IN_PLACE = [
    "CELU", "ELU", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "Mish", "RReLU", "ReLU", "ReLU6", "SELU",
    "SiLU", "Dropout", "AlphaDropout",
]  # fmt: skip
_ON_AN_AXIS = ("LogSoftmax", "Softmax", "Softmin", "GLU")


def _by_dimension() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for d, x in _BY_DIMENSION.items():
        pad = (1,) * (2 * d)
        for name in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
            found[f"{name}{d}d"] = Case((3,), (x,))
        for name in ("AvgPool", "MaxPool"):
            found[f"{name}{d}d"] = Case((2,), (x,))
        found[f"LPPool{d}d"] = Case((2, 2), (Floats(x.shape, torch.exp),))
        found[f"MaxUnpool{d}d"] = Case((2,), (x,), call=unpooled(getattr(nn, f"MaxPool{d}d")))
        for name in ("BatchNorm", "InstanceNorm"):
            found[f"{name}{d}d"] = Case((4,), (x,), {"track_running_stats": True})
        found[f"Conv{d}d"] = Case((4, 6, 3), (x,), {"padding": 1})
        found[f"ConvTranspose{d}d"] = Case((4, 6, 3), (x,))
        found[f"Dropout{d}d"] = Case((), (x,))
        for name in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
            found[f"{name}{d}d"] = Case((pad,), (x,))
        found[f"ConstantPad{d}d"] = Case((pad, 0.5), (x,))
    return found


def _losses() -> dict[str, Case]:
    pair = (_ROWS, floats(6, 8))
    found = {name: Case((), pair) for name in ("HuberLoss", "L1Loss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss")}
    found |= {name: Case((), pair) for name in ("CosineSimilarity", "PairwiseDistance")}
    found |= {name: Case((), (_ROWS, signs(6, 8))) for name in ("HingeEmbeddingLoss", "SoftMarginLoss")}
    found |= {name: Case((), (*pair, floats(6, 8))) for name in ("TripletMarginLoss", "TripletMarginWithDistanceLoss")}
    return found | {
        "AdaptiveLogSoftmaxWithLoss": Case((8, 12, [4, 8]), (_ROWS, whole(12, 6))),
        "BCELoss": Case((), (_SHARES, positive(6, 8))),
        "BCEWithLogitsLoss": Case((), (_ROWS, positive(6, 8))),
        "CTCLoss": Case((), (Floats((6, 2, 5), nn.LogSoftmax(-1)), whole(4, 2, 3), exactly(6, 5), exactly(3, 2))),
        "CosineEmbeddingLoss": Case((), (*pair, signs(6))),
        "CrossEntropyLoss": Case((), (_ROWS, whole(8, 6))),
        "GaussianNLLLoss": Case((), (_ROWS, floats(6, 8), _POSITIVE)),
        "KLDivLoss": Case((), (_LOGS, positive(6, 8)), {"reduction": "batchmean"}),
        "LinearCrossEntropyLoss": Case((8, 12), (_ROWS, whole(12, 6))),
        "MarginRankingLoss": Case((), (floats(2, 6), floats(2, 6), signs(2, 6))),
        "MultiLabelMarginLoss": Case((), (_ROWS, whole(8, 6, 8))),
        "MultiLabelSoftMarginLoss": Case((), (_ROWS, positive(6, 8))),
        "MultiMarginLoss": Case((), (_ROWS, whole(8, 6))),
        "NLLLoss": Case((), (_LOGS, whole(8, 6))),
        "NLLLoss2d": Case((), (Floats((2, 4, 8), nn.LogSoftmax(1)), whole(4, 2, 8))),
    }


def _transformers() -> dict[str, Case]:
    x, memory = floats(2, 5, 8), floats(2, 3, 8)
    sizes = {"dim_feedforward": 16, "batch_first": True}
    encoder, decoder = nn.TransformerEncoderLayer(8, 2, **sizes), nn.TransformerDecoderLayer(8, 2, **sizes)
    return {
        "MultiheadAttention": Case((8, 2), (x,), {"batch_first": True, "dropout": 0.1}, attended),
        "Transformer": Case(
            (8, 2), (memory, x), {"num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.1, **sizes}
        ),
        "TransformerDecoder": Case((decoder, 2), (x, memory)),
        "TransformerDecoderLayer": Case((8, 2), (x, memory), {"dropout": 0.1, **sizes}),
        "TransformerEncoder": Case((encoder, 2), (x,), {"enable_nested_tensor": False}),
        "TransformerEncoderLayer": Case((8, 2), (x,), {"dropout": 0.1, **sizes}),
    }


def _recurrent() -> dict[str, Case]:
    layers = {"num_layers": 2, "batch_first": True, "dropout": 0.1}
    found = {name: Case((8, 8), (floats(2, 4, 8),), layers) for name in ("GRU", "LSTM", "RNN")}
    found |= {name: Case((8, 8), (_ROWS,)) for name in ("GRUCell", "LSTMCell", "RNNCell")}
    return found


STOCK = {
    **{name: Case() for name in _ACTIVATIONS},
    **{name: Case((-1,)) for name in _ON_AN_AXIS},
    **_by_dimension(),
    **_losses(),
    **_transformers(),
    **_recurrent(),
    "RMSNorm": Case((8,)),
    "Bilinear": Case((8, 6, 5), (_ROWS, floats(6, 6))),
    "ChannelShuffle": Case((2,), (_IMAGE,)),
    "CrossMapLRN2d": Case((3,), (_IMAGE,)),
    "Embedding": Case((9, 8), (whole(9, 2, 4),)),
    "EmbeddingBag": Case((9, 8), (whole(9, 2, 4),)),
    "FeatureAlphaDropout": Case((), (_IMAGE,)),
    "Flatten": Case(),
    "Fold": Case((4, 2), (floats(2, 8, 9),)),
    "FractionalMaxPool2d": Case((2, 3), (_IMAGE,)),
    "FractionalMaxPool3d": Case((2, 3), (_VOLUME,)),
    "GroupNorm": Case((2, 4), (_IMAGE,)),
    "LayerNorm": Case((8,)),
    "Linear": Case((8, 6)),
    "LocalResponseNorm": Case((2,), (_IMAGE,)),
    "PixelShuffle": Case((2,), (_IMAGE,)),
    "PixelUnshuffle": Case((2,), (_IMAGE,)),
    "Sequential": Case((nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))),
    "Softmax2d": Case((), (_IMAGE,)),
    "Threshold": Case((0.1, 0.5)),
    "Unflatten": Case((1, (2, 2))),
    "Unfold": Case((2,), (_IMAGE,)),
    "Upsample": Case((), (_IMAGE,), {"scale_factor": 2}),
    "UpsamplingBilinear2d": Case((), (_IMAGE,), {"scale_factor": 2}),
    "UpsamplingNearest2d": Case((), (_IMAGE,), {"scale_factor": 2}),
}
"""By the name of the class."""

VARIANTS = {
    **{f"{name} in place": (name, Case(kwargs={"inplace": True})) for name in _IN_PLACE},
    "Threshold in place": ("Threshold", Case((0.1, 0.5, True))),
    "GRU of packed sequences": ("GRU", Case((8, 8), (floats(2, 4, 8),), {"batch_first": True}, packed)),
    "LSTM with projections": ("LSTM", Case((8, 8), (floats(2, 4, 8),), {"proj_size": 4, "bidirectional": True})),
    "BatchNorm1d of all batches": ("BatchNorm1d", Case((4,), (_LINE,), {"momentum": None})),
    "Embedding scaled by frequency": ("Embedding", Case((9, 8), (whole(9, 2, 4),), {"scale_grad_by_freq": True})),
}
"""Further cases."""

WITHOUT_A_CASE = {
    "Module": "the base class",
    "Container": "a former name of the base class",
    "ModuleDict": "no forward",
    "ModuleList": "no forward",
    "ParameterDict": "no forward",
    "ParameterList": "no forward",
    "RNNBase": "no forward",
    "RNNCellBase": "no forward",
    "SyncBatchNorm": "needs a GPU",
    "DataParallel": "another way of training in parallel",
    **{name: "of another class once it has parameters" for name in vars(nn) if name.startswith("Lazy")},
}
"""Why a class of `torch.nn` has none."""
