"""Uses of torch's private API, all in one place, under names that say what they do.

No other module may name an attribute of torch's that begins with an underscore (`tests/runtime/test_torch_private.py`
looks), and that file tests every function here, so a new version of torch is tried by `make test-torch
VERSION=2.12.0`. Written for torch 2.11 to 2.13. The tree functions of `torch.utils._pytree` are what torch's own
public modules take trees apart with; `torch.utils.pytree` has no public counterpart for them before 2.13.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from datetime import timedelta
from functools import wraps
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Tensor)

# ---- autograd ----

FunctionNode: type = torch._C._FunctionBase
"""The class of graph nodes that a `torch.autograd.Function` makes."""


def in_backward() -> bool:
    """True if this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call it when the backward that this thread runs is over, before `backward()` returns. An error is raised there.

    Raises:
        RuntimeError: Outside of a backward.
    """
    Variable._execution_engine.queue_callback(call)


def hooks_on_saved_tensors() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The innermost hooks on saved tensors that are set now: what packs, and what unpacks."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert found is not None
    pack, unpack = found
    return pack, unpack


def may_hook_saved_tensors() -> bool:
    """True if no hooks on saved tensors are set, and nothing forbids them."""
    set_now = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    return not set_now and not refused and not in_transform()


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor, also of one whose indices occur twice."""
    return tensor._indices(), tensor._values()


_GET_VERSION: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
_GET_GRAD: Callable[[Tensor], Tensor | None] = Tensor.grad.__get__  # type: ignore[union-attr]


def version_of(tensor: Tensor) -> int:
    """Number of times that the tensor, or another one that shares its version counter, was written to in place."""
    return tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Give `version_of` each tensor.

    For subclasses torch looks for `__torch_function__` at every attribute, for a microsecond; here it need not.
    """
    with DisableTorchFunctionSubclass():
        return list(map(_GET_VERSION, tensors))


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """The `p.grad` of each, as quickly as `versions_of`."""
    with DisableTorchFunctionSubclass():
        return list(map(_GET_GRAD, tensors))


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """The function, run with gradients off. Where they are off already, as in a backward, it costs nothing more."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)  # `torch.no_grad` is this in three calls more
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return call


def is_tracing() -> bool:
    """True if `torch.jit.trace` runs the code."""
    return torch._C._get_tracing_state() is not None


def in_transform() -> bool:
    """True inside of one of `torch.func`'s transforms (`vmap`, `grad`, `jvp`, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms(function: Callable[P, T]) -> Callable[P, T]:
    """The function, run outside of `torch.func`'s transforms under way; where there are none, it costs next to nothing.

    Inside of one (`vmap`, `grad`, `jvp`, ...) a write to a tensor that the transform did not make is refused.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not in_transform():
            return function(*args, **kwargs)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return call


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which this one is a view to autograd; None if it is none."""
    return tensor._base


def has_tensor_hooks(tensor: Tensor) -> bool:
    """True if hooks on its gradient are registered."""
    return bool(tensor._backward_hooks)


def hooks_kept(parameter: Tensor) -> Callable[[], None]:
    """Note the parameter's tables of hooks; the result puts them back, after `torch.utils.swap_tensors`."""
    kept: Any = parameter
    hooks, after = kept._backward_hooks, kept._post_accumulate_grad_hooks

    def put_back() -> None:
        kept._backward_hooks, kept._post_accumulate_grad_hooks = hooks, after

    return put_back


def swap_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter another tensor, of whatever dtype and device; it stays the same object.

    Its class and what the class keeps with it stay, too: plain `.data` takes over neither dtype nor device of a
    `DTensor`, nor anything from the meta device.
    """
    kind, kept = type(parameter), dict(vars(parameter))
    made = nn.Parameter(values, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, made)
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter and type(parameter) is nn.Parameter:
        parameter.__class__ = kind
        vars(parameter).update(kept)


# ---- tensors and their memory ----


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells storages apart: equal for all objects that stand for one, as long as one of them lives."""
    key: int = storage._cdata
    return key


def is_used_elsewhere(tensor: Tensor) -> bool:
    """True if something beside this object keeps the tensor or its memory: a view, an autograd graph."""
    storage = tensor.untyped_storage()  # a holder as well
    counted: Any = tensor
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2 or counted._use_count() > 1)


def of_class(kind: type[S], values: Tensor) -> S:
    """A tensor of a subclass in the memory of another one, without a gradient."""
    made: S = Tensor._make_subclass(kind, values, False)
    return made


def target_of_to(*arguments: Any, **keywords: Any) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Device, dtype and permission to copy asynchronously that arguments of `nn.Module.to` ask for."""
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*arguments, **keywords)
    return device, dtype, non_blocking


def wrapper_tensor(cls: type[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a subclass with `__torch_dispatch__` that has no memory of its own."""
    made: Tensor = cls._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
    return made


def wrapper_like(cls: type[S], values: Tensor) -> S:
    """A tensor of a subclass with `__torch_dispatch__`, of the layout, dtype and device of another, without memory."""
    made: S = Tensor._make_wrapper_subclass(
        cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
    )
    return made


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass whose functions go on to `__torch_dispatch__` at once."""


def storage_holders(tensor: Tensor) -> int:
    """Number of tensors and other objects that keep the tensor's memory, one that is made for this call among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def detached_with_version(tensor: Tensor) -> Tensor:
    """The tensor detached, by the same version counter also where `__torch_dispatch__` calls this."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a tensor subclass such as `DTensor` is made of, or the tensor itself if it is made of none."""
    made: Any = tensor
    if is_traceable_wrapper_subclass(made):
        for name in made.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(made, name))
    else:
        yield tensor


METADATA_GETTERS = tuple(
    getattr(Tensor, name).__get__
    for name in ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
    if hasattr(Tensor, name)
)
"""Functions, as `__torch_function__` sees them, that read a tensor's undocumented attributes; none reads values."""

IS_VIEW, BASE_OF_VIEW = Tensor._is_view, Tensor._base.__get__  # type: ignore[union-attr]
"""Functions, as `__torch_function__` sees them, that tell whether a tensor is a view for autograd, and of what."""

METADATA_SETTERS = tuple(getattr(Tensor, name).__set__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
"""Functions, as `__torch_function__` sees them, that write such attributes."""

has_compatible_shallow_copy_type: Any = torch._has_compatible_shallow_copy_type
"""Whether `tensor.data = other` is possible; `nn.Module.to` asks."""

foreach_add_: Any = torch._foreach_add_
foreach_copy_: Any = torch._foreach_copy_
foreach_div_: Any = torch._foreach_div_
foreach_mul: Any = torch._foreach_mul
foreach_mul_: Any = torch._foreach_mul_
foreach_norm: Any = torch._foreach_norm
foreach_sqrt: Any = torch._foreach_sqrt
foreach_sub: Any = torch._foreach_sub
foreach_sub_: Any = torch._foreach_sub_
foreach_zero_: Any = torch._foreach_zero_
"""An operation on each of a list of tensors, in few launches where they are on a GPU."""

fused_adam_: Any = torch._fused_adam_
fused_adamw_: Any = torch._fused_adamw_
"""Steps of Adam over lists of tensors, one kernel for all of its operations."""


def fused_devices() -> list[str]:
    """Types of the devices that have those."""
    return list(_get_fused_kernels_supported_devices())


# ---- operators ----


def has_kernel(qualified: str, key: str) -> bool:
    """True if the op "namespace::name" has a kernel of its own under a dispatch key ("CPU", "CUDA")."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)


def schema_of(op: Any) -> Any:
    """The schema of an op overload; None for what is none."""
    return getattr(op, "_schema", None)


def fake_tensors() -> Any:
    """A mode whose tensors have shapes and sizes and no memory, and that takes others for such; imported late."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor of such a mode."""
    return type(tensor).__name__ == "FakeTensor"  # the class is imported late


def packet_of(op: Any) -> Any:
    """The op that an overload belongs to; None for what is no overload."""
    return getattr(op, "_overloadpacket", None)


def op_name(op: Any) -> str:
    """The name of an op overload, or of a custom op's definition, without namespace and overload."""
    return str(op._opname)


_COMPILER, _CHECKPOINT = (f"{torch.__path__[0]}{part}" for part in ("/_inductor/", "/utils/checkpoint.py"))


def is_called_by_compiled_code() -> bool:
    """True if what runs was called by code of torch's compiler (Inductor), inside of a `torch.utils.checkpoint`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        if frame.f_code.co_filename.startswith(_COMPILER):  # it runs the code that it wrote
            return True
        frame = frame.f_back
    return False


def callers(frame: FrameType | None, most: int = 3) -> Iterator[FrameType]:
    """A frame that calls torch, and those around it: torch's modes may be between an operation and who asks for it."""
    while frame is not None and most > 0:
        yield frame
        frame, most = frame.f_back, most - 1


def qualified_name(op: Any) -> str:
    """ "namespace::name" of an op packet or overload; "" for anything else."""
    return str(getattr(op, "_qualified_op_name", ""))


# ---- optimizers ----


def step_hooks_of(optimizer: Optimizer) -> tuple[MutableMapping[int, Any], MutableMapping[int, Any]]:
    """The optimizer's tables of hooks before and after its `step()`, by the number of their handle."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def replace_step_hooks(optimizer: Optimizer, before: MutableMapping[int, Any], after: MutableMapping[int, Any]) -> None:
    """Give the optimizer other tables; torch goes through `values()` of each at every step."""
    optimizer._optimizer_step_pre_hooks = before  # type: ignore[assignment]
    optimizer._optimizer_step_post_hooks = after  # type: ignore[assignment]


# ---- modules ----


def parameters_of(module: nn.Module) -> MutableMapping[str, nn.Parameter | None]:
    """The module's own table of its direct parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """The module's own table of its direct buffers."""
    return module._buffers


def children_of(module: nn.Module) -> MutableMapping[str, nn.Module | None]:
    """The module's own table of its direct children, one that is there under two names under both."""
    return module._modules


def forward_pre_hooks_of(module: nn.Module) -> Iterable[Callable[..., Any]]:
    """The module's own forward pre-hooks."""
    return module._forward_pre_hooks.values()


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of its direct buffers that are not in the state dict."""
    return module._non_persistent_buffers_set


def saves_tensors_itself(cls: type[nn.Module]) -> bool:
    """True if a class of modules writes its own tensors into the state dict in a way of its own."""
    return cls._save_to_state_dict is not nn.Module._save_to_state_dict


def loads_tensors_itself(module: nn.Module) -> bool:
    """True if a module takes tensors out of a state dict its own way; torch's layers, which check shapes, do not."""
    cls = type(module)
    loaders = cls._load_from_state_dict, cls.load_state_dict
    return not all(loader.__module__.startswith("torch.nn.modules.") for loader in loaders)


def state_dict_hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Hooks that run before and after the module writes itself into a state dict."""
    return [*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values()]


def own_state(module: nn.Module, skips: Callable[[Any], bool]) -> dict[str, Any]:
    """The module's own part of a state dict, without its children's and without prefix.

    Args:
        module: The module.
        skips: Tells hooks that are left out.
    """
    for before in module._state_dict_pre_hooks.values():
        if not skips(before):
            before(module, "", True)
    found: Any = OrderedDict()
    found._metadata = OrderedDict()
    module._save_to_state_dict(found, "", True)
    for hook in module._state_dict_hooks.values():
        result = None if skips(hook) else hook(module, found, "", {})
        found = found if result is None else result
    return dict(found)


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace every parameter and buffer below a module by what the function gives, as `module.to` does."""
    module._apply(function)
    return module


def replace_map_tensors(module: nn.Module, make: Callable[[Any], Any]) -> None:
    """Let `module.to`, `.half()` and their like call `make(original)` on this module instead of the class's method.

    `original` is the class's function, which takes the module, the function and `recurse`.
    """
    # The module's own cast methods look `_apply` up on the object.
    object.__setattr__(module, "_apply", make(type(module)._apply))


def put_back_map_tensors(module: nn.Module, replacement: Any) -> None:
    """Undo `replace_map_tensors`, unless somebody has replaced it since."""
    if vars(module).get("_apply") is replacement:
        object.__delattr__(module, "_apply")


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if `module.compile()` was called."""
    return module._compiled_call_impl is not None


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that `module.compile()` has made; None: it was not called."""
    return module._compiled_call_impl


AnyBatchNorm = _BatchNorm
"""The base class of all modules for batch normalization."""


def is_compiled(module: nn.Module) -> bool:
    """True if `torch.compile` has been told to compile the module, in place or as a module of torch's around it."""
    return is_compiled_in_place(module) or type(module).__name__ == "OptimizedModule"


def is_compiling() -> bool:
    """True in code that `torch.compile` compiles, or has compiled."""
    return is_dynamo_compiling() or get_eval_frame_callback() is not None


def uncompiled(function: Callable[P, T], *, recursive: bool = True) -> Callable[P, T]:
    """The function, left alone by `torch.compile`.

    As `torch.compiler.disable`, which loads the compiler, a second's work, where a class is defined. This loads it when
    the function is called first by what is compiled; else the call costs next to nothing.

    Args:
        function: Anything, a method too.
        recursive: What it calls is left alone as well.
    """
    left_alone = _disable_dynamo(function, recursive)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_compiling():
            return left_alone(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def compiled_frames() -> int:
    """Number of functions of Python's that `torch.compile` has compiled in this process, or has tried to."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["frames"]["total"])


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def holders_of(tensor: Tensor) -> int | None:
    """Number of tensors, and of others, that share a tensor's memory, itself included; None: torch does not tell."""
    if _use_count is None:
        return None
    alone = torch.empty(0)  # the count has one more, for the storage as Python sees it
    asked = _use_count(alone.untyped_storage()._cdata) - 1
    return _use_count(tensor.untyped_storage()._cdata) - asked


# ---- processes and devices ----


SAME_DTYPE_CHECK: CodeType = dist.distributed_c10d._ensure_all_tensors_same_dtype.__code__
"""Collectives that take lists of tensors call it with all of them before anything is sent."""


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Bound of a group's collectives from now on, on all of its devices; None: of the default process group's."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def default_store() -> Any:
    """The `Store` of the default process group.

    Raises:
        ValueError: If there is no default group.
    """
    return dist.distributed_c10d._get_default_store()


_SOCKET = re.compile(r"client=TCPClient\(SocketImpl\(fd=(\d+),")


def tcp_store_of(store: Any) -> TCPStore | None:
    """The store in which others have put prefixes before the keys, if it is one of TCP."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def socket_of(store: TCPStore) -> int | None:
    """File descriptor of the connection to the store; None where that cannot be said. Nothing else tells it."""
    found = _SOCKET.search(repr(store))
    return None if found is None else int(found[1])


def backend_of(group: dist.ProcessGroup, device: str) -> Any:
    """Carrier of a group's messages between devices of a type ("cpu", "cuda").

    Raises:
        RuntimeError: If nothing does.
    """
    return group._get_backend(torch.device(device))


def timeout_of(backend: Any) -> float:
    """Seconds after which gloo gives a message up."""
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def symmetric_memory() -> Any:
    """The module by which ranks write into each other's GPU memory (`empty`, `rendezvous`)."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric


def flattened_meshes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Meshes of one axis that were made of several axes, of this mesh or of one that it is a part of, by name."""
    found: dict[str, DeviceMesh] = getattr(mesh._get_root_mesh(), "_flatten_mapping", {})
    return found


def call_when_cuda_starts(call: Callable[[], object]) -> None:
    """Call it once CUDA is initialised, at once if it is."""
    torch.cuda._lazy_call(call)


# ---- attention ----


def attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Scaled dot-product attention by torch's fused kernels, with the log-sum-exp of each row of scores.

    Args:
        q: (batch, heads, rows, width).
        k: (batch, heads, columns, width).
        v: Likewise.
        causal: Row i sees columns up to i; rows and columns are as many.
        scale: Factor of the scores.

    Returns:
        The output, (batch, heads, rows, width); (batch, heads, rows) float32; what the backward needs besides.
    """
    ops = torch.ops.aten
    if q.is_cpu:
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse, None
    width = q.shape[-1]
    q, k, v = _in_eights(q, k, v)
    if _takes_flash(q):
        found = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return found[0].narrow(-1, 0, width), found[1], found[2:8]
    out, lse, seed, offset = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out.narrow(-1, 0, width), lse.narrow(-1, 0, q.shape[2]), (seed, offset)


def _in_eights(*tensors: Tensor) -> list[Tensor]:
    """Put zeros behind the width, up to a multiple of 8 as the kernels need it: they add nothing to any score."""
    missing = -tensors[0].shape[-1] % 8
    return [torch.nn.functional.pad(tensor, (0, missing)) for tensor in tensors] if missing else list(tensors)


def _takes_flash(q: Tensor) -> bool:
    """True if torch's flash kernels take these, forward and backward; the memory-efficient ones take all."""
    width, capability = q.shape[-1], torch.cuda.get_device_capability(q.device)
    # Consumer GPUs have too little shared memory for the backward of these widths (torch's `sdp_utils.cpp`).
    narrow = capability in ((8, 6), (8, 9)) or capability[0] == 12
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and capability >= (8, 0)
        and width <= 256
        and not (narrow and 192 < width <= 224)
    )


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of an attention; `out` and `lse` may be those of more columns than these."""
    ops = torch.ops.aten
    if q.is_cpu:
        found = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return found[0], found[1], found[2]
    width = q.shape[-1]
    grad, q, k, v, out = _in_eights(grad, q, k, v, out)
    if _takes_flash(q):
        cum_q, cum_k, rows, columns, seed, offset = rest
        found = ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, rows, columns, 0.0, causal, seed, offset, scale=scale
        )
    else:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        mask = [True, True, True, False]
        found = ops._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, padded, *rest, 0.0, mask, causal, scale=scale
        )
    in_q, in_k, in_v = (each.narrow(-1, 0, width) for each in found[:3])
    return in_q, in_k, in_v
