"""`medfl export`: the result of a run as a self-contained MONAI bundle.

It contains the configuration of the source bundle with the settings of the run, the weights in four formats with their
measured agreement, and a description. It is written to a temporary folder, read back, checked (`medfl.export.checks`)
and only then renamed to `out`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.inferers import SimpleInferer
from torch import Tensor, nn
from torch.utils.data import Subset

from medfl import methods
from medfl.bundle.bundle import shipped
from medfl.bundle.configuration import Configuration, by_existing_ids, own_modules
from medfl.bundle.files import config_file, read
from medfl.bundle.open import bundle_of, reopened, with_data
from medfl.bundle.zoo.conventions import without_fetching
from medfl.core import Config, Document, InputError, Print, RunError, Task, cpu_copies, pip_install
from medfl.core.seeding import stream
from medfl.data import Prepared, Shard, Source
from medfl.data.prepare import prepare
from medfl.data.prepared import as_plain
from medfl.datasets.readers.mask_values import picture_values
from medfl.evaluation.evaluators import class_indices
from medfl.export import configs, descriptions, network as exported
from medfl.export.checks import LARGE, load_weights_into, problems
from medfl.export.configs import TORCHSCRIPT
from medfl.export.formats import (
    FILES,
    Agreement,
    Comparison,
    ShapeRecorder,
    format_difference,
    missing_packages,
    quiet,
    write,
)
from medfl.problem import Problem, is_parts, mask_values
from medfl.problem.tasks.kind import column_names
from medfl.problem.tasks.regression import scale_of
from medfl.report.formatting import time_left
from medfl.runs.networks_of_run import CPU, Model, RunNetworks
from medfl.runs.predictor import evaluator_of, thresholds_of
from medfl.storage import (
    PHANTOM,
    check_which,
    new_folder,
    require_unused,
    safe_file_name,
    save_weights,
    write_atomic,
)
from medfl.storage.places import CALIBRATION

_INITIAL_WEIGHTS = "$@bundle_root + '/models/model.safetensors'"
_NO_OTHER = "it has no other form, so this model cannot be exported"
_OURS = "$medfl.datasets."
_SAME_NETWORK = 1e-6  # difference of outputs
_SAME_PREDICTIONS = {True: 2e-4, False: 1e-2}  # on a CPU, or on a GPU, which is less exact


def export(
    run: str | Path,
    out: str | Path,
    *,
    which: str = "last",
    site: str | None = None,
    formats: Sequence[str] | None = None,
    data: str | None = None,
    say: Print = str,
) -> Document:
    """Write a run's model as a MONAI bundle; for several sites one bundle each, below `out`.

    Args:
        run: folder of the run; the bundle says so if the run was interrupted.
        out: new or empty folder.
        which: "last" or "best" (by validation).
        site: whose model, for methods with a model per site; "all" for all sites; None for the global model.
        formats: of "torchscript" and "onnx"; None for those that can be written. A state dict and safetensors are
            always written, and TorchScript if MONAI has no such network.
        data: folder of the run's images, if they have moved.
        say: prints lines for the user.

    Returns:
        The written files and the measured differences, for JSON.

    Raises:
        InputError: no such run, model or site, or `out` is in use; nothing is written.
        RunError: a format differs from the network by more than its limit, or a check fails; nothing is written.
    """
    run = Path(run)
    out = Path(out)
    check_which(which)
    require_unused(out, advice="give a new folder")
    trained = RunNetworks(run, which, say)

    if is_parts(trained.bundle.source):
        raise InputError(
            f"{run}, a run of parts in Python",
            "a bundle is written from the configuration of a bundle",
            "take weights.safetensors, or medfl.load_run(DIR).network()",
        )

    if not trained.finished:
        say(
            f"note: the run in {run} was interrupted: this is round {trained.round} of {trained.run.rounds}"
        )

    models = trained.models(site, data, say)
    several = site == "all" and "all" not in trained.sites
    names = [safe_file_name(model.site) if several else "" for model in models]
    documents = []
    with new_folder(out) as temporary:
        began = time.monotonic()
        for model, name in zip(models, names, strict=True):
            writer = _BundleWriter(trained, model, temporary / name, formats, data, say)
            documents.append(writer.write())
            if remaining := len(models) - len(documents):
                seconds = (time.monotonic() - began) / len(documents) * remaining
                say(f"{time_left(seconds)} for {remaining} of {len(models)} bundles")

    for document, name in zip(documents, names, strict=True):
        document["folder"] = str(out / name)

    return {
        "run": str(run),
        "run_hash": trained.run_hash,
        "data_source": trained.run.data.source,
        "bundles": documents,
    }


@dataclass(frozen=True)
class _NetworkDefinition:
    """How a configuration defines the network: "configuration" (as is), "medfl" with arguments, or "torchscript"."""

    kind: str
    arguments: Config


class _BundleWriter:
    """Writes one bundle."""

    def __init__(
        self,
        trained: RunNetworks,
        model: Model,
        folder: Path,
        formats: Sequence[str] | None,
        data: str | None,
        say: Print,
    ) -> None:
        self.trained = trained
        self.model = model
        self.folder = folder
        self.formats = formats
        self.say = say
        self.task = trained.task
        self.images: Images = test_images(trained, model, data, say)
        self.bundle = self.images.bundle
        self.root = Path(self.bundle.source)
        self.inferer = getattr(self.bundle.evaluator, "inferer", None) or SimpleInferer()
        by_kind = self.bundle.kind.activation
        if getattr(self.bundle.evaluator, "ends_in_sigmoid", False):
            by_kind = ""

        activation = partial(_probabilities, by_kind)
        self.comparison = Comparison(self.images.inputs, self.inferer, activation)
        self.data_folder: str | None = None
        if "dataset_dir" in self.bundle:
            self.data_folder = str(self.bundle.get("dataset_dir"))

        self.notes: list[str] = []
        self.any_folder = False  # whether MONAI's run of the bundle predicts any folder of images
        self.thresholds = [*thresholds_of(trained, model.site or None, say)]  # of findings
        evaluator = evaluator_of(trained, self.bundle, model.site or None)
        self.largest = [*getattr(evaluator, "largest", ())]
        self.monai_network: Any = None  # the `network_def` for MONAI alone

    def write(self) -> Document:
        """Write everything and check it."""
        network = self.model.network.eval()
        recorder = ShapeRecorder(network)
        with torch.no_grad():
            for x in self.images.inputs:
                self.inferer(x, recorder)

        predictions = self._check_predictions(network)
        definition = self._choose_definition(network)
        for folder in ("models", "docs"):
            (self.folder / folder).mkdir(parents=True)

        stems = ("train", "evaluate", "inference", "federated")
        edited = {stem: file for stem in stems if (file := self._edited(stem))}
        self.monai_network = TORCHSCRIPT
        if definition.kind == "configuration":
            node = edited["train"].get("network_def")
            self.monai_network = configs.component_of(node, self.bundle.get)

        agreements = self._formats(network, recorder, definition)
        self._write_weights(network, definition)
        files = descriptions.weight_files(self.folder)
        sha256 = files["models/model.safetensors"]["sha256"]
        channels = recorder.shapes[0][0][1], recorder.shapes[0][1][1]
        self._configurations(edited, definition, sha256, channels)
        self._copy_files()
        self._calibration(sha256)
        meta = descriptions.bundle_metadata(
            self.folder, self.trained, self.model, recorder, agreements, definition.kind
        )

        measured = "drawn images"
        if self.images.from_run:
            measured = "test images of the run"

        meta["medfl"] |= {"files": files, "measured_on": measured, "task": self.task.kind}
        meta["medfl"] |= {"thresholds": self.thresholds} if self.thresholds else {}
        if self.largest:
            meta["medfl"]["largest_components"] = self.largest

        self._write("configs/metadata.json", descriptions.as_json(meta))
        self._read_back(network)
        self._describe(meta)
        failures = problems(self.folder, self.data_folder)

        if failures:
            raise RunError(
                f"the export does not pass its checks: {', '.join(failures[:3])}; nothing was kept"
            )

        return {
            "site": self.model.site,
            "round": self.model.round,
            "which": self.trained.which,
            "finished": self.trained.finished,
            "network": definition.kind,
            "measured_on": meta["medfl"]["measured_on"],
            "agreement": meta["medfl"]["agreement"],
            "predictions": predictions,
            "eval_metrics": meta["eval_metrics"],
            "version": meta["version"],
            "files": files,
            "notes": self.notes,
        }

    def _check_predictions(self, network: nn.Module) -> dict[str, float] | None:
        """Compare the network with the run's predictions; raise a RunError if they differ."""
        comparison = compare_predictions(network, self.trained, self.model, self.images)
        limit = _SAME_PREDICTIONS[self.trained.computed_on_cpu]
        if comparison and not comparison["largest_difference"] <= limit:
            raise RunError(
                f"the model differs from the run's predictions.csv by {comparison['largest_difference']:.1e} on "
                f"{comparison['items']} images, more than {limit:.0e}: weights or images have changed since the run"
            )

        return comparison

    # How the network is defined

    def _choose_definition(self, network: nn.Module) -> _NetworkDefinition:
        with suppress(RuntimeError):  # other tensors: the method changed it
            with stream(0, "export"):  # preserves the caller's generator
                unchanged = self.bundle.network().to(CPU)
            unchanged.load_state_dict(network.state_dict())
            if self._equal(network, unchanged):
                return _NetworkDefinition("configuration", {})

        if self.trained.run.method in methods.names():
            arguments = self._arguments()
            with suppress(RuntimeError):
                with stream(0, "export"):
                    rebuilt = exported.network(self.bundle.network().to(CPU), **arguments)
                rebuilt.load_state_dict(exported.complete(network).state_dict())
                if self._equal(network, rebuilt):
                    return _NetworkDefinition("medfl", arguments)

        return _NetworkDefinition("torchscript", {})

    def _arguments(self) -> Document:
        """Return the arguments of `medfl.exported.network`, with all options, so that later defaults change nothing."""
        run = self.trained.run
        shapes = []

        def embeddings(plm: str) -> Tensor:
            values = self.task.embeddings(plm)
            shapes.append(list(values.shape))
            return values

        task = Task(self.task.kind, self.task.classes, embeddings)
        with stream(0, "export"):
            self.trained.method.adapt(self.bundle.network(), task)

        arguments: Document = {"method": run.method, "options": descriptions.all_options(run)}
        arguments |= {"task": task.kind, "classes": [*task.classes]}
        if shapes:  # the method has requested embeddings
            arguments["embeddings"] = shapes[0]

        return arguments

    def _equal(self, network: nn.Module, candidate: nn.Module) -> bool:
        agreement = self.comparison.agreement(network, candidate.eval(), _SAME_NETWORK, "")
        return agreement.outputs <= _SAME_NETWORK

    # Files

    def _formats(
        self, network: nn.Module, recorder: ShapeRecorder, definition: _NetworkDefinition
    ) -> dict[str, Agreement]:
        kinds = [*self._wanted()]
        if self.monai_network == TORCHSCRIPT and "torchscript" not in kinds:
            kinds.append("torchscript")

        agreements = {}
        for kind in kinds:
            is_needed = kind == definition.kind or kind in (self.formats or ())
            only = {}
            if kind == definition.kind:
                only = {"instead": _NO_OTHER}

            path = self.folder / FILES[kind]
            try:
                measured = write(kind, network, recorder, path, self.comparison, **only)
            except RunError as error:
                if is_needed:
                    raise

                path.unlink(missing_ok=True)
                self.notes.append(f"{FILES[kind]} is not there: {error}")
                continue

            agreements[kind] = measured
            self.say(
                f"{kind} ({measured.how}): differs by {format_difference(measured.probabilities)} "
                f"(outputs {format_difference(measured.outputs)}) on {measured.images} images"
            )

        return agreements

    def _wanted(self) -> Iterator[str]:
        """Yield the requested formats, or those whose packages are installed, with a note on the others."""
        for kind in FILES if self.formats is None else self.formats:
            if missing := missing_packages(kind):
                self.notes.append(
                    f"{FILES[kind]} is not there: it takes {', '.join(missing)} ({pip_install('export')})."
                )
            else:
                yield kind

    def _write_weights(self, network: nn.Module, definition: _NetworkDefinition) -> None:
        if definition.kind == "torchscript":
            with quiet():
                network = torch.jit.load(str(self.folder / FILES["torchscript"]))  # type: ignore[no-untyped-call]

        state = cpu_copies(network.state_dict())
        torch.save(state, self.folder / "models" / "model.pt")
        save_weights(self.folder / "models" / "model.safetensors", state)

    def _edited(self, stem: str) -> configs.EditedConfig | None:
        """Return a configuration of the source with the settings of the run, None if there is none."""
        source = config_file(self.root, stem)
        if source is None:
            return None

        file = configs.EditedConfig(source)
        if stem == "federated":
            return file

        run = self.trained.run
        changes = {**run.config, **self.model.config}
        if self.bundle.dataset:
            changes["split"] = run.data.split

        for key, value in by_existing_ids(changes, file.content).items():
            if key != "dataset_dir":
                file.set(key, value)

        folder = file.get("dataset_dir")
        is_path = isinstance(folder, str) and folder[:1] in "/~"
        # a local path is meaningless elsewhere; /workspace is the zoo's placeholder
        if is_path and not folder.startswith("/workspace/"):
            place = "data"
            if "bundle_root" in file:
                place = "$@bundle_root + '/data'"

            file.set("dataset_dir", place)

        if stem == "inference":
            file.content = without_fetching(file.content)

        return file

    def _configurations(
        self,
        edited: Mapping[str, configs.EditedConfig],
        definition: _NetworkDefinition,
        sha256: str,
        channels: tuple[int, int],
    ) -> None:
        """Write each configuration for MONAI alone if possible, and for medfl if that differs."""
        for stem, file in edited.items():
            name = file.path.name
            by_monai = None
            if stem == "inference":
                by_monai = self._inference_by_monai(file, edited["train"], channels)
            elif stem != "federated" and definition.kind == "configuration":
                by_monai = self._by_monai(file)

            if stem != "federated":
                self._set_network_def(file, stem, definition, sha256)

            if by_monai:
                self._write(f"configs/{'inference.yaml' if self.any_folder else name}", by_monai)
            if (text := file.text()) != by_monai:
                self._write(f"configs/{'' if stem == 'federated' else 'medfl/'}{name}", text)

        if "inference" not in edited:
            self.notes.append(
                "The source bundle has no inference configuration, so this one has none either."
            )
        elif config_file(self.folder, "inference", medfl=False) is None:
            self.notes.append(
                "MONAI alone cannot run it: it names parts of medfl. `medfl predict` does."
            )

    def _inference_by_monai(
        self, file: configs.EditedConfig, train: configs.EditedConfig, channels: tuple[int, int]
    ) -> str | None:
        """Return an inference configuration that does not need medfl, None if impossible."""
        if self.monai_network == TORCHSCRIPT and not (self.folder / FILES["torchscript"]).exists():
            return None

        dataset = file.get("dataset")
        is_ours = isinstance(dataset, Mapping) and str(dataset.get("data")).startswith(_OURS)
        if not is_ours:
            if self.largest:
                self.notes.append(
                    "MONAI's run of it keeps all components; `medfl predict` keeps the largest ones."
                )
            return self._by_monai(file)

        count, outputs = channels
        volumes = self.images.inputs[0].ndim == 5
        values = mask_values(self.bundle.metadata)
        if len(values) != outputs:
            if volumes:
                values = range(outputs)
            else:
                values = picture_values(outputs)

        classes = column_names(self.task.classes, outputs)
        if any(name[:1] in "$@%" for name in classes):  # which MONAI would evaluate
            return None

        mean, sd = scale_of(self.bundle.metadata, outputs)
        facts = {
            "segments": self.task.kind == "segmentation",
            "task": self.task.kind,
            "activation": self.bundle.kind.activation,
            "channels": count,
            "classes": classes,
            "values": [*values],
            "dtype": "uint8" if max(values) < 256 else "uint16",
            "thresholds": self.thresholds,
            "largest": class_indices(self.largest, self.bundle.structures, outputs),
            "mean": mean.tolist(),
            "sd": sd.tolist(),
        }
        validate = train.get("validate")
        if isinstance(validate, Mapping):  # which may cut windows differently
            file.set("inferer", validate.get("inferer", file.get("inferer")))

        text = configs.inference_by_monai(
            file.content, file.get("inferer"), self.monai_network, facts, self.bundle.get
        )
        self.any_folder = text is not None
        return text

    def _by_monai(self, file: configs.EditedConfig) -> str | None:
        """Return a configuration's text with a network for MONAI alone, None if other parts name medfl."""
        for_monai = deepcopy(file)
        network = TORCHSCRIPT
        if self.monai_network != TORCHSCRIPT:
            network = configs.network_without_weights(file.get("network_def"))

        for_monai.set("network_def", network)
        return None if configs.is_of_medfl(for_monai.content) else for_monai.text()

    def _set_network_def(
        self, file: configs.EditedConfig, stem: str, definition: _NetworkDefinition, sha256: str
    ) -> None:
        node = file.get("network_def")
        if node is None:
            if definition.kind != "configuration" and stem == "train":
                raise InputError(
                    f"bundle {self.bundle.name!r} has no id 'network_def', and method {self.trained.run.method!r} "
                    "changed its network",
                    "an export defines the network under this id",
                    "give the network of the bundle's train configuration the id network_def",
                )

            return

        for_training = stem == "train"
        if definition.kind == "torchscript":
            if not for_training:
                file.set("network_def", TORCHSCRIPT)
            return

        if definition.kind == "medfl":
            node = configs.network_of_method(node, definition.arguments)
        else:
            node = configs.network_without_weights(node)

        if for_training and "bundle_root" in file:
            node = configs.network_with_weights(node, sha256)
            if "initial_weights" not in file:
                file.insert("initial_weights", _INITIAL_WEIGHTS, before="network_def")

        file.set("network_def", node)

    def _copy_files(self) -> None:
        """Copy licence, embeddings and the bundle's own Python."""
        for name, document in (
            ("LICENSE", "licence"),
            ("docs/data_license.txt", "licence of its images"),
        ):
            if (self.root / name).is_file():
                shutil.copyfile(self.root / name, self.folder / name)
            else:
                self._write(name, f"The source bundle states no {document}: ask its authors.\n")

        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in ["embeddings", *own_modules(self.root)]:
            if (self.root / name).is_dir():
                _copy_folder(self.root / name, self.folder / name, ignored)
            elif (self.root / f"{name}.py").is_file():
                shutil.copyfile(self.root / f"{name}.py", self.folder / f"{name}.py")

    def _calibration(self, sha256: str) -> None:
        """Write the calibration of this model by `medfl calibrate`, for these weights."""
        kind = "personal" if self.model.site else "global"
        document = self.trained.files.calibration(self.trained.which, kind)
        if document is None:
            return

        entry = {**document, "weights_sha256": sha256, "site": self.model.site}
        self._write(f"docs/{CALIBRATION}", descriptions.as_json(entry))
        self.notes.append(
            f"Coverage {document['coverage']:g} is promised of {document['promise']}: docs/{CALIBRATION} has "
            "the thresholds, by which `medfl predict` makes sets, intervals or masks."
        )

    def _describe(self, meta: Config) -> None:
        inference = config_file(self.folder, "inference", medfl=False)
        text = descriptions.readme(
            meta, self.trained, self.model, inference, self.notes, self.any_folder
        )
        self._write("docs/README.md", text)
        self._write("docs/medfl.json", descriptions.as_json(descriptions.run_record(self.trained)))
        if text := descriptions.large_files(self.folder, LARGE):
            self._write("large_files.yml", text)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / name, text.encode())

    # Reading it back

    def _read_back(self, network: nn.Module) -> None:
        """Check that the written configuration and weights give the network; note if images are read differently."""
        file = config_file(self.folder, "inference")
        if file is None:
            return

        overrides = {}
        if self.data_folder and "dataset_dir" in read(file):
            overrides["dataset_dir"] = self.data_folder

        metadata = read(self.folder / "configs" / "metadata.json")
        policy = self.bundle.policy
        if read(file).get("network_def") == TORCHSCRIPT:  # just written by this function
            policy = replace(policy, allow=policy.allow | {"pickle"})

        config = Configuration(self.folder, [file], overrides, metadata, CPU, policy)
        if "network_def" in config:
            with quiet():
                written = config.evaluated("network_def")
            load_weights_into(
                written, self.folder, f"bundle {self.bundle.name!r}, where configs/{file.name}"
            )
            if not self._equal(network, written):
                raise RunError(
                    f"configs/{file.name} with models/model.pt is not the network of the run"
                )

        if "preprocessing" in config and self.images.entries:
            preprocess = config.evaluated("preprocessing")
            for entry, expected in zip(self.images.entries, self.images.inputs, strict=True):
                x = as_plain(preprocess(entry)["image"])[None]
                if not torch.equal(x.float(), expected.float()):
                    self.notes.append(
                        f"configs/{file.name} reads images in another way than validation did in the run: its "
                        "predictions may differ from those that were scored."
                    )
                    break


def _probabilities(activation: str, outputs: Tensor) -> Tensor:
    """Convert outputs (B, K[, ...]) to probabilities with a kind's activation; "" leaves the outputs unchanged."""
    if not activation:
        return outputs
    if activation == "sigmoid" or outputs.shape[1] == 1:
        return outputs.sigmoid()

    return outputs.softmax(1)


def _copy_folder(source: Path, target: Path, ignored: Callable[[str, list[str]], set[str]]) -> None:
    """Copy a folder's files without their times and permissions, which a sandbox does not allow to be set."""
    names = [entry.name for entry in source.iterdir()]
    target.mkdir()
    for name in sorted(set(names) - set(ignored(str(source), names))):
        if (source / name).is_dir():
            _copy_folder(source / name, target / name, ignored)
        else:
            shutil.copyfile(source / name, target / name)


# The images on which an export is compared: a few test items of the run, else of its phantom.


_COUNT = {"classification": 8}  # images by task
_DEFAULT_COUNT = 3  # fewer, because masks take longer


@dataclass(frozen=True)
class Images:
    """A few images, as validation prepares them.

    Attributes:
        bundle: the run's, opened on their folder, with the network of the model's site.
        from_run: whether they are test items of the run.
        inputs: (1, C, H, W[, D]) each.
        entries: their entries in the data list; () if only the bundle's own class can read them.
        prepared: the images with their targets.
    """

    bundle: Problem
    from_run: bool
    inputs: tuple[Tensor, ...]
    entries: tuple[Any, ...]
    prepared: Prepared


def test_images(trained: RunNetworks, model: Model, data: str | None, say: Print) -> Images:
    """Return a few test images, of the model's site if it has one; `data` is their folder, if they have moved.

    Raises:
        InputError: they are not in the folder.
    """
    run = trained.run
    is_shipped = bundle_of(trained.run) in shipped()
    folder = data or None
    if not data and run.data.folder and Path(run.data.folder).is_dir():
        folder = run.data.folder

    from_run = folder is not None or not is_shipped or (run.data.source == PHANTOM and data is None)

    if not from_run:
        say(
            f"note: the run's images are not in {run.data.folder}: measured on PHANTOM images (or give --data DIR)"
        )

    config = {**run.config, **model.config}
    if is_shipped and from_run:
        config["split"] = run.data.split  # a phantom replacing real images has its own

    bundle = reopened(run, config, "cpu", folder=trained.path, allow_changed=True)
    place = folder
    if is_shipped:
        place = folder or PHANTOM

    opened = with_data(bundle, place, config)
    bundle = opened.bundle

    if from_run and folder is None and is_shipped and opened.record().checksum != run.data.checksum:
        from_run = False
        say(
            "note: the run's PHANTOM images are drawn otherwise today: measured on today's (or give --data DIR)"
        )

    if bundle.custom_trainer:
        raise InputError(
            f"the export of a run with a {bundle.custom_trainer}, which has an iteration of its own",
            "what is exported is one network of images",
            "load the run's weights.safetensors into the bundle's own networks",
        )

    section = bundle.section("test")
    count = _COUNT.get(bundle.task, _DEFAULT_COUNT)
    positions = list(range(len(section.items)))
    if model.site and from_run:
        of_site = set(run.partition.sites[model.site]["test"])
        positions = [i for i in positions if section.items[i]["id"] in of_site]

    # spread over the data list, which is often sorted by class
    positions = positions[:: max(1, len(positions) // count)][:count] or [0]
    source = section.source
    listed: tuple[Any, ...] = ()
    entries: Any = Subset(source.entries, positions)
    if source.is_list:
        listed = tuple(source.entries[i] for i in positions)
        entries = list(listed)

    items = [section.items[i] for i in positions]
    chosen = Source(entries, source.transforms, source.repeatable)
    prepared = prepare(items, chosen, section.collate, section.prepare_batch, label="preparing")
    inputs = tuple(as_plain(x) for x, _ in prepared.batches(torch.arange(len(items)), 1, None))

    return Images(bundle, from_run, inputs, listed, prepared)


# The run's own predictions


def compare_predictions(
    network: nn.Module, trained: RunNetworks, model: Model, images: Images
) -> dict[str, float] | None:
    """Compare a network with predictions.csv on these images.

    Returns:
        The number of compared items and the largest difference; None if the file belongs to another model or other
            images, or if validation is random by an item's index among all.
    """
    table = trained.files.prediction_table
    draws = images.prepared.deterministic() is not images.prepared
    of_this_model = (
        trained.which == "last"
        and trained.finished
        and (model.site != "") == (trained.method.judged == "personal")
    )

    if not of_this_model or not images.from_run or table is None or draws:
        return None

    recorded = images.bundle.kind.read(table, images.bundle.classes)
    shard = Shard.of(images.prepared, range(len(images.inputs)))
    cases = evaluator_of(trained, images.bundle, model.site or None)(network, shard, CPU)
    recorded_ids = {*recorded.ids}
    ids = [ident for ident in cases.ids if ident in recorded_ids]
    scored = recorded.select(ids).arrays
    largest = 0.0
    for name, values in cases.select(ids).arrays.items():
        if name in scored and np.issubdtype(values.dtype, np.floating):
            differences = np.abs(scored[name] - values)
            largest = max(largest, *differences[~np.isnan(differences)].tolist(), 0.0)

    return {"items": len(ids), "largest_difference": largest} if ids else None
