"""Kills training runs at random moments, half of them inside a save, and looks at what is left.

    python -m tests.torture --rounds 200 --seed 0

A round trains on 1 or 2 ranks at a stage from 1 to 3, saves every other step, in foreground and background by turns,
and loses one rank or all of them to SIGKILL, once or twice. After each kill
- every checkpoint that can be seen is whole and has the bytes that an undisturbed save in the foreground writes; none
  is lost that was there, or whose save had returned;
- the next run takes the newest one, and from there on has the losses, weights and optimizer state, bit by bit, of a run
  that was never disturbed and never saved.
At the end nothing is left of the saves that were cut off, nor of state that was kept in files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tests.checkpoint.killable import Script, Shape, entries, fork, reap, serve_store, train
from zero_strategy import ops
from zero_strategy.checkpoint import LATEST_NAME, MANIFEST_NAME, Manifest
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.offload.file_queues import load_library

SUMMARY = "Kills training runs at random moments, half of them inside a save, and looks at what is left."
SHAPES = [
    *(Shape(world, stage) for world, stage in ((2, 1), (2, 2), (2, 3), (2, 3), (1, 1), (1, 3))),
    *(Shape(world, stage, in_files=True) for world, stage in ((2, 3), (2, 2), (1, 3))),
]
RUN_SECONDS = 60.0
Steps = dict[tuple[int, int], tuple[str, str]]
"""(rank, step) -> loss and digest."""
Contents = dict[str, str]
"""Name of a checkpoint -> checksums of its tensors."""


@dataclass(frozen=True)
class Kill:
    """Time and victim of a kill.

    Attributes:
        save: Count of the save at whose beginning the clock starts; None for the beginning of the training.
        delay: Seconds from then on, as a part of the time that a save (or a whole run) takes.
        victim: A rank; None for all.
    """

    save: int | None
    delay: float
    victim: int | None


@dataclass(frozen=True)
class Left:
    """Remains of a run: steps of the newest complete checkpoint and of the one that `latest` names."""

    newest: int = 0
    named: int = 0


@dataclass
class Tally:
    """Result of the rounds."""

    kills: int = 0
    inside: int = 0
    """Kills while a temporary directory was there."""
    single: int = 0
    """Kills of one rank of several."""
    stuck: int = 0
    """Survivors that had to be killed, since they did not end by themselves or by SIGTERM."""
    behind: int = 0
    """Resumes from the checkpoint before the newest, since `latest` had not been renewed."""
    resumed: int = 0
    """Runs that began from a checkpoint."""
    save_seconds: list[float] = field(default_factory=lambda: [0.02])
    run_seconds: list[float] = field(default_factory=lambda: [0.5])

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.inside} of them inside a save, {self.single} of one rank of two; "
            f"{self.resumed} resumed from a checkpoint, {self.behind} of them from the one before the newest, "
            f"{self.stuck} survivors stuck; a save {1e3 * statistics.median(self.save_seconds):.0f} ms, "
            f"a run {statistics.median(self.run_seconds):.2f} s"
        )


class Torture:
    """Rounds of kills in a folder.

    Args:
        folder: For everything.
        seed: Of all random choices; the moments themselves also depend on the machine.
    """

    def __init__(self, folder: Path, seed: int, script: Script | None = None) -> None:
        self.folder, self.script = folder, script or Script()
        self.tally = Tally()
        self._draw = random.Random(seed)
        self._references: dict[Shape, tuple[Steps, Contents]] = {}
        self._runs = 0
        self._store, self._port = serve_store(folder)

    def close(self) -> None:
        os.kill(self._store, signal.SIGKILL)
        os.waitpid(self._store, 0)

    def round(self) -> None:
        """One run that is killed once or twice and resumed to its end.

        Raises:
            AssertionError: if anything is not as it must be; the round's files stay.
        """
        shape = self._draw.choice(SHAPES)
        expected, contents = self._reference(shape)
        place = self.folder / f"round-{self._runs}"
        saves = place / "saves"
        saves.mkdir(parents=True)
        left = Left()
        for kill in (*(self._kill(shape) for _ in range(self._draw.choice((1, 1, 2)))), None):
            journals = self._run(shape, self.script, place, kill)
            self._check_run(journals, expected, left)
            left = _look(saves, journals, left, contents)
        missing = [journal for journal in journals if not entries(journal, "done")]
        assert not missing, f"did not reach the end: {missing}"
        if entries(journals[0], "saving"):  # what an earlier run did not come to, the next save does
            names = sorted(path.name for path in saves.iterdir())
            assert not [name for name in names if name.startswith(".")], f"left over in {saves}: {names}"
            assert len(_visible(saves)) <= self.script.keep_last, f"too many in {saves}: {names}"
        state = place / "state"
        assert not state.exists() or not list(state.iterdir()), f"state was left over in {state}"
        began, ended = entries(journals[0], "resumed")[0], entries(journals[0], "done")[0]
        if began["resumed"] == 0:
            self.tally.run_seconds.append(ended["time"] - began["time"])
        shutil.rmtree(place)

    def _reference(self, shape: Shape) -> tuple[Steps, Contents]:
        """Results of undisturbed runs of a shape: one that never saves, and one that saves in the foreground."""
        if shape not in self._references:
            number = len(self._references)
            plain, saving = (self.folder / f"{name}-{number}" for name in ("plain", "saving"))
            for place in (plain, saving):
                (place / "saves").mkdir(parents=True)
            steps = _steps(self._run(shape, replace(self.script, every=0), plain, None))
            assert len(steps) == shape.world * self.script.steps, f"a run that nobody disturbed failed: {plain}"
            self._run(shape, replace(self.script, keep_last=0, background=False), saving, None)
            contents = {path: _content(saving / "saves" / path) for path in _visible(saving / "saves")}
            assert len(contents) == self.script.steps // self.script.every, saving
            self._references[shape] = steps, contents
        return self._references[shape]

    def _kill(self, shape: Shape) -> Kill:
        save = None
        if self.tally.inside * 2 <= self.tally.kills:
            save = self._draw.randint(1, self.script.steps // self.script.every)
        victim = self._draw.choice((None, *range(shape.world)))
        return Kill(save, self._draw.random(), victim)

    def _run(self, shape: Shape, script: Script, place: Path, kill: Kill | None) -> list[Path]:
        """Starts the ranks, waits until they end or kills them; returns their journals."""
        self._runs += 1
        run = f"run-{self._runs}"
        journals = [place / f"{run}-{rank}.jsonl" for rank in range(shape.world)]
        pids = [
            fork(
                partial(train, shape, script, rank, place / "saves", self._port, run, journals[rank]),
                place / f"{run}-{rank}.log",
            )
            for rank in range(shape.world)
        ]
        if kill is None:
            stuck = reap(pids, RUN_SECONDS)
            _end(stuck)
            assert not stuck, f"{place}: a run that nobody killed did not end"
            return journals
        if self._wait_for(kill, place / "saves", journals[0], pids):
            self._strike(kill, pids, place / "saves")
        return journals

    def _wait_for(self, kill: Kill, saves: Path, journal: Path, pids: list[int]) -> bool:
        """Until the moment to kill; False if the run ended before."""
        seconds = self.tally.run_seconds if kill.save is None else self.tally.save_seconds
        median = statistics.median(seconds[-20:])  # of late: the machine may be busier or idler than it was
        begun = _training(journal) if kill.save is None else _saving(saves, kill.save)
        end = time.monotonic() + RUN_SECONDS
        while not begun():
            if _ended(pids) or time.monotonic() > end:
                left = reap(pids, 0.1)
                _end(left)
                assert not left, f"{journal}: the run did not end"
                return False
        time.sleep(kill.delay * median)
        return True

    def _strike(self, kill: Kill, pids: list[int], saves: Path) -> None:
        self.tally.kills += 1
        self.tally.inside += bool(_temporary(saves))
        for rank, pid in enumerate(pids):
            if kill.victim in (None, rank):
                os.kill(pid, signal.SIGKILL)
        survivors = reap(pids, 1.0)
        self.tally.single += kill.victim is not None and len(pids) > 1
        for pid in survivors:
            os.kill(pid, signal.SIGTERM)
        stuck = reap(survivors, 2.0)
        self.tally.stuck += len(stuck)
        _end(stuck)

    def _check_run(self, journals: list[Path], expected: Steps, left: Left) -> None:
        """The run began where it had to, and did what the undisturbed one did."""
        for rank, journal in enumerate(journals):
            for entry in entries(journal, "resumed"):
                step = entry["resumed"]
                assert step in (left.newest, left.named), f"{journal}: resumed from {step}, there was {left}"
                assert not entry.get("problems"), (journal, entry)
                assert step == 0 or entry["digest"] == expected[rank, step][1], f"{journal}: other weights at {step}"
        starts = {entry["resumed"] for journal in journals for entry in entries(journal, "resumed")}
        assert len(starts) <= 1, f"{journals[0].parent}: ranks resumed from different steps {starts}"
        self.tally.behind += starts == {left.named} != {left.newest}
        self.tally.resumed += bool(starts - {0})
        different = [key for key, value in _steps(journals).items() if value != expected[key]]
        assert not different, f"{journals[0]}: (rank, step) unlike the undisturbed run: {different}"
        times = {entry["saving"]: entry["time"] for entry in entries(journals[0], "saving")}
        for entry in entries(journals[0], "saved"):
            if not entry["background"]:
                self.tally.save_seconds.append(entry["time"] - times[entry["saved"]])


def _look(saves: Path, journals: list[Path], before: Left, contents: Contents) -> Left:
    """Remains of a run: all that can be seen is whole, and nothing is lost that was there or was said to be."""
    names = _visible(saves)
    for name in names:
        assert not (problems := verify(saves / name).problems), problems
        assert _content(saves / name) == contents[name], f"{saves / name}: not what a save in the foreground writes"
    steps = [int(name.removeprefix("step-")) for name in names]
    newest = max(steps, default=0)
    said = max((entry["saved"] for entry in entries(journals[0], "saved")), default=0)
    assert newest >= max(said, before.newest), f"{saves}: {sorted(steps)}, after {before} and a save of {said}"
    latest = saves / LATEST_NAME
    named = int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0
    return Left(newest, named if named in steps else newest)


def _visible(saves: Path) -> list[str]:
    """The names that a user would take for checkpoints."""
    return [path.name for path in saves.glob("step-*") if (path / MANIFEST_NAME).exists()]


def _content(directory: Path) -> str:
    return json.dumps(Manifest.read(directory).checksums.to_json()["tensors"])


def _steps(journals: list[Path]) -> Steps:
    return {
        (rank, entry["step"]): (entry["loss"], entry["digest"])
        for rank, journal in enumerate(journals)
        for entry in entries(journal, "step")
    }


def _training(journal: Path) -> Callable[[], bool]:
    """True if the run has begun."""

    def begun() -> bool:
        time.sleep(0.002)
        return bool(entries(journal, "resumed"))

    return begun


def _saving(saves: Path, number: int) -> Callable[[], bool]:
    """True if the save of this number, counted from 1, has begun."""
    seen = set(_temporary(saves))
    number += len(seen)

    def begun() -> bool:
        time.sleep(0.0005)
        seen.update(_temporary(saves))
        return len(seen) >= number

    return begun


def _temporary(saves: Path) -> list[str]:
    with os.scandir(saves) as found:
        return [entry.name for entry in found if entry.name.startswith(".") and entry.is_dir()]


def _ended(pids: list[int]) -> bool:
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return all(os.waitid(os.P_PID, pid, look) is not None for pid in pids)


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=SUMMARY)
    parser.add_argument("--rounds", type=int, default=200, help="kills; a round goes on until this many are done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the checkpoints; what fails stays there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("ZERO_STRATEGY_CACHE", str(Path(__file__).resolve().parent.parent / ".ops_cache"))
    ops.ensure("cpu")  # loaded once, for all forks
    load_library()
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=options.folder))
    torture = Torture(folder, options.seed)
    try:
        while torture.tally.kills < options.rounds:
            torture.round()
            print(f"\r{torture.tally}", end="" if sys.stdout.isatty() else "\n", flush=True)
    except AssertionError as error:
        sys.exit(f"\n{error}\nseed {options.seed}; see {folder}")
    finally:
        torture.close()
    print(f"\nnothing lost: {torture.tally}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
