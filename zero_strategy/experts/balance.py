"""The load-balancing loss of Hugging Face models, over the tokens of all ranks.

Shazeer et al. (arXiv 1701.06538), Fedus et al. (arXiv 2101.03961, equations 4 to 6): experts x sum over experts of
(rows per token for the expert) x (mean probability of the expert). It is no mean over tokens, so the mean of ranks'
losses is another number than the loss of all tokens. Where ranks divide experts it is computed from the sums of all
ranks: each rank's loss becomes one process's, and so does the mean of the gradients.

A model says what it has by `router_aux_loss_coef` and `num_experts_per_tok`, its attributes or those of its
configuration, of the text part where it has several, and its output by `aux_loss` and `router_logits`.
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

_WEIGHT, _CHOICES = "router_aux_loss_coef", "num_experts_per_tok"


def join_balance_losses(root: nn.Module, axes: Sequence[Communicator], ranks: int) -> list[Any]:
    """Let models in a module compute their load-balancing losses over all ranks.

    Args:
        root: The module.
        axes: Axes of the mesh of data-parallel ranks.
        ranks: Number of these.

    Returns:
        Handles of hooks, one for each model that has such a loss.
    """
    found = [each for each in root.modules() if _has_a_loss(each) and _said(each, _WEIGHT) is not None]
    return [module.register_forward_hook(_BalanceLoss(module, axes, ranks), with_kwargs=True) for module in found]


def _has_a_loss(module: nn.Module) -> bool:
    """True for models of transformers with a head; their base models give logits of routers, and no loss."""
    if all(base.__name__ != "PreTrainedModel" for base in type(module).__mro__):
        return all(hasattr(module, name) for name in (_WEIGHT, _CHOICES))
    return "labels" in inspect.signature(type(module).forward).parameters


def _said(model: Any, name: str) -> Any:
    """A number that a model or its configuration gives; None: neither does."""
    config = vars(model).get("config")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((getattr(each, name) for each in (model, config, text) if hasattr(each, name)), None)


class _BalanceLoss(EphemeralHook):
    """The hook after one model's forward."""

    def __init__(self, model: nn.Module, axes: Sequence[Communicator], ranks: int) -> None:
        self._axes, self._ranks = list(axes), ranks
        self._known = self._warned = False
        self._signature = inspect.signature(type(model).forward)

    def __call__(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Put the loss of all ranks' tokens in the place of this rank's."""
        aux, logits = getattr(output, "aux_loss", None), getattr(output, "router_logits", None)
        if isinstance(output, tuple) and not hasattr(output, "aux_loss") and _asks_for_logits(model, kwargs):
            self._warn(model, "is in a tuple (return_dict=False), where it cannot be told from the rest")
        if not isinstance(aux, Tensor) or not logits:
            return output
        mask = self._signature.bind(model, *args, **kwargs).arguments.get("attention_mask")
        counts, chances, tokens = sums_of(logits, _said(model, _CHOICES), mask)
        experts = counts.numel()
        own = (experts * (counts * chances).sum() / tokens**2).detach()
        if not self._axes:
            return output
        # Zero where no token counts, and both are no number.
        near = torch.isclose(own.float(), aux.detach().float().to(own.device), rtol=1e-3, atol=1e-6, equal_nan=True)
        told = torch.cat([counts, chances.detach(), tokens.reshape(1), (~near).reshape(1).float()]).double()
        totals = self._over_ranks(told)
        if not self._known:
            # A model with a loss of another kind keeps it, on all ranks alike; once, since the host waits here.
            self._known = True
            if float(totals[-1]):
                self._axes = []
                self._warn(model, "is not the one of Switch Transformers")
                return output
        all_counts, all_chances, all_tokens = totals[:experts], totals[experts:-2], totals[-2]
        # The mean over ranks of these is the loss of all tokens, and only probabilities have a gradient.
        share = experts * self._ranks * (all_counts * chances).sum() / all_tokens**2
        value = experts * (all_counts * all_chances).sum() / all_tokens**2
        joined = (share + (value - share).detach()).to(aux.dtype)
        if isinstance(output.loss, Tensor):
            factor = _said(model, _WEIGHT)
            output.loss = output.loss - factor * aux.to(output.loss.device) + factor * joined.to(output.loss.device)
        output.aux_loss = joined
        return output

    def _warn(self, model: nn.Module, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the router loss of {type(model).__name__} {what}: with mesh.expert it stays that of each rank's own "
                "tokens, and the mean over ranks is trained",
                stacklevel=3,
            )

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Sums over all ranks, in the order of ranks."""
        for axis in self._axes:
            if axis.size > 1:
                everyone = values.new_empty(axis.size, values.numel())
                everyone[axis.rank] = values
                axis.all_gather(everyone.view(-1), of="router losses").wait()
                values = everyone.sum(dim=0)
        return values


def _asks_for_logits(model: Any, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_router_logits")
    return bool(_said(model, "output_router_logits") if asked is None else asked)


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
