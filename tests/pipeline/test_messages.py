"""Messages between stages: what can be sent arrives as it was; sizes and structures may change at any time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher import Launcher
from zero_strategy.pipeline.messages import (
    ALIGNMENT,
    FIRST_BYTES,
    Channel,
    Layout,
    Stamp,
    announce,
    describe,
    kind_of,
    layout,
    pack,
    put_together,
    read_header,
    read_layout,
    take_apart,
    unpack,
)
from zero_strategy.pipeline.point_to_point import PointToPoint
from zero_strategy.pipeline.transport import Inlet, Outlet, failure_of

_STAMP = Stamp(run=3, program=0xFFFFFFFF, micro_batch=2, sequence=1)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As ModelOutput: a dataclass, and a dict of what is not None."""

    hidden: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        self.update({name: value for name in ("hidden", "cache") if (value := getattr(self, name)) is not None})


_X = torch.arange(6.0).reshape(2, 3)
_VALUES: dict[str, Any] = {
    "a tensor": _X,
    "nothing": None,
    "no tensors": [1, 2.5, "text", True, None, float("inf"), 10**30],
    "a tuple": (_X, None, [_X + 1, (7,)]),
    "a dict": {"x": _X, 3: {"y": _X.long()}, None: ()},
    "one twice": (_X, [_X]),
    "a named tuple": Pair(_X, Pair(1, None)),
    "a model output": Output(hidden=_X),
    "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.int8, torch.complex64)],
    "odd shapes": (torch.ones(()), torch.ones(0, 4), torch.ones(1, 1, 1), torch.ones(33, dtype=torch.uint8)),
    "strides": (_X.t(), _X[:, 1:], torch.ones(1).expand(4)),
}


def _through(value: Any, spare: int = 0) -> tuple[Any, Tensor, Layout]:
    tensors, structure = take_apart(value)
    plan = layout(structure, [kind_of(tensor, tensor.requires_grad) for tensor in tensors])
    buffer = torch.zeros(plan.nbytes + spare, dtype=torch.uint8)
    pack(_STAMP, plan, tensors, buffer)
    header = read_header(buffer)
    assert header.stamp == _STAMP and header.announced is None
    read = read_layout(header.description)
    assert read == plan
    return put_together(unpack(buffer, read), read.structure), buffer, read


def _same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, Tensor):
        assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value)
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for key in value:
            _same(found[key], value[key])
    elif isinstance(value, (tuple, list)):
        assert len(found) == len(value)
        for one, other in zip(found, value):
            _same(one, other)
    else:
        assert found == value


@pytest.mark.parametrize("name", _VALUES)
def test_values_arrive_as_they_were(name: str) -> None:
    found, _, _ = _through(_VALUES[name], spare=77)
    _same(found, _VALUES[name])


def test_tensors_lie_in_the_buffer_and_one_object_stays_one() -> None:
    x = torch.randn(5, requires_grad=True)
    (first, second, third), buffer, read = _through((x, x, torch.ones(3)))
    assert first is second and [kind.wants_gradient for kind in read.tensors] == [True, False]
    for tensor, offset in zip((first, third), read.offsets):
        assert offset % ALIGNMENT == 0 and tensor.data_ptr() == buffer.data_ptr() + offset
    version = first._version
    third.add_(1)
    assert first._version == version and not first._is_view()


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match=r"outputs\['a'\]\[1\] is a builtins.set"):
        take_apart({"a": [1, {2}]})
    with pytest.raises(TypeError, match=r"outputs has a key \(1, 2\)"):
        take_apart({(1, 2): 3})
    with pytest.raises(TypeError, match="meta"):
        kind_of(torch.ones(2, device="meta"), False)
    with pytest.raises(ValueError, match="no message of a pipeline"):
        read_header(torch.zeros(100, dtype=torch.uint8))
    assert describe(take_apart((_X, {"a": [None]}))[1]) == "(T, {a: [None]})"


def test_an_announcement_says_how_long_the_message_is() -> None:
    buffer = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
    announce(_STAMP, 1 << 40, buffer)
    header = read_header(buffer)
    assert (header.stamp, header.announced) == (_STAMP, 1 << 40)


_SHAPES = [(4, 8), (4, 8), (2, 8), (400, 8), (400, 8), (400, 8), (3, 8), (3, 8), (0, 8), (300000,), (4, 8), (1,)]


def _exchange(wrong: Stamp | None) -> tuple[dict[str, int], list[float]] | str:
    """Rank 0 sends tensors of changing sizes and structures to rank 1, and rank 1 as many back at the same time."""
    rank = dist.get_rank()
    device, there, back = torch.device("cpu"), Channel(0, 1, 0), Channel(1, 0, 1)
    transport = PointToPoint(
        [0, 1], [there, back], device=device, timeout=20, patience=20, name="test", title=f"stage {rank}"
    )
    outlet = Outlet(transport, there if rank == 0 else back, "activation", device)
    inlet = Inlet(transport, back if rank == 0 else there, "activation", f"stage {1 - rank}", f"stage {rank}", device)
    for run in range(2):
        inlet.expect(len(_SHAPES))
        found = []
        for i, shape in enumerate(_SHAPES):
            stamp = Stamp(run, 1, i, i)
            value = torch.full(shape, rank + i)
            tensors, structure = take_apart((value, None) if i % 3 else value)
            kinds = [kind_of(tensor, False) for tensor in tensors]
            try:  # both: the other rank may have broken the connection before the second message
                outlet.send(wrong if wrong is not None and rank == 0 else stamp, structure, kinds, tensors)
                plan, tensors = inlet.take(stamp)
            except RuntimeError as error:
                transport.waits.fail(failure_of(error, rank, f"stage {rank}"))
                transport.close()
                return f"{type(error).__name__}: {error}"
            assert plan.tensors[0].shape == shape and (plan.structure[0] == "tuple") == bool(i % 3)
            found.append(float(tensors[0].double().mean()) if tensors[0].numel() else -1.0)
        transport.finish_sends()
    calls = dict(transport.counters.calls)
    transport.close()
    return calls, found


def test_sizes_may_change_at_any_time(ranks: Launcher) -> None:
    """Messages that fit are sent at once; only growth is announced: in each run, to 12800 bytes and to 1.2 MB."""
    results = ranks(2)(_exchange, None)
    for rank, result in enumerate(results):
        calls, found = result
        assert found == [-1.0 if 0 in shape else float(i + 1 - rank) for i, shape in enumerate(_SHAPES)]
        assert calls == {"activation": 2 * len(_SHAPES), "control": 4}


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        (Stamp(7, 1, 0, 0), "is in its batch number 7 of this pipeline, stage 1 in number 0"),
        (Stamp(0, 2, 0, 0), "runs another schedule"),
        (Stamp(0, 1, 4, 0), "sent the activation of micro-batch 4"),
    ],
)
def test_a_rank_out_of_step_is_named(ranks: Launcher, stamp: Stamp, words: str) -> None:
    first, second = ranks(2)(_exchange, stamp)
    assert second.startswith("OutOfStepError: stage 0 is out of step: it ") and words in second
    assert first.startswith("RankFailedError: stage 0 is out of step") and words in first
