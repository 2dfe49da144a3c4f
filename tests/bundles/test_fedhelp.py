"""The rows of FedHelp's tables in the bundles' protocols: sites, networks, public data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from medfl import datasets, networks
from medfl.bundle.bundle import Bundle
from medfl.bundle.protocol import options_for, resolved
from medfl.data.partition.rules import Partition, assign, parse
from medfl.datasets.readers.splitting import Record

# Card of FedHelp, section 4: images for training and validation / to test of its sites, the large ones first.
CARD = {
    ("pneumonia", "paper"): ((3134, 374), (1048, 124), (422, 49), (317, 37), (213, 24), (109, 12)),
    ("lung_cxr", "paper"): ((285, 31), (285, 31), (65, 7)),
}
# FedHelp's columns C1, C2, ... as sites, and how many of them are large.
COLUMNS = {
    ("isic19", ""): ("BCN vidir_molemax vidir_modern MSK vienna_dias rosendahl", 3),
    ("isic19", "flamby"): ("BCN vidir_molemax vidir_modern MSK vienna_dias rosendahl", 3),
    ("isic19", "paper"): ("BCN vidir_molemax vidir_modern MSK vienna_dias rosendahl", 3),
    ("pneumonia", "paper"): ("site-1 site-2 site-3 site-4 site-5 site-6", 2),
    ("lung_cxr", "paper"): ("site-1 site-2 site-3", 2),
    ("ixi_brain", ""): ("Guys HH IOP", 2),
}
NETWORKS = {
    "isic19": ("resnet20", "resnet110"),
    "pneumonia": ("resnet20", "resnet110"),
    "lung_cxr": ("unet16", "unet64"),
    "ixi_brain": ("unet8", "unet32"),
}
# FLamby's folds: images of each centre for training, of which a tenth become validation, and to test.
FOLDS = {
    "isic19": {
        **{"BCN": (9930, 2483), "vidir_molemax": (3163, 791), "vidir_modern": (2691, 672)},
        **{"rosendahl": (1807, 452), "MSK": (655, 164), "vienna_dias": (351, 88)},
    },
    "ixi_brain": {"Guys": (249, 62), "HH": (145, 36), "IOP": (59, 15)},
}
rows = pytest.mark.parametrize(("name", "preset"), COLUMNS)


def protocol(name: str, preset: str) -> dict[str, Any]:
    return resolved(name, Bundle(name).protocol, [preset] if preset else [])


def published(name: str) -> dict[str, list[dict[str, Any]]]:
    """Items of FLamby's table of a data set, without images: the sections that its rule makes of the folds."""
    classes = len(datasets.get(name).classes) if name == "isic19" else 1
    records = [
        Record(
            "",
            i % classes,
            f"{centre}-{fold}-{i:05d}",
            centre,
            f"{centre}-{fold}-{i:05d}",
            {"flamby": fold},
        )
        for centre, folds in FOLDS[name].items()
        for fold, number in zip(("train", "test"), folds, strict=True)
        for i in range(number)
    ]
    made: dict[str, list[dict[str, Any]]] = {"train": [], "validate": [], "test": []}
    for record, section in zip(records, datasets.get(name).rules["flamby"](records), strict=True):
        made[section].append({"id": record.id, "label": record.label, "centre": record.centre})
    return made


def counted(name: str) -> dict[str, list[dict[str, Any]]]:
    """Items of one class that are enough for the card's counts."""
    train, test = map(
        sum, zip(*next(counts for (known, _), counts in CARD.items() if known == name), strict=True)
    )
    return {
        part: [{"id": f"{part}{i}"} for i in range(n)]
        for part, n in (("train", train), ("test", test))
    }


def sites(name: str, preset: str) -> Partition:
    found = protocol(name, preset)
    items = published(name) if name in FOLDS else counted(name)
    return assign(found["partition"], items, sites=found["sites"], classes=None, seed=0)


def sizes(partition: Partition) -> dict[str, tuple[int, int]]:
    return {
        site: (len(h["train"]) + len(h["validate"]), len(h["test"]))
        for site, h in partition.sites.items()
    }


@rows
def test_the_large_sites_are_sites_and_their_networks_stand_at_their_places(
    name: str, preset: str
) -> None:
    columns, large = COLUMNS[name, preset]
    found, order = protocol(name, preset), list(sites(name, preset).sites)
    small_network, large_network = NETWORKS[name]
    assert sorted(order) == sorted(columns.split())
    assert Bundle(name, found["config"]).get("network_name") == small_network
    assert {small_network, large_network} <= set(networks.names())
    fedhelp = options_for(found, "fedhelp")
    assert set(fedhelp["large"].split(",")) == set(columns.split()[:large])
    assert fedhelp["large_network"] == large_network
    for method in ("fedmd", "fedkemf", "fccl", "fedgh"):
        bodies = options_for(found, method)["bodies"].split(",")
        expected = {
            site: large_network if site in columns.split()[:large] else small_network
            for site in order
        }
        assert dict(zip(order, bodies, strict=True)) == expected


@rows
def test_public_data_and_teachers_are_those_of_the_task(name: str, preset: str) -> None:
    found = protocol(name, preset)
    segments = found["task"] == "segmentation"
    assert options_for(found, "fedhelp")["teachers"] == (
        "medsam" if segments else "clip-vit-l14,clip-rn50x16"
    )
    for method in ("fedhelp", "fedmd", "fedkemf", "fccl"):
        public = options_for(found, method)["public"]
        assert public == ("skin_lesion" if segments else "cifar100")
        assert Bundle(public).protocol["task"] == found["task"]
    assert "public" not in options_for(found, "fedgh")


@pytest.mark.parametrize(("name", "preset"), CARD)
def test_drawn_sites_have_the_counts_of_the_card(name: str, preset: str) -> None:
    partition = sites(name, preset)
    assert tuple(sizes(partition).values()) == CARD[name, preset]
    assert partition.notes == ()


def test_the_last_site_of_isic19_is_a_tenth_of_rosendahl() -> None:
    assert sizes(sites("isic19", "flamby")) == sizes(sites("isic19", "")) == FOLDS["isic19"]
    assert sizes(sites("isic19", "paper")) == {**FOLDS["isic19"], "rosendahl": (180, 45)}
    assert list(sites("isic19", "paper").sites)[-1] == "rosendahl"


def test_the_hospitals_of_ixi_have_the_counts_of_the_card() -> None:
    assert sizes(sites("ixi_brain", "")) == FOLDS["ixi_brain"]


def test_the_settings_are_those_of_the_card() -> None:
    """Card, section 4: 100 rounds of 5 epochs, Adam 1e-3 with decay 1e-4; 200, 256 and 48 x 60 x 48 pixels."""
    for name, preset in COLUMNS:
        found = protocol(name, preset)
        assert (found["rounds"], found["local_epochs"], found["lr"], found["cohort"]) == (
            100,
            5,
            0.001,
            1.0,
        )
        bundle = Bundle(name, found["config"])
        assert bundle.optimizer(bundle.network()).defaults["weight_decay"] == 1e-4
        assert bundle.get("in_channels") == {"lung_cxr": 3, "ixi_brain": 1, "pneumonia": 1}.get(
            name, 3
        )
        size = {"lung_cxr": 256, "ixi_brain": [48, 60, 48]}.get(name, 200)
        assert bundle.get("image_size") == size


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cifar100", {"section": "test", "items": 0}),
        ("skin_lesion", {"section": "train", "split": "whole", "items": 0}),
        ("nct_crc", {"section": "test", "items": 10000}),
    ],
)
def test_public_bundles_say_which_images_serve(name: str, said: dict) -> None:
    assert Bundle(name).protocol["public"] == said


def test_the_public_section_of_nct_crc_has_ten_thousand_with_balanced_classes() -> None:
    """Of a table with the published numbers, the test section has at least ceil(10,000 / 9) = 1112 of each class."""
    numbers = (10407, 10566, 11512, 11557, 8896, 13536, 8763, 10446, 14317)
    data = datasets.get("nct_crc")
    records = [
        Record(
            "",
            label,
            f"{kind}/{kind}-{i:05d}.tif",
            "unknown",
            f"{kind}/{kind}-{i:05d}.tif",
            {"official": "train"},
        )
        for label, (kind, number) in enumerate(zip(data.classes, numbers, strict=True))
        for i in range(number)
    ]
    assert len(records) == 100_000
    found = protocol("nct_crc", "")
    sections = data.rules[found["split"]](records)
    held = Counter(
        record.label for record, section in zip(records, sections, strict=True) if section == "test"
    )
    assert min(held.values()) >= 1112
    assert held.total() == pytest.approx(20_000, abs=9)


def test_the_presets_of_nct_crc_are_splits_and_partitions_that_exist() -> None:
    found = protocol("nct_crc", "official")
    assert found["split"] in datasets.get("nct_crc").splits
    assert parse(found["partition"])[0] == "dirichlet"
    assert Bundle("nct_crc").text.concepts == datasets.get("nct_crc").concepts
