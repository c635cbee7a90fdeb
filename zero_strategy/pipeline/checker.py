"""Does a pipeline's schedule compute what it should, and can it be carried out?

Every rank is looked at by itself first: each instruction once, after what it needs, in a buffer that nobody else is
using. Then messages are run as if a send waited for its receive, the strictest that a transport can be: if all are
delivered there is no deadlock under any.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zero_strategy.pipeline.program import (
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
    Program,
    ScheduleError,
    read_program,
)
from zero_strategy.pipeline.schedule import PipeSchedule

__all__ = ["check", "ScheduleError"]

# What has been done with a micro-batch in a stage; a whole backward does what its halves do.
_DOES = {code: 1 << code for code in range(TAIL)}
_DOES[BACKWARD] = _DOES[BACKWARD_INPUT] | _DOES[BACKWARD_WEIGHT]
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
    training = any(op[0] in (BACKWARD, BACKWARD_INPUT) for ops in program.ops for op in ops)
    messages = [_check_rank(program, rank, training) for rank in range(len(schedules))]
    _deliver(program, messages)


class _StageRules:
    """Of one stage: what each instruction needs to be done before it, and what is done in the end."""

    def __init__(self, program: Program, stage: int, training: bool) -> None:
        placement = program.placement
        last = placement.stages - 1
        rank = placement.rank_of(stage)
        self.from_here = stage > 0 and placement.rank_of(stage - 1) == rank
        self.to_here = stage < last and placement.rank_of(stage + 1) == rank
        before, after = stage > 0 and not self.from_here, stage < last and not self.to_here
        bits = {code: _DOES[code] for code in range(TAIL)}
        come = bits[RECV_ACTIVATION] * before | bits[LOAD] * (stage in (0, last))
        back = bits[FORWARD] | (bits[SEND_ACTIVATION] | bits[RECV_GRAD]) * after
        self.needs = {
            FORWARD: come,
            BACKWARD: back,
            BACKWARD_INPUT: back,
            BACKWARD_WEIGHT: bits[BACKWARD_INPUT],
            SEND_ACTIVATION: bits[FORWARD],
            RECV_ACTIVATION: 0,
            SEND_GRAD: bits[BACKWARD_INPUT],
            RECV_GRAD: bits[SEND_ACTIVATION],
            LOAD: 0,
        }
        self.whole = come | bits[FORWARD] | bits[SEND_ACTIVATION] * after
        if training:
            self.whole |= back | bits[BACKWARD] | bits[SEND_GRAD] * before


def _check_rank(program: Program, rank: int, training: bool) -> list[tuple[int, int]]:
    """Check what a rank does by itself; returns its messages, as (key, instruction), where a key is the same on both
    sides and belongs to one message only."""
    placement, micro_batches, ops = program.placement, program.micro_batches, program.ops[rank]
    rules = {}
    for chunk in range(placement.chunks):
        stage = placement.stage_of(rank, chunk)
        rules[stage] = _StageRules(program, stage, training)
    done = [0] * (placement.stages * micro_batches)
    buffer_of = [-1] * len(done)
    holders = [-1] * program.schedules[rank].num_pipe_buffers()
    messages: list[tuple[int, int]] = []
    for at, (code, stage, micro_batch, buffer) in enumerate(ops):
        if code >= TAIL:
            break
        if not 0 <= micro_batch < micro_batches:
            raise program.error(rank, at, f"there are {micro_batches} micro-batches, this is number {micro_batch}")
        rule, place, does = rules[stage], stage * micro_batches + micro_batch, _DOES[code]
        before = done[place]
        needs = rule.needs[code]
        if before & does or needs & ~before or not does & rule.whole:
            raise program.error(rank, at, _fault(rule, code, before, micro_batch))
        if code == FORWARD:
            if rule.from_here and not done[place - micro_batches] & _DOES[FORWARD]:
                raise program.error(rank, at, "comes before the forward of the stage before it, on the same rank")
        elif code <= BACKWARD_INPUT:
            if rule.to_here and not done[place + micro_batches] & _DOES[BACKWARD_INPUT]:
                raise program.error(rank, at, "comes before the backward of the stage after it, on the same rank")
        elif code == SEND_ACTIVATION:
            messages.append((2 * stage * micro_batches + micro_batch, at))
        elif code == RECV_ACTIVATION:
            messages.append((2 * (stage - 1) * micro_batches + micro_batch, at))
        elif code == SEND_GRAD:
            messages.append(((2 * stage + 1) * micro_batches + micro_batch, at))
        elif code == RECV_GRAD:
            messages.append(((2 * stage + 3) * micro_batches + micro_batch, at))
        if not before:
            if not 0 <= buffer < len(holders):
                raise program.error(rank, at, f"the rank has {len(holders)} buffers")
            if holders[buffer] >= 0:
                raise program.error(rank, at, f"the buffer still holds {_held(program, holders[buffer])}")
            holders[buffer] = place
            buffer_of[place] = buffer
        elif buffer_of[place] != buffer:
            raise program.error(rank, at, f"{_held(program, place)} is in buffer {buffer_of[place]}")
        done[place] = before | does
        if done[place] == rule.whole:
            holders[buffer] = -1
    else:
        at = len(ops)
    for stage, rule in rules.items():
        for micro_batch in range(micro_batches):
            missing = rule.whole & ~done[stage * micro_batches + micro_batch]
            if missing:
                what = " and ".join(words for code, words in _WORDS.items() if missing & _DOES[code])
                raise program.error(rank, at, f"micro-batch {micro_batch} of stage {stage} still lacks {what}")
    _check_tail(program, rank, at, training)
    return messages


def _fault(rule: _StageRules, code: int, before: int, micro_batch: int) -> str:
    """What is wrong with an instruction."""
    if not _DOES[code] & rule.whole:
        return "the stage has no need of it"
    if before & _DOES[code]:
        return f"micro-batch {micro_batch} had that before"
    missing = rule.needs[code] & ~before
    what = " and ".join(words for needed, words in _WORDS.items() if missing & _DOES[needed])
    return f"comes before {what}, for micro-batch {micro_batch}"


def _held(program: Program, place: int) -> str:
    stage, micro_batch = divmod(place, program.micro_batches)
    return f"micro-batch {micro_batch} of stage {stage}"


def _check_tail(program: Program, rank: int, start: int, training: bool) -> None:
    """The end of the batch: reductions and step, in order, all ranks the same ones."""
    tail = [op[0] for op in program.ops[rank][start:]]
    for at, (code, following) in enumerate(pairwise(tail)):
        if following <= code:
            raise program.error(rank, start + at + 1, "is out of order at the end of the batch")
    if training and (not tail or tail[-1] != TAIL + 2):
        raise program.error(rank, len(program.ops[rank]), "the batch ends without OptimizerStep")
    if tail and not training:
        raise program.error(rank, start, "there is nothing to reduce or step: the schedule has no backward")
    others = [op[0] for op in program.ops[0] if op[0] >= TAIL]
    if tail != others:
        raise program.error(rank, start, "the end of the batch is another one on rank 0")


def _deliver(program: Program, messages: Sequence[list[tuple[int, int]]]) -> None:
    """Run all messages as if each side waited for the other one."""
    placement, micro_batches = program.placement, program.micro_batches
    both = [0] * (2 * placement.stages)  # by sender's stage and direction: the sum of the two ranks
    for stage in range(placement.stages):
        for grad, to in ((0, stage + 1), (1, stage - 1)):
            if 0 <= to < placement.stages:
                both[2 * stage + grad] = placement.rank_of(stage) + placement.rank_of(to)
    keys = [[key for key, _ in own] + [-1] for own in messages]
    position = [0] * len(keys)
    able = list(range(len(keys)))
    while able:
        rank = able.pop()
        own, at = keys[rank], position[rank]
        while (key := own[at]) >= 0:
            other = both[key // micro_batches] - rank
            if keys[other][position[other]] != key:
                break
            at += 1
            position[other] += 1
            able.append(other)
        position[rank] = at
    stuck = [rank for rank, own in enumerate(keys) if own[position[rank]] >= 0]
    if stuck:
        waits = [program.where(rank, messages[rank][position[rank]][1]) for rank in stuck]
        raise ScheduleError("deadlock: these wait for each other: " + "; ".join(waits))
