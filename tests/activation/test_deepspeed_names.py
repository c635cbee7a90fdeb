"""`deepspeed.checkpointing`, chapter 4.2 of DeepSpeed 0.3's API, and the names of other references, row by row."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.activation.nets import WIDTH, blocks, direct, value
from zero_strategy.activation.functional import PROCESS
from zero_strategy.activation.settings import CheckpointSettings
from zero_strategy.engine import ZeroEngine

checkpointing = deepspeed.checkpointing
NO_DEFAULT = inspect.Parameter.empty


class Mpu:
    """A unit of one model-parallel rank, with the methods that the documentation asks for."""

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_group(self) -> None:
        return None

    def get_data_parallel_rank(self) -> int:
        return 3


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


SIGNATURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "checkpointing.configure(...)": (
        checkpointing.configure,
        {"mpu_": NO_DEFAULT}
        | dict.fromkeys(("deepspeed_config", "partition_activations", "contiguous_checkpointing"))
        | dict.fromkeys(("num_checkpoints", "checkpoint_in_cpu", "synchronize", "profile")),
    ),
    "checkpointing.is_configured()": (checkpointing.is_configured, {}),
    "checkpointing.checkpoint(function, *args)": (
        checkpointing.checkpoint,
        dict.fromkeys(("function", "args"), NO_DEFAULT),
    ),
    "checkpointing.reset()": (checkpointing.reset, {}),
    "checkpointing.model_parallel_cuda_manual_seed(seed)": (
        checkpointing.model_parallel_cuda_manual_seed,
        {"seed": NO_DEFAULT},
    ),
    "CudaRNGStatesTracker.add": (
        checkpointing.CudaRNGStatesTracker.add,
        dict.fromkeys(("self", "name", "seed"), NO_DEFAULT),
    ),
    "CudaRNGStatesTracker.fork": (
        checkpointing.CudaRNGStatesTracker.fork,
        {"self": NO_DEFAULT, "name": "model-parallel-rng"},
    ),
    "_get_cuda_rng_state(device='cuda', clone=False, graph_safe=False)": (
        checkpointing._get_cuda_rng_state,
        {"device": "cuda", "clone": False, "graph_safe": False},
    ),
    "_set_cuda_rng_state(new_state, device=-1, graph_safe=False)": (
        checkpointing._set_cuda_rng_state,
        {"new_state": NO_DEFAULT, "device": -1, "graph_safe": False},
    ),
    "initialize_rng_tracker(...)": (
        checkpointing.initialize_rng_tracker,
        dict.fromkeys(("use_te_rng_tracker", "inference_rng_tracker", "use_cudagraphable_rng", "force_reset"), False),
    ),
    "get_cuda_rng_tracker(...)": (
        checkpointing.get_cuda_rng_tracker,
        dict.fromkeys(("use_te_rng_tracker", "inference_rng_tracker", "use_cudagraphable_rng"), False),
    ),
    "set_random_seed": (deepspeed.runtime.utils.set_random_seed, {"seed": NO_DEFAULT}),
}


@pytest.mark.parametrize("row", SIGNATURES)
def test_checkpointing_arguments_come_in_the_documented_order_with_the_documented_defaults(row: str) -> None:
    function, documented = SIGNATURES[row]
    found = inspect.signature(function).parameters
    assert {name: found[name].default for name in list(found)[: len(documented)]} == documented
    assert list(found)[: len(documented)] == list(documented)


def test_both_module_paths_have_the_same_names() -> None:
    there = deepspeed.runtime.activation_checkpointing.checkpointing
    assert {name: getattr(there, name) for name in there.__all__} == {
        name: getattr(checkpointing, name) for name in checkpointing.__all__
    }
    scope: dict[str, Any] = {}
    exec(f"from {deepspeed.__name__}.checkpointing import CudaRNGStatesTracker as tracker", scope)
    assert scope["tracker"] is checkpointing.CudaRNGStatesTracker  # the name itself
    with pytest.raises(ImportError, match=r"runtime\.utils\.CheckOverflow is not here"):
        exec(f"from {deepspeed.__name__}.runtime.utils import CheckOverflow", scope)


JSON = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 5,
    "cpu_checkpointing": True,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}
ALL = CheckpointSettings(True, True, 5, True, True, True)
GIVEN: dict[str, tuple[dict[str, Any], CheckpointSettings]] = {
    "configure: partition_activations": ({"partition_activations": True}, CheckpointSettings(True)),
    "configure: num_checkpoints": ({"num_checkpoints": 3}, CheckpointSettings(num_checkpoints=3)),
    "configure: contiguous_checkpointing": (
        {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 3},
        CheckpointSettings(True, True, 3),
    ),
    "configure: checkpoint_in_cpu": ({"checkpoint_in_cpu": True}, CheckpointSettings(checkpoint_in_cpu=True)),
    "configure: synchronize": ({"synchronize": True}, CheckpointSettings(synchronize=True)),
    "configure: profile": ({"profile": True}, CheckpointSettings(profile=True)),
    "configure: deepspeed_config, a mapping": (
        {"deepspeed_config": {"train_batch_size": 1, "activation_checkpointing": JSON}},
        ALL,
    ),
    "configure: deepspeed_config without the section": ({"deepspeed_config": {}}, CheckpointSettings()),
    "configure: deepspeed_config, DeepSpeed's object": (
        {"deepspeed_config": SimpleNamespace(activation_checkpointing_config=SimpleNamespace(profile=True))},
        CheckpointSettings(profile=True),
    ),
    "configure: explicit arguments override it": (
        {
            "deepspeed_config": {"activation_checkpointing": JSON},
            "contiguous_checkpointing": False,
            "num_checkpoints": 7,
            "profile": False,
        },
        CheckpointSettings(True, False, 7, True, True, False),
    ),
}


@pytest.mark.parametrize("row", GIVEN)
def test_configure_sets_what_it_is_given(row: str) -> None:
    given, wanted = GIVEN[row]
    assert not checkpointing.is_configured()
    checkpointing.configure(Mpu(), **given)
    assert checkpointing.is_configured() is True
    assert PROCESS.checkpointer.settings == wanted


def test_configure_reads_the_path_of_a_json(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"activation_checkpointing": JSON}))
    checkpointing.configure(Mpu(), str(tmp_path / "ds.json"), None, None, 9)
    assert PROCESS.checkpointer.settings == CheckpointSettings(True, True, 9, True, True, True)
    with pytest.raises(FileNotFoundError):
        checkpointing.configure(None, str(tmp_path / "none.json"))


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "mpu without its methods": ((object(),), {}, TypeError, "mpu must have get_model_parallel_world_size"),
    "no config": ((None, 3), {}, TypeError, "deepspeed_config must be a path or a mapping, not int"),
    "no section": ((None, {"activation_checkpointing": 1}), {}, TypeError, "must be a mapping with keys among"),
    "unknown key": (
        (None, {"activation_checkpointing": {"partition": True}}),
        {},
        ValueError,
        "unknown key 'activation_checkpointing.partition'; accepted: partition_activations, ",
    ),
    "contiguous: needs num_checkpoints": (
        (Mpu(),),
        {"partition_activations": True, "contiguous_checkpointing": True},
        ValueError,
        "num_checkpoints .* is None; accepted: 1 or more",
    ),
    "contiguous: homogeneous checkpoints only, needs partition_activations": (
        (Mpu(),),
        {"contiguous_checkpointing": True, "num_checkpoints": 1},
        ValueError,
        "partition_activations is False; accepted: True",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_configured_is_refused_and_changes_nothing(case: str) -> None:
    args, given, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        checkpointing.configure(*args, **given)
    assert not checkpointing.is_configured()


def test_configure_mpu_says_where_this_process_is() -> None:
    checkpointing.configure(Mpu())
    assert (PROCESS.place.rank, PROCESS.place.size, PROCESS.place.data_rank) == (0, 1, 3)

    class Newer:  # as Megatron calls it now
        def get_tensor_model_parallel_rank(self) -> int:
            return 1

        def get_tensor_model_parallel_world_size(self) -> int:
            return 2

        def get_tensor_model_parallel_group(self) -> str:
            return "group"

    place = PROCESS.place.of(Newer())
    assert (place.rank, place.size, place.group, place.data_rank) == (1, 2, "group", 0)


def test_checkpoint_in_cpu_moves_what_a_rank_keeps_with_partition_activations_and_without() -> None:
    # The documentation has it with partitioning only; later versions, and this package, without it as well.
    for partitioned in (True, False):
        checkpointing.configure(Mpu(), partition_activations=partitioned, checkpoint_in_cpu=True)
        out = checkpointing.checkpoint(torch.tanh, value(4, WIDTH))
        kept = PROCESS.checkpointer.kept
        assert kept is not None and kept.on_host and kept.kept_bytes == 4 * WIDTH * 4
        out.sum().backward()


def called(run: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(4)
    x, layers = value(3, WIDTH), blocks(2)
    out = run(layers[1], run(layers[0], x), None)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layers.parameters()), torch.get_rng_state()]


def test_checkpoint_has_the_semantics_of_torch_and_so_have_its_other_forms() -> None:
    wanted = called(direct)

    def with_outputs(function: Callable[..., Any], *args: Any) -> Any:
        outputs: list[Any] = []
        checkpointing.CheckpointFunction.apply(function, outputs, *args)
        return outputs[0]

    checkpointing.model_parallel_cuda_manual_seed(1)
    forms = (
        checkpointing.checkpoint,
        checkpointing.non_reentrant_checkpoint,
        checkpointing.CheckpointFunction.apply,
        with_outputs,
    )
    for options in ({}, {"checkpoint_in_cpu": True}):
        checkpointing.configure(None, **options)
        for form in forms:
            assert all(torch.equal(a, b) for a, b in zip(called(form), wanted, strict=True)), form
    outputs: list[Any] = []
    checkpointing.CheckpointFunction.apply(lambda x: (x, 3), outputs, value(2))
    assert len(outputs) == 2 and outputs[1] == 3
    out = checkpointing.non_reentrant_checkpoint(lambda x, *, scale: x * scale, value(2), scale=3.0)
    assert torch.equal(out, value(2) * 3.0)


def test_checkpoint_function_tracks_the_states_of_the_model_parallel_tracker() -> None:
    """Set for the recomputation to what they were, and back afterwards."""

    def run(call: Callable[..., Any]) -> list[Any]:
        checkpointing.model_parallel_cuda_manual_seed(6)
        tracker = checkpointing.get_cuda_rng_tracker()
        layers, x = blocks(2, tracker), value(3, WIDTH)
        out = call(layers[1], call(layers[0], x))
        with tracker.fork():
            between = torch.rand(2)
        out.square().sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in layers.parameters()), between, *tracker.get_states().values()]

    checkpointing.configure(Mpu())  # which says what the seeds are
    wanted = run(direct)
    for options in ({}, {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2}):
        checkpointing.configure(Mpu(), **options, profile=True)
        found = run(checkpointing.CheckpointFunction.apply)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert checkpointing.timings().backwards == 2


def test_reset_clears_contiguous_buffers_between_forwards_without_backward() -> None:
    checkpointing.configure(
        Mpu(), partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1, checkpoint_in_cpu=False
    )
    held = []
    for _ in range(3):
        held.append(checkpointing.checkpoint(torch.tanh, value(4, WIDTH)))
        checkpointing.reset()
    held.append(checkpointing.checkpoint(torch.tanh, value(4, WIDTH)))
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        checkpointing.checkpoint(torch.tanh, value(4, WIDTH))


def test_set_random_seed_is_that_of_python_numpy_and_torch() -> None:
    deepspeed.runtime.utils.set_random_seed(5)
    assert random.random() == random.Random(5).random()


# ---- the JSON of an engine ----


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def test_initialize_honours_the_section_unless_the_script_has_configured() -> None:
    config = {"train_batch_size": 4, "activation_checkpointing": {**JSON, "partition_activations": True}}
    with pytest.warns(UserWarning, match="group of one"):
        engine, *_ = deepspeed.initialize(model=net(), config=config)
    assert checkpointing.is_configured() and PROCESS.checkpointer.settings == ALL
    assert engine.zero.checkpoint_timings is checkpointing.timings()
    checkpointing.checkpoint(torch.tanh, value(4, WIDTH)).sum().backward()
    assert engine.zero.checkpoint_timings.as_metrics()["checkpoint/backwards"] == 1
    # A later engine's section replaces an earlier one's, and arguments of the script win over any.
    ZeroEngine(net(), {"zero_optimization": {"stage": 0}, "activation_checkpointing": {"profile": True}})
    assert PROCESS.checkpointer.settings == CheckpointSettings(profile=True)
    checkpointing.configure(None, num_checkpoints=2)
    ZeroEngine(net(), {"zero_optimization": {"stage": 0}, "activation_checkpointing": {"profile": True}})
    assert PROCESS.checkpointer.settings == CheckpointSettings(num_checkpoints=2)


@pytest.mark.parametrize("section", [{}, None, dict.fromkeys(JSON), {"profile": False, "number_checkpoints": None}])
def test_a_section_that_asks_for_nothing_configures_nothing(section: dict[str, Any] | None) -> None:
    deepspeed.initialize(model=net(), config={"train_batch_size": 4, "activation_checkpointing": section})
    assert not checkpointing.is_configured()


def test_a_section_that_lacks_something_is_refused_before_anything_is_sharded() -> None:
    section = {"partition_activations": True, "contiguous_memory_optimization": True}
    with pytest.raises(ValueError, match=r"number_checkpoints.* is None; accepted: 1 or more"):
        deepspeed.initialize(model=net(), config={"train_batch_size": 4, "activation_checkpointing": section})
