"""State dicts that are made when somebody looks into them.

Lightning builds one dict with everything in it, hands it to the user's hooks, and then saves it (or loads from it).
Sharded weights should not become whole on the way. So the dict holds these: a hook that reads or changes a state dict
gets the real thing; where no hook does, the engine moves the shards by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from zero_strategy.runtime.torch_private import version_of


class StateOnDemand(MutableMapping[str, Any]):
    """A state dict that `make` makes at the first access; under stage 3 all ranks must then access it.

    Args:
        make: Gives the whole state dict.
        nested: Values are containers, whose changes are not seen: to have been looked into counts as changed.
        source: What it is made from, for who can take it from there.
        take_part: What a rank calls that has no use for it while others make it; default: `make`.
    """

    def __init__(
        self,
        make: Callable[[], dict[str, Any]],
        *,
        nested: bool = False,
        source: Any = None,
        take_part: Callable[[], object] | None = None,
    ) -> None:
        self._make, self._nested, self.source, self._take_part = make, nested, source, take_part or make
        self._made: dict[str, Any] | None = None
        self._original: dict[str, Any] = {}
        self._versions: dict[str, int] = {}

    def whole(self) -> dict[str, Any]:
        """The real dict."""
        if self._made is None:
            self._made = dict(self._make())
            self._original = dict(self._made)
            tensors = {key: value for key, value in self._made.items() if isinstance(value, Tensor)}
            self._versions = {key: version_of(value) for key, value in tensors.items() if not value.is_inference()}
        return self._made

    def take_part(self) -> None:
        """Do this rank's share in `whole` of others, and keep nothing."""
        if self._made is None:
            self._take_part()

    @property
    def changed(self) -> bool:
        """True if somebody added, removed, replaced or wrote to an entry."""
        if self._made is None:
            return False
        if self._nested or self._made.keys() != self._original.keys():
            return True
        if any(self._made[key] is not value for key, value in self._original.items()):
            return True
        return any(version_of(self._original[key]) != version for key, version in self._versions.items())

    def __getitem__(self, key: str) -> Any:
        return self.whole()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.whole()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.whole()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return len(self.whole())

    def __bool__(self) -> bool:
        return True  # asked for by `if state_dict:`, which should not gather a model

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.whole(),)


def untouched(value: Any) -> bool:
    """True if the engine may move this state by itself: it is on demand, and nobody changed it."""
    return isinstance(value, StateOnDemand) and not value.changed


def whole(value: Any) -> Any:
    """The real thing in place of a state on demand, also inside dicts and lists."""
    if isinstance(value, StateOnDemand):
        return value.whole()
    if type(value) is dict:
        return {key: whole(item) for key, item in value.items()}
    if type(value) is list:
        return [whole(item) for item in value]
    return value


def take_part(value: Any) -> None:
    """This rank's share in `whole` of others, for the same dict."""
    if isinstance(value, StateOnDemand):
        value.take_part()
    elif type(value) is dict:
        take_part(list(value.values()))
    elif type(value) is list:
        for item in value:
            take_part(item)
