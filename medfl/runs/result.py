"""Result: a run folder as an object, for notebooks: its numbers, its networks, and their predictions for any image."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from medfl.bundle import case_metadata, new_images
from medfl.core import (
    OF_VECTORS,
    SECTIONS,
    Document,
    Floats,
    InputError,
    Integers,
    Run,
    check_arguments,
    map_values,
    not_among,
    pick_known,
)
from medfl.data import Prepared, Shard
from medfl.evaluation import Cases, ClassEvaluator, metrics
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Examined, probabilities_in
from medfl.report import activation_maps, write_report
from medfl.runs import subgroups
from medfl.runs.networks_of_run import RunNetworks
from medfl.runs.plan import Plan, repeat
from medfl.runs.predict import predict
from medfl.runs.predictor import evaluator_of, thresholds_of
from medfl.runs.result_tables import Record, ResultTables, parse_row, with_same_keys
from medfl.runtimes import site_labels
from medfl.storage import RunReader, Table
from medfl.training.accelerate.precision import tf32

if TYPE_CHECKING:
    from medfl.report.activation_maps import ActivationMap
    from medfl.runs.subgroups import Subgroups

Images = new_images.Images
T = TypeVar("T")


class Result(ResultTables):
    """A run folder, finished or not.

    Lists of records are plain dicts with the same keys; `to_frame` makes pandas tables of them.

    Args:
        folder: written by `medfl run` or `medfl.run`.
        device: of the networks.

    Attributes:
        path: the folder.
        run: the record of everything that the run depends on.

    Raises:
        InputError: the folder is not a run's, or its run.json is damaged. Other files are read at their first use;
            a damaged one raises then.
    """

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        """Read the folder, but no images or networks yet."""
        self.path = Path(folder).expanduser()
        self.device = torch.device(device)
        self._files = RunReader(self.path)
        self._files.record  # noqa: B018 (a folder that is no run's is refused here)
        self.run: Run = self._files.run
        self._opened: dict[str, RunNetworks] = {}
        self._held: dict[str, Prepared] = {}

    def __repr__(self) -> str:
        """Say in one line what was run on what and how it went."""
        run = self.run
        key = self._files.key
        data = "PHANTOM data" if run.data.source == "phantom" else "real data"
        score = ""
        if self.finished:
            last = (self.summary.get("last") or {}).get(key)
            if last is not None:
                score = f", {metrics.title(key).lower()} {last:.3f}"

        done = f"{len(self.rounds)} of {run.rounds} rounds"

        return f"<{run.method} on {run.bundle}, {data}, {len(run.partition.sites)} sites, {done}{score}: {self.path}>"

    # What the run wrote

    @property
    def _key(self) -> str:
        return self._files.key

    @property
    def finished(self) -> bool:
        """Whether all rounds are there, and the summary."""
        return self._files.finished

    @property
    def summary(self) -> Document:
        """The content of summary.json: last and best round, sites, bytes, seconds.

        Raises:
            InputError: the run has not got that far.
        """
        return dict(self._needed(self._files.summary or None, "summary.json"))

    @property
    def task(self) -> str:
        """The kind of task: classification, multilabel, regression, segmentation or other."""
        return str(self._files.record["task"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in label order, names of findings or numbers, () if there are none."""
        return self._files.classes

    @cached_property
    def rounds(self) -> list[Record]:
        """One record per round: seconds, bytes, sites, train_loss, and validation metrics as `val_<name>`."""
        columns = (
            "round",
            "seconds",
            "seconds_train",
            "seconds_server",
            "seconds_eval",
            "bytes_up",
            "bytes_down",
            "train_loss",
        )
        rows = []
        for entry in self._files.rounds:
            row = pick_known(entry, columns)
            row["sites"] = len(entry.get("cohort") or ())
            for name, value in (entry.get("val") or {}).items():
                row[f"val_{name}"] = value

            rows.append(row | (entry.get("observed") or {}))

        return with_same_keys(rows)

    @cached_property
    def site_rounds(self) -> list[Record]:
        """One record per round and site: its training loss, and metrics as `received_<name>` and `personal_<name>`."""
        rows = []
        for entry in self._files.rounds:
            for site, site_entry in (entry.get("sites") or {}).items():
                row = {"round": entry["round"], "site": site}
                rows.append(row)
                for kind, value in site_entry.items():
                    if isinstance(value, Mapping):
                        row |= {f"{kind}_{name}": number for name, number in value.items()}
                    else:
                        row[kind] = value

        return with_same_keys(rows)

    @cached_property
    def sites(self) -> list[Record]:
        """One record per site: its numbers of items, class counts and test metrics, as in sites.csv."""
        return with_same_keys(list(map(parse_row, self._files.sites)))

    @cached_property
    def predictions(self) -> list[Record]:
        """One record per test case, by the judged model of the run; `cases` adds centre, age and the like.

        Classification: id, site ("" if no site has it), label, predicted, and `p_<class>`. Findings: id, site,
        `label_<finding>` (None if unknown), `predicted_<finding>` and `p_<finding>`; numbers: `target_<number>` and
        `predicted_<number>`. Otherwise id, site and the case's metrics.

        Raises:
            InputError: the run has not got that far, or the table is damaged.
        """
        if self.task == "classification":
            _ = (self.labels, self.probabilities)  # refuse a table that no run writes

        return [parse_row(row) for _, row in self._prediction_table.rows]

    @property
    def labels(self) -> Integers:
        """The reference classes of the predictions, (N,)."""
        self._require_classification("labels")
        cases = KINDS[self.task].read(self._prediction_table, self.classes)
        if not cases.is_classification:
            raise self._prediction_table.damaged("has no classes under label and predicted")

        return cases.array("label")

    @property
    def probabilities(self) -> Floats:
        """The predicted probabilities, (N, K), rows and columns in the order of predictions and classes."""
        self._require_classification("probabilities")
        return probabilities_in(self._prediction_table, self.classes)

    @property
    def _prediction_table(self) -> Table:
        return self._needed(self._files.prediction_table, "predictions.csv")

    def report(self) -> Path:
        """Rewrite the report and return the path of the page."""
        return write_report(self.path)

    # With the data

    @cached_property
    def plan(self) -> Plan:
        """The run's bundle open on its data, checked to be those of the run.

        Raises:
            InputError: bundle or data have changed, or the data are not available.
        """
        # the public data trained the network, and are not needed to use it
        run = dataclasses.replace(self.run, public=None, device=str(self.device))
        return repeat(run)

    def cases(self) -> list[Record]:
        """Return the predictions with the data's information on each case: centre, group, age, sex, localisation.

        This is read from the data folder and stays out of the run folder: it is personal data.

        Raises:
            InputError: as for `predictions` and `plan`.
        """
        metadata = case_metadata.read(self.plan.bundle, "test", self.plan.run.data.folder)
        return [{**row, **metadata.get(row["id"], {})} for row in self.predictions]

    def subgroups(self, by: str = "centre", min_count: int = subgroups.MIN_COUNT) -> Subgroups:
        """Return the metrics of the test cases by centre, site, sex, age (bands of 20 years) or localisation.

        Args:
            by: the column.
            min_count: groups with fewer cases are suppressed, as are metrics based on fewer cases of a class.

        Raises:
            InputError: the data have no such column; otherwise as for `cases`.
        """
        # sites are in the run folder; everything else is in the data folder, which must be available
        rows = self.predictions if by == "site" else self.cases()
        groups = subgroups.of(
            rows, by, self.classes, task=self.task, min_count=min_count, seed=self.run.seed
        )
        if self.task in OF_VECTORS and self._key not in metrics.METRICS:
            note = f"{self._key}, the bundle's own metric, is of all cases alone"
            groups = dataclasses.replace(groups, unread=(*groups.unread, note))

        return groups

    # Networks

    def network(self, which: str = "last", site: str | None = None) -> nn.Module:
        """Return the trained network in evaluation mode; its input is the output of the bundle's transforms.

        Args:
            which: weights of the "last" or the "best" round.
            site: whose, for methods with a model per site.

        Raises:
            InputError: no such weights or site; the bundle has changed.
        """
        return self._networks(which, site)[site or ""]

    def predict(
        self,
        images: Images | None = None,
        *,
        section: str = "test",
        which: str = "last",
        site: str | None = None,
        out: str | Path | None = None,
        reference: str | Path | None = None,
    ) -> list[Record]:
        """Return a trained network's predictions for new images, or for the run's own items.

        New images go through the bundle's validation transforms. For classification a record has id, predicted and
        `p_<class>`; for findings and numbers as in `predictions`, without ground truth; for segmentation id and mask,
        class indices on the grid of the image file if known, else on the network's. The run's own items have site, and
        label or metrics.

        Args:
            images: a folder, a file, or a list of files or of arrays: pictures (H, W) or (H, W, 3) uint8, volumes
                (D1, D2, D3). None uses the run's items.
            section: of the run's items: train, validate or test.
            which: weights of the "last" or the "best" round.
            site: the site whose model predicts, and whose items are used if they are the run's own. None: the global
                model, or each site's model on its own items.
            out: new folder for the predictions of new images, as written by `medfl.runs.predict.predict`; the rows of
                its predictions.csv are returned.
            reference: folder or table for scoring new images, in `out`.

        Raises:
            InputError: no such image, section or site; an image that the bundle's transforms refuse.
        """
        if images is not None and out is not None:
            document = predict(
                self.path,
                images,
                out,
                reference=reference,
                which=which,
                site=site,
                device=str(self.device),
            )
            return list(document["predictions"])

        if images is not None:
            return self._predict_new(images, which, site)
        if section not in SECTIONS:
            raise InputError(
                f"section {section!r}", f"sections are {', '.join(SECTIONS)}", "choose one"
            )

        sites = self.run.partition.sites
        if site is not None and site not in sites:
            raise InputError(
                f"site {site!r}",
                f"the run's sites are {', '.join([*sites][:8])}",
                "name one of them",
            )

        if self.plan.method.judged == "global":
            ids = sites[site].get(section, ()) if site else None
            return self._judge(self.network(which), section, ids, which, None)

        rows = []
        for name, network in self._networks(which, site or "all").items():
            ids = sites[name].get(section, ())
            rows += self._judge(network, section, ids, which, name)

        return rows

    def judges(self, which: str = "last") -> dict[str, nn.Module]:
        """Return site -> the network that it is judged by, "" -> that of all sites, in evaluation mode."""
        return self._networks(which, None if self.plan.method.judged == "global" else "all")

    def examined(self, network: nn.Module, section: str, ids: Sequence[str] | None) -> Examined:
        """Return a network with some of the run's items of a section, None for all, for evaluation."""
        bundle = self.plan.bundle
        shard = _shard(self._prepared(section), ids)
        shard = site_labels.with_recorded_classes(
            shard, self._owners(section), self._files.summary, bundle
        )
        return Examined(bundle.evaluator, bundle.metadata, network, shard, self.device)

    def maps(
        self,
        images: Sequence[str] | Images,
        *,
        target: int | str | None = None,
        section: str = "test",
        which: str = "last",
        site: str | None = None,
        method: str = "gradcam++",
    ) -> list[ActivationMap]:
        """Return the evidence for a class in a classifier's images; `medfl.report.activation_maps.draw` draws it.

        Args:
            images: ids of the run's items, or new images as for `predict`.
            target: the class, by name or index; None uses the predicted one of each image.
            section: of the run's items.
            which: weights of the "last" or the "best" round.
            site: whose model.
            method: "gradcam++" or "gradcam".

        Raises:
            InputError: the run is not a classification, its network has no convolutions, or as for `predict`.
        """
        self._require_classification("activation maps")
        network = self.network(which, site)
        entries = [images] if isinstance(images, str | Path) else list(images)
        ids = [entry for entry in entries if isinstance(entry, str)]
        # arrays are not ids; a string is an id of the run's items, or else the path of a file
        if entries and len(ids) == len(entries) and self._owners(section).keys() >= set(ids):
            shard = _shard(self._prepared(section), ids)
        else:
            prepared = new_images.prepared(self._trained(which).bundle, images)
            shard = _shard(prepared, None)

        with tf32(self.run.tf32):
            return activation_maps.compute(
                network, shard, self.classes, self.device, target=target, method=method
            )

    # Parts

    def _trained(self, which: str) -> RunNetworks:
        if which not in ("last", "best"):
            raise InputError(
                f"which={which!r}", "the weights of the 'last' or of the 'best' round", "choose one"
            )
        if which not in self._opened:
            self._opened[which] = RunNetworks(self.path, which)
        return self._opened[which]

    def _networks(self, which: str, site: str | None) -> dict[str, nn.Module]:
        """Return site -> its network, "" -> the global one."""
        models = self._trained(which).models(site, None, str)
        return {model.site: model.network.to(self.device).eval() for model in models}

    def _prepared(self, section: str) -> Prepared:
        if section not in self._held:
            # kept: reading the images takes most of the time
            self._held[section] = self.plan.bundle.prepared(section)
        return self._held[section]

    def _owners(self, section: str) -> dict[str, str]:
        """Return id -> site for a section's items, "" if no site has it."""
        nobody = {str(item["id"]): "" for item in self.plan.bundle.items(section)}
        return nobody | self.run.partition.owners(section)

    def _predict_new(self, images: Images, which: str, site: str | None) -> list[Record]:
        network = self.network(which, site)
        trained = self._trained(which)
        bundle = trained.bundle
        bundle = bundle.replaced(evaluator=evaluator_of(trained, bundle, site))
        shard = _shard(new_images.prepared(bundle, images), None)

        with tf32(self.run.tf32):
            if self.task == "segmentation":
                return new_images.masks(bundle, network, shard, self.device)
            if self.task not in OF_VECTORS:
                self._require_classification("predictions of new images")

            rows = self._records(bundle.evaluator(network, shard, self.device), which, site)

        # what is true of new images is made up here, and so not shown
        shown = []
        for row in rows:
            shown.append({key: row[key] for key in row if not key.startswith(("label", "target_"))})

        return shown

    def _judge(
        self,
        network: nn.Module,
        section: str,
        ids: Sequence[str] | None,
        which: str,
        site: str | None,
    ) -> list[Record]:
        owner = self._owners(section)
        evaluator = evaluator_of(self._trained(which), self.plan.bundle, site)
        examined = dataclasses.replace(self.examined(network, section, ids), evaluator=evaluator)
        with tf32(self.run.tf32):
            rows = self._records(examined.cases(), which, site)
            if self.task == "segmentation" and not isinstance(examined.evaluator, ClassEvaluator):
                bundle = self.plan.bundle.replaced(evaluator=evaluator)
                masks = new_images.masks(bundle, network, examined.shard, self.device)
                for row, mask in zip(rows, masks, strict=True):
                    row["mask"] = mask["mask"]

        return [{"id": row["id"], "site": owner.get(row["id"], ""), **row} for row in rows]

    def _records(self, cases: Cases, which: str, site: str | None) -> list[Record]:
        kind = KINDS[self.task]
        if len(cases):
            cases = kind.decided_by(cases, thresholds_of(self._trained(which), site, str))

        rows = []
        values = cases.values
        for index, ident in enumerate(cases.ids):
            row: Record = {"id": ident}
            if cases.is_classification:
                probabilities = values["probabilities"][index].tolist()
                row["label"] = int(values["label"][index])
                row["predicted"] = probabilities.index(max(probabilities))
                for name, probability in zip(self.classes, probabilities, strict=True):
                    row[f"p_{name}"] = probability
            elif cases.reference is not None:
                cells = kind.row(cases, index, self.classes, "")
                row |= parse_row(map_values(str, cells))
            else:
                row |= {name: float(numbers[index]) for name, numbers in values.items()}

            rows.append(row)

        return rows

    def _needed(self, value: T | None, file: str) -> T:
        if value is None:
            raise InputError(
                f"the run in {self.path} has no {file}: {len(self._files.rounds)} of {self.run.rounds} rounds are done",
                "it is written when a run ends",
                f"let it finish: medfl run --resume --out {self.path}",
            )

        return value

    def _require_classification(self, what: str) -> None:
        if self.task != "classification":
            raise InputError(
                f"{what} of {self.run.bundle}, a {self.task} task",
                "classification",
                "use predict()",
            )


@check_arguments
def load_run(folder: str | Path, device: str = "cpu") -> Result:
    """Open a run folder, finished or not.

    Args:
        folder: written by `medfl run` or `medfl.run`.
        device: of the networks.

    Raises:
        InputError: the folder is not a run's.
    """
    return Result(folder, device)


def _shard(prepared: Prepared, ids: Sequence[str] | None) -> Shard:
    """Return these items of prepared data, None for all."""
    places = range(len(prepared))
    if ids is None:
        return Shard.of(prepared, places)

    place_of = dict(zip(prepared.ids(places), places, strict=True))
    if gone := not_among(ids, place_of):
        raise InputError(
            f"image {gone[0]!r:.60} of the run", "its data have none", "restore its run.json"
        )

    return Shard.of(prepared, [place_of[ident] for ident in ids])
