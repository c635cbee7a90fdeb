"""Marks of functions and classes, and versions of packages."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from zero_strategy.compat.megatron import lifecycle as versions
from zero_strategy.compat.megatron.lifecycle import (
    ExperimentalNotEnabledError,
    Lifecycle,
    deprecated,
    experimental_api,
    experimental_cls,
    experimental_enabled,
    experimental_fn,
    internal_api,
    lifecycle_of,
    null_decorator,
)
from zero_strategy.compat.megatron.models import MambaInferenceStateConfig, get_mamba_inference_state_config_from_model

# ---- marks ----


def plain(a: int, *, b: int = 2) -> int:
    """Adds."""
    return a + b


class Plain:
    def __init__(self, a: int) -> None:
        self.a = a


Experimental = experimental_cls("0.3")(type("Experimental", (Plain,), {"__module__": __name__}))


def test_null_decorator_gives_the_function_itself_and_is_no_context_manager() -> None:
    assert null_decorator(plain) is plain
    assert null_decorator()(plain) is plain and null_decorator(1, name="x")(plain) is plain

    @null_decorator
    def bare(a: int) -> int:
        return a

    @null_decorator("with", arguments=True)
    def with_arguments(a: int) -> int:
        return a

    assert bare(3) == with_arguments(3) == 3
    assert not hasattr(null_decorator(), "__enter__")


@pytest.mark.parametrize(("value", "on"), [(None, False), ("0", False), ("off", False), ("1", True), ("True", True)])
def test_the_environment_switches_what_is_experimental(
    monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool
) -> None:
    monkeypatch.delenv("ENABLE_EXPERIMENTAL", raising=False)
    if value is not None:
        monkeypatch.setenv("ENABLE_EXPERIMENTAL", value)
    assert experimental_enabled() is on
    function = experimental_fn(introduced_with_version="0.3")(plain)
    assert function.__name__ == "plain" and inspect.signature(function) == inspect.signature(plain)
    assert issubclass(Experimental, Plain) and isinstance(Experimental, type)
    if on:
        assert function(1, b=3) == 4 and Experimental(5).a == 5
        assert pickle.loads(pickle.dumps(Experimental(5))).a == 5
    else:
        for call in (lambda: function(1), lambda: Experimental(5)):
            with pytest.raises(ExperimentalNotEnabledError, match=r"xperimental: .* ENABLE_EXPERIMENTAL=1"):
                call()
    assert Plain(5).a == 5  # the base class is as it was


def test_an_unknown_word_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_EXPERIMENTAL", "perhaps")
    with pytest.raises(ValueError, match="ENABLE_EXPERIMENTAL='perhaps': accepted: 1, true"):
        experimental_enabled()


def test_a_deprecated_function_warns_at_each_call_and_says_what_to_use() -> None:
    old = deprecated("1.0.0", "2.0.0", alternative="train", reason="it is fast")(plain)
    message = r"plain is deprecated since version 1.0.0 and will be removed in version 2.0.0; use train \(it is fast\)"
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=message) as caught:
            assert old(1, b=1) == 2
        assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"since version 1\.0$"):
        deprecated("1.0")(plain)(1)
    assert lifecycle_of(old) == Lifecycle("deprecated", "1.0.0", "2.0.0", "train", "it is fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain(1)


def test_marks_are_for_readers_and_change_nothing() -> None:
    def helper() -> int:
        return 1

    class Inner:
        pass

    class Derived(Inner):
        pass

    assert internal_api(helper) is helper and experimental_api(Inner) is Inner
    assert lifecycle_of(helper) == Lifecycle("internal") and lifecycle_of(Inner) == Lifecycle("experimental")
    assert helper() == 1 and isinstance(Inner(), Inner)  # without the switch
    assert lifecycle_of(Derived) is None and lifecycle_of(plain) is None and lifecycle_of(3) is None
    assert lifecycle_of(Experimental) == Lifecycle("experimental", "0.3")


def test_what_is_no_version_is_refused() -> None:
    for decorate in (experimental_fn, experimental_cls, deprecated, lambda text: deprecated("1.0", text)):
        with pytest.raises(ValueError, match=r"version must be a version such as '0\.2\.0', not 'soon'"):
            decorate("soon")


# ---- versions ----


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that packages are found in; what was asked before, and in here, is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    versions.package_version.cache_clear()
    yield tmp_path
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]
    versions.package_version.cache_clear()


def install(folder: Path, module: str, *, says: str | None = None, installed_as: str | None = None) -> None:
    (folder / f"{module}.py").write_text(f"__version__ = {says!r}\n" if says else "")
    importlib.invalidate_caches()
    if installed_as:
        info = folder / f"{module}-{installed_as}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {installed_as}\n")


KINDS = {
    "transformer_engine": (versions.get_te_version, versions.is_te_min_version),
    "flash_attn": (versions.get_fa_version, versions.is_fa_min_version),
    "mamba_ssm": (versions.get_mamba_version, versions.is_mamba_min_version),
    "causal_conv1d": (versions.get_causal_conv1d_version, versions.is_causal_conv1d_min_version),
}


@pytest.mark.parametrize("module", KINDS)
def test_a_package_says_its_version_or_was_installed_as_one_or_is_not_there(packages: Path, module: str) -> None:
    get, is_min = KINDS[module]
    name = versions.package_version.__wrapped__  # not cached, so that each state can be looked at
    assert get() is None and is_min("0.0.1") is False  # not there
    made = f"{module}_made"
    install(packages, made, says="1.5.3.post1", installed_as="9.9")
    assert name(made, made) == Version("1.5.3.post1")
    install(packages, made + "2", installed_as="1.5")
    assert name(made + "2", made + "2") == Version("1.5")
    (packages / f"{made}3.py").write_text("raise OSError('libcudart.so: not found')")
    assert name(made + "3", made + "3") is None


def test_versions_are_asked_for_once_and_compared_as_versions(packages: Path) -> None:
    for module, wanted in (("causal_conv1d", "1.5.3.post1"), ("mamba_ssm", "2.2.6.post3")):
        assert versions.check_mamba_sequence_packing_support() == (False, f"{module} >= {wanted} is required")
        install(packages, module, says=wanted)
        versions.package_version.cache_clear()
        get, is_min = KINDS[module]
        assert get() is get() and get() == Version(wanted)
        assert is_min(wanted) and not is_min(wanted, check_equality=False)
        assert is_min("1.5.2", False) and not is_min("10.0")
    assert versions.check_mamba_sequence_packing_support() == (True, None)


def test_torch_has_a_version() -> None:
    assert versions.get_torch_version() == Version(torch.__version__)
    assert versions.is_torch_min_version("2.9") and not versions.is_torch_min_version("99")  # as numbers: 2.13 > 2.9
    with pytest.raises(ValueError, match="not 'new'"):
        versions.is_torch_min_version("new")


def test_a_hybrid_model_tells_its_state_where_mamba_is_installed(packages: Path) -> None:
    def model(layers: list[str]) -> SimpleNamespace:
        decoder = SimpleNamespace(layer_type_list=layers, mamba_state_shapes_per_request=lambda: ((4, 3), [2, 8, 16]))
        return SimpleNamespace(module=SimpleNamespace(decoder=decoder))

    hybrid = model(["M", "*", "-"])
    assert get_mamba_inference_state_config_from_model(hybrid) is None  # mamba_ssm is not there
    install(packages, "mamba_ssm", says="2.3")
    versions.package_version.cache_clear()
    expected = MambaInferenceStateConfig(["M", "*", "-"], (4, 3), (2, 8, 16))
    assert get_mamba_inference_state_config_from_model(hybrid) == expected
    for other in (model(["*", "-"]), torch.nn.Linear(2, 2), SimpleNamespace(decoder=object())):
        assert get_mamba_inference_state_config_from_model(other) is None
