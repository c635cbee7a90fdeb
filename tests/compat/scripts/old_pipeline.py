"""A pipeline script as people wrote them for DeepSpeed 0.3: a GPT of layer specs, and whole batches at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

VOCABULARY, LENGTH, WIDTH, SAMPLES, MICRO, BATCH = 19, 5, 8, 14, 2, 4
"""`BATCH` micro-batches of `MICRO` samples make a step, over all copies of the pipeline."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


def logits(embedding: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)  # type: ignore[arg-type]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def net(pipe: Any, stages: int, **options: Any) -> Any:
    """The model, with weights that do not depend on the number of stages."""
    torch.manual_seed(3)
    layers = [
        pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH),
        *(pipe.LayerSpec(Block, WIDTH) for _ in range(4)),
        pipe.LayerSpec(nn.LayerNorm, WIDTH),
        pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ]
    return pipe.PipelineModule(layers=layers, num_stages=stages, loss_fn=loss_fn, **options)


def data() -> TensorDataset:
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def micro_batches(start: int = 0, end: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """All micro-batches from one on, as all copies together see them; each fourth is shorter."""
    for number in itertools.count(start) if end is None else range(start, end):
        rows = 1 if number % BATCH == BATCH - 1 else MICRO
        generator = torch.Generator().manual_seed(100 + number)
        tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def own(engine: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Part of them that one copy of the pipeline sees."""
    return itertools.islice(iter(batches), engine.grid.data_parallel_id, None, engine.grid.data_parallel_size)


def start(deepspeed: Any, stages: int, config: dict[str, Any], **more: Any) -> Any:
    deepspeed.init_distributed()
    model = net(deepspeed.pipe, stages)
    ranks = torch.distributed.get_world_size() // stages
    sizes = {"train_batch_size": BATCH * MICRO, "gradient_accumulation_steps": BATCH // ranks}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={**sizes, **config},
        **more,
    )
    return engine


def main(deepspeed: Any, stages: int, config: dict[str, Any], steps: int = 3, first: int = 0) -> dict[str, Any]:
    """Train for some steps with batches of the script's own."""
    engine = start(deepspeed, stages, config)
    batches = own(engine, micro_batches(first * BATCH))
    losses = [engine.train_batch(data_iter=batches).item() for _ in range(steps)]
    return {"losses": losses, "engine": engine}


def plain(
    steps: Iterable[list[Any]], make: Callable[..., torch.optim.Optimizer], clip: float, model: nn.Module
) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process without any of it: losses and weights."""
    optimizer, losses = make(model.parameters()), []
    for batches in steps:
        total = 0.0
        for inputs, labels in batches:
            loss = loss_fn(model(inputs), labels) / len(batches)
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
