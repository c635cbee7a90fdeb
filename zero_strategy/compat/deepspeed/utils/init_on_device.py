"""`deepspeed.utils.init_on_device`: modules that are built on some device, in some dtype."""

from __future__ import annotations

import types

import torch


class OnDevice:
    """Tensors that are made inside are of a device and, where they are of no certain dtype, of that one.

    A model that is built on the meta device is made real, unit by unit, by `initialize`.

    Args:
        dtype: Floating-point dtype.
        device: The device.
        enabled: Do nothing if False.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._before: torch.dtype | None = None

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self.enabled:
            assert self._before is not None
            self.device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)
