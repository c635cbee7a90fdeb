"""The engine's device: named with its index, current, and asked for in one place."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.device.gpus import Gpus
from zero_strategy.activation.rng import CudaRNGStatesTracker, RandomState, seed_model_parallel
from zero_strategy.activation.settings import ModelParallel
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.offload.tier import CudaStreams, HostMemory
from zero_strategy.runtime import compute_device
from zero_strategy.runtime.compute_device import gpu_of_local_rank, occupy, where_memory_is_held, with_index

PACKAGE = Path(compute_device.__file__).parents[1]


class Bound:
    """A process group that was made for a GPU."""

    bound_device_id = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Four GPUs, of which the third is current."""
    return Gpus(monkeypatch, 4, current=2)


@pytest.mark.parametrize(
    ("given", "found"), [("cuda", "cuda:2"), ("cuda:1", "cuda:1"), ("cpu", "cpu"), ("cpu:0", "cpu"), ("meta", "meta")]
)
def test_a_device_has_the_name_that_tensors_give_it(gpus: Gpus, given: str, found: str) -> None:
    assert with_index(given) == torch.device(found)
    assert with_index(torch.device(given)).index == torch.device(found).index


def test_the_engines_device_becomes_the_current_one(gpus: Gpus) -> None:
    assert occupy("cuda:3") == torch.device("cuda", 3) and gpus.current == 3
    assert occupy("cuda") == torch.device("cuda", 3)
    assert occupy("cpu:0") == torch.device("cpu") and gpus.current == 3


def test_a_gpu_that_is_not_there_is_refused(gpus: Gpus) -> None:
    with pytest.raises(ValueError, match=r"on cuda:5, and this process sees 4 GPU.*LOCAL_RANK"):
        occupy("cuda:5")
    assert gpus.current == 2


def test_another_gpu_than_the_process_groups_is_refused(gpus: Gpus) -> None:
    assert occupy("cuda:1", Bound()) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"made for cuda:1.*the module is on cuda:0; add model.to\(\"cuda:1\"\)"):
        occupy("cuda:0", Bound())
    assert gpus.current == 1


def test_streams_are_those_of_a_device_with_an_index(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", asked.append)
    streams = CudaStreams(torch.device("cuda"))
    gpus.current = 0
    streams.current()
    assert asked == [torch.device("cuda", 2)]


@pytest.mark.parametrize("seen", [1, 2, 4])
def test_a_local_rank_is_counted_among_the_gpus_that_are_seen(monkeypatch: pytest.MonkeyPatch, seen: int) -> None:
    Gpus(monkeypatch, seen)
    assert gpu_of_local_rank(3) == torch.device("cuda", 3 % seen)


class Registered:
    """CUDA's runtime: notes the device that is current where host memory is registered and given up."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus, self.on = gpus, list[int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.on.append(self.gpus.current)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.on.append(self.gpus.current)
        return 0


def test_host_memory_is_registered_where_memory_is_held(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own GPU 0 is current, on which this process has nothing."""
    runtime = Registered(gpus)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    gpus.current, gpus.held = 0, {3: 1 << 20}
    memory = HostMemory(1, pinned=True)
    assert memory.pinned
    del memory
    assert runtime.on == [3, 3] and gpus.current == 0
    gpus.held = {}
    with where_memory_is_held():
        assert gpus.current == 0


@pytest.mark.parametrize("given", ["cpu", "cpu:0"])
def test_all_states_move_however_the_device_was_named(given: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine = ZeroEngine(model, load_config(stage=2, watchdog="off"), device=torch.device(given))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine.offload_states()
    moved = sum(storage.nbytes for storage in engine.model.moved._memory)
    assert moved >= 4 * sum(values.numel() for values in before), "nothing has moved"
    engine.reload_states()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    engine.close()


_CURRENT = ("current_stream", "default_stream", "synchronize", "Stream", "mem_get_info", "current_device", "set_device")
"""Functions of `torch.cuda` that mean the thread's current device where they are given none, or change it."""
_OF_GENERATORS = {"get_rng_state": 1, "set_rng_state": 2, "manual_seed": 2, "seed": 1, "initial_seed": 1}
"""Likewise of its generator, and how many arguments name another; seeds cannot, but a device's own generator can."""
_OF_THE_CURRENT = {
    "runtime/compute_device.py": "is the place",
    "compat/deepspeed/environment.py": "DeepSpeed's accelerator, which speaks of the current device",
    "compat/megatron/tensors.py": "Megatron's buffers are on the current device",
    "compat/megatron/straggler.py": "Megatron's detector measures what is queued on the current stream",
}


def _unnamed(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.removeprefix("torch.cuda.")
        if called.startswith("torch.cuda.") and len(node.args) + len(node.keywords) < _OF_GENERATORS.get(name, 0):
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {called}")
        elif called.startswith("torch.cuda.") and name in _CURRENT:
            if name in ("current_device", "set_device") or not (node.args or node.keywords):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {called}")
        elif called.endswith(".record") and not node.args and "torch.cuda.Event" in path.read_text():
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {called}")
    return found


def test_calls_name_the_device_that_they_mean() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if str(path.relative_to(PACKAGE)) not in _OF_THE_CURRENT]
    assert not [line for path in paths for line in _unnamed(path)]
    assert _unnamed(Path(compute_device.__file__))


class DeviceGenerator:
    """A GPU's, which keeps what it is seeded with."""

    seed = 0

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


def test_a_tracker_seeds_the_generator_of_its_own_device(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that of the thread's current one."""
    generators = tuple(DeviceGenerator() for _ in range(4))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", generators, raising=False)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: generators[gpus.current].manual_seed(seed))
    tracker = CudaRNGStatesTracker("cuda:1")
    monkeypatch.setattr(tracker, "add", lambda name, seed: None)  # which makes a generator there
    seed_model_parallel(tracker, 7, ModelParallel())
    assert [generator.seed for generator in generators] == [0, 7, 0, 0]


def test_a_state_goes_back_to_the_device_that_it_is_of(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {torch.device("cuda", index): torch.tensor([index]) for index in range(4)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    before = RandomState.now()
    states[torch.device("cuda", 2)] = torch.tensor([9])
    gpus.current = 0
    before.restore()
    assert [int(state) for state in states.values()] == [0, 1, 2, 3]


def test_a_thread_of_its_own_pins_where_memory_is_held(gpus: Gpus) -> None:
    gpus.held, seen = {1: 1}, list[int]()
    gpus.current = 0

    def work() -> None:
        with where_memory_is_held():
            seen.append(gpus.current)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1]
