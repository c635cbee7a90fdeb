"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded, here and in the server of which ranks are descendants.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Native ops are built once for this checkout, and leave the user's own cache alone.
os.environ.setdefault("ZERO_STRATEGY_CACHE", str(Path(__file__).resolve().parent.parent / ".ops_cache"))

import hypothesis
import pytest
import torch

from tests.launcher import Launcher
from tests.permanent import PermanentObjects

# Hundreds of processes load the package: what compiles it for all of them is this one, whatever the environment says.
sys.dont_write_bytecode = False

# A slow machine is no failure, and a failure must be repeatable.
hypothesis.settings.register_profile("default-here", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default-here")


pytest_plugins = ["tests.tiers"]
PERMANENT = pytest.StashKey[PermanentObjects]()


def pytest_configure() -> None:
    # Results that are compared bit by bit with those of the ranks need the ranks' number of threads.
    torch.set_num_threads(1)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """No look at all objects while all libraries are loaded, nor at those of the libraries ever after.

    Each would take half a second, and many tests ask for several.
    """
    gc.disable()
    yield
    gc.enable()
    gc.collect()
    session.config.stash[PERMANENT] = PermanentObjects()


@pytest.hookimpl(trylast=True)  # after fixtures have ended what they began
def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.config.stash[PERMANENT].restore()
    if torch.distributed.is_initialized():  # a framework's, which lasts as long as the process
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Launcher]:
    """``run = ranks(2)``, then ``results = run(function, *args)``: see :mod:`tests.launcher`."""
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Launcher]:
    """The same in processes that no other test has used, for what counts their threads."""
    launcher = Launcher()
    yield launcher
    launcher.close()
