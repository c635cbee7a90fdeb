"""The page and the trace of recorded runs: what is in them, and that a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.diagnostics.runs import START, write_deaths, write_run
from zero_strategy.cli import main
from zero_strategy.cli.report import MOST_POINTS, own_work, report_data, report_page
from zero_strategy.diagnostics.run_files import read_run


def test_the_trace_is_one_of_chrome_whose_intervals_nest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, pipeline=True)
    assert main(["trace", str(tmp_path)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"phase", "training", "pipeline", "disk_read"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] > 0 and event["args"]["step"] in (1, 2)
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 6
    for spans in threads.values():
        check_nested(spans)
    begun = {e["id"]: e for e in events if e["ph"] == "b"}
    ended = {e["id"]: e for e in events if e["ph"] == "e"}
    assert len(begun) == 8 and begun.keys() == ended.keys()  # two overlapping reads in two steps of two ranks
    assert all(ended[key]["ts"] > event["ts"] and ended[key]["tid"] == event["tid"] for key, event in begun.items())


def check_nested(spans: list[tuple[float, float]]) -> None:
    open_ends: list[float] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3
        open_ends.append(end)


def test_what_the_page_shows_is_what_was_recorded(tmp_path: Path) -> None:
    write_run(tmp_path)
    data = report_data(read_run(tmp_path))
    assert data["steps"] == [1, 2, 3, 4, 5, 6] and data["ranks"] == [0, 1] and data["grouped"] == 1
    assert data["loss"] == pytest.approx([4.0 / step for step in range(1, 7)])
    assert data["budget"][1]["compute"] == pytest.approx([0.2] * 6)
    assert data["own"][0] == pytest.approx([0.2] * 6) and data["own"][1] == pytest.approx([0.3] * 6)
    assert data["tokens_per_second"] == pytest.approx([2000.0] * 6)  # 2 ranks, 500 tokens in 0.5 s
    assert data["memory"][0]["steps"] == [1, 3, 5]
    assert data["memory"][0]["tiers"]["device"]["parameters"] == [4001, 4003, 4005]
    flows = {one["kind"]: one for one in data["flows"]}
    assert flows["all_gather"]["rate"] == pytest.approx(1e6) and flows["control"]["rate"] is None
    summary = data["summary"]
    assert summary["mfu"] == pytest.approx(0.25) and summary["seconds"] == 0.5 and summary["memory"] == 2 * 10**8
    assert summary["waits"] == pytest.approx(0.5) and summary["loss"] == pytest.approx(4.0 / 6)
    assert data["timeline"]["step"] == 2 and not data["timeline"]["pipeline"]
    record = read_run(tmp_path).steps[1][0]
    assert own_work(record) == pytest.approx(0.3)


def test_deaths_stalls_and_goodput(tmp_path: Path) -> None:
    """Of the 4.5 s between the first step and the tenth 1 and 0.5 are stalls."""
    write_run(tmp_path, steps=10)
    assert report_data(read_run(tmp_path))["deaths"] is None
    write_deaths(tmp_path)
    found = report_data(read_run(tmp_path))["deaths"]
    assert (found["count"], found["goodput"]) == (2, pytest.approx(3 / 4.5))
    assert found["said"] == (
        "2 processes died, and the training began anew 2 times; the median stall took 0.75 s, the largest 1 s; steps "
        "that counted were done in 66.7 % of the time (goodput)."
    )
    death, taken = found["rows"]
    assert (death["time"], death["step"], death["went"], death["came"]) == (START + 1.0, 1, [0, 1], [])
    assert (death["before"], death["after"], death["stall"], death["again"]) == (3, 1, 1.0, 1)
    assert (taken["went"], taken["came"], taken["stall"], taken["again"]) == ([], [0], 0.5, 0)


def test_a_run_without_deaths_and_one_after_it(tmp_path: Path) -> None:
    """The time between two runs in one directory counts for neither; a cut line is none."""
    write_run(tmp_path, steps=10)
    path = tmp_path / "beginnings.jsonl"
    first = {
        "number": 1, "step": 0, "why": "", "before": 0, "after": 2, "went": [], "came": [0, 1], "waiting": 0,
        "stall": 0.0, "lost": 0.0, "again": 0,
    }  # fmt: skip
    lines = [
        {**first, "time": START, "since": START + 0.5},
        {**first, "time": START + 2.9, "since": START + 3.5},
        {**first, "time": START + 4.2, "since": START + 3.5, "number": 2, "before": 2, "went": [1], "stall": 1.0,
         "lost": 1.0},
    ]  # fmt: skip
    path.write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[1])[:40])
    found = report_data(read_run(tmp_path))["deaths"]
    assert found["said"] == "No process died; steps that counted were done in 100 % of the time (goodput)."
    assert found["rows"] == []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # From 0.5 to 2.5 and from 3.5 to 5.0, of which 1 is lost.
    assert report_data(read_run(tmp_path))["deaths"]["goodput"] == pytest.approx(2.5 / 3.5)
    path.write_text('{"number": 1}\n')
    with pytest.raises(ValueError, match=r"beginnings\.jsonl, line 1: no record of a beginning"):
        read_run(tmp_path)


def test_a_long_run_becomes_few_points(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1, steps=3 * MOST_POINTS + 5, traced=0)
    data = report_data(read_run(tmp_path))
    assert data["grouped"] == 4 and len(data["steps"]) <= MOST_POINTS
    assert data["steps"][-1] == 3 * MOST_POINTS + 5 and data["timeline"] is None


class Parts(HTMLParser):
    """Resources that a page loads, its scripts' kinds, and what charts and headings it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.scripts = 0
        self.charts: list[dict[str, int]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self._where = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        addresses = [value or "" for key, value in attrs if key in ("src", "href")]
        self.loaded += [address for address in addresses if not address.startswith("#")]
        self.scripts += tag == "script"
        self._where = tag
        if tag == "svg":
            assert found["role"] == "img" and found["aria-labelledby"]
            self.charts.append({})
        elif self.charts and tag in ("rect", "path", "line"):
            tag = "death" if found.get("class") == "death" else tag
            self.charts[-1][tag] = self.charts[-1].get(tag, 0) + 1

    def handle_data(self, text: str) -> None:
        if self._where not in ("script", "style"):
            self.texts.append(text.strip())
        if self._where == "h2":
            self.headings.append(text)


def test_the_page_is_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    page = report_page(read_run(tmp_path))
    parts = Parts(page)
    assert not parts.loaded and parts.scripts == 2
    assert not re.search(r"@[A-Z]+@|url\(|@import|fetch\(|XMLHttp", page)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    assert "6 steps of 2 rank(s)" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text() == page


@pytest.mark.parametrize(("command", "problem"), [("report", "no recorded steps"), ("trace", "no recorded steps")])
def test_a_directory_without_a_run_is_an_error(
    command: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_without_traces_has_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, traced=0)
    assert main(["trace", str(tmp_path)]) == 2
    assert "diagnostics.trace_steps" in capsys.readouterr().err


def drawn_by_a_browser(directory: Path) -> Parts:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs Chromium (Debian package chromium)")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2000", "--virtual-time-budget=4000"]
    options += [f"--user-data-dir={directory / 'profile'}", "--dump-dom"]
    (directory / "page.html").write_text(report_page(read_run(directory)))
    command = [browser, *options, (directory / "page.html").as_uri()]
    found: Any = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 'data-drawn="true"' in found.stdout, found.stderr[-2000:]
    return Parts(found.stdout)


def test_a_browser_draws_every_chart(tmp_path: Path) -> None:
    write_run(tmp_path, pipeline=True)
    write_deaths(tmp_path)
    page = drawn_by_a_browser(tmp_path)
    assert page.headings == [
        "Where the time of a step goes",
        "Loss",
        "Tokens per second",
        "Memory by category",
        "Memory by rank",
        "How far ranks are apart",
        "What moves",
        "Deaths and new beginnings",
        "Pipeline timeline (step 2)",
        "Settings",
    ]
    budget, loss, speed, memory, by_rank, apart, timeline = page.charts
    assert budget["rect"] == 1 + 3 * 6  # three parts in six steps, and what follows the pointer
    assert loss["path"] == speed["path"] == 1 and by_rank["path"] == apart["path"] == 2
    assert memory["rect"] == 1 + 2 * 3 and timeline["rect"] == 2 * 4
    assert {"GPT</script> on 2 ranks", "500 ms", "25 %", "12.3 M", "F0", "B1", "rank 1", "stage"} <= set(page.texts)
    assert {"Goodput", "2 deaths", "0, 1", "2023-11-14 22:13:21", "rank 0 <b>is gone</b>"} <= set(page.texts)
    assert [chart.get("death", 0) for chart in page.charts] == [2, 2, 2, 0, 0, 2, 0]  # by step
