"""The byte-level GPT for `zero-strategy verify`: is a configuration right, on this model?

zero-strategy verify examples/verify_gpt.py:factory --strategy zero3_offload --ranks 2 --steps 5 --clip 1.0
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpt_lightning import decay_groups
from gpt_model import GPT, GPTConfig

Parts = tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer], list[Tensor], Callable[[Any, Tensor], Tensor]]
"""What a factory returns: the model, what makes its optimizer, batches, and the loss of one."""


def factory() -> Parts:
    """Model, optimizer, batches and loss; every rank calls this, and gets the same."""
    model = GPT(GPTConfig(block_size=32, n_layer=2, n_head=2, d_model=32))
    batches = [torch.randint(0, 256, (4, 33)) for _ in range(8)]
    return model, optimizer_of, batches, loss_of


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """As the example trains: matrices decay, norms do not."""
    return torch.optim.AdamW(decay_groups(model, weight_decay=0.1), lr=1e-3)


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Mean cross entropy of the next bytes."""
    loss: Tensor = model.loss(windows)
    return loss
