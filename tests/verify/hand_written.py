"""Parallel trainings written by hand, each right: tensor, sequence, context, pipeline, expert and data parallel.

Faults are subclasses (`parallel_faults`). Collectives are plain all-reduces and all-gathers of gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.verify.parallel_model import LENGTH, Layer, attended, balance_of, heads_of
from zero_strategy.verify.ready_runs import AveragedRun
from zero_strategy.verify.subject import Subject, VerifySettings


def summed(x: Tensor) -> Tensor:
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def gathered(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts, dim)


def own_part(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Copied(torch.autograd.Function):
    """The same forward; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return summed(gradient)


class Reduced(torch.autograd.Function):
    """Summed over ranks; gradients are the same on each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Gathered(torch.autograd.Function):
    """Parts of ranks as a whole; gradients are summed, and each rank takes its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return own_part(summed(gradient), ctx.dim), None


class Scattered(torch.autograd.Function):
    """Summed over ranks, each of which takes its part; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return own_part(summed(x), dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered(gradient, ctx.dim), None


class HandWritten:
    """All ranks train on the same batches. `PARTS` are parameters of which a rank has a part, and of which dimension.

    A parameter that is not in `PARTS` is whole on each rank; where its gradient is a part of the whole one's, it is in
    `SUMMED`.
    """

    data_rank, data_ranks = 0, 1
    PARTS: dict[str, int] = {}
    SUMMED: tuple[str, ...] = ()

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        self.settings, self.model, self.loss = settings, subject.model, subject.loss
        for name, module in list(self.model.named_modules()):
            for key, parameter in list(module.named_parameters(recurse=False)):
                if (dim := self.part_of(f"{name}.{key}")) is not None:
                    setattr(module, key, nn.Parameter(self.divided(f"{name}.{key}", parameter.detach(), dim)))
        self.optimizer = subject.optimizer(self.model)
        self.last_norm: Tensor | None = None

    def part_of(self, name: str) -> int | None:
        return next((dim for ending, dim in self.PARTS.items() if name.endswith(ending)), None)

    def divided(self, name: str, whole: Tensor, dim: int) -> Tensor:
        if "qkv" in name:  # each of q, k and v by heads
            return own_part(whole.view(3, -1, *whole.shape[1:]), 1).flatten(0, 1).clone()
        return own_part(whole, dim).clone()

    def joined(self, name: str, part: Tensor) -> Tensor:
        dim = self.part_of(name)
        if dim is None:
            return part
        if "qkv" in name:
            return gathered(part.reshape(3, -1, *part.shape[1:]), 1).flatten(0, 1)
        return gathered(part, dim)

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    # ---- the training ----

    def backward(self, batches: Sequence[Tensor]) -> list[Tensor]:
        self.optimizer.zero_grad()
        losses = []
        for batch in batches:
            loss = self.forward(batch)
            self.scaled(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.reduce()
        return losses

    def forward(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def reduce(self) -> None:
        for name, parameter in self.named().items():
            if name.endswith(self.SUMMED) and self.SUMMED:
                assert parameter.grad is not None
                parameter.grad = summed(parameter.grad)

    def squares(self) -> Tensor:
        """The sum of squares of all gradients, whole ones counted once."""
        parts, whole = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for name, parameter in self.named().items():
            assert parameter.grad is not None
            square = parameter.grad.double().square().sum()
            if self.part_of(name) is None:
                whole += square
            else:
                parts += square
        return summed(parts) + whole

    def update(self) -> None:
        if self.settings.clip_norm is not None:
            self.last_norm = self.squares().sqrt()
            factor = (self.settings.clip_norm / (self.last_norm + 1e-6)).clamp(max=1.0)
            for parameter in self.named().values():
                assert parameter.grad is not None
                parameter.grad *= factor.to(parameter.grad.dtype)
        self.optimizer.step()

    # ---- what is shown ----

    def weights(self) -> dict[str, Tensor]:
        return {name: self.joined(name, parameter.detach()) for name, parameter in self.named().items()}

    def gradients(self) -> dict[str, Tensor | None]:
        return {
            name: None if parameter.grad is None else self.joined(name, parameter.grad)
            for name, parameter in self.named().items()
        }

    def norm(self) -> Tensor | None:
        return self.last_norm

    def state(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                key: self.joined(name, value) if isinstance(value, Tensor) and value.dim() else value
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
            for name, parameter in self.named().items()
        }


class TensorParallel(HandWritten):
    """Heads and the MLP's hidden units are divided."""

    PARTS = {
        "qkv.weight": 0, "qkv.bias": 0, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1,
    }  # fmt: skip
    SUMMED: tuple[str, ...] = ("sink",)

    def forward(self, batch: Tensor) -> Tensor:
        model: Any = self.model
        x = model.embedding(batch[:, :-1])
        for layer in model.layers:
            x = self.layer(layer, x)
        return F.cross_entropy(model.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def layer(self, layer: Layer, x: Tensor) -> Tensor:
        q, k, v = heads_of(layer.qkv(self.into(layer.norm1(x))))
        x = x + layer.drop(self.row(layer.out, attended(q, k, v, own_part(layer.sink, 0))))
        return x + layer.drop(self.row(layer.down, torch.tanh(layer.up(self.into(layer.norm2(x))))))

    def into(self, x: Tensor) -> Tensor:
        """On the way into divided columns."""
        return Copied.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    def row(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """A layer whose rows are divided: its bias is added once."""
        return self.out_of(F.linear(x, linear.weight)) + linear.bias

    def out_of(self, x: Tensor) -> Tensor:
        return Reduced.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class SequenceParallel(TensorParallel):
    """Between divided layers a rank has some of the tokens; so gradients of all that is whole are parts."""

    SUMMED = (
        "sink", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "out.bias", "down.bias", "embedding.weight",
    )  # fmt: skip

    def forward(self, batch: Tensor) -> Tensor:
        model: Any = self.model
        x = model.embedding(own_part(batch[:, :-1], 1))
        for layer in model.layers:
            x = self.layer(layer, x)
        labels = own_part(batch[:, 1:], 1)
        own = F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return Reduced.apply(own / batch[:, 1:].numel())  # type: ignore[no-any-return,no-untyped-call]

    def into(self, x: Tensor) -> Tensor:
        return Gathered.apply(x, 1)  # type: ignore[no-any-return,no-untyped-call]

    def out_of(self, x: Tensor) -> Tensor:
        return Scattered.apply(x, 1)  # type: ignore[no-any-return,no-untyped-call]


class ContextParallel(HandWritten):
    """A rank has some of the tokens and all weights; keys and values are gathered."""

    SUMMED = ("",)

    def forward(self, batch: Tensor) -> Tensor:
        model: Any = self.model
        x = model.embedding(own_part(batch[:, :-1], 1))
        for layer in model.layers:
            q, k, v = heads_of(layer.qkv(layer.norm1(x)))
            k, v = Gathered.apply(k, 2), Gathered.apply(v, 2)  # type: ignore[no-untyped-call]
            x = x + layer.out(attended(q, k, v, layer.sink))
            x = x + layer.down(torch.tanh(layer.up(layer.norm2(x))))
        labels = own_part(batch[:, 1:], 1)
        own = F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return Reduced.apply(own / batch[:, 1:].numel())  # type: ignore[no-any-return,no-untyped-call]


class PipelineParallel(HandWritten):
    """Rank 0 has the embedding and a layer, rank 1 a layer and the head, whose weight is a copy of the embedding's."""

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        super().__init__(subject, settings)
        self.rank = dist.get_rank()
        first = self.rank == 0
        self.own = ["embedding.weight"] if first else []
        self.own += [name for name, _ in self.model.named_parameters() if name.startswith(f"layers.{self.rank}.")]
        self.own += [] if first else ["head.weight"]
        self.stage = nn.ParameterList(self.named().values())
        self.optimizer = subject.optimizer(self.stage)

    def named(self) -> dict[str, nn.Parameter]:
        everything = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: everything[name] for name in self.own} if hasattr(self, "own") else everything

    def backward(self, batches: Sequence[Tensor]) -> Any:
        self.optimizer.zero_grad()
        losses = [self.micro_batch(batch, len(batches)) for batch in batches]
        self.reduce()
        return losses if self.rank else None

    def micro_batch(self, batch: Tensor, micros: int) -> Tensor | None:
        model: Any = self.model
        if self.rank == 0:
            x = model.layers[0](model.embedding(batch[:, :-1]))
            dist.send(x.detach(), 1)
            gradient = torch.empty_like(x)
            dist.recv(gradient, 1)
            x.backward(gradient)
            return None
        x = torch.empty(batch.shape[0], LENGTH, model.head.in_features)
        dist.recv(x, 0)
        x.requires_grad_()
        loss = F.cross_entropy(model.head(model.layers[1](x)).flatten(0, 1), batch[:, 1:].flatten())
        (loss / micros).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        dist.send(x.grad, 0)
        return loss.detach()

    def reduce(self) -> None:
        tied: Any = self.model
        tied.head.weight.grad = summed(tied.head.weight.grad)

    def squares(self) -> Tensor:
        counted = [p.grad for name, p in self.named().items() if name != "head.weight"]
        return summed(torch.stack([g.double().square().sum() for g in counted if g is not None]).sum())


class ExpertParallel(HandWritten):
    """A rank has one of two experts and its own batches; all tokens travel to each expert and back."""

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        self.data_rank = self.rank = dist.get_rank()
        self.data_ranks = dist.get_world_size()
        self.other = f"experts.{1 - self.rank}."
        super().__init__(subject, settings)
        self.optimizer = subject.optimizer(nn.ParameterList(self.named().values()))

    def named(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if not name.startswith(self.other)}

    def forward(self, batch: Tensor) -> Tensor:
        model: Any = self.model
        x = model.embedding(batch[:, :-1])
        weights = torch.softmax(model.router(x), dim=-1)
        every, shares = Gathered.apply(x, 0), Gathered.apply(weights, 0)  # type: ignore[no-untyped-call]
        x = x + Scattered.apply(model.experts[self.rank](every) * shares[..., self.rank, None], 0)  # type: ignore[no-untyped-call]
        loss = F.cross_entropy(model.head(x).flatten(0, 1), batch[:, 1:].flatten())
        return loss + 0.5 * self.balance(weights.mean(dim=(0, 1)))

    def balance(self, means: Tensor) -> Tensor:
        return balance_of(means)

    def reduce(self) -> None:
        for name, parameter in self.named().items():
            assert parameter.grad is not None
            if name.startswith("experts."):  # of all ranks' tokens already
                parameter.grad /= self.data_ranks
            else:
                parameter.grad = summed(parameter.grad) / self.data_ranks

    def squares(self) -> Tensor:
        own, whole = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for name, parameter in self.named().items():
            assert parameter.grad is not None
            part = own if name.startswith("experts.") else whole
            part += parameter.grad.double().square().sum()
        return summed(own) + whole


class TokenWeighted(AveragedRun):
    """The mean over all labels of a step, of which ranks and micro-batches have different numbers."""

    reduction = "tokens"

    def tokens(self, batch: Tensor) -> int:
        from tests.verify.parallel_model import tokens_of

        return tokens_of(batch)

    def backward(self, batches: Sequence[Any]) -> list[Tensor]:
        self.optimizer.zero_grad()
        total = self.total(torch.tensor(float(sum(map(self.tokens, batches)))))
        losses = []
        for batch in batches:
            loss = self.forward(batch)
            (loss * self.tokens(batch) / total).backward()
            losses.append(loss.detach())
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad = summed(parameter.grad)
        return losses

    def total(self, own: Tensor) -> Tensor:
        return summed(own)


class Monolithic(AveragedRun):
    """A step in one call, with the sum of losses: gradients are what it has clipped, the loss is their mean."""

    reduction = "sum"
    backward = None  # type: ignore[assignment]

    def step(self, batches: Sequence[Any]) -> Tensor:
        self.optimizer.zero_grad()
        losses = [self.forward(batch) for batch in batches]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = summed(parameter.grad)
        self.update()
        return torch.stack(losses).detach().mean()
