"""Sites with given numbers of images, and centres that are cut to such numbers."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from medfl.core.errors import InputError
from medfl.data.partition.draw import Count, Group, Limit, apportion, deal
from medfl.data.partition.rules import OWN_SITES, Partition, assign, parse
from medfl.datasets.readers.splitting import Record, by_group

# Card of FedHelp, section 4: training and test images of each site.
PNEUMONIA = ((3134, 374), (1048, 124), (422, 49), (317, 37), (213, 24), (109, 12))
LUNGS = ((285, 31), (285, 31), (65, 7))
# Card of FedHelp, section 4: images of each class of the public set of radiographs, and of the two sets of lungs.
NORMAL, PNEUMONIC = 1583, 4273
MONTGOMERY, SHENZHEN = 138, 566
# Images of each centre and class of Fed-ISIC2019's rosendahl, and FLamby's test images of all of them.
ROSENDAHL, TESTED = (342, 803, 296, 109, 490, 30, 3, 186), 452


def spec_of(counts):
    return "counts:" + ",".join(f"{train}/{test}" for train, test in counts)


def table(counts, *, per_group=1, tag="", **extra):
    """Items of section -> images of each class."""
    made = {}
    for name, classes in counts.items():
        made[name] = [
            {
                "id": f"{tag}{name}-{c}-{i:05d}",
                "label": c,
                "group": f"{tag}{name}-{c}-{i // per_group}",
                **extra,
            }
            for c, number in enumerate(classes)
            for i in range(number)
        ]
    return made


def sizes(partition):
    """Site -> (training and validation images, test images)."""
    return {
        site: (len(held["train"]) + len(held["validate"]), len(held["test"]))
        for site, held in partition.sites.items()
    }


def homes(partition, sections):
    return {
        i: site
        for site, held in partition.to_ids(sections).items()
        for ids in held.values()
        for i in ids
    }


def shuffled(sections):
    rng = np.random.default_rng(0)
    return {name: [part[i] for i in rng.permutation(len(part))] for name, part in sections.items()}


def assigned(spec, sections, *, sites=None, classes=None, seed=0):
    return assign(spec, sections, sites=sites, classes=classes, seed=seed)


def fails(spec, sections, *texts, sites=None):
    with pytest.raises(InputError) as caught:
        assigned(spec, sections, sites=sites)
    line = str(caught.value)
    assert "\n" not in line
    for text in texts:
        assert text in line


SMALL = table({"train": (90, 180), "validate": (10, 20), "test": (20, 40)})
"""270 to train, 30 to validate, 60 to test; a third of each are of class 0."""


# The rule by hand


def test_images_are_dealt_by_hand():
    """Two owners want 3 and 1 of 6, 2 stay over; class 0 has 4, class 1 has 2.

    After 1 image the parts are .5 .17 .33: owner 0. After 2: 1, .33, .67 less (1 0 0): nobody (.67). After 3: 1.5, .5,
    1 less (1 0 1): owner 0 and 1 have .5, the first gets it. After 4: 2, .67, 1.33 less (2 0 1): owner 1. After 5: 2.5,
    .83, 1.67 less (2 1 1): nobody (.67). The last, at 3, 1, 2 less (2 1 2), is owner 0's.
    """
    groups = [Group(f"g{i}", (i,), int(i > 3)) for i in range(6)]
    placed: dict[str, int] = {}
    deal(groups, [3, 1], lambda label: np.random.default_rng(label), placed)
    expected = [0, 2, 0, 1, 2, 0]
    order = [int(i) for i in np.random.default_rng(0).permutation(4)]
    order += [4 + int(i) for i in np.random.default_rng(1).permutation(2)]
    assert [placed[f"g{i}"] for i in order] == expected


def test_images_placed_before_count():
    """Two owners want 2 each of 4: owner 0 has two of them already, so both others are owner 1's."""
    groups = [Group(f"g{i}", (i,), 0) for i in range(4)]
    placed = {"g0": 0, "g1": 0}
    deal(groups, [2, 2], np.random.default_rng, placed)
    assert placed == {"g0": 0, "g1": 0, "g2": 1, "g3": 1}


def test_apportioning_by_hand():
    """7 in parts 5 : 3 : 2: 3.5, 2.1, 1.4, rounded down 3 2 1, the one left goes to the largest remainder, .5."""
    assert apportion([5, 3, 2], 7) == [4, 2, 1]
    assert apportion([5, 3, 2], 10) == [5, 3, 2]
    assert apportion([98, 1, 1], 10) == [10, 0, 0]
    assert apportion([98, 1, 1], 10, least=1) == [8, 1, 1]
    assert apportion([98, 0, 1], 10, least=1) == [9, 0, 1], "who asks for nothing gets nothing"
    assert apportion([1, 1, 1], 2, least=1) == [1, 1, 0]
    assert apportion([0, 0], 0) == [0, 0]


# counts


def test_every_site_has_its_counts_and_nobody_an_image_twice():
    partition = assigned("counts:150/30,90/20,60/10", SMALL)
    assert sizes(partition) == {"site-1": (150, 30), "site-2": (90, 20), "site-3": (60, 10)}
    for name, part in SMALL.items():
        held = [i for site in partition.sites.values() for i in site[name]]
        assert sorted(held) == list(range(len(part)))
    assert partition.notes == ()


def test_validation_is_the_same_share_of_every_sites_training_images():
    """30 of 300 are validation images: 15 of 150, 9 of 90, 6 of 60."""
    partition = assigned("counts:150/30,90/20,60/10", SMALL)
    assert [len(held["validate"]) for held in partition.sites.values()] == [15, 9, 6]


@pytest.mark.parametrize("seed", range(5))
def test_classes_are_in_the_same_shares_at_every_site(seed):
    partition = assigned("counts:100/17,80/13,40/9", SMALL, seed=seed)
    assert sizes(partition) == {"site-1": (100, 17), "site-2": (80, 13), "site-3": (40, 9)}
    for name in SMALL:
        for row in partition.counts(SMALL, 2, name).values():
            assert abs(row[0] - sum(row) / 3) <= 1
    assert partition.notes == ("images that belong to no site: 72 train, 8 validate, 21 test",)


def test_the_draw_depends_on_the_seed_but_not_on_the_order_of_items():
    spec = "counts:100/17,80/13,40/9"
    first = assigned(spec, SMALL, seed=1)
    assert assigned(spec, SMALL, seed=1) == first
    mixed = shuffled(SMALL)
    assert homes(assigned(spec, mixed, seed=1), mixed) == homes(first, SMALL)
    assert homes(assigned(spec, SMALL, seed=2), SMALL) != homes(first, SMALL)


def test_images_without_labels_can_be_divided_by_counts():
    bare = {name: [{"id": item["id"]} for item in part] for name, part in SMALL.items()}
    assert sizes(assigned("counts:200/30,70/30", bare)) == {"site-1": (200, 30), "site-2": (70, 30)}


def test_a_patient_stays_at_one_site_also_across_sections_and_the_counts_reached_are_said():
    sections = table({"train": (60, 60), "test": (20, 20)}, per_group=4)
    for item in sections["test"][:12]:
        item["group"] = item["group"].replace("test", "train")
    partition = assigned("counts:70/21,30/9", sections)
    site_of = homes(partition, sections)
    seen: dict[str, set[str | None]] = {}
    for part in sections.values():
        for item in part:
            seen.setdefault(item["group"], set()).add(site_of.get(item["id"]))
    assert all(len(sites) == 1 for sites in seen.values())
    reached = sizes(partition)
    assert all(number % 4 == 0 for counts in reached.values() for number in counts)
    assert all(
        abs(a - b) <= 4
        for a, b in zip(reached["site-1"] + reached["site-2"], (70, 21, 30, 9), strict=True)
    )
    said = [f"{site} has {a}/{b} instead of" for site, (a, b) in reached.items()]
    assert any(
        note.startswith("patients or lesions stay together, so ") for note in partition.notes
    )
    assert all(any(text in note for note in partition.notes) for text in said)


def test_single_images_make_up_for_large_groups():
    """Groups of 6 come first, single images after them, so the counts are exact."""
    sections = table({"train": (60, 60)}, per_group=6)
    sections["train"] += table({"train": (60, 60)}, tag="single-")["train"]
    partition = assigned("counts:141/0,62/0", sections)
    assert sizes(partition) == {"site-1": (141, 0), "site-2": (62, 0)}
    assert not any("stay together" in note for note in partition.notes)


def test_a_small_shortfall_is_the_first_sites_and_said():
    """320 are asked for and 300 there: 20 are a tenth of 200."""
    partition = assigned("counts:200/5,120/5", SMALL)
    assert sizes(partition) == {"site-1": (180, 5), "site-2": (120, 5)}
    asked = "320 training and validation images were asked for and there are 300: site-1 has 180 instead of 200"
    assert partition.notes[0] == asked


def test_a_large_shortfall_is_everybodys_and_said():
    """600 are asked for and 300 there; of 240 to test 60: parts 2/3, 1/3 and 1/2, 1/2."""
    partition = assigned("counts:400/120,200/120", SMALL)
    assert sizes(partition) == {"site-1": (200, 30), "site-2": (100, 30)}
    assert partition.notes == (
        "600 training and validation images were asked for and there are 300: all sites have 0.5 of what was asked",
        "240 test images were asked for and there are 60: all sites have 0.25 of what was asked",
    )


def test_the_smallest_site_keeps_a_training_image():
    few = SMALL["train"][::15]
    assert len(few) == 18
    partition = assigned("counts:9000/5,10/5,1/1", {"train": few, "test": SMALL["test"]})
    assert [train for train, _ in sizes(partition).values()] == [16, 1, 1]


def test_no_test_images_are_fine_and_said():
    partition = assigned("counts:30/7,20/3", {"train": SMALL["train"]})
    assert sizes(partition) == {"site-1": (30, 0), "site-2": (20, 0)}
    assert (
        "10 test images were asked for and there are 0: all sites have 0 of what was asked"
        in partition.notes
    )


def test_the_number_of_sites_is_that_of_the_counts():
    assert "counts" in OWN_SITES
    assert len(assigned("counts:30/7,20/3", SMALL, sites=2).sites) == 2
    fails(
        "counts:30/7,20/3",
        SMALL,
        "3 sites with partition 'counts:30/7,20/3'",
        "it has 2: site-1, site-2",
        sites=3,
    )
    fails(
        "counts:2/1,2/1,2/1",
        {"train": SMALL["train"][89:91]},
        "3 sites for 2 training images",
        "at most 2 sites",
    )


def test_counts_are_read_and_written_alike():
    assert parse(" counts: 3134/0374,20/0") == ("counts", (Count(3134, 374), Count(20, 0)))
    assert assigned("counts: 030/7,20 / 3", SMALL).spec == "counts:30/7,20/3"


def test_a_site_that_only_tests():
    """TRAIN 0: no training and no validation images, as many test images as said, or all."""
    partition = assigned("counts:12/3,0/all", SMALL)
    assert partition.spec == "counts:12/3,0/all"
    assert [len(partition.sites["site-2"][name]) for name in ("train", "validate")] == [0, 0]
    tested = sum(len(site["test"]) for site in partition.sites.values())
    assert tested == len(SMALL["test"])
    fails("counts:0/3,0/all", SMALL, "everybody without training images")


def test_a_site_that_only_tests_has_all_that_was_also_to_validate():
    """Of data without a test section: what validates elsewhere is tested too, under the same ids."""
    data = {}
    for name, items in {**SMALL, "test": SMALL["validate"]}.items():
        data[name] = [{**item, "centre": "ab"[i % 2]} for i, item in enumerate(items)]

    partition = assigned("centre:b=0/all", data)
    assert sizes(partition)["b"] == (0, len(data["validate"]) // 2)
    assert not [note for note in partition.notes if "instead of" in note]

    partition = assigned("counts:12/0,0/all", {**SMALL, "test": SMALL["validate"]})
    validates = partition.sites["site-1"]["validate"]
    tested = partition.sites["site-2"]["test"]
    assert validates
    assert len(tested) == len(SMALL["validate"]) - len(validates)
    assert not {*validates} & {*tested}


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "counts",
            "counts:",
            "counts:5",
            "counts:0/0",
            "counts:3/some",
            "counts:5/-1",
            "counts:5/1,",
            "counts:a/b",
            "counts:5/1/1",
        ),
        *(
            "centre:",
            "centre:a",
            "centre:a=5",
            "centre:=5/1",
            "centre:a=0/0",
            "centre:a=5/1,a=6/1",
            "centre:2",
        ),
    ],
)
def test_malformed_counts_list_the_forms(spec):
    fails(
        spec,
        SMALL,
        repr(spec),
        "centre[:NAME=TRAIN/TEST,...] | counts:TRAIN/TEST,...",
        "TRAIN, TEST from 0",
    )


# The card's rows


def cut_anew(shares, salt, classes, centres=("one",)):
    """Items of a table of (class, centre) -> images, in the sections that a data set's rule gives them."""
    records = [
        Record("", c, f"{centre}-{c}-{i:05d}", centre, f"{centre}-{c}-{i:05d}")
        for centre in centres
        for c, number in enumerate(classes[centre] if isinstance(classes, dict) else classes)
        for i in range(number)
    ]
    sections: dict[str, list[dict]] = {"train": [], "validate": [], "test": []}
    for record, section in zip(records, by_group(salt, shares)(records), strict=True):
        sections[section].append({"id": record.id, "label": record.label, "centre": record.centre})
    return sections


def test_pneumonia_has_the_counts_of_the_card():
    """All 5856 images are cut anew, 620 to test; 5243 + 620 are asked for, the first site has the 7 fewer."""
    assert (sum(a for a, _ in PNEUMONIA), sum(b for _, b in PNEUMONIA)) == (5243, 620)
    sections = cut_anew((4712 / 5856, 524 / 5856, 620 / 5856), "pneumonia", (NORMAL, PNEUMONIC))
    partition = assigned(spec_of(PNEUMONIA), sections, classes=("normal", "pneumonia"))
    assert list(sizes(partition).values()) == [(3127, 374), *PNEUMONIA[1:]]
    asked = "5243 training and validation images were asked for and there are 5236: site-1 has 3127 instead of 3134"
    assert partition.notes == (asked,)
    for name in sections:
        for row in partition.counts(sections, 2, name).values():
            assert abs(row[0] - sum(row) * NORMAL / (NORMAL + PNEUMONIC)) <= 1.5


def test_pneumonia_on_the_published_sections_has_the_counts_too():
    """Published: 1349 + 3883 to train and validate, 234 + 390 to test: 11 too few to train, 4 too many to test."""
    sections = table({"train": (1214, 3494), "validate": (135, 389), "test": (234, 390)})
    partition = assigned(spec_of(PNEUMONIA), sections)
    assert list(sizes(partition).values()) == [(3123, 374), *PNEUMONIA[1:]]
    assert partition.notes[1:] == ("images that belong to no site: 4 test",)


def test_lungs_have_the_counts_of_the_card():
    """138 of Montgomery and 566 of Shenzhen are 704 = 635 + 69: nobody lacks one, none is left."""
    shares = (571 / 704, 64 / 704, 69 / 704)
    centres = {"montgomery": (MONTGOMERY,), "shenzhen": (SHENZHEN,)}
    sections = cut_anew(shares, "lung_cxr", centres, tuple(centres))
    bare = {name: [{"id": item["id"]} for item in part] for name, part in sections.items()}
    partition = assigned(spec_of(LUNGS), bare)
    assert tuple(sizes(partition).values()) == LUNGS
    assert partition.notes == ()


# Centres that are cut


def hospitals(**counts):
    """Items of centre -> section -> images of each class."""
    sections: dict[str, list[dict]] = {"train": [], "validate": [], "test": []}
    for centre, parts in counts.items():
        for name, made in table(parts, tag=f"{centre}-", centre=centre).items():
            sections[name] += made
    return sections


THREE = hospitals(
    a={"train": (40, 80), "validate": (4, 8), "test": (12, 24)},
    b={"train": (60, 120), "validate": (6, 12), "test": (20, 40)},
    c={"train": (30, 30), "test": (9, 9)},
)


def test_a_limited_centre_has_its_counts_and_comes_last():
    plain = assigned("centre", THREE)
    partition = assigned("centre:b=33/7", THREE)
    assert list(plain.sites) == ["a", "b", "c"]
    assert sizes(partition) == {"a": (132, 36), "c": (60, 18), "b": (33, 7)}
    assert (partition.sites["a"], partition.sites["c"]) == (plain.sites["a"], plain.sites["c"])
    assert [len(part) for part in partition.sites["b"].values()] == [30, 3, 7]
    assert abs(partition.counts(THREE, 2)["b"][0] - 10) <= 1
    assert partition.notes == (
        "images of b that are left out: 150 of 180 train, 15 of 18 validate, 53 of 60 test",
    )
    assert set(partition.sites["b"]["train"]) < set(plain.sites["b"]["train"])


def test_several_centres_can_be_limited():
    partition = assigned("centre:c=10/2,a=30/6", THREE, sites=3)
    assert sizes(partition) == {"b": (198, 60), "a": (30, 6), "c": (10, 2)}
    assert partition.spec == "centre:c=10/2,a=30/6"


def test_the_images_that_are_kept_depend_on_neither_seed_nor_order():
    first = assigned("centre:b=33/7", THREE, seed=1)
    assert homes(assigned("centre:b=33/7", THREE, seed=2), THREE) == homes(first, THREE)
    mixed = shuffled(THREE)
    assert homes(assigned("centre:b=33/7", mixed), mixed) == homes(first, THREE)


def test_a_limit_above_what_there_is_keeps_everything_and_is_said():
    partition = assigned("centre:c=61/18", THREE)
    assert sizes(partition)["c"] == (60, 18)
    asked = (
        "61 training and validation images were asked for and there are 60: c has 60 instead of 61"
    )
    assert partition.notes == (asked,)
    assert sizes(assigned("centre:c=900/18", THREE))["c"] == (60, 18)


def test_a_limit_on_no_centre_names_the_centres():
    fails(
        "centre:d=5/1",
        THREE,
        "'d=5/1'",
        "no training image is of centre 'd'",
        "the centres are a, b, c",
    )
    fails("centre:a=5/1", SMALL, "name no centre", "counts:TRAIN/TEST")


def test_the_last_small_site_of_fedhelp_is_a_tenth_of_rosendahl():
    """Card of FedHelp, section 4: 180 to train and 45 to test, of FLamby's 1807 and 452."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(8), ROSENDAHL)).tolist()
    everyone = [
        {"id": f"r{i:05d}", "label": c, "centre": "rosendahl"} for i, c in enumerate(labels)
    ]
    training = everyone[TESTED:]
    sections = {"train": training[181:], "validate": training[:181], "test": everyone[:TESTED]}
    for name, number in (("train", 16), ("test", 4)):
        sections[name] += [
            {"id": f"v-{name}-{i}", "label": i % 8, "centre": "vidir"} for i in range(number)
        ]
    partition = assigned("centre:rosendahl=180/45", sections)
    assert sizes(partition) == {"vidir": (16, 4), "rosendahl": (180, 45)}
    found = Counter(everyone_label(sections, partition))
    assert all(abs(found[c] - 180 * number / 2259) <= 3 for c, number in enumerate(ROSENDAHL))


def everyone_label(sections, partition):
    held = partition.sites["rosendahl"]
    return [sections[name][i]["label"] for name in ("train", "validate") for i in held[name]]


def test_the_limit_is_met_with_the_real_lesions_of_rosendahl(real_data: Path):
    with (real_data / "ham10000" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = sorted({row["dx"] for row in rows})
    sections: dict[str, list[dict]] = {"train": [], "test": []}
    for row in rows:
        item = {"id": row["image_id"], "label": kinds.index(row["dx"]), "centre": row["centre"]}
        sections[row["flamby_fold"]].append({**item, "group": row["lesion_id"]})
    partition = assigned("centre:rosendahl=180/45", sections)
    assert sizes(partition)["rosendahl"] == (180, 45)
    kept, left = set(), set()
    for name, part in sections.items():
        held = set(partition.sites["rosendahl"][name])
        for i, item in enumerate(part):
            if item["centre"] == "rosendahl":
                (kept if i in held else left).add(item["group"])
    assert kept.isdisjoint(left)


def test_a_partition_with_limits_survives_json():
    partition = assigned("centre:b=33/7", THREE)
    stored = json.loads(json.dumps(partition.to_ids(THREE), sort_keys=True))
    restored = Partition.from_ids(stored, THREE, spec=partition.spec, seed=0, notes=partition.notes)
    assert restored == partition
    assert list(restored.sites) == list(partition.sites) == ["a", "c", "b"]


def test_parsed_limits():
    assert parse("centre: a b = 5/1,c=6/2")[1] == (
        Limit("a b", Count(5, 1)),
        Limit("c", Count(6, 2)),
    )
