"""Preflight: would a bundle run here, on these data? Everything is checked; no model is kept and no data leaves.

Nothing of the bundle runs before it has been inspected and accepted (`medfl.policy.inspection`).
"""

from __future__ import annotations

import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import torch

from medfl import datasets, methods
from medfl.bundle.files import shipped_folders
from medfl.bundle.open import notes_on_images, open_problem, with_data
from medfl.core import (
    SECTIONS,
    Config,
    DataRecord,
    Document,
    InputError,
    MedflError,
    PartitionRecord,
    Run,
    byte_count,
    printable,
    terminal,
    version_of,
)
from medfl.data import budget, free_ram, on_device
from medfl.data.prepare import prepare
from medfl.datasets.base import read_table
from medfl.partner.case_findings import Finding, Findings
from medfl.partner.connection import Kit, reach
from medfl.partner.scanning import scan, sections
from medfl.policy.inspection import TRAINING, inspect
from medfl.policy.policy import Policy
from medfl.problem import Problem
from medfl.runs.plan import device_named, versions
from medfl.runtimes import Federation
from medfl.runtimes.local.memory import step_bytes
from medfl.storage import cache_folder
from medfl.training.site import fit, snapshot

OK = "ok"
WARNING = "warning"
FAILED = "FAILED"
_STATES = 8
"""Copies of the weights that a site's disk may have to hold: two States of methods that keep up to four each."""
_PACKAGES = {"monai_version": "monai", "pytorch_version": "torch", "numpy_version": "numpy"}


@dataclass
class Preflight:
    """The findings; `ok` is False if something failed."""

    bundle: str
    data: str
    lines: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(line.level != FAILED for line in self.lines)

    def add(self, topic: str, level: str, text: str, advice: str = "") -> None:
        """Add a line."""
        self.lines.append(Finding(topic, level, " ".join(text.split()), advice))

    @contextmanager
    def errors_as(self, topic: str) -> Iterator[None]:
        """Turn an error in the block into a line that says FAILED."""
        try:
            yield
        except MedflError as error:
            text, _, advice = str(error).partition("; ")
            self.add(topic, FAILED, text, advice)

    def require(self) -> None:
        """Raise InputError if something failed: it names the first failure, and their number."""
        failed = [line for line in self.lines if line.level == FAILED]
        if failed:
            # the parts of an InputError are joined by semicolons, so they may not contain any
            more = f" (and {len(failed) - 1} more)" * bool(failed[1:])
            raise InputError(
                f"{failed[0].topic}: {failed[0].text}{more}".replace(";", ","),
                "a site starts when nothing says FAILED",
                failed[0].advice.replace(";", ",") or "see above",
            )

    def as_dict(self) -> Document:
        """Return it for JSON."""
        lines = [line._asdict() for line in self.lines]
        return {"bundle": self.bundle, "data": self.data, "ok": self.ok, "lines": lines}

    def text(self) -> list[str]:
        """Return it as lines of text."""
        lines = [f"bundle {printable(self.bundle)} on {printable(self.data, 200)}", ""]
        size = max(len(line.topic) for line in self.lines)
        for line in self.lines:
            text = line.text
            if line.advice and line.level != OK:
                text += f" -> {line.advice}"

            label = f"{line.level:8} {line.topic:{size}}  "
            lines += terminal.hanging_indent(label, text)

        counts = Counter(line.level for line in self.lines)
        summary = []
        if failures := counts[FAILED]:
            summary.append(f"{failures} {FAILED}")
        if warnings := counts[WARNING]:
            summary.append(f"{warnings} {WARNING}{'s' if warnings > 1 else ''}")

        verdict = "READY" if self.ok else "NOT READY"
        return [*lines, "", ": ".join(filter(None, (verdict, ", ".join(summary))))]


@dataclass(frozen=True)
class PreflightOptions:
    """Arguments of a preflight.

    Attributes:
        bundle: a shipped bundle's name or a folder.
        data: the data folder, or "phantom"; None as for a run.
        policy: the site's; None: the default, which pins nothing.
        server: (host, port) of the federation's server.
        kit: startup kit of the site, for the handshake.
        config: overridden ids of the bundle's configuration.
        folder: for the site's State.
        unlabelled: the site has no labels: images without labels are training images.
    """

    bundle: str
    data: str | None = None
    policy: Policy | None = None
    server: tuple[str, int] | None = None
    kit: Path | None = None
    device: str = "cpu"
    batch_size: int | None = None
    config: Config = field(default_factory=dict)
    folder: Path = Path(".")
    unlabelled: bool = False


def check(options: PreflightOptions, *, progress: bool = False) -> Preflight:
    """Check everything; InputError if there is no such bundle."""
    report = Preflight(options.bundle, options.data or "the data folder of the bundle")
    accepted = _check_inspection(report, options)
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    report.add("versions", OK, f"{installed}, Python {platform.python_version()}")

    if accepted and (bundle := _open(report, options)) is not None:
        _check_packages(report, bundle)
        with report.errors_as("images"):
            findings = Findings(bundle)
            for section in sections(bundle):
                for item in scan(bundle, section, progress=progress):
                    findings.add(item)

            for finding in findings.lines():
                report.add(*finding)

            if not findings.unreadable:
                with report.errors_as("memory"):
                    if bundle.section("train").first[2]:
                        _memory(report, _one_batch(options, bundle))

                    _disk(report, options, findings, byte_count(snapshot(bundle.network())))

    if options.server is not None or options.kit is not None:
        with report.errors_as("server"):
            kit = None
            if options.kit is not None:
                kit = Kit.open(options.kit)

            report.add("server", OK, reach(options.server, kit))

    return report


def _check_inspection(report: Preflight, options: PreflightOptions) -> bool:
    """Report whether the bundle is accepted and pinned."""
    result = inspect(shipped_folders().get(options.bundle, Path(options.bundle)), options.policy)
    refusals = result.refused(TRAINING)
    advice = f"see medfl site inspect {printable(options.bundle)}"
    for refusal in refusals[:5]:
        report.add("inspection", FAILED, str(refusal), advice)

    if refusals:
        text = f"REFUSED, for {len(refusals)} reasons: nothing of it was run"
        report.add("inspection", FAILED, text)
    elif result.pinned:
        text = f"accepted; all {len(result.files)} files are those that the policy pins"
        report.add("inspection", OK, text)
    else:
        report.add(
            "inspection",
            WARNING,
            "accepted, but not pinned: its files may change unnoticed",
            "medfl site inspect --write-policy FILE, then give --policy FILE",
        )

    if not refusals and options.policy is not None:
        outbound = options.policy.outbound
        for text in outbound.lines():
            report.add("policy", OK, text)
        if outbound.has_formal_privacy:
            with report.errors_as("policy"):
                from medfl.policy.privacy import epsilon_of

                epsilon = epsilon_of({outbound.multiplier: 1}, outbound.delta)
                text = f"one reply: epsilon {epsilon:.3g} at delta {outbound.delta:g}"
                report.add("policy", OK, text)

    return not refusals


def _check_packages(report: Preflight, bundle: Problem) -> None:
    """Compare the installed packages with those that the bundle was written for."""
    required = {package: bundle.metadata.get(key, "") for key, package in _PACKAGES.items()}
    required |= bundle.metadata.get("required_packages_version") or {}
    for package, version in required.items():
        package = str(package)
        least = str(version)
        try:
            installed = version_of(package)
        except metadata.PackageNotFoundError:
            advice = f"install {printable(package)} {printable(least)}"
            report.add("versions", WARNING, f"{printable(package)} is not installed", advice)
            continue

        if _older(installed, least):
            text = f"{package} {installed} is older than the bundle's {printable(least)}"
            report.add("versions", WARNING, text, "update it")


def _older(installed: str, least: str) -> bool:
    """Compare the first three numbers of two versions; a minimum version without numbers is always met."""
    least_numbers = _version_numbers(least)
    return bool(least_numbers) and _version_numbers(installed) < least_numbers


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit()]


def _open(report: Preflight, options: PreflightOptions) -> Problem | None:
    """Open the bundle on its data, and report their layout."""
    with report.errors_as("data"):
        device = device_named(options.device)
        unopened = open_problem(options.bundle, options.config, device, options.policy)
        opened = with_data(unopened, options.data, options.config, unlabelled=options.unlabelled)
        bundle = opened.bundle
        report.data = opened.folder or report.data

        if bundle.dataset:
            layout = datasets.get(bundle.dataset).layout(Path(opened.folder))
            text = f"layout: {layout.text if layout else 'images alone'}"
            if datasets.is_phantom(opened.folder):
                advice = "give the real data with --data"
                report.add("data", WARNING, f"PHANTOM: drawn images; {text}", advice)
            else:
                report.add("data", OK, text)

            problems = []
            if layout:
                problems = read_table(bundle.dataset, opened.folder).problems

            for problem in problems[:20]:
                report.add("data", FAILED, problem, "repair or remove it")

            if problems:
                report.add("data", FAILED, f"{len(problems)} problems in the tables of the folder")
                return None

        counts = ", ".join(f"{len(bundle.items(name))} {name}" for name in sections(bundle))
        text = f"items: {counts}"
        if not bundle.has_test:
            text += "; no test data of their own"

        report.add("data", OK, text)
        for note in (*opened.notes, *notes_on_images(bundle)):
            report.add("data", OK, note)

        return bundle

    return None


# Memory and disk


def _one_batch(options: PreflightOptions, bundle: Problem) -> Federation:
    """Return a federation of one site with one batch of training images, whose step is measured."""
    # in the order in which a run uses them
    protocol_size = bundle.protocol.get("batch_size")
    size = options.batch_size
    if not size:
        size = protocol_size if isinstance(protocol_size, int) else bundle.batch_size

    data = bundle.section("train")
    items = data.items
    source = data.source

    if source.is_list:  # otherwise it is the bundle's own data set, which cannot be cut
        items = items[:size]
        source = replace(source, entries=source.entries[:size])

    prepared = prepare(items, source, data.collate, data.prepare_batch)
    ids = prepared.ids(range(len(prepared)))
    sites = {"here": {section: ids if section == "train" else [] for section in SECTIONS}}
    run = Run(
        bundle=bundle.name,
        bundle_path=bundle.source,
        bundle_sha256="",
        method="fedavg",
        options={},
        config=dict(options.config),
        data=DataRecord("real", "", "", "", {}),
        versions={},
        partition=PartitionRecord("iid", 0, (), sites),
        cohort=1.0,
        rounds=1,
        local_epochs=1,
        batch_size=size,
        lr=None,
        lr_decay=1.0,
        device=device_named(options.device),
    )

    return Federation(
        bundle, methods.load("fedavg"), run, prepared=dict.fromkeys(SECTIONS, prepared)
    )


def _memory(report: Preflight, federation: Federation) -> None:
    """Measure one training step: on a GPU its peak there, on the CPU what it adds to a process."""
    run = federation.run
    if run.device.startswith("cuda"):
        needed = _cuda_step(federation)
        free = on_device.free_gpu_memory(torch.device(run.device))
        where = "on the GPU"
    else:
        needed = step_bytes(federation)
        free = free_ram()
        where = "of memory"

    if not needed:
        report.add(
            "memory", FAILED, "one training step fails", "see that the bundle trains by itself"
        )
        return

    text = (
        f"one step with {run.batch_size} images takes {_gib(needed)} {where}; {_gib(free)} are free"
    )
    advice = "end other programs, or ask for a smaller --batch-size"
    report.add("memory", _level(needed, free), text, advice)


def _level(needed: int, free: int) -> str:
    """Return the level for a memory need in bytes: other programs may take a fifth of what is free now."""
    if needed < 0.8 * free:
        return OK
    if needed < free:
        return WARNING

    return FAILED


def _cuda_step(federation: Federation) -> int:
    site = federation.site("here", 1)
    torch.cuda.reset_peak_memory_stats(federation.run.device)
    try:
        with federation.scope():
            network = site.model(site.initial_weights)
            fit(network, site)
            weights = byte_count(snapshot(network))
    except torch.cuda.OutOfMemoryError as error:
        raise InputError(
            "one training step does not fit into the GPU's memory",
            "it has to",
            "ask for a smaller --batch-size",
        ) from error

    # the peak of this step, and up to four copies of the weights that methods keep beside it
    return int(torch.cuda.max_memory_allocated(federation.run.device)) + 4 * weights


def _disk(report: Preflight, options: PreflightOptions, findings: Findings, network: int) -> None:
    """Check the free disk space for the image cache, used by sections too large for memory, and for the State."""
    cache = sum(size for size in findings.bytes.values() if size > budget())
    for label, folder, needed in (
        ("cache of prepared images", cache_folder("prepared"), cache),
        ("State", options.folder, _STATES * network),
    ):
        existing = folder.absolute()
        while not existing.is_dir():  # the folder itself may not exist yet
            existing = existing.parent

        free = shutil.disk_usage(existing).free
        text = f"{label}: {_gib(needed)} needed, {_gib(free)} free in {existing}"
        if label.startswith("cache") and not needed:
            text = f"{label}: none, the images fit in memory"

        advice = "free some space, or set XDG_CACHE_HOME to a larger disk"
        report.add("disk", _level(needed, free), text, advice)


def _gib(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"

    return f"{size / 2**20:.0f} MiB"
