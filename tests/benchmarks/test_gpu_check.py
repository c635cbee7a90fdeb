"""The runs for a GPU: what comes first, what a call leaves for the next, and that no suite outlasts its time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import FAILED, OVER, PASSED, SUITES, Results, Suite, left_to_run, main, run


def suite(name: str, code: str, seconds: int = 60) -> Suite:
    words = ("-S", "-c", code, gpu_check.FIGURES, gpu_check.SCRATCH)
    return Suite(name, "a test", words, words, seconds)


GOOD = suite("good", "import sys, json; json.dump({'ratio': 2}, open(sys.argv[1], 'w')); print('seen')")
BAD = suite("bad", "raise SystemExit(3)")
HANGS = suite("hangs", "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '600'])")


def test_what_has_passed_is_left_out_and_what_failed_comes_last() -> None:
    status = {"good": PASSED, "bad": FAILED}
    found = left_to_run([BAD, GOOD, HANGS], lambda name: status.get(name, ""))
    assert [each.name for each in found] == ["hangs", "bad"]


def test_a_suite_leaves_its_status_its_figures_and_what_it_printed(tmp_path: Path) -> None:
    assert run(GOOD, True, 60.0, tmp_path)["figures"] == {"ratio": 2}
    assert run(BAD, True, 60.0, tmp_path)["exit status"] == 3
    assert "seen" in (tmp_path / "good.txt").read_text()


def test_a_suite_that_outlasts_its_time_ends_with_all_its_processes(tmp_path: Path) -> None:
    found = run(HANGS, True, 0.5, tmp_path)
    assert found["status"] == OVER
    assert "begun" in (tmp_path / "hangs.txt").read_text()


def test_a_call_goes_on_where_the_last_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "SUITES", (GOOD, BAD))
    call = ["--rehearse", "--out", str(tmp_path / "results")]
    assert main([*call, "--minutes", "0.1"]) == 2  # less than any suite gets
    assert "no time was left for good, bad" in capsys.readouterr().out
    assert main(call) == 1
    first = json.loads((tmp_path / "results" / "results.json").read_text())["suites"]
    assert (first["good"]["status"], first["bad"]["status"]) == (PASSED, FAILED)
    assert main(call) == 1
    again = json.loads((tmp_path / "results" / "results.json").read_text())["suites"]
    assert again["good"] == first["good"]  # not run again
    assert main([*call, "--only", "good"]) == 0
    assert "seen" in (tmp_path / "results" / "good.txt").read_text()


def test_results_that_are_there_are_kept(tmp_path: Path) -> None:
    Results(tmp_path).add("good", {"status": PASSED})
    Results(tmp_path).add("bad", {"status": FAILED})
    assert {name: Results(tmp_path).status(name) for name in ("good", "bad", "hangs")} == {
        "good": PASSED, "bad": FAILED, "hangs": ""
    }  # fmt: skip


def test_every_suite_has_a_rehearsal_and_names_modules_and_files_that_are_there() -> None:
    root = Path(gpu_check.__file__).parents[1]
    for each in SUITES:
        assert each.rehearsal, each.name
        for words in (each.gpu, each.rehearsal):
            for word in words:
                path = word.removeprefix("--ignore=")
                assert not path.startswith("tests/") or (root / path).exists(), word
            if words[:1] == ("-m",) and words[1].startswith("benchmarks."):
                assert (root / f"{words[1].replace('.', '/')}.py").exists(), words[1]


def test_without_a_gpu_the_way_out_is_named(tmp_path: Path) -> None:
    code = "import torch; torch.cuda.is_available = lambda: False; from benchmarks.gpu_check import main; main([])"
    root = Path(gpu_check.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--rehearse" in done.stderr


def test_neighbours_that_measure_nothing_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two waits for a file of the other's."""
    code = "import pathlib, sys, time; here = pathlib.Path({here!r}); (here / {mine!r}).touch()\n"
    code += "while not (here / {other!r}).exists(): time.sleep(0.01)"
    pair = [
        replace(suite(mine, code.format(here=str(tmp_path), mine=mine, other=other)), rehearsal=(), beside=True)
        for mine, other in (("one", "two"), ("two", "one"))
    ]
    monkeypatch.setattr(gpu_check, "SUITES", tuple(pair))
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check.torch.cuda, "get_device_name", lambda index: "a device")
    assert main(["--out", str(tmp_path / "results"), "--minutes", "1"]) == 0
