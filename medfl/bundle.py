"""Bundle: a MONAI bundle, ours or anybody's, read as networks, data, loss and optimiser.

Everything is reached from the bundle's trainer (`train#trainer` or flat `trainer`) by following references, so both of the zoo's
styles work unmodified. The lists `run` and `initialize`, where bundles keep side effects, are never executed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from monai.bundle import ConfigComponent, ConfigParser
from monai.engines.utils import default_prepare_batch
from monai.inferers import SimpleInferer
from monai.utils import optional_import
from torch import nn

from medfl.errors import InputError
from medfl.evaluation import CaseEvaluator, ClassEvaluator, Evaluator
from medfl.prepared import Item, Prepared
from medfl.preparing import prepare

SECTIONS = ("train", "validate", "test")
_PARAMETERS = re.compile(r"\$@[\w:#]+\.parameters\(\)")
_DROPPED = ("SaveImage", "Invert")
"""Postprocessing that writes files or needs the original grid: a score does not need it."""


def shipped_root() -> Path | None:
    """Return the folder of the shipped bundles: beside the package in a checkout, under the prefix when installed."""
    for folder in (Path(__file__).resolve().parents[1] / "bundles", Path(sys.prefix) / "share" / "medfl" / "bundles"):
        if folder.is_dir():
            return folder
    return None


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped bundles."""
    root = shipped_root()
    return tuple(sorted(p.parents[1].name for p in root.glob("*/configs/metadata.json"))) if root else ()


class Bundle:
    """A MONAI bundle with a supervised trainer.

    Args:
        name_or_path: a shipped bundle's name, or the folder of any MONAI bundle.
        config: ids of the bundle's own configuration to override, as in `monai.bundle run` (`{"image_size": 28}`).
        device: where its networks live.

    Raises:
        InputError: no such bundle, an id that does not exist, or a configuration without what federated training needs; names the
            id and the file.
    """

    def __init__(
        self, name_or_path: str, config: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """Read and parse the configuration; nothing in it is instantiated yet."""
        self.root = _find(name_or_path)
        self.name = self.root.name
        self.is_shipped = self.root.parent == shipped_root()
        self.device = torch.device(device)
        self.train_file = _config_file(self.root, "train")
        evaluate = _config_file(self.root, "evaluate", required=False)
        self._raw = _read(self.train_file)
        self._overrides = dict(config or {})
        self._parser = self._parse(self._raw)
        self._evaluate_raw = _read(evaluate) if evaluate else {}
        self._trainer = self._find_trainer()

    # Configuration

    def _parse(self, raw: Mapping[str, Any]) -> ConfigParser:
        parser = ConfigParser(copy.deepcopy(dict(raw)))
        meta = self.root / "configs" / "metadata.json"
        if meta.is_file():
            parser.read_meta(str(meta))
        fixed = {"bundle_root": str(self.root), "device": f"$torch.device('{self.device}')"}
        for key, value in {**{k: v for k, v in fixed.items() if k in raw}, **self._overrides}.items():
            if key.replace("::", "#") not in parser:
                raise InputError(
                    f"configuration id {key!r} of bundle {self.name!r}",
                    f"{self.train_file.name} has {', '.join(k for k in raw if k != '_meta_')}",
                    "override one of these ids",
                )
            parser[key] = value
        parser.config.setdefault("imports", []).append("$import torch")
        parser.parse()
        return parser

    def get(self, key: str) -> Any:
        """Return the parsed content of a configuration id.

        Raises:
            InputError: the id is missing, or the bundle's own expression fails; names both.
        """
        return _content(self._parser, key, self.train_file)

    def raw(self, key: str, parser: ConfigParser | None = None) -> tuple[str, Any]:
        """Follow plain references (`@other#id`) from an id; return the final id and its unparsed content (None if absent)."""
        parser = parser or self._parser
        key = key.replace("::", "#")
        seen: set[str] = set()
        while key in parser and key not in seen:
            seen.add(key)
            node = parser.get(key)
            if isinstance(node, str) and node.startswith("@"):
                key = node[1:].replace("::", "#")
                continue
            return key, node
        return key, None

    def _find_trainer(self) -> str:
        for key in ("train#trainer", "trainer"):
            found, node = self.raw(key)
            if isinstance(node, Mapping):
                needed = [k for k in ("loss_function", "optimizer", "train_data_loader") if k not in node]
                if needed:
                    raise InputError(
                        f"bundle {self.name!r}: {self.train_file} has no id '{found}#{needed[0]}'",
                        "federated training needs a supervised trainer with loss_function, optimizer and train_data_loader",
                        "add it, or use a bundle with a SupervisedTrainer",
                    )
                return found
        raise InputError(
            f"bundle {self.name!r}: {self.train_file} has no id 'train#trainer' (nor a flat 'trainer')",
            "federated training needs a supervised trainer",
            f"its ids are {', '.join(k for k in self._raw if k != '_meta_')}",
        )

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """The content of metadata.json, empty if there is none."""
        path = self.root / "configs" / "metadata.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    @cached_property
    def protocol(self) -> Mapping[str, Any]:
        """The content of federated.yaml, the defaults of a run; empty if there is none."""
        path = _config_file(self.root, "federated", required=False)
        return dict(_read(path)) if path else {}

    @cached_property
    def sha256(self) -> str:
        """Hash of the configuration files, without overrides."""
        digest = hashlib.sha256()
        for path in sorted((self.root / "configs").glob("*")):
            if path.suffix in (".json", ".yaml", ".yml"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()

    # Network, loss, optimiser

    def network(self) -> nn.Module:
        """Build the network anew; two calls share nothing."""
        parser = self._parse(self._raw)
        key = "network_def" if "network_def" in parser else f"{self._trainer}#network"
        network = _content(parser, key, self.train_file)
        if not isinstance(network, nn.Module):
            raise InputError(
                f"bundle {self.name!r}: id {key!r} is a {type(network).__name__}", "it is a torch module", "correct the configuration"
            )
        return network

    @cached_property
    def loss(self) -> Callable[..., torch.Tensor]:
        """The trainer's loss function."""
        loss: Callable[..., torch.Tensor] = self.get(f"{self._trainer}#loss_function")
        return loss

    def optimizer(self, network: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        """Build the trainer's optimiser for a network, with another learning rate if one is given."""
        made = self._optimizer_factory(network)
        if lr is not None:
            for group in made.param_groups:
                group["lr"] = lr
        return made

    @cached_property
    def _optimizer_factory(self) -> Callable[[nn.Module], torch.optim.Optimizer]:
        key, node = self.raw(f"{self._trainer}#optimizer")
        params = node.get("params") if isinstance(node, Mapping) else None
        if isinstance(params, str) and _PARAMETERS.fullmatch(params) and "_target_" in node:
            target = ConfigComponent(config=dict(node)).resolve_module_name()
            cls, found = optional_import(*str(target).rsplit(".", 1)[:1], name=str(target).rsplit(".", 1)[1])
            if found:
                options = {k: self.get(f"{key}#{k}") for k in node if not k.startswith("_") and k != "params"}
                return lambda net: cls([p for p in net.parameters() if p.requires_grad], **options)

        def general(network: nn.Module) -> torch.optim.Optimizer:
            """Parameter groups and the like: let the bundle's own expression see this network."""
            parser = self._parse(self._raw)
            for name in ("network_def", self.raw(f"{self._trainer}#network")[0]):
                parser.ref_resolver.resolved_content[name.replace("#", "::")] = network
            made: torch.optim.Optimizer = _content(parser, key, self.train_file)
            return made

        return general

    @cached_property
    def batch_size(self) -> int:
        """The training data loader's batch size."""
        key, node = self.raw(f"{self._trainer}#train_data_loader")
        return int(self.get(f"{key}#batch_size")) if isinstance(node, Mapping) and "batch_size" in node else 1

    # Data

    def _dataset(self, section: str) -> tuple[ConfigParser, str, Any]:
        """Return the parser, the id and the raw node of a section's data set."""
        if section == "train":
            loader, _ = self.raw(f"{self._trainer}#train_data_loader")
            return self._parser, *self.raw(f"{loader}#dataset")
        parser = self._parser
        if section == "test" and self._evaluate_raw:
            parser = self._merged_parser
        for key in ("validate#evaluator", "evaluator"):
            found, node = self.raw(key, parser)
            if isinstance(node, Mapping) and "val_data_loader" in node:
                loader, _ = self.raw(f"{found}#val_data_loader", parser)
                return parser, *self.raw(f"{loader}#dataset", parser)
        for key in ("validate#dataset", "val_dataset"):
            found, node = self.raw(key, parser)
            if node is not None:
                return parser, found, node
        raise InputError(
            f"bundle {self.name!r}: {self.train_file} has no id 'validate#dataset' (nor an evaluator's val_data_loader)",
            "a bundle to be federated has validation data",
            "add a validate section",
        )

    @cached_property
    def _merged_parser(self) -> ConfigParser:
        parser = ConfigParser(copy.deepcopy(dict(self._raw)))
        for key, value in self._evaluate_raw.items():
            parser[key.replace("::", "#")] = value  # as MONAI merges ['train.json', 'evaluate.json']
        return self._parse(parser.config)

    @property
    def has_test(self) -> bool:
        """Tell whether evaluate.* names data of its own; without it the validation items serve as test items, and that is said."""
        if not self._evaluate_raw:
            return False
        parsers = [self._dataset(section) for section in ("validate", "test")]
        validate, test = (parser.get(f"{key}#data") if isinstance(node, Mapping) else node for parser, key, node in parsers)
        return bool(validate != test) or self.raw(f"{parsers[0][1]}#data") != self.raw(f"{parsers[1][1]}#data", parsers[1][0])

    def data(self, section: str) -> Sequence[Any]:
        """Return the section's data list as the bundle's expressions give it, or its data set where that is no list with a transform."""
        return self._listed(section)[0]

    def _listed(self, section: str) -> tuple[Sequence[Any], Any | None]:
        cached: dict[str, tuple[Sequence[Any], Any | None]] = self.__dict__.setdefault("_lists", {})
        if section not in cached:
            parser, key, node = self._dataset(section)
            if isinstance(node, Mapping) and "data" in node:
                transform = _content(parser, f"{key}#transform", self.train_file) if node.get("transform") is not None else None
                cached[section] = _content(parser, f"{key}#data", self.train_file), transform
            else:
                cached[section] = _content(parser, key, self.train_file), None
            if len(cached[section][0]) == 0:
                raise InputError(
                    f"bundle {self.name!r}: the data list '{key}#data' of section {section!r} is empty",
                    "each section has at least one item",
                    "check dataset_dir (--data) against the bundle's README",
                )
        return cached[section]

    def items(self, section: str) -> list[Item]:
        """Return one record per item: id, label (where it is a class index), centre and group (where the data list names them)."""
        records: list[Item] = []
        taken: set[str] = set()
        data = self.data(section)
        for index in range(len(data)):
            entry = data[index] if isinstance(data, list | tuple) and isinstance(data[index], Mapping) else {}
            ident = _identity(entry, index)
            ident = f"{ident}#{index}" if ident in taken else ident
            taken.add(ident)
            label = entry.get("label")
            record: dict[str, Any] = {"id": ident}
            if isinstance(label, int) or (hasattr(label, "dtype") and getattr(label, "ndim", 1) == 0):
                record["label"] = int(label)
            for field, names in (("centre", ("centre", "center", "site")), ("group", ("group", "patient", "subject", "lesion"))):
                value = next((entry[name] for name in names if name in entry), None)
                if value is not None:
                    record[field] = str(value)
            records.append(record)
        return records

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Prepared:
        """Run the section's deterministic transforms once and return its items ready to be batched."""
        data, transform = self._listed(section)
        _, node = self.raw(f"{self._trainer}#prepare_batch")
        unpack = default_prepare_batch if node is None else self.get(f"{self._trainer}#prepare_batch")
        return prepare(
            self.items(section), data, transform, unpack, label=f"preparing {section} images", jobs=jobs, progress=progress
        )

    # Task and evaluation

    @cached_property
    def task(self) -> str:
        """classification, segmentation or other."""
        if "task" in self.protocol:
            return str(self.protocol["task"])
        if all("label" in record for record in self.items("train")):
            return "classification"
        target = next(iter(self.prepared_sample))[1]
        return "segmentation" if isinstance(target, torch.Tensor) and target.ndim >= 4 else "other"

    @property
    def prepared_sample(self) -> Sequence[tuple[Any, Any]]:
        """One training batch of one item, for looking at shapes."""
        data, transform = self._listed("train")
        _, node = self.raw(f"{self._trainer}#prepare_batch")
        unpack = default_prepare_batch if node is None else self.get(f"{self._trainer}#prepare_batch")
        first = prepare(self.items("train")[:1], [data[0]], transform, unpack)
        return [next(first.batches(torch.tensor([0]), 1, None))]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names in label order (metadata's channel_def), () for other tasks."""
        if self.task != "classification":
            return ()
        channels = self.metadata.get("network_data_format", {}).get("outputs", {}).get("pred", {}).get("channel_def", {})
        labels = [record["label"] for section in SECTIONS for record in self.items(section)]
        named = [str(channels[key]) for key in sorted(channels, key=int)] if channels else []
        if named and (self.is_shipped or max(labels) < len(named)):
            return tuple(named)
        return tuple(f"class {index}" for index in range(max(labels) + 1))

    @cached_property
    def key_metric(self) -> str:
        """Name of the validation metric that selects the best round."""
        if self.task == "classification":
            return str(self.protocol.get("key_metric", "balanced_accuracy"))
        return self._foreign_metric()[0]

    @cached_property
    def evaluator(self) -> Evaluator:
        """How this bundle's networks are scored."""
        if self.task == "classification":
            return ClassEvaluator()
        name, metric = self._foreign_metric()
        evaluator, node = self._evaluator_node()
        inferer = self.get(f"{evaluator}#inferer") if node.get("inferer") is not None else SimpleInferer()
        post = self.get(f"{evaluator}#postprocessing") if node.get("postprocessing") is not None else None
        return CaseEvaluator(inferer, _scoring_part(post), metric, name)

    def _evaluator_node(self) -> tuple[str, Mapping[str, Any]]:
        for key in ("validate#evaluator", "evaluator"):
            found, node = self.raw(key)
            if isinstance(node, Mapping):
                return found, node
        raise InputError(
            f"bundle {self.name!r}: {self.train_file} has no id 'validate#evaluator' (nor a flat 'evaluator')",
            "a bundle to be federated says how it is validated",
            "add an evaluator with its key_val_metric",
        )

    def _foreign_metric(self) -> tuple[str, Any]:
        evaluator, _ = self._evaluator_node()
        key, node = self.raw(f"{evaluator}#key_val_metric")
        if not isinstance(node, Mapping) or not node:
            raise InputError(
                f"bundle {self.name!r}: {self.train_file} has no id '{evaluator}#key_val_metric'",
                "the key metric selects the best round",
                "add it to the evaluator",
            )
        name = next(iter(node))
        target = str(node[name].get("_target_", "")) if isinstance(node[name], Mapping) else ""
        return ("dice" if target.endswith("MeanDice") else name), self.get(f"{key}#{name}")


def _find(name_or_path: str) -> Path:
    root = shipped_root()
    if root and name_or_path in shipped():
        return root / name_or_path
    path = Path(name_or_path).expanduser().resolve()
    if (path / "configs").is_dir():
        return path
    raise InputError(
        f"bundle {name_or_path!r}",
        f"shipped bundles are {', '.join(shipped()) or 'none'}; a path is a folder with configs/train.json or .yaml",
        "see medfl bundles",
    )


def _config_file(root: Path, stem: str, required: bool = True) -> Path:
    for suffix in (".json", ".yaml", ".yml"):
        path = root / "configs" / f"{stem}{suffix}"
        if path.is_file():
            return path
    if required:
        raise InputError(
            f"bundle folder {root} has no configs/{stem}.json (or .yaml)", "a MONAI bundle has a training configuration", "give its folder"
        )
    return Path()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text()) if path.suffix != ".json" else json.loads(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}", "it is valid JSON or YAML", "correct the file") from error
    return dict(content or {})


def _content(parser: ConfigParser, key: str, file: Path) -> Any:
    try:
        return parser.get_parsed_content(key)
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{file} has no id {key!r} ({error})", "the bundle's trainer refers to it", "add it") from error
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        if isinstance(cause, InputError):
            raise cause from error
        raise InputError(
            f"{file}: id {key!r} fails with {type(cause).__name__}: {cause}", "its expression can be evaluated", "correct it, or --data"
        ) from error


def _identity(entry: Mapping[str, Any], index: int) -> str:
    if "id" in entry:
        return str(entry["id"])
    image = entry.get("image")
    first = image[0] if isinstance(image, list | tuple) and image else image
    if isinstance(first, str | Path):
        path = Path(first)
        return f"{path.parent.name}/{path.name}"
    return str(index)


def _scoring_part(post: Any) -> Callable[[Any], Any] | None:
    """Leave out postprocessing that writes or inverts."""
    if post is None or not hasattr(post, "transforms"):
        return post  # type: ignore[no-any-return]
    kept = [t for t in post.transforms if not type(t).__name__.startswith(_DROPPED)]
    return type(post)(kept)  # type: ignore[no-any-return]
