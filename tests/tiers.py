"""Tiers of tests, and the choice among them: a pytest plugin that `tests/conftest.py` loads.

    unit      no other process
    ranks     functions on pools of ranks (the fixtures `ranks`, `fresh_ranks`)
    system    files that start processes of their own: commands, kills, clusters, examples, native builds

A test's tier follows from the fixtures that it uses and from the names that its file has; nothing is marked by hand.
`--tier quick` runs the tests of `unit` that take no longer than 0.25 seconds (`tests/durations.json`) and those of the
others that `tests/quick.txt` lists, which `tests/choose_quick.py` has chosen; `--tier slow` runs those of the others
that take longer than 6 seconds: launchers, clusters, wheels, long runs; `--tier rest` runs what both leave out; the
default is everything. With `--within SECONDS` tests that would begin later are skipped, by name: a machine of any speed
ends in time, and says what it did not run.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from tests.launcher import name_coverage

QUICK_FILE = Path(__file__).with_name("quick.txt")
DURATIONS_FILE = Path(__file__).with_name("durations.json")
LEAST_SECONDS = 0.1
"""Tests below it are left out of the recorded durations."""
LONG_SECONDS = 0.25
"""Unit tests above it are left out of the quick ones."""
SLOW_SECONDS = 6.0
"""Tests above it are the slow ones."""
TIERS = ("unit", "ranks", "system")
_FIXTURES = {"ranks", "fresh_ranks"}
_STARTERS = {
    "subprocess", "multiprocessing", "run_warm", "run_warm_script", "run_local_ranks", "fork_server",
    "verify", "doctor", "build_on_host", "TorchTrainer",
}  # fmt: skip
_POOLS = {"tests.launcher", "tests.conftest"}
_DROPPED = pytest.StashKey[int]()
_BEGAN = time.monotonic()
"""Of this process, which loads the libraries next."""


def _codes(value: object) -> Iterator[CodeType]:
    """The code of a function or of a class's methods, and what is nested in it."""
    if isinstance(value, type):
        for member in vars(value).values():
            if not isinstance(member, type):
                yield from _codes(getattr(member, "__func__", member))
    code = value if isinstance(value, CodeType) else getattr(getattr(value, "__wrapped__", value), "__code__", None)
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)


def starts_processes(function: object, seen: set[int] | None = None) -> bool:
    """True if a test function names what starts processes, itself or through functions of the tests that it names."""
    seen = set() if seen is None else seen
    module = str(getattr(function, "__module__", ""))
    if id(function) in seen or not module.startswith("tests.") or module in _POOLS:
        return False
    seen.add(id(function))
    codes = list(_codes(function))
    names = {name for code in codes for name in code.co_names}
    if names & _STARTERS:
        return True
    known = vars(sys.modules[module]) if module in sys.modules else getattr(function, "__globals__", {})
    return any(starts_processes(known[name], seen) for name in names & set(known))


@functools.cache
def _starts(function: object) -> bool:
    """`starts_processes`, once for all parameters of a test."""
    return starts_processes(function)


def tier_of(item: pytest.Item) -> str:
    """The tier of a collected test."""
    fixtures: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    own = [definition.func for definitions in fixtures.values() for definition in definitions]
    if any(_starts(function) for function in (getattr(item, "function", None), *own)):
        return "system"
    return "ranks" if _FIXTURES & set(fixtures) else "unit"


class Choice:
    """The tests of `--tier quick`, and of the others the slow ones."""

    def __init__(self) -> None:
        lines = QUICK_FILE.read_text().splitlines()
        self.listed = {line for line in lines if line and not line.startswith("#")}
        seconds: dict[str, float] = json.loads(DURATIONS_FILE.read_text())
        self.long = {name for name, each in seconds.items() if each > LONG_SECONDS}
        self._slow = {name for name, each in seconds.items() if each > SLOW_SECONDS}

    def __contains__(self, item: pytest.Item) -> bool:
        return item.nodeid in self.listed or (item.nodeid not in self.long and tier_of(item) == "unit")

    def is_slow(self, item: pytest.Item) -> bool:
        """True for a slow one that is not among the quick ones."""
        return item.nodeid in self._slow and item not in self


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    choices = ["all", "quick", "rest", "slow", *TIERS]
    group.addoption("--tier", default="all", choices=choices, help="tests to run; default: all (see tests/tiers.py)")
    group.addoption("--within", type=float, metavar="SECONDS", help="skip tests that would begin later than that")
    group.addoption("--with-gpu-cases", action="store_true", help="keep them on a machine without a CUDA device")
    group.addoption("--record-durations", metavar="FILE", help="write each test's seconds, all phases, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: tier of a test, given by tests/tiers.py")
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder(Path(config.getoption("record_durations"))))
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(_WorkerCounts(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, quick = config.getoption("tier"), Choice()
    chosen, dropped, gpu = [], [], 0
    for item in items:
        tier = tier_of(item)
        item.add_marker(tier)
        if item.get_closest_marker("gpu") and not (torch.cuda.is_available() or config.getoption("with_gpu_cases")):
            gpu += 1
            dropped.append(item)
            continue
        slow = quick.is_slow(item)
        others = {"all": True, "quick": item in quick, "rest": item not in quick and not slow, "slow": slow}
        keep = others.get(wanted, tier == wanted)
        (chosen if keep else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = chosen
    config.stash[_DROPPED] = gpu


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("within")
    if within is not None and time.monotonic() - _BEGAN > within:
        pytest.skip(f"not run: the {within:.0f} seconds of --within are over")
    name_coverage(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["gpu_cases"] = session.config.stash.get(_DROPPED, 0)


class _WorkerCounts:
    """Brings the count of a worker of pytest-xdist to the process that prints the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._config.stash[_DROPPED] = getattr(node, "workeroutput", {}).get("gpu_cases", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if cases := config.stash.get(_DROPPED, 0):
        terminalreporter.write_line(f"{cases} cases need a CUDA device and were left out: this machine has none")


class DurationRecorder:
    """Writes the seconds of each test, its fixtures' included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {name: round(seconds, 2) for name, seconds in sorted(self._seconds.items()) if seconds >= LEAST_SECONDS}
        self._path.write_text(json.dumps(kept, indent=0) + "\n")
