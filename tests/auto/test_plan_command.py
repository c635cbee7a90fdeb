"""`zero-strategy plan --auto`, and activations that a plan foresees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTSize, loss_fn
from zero_strategy.auto.foreseen import MicroBatch, foresee
from zero_strategy.cli import main
from zero_strategy.config import load_config

HERE = "tests.auto.test_plan_command"
SIZE, LENGTH = GPTSize(width=64, depth=3, heads=2, vocabulary=512), 32


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_fn(model(batch), batch)


def factory() -> Any:
    batch = torch.zeros(4, LENGTH, dtype=torch.long)
    return GPT(SIZE, LENGTH), lambda model: torch.optim.AdamW(model.parameters()), [batch], loss


def looks() -> Any:
    """A model that looks at values."""

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum().item())

    return Looks(4, 4), lambda model: torch.optim.SGD(model.parameters()), [torch.ones(2, 4)], lambda m, x: m(x).sum()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["plan", *arguments])
    return status, capsys.readouterr().out


def activations_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    _, out = run(capsys, f"{HERE}:factory", "--device", "cpu", "--json", *arguments)
    rows = [row for row in json.loads(out)["ledger"]["entries"] if row["category"] == "activations"]
    return int(sum(row["taken"] for row in rows))


@pytest.mark.parametrize(
    ("options", "mode", "rows", "dtype"),
    [
        ((), "none", 4, None),
        (("--recompute",), "full", 4, None),
        (("--micro-batch", "2", "--dtype", "bf16"), "none", 2, torch.bfloat16),
    ],
)
def test_a_plan_foresees_activations(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], mode: str, rows: int, dtype: torch.dtype | None
) -> None:
    units = [f"blocks.{number}" for number in range(SIZE.depth)]
    batch = torch.zeros(rows, LENGTH, dtype=torch.long)
    expected = foresee(MicroBatch(GPT(SIZE, LENGTH), batch, loss, units, dtype), mode=mode).peak
    assert activations_of(capsys, *options) == expected
    assert activations_of(capsys, *options, "--activations", "5MB") == 5_000_000


def test_a_plan_says_how_activations_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, f"{HERE}:factory", "--device", "cpu")
    assert "note: activations: foreseen without memory, of a micro-batch of 4 row(s)" in out
    _, out = run(capsys, f"{HERE}:looks", "--device", "cpu")
    assert "note: activations are not known: Looks cannot be run on tensors without memory" in out


def test_models_of_transformers_are_foreseen_by_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64, **shape}))
    options = (str(tmp_path), "--device", "cpu", "--micro-batch", "3", "--sequence", "16")
    _, out = run(capsys, *options)
    assert "note: activations: foreseen without memory, of a micro-batch of 3 row(s)" in out
    status, out = run(capsys, *options, "--auto", "--world", "2")
    assert status == 0 and "3 x 1" in out and "activations: foreseen without memory" in out


def test_the_command_chooses_and_prints_a_file_to_pin(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    options = ("--device", "cpu", "--world", "2", "--host-mem", "1GB", "--global-batch", "16", "--auto")
    status, out = run(capsys, f"{HERE}:factory", *options)
    assert status == 0 and "chosen" in out and "measured on this machine, by one rank" in out
    pinned = load_config(yaml.safe_load(out.partition("# to pin it:\n")[2]))
    assert not pinned.auto.enabled and pinned.stage in (1, 2)
    status, out = run(capsys, f"{HERE}:factory", *options, "--json", "--stage", "3", "--recompute")
    found = json.loads(out)
    assert {each["said"].partition(",")[0] for each in found["candidates"]} == {"stage 3"}
    assert all("recomputes full" in each["said"] for each in found["candidates"])
    assert found["rows"] * found["accumulation"] == 8 and found["speeds"]["flops"] > 0


def test_a_config_with_auto_asks_for_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    file.write_text("stage: auto\nauto:\n  global_batch: 8\n")
    status, out = run(capsys, f"{HERE}:factory", "--device", "cpu", "--config", str(file))
    assert status == 0 and "rows x micro-batches" in out and "8 x 1" in out


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, f"{HERE}:factory", "--device", "cpu", "--host-mem", "1MB", "--auto")
    assert status == 1 and out.startswith("nothing fits ") and "Ways out: " in out
    status, out = run(capsys, f"{HERE}:factory", "--device", "cpu", "--host-mem", "1MB", "--auto", "--json")
    assert status == 1 and json.loads(out)["fits"] is False


def test_plain_numbers_on_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--params", "7e9", "--layers", "32", "--hidden", "4096", "--world", "8", "--dtype", "bf16")
    memory = ("--gpu-mem", "80GB", "--host-mem", "1TB", "--auto", "--global-batch", "64")
    status, out = run(capsys, *options, *memory)
    assert status == 0 and "assumed, of an H100" in out and "device memory, per rank: " in out
    status, out = run(capsys, *options, *memory, "--link", "100")
    assert status == 0 and "links as given" in out
