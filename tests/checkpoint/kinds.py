"""A small checkpoint of every kind that is read, and all that is in it as one digest."""

from __future__ import annotations

import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save_model
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.checkpoint.piece_saving import on_hosts
from tests.checkpoint.piece_saving import save as save_pieces
from tests.convert.foreign import our_checkpoint, trained
from tests.convert.interop.written import ARCHIVE
from zero_strategy.convert.convert import convert, open_any, state_of
from zero_strategy.convert.portable import loaded

REST: dict[str, Any] = {
    "global_step": 3, "epoch": 1, "lr_schedulers": [{"last_epoch": 2}], "callbacks": {}, "loops": {}
}  # fmt: skip


def _native(place: Path) -> None:
    extra = {"client_state": {"seen": 9}, "counters": {"global_steps": 3}, "extra_files": {"notes/a.bin": b"a" * 40}}
    our_checkpoint(*trained(), place, **extra)


def _pieces(place: Path) -> None:
    model, _ = trained()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_pieces(on_hosts([place] * 2), weights, {"0": {"exp_avg": weights}}, extra_files={"x.bin": b"x" * 40})


def _url(place: Path) -> None:
    _pieces(place)


def _hf(place: Path) -> None:
    _native(place.parent / "whole")
    convert(place.parent / "whole", place, to_format="hf", max_file_bytes=300)
    shutil.rmtree(place.parent / "whole")


def _torch(place: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, place)


def _older_torch(place: Path) -> None:
    torch.save(trained()[0].state_dict(), place, _use_new_zipfile_serialization=False)


def _lightning(place: Path) -> None:
    model, optimizer = trained()
    states = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save({"pytorch-lightning_version": "2.6.0", **states, **REST}, place)


def _lightning_folder(place: Path) -> None:
    weights, states = get_state_dict(*trained())
    dcp.save({"state_dict": weights, "optimizer_0": states}, checkpoint_id=place, no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.0", **REST}, place / "meta.pt")


def _dcp(place: Path) -> None:
    weights, states = get_state_dict(*trained())
    dcp.save({"model": weights, "optimizer": states, "step": 3}, checkpoint_id=place, no_dist=True)


def _accelerate(place: Path) -> None:
    model, optimizer = trained()
    place.mkdir()
    torch.save(model.state_dict(), place / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), place / "optimizer.bin")
    _accelerate_rest(place)


def _accelerate_safetensors(place: Path) -> None:
    model, _ = trained()
    place.mkdir()
    save_model(model, str(place / "model.safetensors"))
    _accelerate_rest(place)


def _accelerate_sharded(place: Path) -> None:
    weights, states = get_state_dict(*trained())
    dcp.save({"model": weights}, checkpoint_id=place / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": states}, checkpoint_id=place / "optimizer_0", no_dist=True)
    _accelerate_rest(place)


def _accelerate_rest(place: Path) -> None:
    torch.save({"last_epoch": 5}, place / "scheduler.bin")
    torch.save({"scale": 4.0, "_growth_tracker": 1}, place / "scaler.pt")
    torch.save({"mine": torch.arange(3.0)}, place / "custom_checkpoint_0.pkl")
    torch.save({"step": 3}, place / "random_states_0.pkl")


def _universal(place: Path) -> None:
    _torch(place.parent / "x.pt")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*were never updated")
        convert(place.parent / "x.pt", place / "tag", to_format="deepspeed-universal")
    (place.parent / "x.pt").unlink()


def _deepspeed(case: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        with tarfile.open(ARCHIVE) as archive:
            inside = [m for m in archive if m.isfile() and m.name.startswith(f"{case}/checkpoint/")]
            for member in inside:
                target = place / member.name.removeprefix(f"{case}/checkpoint/")
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())

    return make


KINDS: dict[str, Callable[[Path], None]] = {
    "native": _native,
    "pieces": _pieces,
    "url": _url,
    "hf": _hf,
    "torch": _torch,
    "older_torch": _older_torch,
    "lightning": _lightning,
    "lightning_folder": _lightning_folder,
    "dcp": _dcp,
    "accelerate": _accelerate,
    "accelerate_safetensors": _accelerate_safetensors,
    "accelerate_sharded": _accelerate_sharded,
    "universal": _universal,
    "deepspeed_0": _deepspeed("z0_fp32"),
    "deepspeed_1": _deepspeed("z1_bf16"),
    "deepspeed_3": _deepspeed("z3_bf16"),
}


def make(kind: str, folder: Path) -> Path:
    """Makes a checkpoint `folder/c`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        KINDS[kind](folder / "c")
    return folder / "c"


def named(kind: str, place: Path) -> Path | str:
    """Arguments of a user to open it."""
    return f"file://{place}" if kind == "url" else place


def files_of(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())


def content(path: Path | str) -> str:
    """A digest of everything that is read from a checkpoint."""
    reader = open_any(path)
    state = state_of(reader)
    digest = xxhash.xxh3_128()

    def add(value: Any, where: str) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{where} {value.dtype} {tuple(value.shape)}".encode(errors="backslashreplace"))
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in value:
                add(value[key], f"{where}.{key}")
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                add(item, f"{where}.{number}")
        else:
            digest.update(f"{where}={value!r}".encode(errors="backslashreplace"))

    for name in sorted(state.weights):
        add(loaded(state.weights[name]), name)
    for number, optimizer in enumerate(state.optimizers):
        for kind, tensors in sorted(optimizer.kinds.items()):
            add({name: loaded(tensors[name]) for name in sorted(tensors)}, f"{number} {kind}")
        add([optimizer.scalars, optimizer.param_groups, optimizer.unnamed], f"{number}")
    add([state.aliases, state.counters, state.client_state, state.user, state.extra_files], "rest")
    add([state.lr_scheduler, state.loss_scaler], "more")
    return digest.hexdigest()
