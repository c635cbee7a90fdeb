"""Measuring a drive leaves the program's random numbers alone."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_strategy.offload.stores import probe


def test_a_probe_draws_no_random_numbers_of_the_program(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    probe(tmp_path, seconds=0.2)
    assert torch.equal(torch.rand(4), expected)
