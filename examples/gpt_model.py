"""A byte-level GPT in plain torch: rotary positions, pre-norm blocks, tied embeddings."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The architecture. It is saved as ``model_config.json`` beside the checkpoints."""

    block_size: int
    """Bytes per training window, and the longest context used in sampling."""
    n_layer: int
    n_head: int
    d_model: int
    vocab_size: int = 256

    def __post_init__(self) -> None:
        if self.d_model % self.n_head or (self.d_model // self.n_head) % 2:
            raise ValueError(f"d_model={self.d_model} is no multiple of 2 * n_head={2 * self.n_head}")

    @property
    def residual_std(self) -> float:
        """Smaller in deeper models, so that 2 * n_layer additions keep the residual stream's size."""
        return INIT_STD / math.sqrt(2 * self.n_layer)


INIT_STD = 0.02


class Linear(nn.Linear):
    """A bias-free linear layer that knows its own initialisation.

    Each module here has a complete ``reset_parameters``, so a model built on the meta device can be
    materialised module by module, as a sharding strategy does.
    """

    def __init__(self, n_in: int, n_out: int, std: float = INIT_STD) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """An embedding with GPT's initialisation."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class TiedHead(nn.Linear):
    """The output layer: its weight is the token embedding's, which also initialises it."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
        self.weight = embedding.weight

    def reset_parameters(self) -> None:
        pass


def rotary_tables(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency, shape (length, head_dim / 2).

    Computed in float32 on each call: cheaper than a buffer is to keep at full precision under bf16.
    """
    frequency = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    position = torch.arange(length, device=like.device, dtype=torch.float32)
    angle = torch.outer(position, 10000.0**-frequency)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension against each other by each position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.qkv = Linear(config.d_model, 3 * config.d_model)
        self.proj = Linear(config.d_model, config.d_model, std=config.residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.d_model, 4 * config.d_model)
        self.down = Linear(4 * config.d_model, config.d_model, std=config.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer block; a sharding strategy takes it as one unit."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in, next-byte logits out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = TiedHead(self.embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, length, vocab_size) for integer tokens of shape (batch, length)."""
        x = self.embedding(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.config.d_model // self.config.n_head, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats of predicting each byte of a window from those before it."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
