"""The runs for a GPU: what comes first, what a call leaves for the next, and that no suite outlasts its time."""

from __future__ import annotations

import json
import subprocess
import sys
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


def test_a_suite_leaves_its_status_its_figures_and_what_it_printed() -> None:
    with open("/dev/null", "w") as log:
        assert run(GOOD, True, 60.0, log)["figures"] == {"ratio": 2}
        assert run(BAD, True, 60.0, log)["exit status"] == 3


def test_a_suite_that_outlasts_its_time_ends_with_all_its_processes(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        found = run(HANGS, True, 0.5, log)
    assert found["status"] == OVER
    assert "begun" in (tmp_path / "log").read_text()


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
    assert "seen" in (tmp_path / "results" / "log.txt").read_text()


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
