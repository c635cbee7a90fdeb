"""Engines whose ranks share no directory: what is detected, saved, loaded, and refused.

Each rank works in a directory of its own and is given the same relative path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher import Launcher, RankError
from tests.models import Transformer, loss_fn, make_batch, param_groups
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.cli.checkpoint_merge import merge
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


class Net(nn.Module):
    """With a buffer, which rank 0 alone writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = Transformer()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def enter(root: Path, hosts: list[int]) -> None:
    """Into the directory of this rank's host."""
    host = root / f"host{hosts[rank()]}"
    host.mkdir(parents=True, exist_ok=True)
    os.chdir(host)


def make(stage: int, replicate: int = 1, **checkpoint: Any) -> tuple[Net, ZeroEngine, torch.optim.Optimizer]:
    net = Net()
    config = load_config(
        stage=stage,
        mesh={"replicate": replicate},
        units={"min_numel": 0},
        barrier_seconds=10.0,
        checkpoint={"timeout_seconds": 10.0, **checkpoint},
    )
    engine = ZeroEngine(net, config)
    optimizer = torch.optim.AdamW(param_groups(net))
    engine.attach(optimizer)
    return net, engine, optimizer


def train(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_fn(net, make_batch("transformer", 10 * step + rank(), 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.seen.add_(1 + rank())


def digest(engine: ZeroEngine, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    state = engine.full_state_dict()
    for name, values in engine.full_optimizer_state(optimizer).items():
        state |= {f"{name}/{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)}
    for name in sorted(state):
        if name != "seen":
            found.update(state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_on_hosts(root: Path, hosts: list[int], stage: int, replicate: int = 1, **checkpoint: Any) -> dict[str, Any]:
    enter(root, hosts)
    net, engine, optimizer = make(stage, replicate, **checkpoint)
    train(net, optimizer, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save("run/c")
        engine.save("run/c", asynchronous=True).wait()
    messages = [str(warning.message) for warning in caught if "pieces" in str(warning.message)]
    saved = digest(engine, optimizer)
    train(net, optimizer, 1)
    return {"saved": saved, "next": digest(engine, optimizer), "random": torch.rand(1).item(), "warned": messages}


def resume_on_hosts(root: Path, hosts: list[int], stage: int, replicate: int = 1, where: str = "run") -> dict[str, Any]:
    enter(root, hosts)
    net, engine, optimizer = make(stage, replicate)
    engine.load(where)
    loaded, seen = digest(engine, optimizer), net.seen.tolist()
    train(net, optimizer, 1)
    return {"saved": loaded, "next": digest(engine, optimizer), "random": torch.rand(1).item(), "seen": seen}


@pytest.mark.parametrize(
    ("stage", "hosts", "replicate"),
    [(0, [0, 1], 1), (1, [0, 1, 1], 1), (2, [0, 1], 1), (3, [0, 0, 1], 1), (3, [0, 1], 2)],
)
def test_the_same_ranks_resume_from_their_own_hosts(
    tmp_path: Path, ranks: Launcher, stage: int, hosts: list[int], replicate: int
) -> None:
    saved = ranks(len(hosts))(save_on_hosts, tmp_path, hosts, stage, replicate)
    assert [len(result["warned"]) for result in saved] == [1] + [0] * (len(hosts) - 1)
    assert "checkpoint merge" in saved[0]["warned"][0]
    resumed = ranks(len(hosts))(resume_on_hosts, tmp_path, hosts, stage, replicate)
    for before, after in zip(saved, resumed, strict=True):
        assert {key: before[key] for key in ("saved", "next", "random")} == {
            key: after[key] for key in ("saved", "next", "random")
        }
        assert after["seen"] == [1.0] * 3  # rank 0's
    for host in set(hosts):
        names = {path.name for path in (tmp_path / f"host{host}/run").iterdir()}
        assert names == {"c", "latest"}


def merged_and_in_place(root: Path, stage: int) -> str:
    world = dist.get_world_size() if dist.is_initialized() else 1
    os.chdir(root)
    os.makedirs(f"host{rank()}", exist_ok=True)
    net, engine, optimizer = make(stage)
    train(net, optimizer, 0)
    engine.save("in_place", user={"world": world})
    engine.saver.places._layout = "pieces"
    os.chdir(f"host{rank()}")
    engine.save("c", user={"world": world})
    return digest(engine, optimizer)


# Every stage with its pieces on two hosts, on a number of hosts that divides nothing, or on more than two.
@pytest.mark.parametrize(
    ("world", "stages"), [(1, (0, 3)), (2, (0, 1, 2, 3)), (3, (1, 3)), (4, (0, 2))], ids=["1", "2", "3", "4"]
)
def test_merged_files_are_those_of_an_in_place_save(
    tmp_path: Path, ranks: Launcher, monkeypatch: pytest.MonkeyPatch, world: int, stages: tuple[int, ...]
) -> None:
    for stage in stages:
        root = tmp_path / str(stage)
        root.mkdir()
        if world > 1:
            ranks(world)(merged_and_in_place, root, stage)
        else:
            monkeypatch.chdir(root)  # in this process, which goes back when the test is over
            merged_and_in_place(root, stage)
        merge([root / f"host{rank}" / "c" for rank in range(world)], root / "merged")
        assert tensors(root / "merged") == tensors(root / "in_place")
        assert verify(root / "merged").problems == ()
        slices = sum(_data_bytes(path) for path in root.glob("host*/c/pieces-*/rank-*.safetensors"))
        assert slices == sum(_data_bytes(path) for path in (root / "in_place").rglob("*.safetensors"))


def tensors(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*.safetensors"))}


def _data_bytes(path: Path) -> int:
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def test_another_shape_loads_where_all_pieces_can_be_had(tmp_path: Path, ranks: Launcher) -> None:
    saved = ranks(3)(save_on_hosts, tmp_path, [0, 0, 1], 3)
    two = ranks(2)(resume_on_hosts, tmp_path, [0, 1], 1)  # the two hosts, one rank on each
    assert [result["saved"] for result in two] == [saved[0]["saved"]] * 2
    shutil.rmtree(tmp_path / "host1")
    with pytest.raises(RankError, match=r"rank-00002.*rank 2 wrote on its host.*checkpoint merge"):
        ranks(2)(resume_on_hosts, tmp_path, [0, 0], 3)


def test_a_mixture_of_two_saves_is_refused(tmp_path: Path, ranks: Launcher) -> None:
    ranks(2)(save_on_hosts, tmp_path, [0, 1], 3)
    shutil.copytree(tmp_path / "host1/run/c", tmp_path / "older")
    ranks(2)(save_on_hosts, tmp_path, [0, 1], 3)
    # As if host 1 had died just before it gave the new one its name.
    (token,) = (path.name for path in (tmp_path / "host1/run/c").glob("pieces-*"))
    sealed = tmp_path / f"host1/run/.c.{token.removeprefix('pieces-')}.tmp"
    (tmp_path / "host1/run/c").rename(sealed)
    (tmp_path / "older").rename(tmp_path / "host1/run/c")
    with pytest.raises(RankError, match="different saves") as error:
        ranks(2)(resume_on_hosts, tmp_path, [0, 1], 3, 1, "run/c")
    text = str(error.value)
    assert "rank 0: " in text and "rank 1: " in text and f"rank 1: mv {sealed} {tmp_path / 'host1/run/c'}" in text
    shutil.rmtree(tmp_path / "host1/run/c")
    sealed.rename(tmp_path / "host1/run/c")
    ranks(2)(resume_on_hosts, tmp_path, [0, 1], 3, 1, "run/c")


def test_where_all_ranks_see_one_directory_it_is_written_in_place(tmp_path: Path, ranks: Launcher) -> None:
    saved = ranks(2)(save_on_hosts, tmp_path, [0, 0], 3)
    assert [result["warned"] for result in saved] == [[], []]
    names = sorted(path.name for path in (tmp_path / "host0/run").iterdir())
    assert names == ["c", "latest"] and not list((tmp_path / "host0/run/c").glob("pieces-*"))
    ranks(2)(save_on_hosts, tmp_path, [0, 0], 3, layout="pieces")
    assert len(list((tmp_path / "host0/run/c").glob("pieces-*/rank-*"))) == 2
    assert ranks(2)(resume_on_hosts, tmp_path, [0, 0], 0)[0]["saved"] == saved[0]["saved"]


def held_up_while_one_host_fails(root: Path) -> str:
    enter(root, [0, 1])
    net, engine, optimizer = make(3)
    train(net, optimizer, 0)
    engine.save("run/c")
    train(net, optimizer, 1)
    if rank() == 1:
        os.chmod("run", 0o700)
        (Path("run") / "c" / "manifest.json").unlink()  # what is there is no checkpoint any more: not to be replaced
    try:
        engine.save("run/c")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failure_on_one_host_is_one_on_all_and_changes_nothing(tmp_path: Path, ranks: Launcher) -> None:
    messages = ranks(2)(held_up_while_one_host_fails, tmp_path)
    assert "not a checkpoint" in messages[0] and "ValueError" in messages[1]
    for host in (0, 1):
        assert sorted(path.name for path in (tmp_path / f"host{host}/run").iterdir()) == ["c", "latest"]


def saved_on_two_hosts(root: Path) -> tuple[Net, ZeroEngine, torch.optim.Optimizer]:
    """An engine that has saved its pieces, each rank on a host of its own."""
    enter(root, [0, 1])
    net, engine, optimizer = make(2)
    train(net, optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save("run")
    return net, engine, optimizer


def look_fails(root: Path, what: str) -> str:
    """A disk that fails on one host when ranks look for what they have."""
    _, engine, _ = saved_on_two_hosts(root)

    def failing(*_: object) -> list[int]:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(PieceReader, what, failing)
        with pytest.raises((OSError, RuntimeError)) as error:
            engine.load("run")
    engine.load("run")
    return str(error.value)


@pytest.mark.parametrize("what", ["lacking", "lacking_small"])
def test_a_disk_that_fails_on_one_host_while_loading_is_an_error_on_all(
    tmp_path: Path, ranks: Launcher, what: str
) -> None:
    for said in ranks(2)(look_fails, tmp_path, what):
        assert "Input/output error" in said


def folder_cannot_be_listed(root: Path) -> bool:
    """One host cannot list the folder that its pieces are in, where saves beside this one might be."""
    net, engine, optimizer = saved_on_two_hosts(root)
    saved, listed = digest(engine, optimizer), Path.iterdir

    def failing(path: Path) -> Any:
        if path == Path.cwd():
            raise PermissionError(13, "Permission denied")
        return listed(path)

    train(net, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(Path, "iterdir", failing)
        engine.load(Path.cwd() / "run")
    return digest(engine, optimizer) == saved


def test_a_folder_that_one_host_cannot_list_keeps_nobody_waiting(tmp_path: Path, ranks: Launcher) -> None:
    assert ranks(2, timeout=60)(folder_cannot_be_listed, tmp_path) == [True, True]
