"""Arrays and numbers in pickles: those that NumPy writes are read, and no pickle reaches NumPy's own types."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from medfl.bundle.zoo.compatibility import arrays_in_pickles
from medfl.datasets.readers.stacks import _unpickled
from medfl.storage.pickled_arrays import STAND_INS

ARRAYS = {
    "bytes": np.arange(6, dtype=np.uint8).reshape(2, 3), "big-endian": np.arange(6, dtype=">i4"),
    "by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "truth": np.array([True, False]),
    "no axis": np.array(3.5), "complex": np.array([1j], np.complex64), "half": np.array([0.5], np.float16),
}  # fmt: skip
MULTIARRAY = np.zeros(0).__reduce__()[0].__module__  # each NumPy has its own place for it


class Made:
    """Pickled as a call, and a state for what it returns."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


def of_type(kind: Any, data: bytes = bytes(32), shape: Any = (4,)) -> Made:
    rebuild = np.zeros(0).__reduce__()[0]
    return Made(rebuild, (np.ndarray, (0,), b"b"), (1, shape, kind, False, data))


PLAIN = (3, "|", None, None, None, -1, -1, 0)
FIELD = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
SUBARRAY = (3, "<", (np.dtype("f4"), (10**6,)), None, None, -1, -1, 0)
HOSTILE = {
    "pointers": of_type(Made(np.dtype, ("O8", False, True), PLAIN)),
    "pointers in a field": of_type(Made(np.dtype, ("V8", False, True), FIELD)),
    "a subarray": of_type(Made(np.dtype, ("f8", False, True), SUBARRAY)),
    "too few bytes": of_type(np.dtype("f8"), bytes(8)),
    "too many bytes": of_type(np.dtype("f8"), bytes(64)),
    "less than nothing": of_type(np.dtype("f8"), bytes(32), (-2, -2)),
    "text": of_type(Made(np.dtype, ("U2", False, True), PLAIN)),
    "a number of pointers": Made(np.float64(0).__reduce__()[0], (Made(np.dtype, ("O8", False, True), PLAIN), bytes(8))),
}  # fmt: skip


def torch_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save({"x": value}, file)
    file.seek(0)
    with arrays_in_pickles():
        return torch.load(file, weights_only=True)["x"]


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_those_that_numpy_reads(array: Any) -> None:
    for found in (
        *(_unpickled(pickle.dumps({"x": array}, n))["x"] for n in (2, 3, 4)),
        torch_loaded(array),
    ):
        expected = pickle.loads(pickle.dumps(array))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(found, expected)


def test_numbers_are_those_that_numpy_reads() -> None:
    for number in (np.float64(2.5), np.int32(-3), np.bool_(True)):
        assert torch_loaded(number) == number
        assert type(torch_loaded(number)) is type(number)


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_nothing_else_is_made(value: Any) -> None:
    """NumPy itself would take what the pickle says of a type, and use the bytes of the file as pointers."""
    with pytest.raises(pickle.UnpicklingError):
        _unpickled(pickle.dumps({"x": value}, 2))
    with pytest.raises(pickle.UnpicklingError):
        torch_loaded(value)


def test_an_array_that_is_asked_for_directly_is_empty() -> None:
    """NumPy's own would give memory that somebody else has used."""
    found = _unpickled(pickle.dumps({"x": Made(np.ndarray, ((10**6,), "f8"))}, 2))["x"]
    assert found.size == 0


def test_no_name_of_numpy_is_let_through() -> None:
    assert f"{MULTIARRAY}._reconstruct" in STAND_INS
    assert not [
        name for name, made in STAND_INS.items() if str(made.__module__).startswith("numpy")
    ]
