"""Models in wrappers, functions with more keywords, division and joining: small pieces of sharding code."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from zero_strategy.compat.megatron.models import (
    create_updated_function_signature,
    divide,
    ensure_divisibility,
    get_attr_wrapped_model,
    get_model_config,
    get_model_type,
    get_model_xattn,
    is_submodule,
    maybe_cat,
    unwrap_model,
)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Outer(Wrapper):
    pass


# ---- wrappers ----


def test_a_submodule_is_the_same_object_below() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(inner), nn.Linear(2, 2))
    assert is_submodule(inner, model) and not is_submodule(model, inner)
    assert not is_submodule(nn.Linear(2, 2), model)
    assert not is_submodule(model, model) and is_submodule(model, model, strict=False)


def test_wrappers_are_taken_off() -> None:
    model = nn.Linear(2, 2)
    wrapped = Outer(Wrapper(model))
    assert unwrap_model(wrapped) is model and unwrap_model(model) is model
    assert unwrap_model([wrapped, model]) == [model, model] and unwrap_model([]) == []
    assert unwrap_model(wrapped, Outer) is wrapped.module  # what is inside is none of these
    assert unwrap_model(wrapped, (Outer, Wrapper)) is model
    assert unwrap_model(wrapped, Wrapper) is model


def test_attributes_are_looked_for_from_the_outside_in() -> None:
    model = nn.Linear(2, 2)
    model.config = None  # type: ignore[assignment]
    model.model_type = "encoder"  # type: ignore[assignment]
    wrapped = Outer(Wrapper(model))
    assert get_attr_wrapped_model(wrapped, "model_type") == get_model_type(wrapped) == "encoder"
    assert get_attr_wrapped_model(wrapped, "model_type", return_model_obj=True) is model
    wrapped.model_type = None  # type: ignore[assignment]
    assert get_model_type(wrapped) is None
    assert get_attr_wrapped_model(wrapped, "model_type", allow_none=False) == "encoder"
    assert get_model_config(wrapped) is None  # there, and None
    for call in (
        lambda: get_attr_wrapped_model(wrapped, "config", allow_none=False),
        lambda: get_attr_wrapped_model(wrapped, "nowhere"),
        lambda: get_model_config(nn.Linear(2, 2)),
    ):
        with pytest.raises(AttributeError, match=r"neither the (Outer|Linear) nor what it wraps has an attribute"):
            call()
    with pytest.raises(TypeError, match="one model, not a list of 2"):
        get_attr_wrapped_model([model, model], "config")
    assert get_model_xattn(wrapped) is False
    model.xattn_needed = True  # type: ignore[assignment]
    assert get_model_xattn(wrapped) is True


# ---- signatures ----


class Optimizer:
    def step(self, closure: Any = None) -> str:
        """Steps."""
        return f"stepped {closure}"


def test_a_function_gets_keywords_that_the_original_does_not_know() -> None:
    optimizer = Optimizer()
    step = create_updated_function_signature(optimizer.step, sync=False, install=True)
    assert str(inspect.signature(step)) == "(closure: 'Any' = None, *, sync=False, install=True) -> 'str'"
    assert step() == "stepped None" and step(3, sync=True) == "stepped 3"
    assert step(closure=4, install=False) == "stepped 4"
    assert step.__name__ == "step" and step.__doc__ == "Steps."
    assert str(inspect.signature(optimizer.step)) == "(closure: 'Any' = None) -> 'str'"  # the original is as it was
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        step(other=1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        step(None, True)
    with pytest.raises(ValueError, match=r"Optimizer\.step\(closure.*has parameters \['closure'\] already"):
        create_updated_function_signature(optimizer.step, closure=1)


def test_keywords_go_before_those_that_catch_all_and_are_caught() -> None:
    def original(a: int, *rest: int, b: int = 2, **others: Any) -> tuple[Any, ...]:
        return a, rest, b, others

    updated = create_updated_function_signature(original, c=3)
    assert list(inspect.signature(updated).parameters) == ["a", "rest", "b", "c", "others"]
    assert updated(1) == (1, (), 2, {"c": 3})
    assert updated(1, 7, 8, b=5, c=4, d=6) == (1, (7, 8), 5, {"d": 6, "c": 4})
    twice = create_updated_function_signature(updated, e=9)
    assert list(inspect.signature(twice).parameters) == ["a", "rest", "b", "c", "e", "others"]
    assert twice(1, e=0) == (1, (), 2, {"c": 3, "e": 0})
    assert create_updated_function_signature(original)(1) == (1, (), 2, {})


# ---- division, joining ----


def test_division_leaves_nothing_over() -> None:
    assert ensure_divisibility(12, 3) is None and divide(12, 3) == 4 and divide(0, 5) == 0
    for numbers in ((12, 5), (1, 0)):
        with pytest.raises(ValueError, match=f"{numbers[0]} is not divisible by {numbers[1]}"):
            divide(*numbers)
        with pytest.raises(ValueError):
            ensure_divisibility(*numbers)
        with pytest.raises(AssertionError):  # as in Megatron
            divide(*numbers)


def test_what_is_there_is_joined() -> None:
    a, b = torch.ones(2, 3), torch.zeros(2, 1)
    joined = maybe_cat(a, b, dim=1)
    assert joined is not None and torch.equal(joined, torch.cat([a, b], 1))
    assert maybe_cat(a, None) is a and maybe_cat(None, b, required=True) is b and maybe_cat(None, None) is None
    with pytest.raises(ValueError, match="at least one of the tensors must be there"):
        maybe_cat(None, None, required=True)
    with pytest.raises(TypeError):
        maybe_cat(a, b, 0, True)  # type: ignore[misc]
