"""Journals of whole runs: equal on any ranks, bounded, resumed, damaged; replays from checkpoints; the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.launcher import Launcher
from tests.replay.runs import Fault, Run, factory, optimizer_for, train, train_all
from tests.reproducible.training import tokens_of
from zero_strategy.cli import main
from zero_strategy.diagnostics.journal_file import MOST_BYTES, read_sessions
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.replay import bisect, replay
from zero_strategy.replay.run_journal import read_run_journal

PLACE = f"{Path(__file__).with_name('runs.py')}:factory"
HSDP = {"stage": 2, "mesh": {"replicate": 2}}


def test_journals_of_any_ranks_and_stages_are_equal(ranks: Launcher, tmp_path: Path) -> None:
    """Also of each step's weights, and of all elements of outputs."""
    every = {"journal_weights_every_n_steps": 1, "journal_elements": 0}
    first = tmp_path / "1-0"
    for world in (1, 2, 3, 4):
        configs = {"0": {"stage": 0}, "1": {"stage": 1}, "3": {"stage": 3}} | ({"r": HSDP} if world == 4 else {})
        runs = [
            Run(tmp_path / f"{world}-{name}", config=config, slots=12, steps=2, settings=every)
            for name, config in configs.items()
        ]
        ranks(world)(train_all, runs)
        for run in runs:
            report = bisect(first, run.directory)
            assert report.equal and report.compared == 2, (run, str(report))
    view, other = read_run_journal(first).view(1), read_run_journal(tmp_path / "4-3").view(1)
    assert view.weights is not None and other.weights is not None and view.weights_before is not None
    assert len(other.gradients) == 1 and len(other.gradients[0]) == 4
    assert len(read_run_journal(tmp_path / "4-r").view(1).gradients) == 2
    assert len(read_run_journal(tmp_path / "4-0").view(1).gradients) == 4


def test_a_fault_of_one_replica_is_told_from_the_run_of_another_stage(ranks: Launcher, tmp_path: Path) -> None:
    """Three of four copies of a gradient are those of the other run, so the fourth is the wrong one."""
    fault = Fault("race", 1, unit="blocks.1", rank=2)
    ranks(4)(train_all, [Run(tmp_path / "a", fault, {"stage": 0})])
    ranks(2)(train_all, [Run(tmp_path / "b")])
    for pair, sides in ((("a", "b"), ((2,), ())), (("b", "a"), ((), (2,)))):
        found = bisect(*(tmp_path / name for name in pair)).difference
        assert found is not None and (found.step, found.kind, found.unit) == (1, "race", "blocks.1")
        assert (found.ranks, found.other_ranks) == sides


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(45))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def deep(directory: Path, slots: int, weight: float = 0.0) -> None:
    torch.manual_seed(0)
    model = Deep()
    diagnostics = {"run_dir": str(directory), "journal_weights_every_n_steps": 1, "flops": False}
    config = {"stage": 2, "reproducible": slots, "diagnostics": diagnostics, "units": {"min_numel": 1}}
    with ZeroEngine(model, config) as engine:
        install_diagnostics(engine)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine.attach(optimizer)
        for _ in range(2):
            for number in range(engine.slots.count):
                with engine.micro_batch():
                    x = torch.full((2, 4), float(number))
                    x[0, 0] += weight * (number == 20)
                    model(x).backward()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_takes_a_kilobyte_at_most_whatever_the_units_and_slots(tmp_path: Path) -> None:
    """Units and slots are folded then, and a difference names those that are recorded together."""
    sizes = {}
    for slots in (8, 40):
        deep(tmp_path / f"{slots}", slots)
        path = tmp_path / f"{slots}" / "journal-0.bin"
        (session,) = read_sessions(path)
        header = len(json.dumps(dict(session.header), separators=(",", ":")))
        sizes[slots] = (path.stat().st_size - header) / 2
        assert sizes[slots] <= MOST_BYTES * 1.5  # the weights of the beginning besides
        units = [unit for line in session.header["lines"] for unit in line["units"]]
        assert len(units) == len(set(units)) == 46 and session.header["lines"][0]["units"] == [""]
        assert len(session.steps[0].slots) <= 16
    deep(tmp_path / "other", 40, weight=1.0)
    found = bisect(tmp_path / "40", tmp_path / "other").difference
    assert found is not None and (found.step, found.kind, found.slot) == (0, "data", "slots 18 to 20")


def test_a_resumed_run_goes_on_in_its_journal(ranks: Launcher, tmp_path: Path) -> None:
    """At another number of ranks, from before what was recorded already: steps that were taken again count once."""
    run = tmp_path / "run"
    ranks(4)(train_all, [Run(run, steps=4, save=2)])
    ranks(2)(train_all, [Run(run, steps=3, resume=run / "after-2")])
    ranks(1)(train_all, [Run(tmp_path / "whole", steps=4)])
    journal = read_run_journal(run)
    assert journal.steps == [0, 1, 2]  # step 3 was of a course that was given up
    assert [len(journal.session(step).ranks) for step in journal.steps] == [4, 4, 2]
    assert bisect(run, tmp_path / "whole").equal
    report = replay(run, 2, factory)
    assert report.equal and report.start == 2 and report.checkpoint == str(run / "after-2")
    shutil.rmtree(run / "after-2")
    report = replay(run, 2, factory)  # over both sessions
    assert report.equal and report.start == 0 and report.checkpoint is None


def test_a_replay_takes_a_schedule_from_the_journal(tmp_path: Path) -> None:
    train(Run(tmp_path, scheduled=True, save=1))
    assert replay(tmp_path, 2, factory).equal
    found = replay(tmp_path, 2, lambda: (factory()[0], lambda m: optimizer_for(m, 0.02), *factory()[2:]))
    assert found.equal  # the rate, and the first rate, are the checkpoint's
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert replay(tmp_path, 2, factory, checkpoints=nothing).equal


def test_records_that_are_cut_off_are_ignored_and_damage_is_named(tmp_path: Path) -> None:
    train(Run(tmp_path / "whole"))
    path = tmp_path / "whole" / "journal-0.bin"
    content = path.read_bytes()
    torn = tmp_path / "torn"
    torn.mkdir()
    for cut in (1, 9, 30, 200):
        (torn / path.name).write_bytes(content[:-cut])
        assert read_run_journal(torn).steps == [0, 1]
    train(Run(torn))  # it begins anew, in the same file
    assert read_run_journal(torn).steps == [0, 1, 2] and len(read_sessions(torn / path.name)) == 2
    assert bisect(torn, tmp_path / "whole").equal

    middle = len(content) - 700
    (torn / path.name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(ValueError, match=r"journal-0.bin, byte \d+: damaged"):
        read_run_journal(torn)
    (torn / path.name).write_bytes(b"something else" * 9)
    with pytest.raises(ValueError, match="byte 0: damaged: no record of a journal"):
        read_run_journal(torn)


def test_missing_journals_other_slots_and_missing_steps_are_named(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(train_all, [Run(tmp_path / "two"), Run(tmp_path / "eight", slots=8, steps=1)])
    with pytest.raises(ValueError, match=r"reproducible.slots is 4 in .*two and 8 in .*eight"):
        bisect(tmp_path / "two", tmp_path / "eight")
    with pytest.raises(ValueError, match="has no step 7; it has steps 0 to 2, counted from 0"):
        replay(tmp_path / "two", 7, factory)
    with pytest.raises(ValueError, match=r"holds no journal \(journal-RANK.bin\)"):
        bisect(tmp_path, tmp_path / "two")
    with pytest.raises(ValueError, match="give a factory"):
        replay(tmp_path / "two", 1)
    (tmp_path / "two" / "journal-1.bin").unlink()
    with pytest.raises(ValueError, match=r"the journal of rank 1 is missing \(journal-1.bin\)"):
        bisect(tmp_path / "two", tmp_path / "eight")
    (tmp_path / "eight" / "journal-0.bin").unlink()
    with pytest.raises(ValueError, match=r"journal-0\.bin is missing"):
        bisect(tmp_path / "eight", tmp_path / "two")


def test_the_replay_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"journal_factory": PLACE}
    train(Run(tmp_path / "a", settings=named))
    train(Run(tmp_path / "b", Fault("data", 1, 2), {"stage": 1}, settings=named))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["replay", a, "--bisect", a]) == 0
    assert "EQUAL" in capsys.readouterr().out
    assert main(["replay", a, "--bisect", b]) == 1
    said = capsys.readouterr().out
    assert "DIFFERENT from step 1, slot 2, on rank 0: data: " in said and "config.stage: 3 and 1" in said
    assert main(["replay", a, "--step", "2"]) == 0
    assert "EQUAL up to step 2" in capsys.readouterr().out
    assert main(["replay", b, "--step", "2", "--factory", PLACE, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["difference"]["kind"] == "data" and report["stopped"] == 1 and not report["equal"]
    for arguments in (["--step", "9"], ["--step", "1", "--factory", "nowhere.py:factory"], ["--bisect", "nowhere"]):
        assert main(["replay", a, *arguments]) == 2
        assert capsys.readouterr().err
    assert main(["replay", a, "--bisect", "nowhere", "--json"]) == 2
    assert "journal" in json.loads(capsys.readouterr().out)["error"]


def test_a_replay_takes_batches_of_any_form(tmp_path: Path) -> None:
    train(Run(tmp_path, steps=2))
    every = {(step, slot): tokens_of(step, slot) for step in range(2) for slot in range(4)}

    class Loader:
        def __iter__(self) -> object:
            return iter(every.values())

    model, optimizer, _, loss = factory()
    for batches in (every, list(every.values()), Loader()):
        again = factory()[0]
        assert replay(tmp_path, 1, lambda: (again, optimizer, batches, loss)).equal  # noqa: B023
    with pytest.raises(ValueError, match=r"have no \(0, 1\)"):
        replay(tmp_path, 1, lambda: (model, optimizer, {(0, 0): every[0, 0]}, loss))
    with pytest.raises(ValueError, match="the factory returned"):
        replay(tmp_path, 1, lambda: None)


def test_without_slots_or_with_the_setting_off_there_is_no_journal(tmp_path: Path) -> None:
    train(Run(tmp_path / "off", steps=1, settings={"journal": False}))
    assert not list((tmp_path / "off").glob("journal-*"))
