"""Small models whose parallel versions are written by hand: a transformer with attention sinks, and one of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, WORDS, ROWS, LENGTH = 8, 2, 11, 2, 4


class Layer(nn.Module):
    """Attention of two heads, each with a sink (a logit that takes weight and gives nothing), and an MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.sink = nn.Parameter(torch.randn(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.qkv(self.norm1(x)))
        x = x + self.drop(self.out(attended(q, k, v, self.sink)))
        return x + self.drop(self.down(torch.tanh(self.up(self.norm2(x)))))  # type: ignore[no-any-return]


def heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, length, 3 x heads x size) as three of (rows, heads, length, size)."""
    q, k, v = qkv.view(*qkv.shape[:2], 3, -1, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    return q, k, v


def attended(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Attention of all to all; (rows, length, heads x size)."""
    scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
    sinks = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return (weights @ v).transpose(1, 2).flatten(2)


class Net(nn.Module):
    """Two layers, and a head that is the embedding's weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def words() -> list[Tensor]:
    return [torch.randint(0, WORDS, (ROWS, LENGTH + 1)) for _ in range(24)]


def net() -> Any:
    return Net(), adamw, words(), loss_of


def net_sgd() -> Any:
    return Net(), sgd, words(), loss_of


def net_dropout() -> Any:
    return Net(0.2), adamw, words(), loss_of


def net_float64() -> Any:
    return Net().double(), adamw, words(), lambda m, b: F.cross_entropy(m(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())


def net_bf16() -> Any:
    return Net().bfloat16(), adamw, words(), loss_of


# ----------------------------------------------------------------------------------------------------------- experts


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Two experts, of which each token takes both by a router's weights; the router has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and each expert's mean weight."""
        x = self.embedding(tokens)
        weights = torch.softmax(self.router(x), dim=-1)
        x = x + sum(expert(x) * weights[..., number, None] for number, expert in enumerate(self.experts))
        return self.head(x), weights.mean(dim=(0, 1))


def balance_of(means: Tensor) -> Tensor:
    return means.square().sum()


def mixed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits, means = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.5 * balance_of(means)


def mixture() -> Any:
    return Mixture(), adamw, words(), mixed_loss


# ------------------------------------------------------------------------------------------------- uneven token counts


PADDING = -100


def padded_loss(model: nn.Module, batch: Tensor) -> Tensor:
    inputs, labels = batch[:, :-1].clamp(min=0), batch[:, 1:]
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=PADDING)


def padded() -> Any:
    """Batches of different numbers of labels."""
    batches = words()
    for number, batch in enumerate(batches):
        batch[0, 2 + number % 3 :] = PADDING
    return Net(), adamw, batches, padded_loss


def tokens_of(batch: Tensor) -> int:
    return int((batch[:, 1:] != PADDING).sum())


# ---------------------------------------------------------------------------------------------------------- other kinds


class Convolutional(nn.Module):
    """Convolutions with running statistics, which each rank has of its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(3 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images() -> Any:
    batches = [(torch.randn(4, 3, 4, 4), torch.randint(0, 5, (4,))) for _ in range(24)]
    return Convolutional(), lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9), batches, classified


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0])  # type: ignore[no-any-return]


def series() -> Any:
    batches = [torch.randn(3, 5, WIDTH) for _ in range(24)]
    return Recurrent(), lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2), batches, lambda m, b: m(b).square().mean()


def net_adagrad() -> Any:
    return Net(), lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), words(), loss_of


def net_groups() -> Any:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-2}]
        return torch.optim.Adam(groups, lr=1e-2, amsgrad=True)

    return Net(), optimizer, words(), loss_of
