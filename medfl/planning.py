"""From what a user asks for to a `Run`: find the data, draw the partition, fill in the bundle's protocol.

What can be refused without looking at the images is refused before they are looked at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from medfl import datasets, methods
from medfl.bundle import Bundle, shipped
from medfl.errors import InputError
from medfl.methods.base import Method
from medfl.partition import Partition, assign, parse
from medfl.protocol import options_for, resolved
from medfl.sections import SECTIONS
from medfl.seeding import stream
from medfl.settings import DataRecord, PartitionRecord, Run
from medfl.storage import cache_folder

Say = Callable[[str], object]

PHANTOM = "phantom"
"""What --data takes for drawn images, and the data source of such a run."""
_OWN_SPLIT = "bundle"
"""The split of a bundle that is not ours: its own."""

_LEAST = {"rounds": 1, "local_epochs": 1, "batch_size": 1, "sites": 1, "threads": 1, "eval_every": 0, "seed": 0}
_REPEATED = (
    "method", "cohort", "rounds", "local_epochs", "batch_size", "lr", "seed", "device", "amp", "threads", "eval_every",
)  # fmt: skip
_INSTEAD = {
    "dataset_dir": "--data", "batch_size": "--batch-size", "learning_rate": "--lr", "device": "--device",
    "max_epochs": "--rounds and --local-epochs",
}  # fmt: skip
"""Ids of the shipped bundles that a federated run sets itself, and what a user gives for each."""


@dataclass(frozen=True)
class Request:
    """What a user asks for; None means the bundle's protocol, then medfl's default.

    Attributes:
        config: ids of the bundle's configuration to override; values may be text as typed.
        data: a folder, "phantom", or None for a folder below $MEDFL_DATA and else the phantom.
        presets: names of presets of the bundle's protocol, laid over it in this order.
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
    presets: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """A run with what is needed to execute it; `notes` are for the user, those of the partition stand in its table."""

    run: Run
    bundle: Bundle
    method: Method
    notes: tuple[str, ...]

    @cached_property
    def sections(self) -> dict[str, list[Any]]:
        """The items of each section, for tables and pictures of the partition."""
        return _items(self.bundle)

    @cached_property
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


def plan(request: Request, say: Say = str) -> Plan:
    """Resolve a request into a run.

    Raises:
        InputError: anything in the request that is not allowed.
    """
    _check_numbers(request)
    device = _device(request.device)
    protocol = resolved(request.bundle, Bundle(request.bundle).protocol, request.presets)
    config = {**protocol["config"], **{key: _value(value) for key, value in request.config.items()}}
    _opened(request.bundle, config, device)
    chosen = {
        name: protocol[name] if (value := getattr(request, name)) is None else value
        for name in ("cohort", "rounds", "local_epochs", "batch_size", "lr")
    }
    schedule = {"rounds": int(chosen["rounds"])} if methods.has_option(request.method, "rounds") else {}
    method = methods.load(request.method, {**schedule, **options_for(protocol, request.method), **request.options})
    spec = request.partition or str(protocol["partition"])
    kind, _ = parse(spec)
    opened = _with_data(request, config, device, say, protocol["split"])
    bundle, sections = opened.bundle, _items(opened.bundle)
    sites = None if kind in ("centre", "file") else protocol["sites"]
    partition = assign(
        spec,
        sections,
        sites=sites if request.sites is None else request.sites,
        classes=bundle.classes or None,
        seed=request.seed,
    )
    run = Run(
        bundle=bundle.name,
        bundle_path=str(bundle.root),
        bundle_sha256=bundle.sha256,
        method=request.method,
        options=methods.values_of(method),
        config=config,
        data=opened.record(),
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
    return Plan(run, bundle, method, opened.notes)


def bundle_of(run: Run) -> str:
    """Return what a recorded run's bundle is opened by: the name of a shipped one, the folder of another."""
    return run.bundle if run.bundle in shipped() and run.data.split != _OWN_SPLIT else run.bundle_path


def again(
    run: Run,
    bundle: str | None = None,
    options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    **requested: Any,
) -> Request:
    """Return a request for a recorded run's settings, with those that are given in the place of the recorded ones."""
    known = bundle_of(run) in shipped()
    recorded: dict[str, Any] = {name: getattr(run, name) for name in _REPEATED}
    recorded |= {"data": _recorded_data(run, known), "partition": run.partition.spec}
    if "partition" not in requested:
        recorded["sites"] = len(run.partition.sites)
    presets = requested.get("presets", ())
    offered = Bundle(bundle or bundle_of(run)).protocol.get("presets") or {}
    for name in {key for preset in presets for key in offered.get(preset, {})}:
        recorded.pop(name, None)  # what a preset asks for is compared with what was recorded
    other = requested.get("method", run.method) != run.method
    return Request(
        bundle or bundle_of(run),
        options={**({} if other else run.options), **(options or {})},
        config={**run.config, **(config or {})},
        **{**recorded, **requested},
    )


def repeat(run: Run, data: str | None = None, say: Say = str) -> Plan:
    """Rebuild the plan of a recorded run: same settings, same partition.

    Raises:
        InputError: the bundle or the data are not the recorded ones.
    """
    name = bundle_of(run)
    known = name in shipped()
    config = {**run.config, **({"split": run.data.split} if known else {})}
    bundle = _opened(name, run.config, device := _device(run.device))
    if bundle.sha256 != run.bundle_sha256:
        raise InputError(
            f"bundle {bundle.name!r} has changed since the run (configuration hash {bundle.sha256[:12]})",
            f"the recorded one is {run.bundle_sha256[:12]}",
            "restore it, or start a new run",
        )
    method = methods.load(run.method, run.options)
    request = Request(name, run.method, config=config, data=data or _recorded_data(run, known))
    opened = _with_data(request, config, device, say)
    record = opened.record()
    if record.checksum != run.data.checksum:
        raise InputError(
            f"the data in {record.folder} (checksum {record.checksum[:12]})",
            f"the run used {run.data.source} data with checksum {run.data.checksum[:12]}",
            "give the same data with --data",
        )
    return Plan(dataclasses.replace(run, data=record), opened.bundle, method, opened.notes)


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
    folder = cache_folder("phantom") / f"{name}-{metadata.version('medfl')}"
    if not datasets.is_phantom(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        datasets.write_phantom(name, folder)
    return folder


def _opened(name: str, config: Mapping[str, Any], device: str) -> Bundle:
    """Open a bundle without its data; build a shipped one's network once, so that a bad setting of it is told early."""
    for key, instead in _INSTEAD.items():
        if key in config and name in shipped():
            raise InputError(f"--config {key}={config[key]}", f"a federated run sets this id by {instead}", "use that")
    bundle = Bundle(name, config, device)
    if bundle.is_shipped:  # another's network may need the data folder, which is not known yet
        with stream(0, "trial network"):
            bundle.network()
    return bundle


@dataclass(frozen=True)
class _Opened:
    """A bundle open on its data: their folder ("" where the bundle says it), their split, and remarks for the user."""

    bundle: Bundle
    folder: str
    split: str
    notes: tuple[str, ...]

    def record(self) -> DataRecord:
        """Describe the images; hashes them, so this comes after what is quick to refuse."""
        bundle, counts = self.bundle, {section: len(self.bundle.data(section)) for section in SECTIONS}
        if not bundle.is_shipped:
            return DataRecord("real", self.folder, _foreign_checksum(bundle), self.split, counts, self.notes)
        source = PHANTOM if datasets.is_phantom(self.folder) else "real"
        notes = tuple(datasets.notes(bundle.name, self.folder))
        checksum = datasets.checksum(bundle.name, self.folder, self.split)
        return DataRecord(source, self.folder, checksum, self.split, counts, notes)


def _with_data(
    request: Request, config: Mapping[str, Any], device: str, say: Say, preferred: str | None = None
) -> _Opened:
    name = request.bundle
    if name not in shipped():
        return _foreign(request, config, device)
    folder = _folder(name, request.data, say)
    split = datasets.trial(name, str(config.get("split") or _split(name, folder, preferred)), request.seed)
    bundle = Bundle(name, {**config, "dataset_dir": str(folder), "split": split}, device)
    return _Opened(bundle, str(folder), split, (f"split: {split}", *datasets.notes(name, folder)))


def _folder(name: str, data: str | None, say: Say) -> Path:
    """Return the folder of a shipped bundle's images: the one given, one below $MEDFL_DATA, or the phantom cohort."""
    if data == PHANTOM:
        return phantom_folder(name)
    if data is not None or os.environ.get("MEDFL_DATA"):
        try:
            return datasets.locate(name, data)
        except InputError:
            if data is not None:
                raise
    say(f"NO REAL DATA for {name}: neither --data nor $MEDFL_DATA holds it; using a PHANTOM cohort of drawn images")
    return phantom_folder(name)


def _split(name: str, folder: Path, preferred: str | None) -> str:
    """Return the protocol's split where this folder offers it, else the folder's own default."""
    offered = datasets.splits(name, folder)
    return str(preferred) if preferred in offered else offered[0]


def _foreign(request: Request, config: Mapping[str, Any], device: str) -> _Opened:
    if request.data == PHANTOM:
        raise InputError(
            "--data phantom", "phantoms exist for the shipped bundles", "give this bundle's data folder, or omit --data"
        )
    if request.data is not None:
        config = {**config, "dataset_dir": str(Path(request.data).expanduser().resolve())}
    bundle = Bundle(request.bundle, config, device)
    notes = bundle.notes
    if not bundle.has_test:
        notes += ("this bundle names no test data: the validation items serve as test items, so 'best' is optimistic",)
    return _Opened(bundle, str(config.get("dataset_dir", "")), _OWN_SPLIT, notes)


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


def _value(value: Any) -> Any:
    """Read text as YAML, as MONAI does for overrides; expressions and references stay text."""
    if not isinstance(value, str) or value[:1] in "$@%":
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and index.isdecimal())):
        raise InputError(f"--device {name}", "auto, cpu, cuda or cuda:INDEX", "choose one")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}", f"this machine has {torch.cuda.device_count()} CUDA devices", "choose cpu or auto"
        )
    return name


def _check_numbers(request: Request) -> None:
    for name, least in _LEAST.items():
        value = getattr(request, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value}", f"a whole number of at least {least}", "correct it")
    if request.cohort is not None and not 0 < request.cohort <= 1:
        raise InputError(f"--cohort {request.cohort:g}", "a fraction of the sites, above 0 and at most 1", "correct it")
    if request.lr is not None and not 0 < request.lr < math.inf:
        raise InputError(f"--lr {request.lr:g}", "a learning rate above 0", "correct it")
