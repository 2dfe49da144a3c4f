"""The cache of teachers' answers: asked once, continued after a kill, rebuilt where it does not fit, never NaN."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError, RunError
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.runs.teachers import answers
from medfl.runs.teachers.answers import Questions, obtain, open_teacher, split_names
from tests.support.toy import public_blobs


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "medfl" / "answers"


@dataclass
class Table:
    """A teacher that knows all answers by heart and remembers what it was asked."""

    values: Tensor
    name: str = "table"
    sha256: str = "a" * 64
    facts: dict[str, Any] = field(default_factory=lambda: {"prompts": ("a", "b")})
    batch_size: int = 4
    asked: list[list[int]] = field(default_factory=list)
    dies_at: int | None = None

    def answer(self, questions: Questions, positions: Sequence[int]) -> Tensor:
        if self.dies_at is not None and self.dies_at in positions:
            raise KeyboardInterrupt
        self.asked.append(list(positions))
        return self.values[list(positions)]


def classification(count: int = 10, classes: int = 4) -> Questions:
    public = public_blobs(count, 0, classes)
    bundle: Any = SimpleNamespace(
        name="toys", task="classification", classes=public.task.classes, structures=()
    )
    ids = tuple(public.shard.ids)
    return Questions(bundle, "test", tuple(range(count)), ids, "1" * 64, public)


def segmentation(count: int = 3) -> Questions:
    x, y = torch.zeros(count, 1, 6, 5), torch.zeros(count, 1, 6, 5, dtype=torch.uint8)
    shard = Shard.of(Stacked([{"id": f"mask{i}"} for i in range(count)], x, y), range(count))
    structures = ("background", "lesion")
    bundle: Any = SimpleNamespace(
        name="masks", task="segmentation", classes=(), structures=structures
    )
    public = Public("masks", shard, Task("segmentation", structures))
    return Questions(bundle, "train", tuple(range(count)), tuple(shard.ids), "2" * 64, public)


def distributions(count: int = 10, classes: int = 4) -> Tensor:
    return torch.randn(count, classes, generator=torch.Generator().manual_seed(0)).softmax(1)


def files(kept: Path) -> list[str]:
    return sorted(path.suffix for path in kept.iterdir() if path.suffix != ".lock")


# Asked once


def test_a_teacher_is_asked_once(kept: Path) -> None:
    """Ten items in batches of four: three calls, however often the answers are needed (check 14: M ceil(P / batch))."""
    teacher, said = Table(distributions()), []
    for _ in range(3):
        found = obtain(teacher, classification(), say=said.append)
        assert torch.equal(found, teacher.values)
        assert found.dtype == torch.float32
    assert teacher.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [line.split(";")[0] for line in said] == ["asking table about 10 public items"]
    assert files(kept) == [".json", ".npy"]


def test_answers_are_mapped_and_writing_into_them_leaves_the_file(kept: Path) -> None:
    teacher = Table(distributions())
    obtain(teacher, classification()).zero_()
    assert torch.equal(obtain(teacher, classification()), teacher.values)
    assert len(teacher.asked) == 3
    stored = np.load(next(kept.glob("*.npy")), allow_pickle=False)
    assert np.array_equal(stored, teacher.values.numpy())


def test_the_manifest_says_what_the_answers_are_about(kept: Path) -> None:
    obtain(Table(distributions()), classification())
    found = json.loads(next(kept.glob("*.json")).read_text())
    assert (found["name"], found["teacher"], found["data"], found["bundle"]) == (
        "table",
        "a" * 64,
        "1" * 64,
        "toys",
    )
    assert (found["section"], found["shape"], found["dtype"]) == ("test", [10, 4], "float32")
    assert found["facts"] == {"prompts": ["a", "b"]}
    assert found["ids"] == [f"public{i}" for i in range(10)]
    assert (found["pass"]["done"], found["pass"]["queries"]) == (10, 3)


def test_other_data_items_teachers_or_facts_have_answers_of_their_own(kept: Path) -> None:
    obtain(Table(distributions()), classification())
    questions = classification()
    others: list[tuple[dict[str, Any], Questions]] = [
        ({"sha256": "b" * 64}, questions),
        ({"facts": {"prompts": ("a", "c")}}, questions),
        ({}, replace(questions, checksum="9" * 64)),
        ({}, replace(questions, section="train")),
        ({}, replace(questions, ids=questions.ids[::-1])),
    ]
    for count, (changes, asked) in enumerate(others, 2):
        teacher = Table(distributions(), **changes)
        obtain(teacher, asked)
        assert len(teacher.asked) == 3
        assert len(list(kept.glob("*.npy"))) == count
    moved = Table(distributions(), name="elsewhere:table")
    obtain(moved, questions)
    assert moved.asked == [], "a name is not what its answers depend on"


# Cut short


def test_a_pass_goes_on_where_it_was_cut_short(kept: Path) -> None:
    """Killed in its third batch; the second process asks about items 8 and 9 only, and the file is the same."""
    with pytest.raises(KeyboardInterrupt):
        obtain(Table(distributions(), dies_at=9), classification())
    state = json.loads(next(kept.glob("*.json")).read_text())["pass"]
    assert (state["done"], state["queries"]) == (8, 2)
    second, said = Table(distributions()), []
    found = obtain(second, classification(), say=said.append)
    assert second.asked == [[8, 9]]
    assert torch.equal(found, second.values)
    assert "10 public items, 8 of them answered already" in said[0]
    assert json.loads(next(kept.glob("*.json")).read_text())["pass"]["queries"] == 3
    whole = next(kept.glob("*.npy")).read_bytes()
    for path in kept.iterdir():
        path.unlink()
    obtain(Table(distributions()), classification())
    assert next(kept.glob("*.npy")).read_bytes() == whole


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def changed(**changes: Any) -> Callable[[Path], None]:
    return lambda path: (
        path.with_suffix(".json").write_text(
            json.dumps(json.loads(path.with_suffix(".json").read_text()) | changes)
        )
        and None
    )


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "the file is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "the file is damaged"),
        (lambda path: path.write_bytes(b""), "the file is damaged"),
        (lambda path: path.write_bytes(b"nonsense" * 40), "the file is damaged"),
        (lambda path: np.save(path, np.zeros((10, 5), np.float32)), "the file is damaged"),
        (lambda path: path.unlink(), "the file is damaged"),
        (lambda path: path.with_suffix(".json").write_text("{"), "their manifest is damaged"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "their manifest is damaged"),
        (lambda path: path.with_suffix(".json").unlink(), "they have no manifest"),
        (changed(data="7" * 64), "they were given about something else (data)"),
        (
            changed(ids=["x"], section="train"),
            "they were given about something else (ids, section)",
        ),
    ],
)
def test_what_does_not_fit_is_made_anew_and_said(
    damage: Callable[[Path], Any], why: str, kept: Path
) -> None:
    obtain(Table(distributions()), classification())
    damage(next(kept.glob("*.npy")))
    teacher, said = Table(distributions()), []
    assert torch.equal(obtain(teacher, classification(), say=said.append), teacher.values)
    assert len(teacher.asked) == 3
    assert said[0].startswith("the cached answers of table in ")
    assert f" are made anew: {why}" in said[0]


def test_answers_that_somebody_has_mapped_outlive_a_rebuild(kept: Path) -> None:
    found = obtain(Table(distributions()), classification())
    next(kept.glob("*.json")).unlink()
    obtain(Table(distributions().flip(1)), classification())
    assert torch.equal(found, distributions())


def test_two_processes_do_not_ask_twice(kept: Path) -> None:
    """The lock of the file is held by somebody else: the second waits, and says so."""
    first, second = Table(distributions()), Table(distributions())
    obtain(first, classification())
    lock = next(kept.glob("*.lock"))
    said: list[str] = []
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: obtain(second, classification(), say=said.append))
        waiting.start()
        while not said:
            time.sleep(0.01)
        assert waiting.is_alive()
        assert said[0].startswith("another process is asking about the same; waiting for ")
    waiting.join(10)
    assert not waiting.is_alive()
    assert second.asked == []


def test_a_full_disk_is_one_line_and_leaves_no_half_file(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    teacher = Table(distributions())
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RunError, match="cannot write .*: no space left on the disk; ") as told:
            obtain(teacher, classification())
    assert "\n" not in str(told.value)
    assert teacher.asked == []
    assert files(kept) == []
    assert torch.equal(obtain(teacher, classification()), teacher.values)


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        RunError, match="Not a directory; .* or set XDG_CACHE_HOME to a larger disk"
    ):
        obtain(Table(distributions()), classification())


# What is an answer


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.1, 0.9])
def test_what_is_no_distribution_is_refused_by_name(value: float, kept: Path) -> None:
    """Item 5 of (0.25, 0.25, 0.25, 0.25) with another number in the first place."""
    values = torch.full((10, 4), 0.25)
    values[5, 0] = value
    with pytest.raises(
        InputError,
        match="teacher 'table' answers about public item 'public5' with values that are no",
    ):
        obtain(Table(values), classification())
    assert json.loads(next(kept.glob("*.json")).read_text())["pass"]["done"] == 4, (
        "the batch before is kept"
    )


def test_other_numbers_of_classes_or_another_grid_are_refused() -> None:
    text = "teacher 'table' answers with 4 x 5 values about 4 items; the public data 'toys' have 4 classes; name"
    with pytest.raises(InputError, match=text):
        obtain(Table(distributions(classes=5)), classification())
    with pytest.raises(
        InputError, match="answers with 3 x 5 x 6 values about 3 items; .* have a grid of 6 x 5; "
    ):
        obtain(Table(torch.zeros(3, 5, 6)), segmentation())


def test_a_saturated_teacher_gives_zeros_and_no_nan() -> None:
    """Answers of 0 and 1 stay as they are in classification; a mixture's KL with the target clamped is finite."""
    one_hot = torch.eye(4).repeat(3, 1)[:10]
    found = obtain(Table(one_hot), classification())
    assert torch.equal(found, one_hot)
    target, student = found.clamp(min=1e-12), torch.zeros(10, 4).log_softmax(1)
    divergence = (target * (target.log() - student)).sum(1)
    torch.testing.assert_close(divergence, torch.full((10,), 4.0).log())


def test_masks_are_kept_as_logits_of_probabilities_from_1e_4_on() -> None:
    """log(1e-4 / (1 - 1e-4)) = -9.21024, in half precision -9.2109375; logits between are rounded only."""
    values = torch.zeros(3, 6, 5)
    values[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, 40.0, -1.25])
    found = obtain(Table(values), segmentation())
    assert (found.dtype, tuple(found.shape)) == (torch.float16, (3, 6, 5))
    assert found[0, 0].tolist() == [9.2109375, -9.2109375, 9.2109375, -1.25, 0.0]
    torch.testing.assert_close(
        found[0, 0, 1].float().sigmoid(), torch.tensor(1e-4), rtol=1e-3, atol=0
    )
    values[2, 5, 4] = torch.nan
    with pytest.raises(
        InputError, match="about public item 'mask2' with NaN; logits of the foreground; "
    ):
        obtain(Table(values, sha256="c" * 64), segmentation())


def test_a_teacher_that_fails_is_told_in_one_line(kept: Path) -> None:
    class Failing(Table):
        def answer(self, questions: Questions, positions: Sequence[int]) -> Tensor:
            if positions[0] == 4:
                raise RuntimeError("out of\nmemory")
            return super().answer(questions, positions)

    text = "teacher 'table' fails from public item 'public4' on: RuntimeError: out of memory; what it answered before"
    with pytest.raises(RunError, match=text):
        obtain(Failing(distributions()), classification())
    second = Table(distributions())
    obtain(second, classification())
    assert second.asked == [[4, 5, 6, 7], [8, 9]]


def test_a_teachers_remarks_are_said_and_kept(kept: Path) -> None:
    class Remarking(Table):
        def notes(self, questions: Questions) -> list[str]:
            return [f"knows all {len(questions)}"]

    said: list[str] = []
    for _ in range(2):
        obtain(Remarking(distributions()), classification(), say=said.append)
    assert said.count("note: knows all 10") == 2
    assert json.loads(next(kept.glob("*.json")).read_text())["notes"] == ["knows all 10"]


# Names


def test_names_are_divided_at_commas() -> None:
    assert split_names("run:DIR, medsam") == ("run:DIR", "medsam")
    assert split_names("") == split_names("  ") == ()
    with pytest.raises(
        InputError, match="teachers=medsam,; teachers is NAME,NAME,...; drop the comma"
    ):
        split_names("medsam,")


@pytest.mark.parametrize("name", ["clip", "run", "run:", "bundle:", ""])
def test_an_unknown_teacher_is_told_with_the_known_ones(name: str) -> None:
    known = (
        "teachers are clip-vit-l14, clip-rn50x16, biomedclip, medsam, "
        "each also as NAME:FILE, run:DIR and bundle:DIR"
    )
    with pytest.raises(InputError, match=f"teacher '{name}'; {known}; choose one of them"):
        open_teacher(name, classification().bundle, torch.device("cpu"))


def test_teachers_tell_one_structure_from_the_background() -> None:
    with pytest.raises(
        InputError,
        match="with background, anterior, posterior; teachers tell a foreground from the",
    ):
        open_teacher("medsam", Bundle("hippocampus"), torch.device("cpu"))
    other: Any = SimpleNamespace(name="detector", task="other")
    with pytest.raises(
        InputError, match="bundle 'detector', neither classification nor segmentation"
    ):
        open_teacher("medsam", other, torch.device("cpu"))


def test_every_kind_of_teacher_can_be_opened() -> None:
    assert set(answers._OPENERS) == {
        "clip-vit-l14",
        "clip-rn50x16",
        "biomedclip",
        "medsam",
        "run",
        "bundle",
    }
