"""The benchmark command: what it takes, what it writes, what it leaves out; what peers send. No times are asserted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import frameworks
from benchmarks.collective_counter import kind_of, sent
from benchmarks.contenders import Workload, make, missing
from benchmarks.footprint import count_sent, elements_of, table_bytes, table_elements
from benchmarks.report import document, picture, read_rows, table, write_json
from benchmarks.step import Plan, default_pairs, parse, workload_of
from benchmarks.suite import Options, Row
from tests.launcher import Launcher

ROW = Row("step", "step, zero3", "fsdp2", 1.5, 1.4, 1.6, 2.0, 3.0, "s", "a note", {"rounds": [[1.0]]})
FACTS = {
    "date": "2026-01-02",
    "machine": {"processor": "p", "cores": 2, "memory": 2**30, "system": "s"},
    "versions": {"torch": "2"},
    "command": "python -m benchmarks",
}
TINY = Workload("transformer-tiny", batch=2, length=16)


def test_help_names_every_suite_and_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in (*command.NAMES, "ddp", "fsdp2", "zero_redundancy", "deepspeed", "communication", "bf16"):
        assert name in text
    assert tuple(command.suites()) == command.NAMES


@pytest.mark.parametrize("wrong", [["--only", "steps"], ["--peers", "dpp"], ["--stages", "4"], ["--only", ","]])
def test_unknown_names_are_refused_with_the_choices(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(wrong)
    assert {"--only": "startup", "--peers": "fsdp2", "--stages": "3"}[wrong[0]] in capsys.readouterr().err


def test_what_is_given_wins_over_quick() -> None:
    chosen = command.parse(["--quick", "--stages", "2", "--peers", "ddp", "--ranks", "2,4"])
    options = command.options_of(chosen, Path("out"))
    assert (options.stages, options.rounds, options.regimes) == ((2,), 1, ("communication",))
    assert (options.peers, options.ranks, options.folder) == (("ddp",), (2, 4), Path("out/files"))
    assert command.options_of(command.parse([]), Path("out")).rounds == Options().rounds


def test_a_regime_gives_what_is_not_given() -> None:
    workload = workload_of(parse(["--regime", "communication", "--length", "64", "--precision", "bf16"]))
    assert (workload.model, workload.batch, workload.length) == ("transformer-46m", 1, 64)
    assert elements_of(workload) == pytest.approx(46e6, rel=0.01)


def test_every_peer_meets_the_stages_it_is_nearest_to() -> None:
    assert default_pairs(["ddp", "zero_redundancy", "fsdp2", "deepspeed"], [0, 1, 3]) == [
        ("zero0", "ddp"),
        ("zero1", "ddp"),
        ("zero1", "zero_redundancy"),
        ("zero1", "deepspeed1"),
        ("zero3", "fsdp2"),
        ("zero3", "deepspeed3"),
    ]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_a_peer_that_is_missing_is_skipped_by_name_with_the_way_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(peers=("ddp", "deepspeed"))
    assert options.wants("ddp") and not options.wants("fsdp2")
    assert not options.wants("deepspeed") and not options.wants("deepspeed")
    assert len(options.skipped) == 1 and "pip install deepspeed" in options.skipped[0]
    assert "skipped deepspeed" in capsys.readouterr().err
    assert missing("deepspeed3") and missing("zero3") is None


def test_rows_survive_as_json_and_read_as_a_table(tmp_path: Path) -> None:
    write_json(tmp_path / "step.json", "step", [ROW], FACTS)
    assert read_rows(tmp_path / "step.json") == [ROW]
    assert json.loads((tmp_path / "step.json").read_text())["command"] == "python -m benchmarks"
    assert "| step, zero3 | fsdp2 | 1.500 | 1.400 - 1.600 | 3 s | 2 s | a note |" in table([ROW])
    assert "Not measured: deepspeed" in document([ROW], FACTS, ["deepspeed"])
    (tmp_path / "step.json").write_text("[]")
    with pytest.raises(ValueError, match=r"step\.json is no result"):
        read_rows(tmp_path / "step.json")
    assert picture(tmp_path / "step.png", "step", []) == "picture of step: nothing was measured"


def test_collectives_are_told_by_their_ops() -> None:
    names = ["_allgather_base_", "allreduce_coalesced_", "_reduce_scatter_base_", "reduce_", "broadcast_", "recv_"]
    assert [*map(kind_of, names)] == ["all_gather", "all_reduce", "reduce_scatter", "broadcast", "broadcast", ""]
    assert sent("all_reduce", 100, 4) == 150 and sent("all_gather", 100, 4) == 75 and sent("send", 100, 4) == 100


def test_the_table_in_bytes() -> None:
    assert table_bytes(1, 100, 4, Workload()) == 100 * (8 + 8 / 4)
    assert table_bytes(3, 100, 4, Workload(precision="bf16", reduce="float32")) == 100 * 18 / 4
    assert table_bytes(0, 100, 4, Workload(precision="bf16", master=False)) == 100 * 8


def count(names: list[str]) -> dict[str, int]:
    found = {}
    for name in names:
        contender = make(name, TINY)
        for _ in range(2):
            contender.step(TINY)
        found[name] = count_sent(contender, TINY)[0]
    return found


def test_what_peers_and_ours_send_is_what_their_algorithms_need(ranks: Launcher) -> None:
    numel, world = elements_of(TINY), 2
    found = ranks(world)(count, ["ddp", "zero_redundancy", "fsdp2", "zero1", "zero3"])[0]
    reduced, gathered = (2 * numel * (world - 1) / world, numel * (world - 1) / world)
    # Padding, and single collectives that are small enough to be taken for control messages.
    assert found["ddp"] == pytest.approx(reduced, rel=0.02)
    assert found["zero_redundancy"] == pytest.approx(reduced + gathered, rel=0.02)
    assert 2.5 * gathered < found["fsdp2"] <= 3 * gathered * 1.02
    assert found["zero1"] <= 1.02 * table_elements(1, numel, world, 1)
    assert found["zero3"] <= 1.02 * table_elements(3, numel, world, 1)


def test_a_run_leaves_numbers_a_picture_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command.main(["--only", "step", "--quick", "--peers", "fsdp2", "--stages", "3", "--out", str(out)]) == 0
    report = json.loads((out / "step.json").read_text())
    assert {"date", "machine", "versions", "command", "rows"} <= set(report)
    step, parts = read_rows(out / "step.json")
    assert (step.peer, parts.peer) == ("fsdp2", "parts")
    for row in (step, parts):
        assert 0 < row.low <= row.ratio <= row.high and row.ours > 0 and row.theirs > 0
    assert "differ" not in step.note and set(parts.details["parts"]) == {"compute", "transport", "kernels"}
    assert (out / "step.png").stat().st_size > 1000
    printed = capsys.readouterr()
    assert (out / "report.md").read_text().strip() in printed.out
    assert "[step 1/1] zero3 / fsdp2, communication, fp32, 2 ranks" in printed.err


@pytest.mark.parametrize(
    ("integration", "against"), [("accelerate", "ddp"), ("lightning", "ddp"), ("lightning", "engine")]
)
def test_frameworks_train_the_same_with_either_side(ranks: Launcher, integration: str, against: str) -> None:
    plan = Plan(TINY, rounds=1, block_steps=2, warmup=1, threads=1)
    for times in ranks(2)(frameworks.measure, integration, 2, against, plan):
        assert times.loss_difference < 1e-6
        assert [len(block) for block in times.rounds[0]] == [2] * 4
