"""The check of a schedule's instructions: completeness, order, bounded buffers, and that there is no deadlock.

Every instruction must be there once, after what it needs, in a buffer that nobody else is using. Then messages are run
as if a send waited for its receive, the strictest that a transport can be: if all are delivered, there is no deadlock
under any.

All ranks are looked at together, in arrays over [stage and micro-batch], a "place".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zero_strategy.pipeline.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LOAD,
    RECV_ACTIVATION,
    RECV_GRAD,
    SEND_ACTIVATION,
    SEND_GRAD,
    TAIL,
    Numbers,
    PipeSchedule,
    Program,
    ScheduleError,
    read_program,
)

_WORDS = {
    FORWARD: "its forward",
    BACKWARD_INPUT: "its backward, or the input half of it",
    BACKWARD_WEIGHT: "the weight half of its backward",
    SEND_ACTIVATION: "sending its outputs",
    RECV_ACTIVATION: "receiving its inputs",
    SEND_GRAD: "sending its gradient",
    RECV_GRAD: "receiving its gradient",
    LOAD: "loading it",
}
_ORDER = (
    (RECV_ACTIVATION, FORWARD),
    (LOAD, FORWARD),
    (FORWARD, SEND_ACTIVATION),
    (SEND_ACTIVATION, RECV_GRAD),
    (RECV_GRAD, BACKWARD_INPUT),
    (FORWARD, BACKWARD_INPUT),
    (BACKWARD_INPUT, BACKWARD_WEIGHT),
    (BACKWARD_INPUT, SEND_GRAD),
)
"""What comes before what, with one micro-batch in one stage."""


def check(schedules: Sequence[PipeSchedule]) -> None:
    """Check the schedules of all ranks of a pipeline, for training or, if none has a backward, for inference.

    Each micro-batch is loaded by the first and the last stage, and has in every stage one forward and, for training,
    one backward or its two halves in order; messages between all stages that are on different ranks, in one order on
    both sides; buffers that stay its own until all of this is done; the end of the batch, the same on all ranks.
    Nothing waits forever if sends block.

    Raises:
        ScheduleError: If not; it names rank, step and instruction.
    """
    program = read_program(schedules)
    listing = _listing(program)
    training = bool(np.isin(listing.code, (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)).any())
    # In this order: buffers and messages are looked at when every place has each of its instructions, and once.
    _check_tails(program, training)
    _check_places(program, listing, training)
    _check_buffers(program, listing)
    _deliver(program, listing)


@dataclass(frozen=True)
class _Listing:
    """All instructions about micro-batches, rank after rank."""

    rank: Numbers
    at: Numbers
    """Number of the instruction on its rank."""
    code: Numbers
    place: Numbers
    buffer: Numbers

    def where(self, found: NDArray[np.bool_]) -> tuple[int, int]:
        """Rank and number of the first instruction that was found."""
        first = int(np.argmax(found))
        return int(self.rank[first]), int(self.at[first])


def _listing(program: Program) -> _Listing:
    lengths = [int(np.count_nonzero(ops.code < TAIL)) for ops in program.ops]
    rank = np.repeat(np.arange(len(lengths)), lengths)
    at = np.concatenate([np.arange(length) for length in lengths])
    code, stage, micro_batch, buffer = (
        np.concatenate([getattr(ops, name)[:length] for ops, length in zip(program.ops, lengths)])
        for name in ("code", "stage", "micro_batch", "buffer")
    )
    return _Listing(rank, at, code, stage * program.micro_batches + micro_batch, buffer)


def _check_tails(program: Program, training: bool) -> None:
    """The end of the batch: reductions and step, in order, all ranks the same ones."""
    first = program.ops[0].code[program.ops[0].code >= TAIL]
    for rank, ops in enumerate(program.ops):
        start = int(np.count_nonzero(ops.code < TAIL))
        tail = ops.code[ops.code >= TAIL]
        steps = np.diff(np.maximum(ops.code, TAIL - 1))  # instructions about micro-batches are all alike here
        wrong = np.flatnonzero((steps < 0) | ((steps == 0) & (ops.code[1:] >= TAIL)))
        if wrong.size:
            raise program.error(rank, int(wrong[0]) + 1, "is out of order at the end of the batch")
        # The step is the last of TAIL_CLASSES.
        if training and not (tail.size and tail[-1] == TAIL + 2):
            raise program.error(rank, len(ops), "the batch ends without OptimizerStep")
        if tail.size and not training:
            raise program.error(rank, start, "there is nothing to reduce or step: the schedule has no backward")
        if not np.array_equal(tail, first):
            raise program.error(rank, start, "the end of the batch is another one on rank 0")


def _needed(program: Program, training: bool) -> dict[int, NDArray[np.bool_]]:
    """Places that need a computation, by its code."""
    placement = program.placement
    stages = np.arange(placement.stages)
    rank_of = np.array([placement.rank_of(stage) for stage in range(placement.stages)])
    before, after = stages > 0, stages < placement.stages - 1
    before[1:] &= rank_of[1:] != rank_of[:-1]
    after[:-1] &= rank_of[1:] != rank_of[:-1]
    always = np.full_like(before, True)
    of_stage = {
        FORWARD: always,
        BACKWARD_INPUT: always & training,
        BACKWARD_WEIGHT: always & training,
        SEND_ACTIVATION: after,
        RECV_ACTIVATION: before,
        SEND_GRAD: before & training,
        RECV_GRAD: after & training,
        LOAD: (stages == 0) | (stages == placement.stages - 1),
    }
    return {code: np.repeat(needed, program.micro_batches) for code, needed in of_stage.items()}


def _check_places(program: Program, listing: _Listing, training: bool) -> None:
    """Everything that is needed once, and after what it needs."""
    needed = _needed(program, training)
    position = _positions(program, listing)
    for code, there in needed.items():
        unneeded = (position[code] >= 0) & ~there
        if unneeded.any():
            place = int(np.argmax(unneeded))
            rank = program.placement.rank_of(place // program.micro_batches)
            raise program.error(rank, int(position[code][place]), "the stage has no need of it")
    for earlier, later in _ORDER:
        _check_order(program, needed[earlier], position[earlier], position[later], _WORDS[earlier])
    rank_of = np.array([program.placement.rank_of(stage) for stage in range(program.placement.stages)])
    same = np.repeat(rank_of[1:] == rank_of[:-1], program.micro_batches)  # this stage and the next one
    one = program.micro_batches
    forward, backward = position[FORWARD], position[BACKWARD_INPUT]
    on_rank = "on the same rank, {} of the stage {} it"
    _check_order(program, same, forward[:-one], forward[one:], on_rank.format("the forward", "before"), moved=one)
    _check_order(program, same, backward[one:], backward[:-one], on_rank.format("the backward", "after"))
    # If a later instruction needed what lacks, the checks of order above have named the one that came too early.
    lacking = {code: there & (position[code] < 0) for code, there in needed.items()}
    if any(places.any() for places in lacking.values()):
        place = int(np.argmax(np.any(list(lacking.values()), axis=0)))
        what = " and ".join(_WORDS[code] for code, places in lacking.items() if places[place])
        stage, micro_batch = divmod(place, program.micro_batches)
        rank = program.placement.rank_of(stage)
        end = int(np.count_nonzero(program.ops[rank].code < TAIL))
        raise program.error(rank, end, f"micro-batch {micro_batch} of stage {stage} still lacks {what}")


def _positions(program: Program, listing: _Listing) -> dict[int, Numbers]:
    """Positions of computations on their rank by code, -1 where there is none; whole backwards count as both halves."""
    places = program.placement.stages * program.micro_batches
    found: dict[int, Numbers] = {}
    for code in range(TAIL):
        own = np.flatnonzero(listing.code == code)
        place = listing.place[own]
        position = np.full(places, -1)
        position[place[::-1]] = listing.at[own[::-1]]  # of several the first
        if np.count_nonzero(position >= 0) < len(own):
            again = np.full(len(listing.at), False)
            again[own] = position[place] != listing.at[own]
            _twice(program, listing, again)
        found[code] = position
    whole = found.pop(BACKWARD)
    for half in (BACKWARD_INPUT, BACKWARD_WEIGHT):
        both = (whole >= 0) & (found[half] >= 0)
        if both.any():
            codes = (listing.code == BACKWARD) | (listing.code == half)
            # The later of the two is named: a half after the whole backward, or else the whole one.
            _twice(program, listing, codes & both[listing.place] & (listing.at > whole[listing.place]))
            _twice(program, listing, codes & both[listing.place] & (listing.at == whole[listing.place]))
        found[half] = np.maximum(found[half], whole)
    return found


def _twice(program: Program, listing: _Listing, again: NDArray[np.bool_]) -> None:
    if again.any():
        micro_batch = int(listing.place[np.argmax(again)]) % program.micro_batches
        raise program.error(*listing.where(again), f"micro-batch {micro_batch} had that before")


def _check_order(
    program: Program, needed: NDArray[np.bool_], earlier: Numbers, later: Numbers, words: str, *, moved: int = 0
) -> None:
    """That `later` comes after `earlier` wherever that is needed; its places begin at `moved`."""
    wrong = needed & (later >= 0) & ((earlier < 0) | (earlier > later))
    if wrong.any():
        index = int(np.argmax(wrong))
        place = index + moved
        what = f"comes before {words}, for micro-batch {place % program.micro_batches}"
        raise program.error(program.placement.rank_of(place // program.micro_batches), int(later[index]), what)


def _check_buffers(program: Program, listing: _Listing) -> None:
    """One buffer for a place from its first instruction to its last, in which no other place is meanwhile."""
    places = program.placement.stages * program.micro_batches
    there = np.array([schedule.num_pipe_buffers() for schedule in program.schedules])[listing.rank]
    outside = (listing.buffer < 0) | (listing.buffer >= there)
    if outside.any():
        rank, at = listing.where(outside)
        raise program.error(rank, at, f"the rank has {program.schedules[rank].num_pipe_buffers()} buffers")
    numbers = np.arange(len(listing.place))
    first, last = np.zeros(places, dtype=np.int64), np.zeros(places, dtype=np.int64)
    first[listing.place[::-1]] = numbers[::-1]
    last[listing.place] = numbers
    buffer = listing.buffer[first]
    elsewhere = listing.buffer != buffer[listing.place]
    if elsewhere.any():
        place = int(listing.place[np.argmax(elsewhere)])
        raise program.error(*listing.where(elsewhere), f"{_held(program, place)} is in buffer {buffer[place]}")
    ranks = listing.rank[first]
    order = np.lexsort((first, buffer, ranks))
    now, following = order[:-1], order[1:]
    shared = (ranks[now] == ranks[following]) & (buffer[now] == buffer[following])
    taken = shared & (last[now] >= first[following])
    if taken.any():
        index = int(np.argmax(taken))
        at = int(first[following[index]])
        what = f"the buffer still holds {_held(program, int(now[index]))}"
        raise program.error(int(listing.rank[at]), int(listing.at[at]), what)


def _held(program: Program, place: int) -> str:
    stage, micro_batch = divmod(place, program.micro_batches)
    return f"micro-batch {micro_batch} of stage {stage}"


def _deliver(program: Program, listing: _Listing) -> None:
    """Run all messages as if each side waited for the other one."""
    placement, micro_batches = program.placement, program.micro_batches
    both = [0] * (2 * placement.stages)  # by sender's stage and direction: the sum of the two ranks
    for stage in range(placement.stages):
        for grad, to in ((0, stage + 1), (1, stage - 1)):
            if 0 <= to < placement.stages:
                both[2 * stage + grad] = placement.rank_of(stage) + placement.rank_of(to)
    keys, numbers = _messages(program, listing)
    position = [0] * len(keys)
    able = list(range(len(keys)))
    while able:
        rank = able.pop()
        own, at = keys[rank], position[rank]
        while (key := own[at]) >= 0:
            other = both[key // micro_batches] - rank  # Both ranks' sum, less this one
            # That rank comes back to this message, when it has come so far itself.
            if keys[other][position[other]] != key:
                break
            at += 1
            position[other] += 1
            able.append(other)
        position[rank] = at
    stuck = [rank for rank, own in enumerate(keys) if own[position[rank]] >= 0]
    if stuck:
        waits = [program.where(rank, int(numbers[rank][position[rank]])) for rank in stuck]
        raise ScheduleError("deadlock: these wait for each other: " + "; ".join(waits))


def _messages(program: Program, listing: _Listing) -> tuple[list[list[int]], list[Numbers]]:
    """Per rank its messages in order, each as a key that both sides share, with -1 at the end; and their numbers."""
    micro_batches = program.micro_batches
    is_message = (listing.code >= SEND_ACTIVATION) & (listing.code <= RECV_GRAD)
    code, rank = listing.code[is_message], listing.rank[is_message]
    stage, micro_batch = np.divmod(listing.place[is_message], micro_batches)
    sender = stage - (code == RECV_ACTIVATION) + (code == RECV_GRAD)
    key = (2 * sender + (code >= SEND_GRAD)) * micro_batches + micro_batch
    cuts = np.searchsorted(rank, np.arange(1, len(program.ops)))
    # Lists: elements of arrays are slow to be read one by one. The -1 is no message's key, and ends a rank's.
    keys = [[*own.tolist(), -1] for own in np.split(key, cuts)]
    return keys, np.split(listing.at[is_message], cuts)
