"""Every use of torch's private API does what its name says, and there is no other use in the package."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LRScheduler
from torch.testing._internal.two_tensor import TwoTensor

from tests.launcher import Launcher
from zero_strategy import ops
from zero_strategy.runtime import torch_private as private

PACKAGE = Path(private.__file__).parents[1]
OWNERS: tuple[Any, ...] = (
    torch, torch._C, torch.cuda, Tensor, nn.Linear(1, 1), torch.UntypedStorage, Variable, DeviceMesh,
    dist.ProcessGroup, dist.distributed_c10d, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler("cpu"),
    torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.autograd.Function,
)  # fmt: skip
"""What an undocumented attribute may be of, beside modules of torch."""


class Unit(nn.Module):
    """With one of everything that modules keep tables of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.child = self.same = nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("left", torch.zeros(1), persistent=False)
        self.register_parameter("none", None)


# ---- no other use ----


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Undocumented names of torch's that a module mentions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, word) for word in words if word.startswith("_"))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, *words = alias.name.split(".")
                yield from ((node.lineno, word) for word in words if first == "torch" and word.startswith("_"))
        elif isinstance(node, ast.Attribute) and not _is_own(node.value):
            yield from _of_torch(node.lineno, node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and not _is_own(node.args[0]):
                yield from _of_torch(node.lineno, str(node.args[1].value))


def _is_own(value: ast.expr) -> bool:
    """`self`, `cls` and `super()`: what a class of ours has, or may override."""
    return getattr(value, "id", "") in ("self", "cls") or getattr(getattr(value, "func", None), "id", "") == "super"


def _of_torch(line: int, name: str) -> Iterator[tuple[int, str]]:
    if name.startswith("_") and not name.startswith("__") and any(hasattr(owner, name) for owner in OWNERS):
        yield line, name


def test_nothing_else_uses_what_torch_does_not_document() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != Path(private.__file__):
            for line, name in private_names(ast.parse(path.read_text())):
                found.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
    assert not found, "move to runtime/torch_private.py:\n" + "\n".join(found)


def test_uses_are_found() -> None:
    text = (
        "import torch._dynamo\nfrom torch._C import x\nfrom torch.utils import _pytree\nt._version\n"
        "getattr(m, '_modules')\nself._version\nm._own_thing\ntorch.optim\n"
    )
    assert [line for line, _ in private_names(ast.parse(text))] == [1, 2, 3, 4, 5]


# ---- autograd ----


def test_in_backward_and_its_end() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)

    def look(gradient: Tensor) -> None:
        seen.append(("inside", private.in_backward()))
        private.when_backward_ends(lambda: seen.append(("end", private.in_backward())))

    y = x * 2
    y.register_hook(look)
    assert not private.in_backward()
    y.sum().backward()
    seen.append(("after", private.in_backward()))
    assert seen == [("inside", True), ("end", seen[1][1]), ("after", False)]
    with pytest.raises(RuntimeError):
        private.when_backward_ends(lambda: None)


def test_an_error_at_the_end_of_a_backward_is_raised_by_it() -> None:
    x = torch.ones(2, requires_grad=True)

    def fail() -> None:
        raise ArithmeticError("at its end")

    y = x * 2
    y.register_hook(lambda gradient: private.when_backward_ends(fail))
    with pytest.raises(ArithmeticError, match="at its end"):
        y.sum().backward()


def test_versions_and_bases() -> None:
    x = torch.zeros(4)
    view, before = x[:2], private.version_of(x)
    view.add_(1)
    assert private.version_of(x) == private.version_of(view) == before + 1
    assert private.base_of(view) is x and private.base_of(x) is None
    x.data.add_(1)
    assert private.version_of(x) == before + 1
    assert private.versions_of([x, view]) == [before + 1, before + 1]


class Watched(Tensor):
    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs)


def test_attributes_of_many_tensors_ask_no_subclass() -> None:
    one, two = torch.zeros(2).as_subclass(Watched), torch.zeros(2, requires_grad=True)
    one.requires_grad_().grad = torch.ones(2)
    asked, versions = Watched.asked, [private.version_of(one), private.version_of(two)]
    assert Watched.asked > asked
    asked = Watched.asked
    grads = private.grads_of([one, two])
    assert private.versions_of([one, two]) == versions and Watched.asked == asked
    assert grads[0] is not None and grads[0].tolist() == [1.0, 1.0] and grads[1] is None


@pytest.mark.parametrize("on", [True, False])
def test_without_grad(on: bool) -> None:
    @private.without_grad
    def modes(fails: bool) -> bool:
        if fails:
            raise ArithmeticError
        return torch.is_grad_enabled()

    with torch.set_grad_enabled(on):
        assert not modes(False)
        assert torch.is_grad_enabled() is on
        with pytest.raises(ArithmeticError):
            modes(True)
        assert torch.is_grad_enabled() is on


def test_what_runs_outside_of_transforms_may_write() -> None:
    memory, seen = torch.zeros(2), list[float]()

    @private.outside_transforms
    def write(value: float) -> None:
        seen.append(value)
        memory.fill_(value)

    def function(x: Tensor) -> Tensor:
        write(3.0)
        return (x * memory).sum()

    assert torch.func.grad(function)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert torch.func.vmap(function)(torch.ones(4, 2)).tolist() == [6.0] * 4
    write(4.0)
    assert seen == [3.0, 3.0, 4.0] and memory.tolist() == [4.0, 4.0]
    states = list[tuple[bool, bool]]()
    torch.func.vmap(lambda x: states.append((private.in_transform(), private.is_tracing())) or x)(torch.ones(2))
    torch.jit.trace(lambda x: states.append((private.in_transform(), private.is_tracing())) or x + 1, torch.ones(2))
    assert states[0] == (True, False) and states[1] == (False, True) and not private.in_transform()


def test_what_modules_write_and_load_themselves() -> None:
    class Own(nn.BatchNorm1d):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "more"] = 3

        def _load_from_state_dict(self, *args: Any) -> None:
            pass

    module = Own(2)
    module.register_state_dict_post_hook(lambda m, state, prefix, metadata: state.update(late=4))
    assert private.own_state(module, lambda _: True).keys() == {*nn.BatchNorm1d(2).state_dict(), "more"}
    assert private.own_state(module, lambda _: False)["late"] == 4 and len(private.state_dict_hooks_of(module)) == 1
    assert private.loads_tensors_itself(module) and not private.loads_tensors_itself(nn.BatchNorm1d(2))


def test_parts_of_sparse_tensors() -> None:
    tensor = torch.sparse_coo_tensor([[1, 1]], [[2.0], [3.0]], (4, 1))
    indices, values = private.sparse_parts(tensor)
    assert indices.tolist() == [[1, 1]] and values.tolist() == [[2.0], [3.0]]


def test_forward_pre_hooks() -> None:
    module, hook = nn.Linear(1, 1), lambda *_: None
    assert not list(private.forward_pre_hooks_of(module))
    module.register_forward_pre_hook(hook)
    assert list(private.forward_pre_hooks_of(module)) == [hook]


def test_function_nodes() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    assert isinstance(Double.apply(x).grad_fn, private.FunctionNode)
    assert not isinstance((x * 2).grad_fn, private.FunctionNode)


def test_hooks_outlive_a_swap() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []
    assert not private.has_tensor_hooks(parameter)
    parameter.register_hook(lambda gradient: calls.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    assert private.has_tensor_hooks(parameter)
    put_back = private.hooks_kept(parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(3)))
    put_back()
    parameter.sum().backward()
    assert calls == ["gradient", "after"] and parameter.shape == (3,)


# ---- tensors and their memory ----


def test_storages_are_told_apart() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    key = private.storage_key(x.untyped_storage())
    assert key == private.storage_key(x[1:].untyped_storage()) != private.storage_key(y.untyped_storage())


@pytest.mark.parametrize("holder", ["nothing", "view", "graph", "detached"])
def test_what_else_uses_a_parameter(holder: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    held: Any = None
    if holder == "view":
        held = parameter[1:]
    elif holder == "graph":
        held = parameter.exp().mul(parameter)
    elif holder == "detached":
        held = parameter.detach()
    assert private.is_used_elsewhere(parameter) == (holder != "nothing")
    del held


def test_holders_of_memory_are_counted() -> None:
    x = torch.ones(4)
    alone = private.storage_holders(x)
    view, shared = x[1:], x.numpy()
    assert private.storage_holders(x) == private.storage_holders(view) > alone + 1
    del view, shared
    assert private.storage_holders(x) == alone


def test_a_tensor_is_detached_with_its_version_below_autograd() -> None:
    class Takes(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if private.schema_of(func).name == "aten::exp":
                taken.append(private.detached_with_version(result))
            return result

    taken: list[Tensor] = []
    with Takes():
        y = torch.ones(2, requires_grad=True).exp()
    before = private.version_of(taken[0])
    y.add_(1)
    assert not taken[0].requires_grad and private.version_of(taken[0]) == before + 1


def test_tensors_inside_of_subclasses() -> None:
    plain = torch.ones(2)
    made = TwoTensor(plain, TwoTensor(plain + 1, plain + 2))
    assert [int(tensor[0]) for tensor in private.inner_tensors(made)] == [1, 2, 3]
    assert list(private.inner_tensors(plain)) == [plain]


class Logged(Tensor):
    calls: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        with private.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_functions_that_read_metadata_are_those_that_subclasses_see() -> None:
    tensor = torch.zeros(2).as_subclass(Logged)
    for name in ("_version", "_backward_hooks", "_post_accumulate_grad_hooks"):
        Logged.calls.clear()
        getattr(tensor, name)
        assert len(Logged.calls) == 1 and Logged.calls[0] in private.METADATA_GETTERS, name
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        Logged.calls.clear()
        setattr(tensor, name, None)
        assert len(Logged.calls) == 1 and Logged.calls[0] in private.METADATA_SETTERS, name
    Logged.calls.clear()
    private.has_compatible_shallow_copy_type(tensor, torch.zeros(2))
    assert Logged.calls == [private.has_compatible_shallow_copy_type]


def test_without_torch_function_the_subclass_is_not_asked() -> None:
    tensor = torch.zeros(2).as_subclass(Logged)
    Logged.calls.clear()
    with private.DisableTorchFunctionSubclass():
        tensor + 1
    assert Logged.calls == []
    tensor + 1
    assert len(Logged.calls) == 1


def test_operations_on_lists() -> None:
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    private.foreach_add_(tensors, 1)
    private.foreach_mul_(tensors, 3)
    assert [t.tolist() for t in tensors] == [[6, 6], [9, 9, 9]]
    assert [t.tolist() for t in private.foreach_mul(tensors, [1.0, 2.0])] == [[6, 6], [18, 18, 18]]
    assert [t.tolist() for t in private.foreach_sub(tensors, tensors)] == [[0, 0], [0, 0, 0]]
    assert [t.tolist() for t in private.foreach_sqrt(tensors[1:])] == [[3, 3, 3]]
    norms = private.foreach_norm(tensors, 1.0, dtype=torch.float64)
    assert [(t.dtype, t.item()) for t in norms] == [(torch.float64, 12), (torch.float64, 27)]
    others = [torch.ones(2), torch.ones(3)]
    private.foreach_copy_(others, tensors)
    private.foreach_sub_(tensors, others)
    private.foreach_add_(tensors, [2.0, 4.0])
    private.foreach_div_(tensors, others)
    assert torch.equal(tensors[0], torch.tensor([2.0, 2.0]) / 6) and torch.equal(
        tensors[1], torch.tensor([4.0] * 3) / 9
    )
    private.foreach_zero_(tensors)
    assert not any(t.any() for t in tensors)


def test_fused_steps_of_adam() -> None:
    assert {"cpu", "cuda"} <= set(private.fused_devices())
    for update, decayed in ((private.fused_adam_, 1.0), (private.fused_adamw_, 0.99)):
        p, g, m, v = ([torch.full((2,), value)] for value in (1.0, 0.5, 0.0, 0.0))
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        update(p, g, m, v, [], [torch.tensor(1.0)], **options, amsgrad=False, maximize=False)
        torch.testing.assert_close(p[0], torch.full((2,), decayed - 0.1))


# ---- operators ----


def test_ops_and_their_names() -> None:
    op = torch.ops.aten.add.Tensor
    assert private.schema_of(op).name == "aten::add" and private.schema_of(print) is None
    assert private.packet_of(op) is torch.ops.aten.add and private.packet_of(print) is None
    assert private.qualified_name(torch.ops.aten.add) == "aten::add" and private.qualified_name(print) == ""
    assert private.op_name(op) == "add"
    assert private.has_kernel("aten::add.Tensor", "CPU") and not private.has_kernel("aten::add.Tensor", "FPGA")


def test_own_ops_have_kernels_once_they_are_compiled() -> None:
    ops.ensure("cpu")
    assert private.has_kernel("zero_strategy::adam_", "CPU")


def test_a_dispatch_mode_sees_ops() -> None:
    class Seen(private.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(private.schema_of(func).name)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.ones(2) + 1
    assert "aten::add" in seen.names


def test_code_of_the_compiler_is_known_by_its_callers() -> None:
    found: list[bool] = []

    class Asks(private.TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if private.schema_of(func).name == "aten::convolution":
                found.append(private.is_called_by_compiled_code())
            return func(*args, **(kwargs or {}))

    convolve = nn.Conv1d(2, 2, 1)
    compiled = torch.compile(lambda x: convolve(x).tanh())
    with torch.no_grad(), Asks():
        compiled(torch.ones(1, 2, 3))
        convolve(torch.ones(1, 2, 3))
    assert found == [True, False]


# ---- modules ----


class _Wrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called.append(func)
        return args[0]


called: list[Any] = []


def test_a_wrapper_has_metadata_only() -> None:
    called.clear()
    made = private.wrapper_tensor(_Wrapper, torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"))
    assert type(made) is _Wrapper and made.shape == (2, 3) and made.dtype == torch.bfloat16 and made.numel() == 6
    assert made.zero_() is made and called == [torch.ops.aten.zero_.default] and not made.requires_grad


def test_a_wrapper_is_laid_out_as_another() -> None:
    values = torch.zeros(6, dtype=torch.bfloat16)[1:5].view(2, 2).T
    made = private.wrapper_like(_Wrapper, values)
    assert type(made) is _Wrapper and made.stride() == (1, 2) and made.storage_offset() == 1
    assert made.dtype == torch.bfloat16 and made.shape == (2, 2)


class _Direct(_Wrapper):
    __torch_function__ = private.no_torch_function


def test_a_class_without_functions_dispatches_at_once() -> None:
    """Also the functions that torch offers to `__torch_function__` first."""
    made = private.wrapper_like(_Direct, torch.zeros(2))
    called.clear()
    assert torch.nn.functional.relu(made) is made and called == [torch.ops.aten.relu.default]


def test_tables_of_step_hooks() -> None:
    """Torch asks the tables for their values at each step, those that were put there too."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    before, after = private.step_hooks_of(optimizer)
    assert len(before) == len(after) == 1
    private.replace_step_hooks(optimizer, dict(after), dict(before))
    optimizer.step()
    assert called == ["after", "before"]


def test_tables_of_modules() -> None:
    module = Unit()
    assert list(private.parameters_of(module)) == ["weight", "none"]
    assert list(private.buffers_of(module)) == ["kept", "left"]
    assert list(private.children_of(module)) == ["child", "same"]
    assert private.non_persistent_buffers(module) == {"left"}
    private.buffers_of(module)["kept"] = torch.ones(2)
    private.parameters_of(module)["weight"] = nn.Parameter(torch.zeros(3))
    assert module.kept.tolist() == [1, 1] and not module.weight.any()


def test_modules_that_save_their_own_way() -> None:
    class Own(nn.Module):
        def _save_to_state_dict(self, *args: Any) -> None:
            pass

    assert private.saves_tensors_itself(Own) and not private.saves_tensors_itself(Unit)


def test_tensors_are_mapped_and_the_mapping_replaced() -> None:
    module = private.map_tensors(Unit(), lambda tensor: tensor.double())
    assert module.weight.dtype == module.kept.dtype == module.child.weight.dtype == torch.float64
    calls = []

    def make(original: Any) -> Any:
        def replaced(function: Any, recurse: bool = True) -> nn.Module:
            calls.append(recurse)
            return original(module, function, recurse)

        return replaced

    private.replace_map_tensors(module, make)
    module.float()
    assert calls == [True] and module.weight.dtype == torch.float32


def test_what_is_compiled_and_what_is_not() -> None:
    module = Unit()
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)

    calls = []

    def note() -> None:
        calls.append(torch.compiler.is_compiling())

    left_out = private.uncompiled(note)

    @torch.compile(backend="eager")
    def function(x: Tensor) -> Tensor:
        left_out()
        return x + 1

    assert function(torch.zeros(1)).item() == 1 and calls == [False]


def test_trees() -> None:
    tree = {"a": [1, (2, None)], "b": torch.ones(1)}
    leaves, spec = private.tree_flatten(tree)
    assert isinstance(spec, private.TreeSpec) and leaves[:3] == [1, 2, None] == private.tree_leaves(tree)[:3]
    assert private.tree_unflatten([5, 6, 7, 8], spec) == {"a": [5, (6, 7)], "b": 8}
    assert private.tree_map_only(int, lambda value: -value, tree)["a"] == [-1, (-2, None)]
    assert private.tree_map(str, {"a": 1}) == {"a": "1"}
    assert len(private.tree_flatten_with_path(tree)[0]) == 4


# ---- processes and devices ----


def of_processes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    store = private.default_store()
    store.set(f"key {dist.get_rank()}", "value")
    found["store"] = store.get(f"key {1 - dist.get_rank()}")
    group = dist.new_group(timeout=timedelta(seconds=77))
    found["backend"] = isinstance(private.backend_of(group, "cpu"), dist.ProcessGroupGloo)
    found["seconds"] = private.timeout_of(private.backend_of(group, "cpu"))
    try:
        private.backend_of(group, "xpu")
        found["none"] = "no error"
    except RuntimeError:
        found["none"] = "error"
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    mesh["a", "b"]._flatten("ab")
    found["meshes"] = list(private.flattened_meshes(mesh))
    shared = private.FileStore(str(folder / "store"), 2)
    inner = private.PrefixStore("p", shared)
    inner.set(str(dist.get_rank()), "here")
    found["file"] = inner.get(str(1 - dist.get_rank()))
    return found


def test_stores_groups_and_meshes(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(of_processes, tmp_path):
        assert found == {
            "store": b"value",
            "backend": True,
            "seconds": 77,
            "none": "error",
            "meshes": ["ab"],
            "file": b"here",
        }


def test_a_store_of_one_process() -> None:
    store = private.HashStore()
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_the_connection_of_a_store_is_known() -> None:
    server = private.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inside = private.PrefixStore("a", private.PrefixStore("b", server))
    found = private.tcp_store_of(inside)
    assert found is not None and found.port == server.port
    assert private.tcp_store_of(private.HashStore()) is None
    number = private.socket_of(found)
    assert number is not None
    with socket.socket(fileno=os.dup(number)) as connection:
        assert connection.getpeername()[1] == server.port


def test_symmetric_memory_is_there() -> None:
    module = private.symmetric_memory()
    assert callable(module.empty) and callable(module.rendezvous)


def test_calls_wait_for_cuda() -> None:
    if torch.cuda.is_available():
        calls = []
        torch.cuda.init()
        private.call_when_cuda_starts(lambda: calls.append(1))
        assert calls == [1]
    else:
        before = len(torch.cuda._queued_calls)
        private.call_when_cuda_starts(lambda: None)
        assert len(torch.cuda._queued_calls) == before + 1
        torch.cuda._queued_calls.pop()


class _Marked(nn.Parameter):
    """A subclass without anything of its own."""


def test_a_tensor_of_a_class_and_what_to_asks_for() -> None:
    values = torch.arange(3)
    made = private.of_class(_Marked, values)
    assert type(made) is _Marked and not made.requires_grad and made.data_ptr() == values.data_ptr()
    assert private.target_of_to("meta", torch.float16) == (torch.device("meta"), torch.float16, False)
    assert private.target_of_to(torch.ones(1), non_blocking=True) == (torch.device("cpu"), torch.float32, True)
    assert private.is_traceable_wrapper_subclass(TwoTensor(torch.ones(1), torch.ones(1)))
