"""Waits between streams, told by a device on paper that the product's own code drives; planted defects are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_strategy.activation.kept_inputs as kept_inputs
import zero_strategy.activation.offload as offload
import zero_strategy.checkpoint.save as save
import zero_strategy.comm.collectives as collectives
import zero_strategy.fsdp.param_bucket as param_bucket
import zero_strategy.fsdp.reduction_plan as reduction_plan
import zero_strategy.offload.tier as tier
from tests.activation.unit_nets import Transformer, seeded
from tests.device.fake_ranks import fake_world
from tests.device.recorder import Elsewhere, RecordedCollectives, RecordedWork, Recorder, Stream
from tests.engine.float8 import float8_net, plain_net
from tests.engine.nets import loss_of, net
from zero_strategy.activation.kept_inputs import KeptInputs
from zero_strategy.activation.offload import model_storages
from zero_strategy.activation.settings import CheckpointSettings
from zero_strategy.checkpoint.agreement import catalog_of, state_dict_entries
from zero_strategy.checkpoint.contents import pieces_of
from zero_strategy.comm.collectives import CommunicationCounters, Communicator, PendingWork
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_codes import GatheredCodes
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.reduction_plan import Reduction
from zero_strategy.offload.chunks import OffloadedVector
from zero_strategy.offload.tier import DeviceCopies, HeldCopy, HeldForCopies, HostMemory, Landing
from zero_strategy.optim import orthogonaliser, split_matrices
from zero_strategy.optim.streamed import StreamedStep
from zero_strategy.sequence import SequenceGroup, attention

CPU = torch.device("cpu")


@contextmanager
def device(world: int = 2, recorder: Recorder | None = None) -> Iterator[Recorder]:
    """A device of this process, in a world of so many; all that asks for its queues gets the recorder's."""
    recorder = recorder or Recorder()
    with pytest.MonkeyPatch.context() as patch, fake_world(world - 1, world):
        patch.setattr(collectives, "HostCollectives", lambda group: RecordedCollectives(group, recorder))
        for module in (tier, offload, kept_inputs, save, param_bucket, reduction_plan):
            patch.setattr(module, "streams_of", recorder.streams_of)
        step, copies = StreamedStep.__init__, DeviceCopies(CPU)
        patch.setattr(StreamedStep, "__init__", lambda self, store: step(self, store, copies))
        yield recorder


def train(
    recorder: Recorder,
    micro: int = 1,
    width: int = 6,
    dtype: torch.dtype | None = None,
    matrices: bool = False,
    **settings: Any,
) -> None:
    """Three steps of training; notes are taken of forward, backward and step."""
    model = seeded(Transformer, 3, 64) if width > 6 else net(depth=4)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", **settings), compute_dtype=dtype)
    if "activations" in settings.get("offload", ()):  # on the CPU they are where they are to go
        engine.activations.store = offload.ActivationStore(CPU, model_storages(engine.model))
    found = split_matrices(model)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters(), fused=True)]
    if matrices:
        optimizers = [torch.optim.Muon(found.matrices), torch.optim.AdamW(found.others, fused=True)]
    engine.attach(*optimizers)
    with recorder:
        for _ in range(3):
            for _ in range(micro):
                shape = (4, 16, width) if width > 6 else (4, width)
                loss_of(model(torch.ones(shape, dtype=dtype, device=CPU)).float()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert not matrices or engine.counters.calls["all_to_all"]
    engine.close()


PLACEMENTS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "prefetch": 2},
    {"stage": 3, "reshard_after_backward": False},
    {"stage": 3, "gradient_reduction": "per_step"},
]


@cache
def placed(number: int, dtype: torch.dtype | None) -> tuple[list[str], list[str]]:
    """Races, and waits of the host, of a training with one of PLACEMENTS."""
    with device() as recorder:
        train(recorder, micro=2, dtype=dtype, **PLACEMENTS[number])
    return recorder.races, recorder.syncs


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
def test_gathers_and_reductions_wait_as_they_have_to(settings: dict[str, Any], dtype: torch.dtype | None) -> None:
    races, _ = placed(PLACEMENTS.index(settings), dtype)
    assert not races


def train_codes(recorder: Recorder, form: str = "autocast", **settings: Any) -> None:
    """Three steps of two micro-batches, with an evaluation between them, whose weights are gathered in this form."""
    model = float8_net() if form == "float8" else plain_net()
    config = load_config(
        stage=3, units={"min_numel": 0}, watchdog="off", communication={"parameters": form}, **settings
    )
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    with recorder:
        for _ in range(3):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast", cache_enabled=False):
                    loss = loss_of(model(torch.ones(4, 6, device=CPU)))
                    with torch.no_grad():
                        model(torch.ones(4, 6, device=CPU))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(any(bucket.codes is not None for bucket in unit.buckets) for unit in engine.model.units[1:])
    engine.close()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("form", ["autocast", "float8"])
def test_codes_wait_as_they_have_to_and_the_host_for_nothing(form: str, prefetch: int) -> None:
    with device() as recorder:
        train_codes(recorder, form, prefetch=prefetch)
    assert not recorder.races and not recorder.syncs


OFFLOADED: list[dict[str, Any]] = [
    {"stage": 1, "offload": {"optimizer": "cpu"}},
    {"stage": 2, "offload": {"optimizer": "cpu", "gradients": "cpu"}},
    {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu"}},
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("settings", OFFLOADED, ids=str)
def test_offloaded_state_waits_as_it_has_to(settings: dict[str, Any], dtype: torch.dtype | None) -> None:
    with device() as recorder:
        train(recorder, micro=2, dtype=dtype, **settings)
    assert not recorder.races


@pytest.mark.parametrize("settings", PLACEMENTS[:3], ids=str)
def test_matrices_wait_for_each_other_as_they_have_to(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonaliser, "_ROUND_NUMEL", 1)  # several rounds, one of which is under way beside another
    with device() as recorder:
        train(recorder, width=64, matrices=True, matrix_parameters=["*.weight"], **settings)
    assert not recorder.races
    assert not recorder.syncs


ACTIVATIONS = {"stage": 3, "activation_checkpointing": "selective", "offload": {"activations": "cpu"}}


def test_offloaded_activations_wait_as_they_have_to() -> None:
    with device() as recorder:
        train(recorder, width=64, **ACTIVATIONS)
    assert not recorder.races and not recorder.syncs


def keep_inputs(recorder: Recorder) -> None:
    """Two calls of a function whose inputs wait on the host; one of them is not dense."""
    settings = CheckpointSettings(checkpoint_in_cpu=True)
    kept = KeptInputs(settings, Communicator(None, CommunicationCounters()))
    ones = partial(torch.ones, device=CPU)
    with recorder:
        records = [kept.keep([ones(64, 64) * 2, (ones(64, 65) * 2)[:, 1:]]) for _ in range(2)]
        for record in reversed(records):
            found = [record.fetch(number) * 1 for number in range(2)]
            assert all(bool((one == 2).all()) for one in found)


def test_inputs_on_the_host_wait_as_they_have_to() -> None:
    with device() as recorder:
        keep_inputs(recorder)
    assert not recorder.races


def copy_and_forget(recorder: Recorder) -> None:
    """A copy to the host whose source nobody holds any more, and one back."""
    copies, host = DeviceCopies(CPU, recorder), HostMemory(4096).bytes
    with recorder:
        landing = copies.down(torch.ones(4096, dtype=torch.uint8, device=CPU) * 3, host)
        torch.zeros(1, device=CPU)  # another may get the memory
        landing.on_host()
        copies.up(host, found := torch.empty(4096, dtype=torch.uint8, device=CPU)).on_device()
        assert bool((found == 3).all())


def test_a_copy_of_what_nobody_holds_is_kept() -> None:
    with device() as recorder:
        copy_and_forget(recorder)
    assert not recorder.races


def attend(recorder: Recorder, ulysses: int = 1, window: int | None = None) -> None:
    """Attention of two layers over a sequence that the ranks divide, forward and backward."""
    group = SequenceGroup(dist.group.WORLD, ulysses)
    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    with recorder:
        for _ in range(2):
            once = attention(x, x * 2, x * 3, group, causal=True, window=window)
            attention(once, x, once, group, causal=True, window=window).sum().backward()
            x.grad = None
    assert group.counters.calls["all_to_all"]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_divided_sequences_wait_as_they_have_to(ulysses: int, window: int | None) -> None:
    with device(4) as recorder:
        attend(recorder, ulysses, window)
    assert not recorder.races and not recorder.syncs


def save_in_background(recorder: Recorder) -> None:
    """Steps, each with a snapshot of what it has changed; the host reads the snapshot, as the writer does."""
    model = net(depth=4)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", stage=2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    plan, snapshot = engine.saver._plan(catalog_of(engine), [], None), save.Snapshot()
    with recorder:
        for _ in range(2):
            loss_of(model(torch.ones(4, 6))).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.model.arrivals.finish()  # it leaves the own slice alone, which the recorder cannot know
            copies = snapshot.take(plan, pieces_of(engine, list(state_dict_entries(model)), [], [], None))
            for _, copy in copies:
                written = copy.loaded().data.view(torch.uint8)
                HostMemory(written.numel()).bytes[: written.numel()].copy_(written)
    engine.close()


def test_a_snapshot_has_landed_before_it_is_written() -> None:
    with device() as recorder:
        save_in_background(recorder)
    assert not recorder.races


# ---------------------------------------------------------------------------------------------- planted defects


def nothing(*args: Any, **kwargs: Any) -> None:
    """Carries out what is left out."""


def no_wait_for_gathers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordedWork, "wait", nothing)


def parameters_shown_before_they_are_in(patch: pytest.MonkeyPatch) -> None:
    def finish(self: ParameterBucket) -> None:
        if self._pending is not None:
            self._point_at_flat()
            self.gathered, self._late = True, self._pending  # type: ignore[attr-defined]
            self._pending = None

    patch.setattr(ParameterBucket, "finish_unshard", finish)


def memory_of_a_gather_resized_early(patch: pytest.MonkeyPatch) -> None:
    start = ParameterBucket.start_unshard

    def start_and_free(self: ParameterBucket) -> None:
        start(self)
        if self._pending is not None and not self.placement.in_place:
            self.flat.untyped_storage().resize_(0)
            torch.zeros(1, device=CPU)  # another may get the memory
            self.flat.untyped_storage().resize_(self.flat.nbytes)

    patch.setattr(ParameterBucket, "start_unshard", start_and_free)


def gradients_used_before_they_are_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reduction, "wait", nothing)


def buffer_reused_while_it_is_sent(patch: pytest.MonkeyPatch) -> None:
    launch = GradientBucket.launch

    def launch_and_give(self: GradientBucket) -> None:
        launch(self)
        self.own.give_back()

    patch.setattr(GradientBucket, "launch", launch_and_give)


def mean_taken_before_the_sum(patch: pytest.MonkeyPatch) -> None:
    wait = PendingWork.wait

    def then_first(self: PendingWork) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()
        wait(self)

    patch.setattr(PendingWork, "wait", then_first)


def updated_parameters_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    publish = ParameterBucket.publish

    def begin_only(self: ParameterBucket, *, copied: bool = False) -> PendingWork:
        publish(self, copied=copied)
        return PendingWork([])

    patch.setattr(ParameterBucket, "publish", begin_only)


def copies_that_do_not_wait_for_computing(patch: pytest.MonkeyPatch) -> None:
    def copy(streams: Any, stream: Any, source: Any, target: Any, kept: Any) -> Landing:
        with streams.within(stream):
            target.copy_(source)
        if kept is not None:
            streams.keep(kept, stream)
        return Landing(streams, stream)

    patch.setattr(DeviceCopies, "_copy", staticmethod(copy))


def memory_not_kept_for_a_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recorder, "keep", nothing)


def host_that_reads_before_a_copy_has_landed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Landing, "on_host", nothing)


def computing_that_does_not_wait_for_a_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Landing, "on_device", nothing)


def slices_sent_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Landing, "after", lambda self: nullcontext())


def slices_overwritten_on_their_way_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OffloadedVector, "let_copies_end", nothing)


def sums_read_before_they_are_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OffloadedVector, "let_copies_end", nothing)


def sums_freed_on_their_way_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldForCopies, "hold", nothing)


def activations_that_leave_too_early(patch: pytest.MonkeyPatch) -> None:
    take_out = offload._Copies.take_out

    def at_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Stream, "wait_stream", nothing)
            return take_out(self, *args, **kwargs)

    patch.setattr(offload._Copies, "take_out", at_once)


def activations_fetched_into_memory_in_use(patch: pytest.MonkeyPatch) -> None:
    bring_back = offload._Copies.bring_back

    def at_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Stream, "wait_stream", nothing)
            return bring_back(self, *args, **kwargs)

    patch.setattr(offload._Copies, "bring_back", at_once)


def activations_used_before_they_are_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offload._Copies, "await_return", nothing)


def activations_freed_while_they_leave(patch: pytest.MonkeyPatch) -> None:
    def let_go(copy: HeldCopy) -> None:
        copy.tensor = None

    patch.setattr(HeldForCopies, "_end", staticmethod(let_go))


def inputs_freed_while_they_are_read(patch: pytest.MonkeyPatch) -> None:
    """`KeptRecord.fill` did so: it kept the copy that its own stream had made."""
    hold = HeldForCopies.hold

    def held_if_dense(self: HeldForCopies, tensor: torch.Tensor, event: Any) -> HeldCopy | None:
        return hold(self, tensor, event) if tensor.is_contiguous() else None

    patch.setattr(HeldForCopies, "hold", held_if_dense)


def inputs_used_before_they_are_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldForCopies, "use", nothing)


def matrices_used_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    """The owner does not wait for the other ranks' parts of directions."""
    wait = PendingWork.wait
    patch.setattr(PendingWork, "wait", lambda self: None if "all_to_all" in self._kinds else wait(self))


def keys_used_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    """A member of a ring does not wait for what the one before it passes on."""
    ring = import_module("zero_strategy.sequence.attention")  # the package has a function of this name
    begin = ring._pass_on

    def not_waited_for(group: SequenceGroup, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        arriving, work = begin(group, values)
        patch.setattr(work, "wait", nothing)
        return arriving, work

    patch.setattr(ring, "_pass_on", not_waited_for)


def snapshot_that_waits_for_the_current_device(patch: pytest.MonkeyPatch) -> None:
    """The copies are queued on the engine's device, and another one is the current one of the thread."""
    original = save.Snapshot.take

    def take(self: save.Snapshot, *args: Any) -> Any:
        found = save.streams_of(CPU)
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(save, "streams_of", lambda device: Elsewhere(found))  # type: ignore[arg-type]
            return original(self, *args)

    patch.setattr(save.Snapshot, "take", take)


def no_wait_for_codes(patch: pytest.MonkeyPatch) -> None:
    """Layers multiply by codes that are on their way."""

    def finish(self: GatheredCodes) -> None:
        self.gathered, self._pending = self.gathered or self._pending is not None, None

    patch.setattr(GatheredCodes, "finish_unshard", finish)


STAGE_2, STAGE_3, ON_HOST = {"stage": 2}, {"stage": 3, "prefetch": 1}, OFFLOADED[0]
DEFECTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Recorder], None]]] = [
    (no_wait_for_gathers, partial(train, **STAGE_3)),
    (parameters_shown_before_they_are_in, partial(train, **STAGE_3)),
    (memory_of_a_gather_resized_early, partial(train, **STAGE_3)),
    (no_wait_for_codes, train_codes),
    (gradients_used_before_they_are_summed, partial(train, **STAGE_2)),
    (buffer_reused_while_it_is_sent, partial(train, **STAGE_2)),
    (mean_taken_before_the_sum, partial(train, **STAGE_2)),
    (updated_parameters_not_waited_for, partial(train, **STAGE_2)),
    (copies_that_do_not_wait_for_computing, partial(train, **ON_HOST)),
    (memory_not_kept_for_a_copy, copy_and_forget),
    (host_that_reads_before_a_copy_has_landed, partial(train, **ON_HOST)),
    (computing_that_does_not_wait_for_a_copy, partial(train, **ON_HOST)),
    (slices_sent_before_they_are_there, partial(train, **OFFLOADED[2])),
    (slices_overwritten_on_their_way_up, partial(train, **OFFLOADED[2])),
    (sums_read_before_they_are_down, partial(train, **OFFLOADED[1])),
    (sums_freed_on_their_way_down, partial(train, micro=2, **OFFLOADED[1])),
    (activations_that_leave_too_early, partial(train, width=64, **ACTIVATIONS)),
    (activations_fetched_into_memory_in_use, partial(train, width=64, **ACTIVATIONS)),
    (activations_used_before_they_are_back, partial(train, width=64, **ACTIVATIONS)),
    (activations_freed_while_they_leave, partial(train, width=64, **ACTIVATIONS)),
    (inputs_freed_while_they_are_read, keep_inputs),
    (inputs_used_before_they_are_back, keep_inputs),
    (keys_used_before_they_are_there, attend),
    (matrices_used_before_they_are_there, partial(train, width=64, matrices=True, **STAGE_2)),
    (snapshot_that_waits_for_the_current_device, save_in_background),
]


@pytest.mark.parametrize(("plant", "run"), DEFECTS, ids=[plant.__name__ for plant, _ in DEFECTS])
def test_streams_planted_defect_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], run: Callable[[Recorder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with device() as recorder:
        run(recorder)
    assert recorder.races


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 3, "gradient_reduction": "per_step"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_to_parameters_and_reads_on_demand_wait_for_nothing(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Writes between steps, through `p.data` and by assignment, and those of a forward to another unit."""
    with device() as recorder:
        model = net(depth=4)
        config = load_config(units={"min_numel": 0}, watchdog="off", **settings)
        engine = ZeroEngine(model, config, compute_dtype=None if dtype == torch.float32 else dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine.attach(optimizer)
        with recorder:
            for _ in range(2):
                with engine.forward_scope(), torch.no_grad():
                    for block in model.blocks:
                        block.up.weight.mul_(0.9)
                        block.down.weight.data.clamp_(-0.1, 0.1)
                        block.down.bias.data = block.down.bias.data * 0.5
                loss_of(model(torch.ones((4, 6), dtype=dtype, device=CPU)).float()).backward()
                optimizer.step()
                optimizer.zero_grad()
        engine.close()
    assert not recorder.syncs and not recorder.races


def test_an_offloaded_optimizer_waits_for_its_copies_alone() -> None:
    """By events, in the step: nothing is copied to memory that is not pinned, and no value is read."""
    with device() as recorder:
        train(recorder, micro=2, **OFFLOADED[0])
    assert set(recorder.syncs) == {"an event"}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_clip_reads_the_norm_and_whether_it_is_finite_and_nothing_else(stage: int) -> None:
    with device() as recorder:
        model = net(depth=4)
        engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", stage=stage))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine.attach(optimizer)
        with recorder:
            loss_of(model(torch.ones(4, 6, device=CPU))).backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            with torch.no_grad(), engine.shared_step():
                model(torch.ones(4, 6, device=CPU))
            engine.drain()
        engine.close()
    # Sums and counts, which a real device sends in one copy, are read from what it has sent (`stats_on_host`).
    assert len(recorder.syncs) == 2 and not recorder.races, recorder.syncs


@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
def test_the_host_never_waits_for_the_device(settings: dict[str, Any]) -> None:
    """Forward, backward and step queue what they have to do, and go on."""
    _, syncs = placed(PLACEMENTS.index(settings), None)
    assert not syncs
