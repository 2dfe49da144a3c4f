"""Fixtures for all tests: one thread, a cache of the session's own, and the real images where they are at hand."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.logging import catching_logs
from _pytest.mark.expression import Expression

if TYPE_CHECKING:
    from tests.support.toy import Toy

# torch is imported in the fixtures: the process that hands the tests out to workers runs none and has to start quickly.


LONGEST = (
    "flare/test_faults.py", "zoo/test_published.py", "benchmarks/test_gpu_day.py", "flare/",
    "product/test_docs_commands.py", "product/",
)  # fmt: skip
"""Files and folders that are begun first, so that no worker is left alone with them at the end."""


WARM, ADDRESS = pytest.StashKey[ExitStack](), pytest.StashKey[str]()
"""Where the process that hands the tests out keeps the workers' warm process, and its address."""


MARKS = re.compile(r"mark\.(slow|gpu|flare)|mostly_slow")
"""What is in the text of every file that has a test with one of these marks."""


BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, help="skip each test that has not begun after this many minutes"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"not begun within --minutes {minutes:g}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files without marks where no test without one is run: imports and thousands of tests take seconds."""
    marks = config.option.markexpr
    if (
        collection_path.suffix != ".py"
        or not marks
        or Expression.compile(marks).evaluate(lambda *_, **__: False)
    ):
        return None
    return None if MARKS.search(collection_path.read_text(encoding="utf-8")) else True


def pytest_configure() -> None:
    """Look at logs that reach the root alone: pytest 9.1 puts its handlers on 80 more loggers, six times a test."""
    attach = catching_logs.__enter__

    def attach_to_root(self: Any) -> logging.Handler:
        if self.level is not None or not hasattr(self, "attached_loggers"):
            return attach(self)
        logging.root.addHandler(self.handler)
        self.attached_loggers.append(logging.root)
        return self.handler

    catching_logs.__enter__ = attach_to_root


def frames(context: int = 1) -> list[SimpleNamespace]:
    """Return what calls the caller, as `inspect.stack` does, without the lines of the source."""
    return [SimpleNamespace(frame=frame) for frame, _ in traceback.walk_stack(sys._getframe(1))]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Let the garbage collector rest while modules are imported and tests are made: it would find nothing to free.

    NVIDIA FLARE asks who imports its loggers by reading the source of every frame, which takes seconds.
    """
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", frames)
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("loadgroup", False):
        lost = [
            item
            for item in items
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
        ]
        if lost:  # each worker would make anew what a group shares
            raise pytest.UsageError(
                f"pytest-xdist does not group {lost[0].nodeid}; another pytest: pyproject.toml"
            )

    def place(item: pytest.Item) -> int:
        file = item.nodeid.removeprefix("tests/")
        return next(
            (at for at, start in enumerate(LONGEST) if file.startswith(start)), len(LONGEST)
        )

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported: millions of objects that none of its passes can free."""
    gc.enable()
    gc.set_threshold(10_000, 20, 20)
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the warm process; where it is seen, let Python free all: Triton's binding prints what is left."""
    config.stash.get(WARM, ExitStack()).close()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there it would take seconds
        gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one warm process for the workers where they run slow tests."""
    from tests.support.programs import warm_process

    config = node.config
    if WARM not in config.stash and "slow" in config.option.markexpr.replace("not slow", ""):
        config.stash[WARM] = ExitStack()
        config.stash[ADDRESS] = config.stash[WARM].enter_context(warm_process())
    node.workerinput["warm"] = config.stash.get(ADDRESS, "")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums of several threads may differ in the last bits."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point the cache at a temporary folder: small phantoms are drawn once for all processes of a session."""
    from tests.support.cohorts import common
    from tests.support.phantoms import small_by_default

    folder = tmp_path_factory.mktemp("cache")
    (folder / "medfl").mkdir()
    (folder / "medfl" / "phantom").symlink_to(common(tmp_path_factory, "drawn"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        small_by_default(patch)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def monai_is_scanned_once() -> Iterator[None]:
    """Keep the table of MONAI's classes, which each of its configurations makes anew from all of its modules."""
    if "monai.bundle" not in sys.modules:
        yield
        return
    from monai.bundle.config_item import ComponentLocator
    from monai.utils import module

    scan, list_modules = (
        ComponentLocator._find_classes_or_functions,
        ComponentLocator._find_module_names,
    )
    tables: dict[tuple[str, ...], dict[str, list[str]]] = {}
    names: dict[tuple[int, tuple[str, ...]], list[str]] = {}

    def listed(self: ComponentLocator) -> list[str]:
        key = len(sys.modules), tuple(self.excludes)
        if key not in names:
            names[key] = list_modules(self)
        return names[key]

    def scanned(self: ComponentLocator, modules: Sequence[str] | str) -> dict[str, list[str]]:
        wanted = (modules,) if isinstance(modules, str) else tuple(modules)
        if wanted not in tables:
            tables[wanted] = scan(self, wanted)
        return tables[wanted]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComponentLocator, "_find_module_names", listed)
        patch.setattr(ComponentLocator, "_find_classes_or_functions", scanned)
        patch.setattr(
            module,
            "damerau_levenshtein_distance",
            functools.cache(module.damerau_levenshtein_distance),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def versions_are_read_once() -> Iterator[None]:
    """Keep the versions of packages, which each run reads from a dozen files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", functools.cache(metadata.version))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves() -> Iterator[None]:
    """Let the garbage collector pass over what a file's tests leave, as modules that they were the first to import."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return where programs find the warm process: the one of all workers, or one of this process's own."""
    from tests.support.programs import warm_process

    shared = getattr(request.config, "workerinput", {}).get("warm")
    with nullcontext(shared) if shared else warm_process() as address:
        end = time.monotonic() + 120
        while not Path(address).exists():
            assert time.monotonic() < end, "the warm process does not start"
            time.sleep(0.05)
        yield address


@pytest.fixture(scope="session")
def slow_files(request: pytest.FixtureRequest) -> frozenset[Path]:
    """Return the files of which a slow test is run."""
    return frozenset(
        item.path
        for item in request.session.items
        if any(map(item.get_closest_marker, ("slow", "flare")))
    )


@pytest.fixture(scope="module", autouse=True)
def warm(request: pytest.FixtureRequest, slow_files: frozenset[Path]) -> Iterator[None]:
    """Let programs that slow tests start be forked from a process that has imported all."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path in slow_files:
            from tests.support.programs import python_path

            patch.setenv("MEDFL_TESTS_WARM", request.getfixturevalue("warm_address"))
            patch.setenv("PYTHONPATH", python_path())
        yield


@pytest.fixture(scope="module", autouse=True)
def figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the figures blank of runs whose pictures no test of the file looks at."""
    from tests.support.figures import are_blank, leave_blank

    with pytest.MonkeyPatch.context() as patch:
        if are_blank(request.path):
            leave_blank(patch, request.path)
        yield


@pytest.fixture(scope="session")
def kept_samples() -> Any:
    """Return where prepared images are kept."""
    from tests.support.prepared import Kept

    return Kept()


@pytest.fixture(scope="module", autouse=True)
def prepared_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prepare the images of runs once for all of them."""
    from tests.support.prepared import are_kept, keep_prepared

    with pytest.MonkeyPatch.context() as patch:
        if are_kept(request.path):
            keep_prepared(patch, request.getfixturevalue("kept_samples"))
        yield


@pytest.fixture(scope="module", autouse=True)
def drawn_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Draw each small cohort once for all processes of a session."""
    from tests.support.cohorts import common
    from tests.support.phantoms import are_drawn_once, draw_once

    with pytest.MonkeyPatch.context() as patch:
        if are_drawn_once(request.path):
            draw_once(patch, common(tmp_path_factory, "small-cohorts"))
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of the real images; skips without it."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("MEDFL_DATA", default))
    if not (folder / "ham10000" / "labels.csv").is_file():
        pytest.skip(f"no real images in {folder}; set MEDFL_DATA")
    return folder


@pytest.fixture
def lines() -> Toy:
    """Four sites with a linear regression each: quadratics with different minimisers, float64, one full batch."""
    from tests.support.toy import Toy, regression, sgd

    return Toy(regression({"a": 6, "b": 12, "c": 18, "d": 24}), optimizer=sgd(0.1))


@pytest.fixture
def classes() -> Toy:
    """Return `tests.support.toy.three_classes`."""
    from tests.support.toy import three_classes

    return three_classes()
