"""An `nvme_path` of a JSON that is no directory and cannot become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher


def starting(path: str) -> str:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": path}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    with pytest.raises(ValueError) as error:
        deepspeed.initialize(model=nn.Linear(4, 4), config=config)
    return str(error.value)


def test_a_file_is_named_on_all_ranks(ranks: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "drive"
    file.write_text("no directory")
    for error in ranks(2)(starting, str(file)):
        assert error.startswith(f"offload.nvme_path {str(file)!r} is a file")
    for error in ranks(2)(starting, str(file / "state" / "of_it")):
        assert f"cannot be made, since {file} is a file" in error
    assert file.read_text() == "no directory"
