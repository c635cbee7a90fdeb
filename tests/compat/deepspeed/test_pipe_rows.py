"""DeepSpeed 0.3's API, chapter 6, row by row: every documented name of pipelines resolves, and does what is documented.

What takes several ranks is in tests/compat/scripts/test_pipeline.py and tests/pipeline.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zero_strategy.compat.deepspeed as deepspeed
from zero_strategy.config import load_config

NO_DEFAULT = inspect.Parameter.empty
pipe, schedule = deepspeed.pipe, deepspeed.runtime.pipe.schedule
PipelineModule, PipelineEngine = deepspeed.PipelineModule, deepspeed.runtime.pipe.engine.PipelineEngine
SAMPLES, MICRO, BATCH = 10, 2, 3


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- classes, methods and options ----

CLASSES = {
    "PipelineModule": pipe.PipelineModule,
    "ProcessTopology": pipe.ProcessTopology,
    "LayerSpec(typename, *module_args, **module_kwargs)": pipe.LayerSpec,
    "TiedLayerSpec": pipe.TiedLayerSpec,
    "PipelineEngine": PipelineEngine,
    "deepspeed.utils.RepeatingLoader": deepspeed.utils.RepeatingLoader,
    "PipeSchedule": schedule.PipeSchedule,
    "InferenceSchedule": schedule.InferenceSchedule,
    "TrainSchedule": schedule.TrainSchedule,
    "DataParallelSchedule": schedule.DataParallelSchedule,
    "PipeInstruction(**kwargs): kwargs as members (base class, not in the list)": schedule.PipeInstruction,
    "BufferOpInstruction": schedule.BufferOpInstruction,
}
PLAIN = ("OptimizerStep", "ReduceGrads", "ReduceTiedGrads")
BUFFERED = (
    *("LoadMicroBatch", "ForwardPass", "BackwardPass"),
    *("SendActivation", "RecvActivation", "SendGrad", "RecvGrad"),
)
OPTIONS = {
    "PipelineModule: layers (or nn.Sequential)": (PipelineModule, "layers", NO_DEFAULT),
    "PipelineModule: num_stages": (PipelineModule, "num_stages", None),
    "PipelineModule: topology": (PipelineModule, "topology", None),
    "PipelineModule: loss_fn": (PipelineModule, "loss_fn", None),
    "PipelineModule: seed_layers": (PipelineModule, "seed_layers", False),
    "PipelineModule: base_seed": (PipelineModule, "base_seed", 1234),
    "PipelineModule: partition_method": (PipelineModule, "partition_method", "parameters"),
    "PipelineModule: activation_checkpoint_interval (0 disables)": (
        PipelineModule,
        "activation_checkpoint_interval",
        0,
    ),
    "PipelineModule: activation_checkpoint_func": (PipelineModule, "activation_checkpoint_func", None),
    "PipeSchedule: micro_batches": (schedule.PipeSchedule, "micro_batches", NO_DEFAULT),
    "PipeSchedule: stages": (schedule.PipeSchedule, "stages", NO_DEFAULT),
    "PipeSchedule: stage_id": (schedule.PipeSchedule, "stage_id", NO_DEFAULT),
}
METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "PipelineModule.allreduce_tied_weight_gradients()": (PipelineModule.allreduce_tied_weight_gradients, {}),
    "PipelineModule.topology()": (PipelineModule.topology, {}),
    "PipelineModule.ckpt_prefix(checkpoints_path, tag)": (
        PipelineModule.ckpt_prefix,
        {"checkpoints_path": NO_DEFAULT, "tag": NO_DEFAULT},
    ),
    "PipelineModule.ckpt_layer_path(ckpt_dir, local_layer_idx)": (
        PipelineModule.ckpt_layer_path,
        {"ckpt_dir": NO_DEFAULT, "local_layer_idx": NO_DEFAULT},
    ),
    "LayerSpec.build(log=False)": (pipe.LayerSpec.build, {"log": False}),
    "PipelineEngine.train_batch(data_iter=None)": (PipelineEngine.train_batch, {"data_iter": None}),
    "PipelineEngine.eval_batch(data_iter)": (
        PipelineEngine.eval_batch,
        {
            **{"data_iter": NO_DEFAULT, "return_logits": False, "compute_loss": True, "reduce_output": "avg"},
            **{"bcast_loss": True, "num_micro_batches": None},
        },
    ),
    "PipelineEngine.is_first_stage()": (PipelineEngine.is_first_stage, {}),
    "PipelineEngine.is_last_stage()": (PipelineEngine.is_last_stage, {}),
    "PipelineEngine.set_dataiterator(iterator)": (PipelineEngine.set_dataiterator, {"iterator": NO_DEFAULT}),
    "PipelineEngine.set_batch_fn(fn)": (PipelineEngine.set_batch_fn, {"fn": NO_DEFAULT}),
    "PipelineEngine.is_gradient_accumulation_boundary()": (PipelineEngine.is_gradient_accumulation_boundary, {}),
    "PipelineEngine.load_module_state_dict(state_dict: None|str|dict, strict=True)": (
        PipelineEngine.load_module_state_dict,
        {"state_dict": NO_DEFAULT, "strict": True},
    ),
    "PipeSchedule.steps()": (schedule.PipeSchedule.steps, {}),
    "PipeSchedule.num_pipe_buffers()": (schedule.PipeSchedule.num_pipe_buffers, {}),
}

HERE, EXECUTOR, ENGINE = __name__, "tests.pipeline.test_executor", "tests.pipeline.test_engine"
SCRIPTS, MODULE = "tests.compat.scripts.test_pipeline", "tests.pipeline.test_module"
BEHAVIOURS = {
    "PipelineModule: one of num_stages and topology must be given": (
        HERE,
        "test_a_module_is_the_sequence_of_its_layers",
    ),
    "forward is the sequence of layers, loss = loss_fn(outputs, label)": (
        HERE,
        "test_a_module_is_the_sequence_of_its_layers",
    ),
    "train_batch: data_iter None uses initialize()'s training set": (
        HERE,
        "test_train_batch_without_an_iterator_reads_the_training_data_again_and_again",
    ),
    "train_batch/eval_batch: train_batch_size() samples, gradient_accumulation_steps() entries pulled per pipeline": (
        HERE,
        "test_train_batch_pulls_a_batch_and_returns_its_mean_loss",
    ),
    "train_batch/eval_batch: arithmetic mean of the losses": (
        HERE,
        "test_train_batch_pulls_a_batch_and_returns_its_mean_loss",
    ),
    "train_batch: StopIteration when data runs out": (
        HERE,
        "test_train_batch_pulls_a_batch_and_returns_its_mean_loss",
    ),
    **{
        f"PipelineEngine.{name}": (HERE, "test_parts_of_a_step_are_refused")
        for name in ("forward", "backward", "step", "module_state_dict() -> None (saves by layer)")
    },
    "pipeline models checkpoint by layer, not by rank": (SCRIPTS, "test_a_deepspeed_script_on_two_ranks_and_four"),
    **{
        f"PipeSchedule.{name}": (HERE, "test_schedules_have_their_properties")
        for name in ("stage", "num_stages", "num_micro_batches", "is_first_stage", "is_last_stage")
    },
    "TrainSchedule.num_pipe_buffers(): distance to the last stage": (HERE, "test_schedules_have_their_properties"),
    "InferenceSchedule.num_pipe_buffers() == 2": (HERE, "test_schedules_have_their_properties"),
    "DataParallelSchedule.num_pipe_buffers() == 1": (HERE, "test_schedules_have_their_properties"),
    "OptimizerStep: after ReduceGrads and ReduceTiedGrads; zeroes gradients": (
        HERE,
        "test_schedules_have_their_properties",
    ),
    "each yielded step is atomic: a barrier between steps never deadlocks": (
        HERE,
        "test_steps_are_atomic_and_their_messages_paired",
    ),
    "send/recv blocking and paired across neighbouring stages": (
        HERE,
        "test_steps_are_atomic_and_their_messages_paired",
    ),
    "SendGrad/RecvGrad: missing gradients become None": (
        EXECUTOR,
        "test_stages_in_place_with_autocast_and_unused_outputs",
    ),
    "pipeline convergence follows data parallel with the same batch size": (ENGINE, "test_every_stage_of_zero"),
    "ReduceTiedGrads: stages taking part known only after partitioning, no deadlock": (ENGINE, "test_four_stages"),
    "LayerSpec: stores type and arguments, built per stage": (MODULE, "test_only_a_stage_s_own_layers_are_built"),
}


@pytest.mark.parametrize("row", BEHAVIOURS)
def test_behaviours_have_their_tests(row: str) -> None:
    module, name = BEHAVIOURS[row]
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("row", CLASSES)
def test_classes_are_where_they_were(row: str) -> None:
    assert isinstance(CLASSES[row], type)
    assert issubclass(PipelineEngine, deepspeed.DeepSpeedEngine) and PipelineEngine is deepspeed.PipelineEngine
    assert deepspeed.runtime.dataloader.RepeatingLoader is deepspeed.utils.RepeatingLoader


@pytest.mark.parametrize("row", OPTIONS)
def test_options_have_their_defaults(row: str) -> None:
    cls, name, default = OPTIONS[row]
    assert inspect.signature(cls).parameters[name].default == default


@pytest.mark.parametrize("row", METHODS)
def test_methods_take_their_arguments(row: str) -> None:
    method, documented = METHODS[row]
    found = dict(inspect.signature(method).parameters)
    assert list(found)[: len(documented) + 1] == ["self", *documented]
    assert {name: found[name].default for name in documented} == documented


# ---- schedules ----


def test_instructions_keep_their_arguments() -> None:
    """Row by row of BUFFERED and PLAIN, and `PipeInstruction(**kwargs)`."""
    for name in BUFFERED:
        made = getattr(schedule, name)(buffer_id=3, extra="x")
        assert isinstance(made, schedule.BufferOpInstruction)
        assert made.buffer_id == 3 and made.extra == "x"
    for name in (*PLAIN, "PipeInstruction"):
        made = getattr(schedule, name)(extra=1)
        assert isinstance(made, schedule.PipeInstruction) and made.extra == 1


@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (4, 2), (3, 4), (7, 3)])
def test_schedules_have_their_properties(micro_batches: int, stages: int) -> None:
    for stage in range(stages):
        train = schedule.TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
        evaluate = schedule.InferenceSchedule(micro_batches, stages, stage)
        assert (train.stage, train.num_stages, train.num_micro_batches) == (stage, stages, micro_batches)
        assert (train.is_first_stage, train.is_last_stage) == (stage == 0, stage == stages - 1)
        assert train.num_pipe_buffers() == max(2, min(stages - stage, micro_batches))  # to the last stage
        assert evaluate.num_pipe_buffers() == 2
        assert schedule.DataParallelSchedule(micro_batches, stages, stage).num_pipe_buffers() == 1
        names = [type(instruction).__name__ for step in train.steps() for instruction in step]
        assert names[-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        assert names.count("ForwardPass") == names.count("BackwardPass") == micro_batches


@pytest.mark.parametrize("kind", [schedule.TrainSchedule, schedule.InferenceSchedule])
def test_steps_are_atomic_and_their_messages_paired(kind: Any) -> None:
    """Within every step each send has its receive on the neighbour: a barrier between steps cannot deadlock."""
    for micro_batches, stages in itertools.product((1, 2, 5), (1, 2, 4)):
        everyone = [list(kind(micro_batches, stages, stage).steps()) for stage in range(stages)]
        for steps in itertools.zip_longest(*everyone, fillvalue=[]):
            names = [[type(instruction).__name__ for instruction in step] for step in steps]
            for here, there in itertools.pairwise(names):
                assert here.count("SendActivation") == there.count("RecvActivation")
                assert there.count("SendGrad") == here.count("RecvGrad")


# ---- modules ----


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, labels)


def layers() -> list[Any]:
    return [pipe.LayerSpec(nn.Linear, 3, 4, bias=False), torch.tanh, nn.Linear(4, 1)]


def test_a_module_is_the_sequence_of_its_layers() -> None:
    module = PipelineModule(layers(), num_stages=1, loss_fn=loss_fn)
    first, last = (module.get_submodule(name) for name in ("0", "2"))
    x = torch.ones(2, 3)
    assert torch.equal(module(x), last(torch.tanh(first(x)))) and first.bias is None
    assert PipelineModule(nn.Sequential(nn.Linear(3, 1)), num_stages=1)(x).shape == (2, 1)
    with pytest.raises(ValueError, match="needs num_stages or topology"):
        PipelineModule(layers())
    topology = deepspeed.runtime.pipe.topology.PipeDataParallelTopology(num_pp=1, num_dp=1)
    assert PipelineModule(layers(), topology=topology).topology() is topology
    module.allreduce_tied_weight_gradients()  # of none
    assert module.ckpt_prefix("run", "step3") == str(Path("run", "step3", "module-pipe_00"))
    assert module.ckpt_layer_path("run", 2) == str(Path("run", "layer_02-model_states.pt"))


def test_a_spec_keeps_what_it_builds_of() -> None:
    built: list[int] = []

    class Recorded(nn.Linear):
        def __init__(self, width: int, *, bias: bool) -> None:
            built.append(width)
            super().__init__(width, width, bias=bias)

    spec = pipe.LayerSpec(Recorded, 5, bias=False)
    assert spec.typename is Recorded and spec.module_args == (5,) and spec.module_kwargs == {"bias": False}
    assert not built and isinstance(spec.build(), Recorded) and built == [5]
    tied = pipe.TiedLayerSpec("key", nn.Linear, 2, 2, forward_fn=None, tied_weight_attr="weight")
    assert isinstance(tied, pipe.LayerSpec) and (tied.key, tied.tied_weight_attr) == ("key", ["weight"])


# ---- the engine, on one rank ----


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3) / 30, torch.ones(SAMPLES, 1))


def engine_of(**more: Any) -> Any:
    torch.manual_seed(1)
    config = {
        "train_batch_size": BATCH * MICRO,
        "gradient_accumulation_steps": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0,
    }
    config.update(more.pop("config", {}))
    return deepspeed.initialize(model=PipelineModule(layers(), num_stages=1, loss_fn=loss_fn), config=config, **more)


def micro_batches() -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, SAMPLES, MICRO):
        x, y = dataset()[first : first + MICRO]
        yield x, y


def test_train_batch_pulls_a_batch_and_returns_its_mean_loss() -> None:
    engine, optimizer, loader, _ = engine_of()
    assert isinstance(engine, PipelineEngine) and loader is None and optimizer is engine.optimizer
    assert engine.is_first_stage() and engine.is_last_stage() and engine.train_batch_size() == BATCH * MICRO
    weights = engine.state_dict()
    data = micro_batches()
    with torch.no_grad():
        each = [loss_fn(engine.module(x), y) for x, y in itertools.islice(micro_batches(), BATCH)]
    assert engine.eval_batch(micro_batches()).item() == pytest.approx(sum(each).item() / BATCH)  # type: ignore[union-attr]
    assert engine.train_batch(data_iter=data).item() == pytest.approx(sum(each).item() / BATCH)  # type: ignore[union-attr]
    assert len(list(data)) == SAMPLES // MICRO - BATCH  # so many were left
    after = engine.state_dict()
    assert not any(torch.equal(after[name], weights[name]) for name in weights)
    assert all(p.grad is None for p in engine.module.parameters())  # the step has zeroed them
    with pytest.raises(StopIteration, match="ended before micro-batch 2"):
        engine.train_batch(itertools.islice(micro_batches(), 2))


def test_train_batch_without_an_iterator_reads_the_training_data_again_and_again() -> None:
    engine, _, loader, _ = engine_of(training_data=dataset())
    assert isinstance(loader, deepspeed.utils.RepeatingLoader) and engine.training_dataloader is loader
    other, *_ = engine_of()
    endless = deepspeed.utils.RepeatingLoader(list(micro_batches()))
    for _ in range(4):  # 12 micro-batches of five an epoch
        assert engine.train_batch().item() == other.train_batch(endless).item()
    other.set_dataiterator(micro_batches())
    first = next(micro_batches())[0]
    other.set_batch_fn(lambda batch: (batch[0] * 0 + first, batch[1]))
    assert other.train_batch().item() != engine.train_batch().item()


def test_parts_of_a_step_are_refused(tmp_path: Path) -> None:
    engine, *_ = engine_of()
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(deepspeed.runtime.pipe.module.PipelineError, match=rf"{call.__name__}\(\) of a part of"):
            call()
    assert engine.is_gradient_accumulation_boundary() is False
    fresh = engine.state_dict()
    engine.save_checkpoint(tmp_path, tag="first")
    assert engine.module_state_dict() is None
    engine.train_batch(micro_batches())
    for source in (None, str(tmp_path / "first"), fresh):
        engine.load_module_state_dict({name: value + 1 for name, value in fresh.items()})
        engine.load_module_state_dict(source, strict=True)
        assert all(torch.equal(value, fresh[name]) for name, value in engine.state_dict().items())


# ---- the JSON ----


def test_the_json_s_section() -> None:
    section = {"stages": 1, "activation_checkpoint_interval": 2, "use_reentrant": False, "seed_layers": True}
    with pytest.warns(UserWarning, match=r"pipeline\.seed_layers.*DeepSpeed does not look at it"):
        engine, *_ = engine_of(config={"pipeline": section, "zero_optimization": {"stage": 1}})
    assert engine.module.activation_checkpoint_interval == 2
    assert engine.module.activation_checkpoint_func is deepspeed.checkpointing.non_reentrant_checkpoint
    other, *_ = engine_of()
    assert other.module.activation_checkpoint_func is deepspeed.checkpointing.checkpoint
    assert engine.train_batch(micro_batches()).item() == other.train_batch(micro_batches()).item()
    with pytest.raises(ValueError, match=r"activation_checkpoint_interval -1 must be"):
        engine_of(config={"pipeline": {"activation_checkpoint_interval": -1}})
    with pytest.raises(ValueError, match=r"pipeline\.stages is 2 .*divisor of the world size 1"):
        engine_of(config={"pipeline": {"stages": 2}})


def test_a_json_with_settings_of_this_package_on_top() -> None:
    json = {"train_batch_size": 6, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 2}}
    config = load_config(json, pipeline={"schedule": "gpipe"})
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    module = PipelineModule(layers(), num_stages=1, loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(model=module, optimizer=sgd, config=config)
    assert (engine.train_batch_size(), engine.micro_batches, engine.gradient_clipping()) == (6, 3, 1.0)
    assert engine.zero.config.config.pipeline.schedule == "gpipe" and engine.zero_optimization_stage() == 2


def test_micro_batches_are_the_accumulation_steps() -> None:
    native = {"stage": 1, "train_batch_size": None, "gradient_accumulation_steps": None}
    native["train_micro_batch_size_per_gpu"] = MICRO
    engine, *_ = engine_of(config={**native, "pipeline": {"micro_batches": 2, "schedule": "gpipe"}})
    assert engine.gradient_accumulation_steps() == engine.micro_batches == 2
    assert engine.train_batch_size() == 2 * MICRO
    with pytest.raises(ValueError, match=r"pipeline\.micro_batches is 2 .*gradient_accumulation_steps 3, which are"):
        engine_of(config={"stage": 1, "pipeline": {"micro_batches": 2}})
    with pytest.raises(ValueError, match="leave mpu out, and give the module a topology"):
        engine_of(mpu=object())
