"""`optimizer.state` between steps: a mapping from the module's parameters to their state, as in plain torch.

    optimizer.state               StateMapping    every parameter that has state, on whatever rank
    optimizer.state[p]            StateEntry      the keys of one parameter's state
    optimizer.state[p]["step"]    the number or tensor itself
    optimizer.state[p]["exp_avg"] the tensor itself where the rank holds all of it, else a `ShardedValue`

All ranks run the same code on it. What drops state, or replaces it by full values, acts on this rank's part; nothing is
sent. What only some ranks do is found by the comparison that every reduction of gradients makes (`EditLog`).
While a step runs, torch's own mapping, of pieces, is in its place.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol, cast
from zlib import crc32

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.offload.chunks import OffloadedPart
from zero_strategy.ops.dynamic_codes import blocks_of
from zero_strategy.optim.coded_state import SCALES
from zero_strategy.optim.sharded_value import ShardedValue
from zero_strategy.optim.state_book import StateBook, Unknown

_MISSING: Any = object()
_WAY_OUT = (
    "read it with safe_get_full_optimizer_state(parameter, key) or engine.full_optimizer_state(optimizer), which all "
    "ranks call"
)


class EditLog:
    """Changes that user code makes to an optimizer's state, in numbers that ranks can compare.

    Attributes:
        count: Changes.
        digest: A hash of all of them, in order.
    """

    def __init__(self) -> None:
        self.count = self.digest = 0
        self._last: deque[str] = deque(maxlen=8)

    def note(self, text: str) -> None:
        """Note a change, in words that are the same on all ranks that make it."""
        self.count += 1
        # Not Python's hash, which differs for strings from process to process.
        self.digest = crc32(text.encode(), self.digest)
        self._last.append(text)

    def forget(self) -> None:
        """Begin anew, where all ranks have taken the same state."""
        self.count = self.digest = 0
        self._last.clear()

    def __str__(self) -> str:
        return f"{self.count} ({'; '.join(self._last)}; hash {self.digest:08x})" if self.count else "none"


class StateOwner(Protocol):
    """The optimizer that a mapping shows the state of.

    Attributes:
        optimizer: The user's object.
        edits: What was done to its state.
    """

    optimizer: Optimizer
    edits: EditLog

    @property
    def opaque_state(self) -> str:
        """Why single values cannot be shown; "": they can."""
        ...

    @property
    def joint_state(self) -> bool:
        """True if all state is under the first parameter, as LBFGS has it."""
        ...

    def state_book(self) -> StateBook:
        """State by parameter, with what was assigned to `optimizer.state` taken over.

        Raises:
            RuntimeError: While a step runs, and after the optimizer was detached.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class StateMapping(MutableMapping[Any, Any]):
    """See the module. Keys that are no parameters of the model are kept as they are.

    Args:
        owner: The optimizer that it shows the state of.
    """

    default_factory = dict
    """As of the `defaultdict` that it stands for: a parameter without state gets an empty one when it is asked for."""

    def __init__(self, owner: StateOwner) -> None:
        self._owner = owner

    # ---- what is there ----

    def __iter__(self) -> Iterator[Any]:
        book = self._owner.state_book()
        if self._owner.joint_state:
            yield from [next(self._owner.parameters())] if any(book.by_piece.values()) else []
        else:
            yield from book.parameters()
        yield from [key for key in book.by_piece if not isinstance(key, Tensor)]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        book = self._owner.state_book()
        if not isinstance(key, Tensor):
            return key in book.by_piece
        if book.is_foreign(key):
            return False
        return any(key is each for each in self) if self._owner.joint_state else book.holds(key)

    def __reversed__(self) -> Iterator[Any]:
        return iter(list(self)[::-1])

    def __getitem__(self, key: Any) -> Any:
        book = self._owner.state_book()
        if not isinstance(key, Tensor):
            return book.by_piece.setdefault(key, {})
        parameter = self._checked(key)
        if key not in self:
            if self._owner.joint_state:
                raise KeyError(self._name(parameter))
            book.begin(parameter).given = True
        return StateEntry(self._owner, parameter, book.values_of(parameter))

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry of a key, which is not made if there is none."""
        if key not in self:
            return default
        return self[key]

    # ---- changes ----

    def __setitem__(self, key: Any, values: Any) -> None:
        book = self._owner.state_book()
        if not isinstance(key, Tensor):
            book.by_piece[key] = values
            return
        parameter = self._checked(key)
        if not isinstance(values, Mapping):
            raise TypeError(f"{self._name(parameter)} takes a dict of values by key, not {type(values).__name__}")
        # The new values are made first: if one is refused, the former state stays.
        before = book.values_of(parameter)
        if isinstance(values, StateEntry) and values.of(parameter):  # what it has, or what it had and was dropped
            new = values.complete()
        else:
            new = StateEntry(self._owner, parameter, {}).filled(values)
        # LBFGS's vectors are over all parameters: all of them can be dropped, and no part of them be set.
        if self._owner.joint_state:
            book.clear()
        elif new is not before:
            _give_up(before)
            book.put(parameter, new)
            book.begin(parameter).given = True
        self._owner.edits.note(f"{self._name(parameter)} = {sorted(map(str, new))}")

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(self._name(key) if isinstance(key, Tensor) else key)
        _give_up(self._drop(key))

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Drop an entry and return it, or the default if there is none; it can be assigned again."""
        if key not in self:
            if default is not _MISSING:
                return default
            raise KeyError(self._name(key) if isinstance(key, Tensor) else key)
        values = self._drop(key)
        if not isinstance(key, Tensor):
            return values
        # Read before the tier's room is used again.
        values.update({k: v.read() for k, v in values.items() if isinstance(v, OffloadedPart)})
        return StateEntry(self._owner, self._checked(key), values)

    def popitem(self) -> tuple[Any, Any]:
        """Drop the last entry and return its key and value."""
        last = next(reversed(self), _MISSING)
        if last is _MISSING:
            raise KeyError("optimizer.state has no entries")
        return last, self.pop(last)

    def clear(self) -> None:
        """Drop all state: the next step begins as the first one did."""
        book = self._owner.state_book()
        if len(self):
            self._owner.edits.note("optimizer.state.clear()")
        for values in book.pieces():
            _give_up(values)
        book.clear()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The entry of a key, which is set to the default if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def replace(self, given: Any) -> None:
        """Take over what was assigned to `optimizer.state`.

        Raises:
            TypeError: If it is no mapping.
        """
        if not isinstance(given, Mapping):
            raise TypeError(f"optimizer.state takes a mapping by parameter, not {type(given).__name__}")
        kept, book = dict(given.items()), self._owner.state_book()
        # By identity: `==` of tensors compares their elements.
        wanted = {id(key) for key in kept}
        for key in [key for key in self if id(key) not in wanted]:
            del self[key]
        for key, values in kept.items():
            self[key] = values
        book.put_in_order([key for key in kept if isinstance(key, Tensor)])
        self._owner.edits.note("optimizer.state = ...")

    # ---- copies ----

    def copy(self) -> defaultdict[Any, Any]:
        """A plain dict with the same entries, which are live."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return {**other, **self.copy()} if isinstance(other, Mapping) else NotImplemented

    def __ior__(self, other: Any) -> StateMapping:
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Mapping):
            return self is other
        if not len(self) or len(self) != len(other):
            return len(self) == len(other)
        raise TypeError(f"the state of {type(self._owner.optimizer).__name__} cannot be compared: {_WAY_OUT}")

    def __repr__(self) -> str:
        return f"<state of {type(self._owner.optimizer).__name__}, {len(self)} parameter(s)>"

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return defaultdict(dict, {copy.deepcopy(key, memo): copy.deepcopy(self[key], memo) for key in self})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, {key: _plain(self[key]) for key in self})

    # ---- parts ----

    def _checked(self, key: Tensor) -> nn.Parameter:
        if self._owner.state_book().is_foreign(key):
            raise KeyError(
                f"a tensor of shape {tuple(key.shape)} is no parameter of the model that the engine shards: "
                "optimizer.state goes by the module's own parameters"
            )
        return cast(nn.Parameter, key)

    def _name(self, key: Tensor) -> str:
        return f"optimizer.state[{self._owner.state_book().name_of(key)!r}]"

    def _drop(self, key: Any) -> Any:
        book = self._owner.state_book()
        if not isinstance(key, Tensor):
            return book.by_piece.pop(key)
        self._owner.edits.note(f"del {self._name(key)}")
        if self._owner.joint_state:
            book.clear()
            return {}
        return book.drop(self._checked(key))


class StateEntry(MutableMapping[str, Any]):
    """One parameter's state.

    Args:
        owner: The optimizer.
        parameter: The module's.
        held: The state of its piece on this rank, or what stands for it; changed in place.
    """

    def __init__(self, owner: StateOwner, parameter: nn.Parameter, held: dict[str, Any]) -> None:
        self._owner, self._parameter, self.held = owner, parameter, held

    def of(self, parameter: nn.Parameter) -> bool:
        """True if it is of this parameter."""
        return parameter is self._parameter

    def complete(self) -> dict[str, Any]:
        """All values of the state, to be put back.

        Raises:
            RuntimeError: If some were in a tier and were given up.
        """
        for key, value in self.held.items():
            if isinstance(value, Unknown) and value.lost:
                raise RuntimeError(f"{self._label(key)} cannot be put back, {value.why}")
        return self.held

    # ---- what is there ----

    def __iter__(self) -> Iterator[str]:
        self._check("keys()")
        return iter(self.held)

    def __len__(self) -> int:
        self._check("len()")
        return len(self.held)

    def __contains__(self, key: object) -> bool:
        self._check("in")
        return key in self.held

    def __getitem__(self, key: str) -> Any:
        self._check(repr(key))
        return self._shown(key, self.held[key])

    def _shown(self, key: str, value: Any) -> Any:
        """A value as the user gets it."""
        label = self._label(key)
        if isinstance(value, Unknown):
            raise RuntimeError(f"{label} cannot be read here, {value.why}: {_WAY_OUT}")
        book, parameter = self._owner.state_book(), self._parameter
        if key in SCALES or not isinstance(value, (Tensor, OffloadedPart)):
            return value  # of scales this rank's
        if not book.is_per_element(parameter, value):
            return value
        if isinstance(value, Tensor) and book.is_whole(parameter):
            return value.view(parameter.shape)

        def written(what: str) -> None:
            if self.held.get(key) is not value:
                raise RuntimeError(
                    f"{label} was read before it was replaced, loaded or moved: {what} would change values that are "
                    "not the optimizer's any more. Read it again"
                )
            self._owner.edits.note(f"{label}.{what}")

        return ShardedValue(book.place_of(parameter), value, label, written)

    # ---- changes ----

    def __setitem__(self, key: str, value: Any) -> None:
        self._check(f"{key!r} = ...")
        if not (isinstance(value, ShardedValue) and value.local is self.held.get(key)):  # the same one back: no change
            self.held.update(self.filled({key: value}))
            self._owner.edits.note(f"{self._label(key)} = {type(value).__name__}")

    def filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of full values.

        Raises:
            ValueError: If one has another shape than the parameter.
            RuntimeError: If no values can be set.
        """
        if values:
            self._check("values")
        book, parameter = self._owner.state_book(), self._parameter
        for key, value in values.items():
            if key == "master" and book.keeps_master(parameter):
                raise ValueError(
                    f"{self._label(key)}: the engine keeps the float32 master weights; set them with "
                    "safe_set_full_fp32_param(parameter, value)"
                )
            if isinstance(value, ShardedValue) and not value.place.same(book.place_of(parameter)):
                raise ValueError(f"{value.label} is divided among the ranks otherwise than {self._label(key)}")
            blocks = (blocks_of(parameter.numel()),) if key in SCALES else None
            shapes = parameter.shape, book.place_of(parameter).part.shape, blocks
            if isinstance(value, Tensor) and value.dim() and value.shape not in shapes:
                if not book.is_whole(parameter):
                    raise ValueError(
                        f"{self._label(key)} takes a number, or a full value of the parameter's shape "
                        f"{tuple(parameter.shape)}, not one of shape {tuple(value.shape)}"
                    )
        return {key: book.part_of(parameter, key, value) for key, value in values.items()}

    def __delitem__(self, key: str) -> None:
        self._check(f"del {key!r}")
        del self.held[key]
        self._owner.edits.note(f"del {self._label(key)}")

    # ---- copies ----

    def copy(self) -> dict[str, Any]:
        """A plain dict with the same values."""
        return dict(self.items())

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return {**other, **self.copy()} if isinstance(other, Mapping) else NotImplemented

    def __ior__(self, other: Any) -> StateEntry:
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StateEntry):
            return self.held is other.held
        if not isinstance(other, Mapping):
            return False
        if not len(self) or len(self) != len(other):
            return len(self) == len(other)
        raise TypeError(f"{self._label('')} cannot be compared: {_WAY_OUT}")

    def __repr__(self) -> str:
        keys = "values" if self._owner.opaque_state else ", ".join(map(str, self.held))
        return f"<{self._label('')}: {keys or 'empty'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self.items()), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)

    # ---- parts ----

    def _label(self, key: str) -> str:
        name = self._owner.state_book().name_of(self._parameter)
        return f"optimizer.state[{name!r}]" + (f"[{key!r}]" if key else "")

    def _check(self, what: str) -> None:
        if self._owner.opaque_state:
            raise RuntimeError(
                f"{self._label('')}: {what} cannot be answered on one rank, {self._owner.opaque_state}. Whole entries "
                f"can be dropped; {_WAY_OUT}"
            )


def _plain(values: Any) -> Any:
    return dict(values) if isinstance(values, StateEntry) else values


def _give_up(values: Any) -> None:
    """Mark values in a tier, whose room the next step uses, as gone."""
    if not isinstance(values, dict):
        return  # under a key that is no parameter
    for key in [key for key, value in values.items() if isinstance(value, OffloadedPart)]:
        values[key] = Unknown("its values in the tier were given up", lost=True)
