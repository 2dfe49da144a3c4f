"""TorchScript and ONNX files of a network, each compared with it on images.

Paths of the local machine are removed from both: TorchScript stores them in debugging records, ONNX in the nodes' stack
traces.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core.errors import InputError, RunError
from medfl.core.names import split_commas
from medfl.core.release import pip_install
from medfl.storage.writing import write_atomic

LIMITS = {"torchscript": 1e-5, "onnx": 1e-4}
"""Format -> maximum difference of a probability (in other tasks: of an output)."""
FILES = {"torchscript": "models/model.ts", "onnx": "models/model.onnx"}
_NEEDED = ("onnx", "onnxruntime", "onnxscript")


def parse_formats(text: str | None) -> tuple[str, ...] | None:
    """Parse a list of formats such as "torchscript,onnx"; InputError for others, or if their packages are missing."""
    if text is None:
        return None

    names = tuple(dict.fromkeys(filter(None, split_commas(text))))
    if names == ("none",):
        return ()

    for name in names:
        if name not in LIMITS:
            raise InputError(
                f"--formats {text}",
                f"a list of {', '.join(LIMITS)}, or none",
                "give for example onnx",
            )

    if "onnx" in names and (missing := missing_packages("onnx")):
        remaining = ",".join(name for name in names if name != "onnx") or "none"
        raise InputError(
            f"--formats onnx without {', '.join(missing)}",
            pip_install("export"),
            f"install it, or use --formats {remaining}",
        )

    return names


def missing_packages(kind: str) -> list[str]:
    """Return the packages that a format needs but that are not installed."""
    needed = _NEEDED if kind == "onnx" else ()
    return [name for name in needed if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class Agreement:
    """The largest differences between the outputs of a file and those of the network.

    Attributes:
        images: number compared.
        outputs: difference of the outputs (logits).
        probabilities: difference of the probabilities, or of the outputs in tasks without them.
        limit: maximum value of `probabilities`.
        how: how the file was made.
    """

    images: int
    outputs: float
    probabilities: float
    limit: float
    how: str


@dataclass(frozen=True)
class Comparison:
    """How two networks are compared.

    Attributes:
        images: batches (B, C, H, W[, D]).
        inferer: (images, network) -> outputs of whole images.
        activation: outputs -> probabilities.
    """

    images: Sequence[Tensor]
    inferer: Callable[..., Any]
    activation: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def agreement(
        self, network: nn.Module, candidate: Callable[[Tensor], Tensor], limit: float, how: str
    ) -> Agreement:
        """Compare on single images and, if these have the same size, on all in one batch."""
        batches: list[Tensor] = []
        for images in self.images:
            batches += torch.split(images, 1)

        count = len(batches)
        same_size = len({image.shape for image in batches}) == 1
        if same_size and count > 1:
            batches.append(torch.cat(batches))  # a file may be correct for single images only

        outputs = probabilities = torch.zeros(())

        for x in batches:
            expected = self.inferer(x, network).float()
            output = self.inferer(x, candidate).float()
            outputs = outputs.maximum((expected - output).abs().max())  # NaN stays
            probabilities = probabilities.maximum(
                (self.activation(expected) - self.activation(output)).abs().max()
            )

        return Agreement(count, float(outputs), float(probabilities), limit, how)


class ShapeRecorder(nn.Module):
    """A network that records its first input and the shapes of all inputs and outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.first: Tensor | None = None
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the network's output, and record the shapes."""
        output = self.network(x, *args, **kwargs)
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise RunError(
                f"the network gives a {kind}; only networks that give one tensor are exported"
            )

        if self.first is None:
            self.first = x.detach().clone()

        self.shapes.append((tuple(x.shape), tuple(output.shape)))
        return output

    def spatial(self, which: int) -> list[int | str]:
        """Return the spatial shape of inputs (0) or outputs (1), "*" along axes on which they differ."""
        shapes = [pair[which][2:] for pair in self.shapes]
        spatial = []
        for sizes in zip(*shapes, strict=True):
            spatial.append(sizes[0] if len(set(sizes)) == 1 else "*")

        return spatial


def write(
    kind: str,
    network: nn.Module,
    recorder: ShapeRecorder,
    path: Path,
    comparison: Comparison,
    instead: str = "leave it out with --formats",
) -> Agreement:
    """Write a network in a format and compare the file with it.

    Args:
        kind: "torchscript" or "onnx".
        network: on the CPU, in evaluation mode.
        recorder: inputs of the network in inference: an example, and the axes that vary.
        path: of the file.
        comparison: of the file with the network.
        instead: advice in the error.

    Raises:
        RunError: the file cannot be written, or differs by more than the limit.
    """
    try:
        with quiet(), torch.no_grad():
            how, candidate = _WRITERS[kind](network, recorder, path)
    except MemoryError:
        raise
    except Exception as error:  # torch raises dozens of types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RunError(f"the network cannot be written as {kind} ({reason}); {instead}") from error

    result = comparison.agreement(network, candidate, LIMITS[kind], how)
    if not result.probabilities <= result.limit:
        raise RunError(
            f"{path.name} differs from the network by {result.probabilities:.1e}, more than {result.limit:.0e}, on "
            f"{result.images} images; {instead}"
        )

    return result


# TorchScript


def _torchscript(
    network: nn.Module, recorder: ShapeRecorder, path: Path
) -> tuple[str, Callable[[Tensor], Tensor]]:
    assert recorder.first is not None
    try:
        module = torch.jit.script(network)
        how = "scripted"
    except Exception:  # TorchScript cannot script every network: trace it with an example
        module = torch.jit.trace(network, recorder.first)  # type: ignore[no-untyped-call]
        how = "traced"

    file = io.BytesIO()
    torch.jit.save(module, file)  # type: ignore[no-untyped-call]
    write_atomic(path, _without_debug_records(file.getvalue()))
    loaded = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    loaded.eval()

    return how, loaded


def _without_debug_records(archive: bytes) -> bytes:
    """Remove the records of source files on the local machine."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as new,
    ):
        for item in old.infolist():
            if not item.filename.endswith(".debug_pkl"):
                new.writestr(zipfile.ZipInfo(item.filename), old.read(item))
    return file.getvalue()


# ONNX


def _onnx(
    network: nn.Module, recorder: ShapeRecorder, path: Path
) -> tuple[str, Callable[[Tensor], Tensor]]:
    import onnx

    assert recorder.first is not None
    # a batch size of 1 would become a constant
    example = recorder.first.repeat(2, *[1] * (recorder.first.ndim - 1))[:2]
    axes = {0: "batch"}
    for axis, size in enumerate(recorder.spatial(0), 2):
        if size == "*":
            axes[axis] = torch.export.Dim.DYNAMIC

    program = torch.onnx.export(
        network, (example,), input_names=["image"], output_names=["pred"], dynamic_shapes=(axes,), dynamo=True,
        external_data=False, verbose=False,
    )  # fmt: skip
    assert program is not None
    model = program.model_proto

    for part in [model.graph, *model.functions]:
        for node in [*part.node, *part.value_info]:
            del node.metadata_props[:]
            node.doc_string = ""

    onnx.checker.check_model(model)
    write_atomic(path, model.SerializeToString(deterministic=True))
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return f"opset {opset}", OnnxNetwork(path)


class OnnxNetwork:
    """An ONNX file that can be called like a network; ONNX Runtime uses one CPU thread."""

    def __init__(self, path: Path) -> None:
        # it would keep an identifier of this machine in ~/.cache, and tell its maker of each use
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output for a batch."""
        (output,) = self._session.run(None, {"image": x.contiguous().numpy()})
        return torch.from_numpy(output)


_WRITERS = {"torchscript": _torchscript, "onnx": _onnx}


def format_difference(value: float) -> str:
    """Return a difference as text, such as "1.2e-07" or "0"."""
    return f"{value:.1e}" if value else "0"


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the messages and warnings of torch and MONAI."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
