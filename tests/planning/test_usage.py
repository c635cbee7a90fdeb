"""Mistakes on the command line are told in a sentence, with the nearest word, and all of a config's at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_strategy.cli import main
from zero_strategy.config import load_config

HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error of a command that ends with status 2."""
    try:
        status = main(arguments)
    except SystemExit as end:  # argparse's own
        status = int(end.code or 0)
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--params", "7e9", "--wrld", "8"], "zero-strategy plan: unrecognized arguments: --wrld; did you"),
        (["plan", "--params", "7e9", "--wrld=8"], "unrecognized arguments: --wrld=8; did you mean --world?"),
        (["pln"], "zero-strategy: argument command: invalid choice: 'pln'"),
        (["pln"], "did you mean plan?"),
        (["schedule", "show", "a\x1b[31m\nINFO all"], "unrecognized arguments: a\\x1b[31m\\nINFO all"),
        (["checkpoint", "inspct", "x"], "did you mean inspect?"),
        (["plan", "--params", "many"], "argument --params: invalid float value: 'many'"),
        (["checkpoint", "inspect"], "the following arguments are required: path"),
    ],
)  # fmt: skip
def test_usage_errors_name_the_nearest_word(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(arguments, capsys)
    assert words in text and "usage:" not in text and len(text.splitlines()) == 2
    assert text.splitlines()[-1].endswith("--help` shows what there is")


@pytest.mark.parametrize("action", [["inspect"], ["convert"]])
def test_that_nothing_is_there_is_told_before_torch_is_imported(action: list[str], tmp_path: Path) -> None:
    """Torch's import takes seconds on a busy machine."""
    (tmp_path / "empty").mkdir()
    code = (
        "import sys; from zero_strategy.cli import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    for name, words in (("empty", "the directory is empty"), ("absent", "no such file or directory")):
        target = ["out"] if action == ["convert"] else []
        done = subprocess.run(
            [sys.executable, "-c", code, "checkpoint", *action, name, *target], cwd=tmp_path, env=HERE,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and f"{tmp_path / name}: " in done.stderr and words in done.stderr, done.stderr


def test_a_file_without_its_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text("def build(): ...\n")
    assert f"is a Python file; give {path}:function" in said(["plan", str(path), "--world", "2"], capsys)


def test_all_mistakes_of_a_config_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("stage: 5\nofload: cpu\ncheckpoint:\n  keep_lst: 2\n  asynchronous: perhaps\n")
    with pytest.raises(ValueError, match="stage is 5") as error:
        load_config(path)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    for line, word in zip(lines, ("stage is 5", "did you mean 'offload'", "keep_last", "asynchronous")):
        assert word in line
    text = said(["plan", "--params", "1e8", "--config", str(path)], capsys)
    assert [line.strip() for line in text.splitlines()] == lines


def test_mistakes_of_types_alone_are_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"(?s)prefetch.*uneven_batches"):
        load_config({"prefetch": "one", "uneven_batches": 3})
