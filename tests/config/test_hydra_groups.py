"""Settings as a Hydra group."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig

from zero_strategy.config import load_config, register_hydra


def composed(folder: Path, *overrides: str) -> DictConfig:
    (folder / "train.yaml").write_text("defaults:\n  - zero: zero3\n  - _self_\nzero:\n  prefetch: 3\n")
    register_hydra()
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("train", list(overrides))


def test_a_group_and_its_overrides(tmp_path: Path) -> None:
    config = load_config(composed(tmp_path).zero)
    assert (config.stage, config.prefetch, config.units.min_numel) == (3, 3, 8192)
    config = load_config(composed(tmp_path, "zero=zero1", "zero.prefetch=2", "zero.checkpoint.keep_last=4").zero)
    assert (config.stage, config.prefetch, config.checkpoint.keep_last) == (1, 2, 4)


def test_the_groups_that_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(composed(tmp_path, "zero=zero3_offload").zero).offload.parameters == "cpu"
    monkeypatch.setenv("ZERO_STRATEGY_NVME_PATH", "/drive")
    offload = load_config(composed(tmp_path, "zero=zero3_nvme").zero).offload
    assert (offload.optimizer, offload.parameters, offload.nvme_path) == ("nvme", "nvme", ["/drive"])
    monkeypatch.delenv("ZERO_STRATEGY_NVME_PATH")
    given = composed(tmp_path, "zero=zero3_nvme", "zero.offload.nvme_path=[/a,/b]")
    assert load_config(given.zero).offload.nvme_path == ["/a", "/b"]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("zero.prefetch=many", ["many", "zero.prefetch"]),
        ("zero.prefetsh=1", ["prefetsh"]),
        ("zero.checkpoint.verify=3x", ["zero.checkpoint.verify"]),
    ],
)
def test_mistakes_name_the_key(tmp_path: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(HydraException) as caught:
        composed(tmp_path, override)
    text = f"{caught.value} {caught.value.__cause__}"
    assert all(part in text for part in parts), text
