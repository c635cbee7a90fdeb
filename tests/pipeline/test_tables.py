"""Placements, what a table must be, schedules by name, and tables in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_strategy.pipeline import SCHEDULES, Action, Kind, Placement, Table, build_table, inference
from zero_strategy.pipeline.schedules import read_csv, write_csv

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        (Placement(3), [[0], [1], [2]]),
        (Placement(2, 3), [[0, 2, 4], [1, 3, 5]]),
        (Placement(3, 2, "v"), [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_placements(placement: Placement, stages: list[list[int]]) -> None:
    assert placement.stages == sum(map(len, stages))
    for rank, own in enumerate(stages):
        for chunk, stage in enumerate(own):
            assert placement.stage_of(rank, chunk) == stage
            assert (placement.rank_of(stage), placement.chunk_of(stage)) == (rank, chunk)


@pytest.mark.parametrize(
    ("ranks", "chunks", "shape", "message"),
    [(0, 1, "loop", "one rank"), (2, 3, "v", "two chunks"), (2, 1, "ring", "'ring' is unknown")],
)
def test_no_such_placement(ranks: int, chunks: int, shape: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(ranks, chunks, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([Action(F, 0)], "rank 1: of micro-batch 0 in chunk 0 there is F; a forward"),
        ([Action(F, 0), Action(I, 0)], "there is FI"),
        ([Action(F, 0), Action(B, 0), Action(W, 0)], "there is FBW"),
        ([Action(F, 0), Action(B, 0), Action(B, 0)], "B of micro-batch 0 in chunk 0 twice"),
        ([Action(F, 0), Action(B, 1)], "B of micro-batch 1 in chunk 0, but there are 1 micro-batches"),
        ([Action(F, 0, 1), Action(B, 0)], "F of micro-batch 0 in chunk 1, but"),
    ],
)
def test_what_a_row_must_have(row: list[Action], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table("mine", 1, Placement(2), ((Action(F, 0), Action(B, 0)), tuple(row)))


def test_what_a_table_must_have() -> None:
    with pytest.raises(ValueError, match="1 rows for 2 ranks"):
        Table("mine", 1, Placement(2), ((Action(F, 0), Action(B, 0)),))
    with pytest.raises(ValueError, match="at least one micro-batch"):
        Table("mine", 0, Placement(1), ((),))


def as_text(table: Table) -> list[str]:
    return [" ".join(map(str, row)).replace(".0", "") for row in table.rows]


def test_rows_of_the_schedules() -> None:
    assert as_text(build_table("gpipe", 2, 2)) == ["F0 F1 B0 B1"] * 2
    assert as_text(build_table("gpipe", 1, 2, 2)) == ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"]
    assert as_text(build_table("1f1b", 3, 3)) == ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert as_text(build_table("zb_h1", 2, 3)) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    assert as_text(build_table("interleaved_1f1b", 2, 2)) == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]
    assert as_text(build_table("zbv", 2, 1)) == ["F0 F0.1 I0.1 W0.1 I0 W0"] * 2
    assert as_text(inference(Placement(2, 2, "v"), 2)) == ["F0 F1 F0.1 F1.1", "F0 F0.1 F1 F1.1"]


def test_defaults_of_chunks() -> None:
    assert {name: build_table(name, 2, 4).chunks for name in SCHEDULES} == {
        "gpipe": 1,
        "1f1b": 1,
        "interleaved_1f1b": 2,
        "zb_h1": 1,
        "interleaved_zb": 2,
        "zbv": 2,
    }


@pytest.mark.parametrize(
    ("name", "chunks", "message"),
    [
        ("1f1b", 2, "1f1b has 1 chunk per rank, not 2; interleaved_1f1b is for 2"),
        ("zb_h1", 2, "zb_h1 has 1 chunk per rank, not 2; interleaved_zb is for 2"),
        ("interleaved_1f1b", 1, "interleaved_1f1b has 2 or more chunks per rank, not 1; 1f1b is for 1"),
        ("interleaved_zb", 1, "2 or more chunks per rank, not 1; zb_h1"),
        ("zbv", 3, "zbv has 2 chunks per rank, not 3; interleaved_zb is for 3"),
        ("gpipe", 0, "gpipe has 1 or more chunks per rank, not 0$"),
        ("dualpipe", 2, "'dualpipe' is unknown; there are gpipe, 1f1b, .*zbv, and csv:PATH"),
    ],
)
def test_tables_no_such_schedule(name: str, chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_table(name, 2, 4, chunks)


def test_no_stages() -> None:
    with pytest.raises(ValueError, match="0 stages and 4 micro-batches"):
        build_table("gpipe", 0, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_file_holds_a_table(name: str, tmp_path: Path) -> None:
    table = build_table(name, 3, 5)
    write_csv(table, tmp_path / "table.csv")
    found = build_table(f"csv:{tmp_path / 'table.csv'}", 3, 5)
    assert found.rows == table.rows and found.placement == table.placement
    with pytest.raises(ValueError, match="the file is for micro_batches = 5, but the run has 4"):
        build_table(f"csv:{tmp_path / 'table.csv'}", 3, 4)


def test_files_that_torch_writes(tmp_path: Path) -> None:
    # As ScheduleInterleaved1F1B writes 2 ranks, 2 chunks, 2 micro-batches: idle slots are empty cells.
    lines = ["0F0,0F1,2F0,2F1,,2B0,,2B1,,0B0,,0B1", ",1F0,1F1,3F0,3B0,3F1,3B1,,1B0,,1B1"]
    (tmp_path / "torch.csv").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    assert read_csv(tmp_path / "torch.csv").rows == build_table("interleaved_1f1b", 2, 2).rows


def test_torch_reads_our_files(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action

    table = build_table("zbv", 2, 3)
    write_csv(table, tmp_path / "table.csv")
    for rank, line in enumerate((tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()):
        found = [_Action.from_str(cell) for cell in line.split(",")]
        assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in found if a is not None] == [
            (table.placement.stage_of(rank, a.chunk), a.kind.value, a.micro_batch) for a in table.rows[rank]
        ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no actions in this file"),
        ("0F0,0B0\n1SEND_F0,1F0,1B0", r"line 2: '1SEND_F0' is no action; .* such as 2F0"),
        ("0F0,0B0\n2F0,2B0", r"rank 1: \[2\]\) are neither in a loop"),
        ("0F0,0B0\n\n1F0,1B0", "line 2 has no actions"),
        ("0F0,0B0,0F2,0B2", "of micro-batch 1 in chunk 0 there is nothing"),
    ],
)
def test_files_without_a_table(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        read_csv(tmp_path / "bad.csv")
    assert "bad.csv" in str(caught.value)
