"""A pytest plugin that writes one line of JSON per test: its outcome, its error, and if the class under test was made.

The file's path is in the environment variable OUTCOMES. Plugins that put our class under another name call `used`.
"""

from __future__ import annotations

import json
import os
from typing import Any


class Recorder:
    """Follows the test that runs."""

    def __init__(self, path: str) -> None:
        self._path, self.now, self.made = path, "", set[str]()

    def write(self, report: Any) -> None:
        """Note the outcome of a test, or of its setup or teardown where they fail or skip."""
        if report.when != "call" and report.outcome == "passed":
            return
        error = report.longrepr
        crash = getattr(error, "reprcrash", None)
        if report.failed:
            words = crash.message if crash is not None else str(error)[-600:]
        else:
            words = str(error[-1]) if isinstance(error, tuple) else ""
        entry = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "words": words[:600]}
        with open(self._path, "a", encoding="utf-8") as file:
            made = report.nodeid in self.made
            file.write(json.dumps({**entry, "ours": made, "seconds": round(report.duration, 1)}) + "\n")

    def write_failed_file(self, report: Any) -> None:
        """Note a file that cannot be imported, with the last line of its error."""
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E")]
        entry = {"test": report.nodeid, "when": "collect", "outcome": "failed", "words": "\n".join(lines)[-600:]}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "ours": False, "seconds": 0.0}) + "\n")


RECORDER = Recorder(os.environ.get("OUTCOMES", os.devnull))
"""One per process, as pytest's hooks are functions of a module."""


def used() -> None:
    """Note that the test that runs has made the class under test."""
    RECORDER.made.add(RECORDER.now)


def pytest_runtest_setup(item: Any) -> None:
    """A test begins."""
    RECORDER.now = item.nodeid


def pytest_runtest_logreport(report: Any) -> None:
    """A phase of a test ended."""
    RECORDER.write(report)


def pytest_collectreport(report: Any) -> None:
    """A file was read; note those that cannot be imported."""
    if report.failed:
        RECORDER.write_failed_file(report)
