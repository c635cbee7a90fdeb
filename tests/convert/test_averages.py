"""The mean of the weights of several checkpoints, of any format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zero_strategy.cli import main
from zero_strategy.convert.averages import average
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor, write_portable

Weights = dict[str, Tensor]


def weights(seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(5, 3, generator=generator).to(dtype),
        "scalar": torch.randn((), generator=generator).to(dtype),
        "empty": torch.zeros(0, 2, dtype=dtype),
        "batches": torch.tensor(seed),
    }


def plain(folder: Path, values: Weights) -> str:
    """As Hugging Face has them."""
    folder.mkdir()
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return str(folder)


def with_masters(folder: Path, values: Weights, masters: Weights) -> str:
    """A checkpoint of ours, of a run in low precision."""
    optimizer = PortableOptimizer(
        kinds={"master": {name: StoredTensor.of(name, value) for name, value in masters.items()}},
        param_groups=[{"lr": 0.1, "params": list(masters)}],
    )
    stored = {name: StoredTensor.of(name, value) for name, value in values.items()}
    write_portable(PortableState(weights=stored, optimizers=[optimizer]), folder)
    return str(folder)


def expected(sets: list[Weights], shares: list[float]) -> Weights:
    found = {}
    for name, first in sets[0].items():
        if first.is_floating_point():
            terms = [values[name].double() * share for values, share in zip(sets, shares, strict=True)]
            found[name] = (sum(terms[1:], terms[0]) / sum(shares)).to(first.dtype)
        else:
            found[name] = sets[-1][name]
    return found


def alike(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("shares", [None, [1.0, 2.0, 5.0]])
def test_it_is_the_mean_of_all(tmp_path: Path, shares: list[float] | None) -> None:
    sets = [weights(seed) for seed in range(3)]
    sources = [plain(tmp_path / str(seed), values) for seed, values in enumerate(sets)]
    average(sources, tmp_path / "out", shares=shares)
    alike(load_file(tmp_path / "out" / "model.safetensors"), expected(sets, shares or [1.0] * 3))


def test_formats_may_differ_and_the_config_goes_along(tmp_path: Path) -> None:
    sets = [weights(0), weights(1)]
    torch.save(sets[1], tmp_path / "b.pt")
    average([plain(tmp_path / "a", sets[0]), str(tmp_path / "b.pt")], tmp_path / "out", to_format="hf")
    alike(load_file(tmp_path / "out" / "model.safetensors"), expected(sets, [1.0, 1.0]))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_master_weights_are_what_is_averaged(tmp_path: Path, dtype: torch.dtype | None) -> None:
    low = [weights(seed, torch.bfloat16) for seed in range(2)]
    masters = [{"matrix": weights(seed)["matrix"] + 1e-4} for seed in range(2)]
    sources = [with_masters(tmp_path / str(n), low[n], masters[n]) for n in range(2)]
    average(sources, tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    mean = (masters[0]["matrix"].double() + masters[1]["matrix"].double()) / 2
    assert torch.equal(found["matrix"], mean.to(dtype or torch.bfloat16))
    assert found["scalar"].dtype == (dtype or torch.bfloat16)


def test_what_does_not_fit_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    good = plain(tmp_path / "good", weights(0))
    fewer = {name: value for name, value in weights(1).items() if name != "scalar"}
    wrong = {
        "weight 'scalar' is in .*good and not in .*fewer": [good, plain(tmp_path / "fewer", fewer)],
        r"weight 'matrix' is torch.float32 of shape \[5, 3\] in .*good, torch.float32 of shape \[3, 5\] in .*turned": [
            good, plain(tmp_path / "turned", weights(1) | {"matrix": torch.zeros(3, 5)})
        ],
        "good: holds no averages of the weights": [good],
    }  # fmt: skip
    for message, sources in wrong.items():
        with pytest.raises(ValueError, match=message):
            average(sources, tmp_path / "out")
    for shares in ([1.0], [1.0, 0.0], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="must be 2 positive numbers"):
            average([good, good], tmp_path / "out", shares=shares)
    with pytest.raises(ValueError, match="will not be overwritten"):
        average([good, good], good)
    assert not (tmp_path / "out").exists()


def test_average_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [plain(tmp_path / str(seed), weights(seed)) for seed in range(2)]
    command = [
        "checkpoint",
        "average",
        *sources,
        "--shares",
        "1",
        "3",
        "--to",
        str(tmp_path / "out"),
        "--json",
        "--quiet",
    ]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == 4
    alike(load_file(tmp_path / "out" / "model.safetensors"), expected([weights(0), weights(1)], [1.0, 3.0]))
    assert main(command) == 2
