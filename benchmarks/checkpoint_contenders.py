"""Contenders of the checkpoint benchmark: our engine, DeepSpeed and torch.distributed.checkpoint, with the same model.

- ``ours``: ZeroEngine at stage 3; `save` returns when all is flushed and renamed.
- ``deepspeed``: ZeRO stage 3 with its defaults and the same torch optimizer; its files are not flushed.
- ``dcp``: FSDP2 with `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`, all with their defaults: each rank
  flushes its file (``sync_files``), nobody flushes the directory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gpt import GPT, SIZES, build, loss_fn


class Contender(ABC):
    """A model that has taken one step, so that there is optimizer state to save."""

    def __init__(self, size: str, length: int) -> None:
        self.length, self.vocabulary = length, SIZES[size].vocabulary
        self.model: GPT = build(size, length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.taken = 0
        self.prepare()
        self.step()

    @abstractmethod
    def prepare(self) -> None:
        """Shard the model."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """All ranks together."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """All ranks together."""

    def step(self) -> None:
        """One training step on one row."""
        self.backward(self.loss(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, forward: nn.Module) -> Tensor:
        self.taken += 1
        generator = torch.Generator().manual_seed(1000 * self.taken + dist.get_rank())
        row = torch.randint(self.vocabulary, (1, self.length + 1), generator=generator)
        return loss_fn(forward(row[:, :-1]), row[:, 1:])

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Ours(Contender):
    def prepare(self) -> None:
        from zero_strategy.config import load_config
        from zero_strategy.engine import ZeroEngine

        self.engine = ZeroEngine(self.model, load_config(stage=3))
        self.engine.attach(self.optimizer)

    def save(self, directory: Path) -> None:
        self.engine.save(directory)

    def start_saving(self, directory: Path) -> Any:
        """Returns the handle of a save in the background."""
        return self.engine.save(directory, asynchronous=True)

    def load(self, directory: Path) -> None:
        self.engine.load(directory)

    def own_tensors(self) -> Iterator[Tensor]:
        """All that this rank saves."""
        for bucket in self.engine.model.buckets:
            yield bucket.shard.values
        for sharded in self.engine.optimizers:
            for parameter in sharded.parameters():
                values = sharded.state_of(parameter).values()
                yield from (value for value in values if isinstance(value, Tensor) and value.dim())


class DeepSpeed(Contender):
    def prepare(self) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )

    def step(self) -> None:
        self.engine.backward(self.loss(self.engine))
        self.engine.step()

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), tag="t")

    def load(self, directory: Path) -> None:
        self.engine.load_checkpoint(str(directory), tag="t")


class Dcp(Contender):
    def prepare(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def save(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


CONTENDERS: dict[str, type[Contender]] = {"ours": Ours, "deepspeed": DeepSpeed, "dcp": Dcp}
