"""Bytes that autograd keeps, seen from outside: by its hooks, and by what is alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.engine.nets import loss_of
from zero_strategy.fsdp.unshard import tensors_in


class Recomputing(nn.Module):
    """A block that is run again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


class Alive(TorchDispatchMode):
    """The memory of all tensors that ops have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if StorageWeakRef(storage) not in given:  # else a view, also of what was there before
                self._found[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def look(self, *_: Any) -> None:
        """Note what is alive now."""
        self._found = {storage: nbytes for storage, nbytes in self._found.items() if not storage.expired()}
        self.most = max(self.most, sum(self._found.values()))


def peak_of(model: nn.Module, x: Tensor) -> int:
    """Bytes that a step has made at the most, looked at before every node of backward."""
    with Alive() as alive:
        loss = loss_of(model(x))
        nodes = nodes_of(loss.grad_fn)
        for node in nodes:
            node.register_prehook(alive.look)
        del nodes, node
        loss.backward()
    return alive.most


def nodes_of(root: Any) -> list[Any]:
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def kept_by(run: Callable[[], Any], model: nn.Module) -> int:
    """Bytes of memory that autograd keeps for a result, by saved-tensor hooks; the model's parameters do not count."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    total = sum(found.values())
    del result
    return total
