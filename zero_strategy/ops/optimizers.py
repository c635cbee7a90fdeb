"""One pass over memory per optimizer step: gradient scale, decay, moments, update and low-precision copy.

Every op takes lists with one entry per *segment* (a parameter, or a piece of one) and a float64 table `hyper` with one
row per segment, so that parameter groups and parameters with step counts of their own share one call. For segment i:

    params[i]   float32, updated in place (the master weight)
    grads[i]    float32, bfloat16 or float16; multiplied by the row's `scale` first (1 / loss scale x clipping
                coefficient / ranks; negative to maximize)
    state       float32 or bfloat16, updated in place
    copies[i]   float32, bfloat16 or float16: takes the new value of params[i], rounded to nearest; or `copies` is empty

All tensors of a call are contiguous and on one device. Arithmetic is float32, each operation of the formulas below
rounded on its own in the order written, hyper-parameters derived in float64 and rounded once: native kernels and the
references here give the same bits, on every processor. On a device without the native library torch's own kernels take
the steps (`ops.foreach`, which says whose bits they have).

    adam_     g = g*scale (+ p*weight_decay)     Adam, Kingma and Ba 2015
              m = m + (g - m)*(1 - beta1)
              v = v*beta2 + (g*g)*(1 - beta2)
              p = p (*(1 - lr*weight_decay))     AdamW, Loshchilov and Hutter 2019: decoupled=True
                  - (m*(lr / (1 - beta1^step))) / (sqrt(v)*(1 / sqrt(1 - beta2^step)) + eps)
    lion_     p = p*(1 - lr*weight_decay) - lr*sign(m*beta1 + g*(1 - beta1))     Chen et al. 2023
              m = m*beta2 + g*(1 - beta2)
    adagrad_  h = h + g*g;  p = p - (g*(lr / (1 + (step - 1)*lr_decay))) / (sqrt(h) + eps)     Duchi et al. 2011
    sgd_      b = b*momentum + g*(1 - dampening), or g if the row says `fresh`
              p = p - b*lr, with nesterov (g + b*momentum)*lr
    lamb_     u = m^ / (sqrt(v^) + eps) + weight_decay*p;  p = p - u*(lr * |p| / |u|)     You et al. 2020

A step of infinity in a row of Adam or LAMB leaves both moments uncorrected, as beta^infinity is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_strategy.ops import foreach
from zero_strategy.ops.library import check_apart, check_table, check_tensors, define, lacks_kernels

Tensors = Sequence[Tensor]
STATES = (torch.float32, torch.bfloat16)
ADAM_COLUMNS = ("lr", "beta1", "beta2", "eps", "weight_decay", "step", "scale")
LION_COLUMNS = ("lr", "beta1", "beta2", "weight_decay", "scale")
ADAGRAD_COLUMNS = ("lr", "lr_decay", "eps", "weight_decay", "step", "scale")
SGD_COLUMNS = ("lr", "momentum", "dampening", "weight_decay", "fresh", "scale")
LAMB_COLUMNS = ADAM_COLUMNS


def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: Tensor,
    *,
    decoupled: bool,
    copies: Tensors = (),
    check: bool = True,
) -> None:
    """Adam (`decoupled=False`: decay is part of the gradient) or AdamW (`decoupled=True`).

    Args:
        params: Master weights.
        grads: Gradients.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        hyper: (segments, 7) float64: lr, beta1, beta2, eps, weight_decay, step (this one's number, from 1), scale.
        decoupled: AdamW.
        copies: Low-precision parameters, or nothing.
        check: False for a caller who knows that tensors fit and lie apart, and saves a look at each; the kernels
            themselves refuse what would touch other memory.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    if check:
        states = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
        _check(params, grads, states, copies, hyper, ADAM_COLUMNS)
    if len(params):
        _adam(params, grads, exp_avgs, exp_avg_sqs, copies, hyper, decoupled)


def lion_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, hyper: Tensor, *, copies: Tensors = (), check: bool = True
) -> None:
    """Lion. `hyper`: (segments, 5) float64: lr, beta1, beta2, weight_decay, scale. Otherwise as `adam_`."""
    if check:
        _check(params, grads, {"exp_avgs": exp_avgs}, copies, hyper, LION_COLUMNS)
    if len(params):
        _lion(params, grads, exp_avgs, copies, hyper)


def adagrad_(
    params: Tensors, grads: Tensors, sums: Tensors, hyper: Tensor, *, copies: Tensors = (), check: bool = True
) -> None:
    """Adagrad. `hyper`: (segments, 6) float64: lr, lr_decay, eps, weight_decay, step, scale. Otherwise as `adam_`."""
    if check:
        _check(params, grads, {"sums": sums}, copies, hyper, ADAGRAD_COLUMNS)
    if len(params):
        _adagrad(params, grads, sums, copies, hyper)


def sgd_(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    hyper: Tensor,
    *,
    nesterov: bool = False,
    copies: Tensors = (),
    check: bool = True,
) -> None:
    """SGD; without momentum `buffers` is empty.

    `hyper`: (segments, 6) float64: lr, momentum, dampening, weight_decay, fresh (1: the buffer has no value yet),
    scale. Otherwise as `adam_`.
    """
    if check:
        _check(params, grads, {"buffers": buffers}, copies, hyper, SGD_COLUMNS, optional=("buffers",))
    if len(params):
        _sgd(params, grads, buffers, copies, hyper, nesterov)


def lamb_direction_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, hyper: Tensor, *, check: bool = True
) -> Tensor:
    """First half of LAMB: update the moments.

    A parameter that lies in pieces on several ranks adds its pieces' sums up before the trust ratio is taken.

    Returns:
        (segments, 2) float64: sums of p^2 and of u^2.
    """
    if check:
        _check(params, grads, {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}, (), hyper, LAMB_COLUMNS)
    if not len(params):
        return torch.zeros(0, 2, dtype=torch.float64)
    sums: Tensor = _lamb_direction(params, grads, exp_avgs, exp_avg_sqs, hyper)
    return sums


def lamb_apply_(
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: Tensor,
    rates: Tensor,
    *,
    copies: Tensors = (),
    check: bool = True,
) -> None:
    """Second half of LAMB: p = p - u*rate, with u from the moments as they are stored.

    `rates`: (segments, 1) float64: lr x trust ratio (`lamb_rates`).
    """
    if check:
        states = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
        _check(params, params, states, copies, hyper, LAMB_COLUMNS, apart=False)
        check_table("rates", rates, len(params), ("rate",))
    if len(params):
        _lamb_apply(params, exp_avgs, exp_avg_sqs, copies, hyper, rates)


def lamb_rates(sums: Tensor, hyper: Tensor) -> Tensor:
    """lr x |p| / |u| per segment, with a trust ratio of 1 where either norm is 0; (segments, 1) float64."""
    weights, directions = sums[:, 0].sqrt(), sums[:, 1].sqrt()
    trust = torch.where((weights > 0) & (directions > 0), weights / directions, torch.ones_like(weights))
    return (hyper[:, 0] * trust).unsqueeze(1).contiguous()


def _check(
    params: Tensors,
    grads: Tensors,
    states: dict[str, Tensors],
    copies: Tensors,
    hyper: Tensor,
    columns: Sequence[str],
    optional: Sequence[str] = (),
    apart: bool = True,
) -> None:
    dtypes = {"params": (torch.float32,), **dict.fromkeys(states, STATES)}
    check_tensors({"params": params, "grads": grads, **states, "copies": copies}, dtypes, ("copies", *optional))
    check_table("hyper", hyper, len(params), columns)
    if apart:
        check_apart({"params": params, **states, "copies": copies}, {"grads": grads})


# ------------------------------------------------------------------------------------------------ references


def _rows(hyper: Tensor) -> list[Any]:
    return hyper.tolist()


def _store(copies: Tensors, index: int, value: Tensor) -> None:
    if len(copies):
        copies[index].copy_(value.view_as(copies[index]))


def _scaled(gradient: Tensor, like: Tensor, scale: float) -> Tensor:
    return gradient.to(torch.float32).view_as(like) * scale


def _moments(m: Tensor, v: Tensor, g: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """New moments in float32, before they are rounded to where they are kept."""
    first, second = m.to(torch.float32).view_as(g), v.to(torch.float32).view_as(g)
    return first + (g - first) * (1 - beta1), second * beta2 + (g * g) * (1 - beta2)


def _root(value: Tensor) -> Tensor:
    """The correctly rounded square root; torch's own float32 one (MKL) is not."""
    return value.double().sqrt().float()


def _step_of(m: Tensor, v: Tensor, size: float, beta2: float, step: float, eps: float) -> Tensor:
    return (m * size) / (_root(v) * (1 / math.sqrt(1 - beta2**step)) + eps)


@torch.no_grad()
def _adam_reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, copies: Tensors, hyper: Tensor,
    decoupled: bool,
) -> None:  # fmt: skip
    if lacks_kernels(params[0].device):
        foreach.adam(params, grads, exp_avgs, exp_avg_sqs, copies, hyper, decoupled)
        return
    for index, (lr, beta1, beta2, eps, decay, step, scale) in enumerate(_rows(hyper)):
        p = params[index]
        g = _scaled(grads[index], p, scale)
        if decay and not decoupled:
            g = g + p * decay
        m, v = _moments(exp_avgs[index], exp_avg_sqs[index], g, beta1, beta2)
        shrunk = p * (1 - lr * decay) if decoupled else p
        p.copy_(shrunk - _step_of(m, v, lr / (1 - beta1**step), beta2, step, eps))
        exp_avgs[index].copy_(m.view_as(exp_avgs[index]))
        exp_avg_sqs[index].copy_(v.view_as(exp_avg_sqs[index]))
        _store(copies, index, p)


@torch.no_grad()
def _lion_reference(params: Tensors, grads: Tensors, exp_avgs: Tensors, copies: Tensors, hyper: Tensor) -> None:
    if lacks_kernels(params[0].device):
        foreach.lion(params, grads, exp_avgs, copies, hyper)
        return
    for index, (lr, beta1, beta2, decay, scale) in enumerate(_rows(hyper)):
        p = params[index]
        g = _scaled(grads[index], p, scale)
        m = exp_avgs[index].to(torch.float32).view_as(p)
        mixed = m * beta1 + g * (1 - beta1)
        direction = torch.where(mixed.isnan(), mixed, mixed.sign())
        p.copy_(p * (1 - lr * decay) - direction * lr)
        exp_avgs[index].copy_((m * beta2 + g * (1 - beta2)).view_as(exp_avgs[index]))
        _store(copies, index, p)


@torch.no_grad()
def _adagrad_reference(params: Tensors, grads: Tensors, sums: Tensors, copies: Tensors, hyper: Tensor) -> None:
    if lacks_kernels(params[0].device):
        foreach.adagrad(params, grads, sums, copies, hyper)
        return
    for index, (lr, lr_decay, eps, decay, step, scale) in enumerate(_rows(hyper)):
        p = params[index]
        g = _scaled(grads[index], p, scale)
        if decay:
            g = g + p * decay
        h = sums[index].to(torch.float32).view_as(p) + g * g
        p.copy_(p - (g * (lr / (1 + (step - 1) * lr_decay))) / (_root(h) + eps))
        sums[index].copy_(h.view_as(sums[index]))
        _store(copies, index, p)


@torch.no_grad()
def _sgd_reference(
    params: Tensors, grads: Tensors, buffers: Tensors, copies: Tensors, hyper: Tensor, nesterov: bool
) -> None:
    if lacks_kernels(params[0].device):
        foreach.sgd(params, grads, buffers, copies, hyper, nesterov)
        return
    for index, (lr, momentum, dampening, decay, fresh, scale) in enumerate(_rows(hyper)):
        p = params[index]
        g = _scaled(grads[index], p, scale)
        if decay:
            g = g + p * decay
        if len(buffers):
            b = g if fresh else buffers[index].to(torch.float32).view_as(p) * momentum + g * (1 - dampening)
            buffers[index].copy_(b.view_as(buffers[index]))
            g = g + b * momentum if nesterov else b
        p.copy_(p - g * lr)
        _store(copies, index, p)


@torch.no_grad()
def _lamb_direction_reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, hyper: Tensor
) -> Tensor:
    if lacks_kernels(params[0].device):
        return foreach.lamb_direction(params, grads, exp_avgs, exp_avg_sqs, hyper)
    sums = []
    for index, (_, beta1, beta2, eps, decay, step, scale) in enumerate(_rows(hyper)):
        p = params[index]
        m, v = _moments(exp_avgs[index], exp_avg_sqs[index], _scaled(grads[index], p, scale), beta1, beta2)
        exp_avgs[index].copy_(m.view_as(exp_avgs[index]))
        exp_avg_sqs[index].copy_(v.view_as(exp_avg_sqs[index]))
        u = _step_of(m, v, 1 / (1 - beta1**step), beta2, step, eps) + p * decay
        sums.append(torch.stack([p.double().square().sum(), u.double().square().sum()]))
    return torch.stack(sums).cpu()


@torch.no_grad()
def _lamb_apply_reference(
    params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, copies: Tensors, hyper: Tensor, rates: Tensor
) -> None:
    if lacks_kernels(params[0].device):
        foreach.lamb_apply(params, exp_avgs, exp_avg_sqs, copies, hyper, rates)
        return
    for index, ((_, beta1, beta2, eps, decay, step, _), (rate,)) in enumerate(
        zip(_rows(hyper), _rows(rates), strict=True)
    ):
        p = params[index]
        m, v = (state[index].to(torch.float32).view_as(p) for state in (exp_avgs, exp_avg_sqs))
        u = _step_of(m, v, 1 / (1 - beta1**step), beta2, step, eps) + p * decay
        p.copy_(p - u * rate)
        _store(copies, index, p)


def _lamb_direction_fake(params: Tensors, *rest: Any) -> Tensor:
    return torch.empty(len(params), 2, dtype=torch.float64)


_adam = define(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] copies, "
    "Tensor hyper, bool decoupled) -> ()",
    _adam_reference,
)
_lion = define(
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] copies, Tensor hyper) -> ()",
    _lion_reference,
)
_adagrad = define(
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] copies, Tensor hyper) -> ()",
    _adagrad_reference,
)
_sgd = define(
    "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] buffers, Tensor(c!)[] copies, Tensor hyper, bool nesterov) "
    "-> ()",
    _sgd_reference,
)
_lamb_direction = define(
    "lamb_direction_(Tensor[] params, Tensor[] grads, Tensor(a!)[] exp_avgs, Tensor(b!)[] exp_avg_sqs, Tensor hyper) "
    "-> Tensor",
    _lamb_direction_reference,
    _lamb_direction_fake,
)
_lamb_apply = define(
    "lamb_apply_(Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor(b!)[] copies, Tensor hyper, "
    "Tensor rates) -> ()",
    _lamb_apply_reference,
)
