"""Commands with wrong arguments: exit status 2 (or what the command says), one sentence, no traceback."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attack.rows import SECONDS, Attempt, outcome
from zero_strategy.cli import main

_CONTROLS = {chr(code) for code in (*range(32), 127, *range(128, 160))} - {"\n"}
_RANKS_SECONDS = 240.0
"""Of a command that starts processes, each of which imports torch."""


@dataclass(frozen=True)
class Found:
    """Result of a command.

    Attributes:
        status: Its exit status; None where it ended in an exception.
        text: What it printed on both streams.
        wrong: Words for what no command may do.
    """

    status: int | None
    text: str
    wrong: str


def run(arguments: Sequence[str]) -> Found:
    """Runs a command in this process."""
    out = io.StringIO()

    def command() -> int:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                return main(list(arguments))
            except SystemExit as end:  # argparse's
                return end.code if isinstance(end.code, int) else 0 if end.code is None else 1

    found = outcome(command, _RANKS_SECONDS if arguments[:1] == ["verify"] else SECONDS)
    text = out.getvalue()
    wrong = ""
    if found.error is not None:
        wrong = f"ended in {found}"
    elif "Traceback (most recent call last)" in text:
        wrong = "printed a traceback"
    elif bad := sorted(_CONTROLS & set(text)):
        wrong = f"printed {bad!r}"
    elif any(line.startswith("INFO all") for line in text.splitlines()):
        wrong = "printed a forged line"
    return Found(found.value if found.error is None else None, text, wrong)


COMMANDS = (
    "checkpoint inspect {}", "checkpoint inspect {} --tensors {}", "checkpoint verify {}", "checkpoint diff {} {}",
    "checkpoint convert {} {}", "checkpoint convert {} {} --to {}", "checkpoint convert {} {} --from {}",
    "checkpoint convert {} {} --names {}", "checkpoint convert {} {} --tag {}",
    "checkpoint average {} {} --to {}", "checkpoint merge {} --output {}", "checkpoint prune {} --keep-last {}",
    "config explain {}", "config convert {}", "plan {}", "plan {} --config {}", "report {}", "trace {}",
    "schedule show {}", "schedule show --schedule {}", "schedule show --schedule csv:{}", "{}", "{} {}",
    "checkpoint {}", "verify {}",
)  # fmt: skip


def fuzz(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Every command with arguments that are nothing of the kind."""
    (folder / "directory").mkdir()
    (folder / "empty").touch()
    (folder / "noise").write_bytes(draw.randbytes(4096))
    (folder / "text.yaml").write_text("no: [such, thing]\n")
    (folder / "text.json").write_text('{"no": "such thing"}')
    (folder / "run").mkdir()
    (folder / "run/steps-0.jsonl").write_text("[" * 5000 + "\n")
    os.mkfifo(folder / "pipe")
    (folder / "circle").symlink_to("circle")
    own = [str(folder / each.name) for each in sorted(folder.iterdir())]
    own += [str(folder / "none"), str(folder / "a\x1b[31m\nINFO all"), str(folder / ("l" * 300)), "", "-1", "x" * 5000]
    own += [
        "/dev/null",
        "s3://",
        "file://",
        "nosuch://a/b",
        "http://127.0.0.1:1/x",
        "\udc80",
        "*",
        "a:b",
        "nosuch:thing",
    ]
    before = os.getcwd()
    os.chdir(folder / "directory")
    try:
        for command in COMMANDS:
            for _ in range(3 * rounds):
                arguments = [draw.choice(own) if part == "{}" else part for part in command.split()]
                arguments = [part.replace("{}", str(folder / "noise")) for part in arguments]
                found = run(arguments)
                wrong = found.wrong or ("" if found.status in (0, 1, 2) else f"exit status {found.status}")
                if not wrong and found.status == 2 and not found.text.strip():
                    wrong = "said nothing"
                yield Attempt(" ".join(arguments)[:200], wrong)
    finally:
        os.chdir(before)
        sys.stdout.flush()
