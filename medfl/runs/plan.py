"""From a user's request to a `Run`: find the data, draw the partition, fill in the bundle's protocol.

What can be refused without accessing the images is refused before they are accessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

from medfl import methods
from medfl.bundle.bundle import shipped
from medfl.bundle.open import (
    bundle_of,
    open_problem,
    protocol_of,
    reopened,
    require_buildable,
    with_data,
)
from medfl.bundle.protocol import options_for, resolved
from medfl.core import (
    SECTIONS,
    SETTINGS,
    Config,
    Document,
    GeneralSettings,
    InputError,
    PartitionRecord,
    Print,
    ProtocolSettings,
    PublicRecord,
    Run,
    check_limits,
    device,
    did_you_mean,
    fields_of,
    override_value,
    pick,
    type_mismatches,
    versions_of,
)
from medfl.core.compression import Compression
from medfl.data.partition.rules import OWN_SITES, Partition, assign, parse
from medfl.methods.base import Method
from medfl.policy.policy import Policy
from medfl.problem import LARGEST_COMPONENT, Problem
from medfl.runs import initial_weights, text_record
from medfl.runs.pace import AUTO, fit_schedule, rounds_note
from medfl.runs.public_data import PublicPlan, plan_public
from medfl.runs.request_checks import check_rounds
from medfl.runtimes import Federation, check_unlabelled, site_channels, site_labels
from medfl.runtimes.server.robust import Aggregation
from medfl.runtimes.unlabelled import unlabelled_notes
from medfl.storage import PHANTOM


def _left_open(settings: type) -> type:
    """Return a dataclass with the fields of these settings, each None by default."""
    columns = []
    for name, kind in get_type_hints(settings).items():
        columns.append((name, kind | None, field(default=None)))

    return make_dataclass(f"Open{settings.__name__}", columns, frozen=True, kw_only=True)


if TYPE_CHECKING:
    OpenProtocolSettings = ProtocolSettings
else:
    OpenProtocolSettings = _left_open(ProtocolSettings)


@dataclass(frozen=True)
class Request(GeneralSettings, OpenProtocolSettings):
    """A user's request; None means the bundle's protocol, then medfl's default.

    In addition it has every setting of a run, as declared in `medfl.core.settings`.

    Attributes:
        config: overridden ids of the bundle's configuration; values may be text as typed.
        data: a folder, "phantom", or None for a folder below $MEDFL_DATA, else the phantom.
        presets: names of presets of the bundle's protocol, overlaid in this order.
    """

    bundle: str
    method: str = "fedavg"
    options: Config = field(default_factory=dict)
    config: Config = field(default_factory=dict)
    data: str | None = None
    sites: int | None = None
    partition: str | None = None
    presets: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """A run with everything needed to execute it.

    `notes` are lines for the user; the partition's own notes are in its table instead.
    """

    run: Run
    bundle: Problem
    method: Method
    notes: tuple[str, ...]
    public: PublicPlan | None = None

    @cached_property
    def sections(self) -> dict[str, list[Config]]:
        """The items of each section, for tables and pictures of the partition."""
        return _items(self.bundle)

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The classes or findings, if the data list gives them for each item; () if only the images show them."""
        record_key = "target" if self.bundle.task == "multilabel" else "label"
        if any(record_key in item for item in self.sections["train"]):
            return self.bundle.classes

        return ()

    @cached_property
    def partition(self) -> Partition:
        """The partition as an object with tables and pictures."""
        record = self.run.partition
        return Partition.from_ids(
            record.sites, self.sections, spec=record.spec, seed=record.seed, notes=record.notes
        )

    def federation(self, say: Print = str) -> Federation:
        """Return the run's federation, with its public images prepared."""
        public = self.public.prepare(say=say) if self.public else None
        return Federation(self.bundle, self.method, self.run, public=public)

    def extra(self, command: str) -> Document:
        """Return the additional entries of run.json for the reader."""
        counts = {}
        if self.counted:
            counts = self.partition.counts(self.sections, len(self.counted))

        return {
            "medfl": self.run.versions["medfl"],
            "task": self.bundle.task,
            "classes": list(self.bundle.classes),
            "key_metric": self.bundle.key_metric,
            "site_class_counts": counts,
            "protocol": self.bundle.protocol.get("protocol", ""),
            "command": command,
        }


def make_plan(
    request: Request, say: Print = str, policy: Policy | None = None, site: str = ""
) -> Plan:
    """Resolve a request into a plan.

    Args:
        request: of the user.
        say: prints lines for the user.
        policy: rules for the bundle; None is the one in force (`medfl.policy.admission`).
        site: if given, all images belong to this one site of a federation. The request may then list it as
            unlabelled, although no image has a label.

    Raises:
        InputError: anything in the request that is not allowed.
    """
    # Everything unrelated to the images is checked before they are searched for
    general_settings = _general_settings(request)
    device = general_settings["device"]
    protocol = resolved(request.bundle, protocol_of(request.bundle), request.presets)
    config = dict(protocol["config"])
    if request.rounds == 0 and LARGEST_COMPONENT in protocol:
        config[LARGEST_COMPONENT] = initial_weights.largest_components(request.init)

    for key, value in request.config.items():
        config[key] = override_value(value)

    bundle = open_problem(request.bundle, config, device, policy)
    require_buildable(bundle, config)
    # before the data: weights that do not fit are refused within seconds
    bundle, general_settings["init"] = initial_weights.begin_with(
        bundle, request.init, say, request.seed
    )
    # on most CPUs bfloat16 is slower than float32, so a bundle's wish is for GPUs
    general_settings["amp"] = request.amp or (device != "cpu" and bundle.amp)
    protocol_settings = _protocol_settings(request, protocol)
    requested_options = {**options_for(protocol, request.method), **request.options}
    # options such as `large=auto` depend on the sites, which are not known yet
    unsettled = methods.load(request.method, requested_options)
    spec = request.partition or str(protocol["partition"])
    kind, _ = parse(spec)

    opened = with_data(
        bundle,
        request.data,
        config,
        say=say,
        seed=request.seed,
        preferred=protocol["split"],
        unlabelled=bool(request.unlabelled),
    )
    bundle = opened.bundle
    sections = _items(bundle)

    # Which site has which images
    sites = request.sites
    if sites is None and kind not in OWN_SITES:
        sites = protocol["sites"]

    partition = assign(
        spec, sections, sites=sites, classes=bundle.classes or None, seed=request.seed
    )
    site_ids = partition.to_ids(sections)
    if site:
        site_ids = {site: next(iter(site_ids.values()))}

    site_labels.check(protocol_settings["site_labels"], bundle, unsettled, site_ids)
    site_channels.check(protocol_settings["site_channels"], request.channel_drop, bundle, site_ids)
    if not site:
        # A single site may have no labels; the federation as a whole must have some
        check_unlabelled(request.unlabelled, request.method, unsettled, site_ids, sections["train"])

    # Settings that depend on the sites' numbers of images
    sizes = {name: len(ids["train"]) for name, ids in site_ids.items()}
    settings = fit_schedule(protocol_settings, sizes.values(), bundle.batch_size, bundle.task)
    settings["batch_size"] = settings["batch_size"] or bundle.batch_size
    check_rounds(settings["rounds"], request.init)
    method, option_notes = _settled_method(
        request.method, requested_options, int(settings["rounds"]), sizes
    )
    _check_site_networks(method, site_ids, bundle, config)
    options = methods.values_of(method)
    public = plan_public(method, options, bundle, device, say=say)

    run = Run(
        bundle=bundle.name,
        bundle_path=bundle.source,
        bundle_sha256=bundle.sha256,
        method=request.method,
        options=options,
        config=config,
        data=opened.record(),
        partition=PartitionRecord(partition.spec, request.seed, tuple(partition.notes), site_ids),
        versions=versions(),
        public=public.record if public else None,
        text=text_record.make_record(bundle, method),
        adapted=bundle.adapted,
        **settings,
        **general_settings,
    )
    bundle = site_channels.without_absent(bundle, run)

    notes = (*opened.notes, *option_notes, *rounds_note(protocol_settings, run))
    if public:
        notes += tuple(public.notes(bundle, sections))

    site_notes = site_channels.notes(bundle, run) + unlabelled_notes(run)
    if site_notes := site_notes + initial_weights.seen_notes(request.init, run):
        run = replace(run, data=replace(run.data, notes=(*run.data.notes, *site_notes)))
        notes += site_notes

    return Plan(run, bundle, method, notes, public)


def _general_settings(request: Request) -> Document:
    """Return the settings independent of the bundle, as a run records them; InputError for an invalid one."""
    values = dict(vars(request))
    check_kinds(values)
    check_limits(values)
    settings = pick(values, fields_of(GeneralSettings))
    settings["messages"] = str(Compression.parse(request.messages))
    settings["aggregation"] = str(Aggregation.parse(request.aggregation))
    settings["device"] = device_named(request.device)

    return settings


def _protocol_settings(request: Request, protocol: Config) -> Document:
    """Return each protocol setting as requested, else from the protocol; some may be "auto"."""
    settings = {}
    for setting in fields(ProtocolSettings):
        value = getattr(request, setting.name)
        if value is None:
            value = protocol[setting.name]
        settings[setting.name] = _typed(setting.name, value)

    check_limits({name: value for name, value in settings.items() if value != AUTO})
    return settings


def _settled_method(
    name: str, options: Config, rounds: int, sizes: Mapping[str, int]
) -> tuple[Method, tuple[str, ...]]:
    """Return a method with options that suit the sites' training images, and a note on each changed one."""
    schedule = {"rounds": rounds} if methods.has_option(name, "rounds") else {}
    method = methods.load(name, {**schedule, **options})
    before = methods.values_of(method)
    method = methods.settled(method, sizes)
    after = methods.values_of(method)
    notes = []
    for name_of_option, value in after.items():
        if value != before[name_of_option]:
            notes.append(f"{name_of_option}={value}, by the sites' sizes")

    return method, tuple(notes)


def _check_site_networks(
    method: Method, sites: Iterable[str], bundle: Problem, config: Config
) -> None:
    """Raise an InputError if the bundle cannot be read with the network that the method assigns to a site."""
    configs = methods.site_networks(method, [*sites]).values()
    # many sites share a network: each kind is built once
    different = {repr(changes): changes for changes in configs if changes}
    for changes in different.values():
        require_buildable(bundle.variant(changes), {**config, **changes})


def request_of(
    run: Run,
    bundle: str | None = None,
    options: Config | None = None,
    config: Config | None = None,
    **requested: Any,
) -> Request:
    """Return a request for a recorded run's settings, overridden by the given ones."""
    recorded = {name: getattr(run, name) for name in ("method", *SETTINGS)}
    recorded |= {"data": _recorded_data(run), "partition": run.partition.spec}
    if "partition" not in requested:
        recorded["sites"] = len(run.partition.sites)

    # A preset's settings are compared with the recorded ones, so the record must not hide them
    presets = protocol_of(bundle or bundle_of(run)).get("presets") or {}
    for preset in requested.get("presets", ()):
        for name in presets.get(preset, {}):
            recorded.pop(name, None)

    # One method's options mean nothing to another
    is_recorded_method = requested.get("method", run.method) == run.method
    return Request(
        bundle or bundle_of(run),
        options={**(run.options if is_recorded_method else {}), **(options or {})},
        config={**run.config, **(config or {})},
        **{**recorded, **requested},
    )


def repeat(
    run: Run,
    data: str | None = None,
    say: Print = str,
    folder: Path | None = None,
    bundle_path: str | None = None,
) -> Plan:
    """Rebuild the plan of a recorded run: same settings, same partition.

    Its images may be elsewhere (`data`), as may its bundle (`bundle_path`, which the plan's run then records);
    `folder` is the run folder, which contains its text embeddings.

    Raises:
        InputError: the bundle, the data or the text embeddings differ from the recorded ones.
    """
    config = dict(run.config)
    if bundle_of(run) in shipped():
        # other bundles have it in their configuration; a shipped one would use its protocol's again
        config["split"] = run.data.split

    bundle = reopened(run, run.config, device_named(run.device), given=bundle_path, folder=folder)
    method = methods.load(run.method, run.options)
    images = data or _recorded_data(run)
    opened = with_data(bundle, images, config, say=say, unlabelled=bool(run.unlabelled))
    record = opened.record()
    if record.checksum != run.data.checksum:
        raise InputError(
            f"the data in {record.folder} (checksum {record.checksum[:12]})",
            f"the run used {run.data.source} data with checksum {run.data.checksum[:12]}",
            "give the same data with --data",
        )

    bundle = text_record.restored(opened.bundle, run, method, folder)
    public = _repeated_public(run, method, bundle, say)
    notes = opened.notes
    if public:
        notes += tuple(public.notes(bundle, _items(bundle)))

    run = replace(
        run, data=record, public=public.record if public else None, bundle_path=bundle.source
    )
    return Plan(run, site_channels.without_absent(bundle, run), method, notes, public)


def _repeated_public(run: Run, method: Method, bundle: Problem, say: Print) -> PublicPlan | None:
    """Reopen a recorded run's public data; InputError if they or the teachers have changed."""
    recorded = run.public
    if recorded is None:
        return None

    folder = recorded.data.folder if Path(recorded.data.folder).is_dir() else None
    plan = plan_public(method, run.options, bundle, run.device, folder=folder, say=say)
    if plan is None:
        raise InputError(
            f"a run of {run.method!r} with public data that its options do not use",
            "in this version the method uses none with these options",
            "start a new run",
        )

    for name, was, now in (
        ("public data", recorded.data.checksum, plan.record.data.checksum),
        ("choice of public items", recorded.ids_sha256, plan.record.ids_sha256),
        ("configuration of the public bundle", recorded.bundle_sha256, plan.record.bundle_sha256),
        # A teacher may have moved: its weights count, not its name
        ("teachers", _checksums(recorded), _checksums(plan.record)),
    ):
        if was != now:
            raise InputError(
                f"other {name} than the run's: {str(now)[:40]}",
                f"it used {str(was)[:40]}",
                "restore them, or run anew",
            )

    return plan


def _checksums(public: PublicRecord) -> list[str]:
    return [checksum for _, checksum in public.teachers]


def _recorded_data(run: Run) -> str | None:
    """Return the location of the run's images; a missing phantom is drawn again."""
    is_shipped = bundle_of(run) in shipped()
    if is_shipped and run.data.source == PHANTOM and not Path(run.data.folder).is_dir():
        return PHANTOM
    return run.data.folder or None


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return versions_of("medfl", "torch", "monai", "numpy")


def _items(bundle: Problem) -> dict[str, list[Config]]:
    return {section: bundle.records(section) for section in SECTIONS}


def _typed(name: str, value: Any) -> Any:
    """Convert a value to its setting's type, keeping None and "auto"; InputError if that fails."""
    setting = SETTINGS[name]
    try:
        if value in (None, AUTO):
            return value

        return setting.kind(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} {str(value)!r:.40} in the bundle's federated.yaml",
            setting.allowed,
            f"correct it there, or give {setting.flag}",
        ) from error


def device_named(name: str) -> str:
    """Return a device's name, with "auto" resolved; may initialise CUDA. InputError if this machine lacks it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"

    kind, index = device(name)
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}",
            f"this machine has {torch.cuda.device_count()} CUDA devices",
            "choose cpu or auto",
        )

    return name


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise an InputError if a name is not a known setting."""
    for name in names:
        if name not in known:
            raise InputError(
                f"setting {name!r}",
                f"settings are {', '.join(known)}",
                did_you_mean(name, known, "choose one"),
            )


def check_kinds(requested: Config) -> None:
    """Raise an InputError if a name is not a setting, or a value not of its setting's type (see `Request`)."""
    check_names(requested, list(fields_of(Request)))
    for name, value, allowed in type_mismatches(Request, requested):
        flag = f"--{name.replace('_', '-')}"
        if name in ("bundle", "options", "config"):
            flag = name

        raise InputError(
            f"{flag} {value!r:.60}", f"{flag} takes {allowed}", f"change the value of {flag}"
        )
