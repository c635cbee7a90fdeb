"""Megatron's marks of experimental and deprecated API, and versions of optional packages.

@experimental_fn("0.2")              ExperimentalNotEnabledError, unless the environment says ENABLE_EXPERIMENTAL=1
@experimental_cls("0.2")             the same when an object is made
@deprecated("1.0", "2.0", "train")   DeprecationWarning at each call
@internal_api, @experimental_api     marks only, for tools that compare interfaces: `lifecycle_of` reads them

A version is what the package says (`__version__`), else what it was installed as. A package that is not there, or whose
import fails, has the version None, and is of no minimum version. Each is asked for once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

VARIABLE = "ENABLE_EXPERIMENTAL"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_MARK = "__lifecycle__"


class ExperimentalNotEnabledError(Exception):
    """Something experimental was called, and the environment does not say ENABLE_EXPERIMENTAL=1."""


@dataclass(frozen=True)
class Lifecycle:
    """Mark on a function or class.

    Attributes:
        stage: "experimental", "internal" or "deprecated".
        version: Since when, if that was said.
        removal_version: When it will be gone.
        alternative: What to use instead.
        reason: Why.
    """

    stage: str
    version: str | None = None
    removal_version: str | None = None
    alternative: str | None = None
    reason: str | None = None


def lifecycle_of(thing: object) -> Lifecycle | None:
    """The mark of a function or class; None if it is an ordinary one."""
    found = vars(thing).get(_MARK) if hasattr(thing, "__dict__") else None  # its own: not that of a base class
    return found if isinstance(found, Lifecycle) else None


def experimental_enabled() -> bool:
    """True if the environment says ENABLE_EXPERIMENTAL; asked anew each time.

    Raises:
        ValueError: If it says something else than yes or no.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in _ON + _OFF:
        raise ValueError(f"{VARIABLE}={os.environ[VARIABLE]!r}: accepted: {', '.join(_ON)}; {', '.join(_OFF[1:])}")
    return value in _ON


def null_decorator(*args: Any, **kwargs: Any) -> Any:
    """Decorates nothing: stands for a decorator that is not there, with or without arguments."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return _same


def experimental_fn(introduced_with_version: str) -> Callable[[F], F]:
    """Functions that may change or go from one version to the next, and run only where that is accepted.

    Args:
        introduced_with_version: Since when.

    Raises:
        ExperimentalNotEnabledError: At a call without ENABLE_EXPERIMENTAL=1.
        ValueError: If it is no version.
    """
    _check_version("introduced_with_version", introduced_with_version)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            _require_experimental(function)
            return function(*args, **kwargs)

        return _marked(guarded, Lifecycle("experimental", introduced_with_version))  # type: ignore[return-value]

    return decorate


def experimental_cls(introduced_with_version: str) -> Callable[[C], C]:
    """Classes of that kind. The class stays the same object, and so do its subclasses' relations to it.

    Args:
        introduced_with_version: Since when.

    Raises:
        ExperimentalNotEnabledError: When an object is made without ENABLE_EXPERIMENTAL=1.
        ValueError: If it is no version.
    """
    _check_version("introduced_with_version", introduced_with_version)

    def decorate(cls: C) -> C:
        begin = cls.__init__  # type: ignore[misc]

        @functools.wraps(begin)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
            _require_experimental(cls)
            begin(self, *args, **kwargs)

        cls.__init__ = guarded  # type: ignore[misc]
        return _marked(cls, Lifecycle("experimental", introduced_with_version))

    return decorate


def deprecated(
    version: str, removal_version: str | None = None, alternative: str | None = None, reason: str | None = None
) -> Callable[[F], F]:
    """Functions that will go.

    Args:
        version: Since when that is known.
        removal_version: When.
        alternative: What to use instead.
        reason: Why.

    Raises:
        ValueError: If a version is none.
    """
    _check_version("version", version)
    if removal_version is not None:
        _check_version("removal_version", removal_version)

    def decorate(function: F) -> F:
        message = f"{_name(function)} is deprecated since version {version}"
        message += f" and will be removed in version {removal_version}" if removal_version else ""
        message += f"; use {alternative}" if alternative else ""
        message += f" ({reason})" if reason else ""

        @functools.wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        mark = Lifecycle("deprecated", version, removal_version, alternative, reason)
        return _marked(warning, mark)  # type: ignore[return-value]

    return decorate


def internal_api(func: F) -> F:
    """Mark a function or class as not meant for users; it is returned itself."""
    return _marked(func, Lifecycle("internal"))


def experimental_api(func: F) -> F:
    """Mark a function or class as one that may change; it is returned itself, and runs without the switch."""
    return _marked(func, Lifecycle("experimental"))


def _marked(thing: F, mark: Lifecycle) -> F:
    setattr(thing, _MARK, mark)
    return thing


def _require_experimental(thing: Any) -> None:
    if not experimental_enabled():
        raise ExperimentalNotEnabledError(
            f"{_name(thing)} is experimental: it may change or go with any version. Set {VARIABLE}=1 in the "
            "environment to use it"
        )


def _check_version(argument: str, version: str) -> None:
    try:
        Version(version)
    except (InvalidVersion, TypeError) as error:
        raise ValueError(f"{argument} must be a version such as '0.2.0', not {version!r}") from error


def _name(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", thing))


def _same(function: F) -> F:
    return function


TRANSFORMER_ENGINE = ("transformer_engine", "transformer-engine")
FLASH_ATTENTION = ("flash_attn", "flash-attn")
MAMBA = ("mamba_ssm", "mamba_ssm")
CAUSAL_CONV1D = ("causal_conv1d", "causal_conv1d")

_PACKING = {"causal_conv1d": "1.5.3.post1", "mamba_ssm": "2.2.6.post3"}
"""The first versions whose kernels take several sequences in one row."""


@cache
def package_version(module: str, distribution: str) -> Version | None:
    """The version of a package; None where it is not there.

    Args:
        module: As it is imported.
        distribution: As it is installed.
    """
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return Version(str(importlib.import_module(module).__version__))
    except (ImportError, OSError, AttributeError, InvalidVersion):  # OSError: a library that it needs is missing
        pass
    try:
        return Version(importlib.metadata.version(distribution))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def is_min_version(found: Version | None, version: str, check_equality: bool = True) -> bool:
    """True if `found` is at least `version`, or, without `check_equality`, later; False for None.

    Raises:
        ValueError: If `version` is none.
    """
    try:
        wanted = Version(version)
    except InvalidVersion as error:
        raise ValueError(f"version must be one such as '2.11.0', not {version!r}") from error
    return found is not None and (found >= wanted if check_equality else found > wanted)


def get_torch_version() -> Version:
    """torch's."""
    found = package_version("torch", "torch")
    assert found is not None
    return found


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """True if torch's is at least, or later than, `version`; a local suffix (`+cpu`) makes it later."""
    return is_min_version(get_torch_version(), version, check_equality)


def get_te_version() -> Version | None:
    """Transformer Engine's; None where it is not installed."""
    return package_version(*TRANSFORMER_ENGINE)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """True if it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_te_version(), version, check_equality)


def get_fa_version() -> Version | None:
    """FlashAttention's; None where it is not installed."""
    return package_version(*FLASH_ATTENTION)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """True if it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_fa_version(), version, check_equality)


def get_mamba_version() -> Version | None:
    """mamba_ssm's; None where it is not installed."""
    return package_version(*MAMBA)


def is_mamba_min_version(version: str, check_equality: bool = True) -> bool:
    """True if it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_mamba_version(), version, check_equality)


def get_causal_conv1d_version() -> Version | None:
    """causal_conv1d's; None where it is not installed."""
    return package_version(*CAUSAL_CONV1D)


def is_causal_conv1d_min_version(version: str, check_equality: bool = True) -> bool:
    """True if it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_causal_conv1d_version(), version, check_equality)


def check_mamba_sequence_packing_support() -> tuple[bool, str | None]:
    """True if causal_conv1d and mamba_ssm take packed sequences, and else what is missing."""
    checks = {"causal_conv1d": is_causal_conv1d_min_version, "mamba_ssm": is_mamba_min_version}
    for package, wanted in _PACKING.items():
        if not checks[package](wanted):
            return False, f"{package} >= {wanted} is required"
    return True, None
