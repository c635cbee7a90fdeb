"""Handing a tensor to a function so that the caller's own name does not keep it alive: `WrappedTensor`.

    wrapped = WrappedTensor(logits)
    del logits                          # the wrapper holds the only reference now
    loss = head(wrapped)                # head: x = wrapped.unwrap(); ...; del x  frees the memory half-way

A caller's argument lives until the call returns, however early the callee is done with it; what is inside the wrapper
belongs to whoever unwraps it.
"""

from __future__ import annotations

from torch import Tensor


class WrappedTensor:
    """One reference to a tensor, to be taken out once.

    Args:
        tensor: What is handed on.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def unwrap(self) -> Tensor:
        """The tensor, of which this object keeps nothing.

        Raises:
            RuntimeError: If it was taken out before.
        """
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise RuntimeError("this WrappedTensor was unwrapped before; it hands its tensor out once, to one owner")
        return tensor
