"""The restricted unpickler: plain data comes back as it was; nothing else gets in."""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import io
import os
import pickle
import struct
import zipfile
from argparse import Namespace
from decimal import Decimal
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zero_strategy.convert.pickle_globals import ATTRIBUTES, Record
from zero_strategy.convert.pickles import load_restricted

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def saved(path: Path, value: Any, zipped: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def with_pickle(path: Path, data: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A file as torch.save writes it, with a pickle of our own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return path


def tensor_pickle(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, numel: int = 4) -> bytes:
    """A float32 tensor on storage 0."""

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + number(numel) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    body = storage + number(offset) + numbers(size) + numbers(stride) + b"\x89" + hooks
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + body + b"tR."


@FORMATS
@pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "read"])
def test_tensors_come_back_bit_for_bit_and_shared_storages_stay_shared(tmp_path, zipped, mmap):
    base = torch.randn(4, 6)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    value = {
        "transposed": base.t(),
        "row": base[1],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        **{str(dtype): torch.randn(5).to(dtype) for dtype in dtypes},
    }
    loaded = load_restricted(saved(tmp_path / "a.pt", value, zipped), mmap=mmap)
    assert loaded.keys() == value.keys()
    for key, tensor in value.items():
        assert type(loaded[key]) is torch.Tensor and not loaded[key].requires_grad
        assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape
        assert torch.equal(loaded[key], tensor.detach())
    assert loaded["row"].untyped_storage().data_ptr() == loaded["transposed"].untyped_storage().data_ptr()


@FORMATS
def test_plain_data_comes_back(tmp_path, zipped):
    shared = [1, 2]
    value = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {"x": [1]}),
        "count": collections.Counter("aab"),
        "queue": collections.deque([1, 2], maxlen=4),
        "numbers": (1, -(2**70), 2.5, 1 + 2j, True, None),
        "text": "text", "bytes": b"\x00\xff", "set": {1, 2}, "frozen": frozenset({3}),
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "path": Path("a/b"), "twice": [shared, shared],
        "number": np.float32(1.5), "array": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    }  # fmt: skip
    loaded = load_restricted(saved(tmp_path / "a.pt", value, zipped))
    array, twice = loaded.pop("array"), loaded["twice"]
    assert torch.equal(array, torch.arange(6).view(2, 3).t()) and loaded.pop("number") == 1.5
    assert twice[0] is twice[1]
    del value["number"], value["array"]
    expected = value | {"default": {"x": [1]}, "count": {"a": 2, "b": 1}, "queue": [1, 2], "path": "a/b"}
    assert loaded == expected and list(loaded["ordered"]) == ["b", "a"]
    assert all(type(loaded[key]) is dict for key in ("ordered", "default", "count"))


def test_objects_that_contain_themselves_come_back(tmp_path):
    ring: list[Any] = [1]
    ring.append({"ring": ring})
    loaded = load_restricted(saved(tmp_path / "a.pt", ring))
    assert loaded[1]["ring"] is loaded


def test_later_pickle_protocols_are_read(tmp_path):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        torch.save({"a": torch.ones(3), "b": [b"x" * 300, {1}]}, tmp_path / "a.pt", pickle_protocol=protocol)
        loaded = load_restricted(tmp_path / "a.pt")
        assert torch.equal(loaded["a"], torch.ones(3)) and loaded["b"] == [b"x" * 300, {1}]


def test_a_tensors_attributes_are_kept_beside_it(tmp_path):
    tensor = torch.ones(2)
    tensor.ds_id, tensor.numel = "3_5", 7
    loaded = load_restricted(saved(tmp_path / "a.pt", tensor))
    assert vars(loaded) == {ATTRIBUTES: {"ds_id": "3_5", "numel": 7}} and loaded.numel() == 2


class _Scaler:
    def __init__(self) -> None:
        self.cur_scale = 8.0


class _Stage(IntEnum):
    two = 2


_Scaler.__module__, _Scaler.__qualname__ = "deepspeed.runtime.fp16.loss_scaler", "LossScaler"
_Stage.__module__, _Stage.__qualname__ = "deepspeed.runtime.zero.config", "ZeroStageEnum"


class _Writer(pickle._Pickler):
    """Pickles a class under the name that it claims, whether or not that can be imported."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{name or obj.__qualname__}\n".encode())

    dispatch = {**pickle._Pickler.dispatch, type(_Scaler): save_global, type(_Stage): save_global}


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Writer(buffer, 2).dump(value)
    return buffer.getvalue()


def test_deepspeeds_classes_become_inert_records(tmp_path):
    scaler, stage = load_restricted(with_pickle(tmp_path / "a.pt", pickled([_Scaler(), _Stage.two])))
    assert isinstance(scaler, Record) and scaler.full_name == "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert scaler.field("cur_scale") == 8.0 and scaler.field("absent", 3) == 3
    assert isinstance(stage, Record) and stage.arguments in [(2,), ("two",)]  # by name: Python 3.11.0 to 3.11.3
    assert not callable(stage)


def test_namespaces_become_records_and_further_names_can_be_allowed(tmp_path):
    value = {"args": Namespace(layers=2), "when": datetime.date(2020, 1, 2), "sum": Decimal("0.5")}
    path = saved(tmp_path / "a.pt", value)
    with pytest.raises(ValueError, match=r"a\.pt: holds datetime\.date, decimal\.Decimal, neither plain"):
        load_restricted(path)
    loaded = load_restricted(path, allow={"datetime.date": None, "decimal.Decimal": lambda *args: args})
    assert loaded["args"].field("layers") == 2 and loaded["sum"] == ("0.5",)
    assert isinstance(loaded["when"], Record) and loaded["when"].arguments == (b"\x07\xe4\x01\x02",)


# ---- attacks ----


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


def touch(path: Path) -> str:
    return f"touch {path}"


@FORMATS
@pytest.mark.parametrize(
    "function, name",
    [
        (os.system, r"(posix|nt)\.system"),
        (eval, r"builtins\.eval"),
        (exec, r"builtins\.exec"),
        (__import__, r"builtins\.__import__"),
        (functools.partial, r"functools\.partial"),
        (torch.load, r"torch\.serialization\.load"),
        (torch.hub.load, r"torch\.hub\.load"),
        (torch.storage._load_from_bytes, r"torch\.storage\._load_from_bytes"),
        (torch.jit.load, r"torch\.jit\._serialization\.load"),
        (torch._utils._rebuild_wrapper_subclass, r"torch\._utils\._rebuild_wrapper_subclass"),
        (np.load, r"numpy\.load"),
        (pickle.loads, r"_?pickle\.loads"),
        (io.open, r"_?io\.open"),
        (vars, r"builtins\.vars"),
        (setattr, r"builtins\.setattr"),
    ],
)
def test_calls_of_anything_else_are_refused_by_name(tmp_path, zipped, function, name):
    victim = tmp_path / "victim"
    path = saved(tmp_path / "a.pt", {"x": _Call(function, touch(victim))}, zipped)
    with pytest.raises(ValueError, match=rf"a\.pt: holds {name}, neither plain data.*nothing was loaded"):
        load_restricted(path)
    assert not victim.exists()


class Stage(enum.IntEnum):
    weights = 3


@FORMATS
def test_members_of_enumerations_are_told_by_name_where_python_pickles_them_so(tmp_path, zipped):
    """As 3.11.0 to 3.11.3 do; `getattr` on anything else is refused, and never carried out."""
    name = f"{Stage.__module__}.Stage"
    path = saved(tmp_path / "a.pt", {"x": _Call(getattr, Stage, "weights")}, zipped)
    assert load_restricted(path, allow={name: None})["x"].arguments == ("weights",)
    for number, args in enumerate([(collections.OrderedDict, "get"), ("text", "upper"), ([], "append"), (Stage,)]):
        path = saved(tmp_path / f"{number}.pt", {"x": _Call(getattr, *args)}, zipped)
        with pytest.raises(ValueError, match=r"builtins\.getattr is called with"):
            load_restricted(path, allow={name: None})


def test_dotted_names_and_names_computed_on_the_stack_are_refused(tmp_path):
    dotted = b"\x80\x04\x8c\x0bcollections\x8c\x0fOrderedDict.get\x93."
    with pytest.raises(ValueError, match=r"holds collections\.OrderedDict\.get"):
        load_restricted(with_pickle(tmp_path / "a.pt", dotted))
    hidden = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."
    with pytest.raises(ValueError, match=r"holds os\.system"):
        load_restricted(with_pickle(tmp_path / "b.pt", hidden))


ORDERED = b"ccollections\nOrderedDict\n"
SCALER = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
STATE = b"X\x0c\0\0\0__setstate__"


@pytest.mark.parametrize(
    "body, message",
    [
        (ORDERED + b"}" + STATE + ORDERED + b"sb.", "builds no plain data"),  # BUILD on a maker
        (ORDERED + b"N}" + STATE + ORDERED + b"s\x86b.", "tries to change collections.OrderedDict"),
        (SCALER + b"}" + STATE + ORDERED + b"sb.", "builds no plain data"),  # BUILD on a record's type
        (SCALER + b"N}" + STATE + ORDERED + b"s\x86b.", "builds no plain data|tries to change LossScaler"),
        (SCALER + b"R.", "takes an object from an empty stack"),
        (b"X\x01\0\0\0a)R.", "builds no plain data"),  # calling a string
        (SCALER + b")R)R.", "builds no plain data"),  # calling a record
        (b"cbuiltins\nlist\n(K\x01tR.", "builds no plain data"),
        (b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "bytes are encoded"),
        (b"cbuiltins\nset\ncbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R\x85R.", "a set is made of a range"),
        (b"ctorch\nTensor\n)R.", "without a storage"),
        (ORDERED + b".", "holds collections.OrderedDict itself"),
        (SCALER + b".", "holds deepspeed.runtime.fp16.loss_scaler.LossScaler itself"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"Nr\xff\xff\xff\x7f.", "opcode LONG_BINPUT 2147483647"),
        (b"Pid\n.", "opcode PERSID"),
        (b"X\x07\0\0\0storage\x85Q.", "a persistent id is"),
        (b"(X\x07\0\0\0storage" + ORDERED + b"X\x01\0\0\x000NK\x04tQ.", "a persistent id is"),
        (b"ctorch\nFloatStorage\nN}X\x05\0\0\0dtypeK\x01s\x86b.", "tries to change a storage type"),
        (b"cnumpy\ndtype\nX\x02\0\0\0O8\x85R.", "numpy value has the dtype 'O8'"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(ccollections\nOrderedDict\nN)NtR.", "does not build a tensor"),
        (b"X\xff\xff\xff\x7fabc.", "truncated or damaged"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "truncated or damaged"),
        (b"N", "truncated or damaged"),
    ],
)
def test_gadgets_of_the_pickle_machine_do_nothing(tmp_path, body, message):
    with pytest.raises(ValueError, match=rf"a\.pt: .*({message})"):
        load_restricted(with_pickle(tmp_path / "a.pt", b"\x80\x02" + body))
    load_restricted(saved(tmp_path / "b.pt", collections.OrderedDict(a=1)))  # nothing was changed for later


def test_a_persistent_id_inside_of_another_is_refused(tmp_path):
    inner = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
    outer = b"(X\x07\0\0\0storage" + inner + b"X\x01\0\0\x001X\x03\0\0\0cpuK\x04tQ"
    with pytest.raises(ValueError, match="a persistent id is"):
        load_restricted(with_pickle(tmp_path / "a.pt", b"\x80\x02" + outer + b".", {"0": bytes(16)}))


@pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "read"])
@pytest.mark.parametrize(
    "data, stored, message",
    [
        (tensor_pickle((4,), (1,)), 16, None),
        (tensor_pickle((2, 2), (0, 3)), 16, None),
        (tensor_pickle((5,), (1,)), 16, r"ends beyond its storage of 4 elements"),
        (tensor_pickle((2, 2), (1, 3)), 16, r"ends beyond its storage"),
        (tensor_pickle((4,), (1,), offset=1), 16, r"ends beyond its storage"),
        (tensor_pickle((1,), (1,), offset=-1), 16, r"offset is \(-1\)"),
        (tensor_pickle((1,), (-1,)), 16, r"stride is"),
        (tensor_pickle((4,), (1, 1)), 16, r"size \(4,\) has the stride"),
        (tensor_pickle((8,), (1,), numel=8), 16, r"entry data/0 has 16 bytes, the pickle says 32"),
        (tensor_pickle((4,), (1,), numel=2**31 - 1), 16, r"entry data/0 has 16 bytes, the pickle says 8589934588"),
        (tensor_pickle((4,), (1,)), None, r"entry data/0 is missing"),
    ],
)
def test_claims_about_storages_are_compared_with_the_file(tmp_path, mmap, data, stored, message):
    path = with_pickle(tmp_path / "a.pt", data, {} if stored is None else {"0": bytes(stored), "1": bytes(64)})
    if message is None:
        assert load_restricted(path, mmap=mmap).count_nonzero() == 0
        return
    with pytest.raises(ValueError, match=rf"a\.pt: .*{message}"):
        load_restricted(path, mmap=mmap)


def test_an_archives_names_lead_nowhere(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", tensor_pickle((4,), (1,)).replace(b"\x01\0\0\x000", b"\x04\0\0\0../x"))
        archive.writestr("archive/data/../x", bytes(16))
        archive.writestr("../outside", b"outside")
    (tmp_path / "inner").mkdir()
    os.rename(path, tmp_path / "inner" / "a.pt")
    assert load_restricted(tmp_path / "inner" / "a.pt").tolist() == [0, 0, 0, 0]
    assert sorted(os.listdir(tmp_path)) == ["inner"]  # nothing is unpacked


def test_strange_archives_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N." + bytes(1 << 20))
    with pytest.raises(ValueError, match=r"bomb\.pt: entry 'archive/data\.pkl' is compressed"):
        load_restricted(tmp_path / "bomb.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("readme", b"")
    with pytest.raises(ValueError, match=r"other\.pt: is a zip file, but not one"):
        load_restricted(tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        for entry in ("data.pkl", "constants.pkl"):
            archive.writestr(f"archive/{entry}", b"\x80\x02N.")
    with pytest.raises(ValueError, match=r"script\.pt: is a zip file, but not one"):
        load_restricted(tmp_path / "script.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.pt: is not a file that torch\.save wrote"):
        load_restricted(tmp_path / "text.pt")


@FORMATS
def test_every_truncation_is_an_error_that_names_the_file(tmp_path, zipped):
    path = saved(tmp_path / "whole.pt", {"a": torch.randn(64), "b": [1, 2]}, zipped)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 41):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.pt"):
            load_restricted(tmp_path / "cut.pt")


@FORMATS
def test_random_damage_is_either_an_error_or_plain_data(tmp_path, zipped):
    path = saved(tmp_path / "whole.pt", {"a": torch.randn(8), "b": [1, 2], "o": collections.OrderedDict(a=1)}, zipped)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[random.integers(len(whole))] ^= 1 << random.integers(8)
        (tmp_path / "cut.pt").write_bytes(damaged)
        try:
            load_restricted(tmp_path / "cut.pt")
        except ValueError as error:
            assert "cut.pt" in str(error)


def test_damaged_tensors_are_noticed_where_the_file_is_read(tmp_path):
    path = saved(tmp_path / "a.pt", {"a": torch.full((64,), 3.0)})
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"\0\0\x40\x40" * 8) + 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.pt: entry data/0 is damaged"):
        load_restricted(path, mmap=False)
