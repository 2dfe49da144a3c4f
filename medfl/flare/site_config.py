"""A site with its own images in a FLARE federation: its settings, and the runs that it accepts.

The site's file, `local/medfl.yaml` in its startup kit, never comes over a wire:

    bundle: hippocampus            # name of a shipped bundle, or a folder
    data: /data/hippocampus        # all images in it are the site's
    folder: /var/lib/medfl         # for its States (at the server: for its runs)
    policy: policies/hippocampus.yaml
    permits: [network, image_size] # ids of the bundle that a run may set, to plain numbers and names
    device: cpu
    audit: audit.jsonl             # log of what came and left
    threads: 8                     # most that a run may ask for
    classes: []                    # further class paths that a job may name, besides medfl's own
    track: mlflow                  # at the server: where its numbers go besides the run folder, as medfl run --track
    roster: {north: 5000}          # at the server: its sites, and the most training images of each
    labels: [liver, spleen]        # structures that the site annotates; auto: those that its training masks show
    channels: [T1]                 # channels that its images have, by name or number; the others are zero

`bundle` and `folder` are required; paths are relative to the folder of the file. The site accepts only numbers and
names from a fixed list as settings of a run, and only for its own bundle: no path, no component, no expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from medfl import methods
from medfl.bundle.files import find, read_protocol, sha256_of, shipped_folders, ships_unchanged
from medfl.bundle.open import open_problem, with_data
from medfl.bundle.protocol import resolved
from medfl.core import (
    SECTIONS,
    SETTINGS,
    Config,
    DataRecord,
    InputError,
    Print,
    Refused,
    Run,
    decode_text,
    errors_safe_to_send,
    examines,
    fields_of,
    is_name,
    matches_type,
    portable,
    printable,
    read_bytes,
    read_plain,
    site_names,
)
from medfl.data import Item
from medfl.flare.files import OWN_IMAGES
from medfl.flare.remote import federation_of_names
from medfl.flare.wire import is_flare_name
from medfl.policy.inspection import TRAINING, inspect
from medfl.policy.policy import JOBS, PLAN, Policy, job_of
from medfl.problem import Problem
from medfl.runs import text_record
from medfl.runtimes import Federation, check_unlabelled, site_channels, site_labels, site_settings

CONFIG_FILE = "medfl.yaml"
_MAX_BYTES = 100_000
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_LISTS = ("permits", "classes", "labels", "channels")
_DECLARED = {"labels": "structures, or auto", "channels": "channels"}
_DECLARED_NAME = re.compile(r"[^,;=\n]{1,200}")
_NAMES = {"plm"}
"""Options whose value is looked up."""
EXAMINING = "fedavg"
"""The method of an evaluation-only job: the sites get its weights unchanged."""
PLAIN = "numbers and plain names"
"""What a site accepts in a method's options."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_ ,:=.+-]{0,200}", re.ASCII)


Refuse = Callable[[str, str], InputError]
"""Makes the error of a refused run from (problem, what is allowed)."""


@dataclass(frozen=True)
class SiteConfig:
    """The settings of a site, or of the server, in its `medfl.yaml`, as above; "" for omitted ones."""

    bundle: str
    folder: str
    data: str = ""
    policy: str = ""
    permits: tuple[str, ...] = ()
    device: str = "cpu"
    audit: str = ""
    threads: int = 8
    classes: tuple[str, ...] = ()
    track: str = ""
    roster: Mapping[str, int] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()

    @property
    def declared_data(self) -> dict[str, tuple[str, ...]]:
        """The site's declarations about its data, by setting of a run; () if there are none."""
        return {"site_labels": self.labels, "site_channels": self.channels}

    @classmethod
    def read(cls, path: Path) -> SiteConfig:
        """Read a site's file.

        Raises:
            InputError: it cannot be read, or has an entry that is not allowed.
        """
        advice = "see docs/deploy.md, Join a federation over NVIDIA FLARE"
        try:
            text = decode_text(read_bytes(path, _MAX_BYTES))
            settings = read_plain(text, is_json=False, nodes=1000, depth=4)
        except Refused as error:
            raise InputError(f"{path}: {printable(error)}", "plain YAML", advice) from error

        keys = fields_of(cls)
        if not isinstance(settings, dict) or not (
            {"bundle", "folder"} <= settings.keys() <= keys.keys()
        ):
            raise InputError(
                f"{path}",
                f"the keys bundle and folder, and of {', '.join(keys)} as you like",
                advice,
            )

        for name in _DECLARED.keys() & settings.keys():
            settings[name] = _listed(settings[name])

        kinds = {"threads": int, "roster": dict, **dict.fromkeys(_LISTS, list[str])}
        for name, value in settings.items():
            kind = kinds.get(name, str)
            if not matches_type(value, kind):
                raise InputError(f"{path}: {name}", f"a {kind.__name__}", advice)

        if settings.get("threads", 1) < 1:
            raise InputError(
                f"{path}: threads: {settings['threads']}", "a whole number from 1 on", advice
            )

        for site, most in settings.get("roster", {}).items():
            # not isinstance: True is an int, too
            if not is_flare_name(site) or type(most) is not int or most < 1:
                raise InputError(
                    f"{path}: roster: {printable(site, 60)}",
                    "sites with whole numbers from 1 on",
                    advice,
                )

        for class_path in settings.get("classes", ()):
            if not _CLASS.fullmatch(class_path):
                raise InputError(
                    f"{path}: classes: {printable(class_path)}",
                    "whole class paths, as package.module.Class",
                    advice,
                )

        for name, allowed in _DECLARED.items():
            names = settings.get(name)
            if name in settings and not (names and all(map(_DECLARED_NAME.fullmatch, names))):
                raise InputError(
                    f"{path}: {name}",
                    f"names of the bundle's {allowed}",
                    f"as {name}: [NAME, NAME]",
                )

        for name in settings.keys() & set(_LISTS):
            settings[name] = tuple(settings[name])

        # relative to the file, wherever the process was started
        for name in ("folder", "data", "policy", "audit"):
            if settings.get(name):
                settings[name] = str(path.parent / settings[name])

        if settings["bundle"] not in shipped_folders():
            settings["bundle"] = str(path.parent / settings["bundle"])

        return cls(**settings)

    @property
    def is_shipped(self) -> bool:
        """Whether the bundle is one that ships with medfl, unchanged."""
        return ships_unchanged(self.bundle)

    def files(self) -> tuple[Path, Config, str]:
        """Return the bundle's folder, its federated.yaml and its hash; nothing of it is evaluated."""
        root = find(self.bundle)
        protocol = read_protocol(self.bundle)
        return root, protocol, sha256_of(root, protocol)

    def checked_policy(self) -> Policy:
        """Return the policy, after inspecting the bundle under it.

        Raises:
            InputError: the bundle is refused.
        """
        if self.policy:
            policy = Policy.read(Path(self.policy))
        else:
            policy = Policy()

        inspect(shipped_folders().get(self.bundle, Path(self.bundle)), policy).require(TRAINING)
        return policy


def _listed(value: Any) -> Any:
    """Return a name or a list as a list, with integers as text; a wrong type is left to the following check."""
    if isinstance(value, list):
        entries = value
    else:
        entries = [value]

    return [str(entry) if type(entry) is int else entry for entry in entries]


def check_declared_data(config: SiteConfig, bundle: Problem, site: str) -> None:
    """Raise an InputError if a site's declared labels and channels do not fit its bundle."""
    declared = {}
    for name, names in config.declared_data.items():
        if names:
            declared[name] = {site: names}

    texts = site_settings.as_texts(declared)
    site_labels.check(texts.get("site_labels", ""), bundle, methods.load("fedavg"), [site])
    site_channels.check(texts.get("site_channels", ""), 0.0, bundle, [site])


_SCHEMA = json.loads(Path(__file__).with_name("run.schema.json").read_bytes())
_SCHEMA["properties"]["method"] = {"enum": methods.names()}
for _name, _setting in SETTINGS.items():
    # a site has a device of its own, whatever the run says
    if _name != "device":
        _SCHEMA["properties"][_name] = _setting.schema


def accepted_run(run: Run, name: str | None, config: SiteConfig) -> Run:
    """Return what a site, or the server (`name` is None), accepts of an offered run: numbers and names.

    Raises:
        InputError: the run asks for something else; names who refuses it.
    """
    who = f"site {name!r}"
    if name is None:
        who = "the server"

    def refuse(problem: str, allowed: str) -> InputError:
        error = InputError(f"{who} refuses the run: {problem}", allowed, "ask its administrator")
        error.safe_to_send = True
        return error

    # as it comes over the wire: the schema knows lists, no tuples
    document = json.loads(json.dumps(run.to_dict()))
    error = min(Draft202012Validator(_SCHEMA).iter_errors(document), key=str, default=None)
    if error is not None:
        where = ".".join(map(str, error.absolute_path)) or "the run"
        raise refuse(
            f"{printable(where, 60)} is {printable(error.instance, 60)}",
            "numbers and names as medfl writes them",
        )

    _check_names(run, name, config.roster, refuse)
    for setting in SETTINGS:
        text = vars(run).get(setting)
        if isinstance(text, str) and not text.isprintable():
            raise refuse(
                f"{setting} {printable(text, 60)}", "text of visible characters, on one line"
            )

    with errors_safe_to_send():
        portable.enable_if_requested(vars(run))

    # By its files alone: this may be the keeper, which creates nothing from a bundle
    policy = config.checked_policy()
    root, protocol, sha256 = config.files()
    if (run.bundle, run.bundle_sha256) != (root.name, sha256):
        raise refuse(
            f"it is for bundle {printable(run.bundle)!r} ({run.bundle_sha256[:12]})",
            f"{root.name!r} ({sha256[:12]})",
        )

    if odd := odd_option(run.options):
        raise refuse(odd, PLAIN)

    method = methods.load(run.method, run.options)
    try:
        check_unlabelled(run.unlabelled, run.method, method, run.partition.sites)
    except InputError as error:
        problem = str(error).partition(";")[0]
        raise refuse(problem, "sites of the run, not all of them, and a method for them") from error

    permits = config.permits
    if name is None and not permits:  # a server without a list runs its own operator's jobs
        permits = tuple(run.config)

    _check_config(run, resolved(config.bundle, protocol, ())["config"], permits, refuse)
    if run.threads > config.threads:
        raise refuse(f"it asks for {run.threads} threads", f"at most {config.threads}")
    if not re.fullmatch("cpu|(cuda|mps|xpu)(:[0-9]{1,2})?", run.device):
        raise refuse(f"device {printable(run.device, 60)}", "a device of PyTorch, as cpu or cuda:0")
    if need := needs_in_one_place(method):
        raise refuse(f"method {run.method} needs {need}", "methods whose sites keep their images")
    if examines(run) and run.method != EXAMINING:
        raise refuse(
            f"it examines a model by method {run.method}",
            f"method {EXAMINING} and weights to begin with",
        )
    if job_of(run) == PLAN and run.seed:
        raise refuse(
            f"a job to plan has seed {run.seed}",
            "seed 0: between two splits the figures of single cases would show",
        )
    if name is None:  # the job is of its own operator
        policy = replace(policy, jobs=policy.jobs or JOBS)
    if disagreement := policy.disagreement(run):
        raise refuse(*disagreement)
    if name is None:
        return run

    return replace(run, device=config.device)


def odd_option(options: Config) -> str:
    """Return the first option of a method that is neither a number nor plain text, with its value; "" for none."""
    for option, value in options.items():
        if isinstance(value, str) and value and (not _PLAIN.fullmatch(value) or ".." in value):
            return f"option {printable(option)}={printable(value)}"
    return ""


def needs_in_one_place(method: methods.Method) -> str:
    """Return what a method needs that sites with their own images do not have, "" for nothing."""
    public = methods.extra(method, methods.PublicData)
    if method.pools_data:
        return "everybody's images in one place"
    if public is not None and public.uses_public:
        return "public data"

    return ""


def _check_names(run: Run, name: str | None, roster: Mapping[str, int], refuse: Refuse) -> None:
    """Refuse sites, bundles and language models with odd names, and paths or ids of images."""
    sites = run.partition.sites
    text = run.text
    if (name is not None and name not in sites) or not all(map(is_flare_name, sites)):
        raise refuse("it is not one of its sites, or they have odd names", "a run with this site")
    if unknown := sorted(sites.keys() - roster.keys()) if roster else []:
        raise refuse(
            f"its site {unknown[0]!r} is not in the roster", f"the sites {', '.join(roster)}"
        )

    names_by_use = {"bundle": run.bundle, "language model": text.plm if text else "none"}
    for option in _NAMES & run.options.keys():
        names_by_use[f"option {option}"] = run.options[option]

    for use, value in names_by_use.items():
        if not is_name(value):
            raise refuse(
                f"{use} {printable(value, 60)!r}", "names of letters, digits, '_', '-' and '.'"
            )

    # without paths the run must equal the received one
    data = DataRecord(run.data.source, "", "", "", {})
    partition = replace(run.partition, spec=OWN_IMAGES, notes=())
    offered = replace(run, bundle_path="", data=data, partition=partition)
    versions = map(str, run.versions.values())
    if offered != run or not all(map(_PLAIN.fullmatch, versions)):
        raise refuse(
            "it says where images lie, or which they are", "a run as medfl flare export writes it"
        )


def _check_config(run: Run, protocol: Config, permits: Sequence[str], refuse: Refuse) -> None:
    """Refuse overrides other than those of the bundle's own protocol and plain values of permitted ids."""
    for key, value in run.config.items():
        if key in protocol and protocol[key] == value:
            continue

        if isinstance(value, list):
            values = value
        else:
            values = [value]

        if key not in permits or not all(map(_is_plain, values)):
            permitted = "the bundle as it is (permits)"
            if permits:
                permitted = f"plain values of {', '.join(permits)}"

            raise refuse(f"config {printable(key)}={printable(value, 60)}", permitted)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return bool(_PLAIN.fullmatch(value))

    return isinstance(value, bool | int | float)


def open_site(
    offered: Run, name: str, config: SiteConfig, carried: Path | None = None, say: Print = str
) -> Federation:
    """Return the federation as a site sees it: all images of its folder are its own, other sites are just names.

    Args:
        offered: as received with the job.
        name: the site.
        config: its file; its entries for labels and channels override those of the job.
        carried: the folder of the job's configuration, which may contain the run's text embeddings.
        say: reports differences between job and file.

    Raises:
        InputError: the bundle or the run is refused, or images or text embeddings differ from those of the run.
    """
    policy = config.checked_policy()
    run = site_settings.with_declared(
        accepted_run(offered, name, config), name, config.declared_data, say
    )
    method = methods.load(run.method, run.options)
    preferred = resolved(config.bundle, config.files()[1], ())["split"]
    opened = with_data(
        open_problem(config.bundle, run.config, run.device, policy),
        config.data or None,
        run.config,
        seed=run.seed,
        preferred=preferred,
        unlabelled=name in site_names(run.unlabelled),
    )
    record = opened.record()

    if record.source != run.data.source:
        raise InputError(
            f"site {name!r} has {record.source} images",
            f"the run is one with {run.data.source} ones",
            "name such data",
        )

    items = {}
    for section in SECTIONS:
        items[section] = [str(item["id"]) for item in opened.bundle.items(section)]

    sites = {**dict.fromkeys(run.partition.sites, {}), name: items}
    partition = replace(run.partition, sites=sites)
    run = replace(run, data=record, partition=partition, bundle_path=opened.bundle.source)
    bundle = text_record.restored(opened.bundle, run, method, carried)
    federation = Federation(site_channels.without_absent(bundle, run), method, run)
    federation.hold()

    return federation


def open_server(offered: Run, config: SiteConfig, carried: Path | None = None) -> Federation:
    """Return the federation as seen by a server without the sites' images, with its own images if it has any.

    Raises:
        InputError: the bundle or the run is refused, or the method needs something that sites cannot provide.
    """
    policy = config.checked_policy()
    run = accepted_run(offered, None, config)
    bundle = open_problem(config.bundle, run.config, run.device, policy)
    method = methods.load(run.method, run.options)
    problem = bundle.replaced(items=_no_items)  # its images are elsewhere

    if config.data:
        problem = with_data(bundle, config.data, run.config).bundle

    problem = text_record.restored(problem, run, method, carried)
    return federation_of_names(problem, method, run, bool(config.data))


def _no_items(section: str) -> list[Item]:
    return []
