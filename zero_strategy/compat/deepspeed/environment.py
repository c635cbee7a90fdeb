"""Surroundings of a process: its device, its place among the ranks, its logger, and ranges of a profiler.

What is small of DeepSpeed's `accelerator`, `comm`, `moe.utils` and `utils.*`; `names.py` says which place has what.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.comm.process_group import discover, world_rank, world_size
from zero_strategy.diagnostics.recorder import MemoryUse
from zero_strategy.runtime.torch_private import call_when_cuda_starts

F = TypeVar("F", bound=Callable[..., Any])


class Accelerator:
    """A device, with what scripts ask about it and do with it; index None is the current one.

    On the CPU there is one device: choosing it does nothing, and memory is that of this process.

    Args:
        device_type: "cuda" or "cpu".
    """

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._cuda = device_type == "cuda"
        self._module: Any = torch.cuda if self._cuda else torch.cpu

    def __repr__(self) -> str:
        return f"Accelerator({self._type!r})"

    # ---- devices ----

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda" or "cpu"; "cuda:1" with an index."""
        return f"cuda:{device_index}" if self._cuda and device_index is not None else self._type

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is the current one."""
        return torch.cuda.device(device_index) if self._cuda else torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        self._module.set_device(device_index)

    def current_device(self) -> int:
        """Index of the current device; on the CPU this process's rank on its host."""
        return torch.cuda.current_device() if self._cuda else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """The device's name, such as "cuda:1"; "cpu"."""
        return f"cuda:{torch.cuda.current_device()}" if self._cuda else "cpu"

    def device_count(self) -> int:
        """Devices that this process sees; 1 on the CPU."""
        return torch.cuda.device_count() if self._cuda else 1

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for what the device has to do."""
        self._module.synchronize(device_index)

    def is_available(self) -> bool:
        """True if there is such a device."""
        return torch.cuda.is_available() if self._cuda else True

    def is_synchronized_device(self) -> bool:
        """True if calls return when they are done: on the CPU."""
        return not self._cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        """ "nccl" or "gloo"."""
        return "nccl" if self._cuda else "gloo"

    def on_accelerator(self, tensor: Tensor) -> bool:
        """True if a tensor is on such a device."""
        return tensor.device.type == self._type

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """The tensor in page-locked host memory; on the CPU the tensor itself."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if it is there already."""
        return tensor.is_pinned()

    # ---- random numbers ----

    @property
    def random(self) -> Any:
        """Torch's module of random states."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        if self._cuda:
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed all devices."""
        if self._cuda:
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed of the current device."""
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of a device's generator."""
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set it."""
        if self._cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of a device."""
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # ---- streams ----

    @property
    def Stream(self) -> Any:
        """The class of streams."""
        return self._module.Stream

    @property
    def Event(self) -> Any:
        """The class of events; None on the CPU."""
        return torch.cuda.Event if self._cuda else None

    def stream(self, stream: Any) -> Any:
        """A context in which work goes to a stream."""
        return self._module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream in use."""
        return torch.cuda.current_stream(device_index) if self._cuda else torch.cpu.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        """The device's own stream."""
        return torch.cuda.default_stream(device_index) if self._cuda else torch.cpu.current_stream()

    # ---- memory ----

    def empty_cache(self) -> None:
        """Give what the allocator keeps back to the device."""
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device; on the CPU what this process occupies."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else MemoryUse.now().resident or 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most of it; on the CPU since the process began."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(device_index)
        return max(self.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator has taken; on the CPU as `memory_allocated`."""
        return torch.cuda.memory_reserved(device_index) if self._cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most of it."""
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else self.max_memory_allocated()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Figures of the allocator; on the CPU two of them."""
        if self._cuda:
            return dict(torch.cuda.memory_stats(device_index))
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin anew with the most; not on the CPU, where the system counts."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device, or of the host."""
        if self._cuda:
            return torch.cuda.get_device_properties(self._index(device_index)).total_memory
        return MemoryUse.now().host_total or 0

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can be had."""
        if self._cuda:
            return torch.cuda.mem_get_info(self._index(device_index))[0]
        now = MemoryUse.now()
        return (now.host_total or 0) - (now.host_used or 0)

    def _index(self, device_index: int | None) -> int:
        return torch.cuda.current_device() if device_index is None else device_index

    # ---- dtypes ----

    def is_bf16_supported(self) -> bool:
        """True if the device computes in bf16."""
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        """True if it computes in fp16: GPUs from compute capability 7.0 on; on the CPU slowly."""
        return torch.cuda.get_device_capability()[0] >= 7 if self._cuda else True

    def is_triton_supported(self) -> bool:
        """True if Triton compiles for it."""
        return self._cuda and torch.cuda.get_device_capability()[0] >= 7

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that models may have."""
        low = {torch.float16: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float32, *(dtype for dtype, there in low.items() if there)]

    # ---- tools ----

    def amp(self) -> Any:
        """Torch's module of automatic mixed precision."""
        return torch.cuda.amp if self._cuda else torch.cpu.amp

    def range_push(self, msg: str) -> None:
        """Open a range in NVIDIA's profiler; nothing on the CPU."""
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Close it."""
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it, on CUDA once that is initialised."""
        if self._cuda:
            call_when_cuda_starts(callback)
            return None
        return callback()


@functools.cache
def _of(device_type: str) -> Accelerator:
    return Accelerator(device_type)


def get_accelerator() -> Accelerator:
    """The device of this process: CUDA where torch sees a GPU, unless DS_ACCELERATOR says "cpu".

    Raises:
        ValueError: If DS_ACCELERATOR says something else than "cuda" or "cpu".
    """
    said = os.environ.get("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    if said not in ("cuda", "cpu"):
        raise ValueError(f"DS_ACCELERATOR is {said!r}; devices here are 'cuda' and 'cpu'")
    return _of(said)


class OnDevice:
    """Tensors that are made inside are of a device and, where they are of no certain dtype, of that one.

    A model that is built on the meta device is made real, unit by unit, by `initialize`.

    Args:
        dtype: Floating-point dtype.
        device: The device.
        enabled: Do nothing if False.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._before: torch.dtype | None = None

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self.enabled:
            assert self._before is not None
            self.device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)


def instrument_w_nvtx(func: F) -> F:
    """The function, a range of its name around each call where there is a GPU."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return func(*args, **kwargs)
        with torch.cuda.nvtx.range(getattr(func, "__qualname__", type(func).__name__)):
            return func(*args, **kwargs)

    return ranged  # type: ignore[return-value]


# ---- ranks ----


def get_local_rank() -> int:
    """This process on its host, as its launcher said; 0 without one."""
    place = discover(os.environ)
    return 0 if place is None else place.local_rank


def get_world_group() -> dist.ProcessGroup:
    """All ranks.

    Raises:
        RuntimeError: If there is no process group yet.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: call init_distributed() or initialize() before")
    group = dist.group.WORLD
    assert group is not None
    return group


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks among which samples are divided."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    """Their number."""
    return world_size()


def get_data_parallel_rank() -> int:
    """This process among them."""
    return world_rank()


def get_model_parallel_world_size() -> int:
    """1."""
    return 1


def get_model_parallel_rank() -> int:
    """0."""
    return 0


_get_world_group = get_world_group
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank


# ---- parameters of experts ----


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): none is a `MoE` of DeepSpeed's, whichever experts `mesh.expert` divides."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """False, likewise."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The groups as a list: parameters of experts need no groups of their own, divided or not.

    Args:
        param_groups: One, or several.
        max_group_size: Of groups of experts; without effect.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


# ---- the log ----


def _printing(name: str) -> logging.Logger:
    found = logging.getLogger(name)
    if not found.handlers:
        handler = logging.StreamHandler(stream=sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.INFO)
        found.propagate = False
    return found


logger = _printing("zero_strategy.scripts.log")
"""Prints from INFO on."""


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks.

    Args:
        message: What.
        ranks: Which; [-1]: all. None or empty: none, unless there is no process group.
        level: Of `logging`.
    """
    chosen = list(ranks or [])
    if not dist.is_initialized() or -1 in chosen[:1] or world_rank() in chosen:
        logger.log(level, "[Rank %d] %s", world_rank(), message, stacklevel=2)
