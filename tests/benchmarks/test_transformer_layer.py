"""The layer's benchmark: its contenders compute the same, and it runs on a small size. No times are asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.transformer_layer import PlainLayer, Sizes, kept_bytes, main, our_layer, peak_bytes

SIZES = Sizes(2, 6, 16, 2, 0.0, 50, "cpu", torch.float32)


def test_the_contenders_compute_the_same() -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    mine = our_layer(SIZES, {})
    for fused in (False, True):
        plain = PlainLayer(SIZES, fused)
        names = {"attn_qkv": plain.qkv, "attn_o": plain.out, "attn_n": plain.attention_norm, "norm_": plain.norm}
        names |= {"inter_": plain.up, "output_": plain.down}
        with torch.no_grad():
            for name, module in names.items():
                getattr(mine, name + "w").copy_(module.weight)
                getattr(mine, name + "b").copy_(module.bias)
        torch.testing.assert_close(mine(x), plain(x), rtol=1e-5, atol=1e-6)


def test_bytes_are_counted_as_allocated() -> None:
    x = torch.ones(1000, requires_grad=True)
    assert kept_bytes(lambda: x.exp(), torch.nn.Module()) == 4000
    assert peak_bytes(lambda: [x.exp(), x.exp()], "cpu") in range(8000, 9000)
    assert peak_bytes(lambda: [x.detach() + 1, x.detach() + 2, x.detach() + 3], "cpu") in range(12000, 13000)


def test_every_suite_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batch", "1", "--length", "4", "--hidden", "8", "--vocabulary", "40", "--rounds", "1"]
    small += ["--block-steps", "1"]
    threads = torch.get_num_threads()
    try:
        main([*small, "--threads", "1", "--out", str(tmp_path / "layer.json")])
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "layer.json").read_text())
    assert [entry["suite"] for entry in report["suites"]] == ["layer", "options", "stochastic", "loss"]
    assert "kept, plain" in capsys.readouterr().out
