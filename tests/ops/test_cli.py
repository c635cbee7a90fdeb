"""`zero-strategy build` and `doctor`, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zero_strategy
from tests.ops.native import need_native
from tests.warm import run_warm_script
from zero_strategy.cli import main
from zero_strategy.offload.file_queues import BACKENDS
from zero_strategy.ops import libraries, ops_report


def test_doctor_tells_of_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    need_native()
    assert main(["doctor", "--no-train"]) == 0
    said = capsys.readouterr().out
    assert "packages: torch 2." in said and "cpu compiler:" in said
    assert str(libraries.ensure("cpu").path) in said
    every = " ".join(said.split())
    assert "native: " in every and all(f" {op}" in every for op, _ in ops_report("cpu"))
    if not torch.cuda.is_available():
        assert f"all {len(ops_report('cuda'))} ops: reference: " in said and len(said.splitlines()) < 40
    assert any(f"file I/O: {backend}" in said for backend in BACKENDS)


def test_doctor_says_why_an_op_is_not_native(tmp_path: Path) -> None:
    environment = {**os.environ, "ZERO_STRATEGY_NATIVE": "0", "ZERO_STRATEGY_CACHE": str(tmp_path)}
    done = run_warm_script("-m", "zero_strategy.cli", "doctor", "--no-train", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "cpu library: not loaded: ZERO_STRATEGY_NATIVE=0" in done.stdout
    assert "file I/O: python, since ZERO_STRATEGY_NATIVE=0" in done.stdout
    assert "reference: ZERO_STRATEGY_NATIVE=0" in done.stdout and "native\n" not in done.stdout


def test_a_reader_may_leave_early() -> None:
    command = [sys.executable, "-m", "zero_strategy.cli", "doctor", "--no-train"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and "BrokenPipe" not in said, said


def test_build_says_where_the_library_is(capsys: pytest.CaptureFixture[str]) -> None:
    need_native()
    assert main(["build"]) == 0
    cpu, io = capsys.readouterr().out.splitlines()
    assert cpu == f"cpu: {libraries.ensure('cpu').path}"
    assert io.startswith("io: ") and Path(io.removeprefix("io: ")).is_file()


def test_build_fails_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZERO_STRATEGY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    assert main(["build"]) == 1
    assert "cpu: not built: no C++ compiler: set CXX" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["doctor", "--help"]])
def test_ops_command_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 0 and "usage: zero-strategy" in capsys.readouterr().out


def test_the_version_and_the_bare_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"zero-strategy {zero_strategy.__version__}\n"
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: zero-strategy") and "doctor" in said and "--version" in said
