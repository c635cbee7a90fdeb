"""Checkpoints that stay, and that a removal leaves nothing half."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.saving import save
from tests.checkpoint.test_background_saves import make, train
from zero_strategy.checkpoint.folders import Found, find_checkpoints, prune, remove_checkpoints, which_to_remove

MODEL = {"w": torch.ones(3)}


def found(step: int | None, saved_at: int | None = None, **rest: bool) -> Found:
    return Found(Path(f"/c/step{step}"), step, saved_at if saved_at is not None else (step or 0), **rest)


def steps(chosen: list[Found]) -> list[int | None]:
    return [item.step for item in chosen]


def test_the_rules() -> None:
    ten = [found(step) for step in range(10, 110, 10)]
    assert which_to_remove(ten, 0) == [] and which_to_remove(ten, 0, 20) == []
    assert steps(which_to_remove(ten, 3)) == [10, 20, 30, 40, 50, 60, 70]
    assert steps(which_to_remove(ten, 2, 40)) == [10, 20, 30, 50, 60, 70]
    assert steps(which_to_remove(ten[::-1], 8)) == [10, 20]
    assert which_to_remove(ten, 10) == which_to_remove(ten, 99) == which_to_remove([], 1) == []
    # incomplete ones do not count, and are left to be looked at
    assert steps(which_to_remove([found(1), found(2), found(3, complete=False)], 1)) == [1]
    # what was saved last is newest, whatever its step: training may have gone back
    assert steps(which_to_remove([found(100, 1), found(50, 2)], 1)) == [100]
    assert steps(which_to_remove([found(1, is_latest=True), found(2), found(3)], 1)) == [2]
    assert steps(which_to_remove([found(None, 1), found(2)], 1, 5)) == [None]
    with pytest.raises(ValueError, match="keep_last=-1"):
        which_to_remove(ten, -1)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), max_size=12, unique_by=lambda t: t[0]),
    st.integers(0, 5),
    st.integers(0, 7),
)
def test_what_always_stays(entries: list[tuple[int, bool, bool]], keep_last: int, keep_every: int) -> None:
    all_of_them = [found(step, complete=complete, is_latest=latest) for step, complete, latest in entries]
    gone = which_to_remove(all_of_them, keep_last, keep_every)
    complete = [item for item in all_of_them if item.complete]
    kept = [item for item in complete if item not in gone]
    assert all(item.complete and not item.is_latest for item in gone)
    assert len(kept) >= min(keep_last or len(complete), len(complete))
    if complete:
        assert max(complete, key=lambda item: item.saved_at) in kept
    assert not keep_every or all((item.step or 0) % keep_every for item in gone)


def folder(path: Path, count: int) -> None:
    for number in range(1, count + 1):
        target = path / f"step{number}"
        save(target, MODEL, world_size=1, manifest={"counters": {"global_steps": number}})
        os.utime(target / "manifest.json", ns=(number, number))


def test_a_folder(tmp_path: Path) -> None:
    folder(tmp_path, 5)
    (tmp_path / "step2" / "model.safetensors").unlink()
    (tmp_path / "mine").mkdir()
    (tmp_path / "latest").write_text("step1\n")
    seen = find_checkpoints(tmp_path)
    assert [(f.step, f.complete, f.is_latest) for f in seen] == [
        (1, True, True),
        (None, False, False),
        (3, True, False),
        (4, True, False),
        (5, True, False),
    ]
    assert seen[0].bytes > 12
    assert [f.path.name for f in prune(tmp_path, 2)] == ["step3"]
    assert sorted(os.listdir(tmp_path)) == ["latest", "mine", "step1", "step2", "step4", "step5"]


def test_exports_and_published_versions_neither_count_nor_go(tmp_path: Path) -> None:
    model, engine, optimizer = make(0, keep_last=2)
    for number in range(2):
        train(model, optimizer, number)
        engine.save(tmp_path / f"step{number}")
    engine.saver.finish()
    engine.save_pretrained(tmp_path / "exported")
    published = engine.publish(tmp_path, anchor_every=1, keep=3)
    for number in (2, 3):
        train(model, optimizer, number)
        published.update()
        engine.save(tmp_path / f"step{number}")
        engine.saver.finish()
    kept = {"exported", "step2", "step3", *(f"anchor-0000000{n}" for n in range(3)), "delta-00000001", "delta-00000002"}
    assert {name for name in os.listdir(tmp_path) if not name.startswith(".")} == {"latest", *kept}
    engine.close()


def test_versions_published_before_exports_had_a_mark_stay(tmp_path: Path) -> None:
    folder(tmp_path, 2)
    save(tmp_path / "anchor-00000000", MODEL, world_size=1, extra_files={"publication.json": b"{}"})
    os.utime(tmp_path / "anchor-00000000" / "manifest.json", ns=(0, 0))
    assert [f.path.name for f in prune(tmp_path, 1)] == ["step1"]


def test_what_a_crash_left_goes_later_and_is_no_checkpoint(tmp_path: Path) -> None:
    folder(tmp_path, 3)
    os.rename(tmp_path / "step1", tmp_path / ".step1.abc.removed")  # the process died before the files were gone
    assert [f.step for f in find_checkpoints(tmp_path)] == [2, 3]
    remove_checkpoints([tmp_path / "step2"])
    assert sorted(os.listdir(tmp_path)) == ["latest", "step3"]
