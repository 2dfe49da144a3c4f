"""Tensors in files of `torch.save`, rebuilt from type, shape and numbers; a pickle creates nothing else.

PyTorch trusts what a pickle says about sparse, quantised and nested tensors, whose indices can then reach into other
memory, and it exposes its own functions. Here only dense tensors, NumPy arrays and plain values are rebuilt.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from medfl.core import pick, pick_known, printable
from medfl.storage.pickled_arrays import STAND_INS, PickledArray, PickledType, latin1


def dense(numbers: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Tensor:
    """Return a tensor on the numbers of a storage, without a gradient; UnpicklingError if it is not a plain one.

    Raises:
        RuntimeError: it extends beyond its storage.
    """
    # A negative or huge number here would make PyTorch read other memory.
    described = (
        isinstance(numbers, Tensor) and isinstance(size, tuple) and isinstance(stride, tuple)
    )
    if not described or any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
        raise pickle.UnpicklingError("it holds a tensor that is not described as PyTorch does it")
    # After the gradient and the hooks: flags of a view of complex numbers.
    if any(more[2:]):
        raise pickle.UnpicklingError(
            "it holds a tensor that is conjugated or negated when it is read"
        )

    # By set_, so that it is not a view of another tensor.
    tensor: Tensor = numbers.new_empty(0).set_(numbers.as_strided(size, stride, offset))
    return tensor


def first(value: Any, *_: Any) -> Any:
    """Return the object that a pickle wraps: a Parameter's tensor, a Size's tuple, a Counter's dict."""
    return value


class ScriptModule(dict[str, object]):
    """Represents a TorchScript module: its attributes by name; its code is not read."""


def put(target: Any, names: Sequence[Any], values: Sequence[Any]) -> None:
    """Put values into a dict; UnpicklingError for a name that is not text or a number, since Python would hash it."""
    plain = type(target) in (dict, OrderedDict)
    if not plain or not all(isinstance(name, _NAMES) for name in names):
        raise pickle.UnpicklingError("it holds values by other things than texts and numbers")
    target.update(zip(names, values, strict=True))


def ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """Return an OrderedDict; Python 2 passes its pairs at once."""
    mapping: OrderedDict[Any, Any] = OrderedDict()
    if pairs and type(pairs) is not list:
        raise pickle.UnpicklingError(
            "it holds an OrderedDict that is not described as Python does it"
        )
    put(mapping, [name for name, _ in pairs], [value for _, value in pairs])
    return mapping


_KINDS = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
_TYPED = (
    "restore_type_tag",
    *(f"build_{kind}list" for kind in ("int", "double", "bool", "tensor")),
)
"""Wrappers of TorchScript's lists and dicts."""
_REBUILT: Mapping[str, Any] = {
    **STAND_INS,
    **{
        f"{place}.{name}Storage": kind
        for place in ("torch", "torch.cuda")
        for name, kind in _KINDS.items()
    },
    **{f"torch._utils._rebuild_tensor{version}": dense for version in ("", "_v2")},
    "torch._utils._rebuild_parameter": first,
    "torch.Size": first,
    "collections.Counter": first,
    "collections.OrderedDict": ordered,
    "_codecs.encode": latin1,
    **{f"torch.jit._pickle.{name}": first for name in _TYPED},
}
"""Name in a file of `torch.save` -> the function to call instead, or the type of a storage's numbers."""
_STEPS = b"(.)]}NGJKMXUhjqrQctabesuR\x80\x85\x86\x87\x88\x89\x8a"
"""Pickle opcodes that `torch.save` writes: others create objects, or request memory of any size."""
_SCRIPT_CLASS = "a class of TorchScript"
"""Represents any such class: it cannot be called."""
_MOST_NAMES = 10_000_000
"""Maximum total length of all names in a TorchScript file, each with those of its enclosing modules."""
_NAMES = (str, bytes, int, float, type(None))
_SINGLE = (*_NAMES, Tensor, np.ndarray, np.generic)
_VERSIONS = ("version", "spectral_norm")
"""Per-module metadata of weights; another key would make `load_state_dict` assign the file's tensors directly."""
_ALLOWED = "a checkpoint is tensors and plain values"


def require_plain_values(value: Any) -> None:
    """Raise an UnpicklingError if there is anything but tensors, arrays and plain values, at any depth."""
    # The parts themselves are kept: an id is reused once its object is gone.
    todo = [value]
    visited = {}
    while todo:
        part = todo.pop()
        if isinstance(part, _SINGLE) or id(part) in visited:
            continue

        visited[id(part)] = part
        if not isinstance(part, dict | list | tuple):
            raise pickle.UnpicklingError(f"it holds a {type(part).__name__} as a value; {_ALLOWED}")

        if isinstance(part, dict):
            # An OrderedDict may have attributes, such as a state dict's `_metadata`.
            todo += [*part.values(), *getattr(part, "__dict__", {}).values()]
        else:
            todo += part


class PlainUnpickler(pickle._Unpickler):
    """Reads only tensors, NumPy arrays and numbers, and plain values, as `torch.save` writes them.

    Attributes:
        storages: key -> bytes of each requested storage.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], size: int, read: Callable[[str, int], Tensor]) -> None:
        """Read a pickle.

        Args:
            file: to read from.
            size: bytes of the whole file, which limit what is created from it.
            read: returns the bytes of a storage from its key and their number.
        """
        super().__init__(file, encoding="utf-8")
        self._left = 2 * size  # an array is a string and bytes
        self._read = read
        self.storages: dict[str, Tensor] = {}

    def load(self) -> Any:
        """Return the next value of the file; UnpicklingError names anything else it contains."""
        value = super().load()
        require_plain_values(value)
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for a name."""
        if module.partition(".")[0] == "__torch__":
            return _SCRIPT_CLASS
        if (full := f"{module}.{name}") not in _REBUILT:
            raise pickle.UnpicklingError(f"it holds {printable(full, 80)}; {_ALLOWED}")
        return _REBUILT[full]

    def persistent_load(self, pid: Any) -> Tensor:
        """Return a storage as a flat tensor of its numbers."""
        match pid:
            case ("storage", torch.dtype() as kind, str() as key, _, int() as count, *view) if (
                not any(view)
            ):
                length = count * kind.itemsize
            case _:
                raise pickle.UnpicklingError(
                    "it holds a storage that is not described as PyTorch does it"
                )

        if key not in self.storages:
            self._take(length)
            self.storages[key] = self._read(key, length)

        if len(self.storages[key]) != length:
            raise pickle.UnpicklingError("it holds a storage of another size than it says")

        return self.storages[key].view(kind)

    def _take(self, length: int) -> None:
        self._left -= length
        if length < 0 or self._left < 0:
            raise pickle.UnpicklingError(
                "what it says would take more memory than the file has bytes"
            )

    def _take_parts(self, arguments: object) -> None:
        """Count the arguments of a call, which may copy them: one short pickle opcode can repeat them."""
        if not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("it holds a call that is not described as Python does it")

        self._take(len(arguments))
        for argument in arguments:
            if isinstance(argument, str | bytes | list | tuple):
                self._take(len(argument))

    def _call(self) -> None:
        arguments = self.stack.pop()
        self._take_parts(arguments)
        self.stack[-1] = self.stack[-1](*arguments)

    def _new(self) -> None:
        # with its arguments, of which there are none
        if len(self.stack) < 2 or self.stack[-2] is not _SCRIPT_CLASS:
            self._refuse()

        self.stack[-2:] = [ScriptModule()]

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        only_metadata = isinstance(state, dict) and state.keys() == {"_metadata"}
        if isinstance(target, PickledType | PickledArray):
            self._take_parts(state)
            target.__setstate__(state)
        elif isinstance(target, OrderedDict) and only_metadata:
            self._take(len(state["_metadata"]))
            metadata = {}
            for name, facts in state["_metadata"].items():
                metadata[name] = pick_known(facts, _VERSIONS)
            vars(target)["_metadata"] = metadata
        elif isinstance(target, ScriptModule) and type(state) is dict:
            self._take(len(state))
            target.update(state)
        else:
            raise pickle.UnpicklingError(
                f"it sets attributes of {type(target).__name__}; {_ALLOWED}"
            )

    def _set_item(self) -> None:
        value = self.stack.pop()
        name = self.stack.pop()
        put(self.stack[-1], [name], [value])

    def _set_items(self) -> None:
        items = self.pop_mark()
        put(self.stack[-1], items[::2], items[1::2])

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it is no pickle as torch.save writes it, of protocol 2")

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), _refuse),
        **pick(pickle._Unpickler.dispatch, _STEPS),
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _new,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def script_tensors(module: ScriptModule) -> ScriptModule:
    """Return the tensors of a TorchScript module and its submodules, by their names in a state dict."""
    tensors = ScriptModule()
    todo = [("", module)]
    length = 0
    for prefix, part in todo:
        # a module that contains itself would never end
        length += sum(1 + len(prefix) + len(name) for name in part)
        if length > _MOST_NAMES:
            raise pickle.UnpicklingError("its modules have more names than any network's")

        for name, value in part.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}{name}"] = value
            elif isinstance(value, ScriptModule):
                todo.append((f"{prefix}{name}.", value))

    return tensors
