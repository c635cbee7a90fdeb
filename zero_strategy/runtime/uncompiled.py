"""Functions that stay out of graphs of torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T], *, recursive: bool = True) -> Callable[P, T]:
    """The function, left alone by `torch.compile`.

    As `torch.compiler.disable`, which loads the compiler, a second's work, where a class is defined. This loads it when
    the function is called first, by when the first optimizer of the process has.

    Args:
        function: Anything, a method too.
        recursive: What it calls is left alone as well.
    """
    return _disable_dynamo(function, recursive)
