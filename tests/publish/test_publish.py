"""Following a training from its shards: bits at every version, sessions, damage, readers that come late."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.fsdp.test_tensor_parallel import begin
from tests.launcher import Launcher
from zero_strategy import ZeroEngine, subscribe
from zero_strategy.publish.folder import RECORD, VersionFolder, read_record, record_of
from zero_strategy.publish.lock import FolderLock


class Trained(nn.Module):
    """Blocks, a norm with buffers, and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.frozen = net(), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        torch.nn.init.ones_(self.frozen.weight)
        torch.nn.init.ones_(self.frozen.bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(self.norm(self.net(x)))
        return found


class Training:
    """A model on its ranks, its optimizer, and a folder that it publishes in."""

    def __init__(self, stage: int, dtype: torch.dtype | None = None, **options: Any) -> None:
        self.model, self.dtype = Trained(), dtype
        self.engine = ZeroEngine(self.model, {"stage": stage, "units": {"min_numel": 1}, **options})
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=1e-3)
        self.engine.attach(self.optimizer)

    def step(self) -> None:
        rows = torch.randn(6, 6, generator=torch.Generator().manual_seed(self.engine.steps.taken))
        loss_of(self.model(rows)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def expected(self) -> dict[str, Tensor]:
        state = self.engine.full_state_dict()
        return {n: t.to(self.dtype) if self.dtype and t.is_floating_point() else t for n, t in state.items()}


def assert_shown(tensors: Any, expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    wrong = [n for n, t in expected.items() if t.dtype != tensors[n].dtype or not torch.equal(tensors[n], t)]
    assert not wrong


def followed(folder: str, stage: int, dtype: torch.dtype | None, options: dict[str, Any]) -> list[tuple[int, int]]:
    """Each version as a reader on the same rank shows it; bytes and dense bytes of the changes."""
    training, reader = Training(stage, dtype, **options), subscribe(folder)
    assert not reader.update() and reader.version is None
    with pytest.raises(RuntimeError, match="no version yet"):
        assert reader.tensors
    published = training.engine.publish(folder, dtype=dtype, anchor_every=3)
    assert published.last.anchor and published.last.nbytes == published.last.dense
    sizes = []
    for number in range(8):
        assert reader.update() and not reader.update()
        assert (reader.version, reader.step) == (number, training.engine.steps.taken)
        assert_shown(reader.tensors, training.expected())
        training.step()
        found = published.update()
        assert found.number == number + 1 and 0 < found.changed <= found.elements
        sizes.append((found.nbytes, found.dense))
    late = subscribe(folder)
    assert late.wait(timeout=1) and late.version == 8 and not late.wait(timeout=0.01)
    assert_shown(late.tensors, training.expected())
    assert VersionFolder(folder).anchors() == [3, 6]
    published.update()  # of what has not changed
    assert reader.wait() and reader.version == 9
    assert_shown(reader.tensors, training.expected())
    return sizes


@pytest.mark.parametrize(
    "stage, world, dtype, options",
    [
        (0, 2, None, {}),
        (1, 2, torch.bfloat16, {}),
        (2, 2, None, {}),
        (3, 1, None, {}),
        (3, 2, torch.bfloat16, {}),
        (3, 2, None, {"offload": {"parameters": "cpu", "optimizer": "cpu"}}),
        (3, 4, torch.bfloat16, {"mesh": {"replicate": 2}}),
    ],
    ids=["stage 0", "stage 1", "stage 2", "one rank", "stage 3", "in tiers", "replicas"],
)
def test_readers_show_the_bits_of_every_version(
    ranks: Launcher, tmp_path: Path, stage: int, world: int, dtype: torch.dtype | None, options: dict[str, Any]
) -> None:
    folder = str(tmp_path / "published")
    found = ranks(world)(followed, folder, stage, dtype, options)
    assert all(each == found[0] for each in found)


def sessions(folder: str) -> None:
    first, reader = Training(3), subscribe(folder)
    published = first.engine.publish(folder)
    for _ in range(2):
        first.step()
        published.update()
    assert reader.update() and reader.version == 2
    first.engine.close()
    again = Training(2)  # as one that resumes from a checkpoint before the last version
    again.step()
    published = again.engine.publish(folder)
    again.step()
    published.update()
    assert reader.update() and (reader.version, reader.step) == (4, 2)
    assert_shown(reader.tensors, again.expected())


def test_a_trainer_that_begins_anew_is_followed(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(sessions, str(tmp_path))


def flip(path: Path, at: int = -20) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(bytes(content))


def rewrite(path: Path, entries: dict[str, Any], false_sum: bool = False) -> None:
    """Change a record, with a sum that is right or not."""
    if false_sum:
        found = json.loads((path / RECORD).read_text())
        (path / RECORD).write_text(json.dumps(found | entries))
    else:
        (path / RECORD).write_bytes(record_of(replace(read_record(path), **entries)))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit of a change": lambda path: flip(path / "rank-0.safetensors"),
    "a torn change": lambda path: (path / "rank-0.safetensors").write_bytes(
        (path / "rank-0.safetensors").read_bytes()[:-9]
    ),
    "a file that is missing": lambda path: (path / "rank-0.safetensors").unlink(),
    "a torn record": lambda path: (path / RECORD).write_bytes((path / RECORD).read_bytes()[:60]),
    "another step": lambda path: rewrite(path, {"step": 77}, false_sum=True),
    "a record of other digests": lambda path: rewrite(path, {"digests": ["0" * 32]}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_change_is_named_and_passed_over_when_an_anchor_comes(tmp_path: Path, kind: str) -> None:
    training, reader = Training(2), subscribe(tmp_path)
    published = training.engine.publish(tmp_path, anchor_every=3)
    training.step()
    published.update()
    reader.update()
    before = {name: tensor.clone() for name, tensor in reader.tensors.items()}
    training.step()
    published.update()
    DAMAGE[kind](tmp_path / "delta-00000002")
    with pytest.raises(ValueError, match="delta-00000002"):
        reader.update()
    if "digests" in kind:
        with pytest.raises(RuntimeError, match="no version"):
            assert reader.tensors
    else:
        assert reader.version == 1
        assert_shown(reader.tensors, before)
    training.step()
    published.update()  # with an anchor
    assert reader.update() and reader.version == 3
    assert_shown(reader.tensors, training.expected())
    training.engine.close()


def test_a_damaged_anchor_is_passed_over_or_named(tmp_path: Path) -> None:
    training = Training(2)
    published = training.engine.publish(tmp_path, anchor_every=2)
    for _ in range(3):
        training.step()
        published.update()
    flip(tmp_path / "anchor-00000002" / "model.safetensors")
    reader = subscribe(tmp_path)
    assert reader.update() and reader.version == 3  # from the anchor before
    assert_shown(reader.tensors, training.expected())
    flip(tmp_path / "anchor-00000000" / "model.safetensors")
    with pytest.raises(ValueError, match="anchor-00000002"):
        subscribe(tmp_path).update()
    assert reader.version == 3 and not reader.update()
    training.engine.close()


def test_a_reader_that_falls_behind_and_unfinished_versions(tmp_path: Path) -> None:
    training, reader = Training(2), subscribe(tmp_path)
    published = training.engine.publish(tmp_path, anchor_every=2, keep=1)
    reader.update()
    for _ in range(5):
        training.step()
        published.update()
    assert VersionFolder(tmp_path).anchors() == [4] and not (tmp_path / "delta-00000001").exists()
    assert reader.update() and reader.version == 5
    (tmp_path / "delta-00000006").mkdir()  # of a trainer that was killed
    (tmp_path / "anchor-00000007").mkdir()
    assert not reader.update()
    training.engine.close()
    again = Training(2)
    again.engine.publish(tmp_path)
    assert reader.update() and reader.version == 8
    assert_shown(reader.tensors, again.expected())
    again.engine.close()


def test_a_version_that_cannot_be_written_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, reader = Training(2), subscribe(tmp_path)
    published = training.engine.publish(tmp_path)
    training.step()

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("zero_strategy.publish.folder.write_file", full)
        with pytest.raises(OSError, match="No space left"):
            published.update()
    assert reader.update() and reader.version == 0
    training.step()
    assert published.update().anchor
    assert reader.update() and reader.version == 2
    assert_shown(reader.tensors, training.expected())
    training.engine.close()


def refused(folder: str) -> None:
    _, engine, _, _ = begin(3)
    with pytest.raises(ValueError, match="tensor parallelism"):
        engine.publish(folder)


def test_what_cannot_be_published_is_refused(ranks: Launcher, tmp_path: Path) -> None:
    training = Training(2)
    for options, error, text in (
        ({"dtype": torch.int8}, TypeError, "floating-point"),
        ({"dtype": torch.float64}, ValueError, "float32"),
        ({"anchor_every": 0}, ValueError, "anchor_every=0"),
        ({"keep": True}, ValueError, "keep=True"),
    ):
        with pytest.raises(error, match=text):
            training.engine.publish(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"http://host:1.*serve"):
        training.engine.publish("http://host:1")
    training.engine.close()
    ranks(4)(refused, str(tmp_path))


def fork(action: Callable[[], object]) -> int:
    """A child that does it and ends without cleaning up."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


def test_a_lock_that_is_let_go_is_free_while_a_forked_child_lives(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    pid = fork(lambda: time.sleep(60))
    try:
        lock.release_later()
        FolderLock(tmp_path).release_later()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_forked_child_does_not_let_go_of_its_parents_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    os.waitpid(fork(lambda: lock.release_later()), 0)
    with pytest.raises(ValueError, match="another training publishes there"):
        FolderLock(tmp_path)
    lock.release_later()


def test_a_version_that_is_removed_counts_no_more_when_its_first_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(0)
    published = training.engine.publish(tmp_path, anchor_every=1, keep=1)
    left = []

    def killed(path: Path) -> None:
        left.append(path.name)

    monkeypatch.setattr("zero_strategy.publish.folder.remove", killed)
    for _ in range(2):
        training.step()
        published.update()
    assert left and {kind for kind, number in VersionFolder(tmp_path).finished() if number < 2} == set()
    training.engine.close()


def fail_on_one_rank(folder: str) -> list[str]:
    """Messages where one rank alone fails: rank 0 at the folder, rank 1 at its values."""
    training, found = Training(2), []
    first, rank = "zero_strategy.publish.folder.Directory.last", training.engine.mesh.rank

    def failing(*_: object) -> NoReturn:
        raise OSError(5, "Input/output error")

    def attempt(target: str, culprit: int, call: Callable[[], object]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(target, failing)
            with pytest.raises((OSError, RuntimeError)) as error:
                call()
        found.append(str(error.value))

    begin = "zero_strategy.publish.recorder.ChangeRecorder.begin"
    attempt(first, 0, lambda: training.engine.publish(f"{folder}/a"))
    attempt(begin, 1, lambda: training.engine.publish(f"{folder}/b"))
    published = training.engine.publish(f"{folder}/c")
    attempt(first, 0, published.update)
    if rank == 1:
        training.engine.offload_states(["lp_params"])
    with pytest.raises(RuntimeError) as error:
        published.update()
    found.append(str(error.value))
    if rank == 1:
        training.engine.reload_states()
    training.step()
    published.update()
    return found


def test_what_fails_on_one_rank_is_an_error_on_all(ranks: Launcher, tmp_path: Path) -> None:
    for beginning, values, updating, moved in ranks(2)(fail_on_one_rank, str(tmp_path)):
        assert all("Input/output error" in said for said in (beginning, values, updating))
        assert "reload_states() first" in moved
