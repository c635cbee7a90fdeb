"""`zero-strategy schedule`: text, pictures, traces, measured timelines, errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from zero_strategy.cli import figures, main
from zero_strategy.cli.schedule import text
from zero_strategy.pipeline import SCHEDULES, build_table, lower
from zero_strategy.pipeline.simulator import Event, Times, read_timeline, simulate, timeline_of, write_timeline

ONE = ("--schedule", "1f1b", "--stages", "2", "--micro-batches", "2")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["schedule", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list")
    assert status == 0 and [line.split()[0] for line in out.splitlines()[1:7]] == list(SCHEDULES)


def test_a_schedule_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "show", *ONE, "--width", "100")
    assert status == 0
    assert out.splitlines() == [
        "rank 0 F0 F1 ......B0    ...B1",
        "rank 1 ...F0 B0    F1 B1",
        "",
        "1f1b: 9 in all",
        "rank  busy   idle  in its window  in flight  held  buffers",
        "   0     6  33.3%          33.3%          2     2        2",
        "   1     6  33.3%           0.0%          1     1        2",
    ]


def test_lines_are_as_wide_as_they_may_be() -> None:
    timeline = simulate(lower(build_table("zbv", 2, 3)))
    assert text(timeline, 100).splitlines()[0].startswith("rank 0 F0a F1a F2a F0b I0b W0b F1b ")
    assert text(timeline, 70).splitlines()[0].startswith("rank 0 F0aF1aF2aF0bI0bW0b")
    assert text(timeline, 45).splitlines()[0].startswith("rank 0 FFIIWW"[:9])
    for width in (100, 70, 45, 30, 20):
        assert all(len(line) <= width for line in text(timeline, width).splitlines())
    assert text(timeline_of("nothing", []), 80) == ""


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"picture{suffix}"
    status, _, _ = run(capsys, "show", *ONE, "--output", str(path))
    assert status == 0 and path.read_bytes().startswith(begins)


@pytest.mark.parametrize(("flags", "colors"), [([], figures.LIGHT), (["--dark"], figures.DARK)])
def test_a_light_and_a_dark_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], colors: figures.Theme
) -> None:
    path = tmp_path / "picture.svg"
    run(capsys, "show", *ONE, "--output", str(path), *flags)
    drawn = set(re.findall("#[0-9a-f]{6}", path.read_text(encoding="utf-8")))
    other = figures.LIGHT if flags else figures.DARK
    assert {colors.page, colors.ink, colors.series[0], colors.series[1]} <= drawn
    assert not {other.page, other.ink, other.series[0]} & drawn


def test_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, _ = run(capsys, "show", *ONE, "--weight", "2", "--output", str(tmp_path / "trace.json"))
    records = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [record["args"]["name"] for record in records if record["ph"] == "M"]
    assert status == 0 and names == ["1f1b", "rank 0", "rank 1"]
    last = records[-1]
    assert (last["name"], last["tid"], last["ts"], last["dur"]) == ("B1", 1, 6.0, 3.0)
    assert last["args"] == {"micro_batch": 1, "chunk": 0}


def test_times_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    times = ("--forward", "1,2", "--backward", "1.5", "--weight", "0.5", "--latency", "0.25")
    _, out, _ = run(capsys, "show", *ONE, *times)
    expected = simulate(lower(build_table("1f1b", 2, 2)), Times([1.0, 2.0], 1.5, 0.5, latency=0.25)).makespan
    assert f"1f1b: {expected:g} in all" in out


def test_tables_in_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    _, first, _ = run(capsys, "show", "--schedule", "zbv", "--stages", "2", "--micro-batches", "4", "--csv", str(path))
    assert path.read_text(encoding="utf-8").startswith("0F0,0F1,0F2,3F0,3I0,3W0,")
    _, again, _ = run(capsys, "show", "--schedule", f"csv:{path}", "--stages", "2", "--micro-batches", "4")
    assert again == first.replace("zbv:", f"csv:{path}:")


def test_a_measured_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Files of several ranks, with a clock that began earlier and a wait that is no computation."""
    for rank in range(2):
        simulated = simulate(lower(build_table("1f1b", 2, 2))).computations(rank)
        events = [Event(rank, 50 + e.start, 50 + e.end, e.kind, e.micro_batch, e.chunk) for e in simulated]
        events.append(Event(rank, 59.0, 60.0, "step"))
        write_timeline(events, tmp_path / f"rank-{rank}.jsonl")
    files = [str(tmp_path / f"rank-{rank}.jsonl") for rank in (1, 0)]
    status, out, _ = run(capsys, "show", "--timeline", *files, "--output", str(tmp_path / "run.svg"), "--width", "100")
    assert status == 0
    assert out.splitlines()[:2] == ["rank 0 F0 F1 ......B0    ...B1", "rank 1 ...F0 B0    F1 B1"]
    assert "rank-1, rank-0: 9000 ms in all" in out and "busy, ms" in out and (tmp_path / "run.svg").exists()
    timeline = read_timeline(files)
    assert timeline.usage == simulate(lower(build_table("1f1b", 2, 2))).usage and timeline.start == 0


def several_steps(path: Path) -> None:
    """Steps 3 to 5 of a run, each begun 100 s after the last; of step 5 rank 1 has nothing yet."""
    simulated = simulate(lower(build_table("1f1b", 2, 2))).events
    events = [
        replace(e, step=step, start=100 * step + e.start * step, end=100 * step + e.end * step)
        for step in (3, 4, 5)
        for e in simulated
        if (step, e.rank) != (5, 1)
    ]
    events.append(Event(0, 310.0, 311.0, "wait", 1, 0, 3))
    write_timeline(events, path)


def test_a_step_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    several_steps(path)
    show = ["show", "--timeline", str(path), "--width", "100"]
    status, out, _ = run(capsys, *show)
    assert status == 0 and "run, step 4: 36 s in all" in out and "busy, s" in out
    assert out.splitlines()[:2] == ["rank 0 F0 F1 ......B0    ...B1", "rank 1 ...F0 B0    F1 B1"]
    picture = tmp_path / "run.svg"
    status, out, _ = run(capsys, *show, "--step", "3", "--output", str(picture))
    assert status == 0 and "run, step 3: 27 s in all" in out
    drawn = picture.read_text()
    for words in ("run, step 3: 27 s in all", "time in s<", "forward", "backward", "waiting for data", "micro-batches"):
        assert words in drawn, words
    status, out, _ = run(capsys, *show, "--step", "all")
    assert status == 0 and "run: 245 s in all" in out
    for step, said in (("7", "there is no step 7; there are 3 to 4"), ("5", "no step 5"), ("x", "give a number, last")):
        status, _, err = run(capsys, *show, "--step", step)
        assert status == 2 and said in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no event of a timeline: ValueError"),
        ('{"rank": 0, "start": 1, "kind": "F"}', "line 2: .*'end'"),
        ('{"rank": 0, "start": 2, "end": 1, "kind": "F"}', "line 2: .*the end is not before the start"),
        ("7", "line 2: "),
    ],
)
def test_lines_that_are_no_events(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"rank": 0, "start": 0, "end": 1, "kind": "F"}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_timeline([path])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zbv", "--stages", "4"], "a schedule needs --micro-batches"),
        (["--schedule", "zb", "--stages", "4", "--micro-batches", "2"], "schedule 'zb' is unknown"),
        ([*ONE, "--chunks", "2"], "interleaved_1f1b is for 2"),
        ([*ONE, "--output", "x.pdf"], "--output x.pdf: the name must end in"),
        ([*ONE, "--forward", "1,2,3"], "forward: 3 times for 2 stages"),
        ([*ONE, "--timeline", "run.jsonl"], "--timeline draws a run"),
        (["--timeline", "missing.jsonl"], "missing.jsonl"),
        (["--schedule", "csv:missing.csv", "--stages", "2", "--micro-batches", "2"], "missing.csv"),
    ],
)
def test_schedule_command_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, out, err = run(capsys, "show", *arguments)
    assert status == 2 and not out and message in err


def test_an_empty_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("\n", encoding="utf-8")
    status, _, err = run(capsys, "show", "--timeline", str(tmp_path / "run.jsonl"))
    assert status == 2 and "no events" in err
    (tmp_path / "run.jsonl").write_text('{"rank": 1, "start": 0, "end": 1, "kind": "F"}\n', encoding="utf-8")
    status, _, err = run(capsys, "show", "--timeline", str(tmp_path / "run.jsonl"))
    assert status == 2 and "rank 0 computes nothing" in err
