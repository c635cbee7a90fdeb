"""The sampler reads the checkpoints that training writes, under any prefix, tied or not, sharded or not."""

import ast
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import sample_gpt
from gpt_model import GPT, GPTConfig
from tests.warm import run_warm_script

TINY = GPTConfig(block_size=16, n_layer=1, n_head=2, d_model=8)


def trained_weights() -> dict[str, Tensor]:
    """A model's parameters as a strategy stores them: prefixed, the tied alias left out."""
    torch.manual_seed(0)
    return {f"model.{name}": p.detach().clone() for name, p in GPT(TINY).named_parameters()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A run directory with its architecture, and an empty checkpoint directory in it."""
    (tmp_path / "model_config.json").write_text(json.dumps(asdict(TINY)))
    folder = tmp_path / "checkpoints" / "last.ckpt"
    folder.mkdir(parents=True)
    return folder


def assert_loads(checkpoint: Path) -> None:
    model = sample_gpt.load_model(checkpoint)
    for name, value in model.named_parameters():
        assert torch.equal(value, trained_weights()[f"model.{name}"]), name
    assert model.head.weight is model.embedding.weight


def test_one_file(checkpoint: Path) -> None:
    save_file(trained_weights(), checkpoint / "model.safetensors")
    assert_loads(checkpoint)


def test_several_files_with_an_index(checkpoint: Path) -> None:
    weights = trained_weights()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, checkpoint / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_loads(checkpoint)


def test_checkpoint_file_of_plain_ddp(checkpoint: Path) -> None:
    weights = trained_weights()
    weights["model.head.weight"] = weights["model.embedding.weight"]
    file = checkpoint.with_name("best.ckpt")
    torch.save({"state_dict": weights}, file)
    assert_loads(file)


def test_bfloat16_weights_sample_in_float32(checkpoint: Path) -> None:
    save_file({k: v.bfloat16() for k, v in trained_weights().items()}, checkpoint / "model.safetensors")
    assert sample_gpt.load_model(checkpoint).norm.weight.dtype == torch.float32


def test_checkpoint_of_another_model_is_named(checkpoint: Path) -> None:
    save_file({"other.weight": torch.zeros(1)}, checkpoint / "model.safetensors")
    with pytest.raises(KeyError, match=r"embedding\.weight"):
        sample_gpt.load_model(checkpoint)


def test_sampling_is_reproducible_beyond_the_block_size() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    first = sample_gpt.generate(model, b"import", 40, temperature=0.7, seed=3)
    assert len(first) == 40
    assert first == sample_gpt.generate(model, b"import", 40, temperature=0.7, seed=3)
    assert first != sample_gpt.generate(model, b"import", 40, temperature=0.7, seed=4)


def test_sample_gpt_command_line(checkpoint: Path) -> None:
    save_file(trained_weights(), checkpoint / "model.safetensors")
    done = run_warm_script(sample_gpt.__file__, str(checkpoint), "--prompt", "def f(", "--bytes", "10", cwd=checkpoint)
    assert done.stdout.startswith("def f(") and done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["sample_gpt.py", "gpt_model.py"])
def test_needs_only_torch_and_safetensors(script: str) -> None:
    tree = ast.parse(Path(sample_gpt.__file__).with_name(script).read_text())
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign <= {"torch", "safetensors", "gpt_model"}
