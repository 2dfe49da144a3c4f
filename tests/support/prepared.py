"""Images prepared once: what a bundle's deterministic transforms leave is kept for all runs of a process.

They are the same few phantoms in most runs, and MONAI's transforms take milliseconds for each. The product itself knows
when two samples are the same: by the name of their file in its disk cache, which is a hash of all that determines them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

WHOLE_RUNS = {
    "benchmarks", "cli", "compare", "export", "flare", "policy", "product", "report", "runs", "runtimes",
}  # fmt: skip
"""Folders whose tests run federations; how images are prepared is shown in others."""

AFRESH = {"product/test_laws.py", "product/test_laws_volumes.py"}
"""Files in them which show that a second preparation gives the same."""

LARGEST, TOGETHER = 2**19, 2**28
"""Bytes of a sample, and of all that are kept."""


def are_kept(path: Path) -> bool:
    """Tell whether the images of a test file are prepared once."""
    name = path.as_posix().rpartition("tests/")[2]
    return name.partition("/")[0] in WHOLE_RUNS and name not in AFRESH


class Kept:
    """Samples by what determines them; the name of what cannot be named is empty."""

    def __init__(self) -> None:
        self.samples: dict[str, Any] = {}
        self.size = 0

    def making(self, name: Callable[[int], str], make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like `make` that makes what is not kept."""

        def made(indices: Sequence[int]) -> Iterator[Any]:
            names = {index: name(index) for index in indices}
            missing = [index for index in indices if names[index] not in self.samples]
            new = iter(make(missing) if missing else ())
            fresh = set(missing)
            for index in indices:
                if index not in fresh:
                    yield self.samples[names[index]]
                    continue

                sample = next(new)
                self._keep(names[index], sample)
                yield sample

        return made

    def _keep(self, name: str, sample: Any) -> None:
        from medfl.data.prepare import size_of

        size = size_of(sample)
        if name and size <= LARGEST and self.size + size <= TOGETHER:
            self.samples[name] = sample
            self.size += size


def keep_prepared(patch: pytest.MonkeyPatch, kept: Kept) -> None:
    """Let bundles whose samples have names take them from `kept`; budgets and files stay as they are."""
    from medfl.bundle.bundle import Bundle
    from medfl.core.errors import InputError
    from medfl.data.prepare import DiskCache

    disk_cache = Bundle.disk_cache

    def remembering(bundle: Bundle, section: str) -> DiskCache | None:
        cache = disk_cache(bundle, section)
        if cache is None:
            return None
        source = bundle.sections[section].source
        steps = [type(step).__name__ for step in source.transforms]

        def name(index: int) -> str:
            try:
                return f"{cache.key(index)} {steps}"
            except (InputError, OSError):
                return ""  # it is going to be refused

        class Remembering(DiskCache):
            def keep(self, count: int, make: Callable[..., Any]) -> Sequence[Any]:
                return super().keep(count, kept.making(name, make))

        return Remembering(cache.folder, cache.key, cache.budget)

    patch.setattr(Bundle, "disk_cache", remembering)
