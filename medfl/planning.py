"""From what a user asks for to a `Run`: find the data, draw the partition, fill in the bundle's protocol."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from medfl import datasets, methods
from medfl.bundle import SECTIONS, Bundle
from medfl.errors import InputError
from medfl.methods.base import Method
from medfl.partition import Partition, assign
from medfl.settings import DataRecord, PartitionRecord, Run

PHANTOM = "phantom"
_DEFAULTS = {"sites": 4, "partition": "iid", "cohort": 1.0, "rounds": 10, "local_epochs": 1, "lr": None, "lr_decay": 1.0}


@dataclass(frozen=True)
class Request:
    """What a user asks for; None means the bundle's protocol, then medfl's default.

    Attributes:
        config: ids of the bundle's configuration to override; values may be text as typed.
        data: a folder, "phantom", or None for a folder below $MEDFL_DATA and else the phantom.
    """

    bundle: str
    method: str = "fedavg"
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    sites: int | None = None
    partition: str | None = None
    cohort: float | None = None
    rounds: int | None = None
    local_epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int = 0
    device: str = "cpu"
    amp: bool = False
    threads: int = 1
    eval_every: int = 1


@dataclass(frozen=True)
class Plan:
    """A run with what is needed to execute it."""

    run: Run
    bundle: Bundle
    method: Method
    notes: tuple[str, ...]

    @property
    def sections(self) -> dict[str, list[Any]]:
        """The items of each section, for tables and pictures of the partition."""
        return _items(self.bundle)

    @property
    def partition(self) -> Partition:
        """The partition as an object with tables and pictures."""
        record = self.run.partition
        return Partition.from_ids(record.sites, self.sections, spec=record.spec, seed=record.seed, notes=record.notes)

    def extra(self, command: str) -> dict[str, Any]:
        """Return what run.json tells a reader beyond the run itself."""
        classes = self.bundle.classes
        counts = self.partition.counts(self.sections, len(classes)) if classes else {}
        return {
            "medfl": self.run.versions["medfl"],
            "task": self.bundle.task,
            "classes": list(classes),
            "key_metric": self.bundle.key_metric,
            "site_class_counts": counts,
            "protocol": self.bundle.protocol.get("protocol", ""),
            "command": command,
        }


def plan(request: Request, say: Callable[[str], None] = str) -> Plan:
    """Resolve a request into a run.

    Raises:
        InputError: anything in the request that is not allowed.
    """
    _check_numbers(request)
    device = _device(request.device)
    config = {key: _value(value) for key, value in request.config.items()}
    bundle, record, notes = _with_data(request, config, device, say)
    protocol = {**_DEFAULTS, "batch_size": None, **bundle.protocol}
    defaults = protocol.get("methods") or {}
    options = {**(defaults.get(request.method) or {}), **request.options}
    method = methods.load(request.method, options)
    sections = _items(bundle)
    spec = request.partition or (str(protocol["partition"]) if request.sites is None or bundle.protocol else "iid")
    sites = request.sites if request.sites is not None else (None if spec == "centre" or spec.startswith("file:") else protocol["sites"])
    partition = assign(spec, sections, sites=sites, classes=bundle.classes or None, seed=request.seed)
    chosen = {
        name: getattr(request, name) if getattr(request, name) is not None else protocol[name]
        for name in ("cohort", "rounds", "local_epochs", "batch_size", "lr")
    }
    run = Run(
        bundle=bundle.name,
        bundle_path=str(bundle.root),
        bundle_sha256=bundle.sha256,
        method=request.method,
        options=dataclasses.asdict(method),
        config=config,
        data=record,
        partition=PartitionRecord(partition.spec, request.seed, tuple(partition.notes), partition.to_ids(sections)),
        cohort=float(chosen["cohort"]),
        rounds=int(chosen["rounds"]),
        local_epochs=int(chosen["local_epochs"]),
        batch_size=int(chosen["batch_size"] or bundle.batch_size),
        lr=None if chosen["lr"] is None else float(chosen["lr"]),
        lr_decay=float(protocol["lr_decay"]),
        seed=request.seed,
        device=device,
        amp=request.amp,
        threads=request.threads,
        eval_every=request.eval_every,
        versions=versions(),
    )
    return Plan(run, bundle, method, notes + tuple(partition.notes))


def repeat(run: Run, data: str | None = None, say: Callable[[str], None] = str) -> Plan:
    """Rebuild the plan of a recorded run: same settings, same partition.

    Raises:
        InputError: the bundle or the data are not the recorded ones.
    """
    known = run.bundle in _shipped_names()
    request = Request(
        bundle=run.bundle if known else run.bundle_path,
        method=run.method,
        config={**run.config, **({"split": run.data.split} if known else {})},
        data=data or _recorded_data(run, known),
    )
    bundle, record, notes = _with_data(request, dict(request.config), _device(run.device), say)
    if record.checksum != run.data.checksum:
        raise InputError(
            f"the data in {record.folder} (checksum {record.checksum[:12]})",
            f"the run used {run.data.source} data with checksum {run.data.checksum[:12]}",
            "give the same data with --data",
        )
    if bundle.sha256 != run.bundle_sha256:
        raise InputError(
            f"bundle {bundle.name!r} has changed since the run (configuration hash {bundle.sha256[:12]})",
            f"the recorded one is {run.bundle_sha256[:12]}",
            "restore it, or start a new run",
        )
    return Plan(dataclasses.replace(run, data=record), bundle, methods.load(run.method, run.options), notes)


def _recorded_data(run: Run, known: bool) -> str | None:
    """Return where the run's images lay; a phantom that is gone is drawn again."""
    if known and run.data.source == PHANTOM and not Path(run.data.folder).is_dir():
        return PHANTOM
    return run.data.folder or None


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {name: metadata.version(name) for name in ("medfl", "torch", "monai", "numpy")}


def phantom_folder(name: str) -> Path:
    """Return the phantom cohort of a data set, drawn once per user into the cache folder ($XDG_CACHE_HOME/medfl)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medfl" / "phantom"
    folder = cache / f"{name}-{metadata.version('medfl')}"
    if not datasets.is_phantom(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        datasets.write_phantom(name, folder)
    return folder


def _with_data(
    request: Request, config: dict[str, Any], device: str, say: Callable[[str], None]
) -> tuple[Bundle, DataRecord, tuple[str, ...]]:
    """Open the bundle on its data."""
    name = request.bundle
    if name not in _shipped_names():
        return _foreign(request, config, device)
    source, folder = "real", None
    if request.data == PHANTOM:
        source = PHANTOM
    elif request.data is not None:
        folder = datasets.locate(name, request.data)
    else:
        try:
            folder = datasets.locate(name)
        except InputError:
            source = PHANTOM
            say(f"NO REAL DATA for {name}: neither --data nor $MEDFL_DATA holds it; using a PHANTOM cohort of drawn images")
    if folder is None:
        folder = phantom_folder(name)
    if datasets.is_phantom(folder):
        source = PHANTOM
    split = str(config.get("split") or _split(name, folder))
    bundle = Bundle(name, {**config, "dataset_dir": str(folder), "split": split}, device)
    counts = {section: len(bundle.data(section)) for section in SECTIONS}
    record = DataRecord(
        source, str(folder), datasets.checksum(name, folder, split), split, counts, tuple(datasets.notes(name, folder))
    )
    return bundle, record, (f"split: {split}", *record.notes)


def _split(name: str, folder: Path) -> str:
    """Return the protocol's split where this folder offers it, else the folder's own default."""
    preferred, offered = Bundle(name).protocol.get("split"), datasets.splits(name, folder)
    return str(preferred) if preferred in offered else offered[0]


def _foreign(request: Request, config: dict[str, Any], device: str) -> tuple[Bundle, DataRecord, tuple[str, ...]]:
    if request.data == PHANTOM:
        raise InputError("--data phantom", "phantoms exist for the shipped bundles", "give this bundle's data folder, or omit --data")
    if request.data is not None:
        config = {**config, "dataset_dir": str(Path(request.data).expanduser().resolve())}
    bundle = Bundle(request.bundle, config, device)
    notes: tuple[str, ...] = ()
    if not bundle.has_test:
        notes = ("this bundle names no test data: the validation items serve as test items, so 'best' is optimistic",)
    counts = {section: len(bundle.data(section)) for section in SECTIONS}
    folder = str(config.get("dataset_dir", ""))
    return bundle, DataRecord("real", folder, _foreign_checksum(bundle), "bundle", counts, notes), notes


def _foreign_checksum(bundle: Bundle) -> str:
    """Hash the items of a bundle's own data lists and the sizes of the files they name."""
    digest = hashlib.sha256()
    for section in SECTIONS:
        data = bundle.data(section)
        for record, index in zip(bundle.items(section), range(len(data)), strict=True):
            digest.update(json.dumps([section, record], sort_keys=True).encode())
            entry = data[index] if isinstance(data, list | tuple) else None
            for value in entry.values() if isinstance(entry, Mapping) else []:
                for part in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(part, str | os.PathLike) and Path(part).is_file():
                        digest.update(str(Path(part).stat().st_size).encode())
    return digest.hexdigest()


def _items(bundle: Bundle) -> dict[str, list[Any]]:
    return {section: bundle.items(section) for section in SECTIONS}


def _shipped_names() -> tuple[str, ...]:
    from medfl.bundle import shipped

    return shipped()


def _value(value: Any) -> Any:
    """Read text as YAML, as MONAI does for overrides; expressions and references stay text."""
    if not isinstance(value, str) or value[:1] in "$@%":
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise InputError(f"--device {name}", "auto, cpu, cuda or cuda:INDEX", "choose one")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}", f"this machine has {torch.cuda.device_count()} CUDA devices", "choose cpu or auto")
    return name


def _check_numbers(request: Request) -> None:
    for name, low in (("rounds", 1), ("local_epochs", 1), ("batch_size", 1), ("sites", 1), ("threads", 1), ("eval_every", 0)):
        value = getattr(request, name)
        if value is not None and value < low:
            raise InputError(f"--{name.replace('_', '-')} {value}", f"a whole number of at least {low}", "correct it")
    if request.cohort is not None and not 0 < request.cohort <= 1:
        raise InputError(f"--cohort {request.cohort:g}", "a fraction of the sites, above 0 and at most 1", "correct it")
    if request.lr is not None and not request.lr > 0:
        raise InputError(f"--lr {request.lr:g}", "a learning rate above 0", "correct it")
