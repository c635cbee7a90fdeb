"""Norms and optimizer steps by torch's own multi-tensor kernels: what runs on a device without the native library.

A list of tensors takes a launch for some hundred pieces of 65,536 elements, as in `torch.nn.utils.clip_grad_norm_` with
`foreach=True` and `torch.optim.AdamW` with `fused=True`, instead of some twenty for each tensor.

*Bits.* Adam with float32 moments is torch's fused kernel, and has its bits. All else does the operations of the
references in `ops.optimizers` in their order, each rounded on its own: the bits of the native kernels, wherever the
device divides and takes roots as IEEE 754 says (CUDA's kernels of torch do).

*Memory.* Temporaries are float32 and those of `BATCH` elements, whatever the size of the model. float32 gradients that
need no factor have none at all under Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_strategy.runtime import torch_private as private

Tensors = Sequence[Tensor]
Row = list[float]
BATCH = 1 << 22
"""Elements that have temporaries at a time: 16 MiB each. A launch over so many lasts longer than the host needs."""
_COUNTED = 1 << 24
"""Elements of which it is asked at a time how many are not finite: a byte each."""
_WITHOUT_OVERFLOW = (1.0, 2.0, math.inf)
"""Orders for which the float64 sum of powers of finite float32 elements is finite."""


# ---- norms ----


def power_sums(tensors: Tensors, order: float) -> Tensor:
    """Sum of |x|^order (inf: the largest |x|) of every tensor, float64, on their device; see `ops.grad_stats`."""
    norms: dict[int, Tensor] = {}
    full = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    for alike in _by_key(full, lambda index: tensors[index].dtype):
        norms.update(zip(alike, _norms([tensors[index] for index in alike], order), strict=True))
    if len(full) < len(tensors):
        nothing = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        norms = {index: norms.get(index, nothing) for index in range(len(tensors))}
    found = torch.stack([norms[index] for index in range(len(tensors))])
    return found if math.isinf(order) or order == 1 else found.square() if order == 2 else found**order


def count_nonfinite(tensor: Tensor) -> Tensor:
    """Number of elements that are infinite or NaN, 0-d int64."""
    parts = [part.isfinite().logical_not().sum() for part in tensor.reshape(-1).split(_COUNTED)]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def stats_on_host(tensors: Tensors, order: float) -> tuple[Tensor, Tensor]:
    """The results of `ops.grad_stats` on the host: one wait, and no second pass where all is finite."""
    sums = power_sums(tensors, order).cpu()
    counts = torch.zeros(len(tensors), dtype=torch.int64)
    unsure = (~sums.isfinite()).nonzero().flatten().tolist()
    if unsure:  # some hundred launches for once: a step with such gradients is left out anyway
        counts[unsure] = torch.stack([count_nonfinite(tensors[index]) for index in unsure]).cpu()
    return sums, counts


def _norms(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Norms of tensors of one dtype, none of them empty."""
    if order in _WITHOUT_OVERFLOW:
        found: list[Tensor] = private.foreach_norm(tensors, order, dtype=torch.float64)
        return found
    return [_norm(tensor.reshape(-1), order) for tensor in tensors]


def _norm(flat: Tensor, order: float) -> Tensor:
    """One of another order, of which torch turns all elements to float64 first: a part at a time."""
    parts = [torch.linalg.vector_norm(part, order, dtype=torch.float64) for part in flat.split(BATCH // 2)]
    norm: Tensor = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), order)
    return norm


# ---- steps ----


def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    copies: Tensors,
    hyper: Tensor,
    decoupled: bool,
) -> None:
    """See `ops.adam_`."""
    fused = params[0].device.type in private.fused_devices()
    for alike in _alike(hyper.tolist(), params, grads, exp_avgs, exp_avg_sqs, copies):
        row, (p, g, m, v, c) = alike.row, alike.lists
        if not (fused and m[0].dtype == v[0].dtype == torch.float32):
            for batch in alike.batches():
                p, g, m, v, c = batch.lists
                _adam_as_written(row, p, g, m, v, c, decoupled)
        elif abs(row[-1]) == 1 and g[0].dtype == torch.float32:
            _fused_adam(row, p, g, m, v, c, decoupled)
        else:
            for batch in alike.batches():
                p, g, m, v, c = batch.lists
                _fused_adam(row, p, _scaled(g, abs(row[-1])), m, v, c, decoupled)


def _fused_adam(row: Row, p: Tensors, g: Tensors, m: Tensors, v: Tensors, c: Tensors, decoupled: bool) -> None:
    lr, beta1, beta2, eps, decay, step, scale = row
    # filled on the device: a copy from the host would wait for all that is queued there; the kernel only reads it
    number = torch.full((), step, dtype=torch.float32, device=p[0].device)
    update = private.fused_adamw_ if decoupled else private.fused_adam_
    update(
        p, g, m, v, [], [number] * len(p), lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps,
        amsgrad=False, maximize=scale < 0,
    )  # fmt: skip
    _store(c, p)


def _adam_as_written(
    row: Row, p: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, copies: Tensors, decoupled: bool
) -> None:
    lr, beta1, beta2, eps, decay, step, scale = row
    g = _scaled(grads, scale)
    if decay and not decoupled:
        private.foreach_add_(g, private.foreach_mul(p, decay))
    m, v = _moments(g, exp_avgs, exp_avg_sqs, beta1, beta2)
    _store(exp_avgs, m)
    _store(exp_avg_sqs, v)
    _to_direction(m, v, lr / (1 - beta1**step), beta2, step, eps)
    if decoupled:
        private.foreach_mul_(p, 1 - lr * decay)
    private.foreach_sub_(p, m)
    _store(copies, p)


def lion(params: Tensors, grads: Tensors, exp_avgs: Tensors, copies: Tensors, hyper: Tensor) -> None:
    """See `ops.lion_`."""
    for batch in _alike_batches(hyper, params, grads, exp_avgs, copies):
        lr, beta1, beta2, decay, scale = batch.row
        p, grads, moments, low = batch.lists
        g, m = _scaled(grads, scale), _floats(moments)
        mixed, new = private.foreach_mul(m, beta1), private.foreach_mul(m, beta2)
        private.foreach_add_(mixed, private.foreach_mul(g, 1 - beta1))
        private.foreach_add_(new, private.foreach_mul(g, 1 - beta2))
        _store(moments, new)
        flat = torch.cat(mixed)  # none of the kernels over lists keeps NaN, as the sign of NaN is 0
        direction = torch.where(flat.isnan(), flat, flat.sign()).mul_(lr)
        private.foreach_mul_(p, 1 - lr * decay)
        private.foreach_sub_(p, list(direction.split([each.numel() for each in mixed])))
        _store(low, p)


def adagrad(params: Tensors, grads: Tensors, sums: Tensors, copies: Tensors, hyper: Tensor) -> None:
    """See `ops.adagrad_`."""
    for batch in _alike_batches(hyper, params, grads, sums, copies):
        lr, lr_decay, eps, decay, step, scale = batch.row
        p, grads, sums, low = batch.lists
        g = _scaled(grads, scale)
        if decay:
            private.foreach_add_(g, private.foreach_mul(p, decay))
        h = private.foreach_mul(g, g)
        private.foreach_add_(h, _floats(sums))
        _store(sums, h)
        roots = private.foreach_sqrt(h)
        private.foreach_add_(roots, eps)
        private.foreach_mul_(g, lr / (1 + (step - 1) * lr_decay))
        private.foreach_div_(g, roots)
        private.foreach_sub_(p, g)
        _store(low, p)


def sgd(params: Tensors, grads: Tensors, buffers: Tensors, copies: Tensors, hyper: Tensor, nesterov: bool) -> None:
    """See `ops.sgd_`."""
    for batch in _alike_batches(hyper, params, grads, buffers, copies):
        lr, momentum, dampening, decay, fresh, scale = batch.row
        p, grads, buffers, low = batch.lists
        g = _scaled(grads, scale)
        if decay:
            private.foreach_add_(g, private.foreach_mul(p, decay))
        if buffers and fresh:
            _store(buffers, g)
            if nesterov:
                private.foreach_add_(g, private.foreach_mul(g, momentum))
        elif buffers:
            b = private.foreach_mul(_floats(buffers), momentum)
            private.foreach_add_(b, private.foreach_mul(g, 1 - dampening))
            _store(buffers, b)
            if nesterov:
                private.foreach_mul_(b, momentum)
                private.foreach_add_(g, b)
            else:
                g = b
        private.foreach_mul_(g, lr)
        private.foreach_sub_(p, g)
        _store(low, p)


def lamb_direction(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, hyper: Tensor) -> Tensor:
    """See `ops.lamb_direction_`."""
    owners: list[int] = []
    found: list[Tensor] = []
    for batch in _alike_batches(hyper, params, grads, exp_avgs, exp_avg_sqs):
        _, beta1, beta2, eps, decay, step, scale = batch.row
        p, g, exp_avg, exp_avg_sq = batch.lists
        m, v = _moments(_scaled(g, scale), exp_avg, exp_avg_sq, beta1, beta2)
        _store(exp_avg, m)
        _store(exp_avg_sq, v)
        _to_direction(m, v, 1 / (1 - beta1**step), beta2, step, eps)
        private.foreach_add_(m, private.foreach_mul(p, decay))
        owners += batch.indices
        found.append(torch.stack([power_sums(p, 2.0), power_sums(m, 2.0)], dim=1))
    sums = torch.zeros(len(params), 2, dtype=torch.float64)
    return sums.index_add_(0, torch.tensor(owners), torch.cat(found).cpu()) if found else sums


def lamb_apply(
    params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, copies: Tensors, hyper: Tensor, rates: Tensor
) -> None:
    """See `ops.lamb_apply_`."""
    sizes = rates.flatten().tolist()
    for batch in _alike_batches(hyper, params, exp_avgs, exp_avg_sqs, copies):
        _, beta1, beta2, eps, decay, step, _ = batch.row
        p, m, v, low = batch.lists
        u = private.foreach_mul(_floats(m), 1 / (1 - beta1**step))
        _divide_by_root(u, _floats(v), beta2, step, eps)
        private.foreach_add_(u, private.foreach_mul(p, decay))
        private.foreach_mul_(u, [sizes[index] for index in batch.indices])
        private.foreach_sub_(p, u)
        _store(low, p)


def _moments(
    g: list[Tensor], exp_avgs: Tensors, exp_avg_sqs: Tensors, beta1: float, beta2: float
) -> tuple[list[Tensor], list[Tensor]]:
    """New ones in float32, before they are rounded to where they are kept; `g` is used up."""
    old = _floats(exp_avgs)
    m = private.foreach_sub(g, old)
    private.foreach_mul_(m, 1 - beta1)
    private.foreach_add_(m, old)
    v = private.foreach_mul(_floats(exp_avg_sqs), beta2)
    private.foreach_mul_(g, g)
    private.foreach_mul_(g, 1 - beta2)
    private.foreach_add_(v, g)
    return m, v


def _to_direction(m: list[Tensor], v: list[Tensor], size: float, beta2: float, step: float, eps: float) -> None:
    """m becomes m * size / (root of v without bias + eps)."""
    private.foreach_mul_(m, size)
    _divide_by_root(m, v, beta2, step, eps)


def _divide_by_root(m: list[Tensor], v: list[Tensor], beta2: float, step: float, eps: float) -> None:
    roots = private.foreach_sqrt(v)
    private.foreach_mul_(roots, 1 / math.sqrt(1 - beta2**step))
    private.foreach_add_(roots, eps)
    private.foreach_div_(m, roots)


# ---- lists ----


@dataclass
class _Alike:
    """Tensors that one call of a kernel can take: equal hyper-parameters, and lists of one dtype each.

    Attributes:
        row: The hyper-parameters.
        indices: Of the tensors in the op's lists.
        lists: Flat tensors, none of them empty; a list may be left out, and is empty then.
    """

    row: Row
    indices: list[int]
    lists: list[list[Tensor]]

    def batches(self) -> Iterator[_Alike]:
        """The tensors, divided so that temporaries of one have at most `BATCH` elements; a large tensor is cut."""
        batch, free = _Alike(self.row, [], [[] for _ in self.lists]), BATCH
        for position, index in enumerate(self.indices):
            numel = self.lists[0][position].numel()
            for start in range(0, numel, BATCH):
                stop = min(start + BATCH, numel)
                if stop - start > free:
                    yield batch
                    batch, free = _Alike(self.row, [], [[] for _ in self.lists]), BATCH
                batch.indices.append(index)
                for part, tensors in zip(batch.lists, self.lists, strict=True):
                    if tensors:
                        part.append(tensors[position][start:stop])
                free -= stop - start
        yield batch


def _alike(rows: Sequence[Row], *lists: Tensors) -> Iterator[_Alike]:
    flat = [[tensor.view(-1) for tensor in tensors] for tensors in lists]
    full = [index for index, tensor in enumerate(flat[0]) if tensor.numel()]
    for alike in _by_key(full, lambda index: (*rows[index], *(each[index].dtype for each in flat if each))):
        chosen = [[tensors[index] for index in alike] if tensors else [] for tensors in flat]
        yield _Alike(rows[alike[0]], alike, chosen)


def _alike_batches(hyper: Tensor, *lists: Tensors) -> Iterator[_Alike]:
    for alike in _alike(hyper.tolist(), *lists):
        yield from alike.batches()


def _by_key(indices: Sequence[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Indices whose keys are equal, in the order of the first of each."""
    found: dict[Hashable, list[int]] = {}
    for index in indices:
        found.setdefault(key(index), []).append(index)
    return list(found.values())


def _floats(tensors: Tensors) -> list[Tensor]:
    """The tensors in float32: themselves where they are."""
    return list(tensors) if tensors[0].dtype == torch.float32 else _copied(tensors)


def _copied(tensors: Tensors) -> list[Tensor]:
    room = torch.empty(sum(map(Tensor.numel, tensors)), dtype=torch.float32, device=tensors[0].device)
    copies = list(room.split(list(map(Tensor.numel, tensors))))
    private.foreach_copy_(copies, list(tensors))
    return copies


def _scaled(gradients: Tensors, scale: float) -> list[Tensor]:
    """gradients * scale in float32, which the caller may change."""
    scaled: list[Tensor]
    if gradients[0].dtype == torch.float32:
        scaled = private.foreach_mul(list(gradients), scale)
    else:
        scaled = _copied(gradients)
        private.foreach_mul_(scaled, scale)
    return scaled


def _store(targets: Tensors, values: Tensors) -> None:
    if targets:
        private.foreach_copy_(list(targets), list(values))
