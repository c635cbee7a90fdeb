"""Pre-training steps of a small BERT with and without the options that save memory: bytes kept, and time.

``python examples/bert_layer.py --layers 4 --hidden 256 --length 128 --steps 5``

The same masked-token task is trained four times from the same weights and the same dropout masks: with plain torch's
loss over logits, with ``linear_cross_entropy``, and with the layer's options on top, one after the other. Losses agree;
what a forward keeps for its backward does not.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer
from zero_strategy.optim import FusedAdamW
from zero_strategy.sequence.tiling import linear_cross_entropy

IGNORED = -100
RUNS: dict[str, dict[str, Any]] = {
    "logits": {},
    "loss in chunks": {},
    "+ gelu_checkpoint": {"gelu_checkpoint": True},
    "+ attn_dropout_checkpoint": {"gelu_checkpoint": True, "attn_dropout_checkpoint": True},
    "+ normalize_invertible": {"gelu_checkpoint": True, "attn_dropout_checkpoint": True, "normalize_invertible": True},
}


class Bert(nn.Module):
    """Embeddings, layers with norms behind, and the loss of the masked tokens over the embedding's weight."""

    def __init__(self, config: TransformerConfig, vocabulary: int, length: int, chunked: bool) -> None:
        super().__init__()
        self.chunked = chunked
        self.tokens = nn.Embedding(vocabulary, config.hidden_size)
        self.places = nn.Parameter(torch.zeros(length, config.hidden_size))
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, seen: Tensor, target: Tensor) -> Tensor:
        """The loss of tokens (batch, length); `seen` is where they are no padding, `target` what is to be found."""
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, seen)
        if self.chunked:
            return linear_cross_entropy(x, self.tokens.weight, target, self.bias, ignore_index=IGNORED)
        logits = F.linear(x, self.tokens.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def batch(step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Texts that count upwards from somewhere, a seventh of them masked (token 0), half of the last one padding."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(1, options.vocabulary, (options.batch, 1), generator=generator)
    text = (start + torch.arange(options.length)) % (options.vocabulary - 1) + 1
    masked = torch.rand(text.shape, generator=generator) < 1 / 7
    masked[:, 0] = True  # so that there is something to learn from in every row
    seen = torch.ones_like(masked)
    seen[-1, options.length // 2 :] = False
    places = (text.masked_fill(masked, 0), seen, text.masked_fill(~(masked & seen), IGNORED))
    tokens, seen, target = (part.to(options.device) for part in places)
    return tokens, seen, target


def kept_bytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Tensors that a forward keeps for its backward, beside the parameters; every storage counts once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@dataclass(frozen=True)
class Found:
    """Of one run: the losses, bytes kept by a forward, seconds of a step."""

    losses: list[float]
    kept: int
    seconds: float


def train(name: str, options: argparse.Namespace) -> Found:
    """Some steps with the options of a run."""
    torch.manual_seed(options.seed)
    given = {
        "hidden_size": options.hidden, "heads": options.heads, "num_hidden_layers": options.layers,
        "attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1, "pre_layer_norm": False, "seed": options.seed,
        "bf16": options.bf16, "max_seq_length": options.length,
    }  # fmt: skip
    config = TransformerConfig(**given, **RUNS[name])
    model = Bert(config, options.vocabulary, options.length, chunked=name != "logits").to(options.device)
    kept = kept_bytes(model, batch(0, options))
    optimizer = FusedAdamW(model.parameters(), lr=options.lr)
    losses, seconds = [], []
    for step in range(options.steps):
        torch.manual_seed(step)  # the dropout masks
        begin = time.perf_counter()
        loss = model(*batch(step, options))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return Found(losses, kept, statistics.median(seconds))


def main(arguments: Sequence[str] | None = None) -> dict[str, Found]:
    parser = argparse.ArgumentParser(description="Pre-training steps of a small BERT: bytes kept, and time.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=8, help="texts of a step")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="layers compute in bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    found = {name: train(name, options) for name in RUNS}
    first = found["logits"]
    print(f"{'run':<28}{'kept':>10}{'share':>8}{'step':>11}{'first and last loss':>24}")
    for name, run in found.items():
        print(
            f"{name:<28}{run.kept / 1e6:>7.1f} MB{run.kept / first.kept:>8.2f}{run.seconds * 1e3:>9.1f}ms"
            f"{run.losses[0]:>15.5f} {run.losses[-1]:.5f}"
        )
    return found


if __name__ == "__main__":
    main()
