"""The step benchmark: its arithmetic is right, and its contenders do the same training. No times are asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import host_time, one_device, recorder
from benchmarks.ratios import bootstrap, round_ratio
from benchmarks.step import default_pairs, main
from tests.launcher import Launcher


def test_a_steady_slowdown_cancels_in_a_round() -> None:
    # A takes 1 and B takes 2, and the machine gets slower by 0.1 with every block.
    assert round_ratio([[1.0], [2.1], [2.2], [1.3]]) == pytest.approx(2.3 / 4.3)


def test_one_interrupted_step_does_not_count() -> None:
    assert round_ratio([[1.0, 9.0, 1.0], [2.0], [2.0], [1.0]]) == 0.5


def test_the_interval_holds_the_median_and_narrows_with_agreement() -> None:
    wide = bootstrap([0.8, 0.9, 1.0, 1.1, 1.2])
    assert wide.low <= wide.median <= wide.high and wide.median == 1.0
    narrow = bootstrap([0.99, 1.0, 1.01])
    assert narrow.high - narrow.low < wide.high - wide.low


def test_stages_meet_the_peer_that_is_nearest() -> None:
    assert default_pairs(["ddp", "fsdp2"], [1, 3]) == [("zero1", "ddp"), ("zero3", "fsdp2")]
    assert default_pairs(["ddp"], [1, 3]) == [("zero1", "ddp")]
    assert default_pairs(["ddp", "fsdp2"], []) == [("ddp", "fsdp2")]


def test_the_contenders_do_the_same_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    pairs = "zero0:ddp,zero1:ddp,zero2:ddp,zero3:fsdp2,zero3-kept:fsdp2-kept"
    small = ["--model", "transformer-tiny", "--batch", "2", "--length", "16", "--accumulation", "2"]
    main([*small, "--pairs", pairs, "--rounds", "1", "--block-steps", "1", "--warmup", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert [entry["a"] for entry in report["pairs"]] == ["zero0", "zero1", "zero2", "zero3", "zero3-kept"]
    assert all(entry["same_training"] for entry in report["pairs"])
    assert "zero3 / fsdp2" in capsys.readouterr().out


def test_the_recorder_is_timed_beside_an_engine_without(ranks: Launcher, tmp_path: Path) -> None:
    options = {"model": "transformer-tiny", "rows": 1, "length": 8, "stage": 3, "every": 1, "rounds": 1}
    found = ranks(1)(recorder.measure, options, str(tmp_path))[0]
    assert [len(turns) for turns in found["samples"]] == [4] and found["ratio"]["median"] > 0
    recorded = recorder.of_the_record(str(tmp_path))
    assert recorded["recorded steps"] == 2 + 2 * 3  # of one of the two
    assert 0 < recorded["of them the recorder's own"] < recorded["seconds of a recorded step"]


def on_one_device(precision: str, pairs: list[tuple[str, str]]) -> list[float]:
    work = one_device.Work("transformer-tiny", 2, 8, precision, torch.device("cpu"))
    found = [one_device.compare(first, second, work, rounds=1, warmup=1) for first, second in pairs]
    assert all(len(each["samples"]) == 1 and each["ratio"]["median"] > 0 for each in found)
    with pytest.raises(ValueError, match="'zero4' is no contender"):
        one_device.make("zero4", work)
    return [each["largest difference of losses"] for each in found]


def test_contenders_on_one_device_do_the_same_training(ranks: Launcher) -> None:
    same = [("zero0", "plain"), ("zero1", "plain"), ("zero2", "zero2-optimizer"), ("zero3-offload", "fsdp2-offload")]
    assert max(ranks(1)(on_one_device, "fp32", same)[0]) < 2e-6
    assert max(ranks(1)(on_one_device, "bf16", [*same, ("zero0-low", "plain-low")])[0]) < 5e-3


@pytest.mark.parametrize("ranks, peer", [(1, []), (4, ["--fsdp2"])])
def test_host_time_is_told_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, peer: list[str]
) -> None:
    out = tmp_path / "host.json"
    words = ["--depths", "2", "--stages", "2", "--steps", "1", "--ranks", str(ranks), "--out", str(out), *peer]
    rows = host_time.main(words)
    expected = [("plain torch", 2, 1), ("stage 2", 2, ranks), *[("fsdp2", 2, ranks) for _ in peer]]
    for found in (rows, json.loads(out.read_text())["rows"]):
        assert [(row["contender"], row["units"], row["ranks"]) for row in found] == expected
    assert all(row[part] > 0 for row in rows for part in host_time.PARTS)
    assert "plain torch" in capsys.readouterr().out
