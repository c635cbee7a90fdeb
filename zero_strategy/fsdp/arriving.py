"""Parameters whose new values are on their way (stages 1 and 2): the gather after a step, beside what comes after it.

An optimizer's step starts a gather of each bucket, and nobody waits. The values are waited for where they are used:

- in forward pre-hooks of the unit's module, and of modules that hold parameters of the root, which are there until
  they have run once: so a kernel finds the values, however it is called;
- by any other read or write of a parameter: its class is `ArrivingParameter` meanwhile, so that each call of torch with
  it arrives in `__torch_function__`, as for released parameters (`fsdp/released.py`);
- by the engine's own code, since `ParameterBucket.flat` waits.

The stream on which the step ran waits, so that it is as if the step had waited, and with it any other stream that reads
first. On the CPU the step itself waits: a thread of the transport's brings the values there, which may have ended by
the time an engine is collected that nobody has closed.

What none of these sees makes the step wait, as it would otherwise: tensors that share a bucket's memory and are
somebody else's (views of parameters, what `p.data` gave, numpy arrays), which the count of references shows; modules
of TorchScript; code that `torch.compile` has made, which looks at the class of a parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from torch import Tensor, nn

from zero_strategy.fsdp.ownership import owner_of
from zero_strategy.fsdp.released import LOOKS_AT_GRAPH, QUICK, call_again, quick
from zero_strategy.fsdp.tracked import Tracked, TrackedParameter
from zero_strategy.runtime.metadata_calls import METADATA, STRIDES
from zero_strategy.runtime.torch_private import DisableTorchFunctionSubclass, tree_leaves


class ArrivingParameter(Tracked, nn.Parameter):
    """Never constructed: a `TrackedParameter` is one while a gather brings its values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; else wait for them first."""
        kwargs = kwargs or {}
        if func in METADATA or func in STRIDES or func in LOOKS_AT_GRAPH:
            with DisableTorchFunctionSubclass():  # else it would come back here
                return func(*args, **kwargs)
        await_values(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return call_again(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """See `TrackedParameter`."""
        await_values([self])
        return self.data  # of the class that it has by now

    @data.setter
    def data(self, values: Tensor) -> None:
        await_values([self])
        self.data = values

    def detach(self) -> Tensor:
        """See `TrackedParameter`."""
        await_values([self])
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        await_values([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        await_values([self])
        return self.__reduce_ex__(protocol)


for _name in (*QUICK, "dtype"):
    setattr(ArrivingParameter, _name, quick(_name))


class ArrivingBucket(Protocol):
    """A bucket as these functions see it; see `ParameterBucket`."""

    def arrive(self) -> None:
        """Wait until the values are there."""


def await_values(parameters: Iterable[nn.Parameter]) -> None:
    """Wait for the values of arriving parameters, which are tracked ones afterwards."""
    for parameter in parameters:
        model = owner_of(parameter)
        place = None if model is None else model.place(parameter)
        if place is not None:
            cast(ArrivingBucket, place[0]).arrive()
        parameter.__class__ = TrackedParameter  # also where the engine is gone, and has waited when it went


def can_wait(parameters: Iterable[nn.Parameter]) -> bool:
    """True if uses of all of these can be seen."""
    # `show_arriving` sets one class: DTensors and parameters of user classes would lose theirs.
    return all(type(parameter) is TrackedParameter for parameter in parameters)


def show_arriving(parameters: Iterable[nn.Parameter]) -> None:
    """Values are on their way."""
    for parameter in parameters:
        parameter.__class__ = ArrivingParameter


def show_arrived(parameters: Iterable[nn.Parameter]) -> None:
    """They are there."""
    for parameter in parameters:
        kind: type = type(parameter)
        if kind is ArrivingParameter:
            parameter.__class__ = TrackedParameter
