"""Versions of packages that code depends on, or would use if they were there.

A version is what the package says (`__version__`), else what it was installed as. A package that is not there, or whose
import fails, has the version None, and is of no minimum version. Each is asked for once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from functools import cache

from packaging.version import InvalidVersion, Version

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
    """Whether `found` is at least `version`, or, without `check_equality`, later; False for None.

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
    """Whether torch's is at least, or later than, `version`; a local suffix (`+cpu`) makes it later."""
    return is_min_version(get_torch_version(), version, check_equality)


def get_te_version() -> Version | None:
    """Transformer Engine's; None where it is not installed."""
    return package_version(*TRANSFORMER_ENGINE)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_te_version(), version, check_equality)


def get_fa_version() -> Version | None:
    """FlashAttention's; None where it is not installed."""
    return package_version(*FLASH_ATTENTION)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_fa_version(), version, check_equality)


def get_mamba_version() -> Version | None:
    """mamba_ssm's; None where it is not installed."""
    return package_version(*MAMBA)


def is_mamba_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_mamba_version(), version, check_equality)


def get_causal_conv1d_version() -> Version | None:
    """causal_conv1d's; None where it is not installed."""
    return package_version(*CAUSAL_CONV1D)


def is_causal_conv1d_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether it is at least, or later than, `version`; False where it is not installed."""
    return is_min_version(get_causal_conv1d_version(), version, check_equality)


def check_mamba_sequence_packing_support() -> tuple[bool, str | None]:
    """Whether causal_conv1d and mamba_ssm take packed sequences, and if not, what is missing."""
    checks = {"causal_conv1d": is_causal_conv1d_min_version, "mamba_ssm": is_mamba_min_version}
    for package, wanted in _PACKING.items():
        if not checks[package](wanted):
            return False, f"{package} >= {wanted} is required"
    return True, None
