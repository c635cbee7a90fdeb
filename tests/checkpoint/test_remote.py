"""Checkpoints in object stores: the manifest's put is the commit, whatever fails around it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("fsspec")

from tests.checkpoint.object_store import ObjectStore, register
from tests.checkpoint.piece_saving import jobs_of, own_file, remote, run_jobs, save
from tests.checkpoint.saving import random_tensor, same
from zero_strategy.checkpoint.reader import Wanted
from zero_strategy.checkpoint.save_job import remove_remote
from zero_strategy.cli import main
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.cli.checkpoint_merge import merge
from zero_strategy.convert.convert import open_any

OLD = {"w": torch.arange(10.0), "v": random_tensor(torch.bfloat16, (300, 7))}
NEW = {"w": -torch.arange(10.0), "v": random_tensor(torch.bfloat16, (300, 7), 1)}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OBJECT_STORE_ROOT", str(tmp_path / "store"))
    yield register(tmp_path / "store")
    ObjectStore.faults.clear()


def names(tmp_path: Path) -> list[str]:
    return sorted(str(p.relative_to(tmp_path / "store/run")) for p in (tmp_path / "store").rglob("*") if p.is_file())


def is_(url: str, weights: dict[str, torch.Tensor]) -> bool:
    reader = open_any(url)
    return all(same(reader.full(name), tensor) for name, tensor in weights.items())


def test_a_checkpoint_is_pieces_and_a_manifest(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/c"
    save(remote(url, 2), NEW, {"0": {"exp_avg": OLD}}, extra_files={"x.pt": b"x"})
    folder = "c/pieces-t"
    small = [f"{folder}/files/random/rank-0000{rank}.json" for rank in (0, 1)]
    pieces = [f"{folder}/rank-0000{rank}.safetensors" for rank in (0, 1)]
    assert names(tmp_path) == ["c/manifest.json", *small, f"{folder}/files/x.pt", *pieces, "latest"]
    for path in (url, bucket):
        assert is_(path, NEW)
    reader = open_any(bucket)
    assert str(reader.directory) == url
    assert [reader.extra(path) for path in ("x.pt", *own_file(1))] == [b"x", b"state of rank 1"]
    assert all(same(reader.full(name, ("0", "exp_avg")), tensor) for name, tensor in OLD.items())
    merge([url], tmp_path / "merged")
    assert verify(tmp_path / "merged").problems == ()
    assert is_(str(tmp_path / "merged"), NEW)


def test_in_memory(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/c"
    for weights, token in [(OLD, "a"), (NEW, "b")]:
        save(remote(url, 1, token), weights, world_size=1)
        assert is_(url, weights)
    remove_remote(url)
    with pytest.raises(ValueError, match="no checkpoint there"):
        open_any(url)


def test_few_requests_read_a_rank_s_share(bucket: str) -> None:
    weights = {f"layer{n}.w": random_tensor(torch.float32, (50,), n) for n in range(40)}
    save(remote(f"{bucket}/c", 2), weights)
    ObjectStore.requests.clear()
    reader = open_any(f"{bucket}/c")
    reader.read_many([Wanted(name, 0, 50) for name in list(weights)[:20]])
    assert [what for what, _ in ObjectStore.requests] == ["get", "get"]  # the manifest and one range


def test_replacing_has_no_moment_without_either(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/c"
    save(remote(url, 2, "old"), OLD)
    for end in ("rank-00000.safetensors", "rank-00001.json", "manifest.json", "rank-00001.safetensors"):
        ObjectStore.faults[end] = "no"
        failures = run_jobs(jobs_of(remote(url, 2, "new"), NEW))
        assert "the store says no" in " ".join(map(str, failures.values())) and len(failures) == 2
        ObjectStore.faults.clear()
        assert is_(bucket, OLD)
    save(remote(url, 2, "newer"), NEW)
    assert is_(bucket, NEW)
    assert {name.split("/")[1] for name in names(tmp_path) if "pieces" in name} == {"pieces-newer"}


def test_old_pieces_that_cannot_be_removed_are_removed_by_the_next_save(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/c"
    save(remote(url, 1, "old"), OLD, world_size=1)
    ObjectStore.faults["rm:rank-00000.safetensors"] = "no"
    with pytest.warns(UserWarning, match="could not be removed: the store says no"):
        jobs_of(remote(url, 1, "new"), NEW, world_size=1)[0].run(threads=0, bytes_per_second=None)
    assert is_(url, NEW)
    ObjectStore.faults.clear()
    save(remote(url, 1, "newer"), OLD, world_size=1)
    assert {name.split("/")[1] for name in names(tmp_path) if "pieces" in name} == {"pieces-newer"}


def _dies(root: str, token: str, at: str) -> None:
    url = register(Path(root))
    ObjectStore.faults[at] = "kill"
    run_jobs(jobs_of(remote(f"{url}/c", 2, token), NEW))


@pytest.mark.parametrize(
    "at", ["rank-00000.safetensors", "rank-00001.json", "manifest.json", "latest", "rm:rank-00000.safetensors"]
)
def test_killed_at_any_step_there_is_the_old_or_the_new(bucket: str, tmp_path: Path, at: str) -> None:
    url = f"{bucket}/c"
    save(remote(url, 2, "old"), OLD)
    process = multiprocessing.get_context("fork").Process(target=_dies, args=(str(tmp_path / "store"), "new", at))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert is_(bucket, OLD) or is_(bucket, NEW)
    assert is_(bucket, NEW) == (at in ("latest", "rm:rank-00000.safetensors"))
    save(remote(url, 2, "newer"), NEW)
    assert is_(bucket, NEW)
    assert {name.split("/")[1] for name in names(tmp_path) if "pieces" in name} == {"pieces-newer"}


def test_a_put_that_arrived_though_the_store_said_no(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put = ObjectStore.pipe_file

    def arrives(store: ObjectStore, path: str, value: bytes, **options: str) -> None:
        put(store, path, value)
        if path.endswith("manifest.json"):
            raise OSError("the connection is gone")

    monkeypatch.setattr(ObjectStore, "pipe_file", arrives)
    failures = run_jobs(jobs_of(remote(f"{bucket}/c", 1), NEW, world_size=1))
    assert "the connection is gone" in str(failures[0])
    assert is_(f"{bucket}/c", NEW)  # its pieces are still there


def test_a_damaged_latest_gives_way_to_the_newest_complete_one(bucket: str, tmp_path: Path) -> None:
    save(remote(f"{bucket}/step-1", 2, "a"), OLD)
    save(remote(f"{bucket}/step-2", 2, "b"), NEW)
    (tmp_path / "store/run/step-2/pieces-b/rank-00001.safetensors").unlink()
    with pytest.warns(UserWarning, match="latest names step-2, which cannot be loaded.*taking .*step-1"):
        reader = open_any(bucket)
    assert same(reader.full("w"), OLD["w"])
    with pytest.raises(ValueError, match=r"rank-00001.safetensors is not here.*rank 1"):
        open_any(f"{bucket}/step-2").full("v")


def test_verify_at_a_url(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(remote(f"{bucket}/c", 2), NEW)
    assert main(["checkpoint", "verify", bucket]) == 0
    place = tmp_path / "store/run/c/pieces-t/rank-00001.safetensors"
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    assert main(["checkpoint", "verify", bucket]) == 1
    assert "rank-00001.safetensors: tensor 'v' is damaged" in capsys.readouterr().out
    place.unlink()
    assert "is missing" in " ".join(verify(f"{bucket}/c").problems)


def test_what_is_no_checkpoint_is_not_overwritten(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "store/run/c").mkdir(parents=True)
    (tmp_path / "store/run/c/thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"not a checkpoint and holds \['thesis.tex'\]"):
        save(remote(f"{bucket}/c", 1), NEW, world_size=1)
    with pytest.raises(ValueError, match="no checkpoint there"):
        open_any(f"{bucket}/c")
    with pytest.raises(ValueError, match="nowhere://x: Protocol not known"):
        open_any("nowhere://x")


def test_a_checkpoint_of_another_version_stays_until_the_new_one_is_there(bucket: str, tmp_path: Path) -> None:
    save(remote(f"{bucket}/c", 1, "old"), OLD, world_size=1)
    manifest = tmp_path / "store/run/c/manifest.json"
    later = manifest.read_bytes().replace(b'"version": 2', b'"version": 3')
    manifest.write_bytes(later)
    ObjectStore.faults["manifest.json"] = "no"
    assert run_jobs(jobs_of(remote(f"{bucket}/c", 1, "new"), NEW, world_size=1))
    ObjectStore.faults.clear()
    assert manifest.read_bytes() == later
    assert "c/pieces-old/rank-00000.safetensors" in names(tmp_path)
    save(remote(f"{bucket}/c", 1, "newer"), NEW, world_size=1)
    assert is_(bucket, NEW)
    assert {name.split("/")[1] for name in names(tmp_path) if "pieces" in name} == {"pieces-newer"}


def test_a_latest_that_the_store_refuses_is_told_of_and_the_checkpoint_is_there(bucket: str, tmp_path: Path) -> None:
    save(remote(f"{bucket}/c", 1, "old"), OLD, world_size=1)
    ObjectStore.faults["latest"] = "no"
    with pytest.warns(UserWarning, match=r"run/c is saved, but the file latest .*the store says no"):
        save(remote(f"{bucket}/c", 1, "new"), NEW, world_size=1)
    assert is_(f"{bucket}/c", NEW)
    assert {name.split("/")[1] for name in names(tmp_path) if "pieces" in name} == {"pieces-new"}
