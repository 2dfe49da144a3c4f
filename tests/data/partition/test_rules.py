"""The rules that divide images over sites."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from medfl.core.errors import InputError
from medfl.core.seeding import derive
from medfl.data.partition.draw import MAX_DRAWS, Group, Share, divide
from medfl.data.partition.rules import FORMS, Partition, assign, natural_key, parse

CLASSES = ("mel", "nv", "bcc", "df")
DRAWN = ("iid", "dirichlet:0.5", "classes:2")


def items(count, section="train", *, labels=4, per_group=1, centres=0):
    made = []
    for i in range(count):
        item = {"image": f"{section}-{i}.png", "id": f"{section}-{i:05d}"}
        if labels:
            item["label"] = i // per_group % labels
        if per_group > 1:
            item["group"] = f"{section}-patient-{i // per_group}"
        if centres:
            item["centre"] = f"hospital-{i % centres}"
        made.append(item)
    return made


def cohort(train=400, validate=40, test=80, **options):
    sizes = {"train": train, "validate": validate, "test": test}
    return {name: items(size, name, **options) for name, size in sizes.items()}


def homes(partition, sections):
    """The site of every item by its id."""
    return {
        i: site
        for site, held in partition.to_ids(sections).items()
        for ids in held.values()
        for i in ids
    }


def shuffled(sections, seed=0):
    rng = np.random.default_rng(seed)
    return {name: [part[i] for i in rng.permutation(len(part))] for name, part in sections.items()}


def fails(spec, sections, *texts, sites=4, classes=CLASSES):
    """Check that the rule is refused in one line that holds every text."""
    with pytest.raises(InputError) as caught:
        assign(spec, sections, sites=sites, classes=classes, seed=0)
    line = str(caught.value)
    assert "\n" not in line
    assert line.count("; ") >= 2
    for text in texts:
        assert text in line


# Laws of all rules


@pytest.mark.parametrize("spec", [*DRAWN, "centre"])
@pytest.mark.parametrize("per_group", [1, 3])
def test_every_item_has_exactly_one_site(spec, per_group):
    sections = cohort(centres=4, per_group=per_group)
    partition = assign(spec, sections, sites=4, classes=CLASSES, seed=3)
    assert len(partition.sites) == 4
    for name, part in sections.items():
        positions = [i for held in partition.sites.values() for i in held[name]]
        assert sorted(positions) == list(range(len(part)))


@pytest.mark.parametrize("spec", [*DRAWN, "shots:2,15,1", "centre"])
def test_the_result_depends_on_the_seed_but_not_on_the_order_of_items(spec):
    sections = cohort(centres=4)
    first = assign(spec, sections, sites=4, classes=CLASSES, seed=1)
    assert assign(spec, sections, sites=4, classes=CLASSES, seed=1) == first
    mixed = shuffled(dict(reversed(sections.items())))
    assert homes(assign(spec, mixed, sites=4, classes=CLASSES, seed=1), mixed) == homes(
        first, sections
    )
    other = assign(spec, sections, sites=4, classes=CLASSES, seed=2)
    assert (homes(other, sections) == homes(first, sections)) == (spec == "centre")


def test_order_does_not_matter_with_groups_of_several_labels():
    sections = cohort(per_group=3)
    for part in sections.values():
        for i, item in enumerate(part):
            item["label"] = i % len(CLASSES)
    mixed = shuffled(sections)
    first = assign("dirichlet:1", sections, sites=4, classes=CLASSES, seed=1)
    assert homes(assign("dirichlet:1", mixed, sites=4, classes=CLASSES, seed=1), mixed) == homes(
        first, sections
    )


@pytest.mark.parametrize("spec", [*DRAWN, "shots:2,8,1"])
def test_a_group_stays_at_one_site_also_across_sections(spec):
    sections = cohort(per_group=3)
    for item in sections["test"][:30]:
        item["group"] = item["group"].replace("test", "train")
    partition = assign(spec, sections, sites=4, classes=CLASSES, seed=0)
    site_of = homes(partition, sections)
    seen: dict[str, set[str]] = {}
    for part in sections.values():
        for item in part:
            if item["id"] in site_of:
                seen.setdefault(item["group"], set()).add(site_of[item["id"]])
    assert all(len(sites) == 1 for sites in seen.values())
    if not spec.startswith("shots"):
        assert any("30 test images follow" in note for note in partition.notes)


def test_missing_sections_are_empty():
    partition = assign("iid", {"train": items(10)}, sites=3, classes=None, seed=0)
    assert all(held["validate"] == held["test"] == () for held in partition.sites.values())


def test_site_names_are_in_natural_order():
    names = list(assign("iid", cohort(), sites=12, classes=CLASSES, seed=0).sites)
    assert names == [f"site-{i}" for i in range(1, 13)]
    assert sorted(["b10", "b9", "a", "10", "b"], key=natural_key) == ["a", "b", "b9", "b10", "10"]


# iid


def test_iid_sites_differ_by_at_most_one():
    partition = assign(
        "iid", cohort(train=401, validate=42, test=83), sites=4, classes=CLASSES, seed=0
    )
    sizes = [
        [len(held[name]) for name in ("train", "validate", "test")]
        for held in partition.sites.values()
    ]
    assert sizes == [[101, 11, 21], [100, 11, 21], [100, 10, 21], [100, 10, 20]]


# dirichlet


def test_cut_rule_by_hand():
    """Parts .26 .48 .26 of 10: cumulative 2.6 and 7.4 are rounded to cuts 3 and 7; the last site takes the rest."""
    assert Share((0, 1, 2), np.array([0.26, 0.48, 0.26])).sizes(10).tolist() == [3, 4, 3]
    assert Share((0, 1, 2), np.array([1e-9, 1.0, 0.0])).sizes(10).tolist() == [0, 10, 0]
    assert Share((4, 7, 9)).sizes(11).tolist() == [4, 4, 3]


def test_dirichlet_is_the_rule_of_the_papers_when_nobody_is_grouped():
    """Written out once more: per class shuffle, draw Dirichlet, cut at the rounded cumulative counts."""
    sections = cohort()
    partition = assign("dirichlet:0.8", sections, sites=5, classes=CLASSES, seed=11)
    assert partition.notes == ()

    def stream(*path):
        return np.random.default_rng(derive(11, "partition", "dirichlet", 0, *path))

    for name, part in sections.items():
        expected: dict[int, list[int]] = {site: [] for site in range(5)}
        for c in range(len(CLASSES)):
            mine = np.array([i for i, item in enumerate(part) if item["label"] == c])
            mine = mine[stream(name, c).permutation(len(mine))]
            cuts = np.round(np.cumsum(stream("parts", c).dirichlet([0.8] * 5)) * len(mine)).astype(
                int
            )[:-1]
            for site, block in enumerate(np.split(mine, cuts)):
                expected[site] += block.tolist()
        for site in range(5):
            assert list(partition.sites[f"site-{site + 1}"][name]) == sorted(expected[site])


def test_small_beta_concentrates_and_large_beta_equalises():
    sections = cohort(train=2000)

    def largest_share(spec):
        counts = assign(spec, sections, sites=5, classes=CLASSES, seed=0).counts(sections, 4)
        table = np.array(list(counts.values()))
        return (table.max(axis=0) / table.sum(axis=0)).mean()

    assert largest_share("dirichlet:0.05") > 0.7
    assert largest_share("dirichlet:100000") < 0.21


def test_held_out_images_mirror_the_training_mixture():
    sections = cohort(train=2000, validate=400, test=1000)
    partition = assign("dirichlet:0.3", sections, sites=5, classes=CLASSES, seed=0)
    train = np.array(list(partition.counts(sections, 4).values()))
    for name, size in (("validate", 400), ("test", 1000)):
        other = np.array(list(partition.counts(sections, 4, name).values()))
        assert np.abs(other - train * size / 2000).max() <= 1.5


def test_an_empty_site_is_drawn_again_and_said():
    sections = cohort(train=60)
    redrawn = [
        assign("dirichlet:0.1", sections, sites=6, classes=CLASSES, seed=seed) for seed in range(8)
    ]
    assert all(held["train"] for partition in redrawn for held in partition.sites.values())
    notes = [note for partition in redrawn for note in partition.notes]
    assert notes
    assert all(note.startswith("re-drawn") and note.endswith("a site was empty") for note in notes)


def test_an_empty_site_that_cannot_be_cured_is_refused():
    fails(
        "dirichlet:1e-9",
        cohort(),
        "dirichlet:1e-09",
        "10 sites",
        f"{MAX_DRAWS} draws",
        "larger BETA",
        sites=10,
    )


def test_the_seed_of_a_class_is_its_own():
    sections = cohort()
    fewer = {name: [i for i in part if i["label"] != 3] for name, part in sections.items()}
    whole = homes(assign("dirichlet:5", sections, sites=4, classes=CLASSES, seed=0), sections)
    part = homes(assign("dirichlet:5", fewer, sites=4, classes=CLASSES[:3], seed=0), fewer)
    assert part == {i: site for i, site in whole.items() if i in part}


# groups


def test_groups_are_cut_at_the_nearest_boundary():
    """Three groups of 3 for two owners: 5 + 4 are wanted, the boundaries are 0 3 6 9, so 6 + 3."""
    groups = [Group(f"g{i}", tuple(range(3 * i, 3 * i + 3)), 0) for i in range(3)]
    placed: dict[str, int] = {}
    parts = divide(groups, Share((5, 8)), np.random.default_rng(0), placed)
    assert [len(part) for part in parts] == [2, 1]
    assert Counter(placed.values()) == {5: 2, 8: 1}


def test_groups_placed_before_count_towards_their_site():
    """Ten single items in equal parts, three of them at owner 0: it gets 2 of the free 7, owner 1 gets 5."""
    groups = [Group(f"g{i}", (i,), 0) for i in range(10)]
    placed = {"g0": 0, "g1": 0, "g2": 0}
    parts = divide(groups, Share((0, 1)), np.random.default_rng(0), placed)
    assert [len(part) for part in parts] == [5, 5]
    assert placed["g0"] == placed["g1"] == placed["g2"] == 0
    assert len(placed) == 10


def test_a_group_goes_by_the_label_of_its_first_item():
    """With C = 1 every site owns one class, and every second image carries another label than its group's first."""
    sections = {"train": items(160, per_group=2)}
    for item in sections["train"][1::2]:
        item["label"] = (item["label"] + 1) % 4
    partition = assign("classes:1", sections, sites=4, classes=CLASSES, seed=0)
    for site, held in enumerate(partition.sites.values()):
        assert {sections["train"][i]["label"] for i in held["train"][::2]} == {site}


# classes


def test_classes_gives_every_site_c_classes_in_equal_parts():
    sections = cohort(train=800, labels=4)
    partition = assign("classes:2", sections, sites=6, classes=CLASSES, seed=0)
    for name in ("train", "test"):
        table = np.array(list(partition.counts(sections, 4, name).values()))
        assert ((table > 0).sum(axis=1) == 2).all()
        for column in table.T:
            assert np.ptp(column[column > 0]) <= 1
    train, test = (
        np.array(list(partition.counts(sections, 4, n).values())) > 0 for n in ("train", "test")
    )
    assert (train == test).all()
    assert np.flatnonzero(train[0]).tolist() == [0, 1]  # the first slots deal the classes in order
    assert np.flatnonzero(train[1]).tolist() == [2, 3]


def test_classes_are_disjoint_when_sites_times_c_is_their_number():
    sections = cohort()
    table = np.array(
        list(
            assign("classes:2", sections, sites=2, classes=CLASSES, seed=9)
            .counts(sections, 4)
            .values()
        )
    )
    assert table.tolist() == [[100, 100, 0, 0], [0, 0, 100, 100]]


# shots


@pytest.mark.parametrize("seed", range(5))
def test_shots_keep_to_their_ranges(seed):
    names = [f"c{i}" for i in range(10)]
    sections = cohort(train=6000, validate=300, test=1000, labels=10)
    partition = assign("shots:4,20,2", sections, sites=15, classes=names, seed=seed)
    train, test = (
        np.array(list(partition.counts(sections, 10, n).values())) for n in ("train", "test")
    )
    for row in train:
        held = row[row > 0]
        assert 2 <= len(held) <= 6
        assert set(held) == {held[0]}
        assert 19 <= held[0] <= 22
    assert ((train > 0) == (test > 0)).all()
    assert len(set(test[test > 0])) == 1
    positions = [i for held in partition.sites.values() for i in held["train"]]
    assert len(positions) == len(set(positions))
    assert any("train images belong to no site" in note for note in partition.notes)


@pytest.mark.parametrize("per_group", [1, 4])
def test_shots_without_spread_are_exact(per_group):
    sections = cohort(per_group=per_group)
    table = np.array(
        list(
            assign("shots:3,7,0", sections, sites=4, classes=CLASSES, seed=0)
            .counts(sections, 4)
            .values()
        )
    )
    assert (np.sort(table, axis=1) == [0, 7, 7, 7]).all()


# centre


def test_centres_name_the_sites():
    sections = cohort(centres=12)
    partition = assign("centre", sections, sites=None, classes=CLASSES, seed=0)
    assert list(partition.sites) == [f"hospital-{i}" for i in range(12)]
    for site, held in partition.sites.items():
        for name, positions in held.items():
            assert {sections[name][i]["centre"] for i in positions} == {site}


def test_real_centres_have_the_published_counts(real_data: Path):
    with (real_data / "ham10000" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["dx"] for row in rows})
    sections: dict[str, list] = {"train": [], "test": []}
    for row in rows:
        item = {
            "id": row["image_id"],
            "label": names.index(row["dx"]),
            "centre": row["centre"],
            "group": row["lesion_id"],
        }
        sections[row["flamby_fold"]].append(item)
    partition = assign("centre", sections, sites=4, classes=names, seed=0)
    sizes = {
        site: (len(held["train"]), len(held["test"])) for site, held in partition.sites.items()
    }
    published = {
        "rosendahl": (1807, 452),
        "vidir_modern": (2691, 672),
        "vidir_molemax": (3163, 791),
    }
    assert sizes == {**published, "vienna_dias": (351, 88)}
    drawn = homes(assign("dirichlet:0.1", sections, sites=10, classes=names, seed=0), sections)
    sites_of: dict[str, set[str]] = {}
    for row in rows:
        sites_of.setdefault(row["lesion_id"], set()).add(drawn[row["image_id"]])
    assert all(len(sites) == 1 for sites in sites_of.values())


# file


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"file:{path}"


def test_file_is_followed_and_the_rest_left_out(tmp_path):
    sections = cohort(train=8, validate=0, test=2)
    lines = [f"train-{i:05d},clinic {'b' if i % 2 else 'a'},train" for i in range(6)]
    spec = write(tmp_path / "sites.csv", "id,site,section", *lines, "test-00001,clinic a,")
    partition = assign(spec, sections, sites=None, classes=CLASSES, seed=0)
    assert dict(partition.sites) == {
        "clinic a": {"train": (0, 2, 4), "validate": (), "test": (1,)},
        "clinic b": {"train": (1, 3, 5), "validate": (), "test": ()},
    }
    assert partition.notes == ("not in the file and left out: 2 train, 1 test",)


def test_file_needs_no_section_and_may_begin_with_a_mark(tmp_path):
    path = tmp_path / "sites.csv"
    path.write_bytes(
        b"\xef\xbb\xbfsite,id\r\nb10,train-00000\r\nb9,train-00001\r\nb9,train-00002\r\nb9,train-00003\r\n"
    )
    partition = assign(f"file:{path}", {"train": items(4)}, sites=2, classes=CLASSES, seed=0)
    assert {site: held["train"] for site, held in partition.sites.items()} == {
        "b9": (1, 2, 3),
        "b10": (0,),
    }
    assert list(partition.sites) == ["b9", "b10"]


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (["id,centre", "train-00000,a"], ["no column site", "id, centre"]),
        (["id,site", "train-00000,a", "nobody,a"], ["line 3", "'nobody' is unknown"]),
        (["id,site,section", "train-00000,a,test"], ["'train-00000' is unknown in section 'test'"]),
        (["id,site,section", "train-00000,a,exam"], ["section 'exam'", "train, validate, test"]),
        (["id,site", "train-00000,a", "train-00000,b"], ["line 3", "second site"]),
        (["id,site", "train-00000,"], ["line 2", "site ''"]),
        (["id,site", "train-00000,../a"], ["line 2", "site '../a'", "without slashes"]),
        (["id,site", "train-00000,a", "test-00000,b"], ["leaves b without training images"]),
        (["id,site"], ["without training images"]),
        ([""], ["no column id or site"]),
    ],
)
def test_bad_files_are_refused(tmp_path, lines, texts):
    fails(write(tmp_path / "sites.csv", *lines), cohort(), *texts, sites=None)


def test_an_id_in_look_alike_characters_is_that_image(tmp_path):
    lines = ["id,site", "train\u200b-00000,a", "\uff54rain-00001,b"]
    held = assign(
        write(tmp_path / "s.csv", *lines), cohort(), sites=None, classes=None, seed=0
    ).sites
    assert [held[site]["train"] for site in "ab"] == [(0,), (1,)]


def test_an_id_that_a_spreadsheet_changed_is_told_with_the_cause(tmp_path):
    fails(write(tmp_path / "s.csv", "id,site", "1E+05,a"), cohort(), "made '1E+05' of a name")


def test_unreadable_files_are_refused(tmp_path):
    fails(f"file:{tmp_path / 'none.csv'}", cohort(), "none.csv", "No such file")
    fails(f"file:{tmp_path}", cohort(), str(tmp_path))
    fails("file:a\0b", cohort(), "cannot be read")
    (tmp_path / "image.csv").write_bytes(b"\xff\xd8\xff\x00id,site")
    fails(f"file:{tmp_path / 'image.csv'}", cohort(), "no table in UTF-8")


# Items without labels


@pytest.mark.parametrize("spec", ["iid", "centre"])
def test_images_without_labels_can_be_divided(spec):
    sections = cohort(labels=0, centres=4)
    partition = assign(spec, sections, sites=4, classes=None, seed=0)
    assert sum(len(held["train"]) for held in partition.sites.values()) == 400
    assert partition.counts(sections, 0) == {site: [] for site in partition.sites}


@pytest.mark.parametrize("spec", ["dirichlet:0.5", "classes:2", "shots:2,5,0"])
def test_rules_by_class_need_labels(spec):
    fails(spec, cohort(labels=0), spec, "no class label", "train-00000", "iid", classes=None)


def test_labels_without_class_names_are_enough():
    sections = cohort()
    named = assign("dirichlet:0.5", sections, sites=3, classes=CLASSES, seed=0)
    assert assign("dirichlet:0.5", sections, sites=3, classes=None, seed=0) == named


# Bad input


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "random",
        "iid:3",
        "centre:2",
        "dirichlet",
        "dirichlet:",
        "dirichlet:x",
        "dirichlet:0",
        "dirichlet:-1",
        "dirichlet:nan",
    ]
    + [
        "dirichlet:inf",
        "dirichlet:1,2",
        "classes",
        "classes:0",
        "classes:1.5",
        "shots:3,100",
        "shots:0,5,1",
        "shots:3,5,-1",
    ]
    + ["shots:a,b,c", "file", "file:", "Dirichlet:0.1"],
)
def test_malformed_rules_list_the_forms(spec):
    fails(spec, cohort(), repr(spec), FORMS)


# By size


def sized(*sizes, group=None):
    return [
        {"id": f"i{n:02d}", "size": size, **({"group": group(n)} if group else {})}
        for n, size in enumerate(sizes)
    ]


def test_sites_by_size_hold_quantiles_and_judge_on_their_own_sizes():
    """Sorted training sizes 1..8 over 4 sites: (1,2), (3,4), (5,6), (7,8); a test image goes to the site of the next
    training image that is as large or larger, beyond the largest to the last site."""
    data = {"train": sized(8, 1, 7, 2, 6, 3, 5, 4), "validate": sized(2), "test": sized(0, 3, 4, 9)}
    data["validate"][0]["id"], data["test"] = (
        "v",
        [{**item, "id": f"t{n}"} for n, item in enumerate(data["test"])],
    )
    found = assign("size", data, sites=4, classes=None, seed=3)
    assert found.spec == "size"
    held = {
        site: [data["train"][i]["size"] for i in parts["train"]]
        for site, parts in found.sites.items()
    }
    assert {site: sorted(sizes) for site, sizes in held.items()} == {
        "site-1": [1, 2], "site-2": [3, 4], "site-3": [5, 6], "site-4": [7, 8],
    }  # fmt: skip
    assert [found.sites[f"site-{n}"]["test"] for n in range(1, 5)] == [(0,), (1, 2), (), (3,)]
    assert found.sites["site-1"]["validate"] == (0,)
    again = assign("size", {**data, "train": data["train"][::-1]}, sites=4, classes=None, seed=9)
    assert again.to_ids({**data, "train": data["train"][::-1]}).keys() == found.sites.keys()
    assert {i for i in again.to_ids({**data, "train": data["train"][::-1]})["site-2"]["train"]} == {
        "i05",
        "i07",
    }


def test_groups_stay_together_by_size():
    data = {"train": sized(*range(12), group=lambda n: f"g{n // 3}")}
    found = assign("size", data, sites=3, classes=None, seed=0)
    homes = {i: site for site, parts in found.sites.items() for i in parts["train"]}
    assert all(len({homes[i] for i in range(first, first + 3)}) == 1 for first in range(0, 12, 3))
    assert set(homes.values()) == {"site-1", "site-2", "site-3"}


def test_sites_by_size_need_sizes():
    fails(
        "size", cohort(), "partition 'size', but the sizes of", "use iid, centre or file:PATH.csv"
    )


def test_equal_rules_read_equal():
    assert parse(" shots:3, 100,2 ") == ("shots", (3, 100, 2))
    for spec, canonical in (
        ("dirichlet:.10", "dirichlet:0.1"),
        ("dirichlet:1.0", "dirichlet:1"),
        ("classes:02", "classes:2"),
    ):
        assert assign(spec, cohort(), sites=3, classes=CLASSES, seed=0).spec == canonical


@pytest.mark.parametrize("spec", DRAWN)
def test_more_sites_than_images_are_refused(spec):
    fails(spec, cohort(train=8), "9 sites for 8 training images", "at most 8", sites=9)
    fails(
        spec,
        cohort(train=24, per_group=3),
        "9 sites for 24 training images in 8 groups",
        "at most 8",
        sites=9,
    )


@pytest.mark.parametrize(
    ("sites", "text"),
    [(None, "without a number of sites"), (0, "over 0 sites"), (-2, "over -2 sites")],
)
def test_the_number_of_sites_is_needed(sites, text):
    fails("iid", cohort(), text, "--sites", sites=sites)


def test_classes_must_fit():
    fails("classes:5", cohort(), "classes:5", "4 classes", "C at most 4")
    fails(
        "classes:1",
        cohort(),
        "over 3 sites covers 3",
        "all 4 classes",
        "C of at least 2 or 4 sites",
        sites=3,
    )


def test_shots_must_fit():
    fails("shots:7,5,1", cohort(), "shots:7,5,1", "lacks at least 1")
    fails("shots:2,5,1", {"train": items(40, labels=2)}, "2 classes", classes=CLASSES[:2])
    fails("shots:3,90,0", cohort(), "need", "there are 100", "lower K")


def test_too_large_a_beta_is_refused():
    fails("dirichlet:1e308", cohort(), "1e+308", "1e6")


def test_centres_must_be_there_and_agree():
    fails("centre", cohort(), "520 of 520 images name no centre", "train-00000", "iid", sites=None)
    mixed = cohort(centres=3)
    del mixed["test"][5]["centre"]
    fails("centre", mixed, "1 of 520", "test-00005", sites=None)
    fails("centre", cohort(centres=3), "4 sites", "it has 3: hospital-0, hospital-1, hospital-2")
    bare = cohort(centres=1)
    for item in (item for section in bare.values() for item in section):
        item["centre"] = "unknown"
    fails(
        "centre", bare, "the centres of all 520 images are unknown", "--partition iid", sites=None
    )
    bare["train"][0]["centre"] = "north"
    assert [*assign("centre", bare, sites=None, classes=CLASSES, seed=0).to_ids(bare)] == [
        "north",
        "unknown",
    ]
    lone = cohort(centres=3)
    lone["test"][0]["centre"] = "elsewhere"
    partition = assign("centre", lone, sites=None, classes=CLASSES, seed=0)
    assert list(partition.notes) == [
        "no sites, as they have no training images: elsewhere (1 test)"
    ]
    assert [*partition.to_ids(lone)] == ["hospital-0", "hospital-1", "hospital-2"]


@pytest.mark.parametrize("label", [4, -1, 1.0, "mel", True])
@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.5"])
def test_labels_outside_the_classes_name_the_image(spec, label):
    sections = cohort()
    sections["validate"][7]["label"] = label
    fails(spec, sections, "validate-00007", repr(label), "0 to 3")


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.5", "classes:2", "shots:2,5,0", "centre"])
def test_a_class_absent_from_training_is_named(spec):
    sections = cohort(centres=4)
    sections["train"] = [item for item in sections["train"] if item["label"] != 2]
    fails(spec, sections, "no training image of class 'bcc' (label 2)")


def test_ids_must_be_unique_in_a_section():
    sections = cohort()
    sections["test"][1]["id"] = sections["test"][0]["id"]
    fails("iid", sections, "test-00000", "'test'")


def test_numpy_labels_are_labels():
    sections = cohort()
    plain = assign("dirichlet:1", sections, sites=3, classes=CLASSES, seed=0)
    for part in sections.values():
        for item in part:
            item["label"] = np.int64(item["label"])
    assert assign("dirichlet:1", sections, sites=3, classes=CLASSES, seed=0) == plain


# Storing


def test_a_partition_survives_json_and_another_order():
    sections = cohort()
    partition = assign("dirichlet:0.5", sections, sites=11, classes=CLASSES, seed=4)
    stored = json.loads(json.dumps(partition.to_ids(sections), sort_keys=True))
    rest = {"spec": partition.spec, "seed": partition.seed, "notes": partition.notes}
    restored = Partition.from_ids(stored, sections, **rest)
    assert restored == partition
    assert list(restored.sites) == list(partition.sites)
    mixed = shuffled(sections)
    assert homes(Partition.from_ids(stored, mixed, **rest), mixed) == homes(partition, sections)


def test_an_id_that_is_gone_is_named():
    sections = cohort()
    stored = assign("iid", sections, sites=1, classes=CLASSES, seed=0).to_ids(sections)
    del sections["test"][3]
    with pytest.raises(InputError, match=r"1 image\(s\).*site-1.*'test-00003' \(test\)"):
        Partition.from_ids(stored, sections, spec="iid", seed=0)
