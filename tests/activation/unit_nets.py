"""Units with everything that a checkpoint gets wrong easily."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Pair(NamedTuple):
    scale: Tensor
    shift: Tensor | None


class Layer(nn.Module):
    """Attention and an MLP with dropout, also inside of attention."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.norm1(x), mask)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Transformer(nn.Module):
    """The plain case."""

    def __init__(self, depth: int = 4, width: int = WIDTH, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Layer(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Odd(nn.Module):
    """A unit that takes names, containers, None and numbers, changes buffers and fills a list of its caller's."""

    seen: Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.spectral = nn.utils.spectral_norm(nn.Linear(width, width))
        self.inner = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))

    def inside(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.inner(x)), 0.3, self.training)

    def forward(
        self, inputs: dict[str, Any], log: list[int], *, pair: Pair, power: int = 2, nothing: Any = None
    ) -> tuple[dict[str, Tensor], Tensor, None, int]:
        assert nothing is None
        self.seen += 1
        log.append(power)
        (x, tokens), flag = inputs["both"], inputs["flag"]
        x = self.norm(x) * pair.scale
        if pair.shift is not None:
            x = x + pair.shift
        x = F.dropout(self.spectral(x) ** power, 0.1, self.training)
        x = x + checkpoint(self.inside, x, use_reentrant=False) + (tokens[:, None] if flag else 0)
        return {"x": x}, tokens + 1, None, power


class Strange(nn.Module):
    """Such units one after the other; with its first inputs without gradient."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(()))
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(len(x)) % 2
        for number, block in enumerate(self.blocks):
            pair = Pair(self.scale, None if number % 2 else self.scale * 0.1)
            found, tokens, _, _ = block({"both": (x, tokens), "flag": number == 1}, self.log, pair=pair, power=3)
            x = found["x"]
        return x


class Adapted(nn.Module):
    """A frozen layer with a small trained detour, as LoRA has it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = Layer(width)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(F.dropout(self.down(x), 0.2, self.training))
        return out


class Adapters(nn.Module):
    """Nothing before the first unit is trained."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.stem.requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(depth))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def seeded(build: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """A module with the same weights every time; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args, **kwargs)
