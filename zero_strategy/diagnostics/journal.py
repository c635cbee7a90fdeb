"""The journal of a run in slots: bits of each step, from which two runs, or a run and its replay, can be compared.

    engine.slots        inputs, clip, slot over          -> what each slot computed with, and what came out
    modules' hooks      forwards of units and the root   -> samples of outputs
    engine.observed     loss, step begins, step over     -> losses, hyper-parameters; the record is written

Nothing waits for a device before the step is over: digests stay where they were computed, and travel together.
"""

from __future__ import annotations

import json
import random
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from zero_strategy.diagnostics.digests import MASK, Digester, factor, salt_of, short, words_of
from zero_strategy.diagnostics.journal_file import (
    JournalWriter,
    SlotEntry,
    StepEntry,
    folded_by,
    journal_path,
    pack_json,
    pack_weights,
)
from zero_strategy.diagnostics.journal_header import Place, header_of, lines_of, own_place, plain_groups
from zero_strategy.engine import ZeroEngine
from zero_strategy.engine_slots import SlotEvent
from zero_strategy.fsdp.unshard import tensors_in
from zero_strategy.optim.grad_norm import GradientStats
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.observer import Mark
from zero_strategy.runtime.torch_private import in_backward, uncompiled

Part = tuple[str, int, int]
"""Name of a parameter, and the first and one-past-last element of a part of it."""

_MOST_TENSORS = 4
"""Of an output, that a sample is taken of."""


class Sink(Protocol):
    """The place where a journal goes."""

    def header(self, place: Place, header: Mapping[str, Any]) -> None:
        """A session begins."""

    def hyper(self, step: int, changes: Mapping[str, Any]) -> None:
        """Hyper-parameters that have changed before a step."""

    def step(self, place: Place, entry: StepEntry) -> None:
        """A step is over."""

    def weights(self, place: Place, step: int, lines: tuple[int, ...]) -> None:
        """Digests of the weights after a step, by line."""

    def close(self) -> None:
        """The end; a second call does nothing."""


class FileSink:
    """Writes the file of one rank; see `Sink`.

    Args:
        path: Of the file.

    Raises:
        ValueError, OSError: See `JournalWriter`.
    """

    def __init__(self, path: Path) -> None:
        self._writer = JournalWriter(path)

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()

    def header(self, place: Place, header: Mapping[str, Any]) -> None:
        """See `Sink`."""
        self._writer.write(b"H", pack_json(header))

    def hyper(self, step: int, changes: Mapping[str, Any]) -> None:
        """See `Sink`."""
        self._writer.write(b"P", pack_json({"step": step, "changes": changes}))

    def step(self, place: Place, entry: StepEntry) -> None:
        """See `Sink`."""
        self._writer.write(b"S", entry.pack())

    def weights(self, place: Place, step: int, lines: tuple[int, ...]) -> None:
        """See `Sink`."""
        self._writer.write(b"W", pack_weights(step, lines))


@dataclass
class _Slot:
    """One slot of this rank, as far as it is known; numbers are places among what is fetched at the step's end."""

    slot: int
    stream: int
    inputs: int
    batch: int | None
    losses: int
    rows: list[tuple[int, int, int]]
    """(number of the unit, call, place of the row's digest); unit 0 is the root."""


@dataclass
class _Seen:
    """Inputs, losses and samples since the last slot was over."""

    inputs: list[Tensor] = field(default_factory=list)
    batches: list[Tensor] = field(default_factory=list)
    told: list[Tensor] = field(default_factory=list)
    returned: list[Tensor] = field(default_factory=list)
    samples: list[tuple[int, int, Tensor]] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)


@dataclass
class _Step:
    """Record of the step at hand, as far as it is known."""

    number: int = 0
    taken: int = 0
    seen: _Seen = field(default_factory=_Seen)
    slots: list[_Slot] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    """Numbers in `values`."""
    gradients: dict[Part, int] = field(default_factory=dict)
    hyper: dict[str, Any] | None = None
    norm: float | None = None
    clip: tuple[str, float, bool] = ("", 0.0, False)

    def later(self, values: Tensor) -> int:
        """The place that values will have among those that are fetched when the step is over."""
        first = self.waiting
        self.values.append(values.reshape(-1).to(torch.int64))
        self.waiting += values.numel()
        return first


class StepJournal:
    """Keeps the journal of one engine.

    Args:
        engine: Its steps are slots.
        sink: Where it goes.
        weights_every: Steps from one digest of the weights to the next; 0: there is none.
        elements: Of each unit's output that are looked at; 0: all.
        factory: Place of a factory that makes the same training again, or "".

    Attributes:
        places: Parts of the run for which records are made: this rank's, until a session of others begins.
        lines: Units, or some together, with a digest each.
    """

    def __init__(
        self, engine: ZeroEngine, sink: Sink, *, weights_every: int = 100, elements: int = 64, factory: str = ""
    ) -> None:
        self._engine, self._sink = ref(engine), sink
        self._weights_every, self._elements, self._factory = weights_every, elements, factory
        self._digester = Digester(engine.model.device)
        self.lines = lines_of(engine)
        self.places: list[Place] = [own_place(engine)]
        self._units = [unit.name for unit in engine.model.units]
        ids = engine.mesh.world_group.control.all_gather_objects(uuid.uuid4().hex)
        self._session, self._headed = str(ids[0]), False
        self._at = _Step()
        self._before: dict[Part, int] = {}
        self._autocast: torch.dtype | None = None
        self._known_hyper: dict[str, Any] = {}
        self._hooks = list(self._register(engine))
        engine.slots.listeners.append(self._slot_event)
        engine.observed.listeners.append(self._mark)
        engine.gradient_watchers.append(self._norm_found)

    def close(self) -> None:
        """Stop listening, and close the file; a second call does nothing."""
        self._sink.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        engine = self._engine()
        if engine is not None and self._slot_event in engine.slots.listeners:
            engine.slots.listeners.remove(self._slot_event)
            engine.observed.listeners.remove(self._mark)
            engine.gradient_watchers.remove(self._norm_found)

    def _register(self, engine: ZeroEngine) -> Iterator[Any]:
        yield engine.module.register_forward_pre_hook(_Before(self._root_begins), with_kwargs=True, prepend=True)
        yield engine.module.register_forward_hook(_After(self._root_ends))
        for number, unit in enumerate(engine.model.units[1:], start=1):
            yield unit.module.register_forward_hook(_After(self._take_sample, number))

    # ---- a slot ----

    def _root_begins(self, inputs: Any) -> None:
        device = self._digester.device.type
        if torch.is_autocast_enabled(device):
            self._autocast = torch.get_autocast_dtype(device)
        self._at.seen.inputs.append(self._digester.of_any(inputs, salt_of("inputs", len(self._at.seen.inputs))))

    def _root_ends(self, unit: int, output: Any) -> None:
        self._take_sample(unit, output)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            self._at.seen.returned.append(loss.detach())

    def _take_sample(self, unit: int, output: Any) -> None:
        found = [output] if isinstance(output, Tensor) else tensors_in(output)
        tensors = [tensor for tensor in found if tensor.numel()][:_MOST_TENSORS]
        if not tensors:
            return
        call = self._at.seen.calls.get(unit, 0)
        self._at.seen.calls[unit] = call + 1
        if not self._elements:
            whole = torch.stack([self._digester.of(t, 0, salt_of("output", i)) for i, t in enumerate(tensors)]).sum()
            self._at.seen.samples.append((unit, call, whole))
            return
        parts = [_sample(tensor, max(1, self._elements // len(tensors))) for tensor in tensors]
        self._at.seen.samples.append((unit, call, parts[0] if len(parts) == 1 else torch.cat(parts)))

    def _slot_event(self, event: SlotEvent, value: Any) -> None:
        if event == "inputs":
            if value is not None:
                self._at.seen.batches.append(self._digester.of_any(value, salt_of("batch", len(self._at.seen.batches))))
        elif event == "clip":
            self._at.clip = value
        else:
            self._slot_over(int(value))

    def _slot_over(self, slot: int) -> None:
        engine = self._engine()
        if engine is None:
            return
        seen = self._at.seen
        if slot == engine.slots.own[0]:  # also where a step that was begun has begun anew
            taken = engine.steps.taken
            self._at = _Step(taken + engine.steps.skipped, taken)
        self._at.seen = _Seen()
        device = self._digester.device
        # Losses that were told are what backwards began with.
        losses = [loss.to(device).double().reshape(1).view(torch.int64) for loss in seen.told or seen.returned]
        self._at.slots.append(
            _Slot(
                slot,
                self._stream(),
                self._at.later(_sum(seen.inputs, device)),
                self._at.later(_sum(seen.batches, device)) if seen.batches else None,
                self._at.later(_sum(losses, device)),
                self._rows(seen.samples),
            )
        )
        if engine.slots.complete:
            if not self._headed:
                self._before = self._weights(engine)
            self._at.gradients = {
                name: self._at.later(found) for name, found in self._parts(self._reduced(engine), "gradient").items()
            }

    def _rows(self, samples: list[tuple[int, int, Tensor]]) -> list[tuple[int, int, int]]:
        if not samples:
            return []
        tensors = [sample for _, _, sample in samples]
        digests = (
            self._digester.of_rows(pad_sequence(tensors, batch_first=True)) if self._elements else torch.stack(tensors)
        )
        first = self._at.later(digests)
        return [(unit, call, first + number) for number, (unit, call, _) in enumerate(samples)]

    def _stream(self) -> int:
        """A digest of the states of all generators that a slot seeds."""
        found = zlib.crc32(torch.get_rng_state().numpy().data)
        if self._digester.device.type == "cuda":
            found = zlib.crc32(torch.cuda.get_rng_state(self._digester.device).numpy().data, found)
        legacy = np.random.get_state(legacy=False)["state"]
        found = zlib.crc32(legacy["key"].data, found)
        return zlib.crc32(f"{legacy['pos']} {hash(random.getstate()[1])}".encode(), found)

    # ---- parts of parameters ----

    def _reduced(self, engine: ZeroEngine) -> Iterator[tuple[str, int, Tensor]]:
        """Name, first element and values of this rank's part of each reduced gradient."""
        for bucket in engine.model.buckets:
            gradients = engine.model.gradient_of(bucket)
            for piece in bucket.pieces:
                if piece.index in gradients.live and (values := gradients.reduced_part(piece.index)) is not None:
                    yield bucket.names[piece.index], piece.start, values

    def _masters(self, engine: ZeroEngine) -> Iterator[tuple[str, int, Tensor]]:
        """Name, first element and values of this rank's part of each trained parameter, as fine as they are kept."""
        for bucket in engine.model.buckets:
            for piece in bucket.pieces:
                if bucket.parameters[piece.index].requires_grad:
                    values = bucket.master.read(piece.offset, piece.offset + piece.numel)
                    yield bucket.names[piece.index], piece.start, values

    def _parts(self, own: Iterator[tuple[str, int, Tensor]], what: str) -> dict[Part, Tensor]:
        """Digests of the parts that places have; those that several have are computed once."""
        found: dict[Part, Tensor] = {}
        for name, start, values in own:
            salt, stop = salt_of(what, name), start + values.numel()
            for place in self.places:
                low, high = place.pieces.get(name, (0, 0))
                low, high = max(low, start), min(high, stop)
                if low < high and (name, low, high) not in found:
                    found[name, low, high] = self._digester.of(values[low - start : high - start], low, salt)
        return found

    def _by_line(self, place: Place, parts: Mapping[Part, int]) -> list[int]:
        """Sums over the parameters of each line, of what a place has."""
        sums = {name: parts.get((name, *bounds), 0) for name, bounds in place.pieces.items()}
        return [sum(sums.get(name, 0) for name in line.parameters) & MASK for line in self.lines]

    def _weights(self, engine: ZeroEngine) -> dict[Part, int]:
        with torch.no_grad():
            parts = self._parts(self._masters(engine), "weight")
        values = torch.stack(list(parts.values())).tolist() if parts else []
        return dict(zip(parts, values, strict=True))

    # ---- a step ----

    def _norm_found(self, stats: GradientStats) -> None:
        self._at.norm = stats.norm.value

    def begin_session(self, places: Sequence[Place]) -> None:
        """Make records for these from the next step on, under a header of their own."""
        self.places, self._headed = list(places), False

    def _mark(self, mark: Mark, value: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        if mark == "loss":
            if not in_backward():
                self._at.seen.told.append(value)
        elif mark == "step begins" and self._at.hyper is None:
            self._at.hyper = plain_groups(engine)
        elif mark == "step over":
            if self._at.slots and self._at.hyper is not None:
                self._write(engine, self._at.hyper)
            self._at = _Step()

    def _write(self, engine: ZeroEngine, hyper: dict[str, Any]) -> None:
        skipped = engine.steps.taken == self._at.taken
        numbers = torch.cat(self._at.values).tolist() if self._at.values else []
        if not self._headed:
            for place in self.places:
                header = header_of(engine, place, self.lines, self._session, hyper, self._autocast)
                header |= {"elements": self._elements, "factory": self._factory}
                self._sink.header(place, header)
                self._sink.weights(place, self._at.number - 1, tuple(self._by_line(place, self._before)))
            self._known_hyper, self._headed = hyper, True
        keys = hyper.keys() | self._known_hyper.keys()
        changes = {key: hyper.get(key) for key in sorted(keys) if hyper.get(key) != self._known_hyper.get(key)}
        if changes:
            self._sink.hyper(self._at.number, changes)
            self._known_hyper = hyper
        digest = salt_of(json.dumps(hyper, sort_keys=True))
        gradients = {part: numbers[at] for part, at in self._at.gradients.items()}
        kind, bound, partly = self._at.clip
        for place in self.places:
            slots = [slot for slot in self._at.slots if slot.slot in place.slots]
            self._sink.step(
                place,
                StepEntry(
                    self._at.number, self._at.norm, digest, kind, bound, partly, skipped, self._groups(slots, numbers),
                    self._forwards(slots, numbers), tuple(self._by_line(place, gradients)),
                ),
            )  # fmt: skip
        if self._weights_every and (self._at.number + 1) % self._weights_every == 0:
            weights = self._weights(engine)
            for place in self.places:
                self._sink.weights(place, self._at.number, tuple(self._by_line(place, weights)))

    def _groups(self, slots: Sequence[_Slot], numbers: Sequence[int]) -> tuple[SlotEntry, ...]:
        engine = self._engine()
        assert engine is not None
        fold = folded_by(engine.slots.slots)
        found: dict[int, SlotEntry] = {}
        for slot in slots:
            output = [_digest(numbers[at], "root", slot.slot, call) for unit, call, at in slot.rows if unit == 0]
            entry = SlotEntry(
                slot.slot // fold,
                1,
                numbers[slot.losses] & MASK,
                short(numbers[slot.inputs] & MASK),
                0 if slot.batch is None else short(numbers[slot.batch] & MASK) or 1,
                slot.stream,
                short(sum(output) & MASK),
            )
            found[entry.group] = found[entry.group] + entry if entry.group in found else entry
        return tuple(found[group] for group in sorted(found))

    def _forwards(self, slots: Sequence[_Slot], numbers: Sequence[int]) -> tuple[int, ...]:
        sums = dict.fromkeys(self._units, 0)
        for slot in slots:
            for unit, call, at in slot.rows:
                name = self._units[unit]
                sums[name] += short(_digest(numbers[at], "unit", name, slot.slot, call) & MASK)
        return tuple(sum(sums[name] for name in line.units) & 0xFFFFFFFF for line in self.lines)


def _sum(digests: Sequence[Tensor], device: torch.device) -> Tensor:
    if not digests:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return torch.stack([digest.reshape(()) for digest in digests]).sum()


def _digest(number: int, *parts: str | int) -> int:
    return number * factor(salt_of(*parts), 0)


def _sample(tensor: Tensor, count: int) -> Tensor:
    """Words of a few elements, evenly spread; int32. Few calls: this runs for every unit in every forward."""
    flat = tensor.detach()
    if not flat.is_contiguous():
        flat = flat.contiguous()
    # An odd distance does not stay in one column.
    distance = max(1, flat.numel() // count) | 1
    taken = min(count, -(-flat.numel() // distance))
    found = flat.as_strided((taken,), (distance,)).clone()
    return found.view(torch.int32) if found.dtype == torch.float32 else words_of(found)


class _Before(EphemeralHook):
    """A hook before the root's forward, where it trains."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        self._told = told

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _trains(module):
            self._told([args, kwargs])


class _After(EphemeralHook):
    """A hook after a forward that trains."""

    def __init__(self, told: Callable[[int, Any], None], unit: int = 0) -> None:
        self._told, self._unit = told, unit

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if _trains(module):
            self._told(self._unit, output)


def _trains(module: nn.Module) -> bool:
    """True but in an evaluation, and where a checkpoint computes a forward again."""
    return module.training and torch.is_grad_enabled() and not in_backward()


def keep_journal(engine: ZeroEngine, directory: Path) -> StepJournal:
    """Begin to write the journal of this rank, or go on with it, as the engine's settings say. A collective.

    Args:
        engine: Its steps are slots.
        directory: Of the run.

    Raises:
        ValueError: If what is there is damaged, or no journal.
        OSError: If it cannot be written to.
    """
    settings = engine.config.config.diagnostics
    sink = FileSink(journal_path(directory, engine.mesh.world_group.rank))
    journal = StepJournal(
        engine,
        sink,
        weights_every=settings.journal_weights_every_n_steps,
        elements=settings.journal_elements,
        factory=settings.journal_factory,
    )
    engine.when_plain(journal.close)
    return journal
