"""Files of `torch.save`: tensors and plain values are read as they were, and nothing else is rebuilt."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medfl.storage.files import load_pickled

X = torch.arange(24.0).reshape(4, 6)
FRIENDLY: dict[str, Any] = {
    "tensor": X, "column": X[:, 1], "turned": X.T[1:], "half": X.half(), "bfloat16": X.bfloat16(), "double": X.double(),
    "bool": X > 3, "byte": X.byte(), "short": X.short(), "counter": torch.tensor(3), "empty": torch.empty(0, 3),
    "none": torch.empty(0), "complex": torch.complex(X, X), "parameter": torch.nn.Parameter(X[0].clone()),
    "wide": torch.ones(1).expand(5), "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "values": [1, -2.5, True, None, "é", b"\xff\0", 2**100, float("inf")], "tuple": (1, (2, [3])), 4: {5: "six"},
    "shape": (4, 6), "milestones": {3: 1, 5: 1},
    "array": np.arange(6.0).reshape(2, 3), "zeros": np.zeros(10**5, np.uint8), "number": np.float64(0.5),
}  # fmt: skip
WRITTEN = FRIENDLY | {"shape": X.shape, "milestones": Counter([3, 5])}
"""The same as it is written: shapes and counts come as a tuple and a dict."""


class Made:
    """Pickled as a call, and a state for what it returns."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


def saved(path: Path, value: Any, archive: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=archive)
    return path


def packed(path: Path, steps: bytes, fill: int = 0) -> Path:
    """Write an archive with these steps as its pickle, and bytes that nothing asks for."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + steps + b".")
        archive.writestr("a/data/0", bytes(fill))
    return path


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor
        assert (found.dtype, found.stride(), found.device.type) == (
            expected.dtype,
            expected.stride(),
            "cpu",
        )
        return torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("archive", [True, False])
def test_tensors_and_plain_values_are_read_as_they_were(tmp_path: Path, archive: bool) -> None:
    found = load_pickled(saved(tmp_path / "a.pt", WRITTEN, archive))
    assert list(found) == list(FRIENDLY)
    assert [name for name in FRIENDLY if not same(found[name], FRIENDLY[name])] == []
    assert (
        found["turned"].untyped_storage().data_ptr() == found["tensor"].untyped_storage().data_ptr()
    )
    assert not found["turned"]._is_view()


@pytest.mark.parametrize("archive", [True, False])
def test_a_training_checkpoint_is_read_and_loaded(tmp_path: Path, archive: bool) -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 1)
    )
    tied = torch.nn.ModuleDict({"a": network[0], "b": network[0]})
    torch.nn.utils.spectral_norm(network[2])
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    parts = {"model": network, "tied": tied, "optimizer": optimizer, "scheduler": scheduler}
    path = saved(
        tmp_path / "a.pt",
        {name: part.state_dict() for name, part in parts.items()} | {"epoch": 3},
        archive,
    )
    found = load_pickled(path)
    assert found["model"]._metadata == network.state_dict()._metadata
    assert found["tied"]["a.weight"].data_ptr() == found["tied"]["b.weight"].data_ptr()
    for name, part in parts.items():
        part.load_state_dict(found[name])


@pytest.mark.parametrize("archive", [True, False])
def test_what_a_gpu_wrote_comes_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: bool
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    assert same(load_pickled(saved(tmp_path / "a.pt", {"w": X}, archive))["w"], X)


def test_older_pythons_and_files_without_checksums_are_read(tmp_path: Path) -> None:
    assert same(load_pickled(saved(tmp_path / "a.pt", Made(OrderedDict, ([["w", X]],))))["w"], X)
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        assert same(load_pickled(saved(tmp_path / "b.pt", {"w": X}))["w"], X)
    finally:
        torch.serialization.set_crc32_options(before)


def attributes() -> OrderedDict[str, Any]:
    weights = OrderedDict(w=X)
    vars(weights)["copy"] = X
    return weights


def described(*changed: Any, **more: Any) -> Made:
    """Return what is pickled as a view of the numbers of X with other places than PyTorch would write."""
    function, (storage, *_) = X.__reduce_ex__(2)
    return Made(more.get("function", function), (storage, *changed))


INDICES, ONE = torch.tensor([[10**6]]), torch.ones(1)
HOSTILE = {
    "a function": torch._tensor._rebuild_from_type_v2,
    "a function of theirs": torch._utils._rebuild_tensor_v2,
    "a class": torch.nn.Parameter,
    "a dict's class": OrderedDict,
    "a class as a tensor": Made(torch._utils._rebuild_parameter, (OrderedDict, False, OrderedDict())),
    "a kind of numbers": torch.float32,
    "a storage's class": torch.FloatStorage,
    "an array's kind": np.dtype("f4"),
    "a layout": torch.sparse_coo,
    "a device": torch.device("cpu"),
    "a set": {1, 2},
    "a complex number": 1j,
    "a sparse tensor": X.to_sparse(),
    "sparse indices": Made(torch._utils._rebuild_sparse_tensor, (torch.sparse_coo, (INDICES, ONE, (2,), True))),
    "rows": Made(
        torch._utils._rebuild_sparse_tensor,
        (torch.sparse_csr, (torch.tensor([0, 10**6]), torch.tensor([10**6]), ONE, (1, 1))),
    ),
    "attributes of a tensor": Made(
        torch._tensor._rebuild_from_type_v2, (torch.Tensor, torch.Tensor, (), {"grad_fn": 1, "shape": (10**6,)})
    ),
    "attributes of a parameter": Made(
        torch._utils._rebuild_parameter_with_state, (X, False, OrderedDict(), {"shape": (10**6,)})
    ),
    "attributes of a dict": attributes(),
    "a state of a tensor": Made(torch._utils._rebuild_parameter, (X, False, OrderedDict()), (X, 0, (2,), (1,))),
    "an empty tensor's state": Made(torch.Tensor, (), (X._typed_storage(), 0, (10**6,), (1,))),
    "no device": torch.empty(3, device="meta"),
    "another device": Made(torch._utils._rebuild_device_tensor_from_cpu_tensor, (X, torch.float32, "meta", False)),
    "a wrapper": Made(
        torch._utils._rebuild_wrapper_subclass,
        (torch.Tensor, torch.float32, (10**6,), (1,), 0, torch.strided, "cpu", False),
    ),
    "quantised": described(
        0, (2,), (1,), (torch.per_tensor_affine, 0.1, 0), False, {}, function=torch._utils._rebuild_qtensor
    ),
    "a tensor by length": Made(torch.Tensor, (100,)),
    "conjugated": torch.complex(X, X).conj(),
    "a tensor by name": {X: 1},
}  # fmt: skip
BEYOND = {
    "a side": (0, (5, 6), (6, 1)),
    "a stride": (0, (2,), (10**6,)),
    "an offset": (23, (2,), (1,)),
    "far away": (2**62, (4,), (1,)),
    "before": (-1, (2,), (1,)),
    "backwards": (5, (2,), (-1,)),
    "less than nothing": (0, (-1, 0), (1, 1)),
    "twice less": (0, (-2, -2), (0, 0)),
    "too many": (0, (2**40, 2**40), (0, 0)),
    "too far": (0, (3, 3), (2**62, 2**62)),
    "no strides": (0, (2, 2), (1,)),
    "no numbers": (0, (2.0,), (1,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_nothing_else_is_rebuilt(tmp_path: Path, value: Any, archive: bool) -> None:
    path = saved(tmp_path / "a.pt", {"model": {"w": X}, "more": [value]}, archive)
    with pytest.raises(pickle.UnpicklingError, match="it (holds|sets attributes)") as raised:
        load_pickled(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("places", BEYOND.values(), ids=BEYOND)
def test_a_tensor_stays_within_its_storage(
    tmp_path: Path, places: tuple[Any, ...], archive: bool
) -> None:
    path = saved(tmp_path / "a.pt", {"w": described(*places, False, OrderedDict())}, archive)
    with pytest.raises((pickle.UnpicklingError, RuntimeError)) as raised:
        load_pickled(path)
    assert "\n" not in str(raised.value)


def test_weights_do_not_say_how_they_are_loaded(tmp_path: Path) -> None:
    """With `assign_to_params_buffers` the file's tensors, of any kind, would take the place of the network's."""
    network = torch.nn.Linear(2, 1)
    weights = network.double().state_dict()
    weights._metadata[""]["assign_to_params_buffers"] = True
    network.float().load_state_dict(load_pickled(saved(tmp_path / "a.pt", weights)))
    assert network.weight.dtype == torch.float32


def text(content: bytes) -> bytes:
    return b"X" + len(content).to_bytes(4, "little") + content


def test_a_text_is_not_copied_again_and_again(tmp_path: Path) -> None:
    given = b"c_codecs\nencode\nq\0" + text(bytes(10**5)) + text(b"latin1") + b"\x86q\1"
    path = packed(tmp_path / "a.pt", given + b"](" + b"h\0h\1R" * 1000 + b"e")
    with pytest.raises(pickle.UnpicklingError, match="more memory than the file"):
        load_pickled(path)


def test_names_are_not_hashed_however_deep_they_are(tmp_path: Path) -> None:
    """Python's stack would run over, which ends the process."""
    with pytest.raises(pickle.UnpicklingError, match="by other things than texts"):
        load_pickled(packed(tmp_path / "a.pt", b"})" + b"\x85" * 10**6 + b"Ns"))


def test_values_that_stand_in_each_other_are_looked_at_once(tmp_path: Path) -> None:
    twice = b"".join(b"](h%ch%ceq%c" % (at, at, at + 1) for at in range(100))
    assert isinstance(load_pickled(packed(tmp_path / "a.pt", b"]q\0" + twice)), list)
    assert isinstance(
        load_pickled(packed(tmp_path / "b.pt", b"]" + b"](" * 10**5 + b"e" * 10**5)), list
    )
    (itself,) = load_pickled(packed(tmp_path / "c.pt", b"]q\0h\0a"))
    assert itself[0] is itself


@pytest.mark.parametrize(
    "steps",
    [b"\x8e" + bytes(7) + b"\x40", b"\x96" + bytes(7) + b"\x40", b"\x8f", b"N\x81", b"I1\n"],
)
def test_steps_that_torch_save_never_writes_are_refused(tmp_path: Path, steps: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no pickle as torch.save writes it"):
        load_pickled(packed(tmp_path / "a.pt", steps))


def test_a_storage_is_as_long_as_it_says(tmp_path: Path) -> None:
    storage = (
        b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K%ctQ"
    )
    assert load_pickled(packed(tmp_path / "a.pt", storage % 4, 16)).tolist() == [0, 0, 0, 0]
    for count in (3, 5, 200):
        with pytest.raises(pickle.UnpicklingError, match="another size|more memory"):
            load_pickled(packed(tmp_path / "b.pt", storage % count, 16))


class _Streamed(pickle.Pickler):
    """Writes None as a storage of so many numbers."""

    count = 24

    def persistent_id(self, value: Any) -> Any:
        return (
            ("storage", torch.FloatStorage, "1", "cpu", self.count, None)
            if value is Ellipsis
            else None
        )


def test_files_of_older_pytorch_have_the_numbers_of_their_tensors(tmp_path: Path) -> None:
    """Memory that is reserved and not filled would be what somebody else has used."""
    whole = saved(tmp_path / "a.pt", {"w": X}, archive=False).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises((ValueError, pickle.UnpicklingError, UnicodeDecodeError)) as raised:
            load_pickled(tmp_path / "cut.pt")
        assert str(raised.value)
    for count, said in ((24, "does not have the numbers"), (10**9, "more memory")):
        file = io.BytesIO()
        for value in (0x1950A86A20F9469CFC6C, 1001, {}):
            pickle.dump(value, file, 2)
        pickler = _Streamed(file, 2)
        pickler.count = count
        pickler.dump(
            Made(torch._utils._rebuild_tensor_v2, (..., 0, (24,), (1,), False, OrderedDict()))
        )
        pickle.dump([], file, 2)
        (tmp_path / "b.pt").write_bytes(file.getvalue())
        with pytest.raises((ValueError, pickle.UnpicklingError), match=said):
            load_pickled(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(pickle.dumps({"w": 1}, 2))
    with pytest.raises(ValueError, match="torch.save did not write it"):
        load_pickled(tmp_path / "c.pt")


def test_damaged_numbers_are_no_weights(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"w": X})
    content = path.read_bytes()
    at = content.index(X.numpy().tobytes())
    path.write_bytes(content[:at] + b"\1" + content[at + 1 :])
    with pytest.raises(zipfile.BadZipFile):
        load_pickled(path)


SCRIPT = b"c__torch__.a\nNet\n"


@pytest.mark.parametrize(
    "steps",
    [
        SCRIPT + b"]\x85R",  # called as a function
        SCRIPT + b")\x81]b",  # a state that is no dict
        SCRIPT + b")\x81q\0}" + text(b"a") + b"h\0sb",  # in itself
        b"".join(  # in two places each: 2^30 names
            SCRIPT + b")\x81q%c}(" % (at + 1)
            + (text(b"a") + b"h%c" % at + text(b"b") + b"h%c" % at if at else text(b"w") + b"N")
            + b"ub"
            for at in range(30)
        ),
    ],
)  # fmt: skip
def test_odd_modules_of_torchscript_are_refused(tmp_path: Path, steps: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        load_pickled(packed(tmp_path / "a.pt", steps))
