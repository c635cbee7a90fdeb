"""Continue a text with a trained byte-level GPT. Needs only torch and safetensors.

``python examples/sample_gpt.py CHECKPOINT --prompt "import os" --bytes 300``

CHECKPOINT is a directory that holds ``model.safetensors`` (or its index), or a ``.ckpt`` file of plain DDP.
The architecture is read from ``model_config.json`` there or in a folder above.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from gpt_model import GPT, GPTConfig


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint under the names in the file."""
    if checkpoint.is_file():
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        return dict(saved["state_dict"])
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    return {key: tensor for name in names for key, tensor in load_file(checkpoint / name).items()}


def read_config(checkpoint: Path) -> GPTConfig:
    """The architecture, from ``model_config.json`` in the checkpoint or in the nearest folder above."""
    folder = checkpoint.resolve()
    for place in (folder, *folder.parents):
        if (path := place / "model_config.json").is_file():
            return GPTConfig(**json.loads(path.read_text()))
    raise FileNotFoundError(f"no model_config.json in {folder} or above it")


def load_model(checkpoint: Path) -> GPT:
    """The trained model in float32, ready to sample."""
    weights = read_weights(checkpoint)
    first = "embedding.weight"
    prefix = next((key.removesuffix(first) for key in weights if key.endswith(first)), None)
    if prefix is None:
        raise KeyError(f"{checkpoint} holds no '{first}': not a checkpoint of this model")
    state = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    # A tied weight is stored once, under its first name.
    state.setdefault("head.weight", state[first])
    model = GPT(read_config(checkpoint))
    model.load_state_dict(state)
    return model.eval()


@torch.inference_mode()
def generate(model: GPT, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """``count`` bytes that follow the prompt, sampled one by one (temperature 0: the likeliest)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens[-model.config.block_size :]]))[0, -1]
        if temperature > 0:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            chosen = logits.argmax()
        tokens.append(int(chosen))
    return bytes(tokens[len(prompt) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--bytes", type=int, default=300, help="how many to generate")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompt = args.prompt.encode()
    if not prompt:
        parser.error("--prompt must not be empty: the model continues a text")
    text = prompt + generate(load_model(args.checkpoint), prompt, args.bytes, args.temperature, args.seed)
    print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
