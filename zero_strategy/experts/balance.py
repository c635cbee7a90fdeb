"""The load-balancing loss of Hugging Face models, over the tokens of all ranks.

Shazeer et al. (arXiv 1701.06538), Fedus et al. (arXiv 2101.03961, equations 4 to 6): experts x sum over experts of
(rows per token for the expert) x (mean probability of the expert). It is no mean over tokens, so the mean of ranks'
losses is another number than the loss of all tokens. Where ranks divide experts it is computed from the sums of all
ranks: each rank's loss becomes one process's, and so does the mean of the gradients.

A model says what it has by the attributes `router_aux_loss_coef`, `num_experts` and `num_experts_per_tok`, and its
output by `aux_loss` and `router_logits`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import Communicator
from zero_strategy.runtime.module_hooks import EphemeralHook

_SAYS = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")


def join_balance_losses(root: nn.Module, axes: Sequence[Communicator], ranks: int) -> list[Any]:
    """Let models in a module compute their load-balancing losses over all ranks.

    Args:
        root: The module.
        axes: Axes of the mesh of data-parallel ranks.
        ranks: Number of these.

    Returns:
        Handles of hooks, one for each model that has such a loss.
    """
    found = [module for module in root.modules() if all(hasattr(module, name) for name in _SAYS)]
    return [module.register_forward_hook(_BalanceLoss(module, axes, ranks), with_kwargs=True) for module in found]


class _BalanceLoss(EphemeralHook):
    """The hook after one model's forward."""

    def __init__(self, model: nn.Module, axes: Sequence[Communicator], ranks: int) -> None:
        self._axes, self._ranks, self._known = list(axes), ranks, False
        self._signature = inspect.signature(type(model).forward)

    def __call__(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Put the loss of all ranks' tokens in the place of this rank's."""
        aux, logits = getattr(output, "aux_loss", None), getattr(output, "router_logits", None)
        if not isinstance(aux, Tensor) or not logits:
            return output
        mask = self._signature.bind(model, *args, **kwargs).arguments.get("attention_mask")
        counts, chances, tokens = sums_of(logits, model.num_experts_per_tok, mask)
        experts = counts.numel()
        own = experts * (counts * chances).sum() / tokens**2
        if not self._known:
            # A model with a loss of another kind keeps it; once, since the host waits for a device here.
            self._known = True
            if not torch.allclose(own.detach().float(), aux.detach().float().to(own.device), rtol=1e-3, atol=1e-6):
                warnings.warn(
                    f"the router loss of {type(model).__name__} is not the one of Switch Transformers: with "
                    "mesh.expert it stays that of each rank's own tokens, and the mean over ranks is trained",
                    stacklevel=2,
                )
                self._axes = []
        if not self._axes:
            return output
        totals = self._over_ranks(torch.cat([counts, chances.detach(), tokens.reshape(1)]).double())
        all_counts, all_chances, all_tokens = totals[:experts], totals[experts:-1], totals[-1]
        # The mean over ranks of these is the loss of all tokens, and only probabilities have a gradient.
        share = experts * self._ranks * (all_counts * chances).sum() / all_tokens**2
        value = experts * (all_counts * all_chances).sum() / all_tokens**2
        joined = (share + (value - share).detach()).to(aux.dtype)
        if isinstance(output.loss, Tensor):
            factor = model.router_aux_loss_coef
            output.loss = output.loss - factor * aux.to(output.loss.device) + factor * joined.to(output.loss.device)
        output.aux_loss = joined
        return output

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Sums over all ranks, in the order of ranks."""
        for axis in self._axes:
            if axis.size > 1:
                everyone = values.new_empty(axis.size, values.numel())
                everyone[axis.rank] = values
                axis.all_gather(everyone.view(-1), of="router losses").wait()
                values = everyone.sum(dim=0)
        return values


def sums_of(logits: Sequence[Tensor], choices: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over tokens and layers.

    Args:
        logits: Of each layer's router, (tokens, experts).
        choices: Experts of a token.
        mask: (batch, tokens); zero: padding, which does not count.

    Returns:
        Rows of each expert, (experts,); probabilities of each, (experts,), with gradient; tokens, 0-d. Float32.
    """
    device, experts = logits[0].device, logits[0].shape[-1]
    counts = torch.zeros(experts, device=device)
    chances, tokens = torch.zeros(experts, device=device), torch.zeros((), device=device)
    for layer in logits:
        found = layer.to(device).softmax(dim=-1)
        chosen = found.topk(choices, dim=-1).indices
        weights = torch.ones(len(found), device=device) if mask is None else mask.reshape(-1).to(device).float()
        counts = counts.scatter_add(0, chosen.reshape(-1), weights.repeat_interleave(choices))
        chances = chances + (found.float() * weights.unsqueeze(-1)).sum(dim=0)
        tokens = tokens + weights.sum()
    return counts, chances, tokens
