"""Functions that accept more keywords than those they were made of: `create_updated_function_signature`.

For methods of one object that get options: `inspect.signature`, editors and frameworks that look at parameters
(Lightning and transformers do) see them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def create_updated_function_signature(
    original_function: Callable[..., Any], **extended_kwargs: Any
) -> Callable[..., Any]:
    """A function like the original with further keyword-only parameters.

    An original with `**kwargs` gets them, the defaults too. One without cannot take them, and is called as before; what
    they mean is then the business of a function around this one, which takes them out first.

    Args:
        original_function: A function or bound method, which stays what it is.
        extended_kwargs: Names of the new parameters, and their defaults.

    Returns:
        A function with the original's name, documentation and annotations; `__wrapped__` is the original.

    Raises:
        ValueError: If the original has a parameter of the same name.
    """
    signature = inspect.signature(original_function)
    taken = [name for name in extended_kwargs if name in signature.parameters]
    if taken:
        raise ValueError(f"{_name(original_function)}{signature} has parameters {taken} already")
    old = list(signature.parameters.values())
    catches_all = bool(old) and old[-1].kind is inspect.Parameter.VAR_KEYWORD
    new = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in extended_kwargs.items()
    ]
    position = len(old) - catches_all  # nothing may follow **kwargs
    updated = signature.replace(parameters=[*old[:position], *new, *old[position:]])

    @functools.wraps(original_function)
    def function(*args: Any, **kwargs: Any) -> Any:
        updated.bind(*args, **kwargs)  # the usual TypeError, with the new names known
        options = {name: kwargs.pop(name, default) for name, default in extended_kwargs.items()}
        return original_function(*args, **kwargs, **options) if catches_all else original_function(*args, **kwargs)

    function.__signature__ = updated  # type: ignore[attr-defined]
    return function


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
