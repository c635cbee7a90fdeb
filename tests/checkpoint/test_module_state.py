"""Entries that modules add to their state dicts are saved, listed and loaded; buffers that change size resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.convert.convert import convert
from zero_strategy.engine import ZeroEngine


class Extra(nn.Module):
    """Counts in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.count = nn.Linear(4, 4), 7

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def change(self) -> None:
        self.count = 9

    def state(self) -> Any:
        return self.count


class Added(nn.Module):
    """Writes a tensor of its own, and the norm of its weight, among its entries; asks for them when it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.hits, self.norm = torch.zeros(3), 0.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "hits"] = self.hits
        destination[prefix + "norm"] = float(self.weight.norm())

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.hits, self.norm = state.pop(prefix + "hits"), state.pop(prefix + "norm")
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    def change(self) -> None:
        self.hits = torch.ones(3)

    def state(self) -> Any:
        return [*self.hits.tolist(), self.norm]


class Hooked(nn.Module):
    """Adds an entry by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(4, 4), 1.0
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "scale"] = torch.tensor(module.scale)

    @staticmethod
    def _take(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state:
            module.scale = float(state.pop(prefix + "scale"))

    def change(self) -> None:
        self.scale = 2.5

    def state(self) -> Any:
        return self.scale


class Metric(nn.Module):
    """Has a `state_dict` of its own, as torchmetrics' classes, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        found[prefix + "total"] = self.total
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "total" in state:
            self.total = state.pop(prefix + "total")

    def change(self) -> None:
        self.total = torch.tensor(4.0)

    def state(self) -> Any:
        return float(self.total)


KINDS = [Extra, Added, Hooked, Metric]


def build(kind: type[nn.Module]) -> Any:
    return nn.Sequential(nn.Linear(4, 4), kind())


def saved_and_loaded(kind: type[nn.Module], stage: int, folder: str) -> dict[str, Any]:
    model = build(kind)
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 1}))
    model[1].change()
    engine.save(folder)
    full = engine.full_state_dict()
    plain = build(kind)
    plain[1].change()
    again = build(kind)
    other = ZeroEngine(again, load_config(stage=3 - stage // 2, units={"min_numel": 1}))
    other.load(folder)
    return {
        "state": again[1].state() == (model[1].state() if kind is not Added else [1.0, 1.0, 1.0, 4.0]),
        "names": set(full) == set(plain.state_dict()),
        "weights": all(
            torch.equal(value, other.full_state_dict()[name])
            for name, value in full.items()
            if isinstance(value, Tensor) and name in dict(model.named_parameters())
        ),
    }


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_modules_are_saved_listed_and_loaded(
    ranks: Launcher, kind: type[nn.Module], stage: int, tmp_path: Path
) -> None:
    for found in ranks(2)(saved_and_loaded, kind, stage, str(tmp_path / "saved")):
        assert all(found.values()), found
    convert(tmp_path / "saved", tmp_path / "whole.pt", to_format="torch")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    state = state.get("model", state.get("state_dict", state))
    plain = build(kind)
    _, unexpected = plain.load_state_dict(state, strict=False)
    assert not unexpected and plain[1].state() != build(kind)[1].state()


class Odd:
    """Something that cannot be read without running code."""


class Unstorable(Extra):
    """Has an object of a class of its own for extra state."""

    def get_extra_state(self) -> Any:
        return {"odd": Odd()}


def unstorable(folder: str) -> str:
    engine = ZeroEngine(build(Unstorable), load_config(stage=2))
    try:
        engine.save(folder)
    except (TypeError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_what_cannot_be_stored_is_named_at_the_save(ranks: Launcher, tmp_path: Path) -> None:
    for text in ranks(2)(unstorable, str(tmp_path / "saved")):
        assert "'1'" in text and "add_safe_globals" in text


class Growing(nn.Module):
    """Its buffer has as many elements as it has seen rows; it resizes it when it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.low = torch.cat([self.low, x.detach().amin().view(1)])
        return x

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.low = torch.empty_like(state[prefix + "low"])
        super()._load_from_state_dict(state, prefix, *rest)


class OfItsRoot(nn.Module):
    """The same, done by the root's `load_state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("low", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.low = torch.cat([self.low, x.detach().amin().view(1)])
        out: Tensor = self.lin(x)
        return out

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.low = torch.empty_like(state["low"])
        return super().load_state_dict(state, *args, **kwargs)


class Rigid(Growing):
    """Loads as any module, so that sizes have to fit."""

    _load_from_state_dict = nn.Module._load_from_state_dict


def resumed(kind: type[nn.Module], folder: str) -> Any:
    def made() -> Any:
        return kind() if kind is OfItsRoot else nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))

    model = made()
    engine = ZeroEngine(model, load_config(stage=3))
    for step in range(3):
        model(torch.full((2, 4), float(step))).sum().backward()
    engine.save(folder)
    again = made()
    other = ZeroEngine(again, load_config(stage=2))
    try:
        other.load(folder)
    except ValueError as error:
        return str(error)
    name = "low" if kind is OfItsRoot else "1.low"
    return dict(again.named_buffers())[name].shape == (3,) and all(
        torch.equal(a, b) for a, b in zip(model.buffers(), again.buffers(), strict=True)
    )


@pytest.mark.parametrize("kind", [Growing, OfItsRoot])
def test_buffers_that_grow_resume(ranks: Launcher, kind: type[nn.Module], tmp_path: Path) -> None:
    assert ranks(2)(resumed, kind, str(tmp_path / "saved")) == [True, True]


def test_sizes_of_other_buffers_have_to_fit(ranks: Launcher, tmp_path: Path) -> None:
    for text in ranks(2)(resumed, Rigid, str(tmp_path / "saved")):
        assert "1.low (checkpoint (3,), model (0,))" in text


def test_a_load_that_is_refused_leaves_buffers_as_they_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Growing(), nn.Linear(4, 4))
    engine = ZeroEngine(model, load_config(stage=0))
    model(torch.ones(2, 4))
    engine.save(tmp_path / "saved")
    again = nn.Sequential(nn.Linear(4, 4), Growing())
    other = ZeroEngine(again, load_config(stage=0))
    for _ in range(2):
        again(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"2\.weight"):
        other.load(tmp_path / "saved")
    assert dict(again.named_buffers())["1.low"].shape == (2,)
