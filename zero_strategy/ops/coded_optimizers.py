"""Optimizer steps on states of 8 bits: `adam8_`, `lion8_` and `sgd8_`, each a step of its namesake between two codings.

A state is a list of uint8 codes and a list of float32 scales, one scale for 256 elements (`ops.dynamic_codes`). The
states of a block are decoded to float32, updated by the formulas of `ops.optimizers`, and coded again. First moments
and momenta have the signed map, second moments the unsigned one. Everything else is as there: lists with one entry per
segment, the table `hyper`, copies, one pass over memory, the same bits of kernels and references.

A segment begins at a block of its parameter: a piece of one at a multiple of 256 of its elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_strategy.ops.dynamic_codes import BLOCK, blocks_of, decode, encode_into
from zero_strategy.ops.library import check_apart, check_table, check_tensor, check_tensors, define
from zero_strategy.ops.optimizers import (
    ADAM_COLUMNS,
    LION_COLUMNS,
    SGD_COLUMNS,
    _adam_reference,
    _lion_reference,
    _sgd_reference,
)

Tensors = Sequence[Tensor]


def adam8_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: tuple[Tensors, Tensors],
    exp_avg_sqs: tuple[Tensors, Tensors],
    hyper: Tensor,
    *,
    decoupled: bool,
    copies: Tensors = (),
    check: bool = True,
) -> None:
    """Adam or AdamW; see `ops.adam_`.

    Args:
        params: Master weights, float32.
        grads: Gradients.
        exp_avgs: Codes and scales of the first moments.
        exp_avg_sqs: Codes and scales of the second moments.
        hyper: (segments, 7) float64, as of `ops.adam_`.
        decoupled: AdamW.
        copies: Low-precision parameters, or nothing.
        check: See `ops.adam_`.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    if check:
        _check(params, grads, {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}, copies, hyper, ADAM_COLUMNS)
    if len(params):
        _adam8(params, grads, *exp_avgs, *exp_avg_sqs, copies, hyper, decoupled)


def lion8_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: tuple[Tensors, Tensors],
    hyper: Tensor,
    *,
    copies: Tensors = (),
    check: bool = True,
) -> None:
    """Lion; see `ops.lion_`. Otherwise as `adam8_`."""
    if check:
        _check(params, grads, {"exp_avgs": exp_avgs}, copies, hyper, LION_COLUMNS)
    if len(params):
        _lion8(params, grads, *exp_avgs, copies, hyper)


def sgd8_(
    params: Tensors,
    grads: Tensors,
    buffers: tuple[Tensors, Tensors],
    hyper: Tensor,
    *,
    nesterov: bool = False,
    copies: Tensors = (),
    check: bool = True,
) -> None:
    """SGD with momentum; see `ops.sgd_`. Otherwise as `adam8_`."""
    if check:
        _check(params, grads, {"buffers": buffers}, copies, hyper, SGD_COLUMNS)
    if len(params):
        _sgd8(params, grads, *buffers, copies, hyper, nesterov)


def _check(
    params: Tensors,
    grads: Tensors,
    states: dict[str, tuple[Tensors, Tensors]],
    copies: Tensors,
    hyper: Tensor,
    columns: Sequence[str],
) -> None:
    codes = {f"{name}[0]": pair[0] for name, pair in states.items()}
    scales = {f"{name}[1]": pair[1] for name, pair in states.items()}
    dtypes: dict[str, tuple[torch.dtype, ...]] = {"params": (torch.float32,), **dict.fromkeys(codes, (torch.uint8,))}
    check_tensors({"params": params, "grads": grads, **codes, "copies": copies}, dtypes, ("copies",))
    for name, tensors in scales.items():
        if len(tensors) != len(params):
            raise ValueError(f"{name} has {len(tensors)} tensors, but params has {len(params)}")
        for index, (tensor, parameter) in enumerate(zip(tensors, params, strict=True)):
            shape, label = (blocks_of(parameter.numel()),), f"{name}[{index}]"
            check_tensor(label, tensor, dtypes=(torch.float32,), shape=shape, device=parameter.device)
            if not tensor.is_contiguous():
                raise ValueError(f"{label} must be contiguous")
    check_table("hyper", hyper, len(params), columns)
    check_apart({"params": params, **codes, **scales, "copies": copies}, {"grads": grads})


# ------------------------------------------------------------------------------------------------ references

# The references of `ops.optimizers` take one segment at a time: its states in float32 are all the memory beside it.


@torch.no_grad()
def _adam8_reference(
    params: Tensors, grads: Tensors, first_codes: Tensors, first_scales: Tensors, second_codes: Tensors,
    second_scales: Tensors, copies: Tensors, hyper: Tensor, decoupled: bool,
) -> None:  # fmt: skip
    for i, parameter in enumerate(params):
        first = decode(first_codes[i], first_scales[i], signed=True)
        second = decode(second_codes[i], second_scales[i], signed=False)
        _adam_reference([parameter], [grads[i]], [first], [second], copies[i : i + 1], hyper[i : i + 1], decoupled)
        encode_into(first, first_codes[i], first_scales[i], signed=True)
        encode_into(second, second_codes[i], second_scales[i], signed=False)


@torch.no_grad()
def _lion8_reference(
    params: Tensors, grads: Tensors, codes: Tensors, scales: Tensors, copies: Tensors, hyper: Tensor
) -> None:
    for i, parameter in enumerate(params):
        moment = decode(codes[i], scales[i], signed=True)
        _lion_reference([parameter], [grads[i]], [moment], copies[i : i + 1], hyper[i : i + 1])
        encode_into(moment, codes[i], scales[i], signed=True)


@torch.no_grad()
def _sgd8_reference(
    params: Tensors, grads: Tensors, codes: Tensors, scales: Tensors, copies: Tensors, hyper: Tensor, nesterov: bool
) -> None:
    for i, parameter in enumerate(params):
        buffer = decode(codes[i], scales[i], signed=True)
        _sgd_reference([parameter], [grads[i]], [buffer], copies[i : i + 1], hyper[i : i + 1], nesterov)
        encode_into(buffer, codes[i], scales[i], signed=True)


_adam8 = define(
    "adam8_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg_codes, Tensor(c!)[] exp_avg_scales, "
    "Tensor(d!)[] exp_avg_sq_codes, Tensor(e!)[] exp_avg_sq_scales, Tensor(f!)[] copies, Tensor hyper, "
    "bool decoupled) -> ()",
    _adam8_reference,
)
_lion8 = define(
    "lion8_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg_codes, Tensor(c!)[] exp_avg_scales, "
    "Tensor(d!)[] copies, Tensor hyper) -> ()",
    _lion8_reference,
)
_sgd8 = define(
    "sgd8_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] buffer_codes, Tensor(c!)[] buffer_scales, "
    "Tensor(d!)[] copies, Tensor hyper, bool nesterov) -> ()",
    _sgd8_reference,
)

assert BLOCK == 256, "the kernels have the size of a block in cpp/dynamic_map.h"
