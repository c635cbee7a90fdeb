"""Numbers and arrays of numpy in a pickle, as Python numbers and torch tensors.

numpy's own `__setstate__` functions trust their input down to memory, so they are not called: a dtype is read from its
code, and values from their bytes. Source of the format: `numpy.dtype.__reduce__`, `numpy.ndarray.__reduce__`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

_CODES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}


class NumpyDtype:
    """A dtype by its code; the byte order follows as the pickle's state."""

    __slots__ = ("_dtype",)
    _dtype: np.dtype[Any]

    def __init__(self, code: Any, *rest: Any) -> None:
        if code not in _CODES:
            raise ValueError(f"a numpy value has the dtype {code!r}; read are {sorted(_CODES)}")
        self._dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self._dtype = self._dtype.newbyteorder(state[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, in native or foreign byte order."""
        return self._dtype


class NumpyArray:
    """An array whose shape, dtype and bytes come as the pickle's state."""

    __slots__ = ("tensor",)

    def __init__(self, *args: Any) -> None:
        self.tensor = torch.empty(0)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], NumpyDtype):
            raise ValueError("a numpy array has an unknown state")
        _, shape, dtype, by_columns, data = state
        if not isinstance(data, (bytes, bytearray)) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"a numpy array of shape {shape!r} is made of a {type(data).__name__}")
        if len(data) != prod(shape) * dtype.dtype.itemsize:
            raise ValueError(f"a numpy array of shape {shape!r} has {len(data)} bytes")
        values = np.frombuffer(bytes(data), dtype.dtype).reshape(shape, order="F" if by_columns else "C")
        self.tensor = torch.from_numpy(np.array(values, dtype.dtype.newbyteorder("="), order="C"))


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, NumpyDtype) or not isinstance(data, bytes) or len(data) != dtype.dtype.itemsize:
        raise ValueError("a numpy number has an unknown form")
    return np.frombuffer(data, dtype.dtype)[0].item()


def _type_only(*args: Any) -> Any:
    raise ValueError("numpy.ndarray is called by the pickle")


def numpy_globals() -> dict[str, Callable[..., Any]]:
    """Full name -> what builds it, for both of the names that numpy's modules have had."""
    makers: dict[str, Callable[..., Any]] = {"numpy.dtype": NumpyDtype, "numpy.ndarray": _type_only}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        makers |= {f"{module}.scalar": _scalar, f"{module}._reconstruct": NumpyArray}
    return makers
