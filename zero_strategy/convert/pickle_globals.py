"""The allow-list of names in a pickle: data, tensors and inert records, nothing else.

The `__setstate__` functions of numpy trust their input down to memory, so they are not called: a dtype is read from its
code, and values from their bytes. Source of the format: `numpy.dtype.__reduce__`, `numpy.ndarray.__reduce__`.

The list allows data, tensors and inert records; nothing is imported.

The pickle machine calls what it looks up, so every entry is one of three things: a value that cannot be called, a
`Maker` that checks its arguments and builds plain data, or a `Record` type that only keeps what it is given. None of
them can be changed from inside the pickle.

Source of the formats: Python's `pickle` protocols 0 to 5, and what `torch._tensor` and `torch._utils` pickle.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar, cast

import numpy as np
import torch

from zero_strategy.runtime.shown import brief

_CODES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}


class NumpyDtype:
    """A dtype by its code; the byte order follows as the pickle's state."""

    __slots__ = ("_dtype",)
    _dtype: np.dtype[Any]

    def __init__(self, code: Any, *rest: Any) -> None:
        if code not in _CODES:
            raise ValueError(f"a numpy value has the dtype {brief(code)}; read are {sorted(_CODES)}")
        self._dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self._dtype = self._dtype.newbyteorder(state[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, in native or foreign byte order."""
        return self._dtype


class NumpyArray:
    """An array whose shape, dtype and bytes come as the pickle's state."""

    __slots__ = ("tensor",)

    def __init__(self, *args: Any) -> None:
        self.tensor = torch.empty(0)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], NumpyDtype):
            raise ValueError("a numpy array has an unknown state")
        _, shape, dtype, by_columns, data = state
        if not isinstance(data, (bytes, bytearray)) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"a numpy array of shape {brief(shape)} is made of a {type(data).__name__}")
        if len(data) != prod(shape) * dtype.dtype.itemsize:
            raise ValueError(f"a numpy array of shape {brief(shape)} has {len(data)} bytes")
        values = np.frombuffer(bytes(data), dtype.dtype).reshape(shape, order="F" if by_columns else "C")
        self.tensor = torch.from_numpy(np.array(values, dtype.dtype.newbyteorder("="), order="C"))


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, NumpyDtype) or not isinstance(data, bytes) or len(data) != dtype.dtype.itemsize:
        raise ValueError("a numpy number has an unknown form")
    return np.frombuffer(data, dtype.dtype)[0].item()


def _numpy_type_only(*args: Any) -> Any:
    raise ValueError("numpy.ndarray is called by the pickle")


def numpy_globals() -> dict[str, Callable[..., Any]]:
    """Full name -> what builds it, for both of the names that numpy's modules have had."""
    makers: dict[str, Callable[..., Any]] = {"numpy.dtype": NumpyDtype, "numpy.ndarray": _numpy_type_only}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        makers |= {f"{module}.scalar": _scalar, f"{module}._reconstruct": NumpyArray}
    return makers


class Maker:
    """A function that the pickle may call, and neither change nor look into.

    Args:
        name: Full name of the global.
        build: Takes the pickle's arguments; checks them.
    """

    __slots__ = ("_build", "_name")
    _build: Callable[..., Any]
    _name: str

    def __init__(self, name: str, build: Callable[..., Any]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_build", build)

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError(f"the pickle tries to change {self._name}")

    def __call__(self, *args: Any) -> Any:
        return self._build(*args)

    @property
    def full_name(self) -> str:
        """Full name of the global."""
        return self._name


class _Locked(type):
    def __setattr__(cls, key: str, value: Any) -> None:
        raise ValueError(f"the pickle tries to change {cls.__name__}")

    def __delattr__(cls, key: str) -> None:
        raise ValueError(f"the pickle tries to change {cls.__name__}")


class Record(metaclass=_Locked):
    """An object of a class that is not there: its arguments and its state, without behaviour.

    Attributes:
        full_name: The class's name in the pickle.
        arguments: What the class was called with.
        state: What `__setstate__` would have been given; for most classes the instance's `__dict__`.
        entries: Items of a class derived from dict.
        elements: Items of a class derived from list.
    """

    full_name: ClassVar[str] = ""
    __slots__ = ("arguments", "elements", "entries", "state")
    arguments: tuple[Any, ...]
    state: Any
    entries: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.arguments, record.state, record.entries, record.elements = args, None, {}, []
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, value: Any) -> None:
        """Takes an element, as the pickle of a list does."""
        self.elements.append(value)

    def extend(self, values: Any) -> None:
        """Takes elements, as the pickle of a list does."""
        self.elements.extend(values)

    def field(self, name: str, default: Any = None) -> Any:
        """An attribute of the instance that was pickled."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def record_type(full_name: str) -> type[Record]:
    """A type of records for one class name; made anew for every load, so that loads share nothing."""
    made = _Locked(full_name.rpartition(".")[2], (Record,), {"__slots__": (), "full_name": full_name})
    return cast(type[Record], made)


class StorageType:
    """Stands for a class such as `torch.FloatStorage`: an element type."""

    __slots__ = ("dtype",)
    dtype: torch.dtype

    def __init__(self, dtype: torch.dtype) -> None:
        object.__setattr__(self, "dtype", dtype)

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError("the pickle tries to change a storage type")


class Storage:
    """Bytes of a tensor file with an element type; what persistent ids become.

    Attributes:
        dtype: Element type.
        numel: Elements.
        data: The bytes, or None while the file is only being surveyed.
    """

    __slots__ = ("data", "dtype", "numel")
    dtype: torch.dtype
    numel: int
    data: torch.UntypedStorage | None

    def __init__(self, dtype: torch.dtype, numel: int, data: torch.UntypedStorage | None) -> None:
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "data", data)

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError("the pickle tries to change a storage")


_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Untyped": torch.uint8,
}  # fmt: skip
RECORDS = ("argparse.Namespace", "types.SimpleNamespace")


def known_globals() -> dict[str, Any]:
    """Full name -> what it stands for, for plain data and tensors."""
    table: dict[str, Any] = {}
    for kind, dtype in _STORAGES.items():
        for module in ("torch", "torch.cuda", "torch.storage"):
            table[f"{module}.{kind}Storage"] = StorageType(dtype)
    table |= {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    makers: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _moved,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
        "torch.Size": _size,
        "torch.device": _device,
        "torch.Tensor": _type_only,
        "torch.nn.parameter.Parameter": _type_only,
        "torch.serialization._get_layout": _layout,
        "_codecs.encode": _bytes,
        "collections.OrderedDict": _ordered,
        "collections.defaultdict": _default_dict,
        "collections.Counter": _default_dict,
        "collections.deque": _deque,
        "builtins.set": _set,
        "builtins.frozenset": lambda *args: frozenset(_set(*args)),
        "builtins.bytearray": _bytes,
        "builtins.complex": _complex,
        "builtins.slice": _slice,
        "builtins.range": _range,
        "builtins.list": lambda: [],
        "builtins.dict": lambda: {},
        "builtins.int": lambda: 0,
        "builtins.float": lambda: 0.0,
        "builtins.getattr": _member,
        "pathlib.PosixPath": _path,
        "pathlib.WindowsPath": _path,
        "pathlib._local.PosixPath": _path,
        "pathlib._local.WindowsPath": _path,
        "copyreg._reconstructor": _reconstructed,
        **numpy_globals(),
    }
    return table | {name: Maker(name, build) for name, build in makers.items()}


# ---- tensors ----


def _counts(values: Any, what: str) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"a tensor's {what} is {brief(values)}")
    return tuple(values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """A view into a storage, checked to lie inside it: torch would rather enlarge the storage."""
    if not isinstance(storage, Storage):
        raise ValueError(f"a tensor is built on a {type(storage).__name__} instead of a storage")
    (start,), sizes, strides = _counts((offset,), "offset"), _counts(size, "size"), _counts(stride, "stride")
    if len(sizes) != len(strides):
        raise ValueError(f"a tensor of size {sizes} has the stride {strides}")
    stop = start + 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if 0 not in sizes and stop > storage.numel:
        raise ValueError(f"a tensor of size {sizes} at {start} ends beyond its storage of {storage.numel} elements")
    if storage.data is None:
        return torch.empty(0, dtype=storage.dtype)
    if 0 in sizes:
        return torch.empty(sizes, dtype=storage.dtype)
    return torch.empty(0, dtype=storage.dtype).set_(storage.data, start, sizes, strides)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> torch.Tensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor is built on a {type(storage).__name__} with the dtype {brief(dtype)}")
    numel = storage.numel * storage.dtype.itemsize // dtype.itemsize
    return _tensor(Storage(dtype, numel, storage.data), offset, size, stride)


def _parameter(data: Any, *rest: Any) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise ValueError(f"a parameter is built on a {type(data).__name__} instead of a tensor")
    return data


def _moved(data: Any, dtype: Any, *rest: Any) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor's dtype is {brief(dtype)}")
    return _parameter(data).to(dtype)


def _with_attributes(build: Any, kind: Any, args: Any, state: Any) -> torch.Tensor:
    """A tensor with attributes of its own, which are kept apart: they must not hide the tensor's methods."""
    if not isinstance(build, Maker) or not isinstance(args, tuple):
        raise ValueError(f"a tensor is built by {brief(build)}")
    tensor = build(*args)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{build.full_name} does not build a tensor")
    attributes = state[0] if isinstance(state, tuple) and state else state
    vars(tensor)[ATTRIBUTES] = dict(attributes) if isinstance(attributes, dict) else {}
    return tensor


ATTRIBUTES = "stored_attributes"
"""Attribute of a tensor that holds the attributes it was saved with, as a dict."""


def _type_only(*args: Any) -> Any:
    raise ValueError("a tensor class is called without a storage")


def _size(values: Any = ()) -> torch.Size:
    return torch.Size(_counts(values, "size"))


def _device(kind: Any, index: Any = None) -> torch.device:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise ValueError(f"a device is ({brief(kind)}, {brief(index)})")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError(f"a tensor has the layout {brief(name)}; only torch.strided is read")
    return torch.strided


# ---- plain data ----


def _bytes(text: Any = "", encoding: Any = "latin1", *rest: Any) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "iso-8859-1"):
        raise ValueError(f"bytes are encoded as {brief(encoding)}")
    return text.encode("latin1")


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    if not isinstance(pairs, (list, tuple)):
        raise ValueError(f"an OrderedDict is made of a {type(pairs).__name__}")
    return OrderedDict((key, value) for key, value in pairs)


def _default_dict(*args: Any) -> dict[Any, Any]:
    return dict(args[0]) if args and isinstance(args[0], dict) else {}


def _deque(items: Any = (), maxlen: Any = None) -> deque[Any]:
    return deque(items if isinstance(items, (list, tuple)) else ())


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise ValueError(f"a set is made of a {type(items).__name__}")
    return set(items)


def _complex(real: Any, imag: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imag, float):
        raise ValueError(f"a complex number is made of {brief(real)} and {brief(imag)}")
    return complex(real, imag)


def _slice(*args: Any) -> slice:
    if not 1 <= len(args) <= 3 or not all(value is None or type(value) is int for value in args):
        raise ValueError(f"a slice is made of {brief(args)}")
    return slice(*args)


def _range(*args: Any) -> range:
    if not 1 <= len(args) <= 3 or not all(type(value) is int for value in args):
        raise ValueError(f"a range is made of {brief(args)}")
    return range(*args)


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"a path is made of {brief(parts)}")
    return "/".join(parts).replace("//", "/")


def _reconstructed(kind: Any, base: Any, state: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        raise ValueError(f"an object of {brief(kind)} is rebuilt")
    return kind()


def _member(*args: Any) -> Record:
    """A member of an enumeration as Python 3.11.0 to 3.11.3 pickle it, by name; nothing is looked up."""
    kind, name = args if len(args) == 2 else (None, None)
    if not (isinstance(kind, type) and issubclass(kind, Record)) or not isinstance(name, str):
        raise ValueError(f"builtins.getattr is called with {brief(args)}, no class of records and a member's name")
    return kind(name)


def with_own(table: Mapping[str, Any], allow: Mapping[str, Callable[..., Any] | None]) -> dict[str, Any]:
    """The table with a caller's further names: a function that is called with the pickle's arguments, or None."""
    own = {name: record_type(name) if build is None else Maker(name, build) for name, build in allow.items()}
    return {**table, **{name: record_type(name) for name in RECORDS}, **own}
