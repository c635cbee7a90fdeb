"""The fit finds what made the data; the command measures, predicts, prints and writes. No times are asserted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale.collectives import Link
from benchmarks.scale.fitting import (
    KINDS,
    CollectiveTime,
    StepTime,
    collective_seconds,
    crowded,
    crowding,
    error,
    fit_collectives,
    fit_machine,
    least_squares,
    stretched,
)
from benchmarks.scale.hardware import Machine
from benchmarks.scale_model import main

TRUE = Machine(
    "true", math.inf, 1.0, math.inf, math.inf, 1.0, 4, Link(40e-6, 2e9), Link(40e-6, 2e9),
    add=0.2e-9, overlap=0.35, unit_overhead=150e-6, step_overhead=0.8e-3, asynchronous=False,
)  # fmt: skip


def synthetic(ranks: int) -> tuple[list[CollectiveTime], list[StepTime]]:
    """Inputs of TRUE."""
    sizes = [1 << power for power in range(12, 25, 3)]
    collectives = [CollectiveTime(k, ranks, n, collective_seconds(TRUE, k, ranks, n)) for k in KINDS for n in sizes]
    steps = []
    for stage in (1, 2, 3):
        for units in (3, 7, 13):
            seconds = 0.002 * units
            blank = StepTime(stage, ranks, units, 800_000 * units, 128, seconds, 2 * seconds, 0.001, math.nan)
            steps.append(replace(blank, seconds=blank.predicted(TRUE).step))
    return collectives, steps


def test_the_fit_finds_what_made_the_data() -> None:
    machine = fit_machine(*synthetic(2), "fitted", ranks_per_host=4)
    for name in ("add", "overlap", "unit_overhead", "step_overhead"):
        assert getattr(machine, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert machine.within.latency == pytest.approx(TRUE.within.latency, rel=1e-6)
    assert machine.within.bandwidth == pytest.approx(TRUE.within.bandwidth, rel=1e-6)
    # So four ranks are predicted, whatever the fit has seen.
    collectives, steps = synthetic(4)
    for one in collectives:
        assert collective_seconds(machine, one.kind, 4, one.nbytes) == pytest.approx(one.seconds, rel=1e-6)
    for known in steps:
        assert known.predicted(machine).step == pytest.approx(known.seconds, rel=1e-6)


def test_noise_moves_the_fit_little() -> None:
    collectives, _ = synthetic(2)
    noisy = [replace(one, seconds=one.seconds * (1.05 if n % 2 else 0.95)) for n, one in enumerate(collectives)]
    latency, per_byte, _ = fit_collectives(noisy)
    assert latency == pytest.approx(40e-6, rel=0.1) and per_byte == pytest.approx(0.5e-9, rel=0.1)


def test_least_squares_within_bounds() -> None:
    rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    assert least_squares(rows, [2.0, 3.0, 5.0]) == pytest.approx([2.0, 3.0])
    assert least_squares(rows, [2.0, 3.0, 5.0], [1.0] * 3, most=(1.0, math.inf)) == pytest.approx([1.0, 3.5])
    assert least_squares(rows, [-2.0, 3.0, 1.0], [1.0] * 3) == pytest.approx([0.0, 2.0])
    with pytest.raises(ValueError, match="1 measurements do not determine 2 parameters"):
        least_squares([[1.0, 1.0]], [1.0])
    with pytest.raises(ValueError, match="'gather'"):
        fit_collectives([CollectiveTime("gather", 2, 8, 1.0)] * 3)


def test_more_ranks_than_cores_take_turns() -> None:
    assert crowding(4, 2) == 2.0 and crowding(2, 4) == 1.0
    slow = crowded(TRUE, 4, 2)
    for kind in KINDS:
        assert collective_seconds(slow, kind, 4, 1 << 20) == pytest.approx(
            2 * collective_seconds(TRUE, kind, 4, 1 << 20)
        )
    two, four = synthetic(2)[1], synthetic(4)[1]
    known = stretched(two, four, by=2.0)
    assert [one.seconds for one in known] == [one.seconds for one in four]
    assert known[0].forward == 2 * two[0].forward and known[0].optimizer == two[0].optimizer
    assert error([(1.1, 1.0), (0.8, 1.0), (1.0, 1.0)]) == pytest.approx((0.1, 0.2))


def test_predictions_are_printed_with_what_they_rest_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = tmp_path / "fitted.json"
    fitted.write_text(json.dumps({"fitted": {"unit_overhead": 7e-6, "step_overhead": 3e-3}}))
    out, plot = tmp_path / "scale.json", tmp_path / "scale.png"
    files = [f"--json={out}", f"--plot={plot}", f"--fitted={fitted}"]
    main(["--gpus=8,64,4096", "--network-gbps=200", "--overlap=0.5", *files])
    said = capsys.readouterr().out
    for words in ("H100 Tensor Core GPU datasheet", "tuning.cc", "7 us per unit", "200 Gb/s", "50% of what can be"):
        assert words in said
    report = json.loads(out.read_text())
    names = [(one["layout"]["ranks"], one["layout"]["name"]) for one in report["predictions"]]
    assert (4096, "zero1") in names and (64, "hybrid 8 x 8") in names and (8, "pipeline 2 x 4") in names
    assert len(names) == 17, "hybrid sharding of one host is stage 3"
    assert all(one["step"] > 0 for one in report["predictions"]) and report["machine"]["between"]["bandwidth"] == 25e9
    assert all(f"{one['step']:.3f}" in said for one in report["predictions"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"must end in \.png"):
        main(["--gpus=8", "--plot=scale.pdf"])


def test_help_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "--tokens-per-gpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--layouts=zero7"])
    assert "there are zero1" in capsys.readouterr().err


def test_measured_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fitted.json"
    report = main(["--measure", "--quick", "--gpus=8", f"--json={out}"])
    said = capsys.readouterr().out
    assert "2 ranks, steps, fitted: median error" in said and "4 ranks, steps, predicted: median error" in said
    assert json.loads(out.read_text())["fitted"] == report["fitted"]
    checked = {(check["ranks"], check["what"].split(",")[0].split()[0]) for check in report["checks"]}
    assert checked == {(ranks, what) for ranks in (2, 4) for what in (*KINDS, "step")}
    assert all(check["predicted"] > 0 and check["measured"] > 0 for check in report["checks"])
    assert {one["ranks"] for one in report["measured"]["4"]["gloo"]} == {4}
