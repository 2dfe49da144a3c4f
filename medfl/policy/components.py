"""What a configuration may create: classes of MONAI, PyTorch and ignite by their kind, and medfl's own for bundles.

A `_target_` is looked up in the namespace of one loaded module, never by walking attributes. The object found must be
defined in a module of such components; that object, not its name, is called later. This is a filter: the sandbox
(`medfl.safety`) limits what a component can then do.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from medfl.core import Refused, printable, words_of

_SYSTEM = re.compile(r"/+(etc|proc|sys|dev|root|boot|home|var)(/|$)")
_PARENT = re.compile(r"(^|[/\\])\.\.([/\\]|$)")


class ElsewhereRefused(Refused):
    """Access to a place that neither the bundle nor the user opens."""


def check_path(text: str, *, absolute: bool = False) -> None:
    """Check a string in a configuration that may be used as a path.

    With `absolute` it may begin with a slash, as in an expression; the zoo's usual data paths always may.

    Raises:
        Refused: it is a URL, leads upwards, to a home or to a system folder, or is absolute.
    """
    if "://" in text:
        raise Refused("a URL: nothing is fetched")
    if _PARENT.search(text):
        raise Refused("a path that leads upwards ('..')")
    if text.startswith("~") or text.startswith("\\\\") or re.match(r"[A-Za-z]:[\\/]", text):
        raise Refused("a path outside of bundle and data folder")
    if _SYSTEM.match(text):
        raise Refused("a path into a folder of the system")
    if text.startswith("/") and not absolute and not text.startswith("/workspace/"):
        raise Refused("an absolute path")


def check_place(path: str | Path, roots: Collection[Path]) -> None:
    """Check that a file or folder is one that the bundle or the user opens; links in it are followed.

    Raises:
        ElsewhereRefused: it is not below one of `roots`.
    """
    place = Path(os.path.abspath(path))
    if not any(part in roots for part in (place, *place.parents)):
        raise ElsewhereRefused(
            f"the path {printable(path)}, which is neither below the bundle nor below its data"
        )


def name_set(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(words_of(text))


_LOADED = words_of("""
    monai.handlers torch.nn.parallel torch.utils.data.distributed torch.amp torch.cuda.amp
    torchvision.models ignite.metrics ignite.handlers
""")
"""Modules that are loaded to find components; `import monai` loads its others."""
_CLASSES = tuple(
    name_set(
        "monai.apps.datasets. monai.apps.deepedit. monai.apps.deepgrow. monai.apps.detection. "
        "monai.apps.generation. monai.apps.nuclick. monai.apps.pathology. monai.apps.vista3d. "
        "monai.data. monai.engines. monai.handlers. monai.inferers. monai.losses. monai.metrics. "
        "monai.networks. monai.optimizers. monai.transforms. torch.nn. torch.optim. "
        "torch.utils.data. torch.amp. torch.cuda.amp. ignite.metrics. ignite.handlers."
    )
)
"""Modules that define permitted classes."""
_FUNCTIONS = (
    "monai.networks.nets.",
    "monai.apps.detection.networks.",
    "torchvision.models.",
    "ignite.metrics.",
)
"""Modules that define functions returning a network or a metric."""
_OTHERS = name_set(
    "torch.device medfl.datasets.CheckPatchd medfl.datasets.ReadPaird medfl.datasets.ReadPixelsd "
    "medfl.datasets.ReadVolumed medfl.datasets.WriteMaskd medfl.networks.build "
    "medfl.exported.network medfl.medsam.BoxOfMaskd medfl.medsam.load medfl.training.site.mean_loss"
)
_NEVER = re.compile(
    r"clearml|mlflow|perceptual|tcia|\.trt|gaussianmixture|lltm|transchex", re.IGNORECASE
)
"""Parts of the paths of components that contact a server, fetch weights or a network's code, or compile."""
_WRITERS = re.compile(
    r"Save|Write|Logfile|TensorBoard|ProbMapProducer|(CacheNTrans|GDS|LMDB|Persistent)Dataset"
)
"""Parts of the names of components that write files."""
READERS = name_set(
    "ITKReader NibabelReader NrrdReader NumpyReader PILReader PydicomReader WSIReader itkreader nibabelreader "
    "nrrdreader numpyreader pilreader pydicomreader wsireader cucim cuCIM openslide OpenSlide tifffile TiffFile "
    "ITKWriter NibabelWriter PILWriter itkwriter nibabelwriter pilwriter AvgMerger"
)
"""Permitted values of `reader`, `writer` and `merger_cls`: MONAI imports and calls any other value."""
_NAMED = ("reader", "writer", "merger_cls")
_SWITCHES = name_set(
    "download pretrained allow_pickle trust_remote_code pickle_module model_url pretrained_url "
    "pretrained_path"
)
"""Arguments that cause something to be fetched or unpickled."""
_LONGEST = 200  # characters of a target
_TARGET = re.compile(r"[A-Za-z]\w*(\.[a-z_]\w*)*(\.[A-Za-z]\w*)?", re.ASCII)
_REMOVED: dict[str, tuple[str, dict[str, object]]] = {
    "AddChannel": ("EnsureChannelFirst", {"channel_dim": "no_channel"}),
    "AsChannelFirst": ("EnsureChannelFirst", {"channel_dim": -1}),
    "SplitChannel": ("SplitDim", {"dim": 0}),
    "IgniteMetric": ("IgniteMetricHandler", {}),
    "medfl.datasets.WriteClasses": ("SaveClassification", {}),  # in exports of 0.7.0
}
"""Components that MONAI or medfl has removed: their replacement, and the arguments it needs."""


def component(target: str) -> Callable[..., Any]:
    """Return the class or function that a `_target_` names.

    Raises:
        Refused: it is not permitted; nothing was imported by this name to find out.
    """
    if len(target) <= _LONGEST and _TARGET.fullmatch(target) and "__" not in target:
        components = _components()  # which loads third-party modules
        if target in components:
            return components[target]  # type: ignore[no-any-return]
        module, _, name = target.rpartition(".")

        member = None
        if module in sys.modules:
            member = vars(sys.modules[module]).get(name)

        if _is_component(member):
            return member

    package = target.partition(".")[0]
    if package == "torchvision" and importlib.util.find_spec(package) is None:
        raise Refused(f"_target_ {printable(target)!r} of {package}, which is not installed")
    raise Refused(
        f"_target_ {printable(target)!r}, which is no component of MONAI, PyTorch, ignite or medfl"
    )


@cache
def _components() -> dict[str, Callable[..., object]]:
    """Return MONAI's components by their short names, the first of two as MONAI does, and medfl's by their paths."""
    for name in _LOADED:
        if importlib.util.find_spec(name.partition(".")[0]):  # torchvision is optional
            importlib.import_module(name)

    components: dict[str, Callable[..., object]] = {}
    for home, module in list(sys.modules.items()):
        # Its Affine is not a transform.
        if not home.startswith("monai.") or home == "monai.transforms.lazy.utils":
            continue
        for name, entry in vars(module).items():
            # where it is defined, not where it is imported
            if _is_component(entry) and entry.__module__ == home:
                components.setdefault(name, entry)

    for path in _OTHERS:
        home, _, name = path.rpartition(".")
        components[path] = getattr(importlib.import_module(home), name)

    return components


def _is_component(member: Any) -> TypeGuard[Callable[..., Any]]:
    if not inspect.isclass(member) and not inspect.isfunction(member):
        return False
    path = f"{member.__module__}.{member.__name__}"
    kinds = _CLASSES if inspect.isclass(member) else _FUNCTIONS
    return path.startswith(kinds) and not _NEVER.search(path)


def is_never_made(member: Callable[..., Any]) -> bool:
    """Tell whether a component writes files, or is a handler of trainer events: these load, save and set others."""
    from ignite.metrics import Metric

    if _WRITERS.search(member.__name__):
        return True
    is_metric = inspect.isclass(member) and issubclass(member, Metric)
    return member.__module__.startswith(("monai.handlers.", "ignite.handlers.")) and not is_metric


def check_arguments(factory: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    """Check the arguments of a component; a string that begins with `$`, `@` or `%` is not known yet.

    Raises:
        Refused: something would be fetched, unpickled, or called by its name.
    """
    for name, value in arguments.items():
        check_argument(name, value)

    fetches = "torchvision" in factory.__module__ and arguments.get("weights")
    if factory.__module__.startswith("monai.networks.") and "pretrained" not in arguments:
        pretrained = inspect.signature(factory).parameters.get("pretrained")
        fetches = fetches or (pretrained is not None and pretrained.default is not False)
    if fetches:
        raise Refused(
            f"{factory.__name__}, which would fetch weights: say 'pretrained: false', no 'weights'"
        )


def check_argument(name: str, value: object) -> None:
    """Check an argument with a special meaning for any component.

    Raises:
        Refused: this value is not permitted.
    """
    if isinstance(value, str) and value[:1] in ("$", "@", "%"):
        return
    if name in _NAMED and not all(
        map(_is_reader, value if isinstance(value, list | tuple) else [value])
    ):
        raise Refused(
            f"argument {name!r} names what is imported and called: only readers and writers of MONAI can be"
        )
    if (name in _SWITCHES and value) or (name == "weights_only" and value is not True):
        raise Refused(f"argument {name!r}, by which something is fetched or unpickled")


def _is_reader(value: object) -> bool:
    from monai.data import ImageReader, ImageWriter

    if value is None or isinstance(value, str):
        return value is None or value in READERS
    return isinstance(value, ImageReader | ImageWriter)


def replace_removed(node: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Replace a component that MONAI has removed by its present equivalent; return any other unchanged."""
    match = re.fullmatch(
        rf"(?:monai\.[\w.]*)?({'|'.join(_REMOVED)})(d|D|Dict)?", str(node.get("_target_")), re.ASCII
    )
    if match is None:
        return node
    new, arguments = _REMOVED[match[1]]
    renamed = {}
    for key, value in node.items():
        name = "dim" if (new, key) == ("SplitDim", "channel_dim") else key
        renamed[name] = value
    return {**arguments, **renamed, "_target_": new + (match[2] or "")}
