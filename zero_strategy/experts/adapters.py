"""LoRA on experts: adapters of stacked weights (PEFT's `target_parameters`), of which ranks use their part.

PEFT keeps A as (experts x rank, inputs) and B as (outputs, rank x experts), and adds scale x B A to the stack for the
time of a forward. All ranks have both whole, as they are small; a rank's forward takes the part of its experts, and the
mean of gradients over all ranks is that of all tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from zero_strategy.runtime.module_hooks import EphemeralHook


def wrappers_of(module: Any) -> list[Any]:
    """PEFT's modules around a layer of experts, each of which adapts one of its parameters; outermost first."""
    found = []
    while hasattr(module, "lora_A") and hasattr(module, "parameter_name") and hasattr(module, "base_layer"):
        found.append(module)
        module = module.base_layer
    return found


def base_of(module: Any) -> Any:
    """The layer of experts inside of PEFT's modules; the module itself where there are none."""
    wrappers = wrappers_of(module)
    return wrappers[-1].base_layer if wrappers else module


class AdapterCalls(EphemeralHook):
    """Hooks around the forward of one of PEFT's modules.

    Args:
        wrapper: The module.
        held: Numbers of this rank's experts.
        experts: Number of all experts.
    """

    def __init__(self, wrapper: Any, held: range, experts: int) -> None:
        self._wrapper, self._held, self._experts = wrapper, held, experts
        before = wrapper.register_forward_pre_hook(self)
        after = wrapper.register_forward_hook(_Restore(self), always_call=True)
        self._handles = [before, after]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Show the adapters of this rank's experts in place of all."""
        for linear, dim in self._linears():
            # For the time of a forward, as PEFT itself shows adapted weights; the parameter stays the same object.
            taken = _OwnExperts(self._held, self._experts, dim)
            parametrize.register_parametrization(linear, "weight", taken, unsafe=True)
        self._wrapper.num_experts = len(self._held)

    def restore(self) -> None:
        """Show all again."""
        self._wrapper.num_experts = self._experts
        for linear, _ in self._linears():
            if parametrize.is_parametrized(linear, "weight"):
                parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)

    def _linears(self) -> list[tuple[nn.Module, int]]:
        """Layers A and B of all adapters, and the dimension along which their weights have experts."""
        return [(layer, 0) for layer in self._wrapper.lora_A.values()] + [
            (layer, 1) for layer in self._wrapper.lora_B.values()
        ]


class _Restore(EphemeralHook):
    def __init__(self, calls: AdapterCalls) -> None:
        self._calls = calls

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls.restore()


class _OwnExperts(nn.Module):
    """A weight's part for some experts."""

    def __init__(self, held: range, experts: int, dim: int) -> None:
        super().__init__()
        self._held, self._experts, self._dim = held, experts, dim

    def forward(self, weight: Tensor) -> Tensor:
        """Rows of A of the experts, which come one after the other; columns of B, where experts alternate."""
        if self._dim == 0:
            parts = weight.view(self._experts, -1, weight.shape[1])
            return parts[self._held.start : self._held.stop].reshape(-1, weight.shape[1])
        parts = weight.view(weight.shape[0], -1, self._experts)
        return parts[..., self._held.start : self._held.stop].reshape(weight.shape[0], -1)
