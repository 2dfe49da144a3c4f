"""metadata.json of a bundle that `medfl new` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medfl.core.release import DISTRIBUTION, version_of

if TYPE_CHECKING:
    from medfl.bundle.starter import Survey

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
RESEARCH_ONLY = "Research only: not for diagnosis or any other clinical use."


def metadata_of(name: str, seen: Survey, side: int, kind: str) -> dict[str, Any]:
    """Return the content of metadata.json."""
    segments = seen.kind != "labelled"
    shape = list(seen.patch) if seen.kind == "volumes" else [side, side]
    rgb = seen.channels == 3 and seen.kind != "volumes"
    colours = ["red", "green", "blue"] if rgb else [f"channel {index}" for index in range(seen.channels)]
    colours = ["grey value"] if seen.channels == 1 else colours
    numbered = {str(index): text for index, text in enumerate(colours)}
    image = {
        "type": "image", "format": "magnitude", "modality": "n/a", "num_channels": seen.channels,
        "spatial_shape": shape, "dtype": "float32", "value_range": [-10, 10], "is_patch_data": seen.kind == "volumes",
        "channel_def": numbered,
    }  # fmt: skip
    pred = {
        "type": "image" if segments else "probabilities", "format": "segmentation" if segments else "classes",
        "modality": "n/a", "num_channels": len(seen.classes), "spatial_shape": shape if segments else [],
        "dtype": "float32", "value_range": [0, 1], "is_patch_data": seen.kind == "volumes",
        "channel_def": {str(index): text for index, text in enumerate(seen.classes)},
    }  # fmt: skip
    versions = {package: version_of(package) for package in ("medfl", "monai", "torch", "numpy")}
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "written by medfl new"},
        "monai_version": versions["monai"],
        "pytorch_version": versions["torch"].partition("+")[0],
        "numpy_version": versions["numpy"],
        "required_packages_version": {DISTRIBUTION: versions["medfl"]},
        "supported_apps": {},
        "name": name,
        "task": f"{'Segmentation' if segments else 'Classification'}: {', '.join(seen.classes)}",
        "description": f"{kind.capitalize()} of one's own, at each site a folder of the same form.",
        "authors": "to be filled in",
        "copyright": "to be filled in",
        "data_source": "to be filled in",
        "data_type": "NIfTI" if seen.kind == "volumes" else "pictures",
        "intended_use": RESEARCH_ONLY,
        "references": [],
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
    }
