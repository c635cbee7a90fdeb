"""`zero-strategy checkpoint diff` of two folders: the first step at which two runs differ, and how little is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fsspec")

from tests.checkpoint.object_store import register
from tests.checkpoint.piece_saving import remote
from tests.checkpoint.piece_saving import save as save_pieces
from tests.checkpoint.saving import save
from tests.cli.test_diff import Diff, diff
from zero_strategy.cli import diff_runs

__all__ = ["diff"]
STEPS = range(1, 9)


def weights(step: int, *, off: bool = False) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(40.0).view(8, 5) + step + off, "v": torch.full((3,), float(step))}


def write(folder: Path, step: int, *, off: bool = False, world_size: int = 2, **manifest: Any) -> None:
    described = {"world_size": world_size, "counters": {"global_steps": step}, **manifest}
    save(folder / f"step{step}", weights(step, off=off), world_size=world_size, manifest=described)


def run(folder: Path, off: set[int], world_size: int = 2, steps: range = STEPS) -> Path:
    for step in steps:
        write(folder, step, off=step in off, world_size=world_size)
    return folder


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("first", [1, 2, 5, 8, None])
def test_the_first_step_that_differs(tmp_path: Path, diff: Diff, world_size: int, first: int | None) -> None:
    a = run(tmp_path / "a", set())
    b = run(tmp_path / "b", set() if first is None else set(range(first, 9)), world_size)
    status, found, text = diff(a, b)
    before = None if first in (1, None) else first - 1
    assert status == (first is not None) and found["steps"] == list(STEPS)
    assert (found["first"], found["first_of_tensors"], found["before"]) == (first, first, before)
    if world_size == 2:  # checksums of the same blocks tell
        assert set(found["read"]) == {step for step in (first, before) if step}
    elif first is not None:
        assert len(found["read"]) <= 5
    if first is None:
        assert "The runs are equal at all 8 steps that both have." in text
    elif first == 1:
        assert "The runs differ from the first step that both have, 1." in text
    else:
        assert f"The runs are equal at step {before} and differ at step {first}." in text
        assert f"At step {first}:" in text and "w: 40 of 40 elements differ" in text


def test_everything_from_the_first_step_on(tmp_path: Path, diff: Diff) -> None:
    for folder, off in (("a", 0), ("b", 1)):
        for step in STEPS:
            given = {name: tensor + off for name, tensor in weights(step).items()}
            save(tmp_path / folder / str(step), given, manifest={"counters": {"global_steps": step}})
    _, found, text = diff(tmp_path / "a", tmp_path / "b")
    sentence = (
        "Everything differs from the first common step on (2 of 2 tensors): other data, another seed or settings."
    )
    assert found["at_first"]["conclusion"] == sentence and sentence in text


@pytest.mark.parametrize(
    ("off", "by_reading"), [({5}, 5), ({3, 4, 8}, 3), ({2, 5, 6, 7, 8}, 5)], ids=["once", "at times", "twice"]
)
def test_differences_that_do_not_persist(tmp_path: Path, diff: Diff, off: set[int], by_reading: int) -> None:
    """Checksums of the same slices tell of each step; reading takes it that two runs that differ go on to differ."""
    a = run(tmp_path / "a", set())
    for folder, world_size, first in (("b", 2, min(off)), ("c", 3, by_reading)):
        _, found, _ = diff(a, run(tmp_path / folder, off, world_size))
        assert (found["first"], found["before"]) == (first, first - 1)


def test_records_alone_and_tensors_later(tmp_path: Path, diff: Diff) -> None:
    def groups(lr: float) -> dict[str, Any]:
        return {"param_groups": {"0": [{"lr": lr, "params": ["w"]}]}}

    for step in STEPS:
        write(tmp_path / "a", step, **groups(0.1))
        write(tmp_path / "b", step, off=step > 6, **groups(0.1 if step < 3 else 0.2))
    _, found, text = diff(tmp_path / "a", tmp_path / "b")
    assert (found["first"], found["before"], found["first_of_tensors"]) == (3, 2, 7)
    assert "in records beside the tensors; tensors differ from step 7 on." in text
    assert "optimizer 0 group 0: lr is 0.1 in A and 0.2 in B" in text
    assert diff(tmp_path / "a", tmp_path / "b", "--weights-only")[1]["first"] == 7


def test_a_tolerance_is_that_of_all_steps(tmp_path: Path, diff: Diff) -> None:
    for step in range(1, 4):
        given = weights(step)
        save(tmp_path / "a" / f"{step}", given, manifest={"counters": {"global_steps": step}})
        given["w"] = torch.nextafter(given["w"], given["w"] + 1) if step < 3 else given["w"] * 2
        save(tmp_path / "b" / f"{step}", given, manifest={"counters": {"global_steps": step}})
    assert diff(tmp_path / "a", tmp_path / "b")[1]["first"] == 1
    _, found, _ = diff(tmp_path / "a", tmp_path / "b", "--tolerance", 1)
    assert (found["first"], found["before"]) == (3, 2)


def test_steps_that_one_run_lacks(tmp_path: Path, diff: Diff) -> None:
    a, b = run(tmp_path / "a", set(), steps=range(2, 9, 2)), run(tmp_path / "b", {6, 7, 8}, steps=range(3, 9))
    (a / "step2/model.safetensors").unlink()
    (a / "logs").mkdir()
    save(a / "uncounted", weights(1))
    _, found, text = diff(a, b)
    assert found["steps"] == [4, 6, 8] and (found["first"], found["before"]) == (6, 4)
    assert "3 of steps that the other lacks" in text and "not usable: " in text
    assert set(found["a"]["unusable"]) == {"step2", "uncounted"}
    status, found, text = diff(a, run(tmp_path / "c", set(), steps=range(11, 13)))
    assert status == 2 and "no step in common" in text and "of steps 4, 6, 8," in text


def test_a_run_and_a_checkpoint(tmp_path: Path, diff: Diff) -> None:
    a, b = run(tmp_path / "a", set()), run(tmp_path / "b", {5})
    assert diff(a, b / "step4")[0] == diff(b / "step4", a)[0] == 0
    status, found, _ = diff(a, b / "step5")
    assert status == 1 and found["a"]["path"].endswith("/step5")
    write(tmp_path / "c", 11)
    assert "A is of step 8 and B of step 11" in diff(a, tmp_path / "c/step11")[2]  # what `latest` names


def test_damage_in_a_run_is_named(tmp_path: Path, diff: Diff) -> None:
    a, b = run(tmp_path / "a", set()), run(tmp_path / "b", {5, 6, 7, 8})
    file = b / "step4/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, found, _ = diff(a, b)
    assert status == 2 and "b/step4/model.safetensors: tensor" in found["error"] and "is damaged" in found["error"]


def test_runs_at_a_url(tmp_path: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBJECT_STORE_ROOT", str(tmp_path / "store"))
    bucket = register(tmp_path / "store")
    save_pieces(remote(f"{bucket}/r/step-1", 2), weights(1))
    # Virtual ranks count no steps: what does not tell its steps is named and is no run.
    assert diff_runs.run_of(f"{bucket}/r") is None
    assert diff_runs.run_of(f"{bucket}/nothing") is None and diff_runs.run_of(f"{bucket}/r/step-1") is None


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path, 3)
    assert diff_runs.run_of(str(tmp_path / "empty")) is None
    assert diff_runs.run_of(str(tmp_path / "nothing")) is None
    assert diff_runs.run_of(str(tmp_path / "step3")) is None
    assert diff_runs.run_of(str(tmp_path)) == diff_runs.Run(str(tmp_path), {3: str(tmp_path / "step3")})
