"""Sites made from a partition, their seeds and settings, cohorts, and what may leave a site."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from medfl import datasets
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.core.run import PartitionRecord
from medfl.data.prepared import Stacked
from medfl.methods import load
from medfl.methods._parts.extras import deal
from medfl.runs.launch import federate
from medfl.runtimes.federation import Federation
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.step import copy_site_weights, introduce, score_site, site_step
from medfl.runtimes.tasks import ScoreGlobal
from medfl.storage.files import load_weights
from medfl.storage.run_folder import RunFolder
from medfl.training.site import snapshot
from tests.support.toy import PARTS, SECTIONS, ToyBundle, ToySections, bits, run_record


def federation(method: str = "fedavg", **changes) -> Federation:
    return Federation(ToyBundle(), load(method), run_record(**changes))


def parts(**where: list[int]) -> PartitionRecord:
    sites = {
        name: {section: [f"{section}{i}" for i in rows] for section in SECTIONS}
        for name, rows in where.items()
    }
    return PartitionRecord("iid", 0, (), sites)


# Sites


def test_every_site_has_the_items_that_the_partition_says() -> None:
    made = federation()
    assert made.names == made.participants == ["x", "y", "z"]
    for name, rows in PARTS.items():
        site = made.site(name, 1)
        for section in SECTIONS:
            assert getattr(site, section).ids == [f"{section}{i}" for i in rows]
        assert site.num_samples == len(rows)
        assert made.shard(name, "train").labels == [i % 3 for i in rows]
    x, _ = next(made.site("y", 1).train.batches(100))
    assert torch.equal(x, ToyBundle().prepared("train").inputs[3:8])


def test_sections_are_prepared_once_and_shared() -> None:
    calls: list[str] = []

    class Counting(ToyBundle):
        def prepared(self, section: str, **settings) -> Stacked:
            calls.append(section)
            return super().prepared(section, **settings)

    made = Federation(Counting(), load("fedavg"), run_record())
    assert sorted(calls) == sorted(SECTIONS)
    assert made.site("x", 1).train.prepared is made.site("z", 9).train.prepared
    again = Federation(Counting(), load("fedprox"), run_record(), prepared=made.sections)
    assert len(calls) == 3
    assert again.sections == made.sections


def test_without_test_items_the_validation_items_serve() -> None:
    ids = {
        name: {**found, "test": found["validate"]}
        for name, found in run_record().partition.sites.items()
    }
    made = Federation(
        ToyBundle(sections=ToySections(has_test=False)),
        load("fedavg"),
        run_record(partition=PartitionRecord("iid", 0, (), ids)),
    )
    assert (
        made.shard("x", "test").ids
        == made.shard("x", "validate").ids
        == ["validate0", "validate1", "validate2"]
    )


def test_settings_seed_and_round_reach_the_site() -> None:
    made = federation(local_epochs=3, batch_size=5, lr=0.3, lr_decay=0.5)
    site = made.site("x", 4)
    network = site.network()
    assert (
        site.settings.epochs,
        site.settings.batch_size,
        site.settings.lr_factor,
        site.round,
    ) == (3, 5, 0.125, 4)
    assert site.settings.optimizer(network).param_groups[0]["lr"] == 0.3
    assert (
        federation(lr=None).site("x", 1).settings.optimizer(network).param_groups[0]["lr"] == 0.05
    )
    seeds = [made.site(name, round_).seed for name in made.names for round_ in (1, 2)]
    seeds += [made.host(1).seed, made.host(2).seed, federation(seed=1).site("x", 1).seed]
    assert len(set(seeds)) == len(seeds)
    assert site.seed == federation().site("x", 4).seed


def test_the_learning_rate_decays_per_round_or_per_local_epoch() -> None:
    """0.01 * 0.99^199 = 1.353330e-3 in round 200; per epoch of two, round 2 begins at decay^2."""
    seen: list[float] = []

    class Recorded(ToyBundle):
        def optimizer(
            self, network: nn.Module, lr: float | None = None, epoch: int = 0
        ) -> torch.optim.Optimizer:
            made = super().optimizer(network, lr, epoch)
            made.register_step_pre_hook(
                lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
            )
            return made

    for decay_per, round_, exponents in (
        ("round", 200, [199, 199]),
        ("epoch", 1, [0, 1]),
        ("epoch", 2, [2, 3]),
    ):
        seen.clear()
        settings = {
            "lr": 0.01,
            "lr_decay": 0.99,
            "local_epochs": 2,
            "batch_size": 8,
            "decay_per": decay_per,
        }
        made = Federation(Recorded(), load("fedcb", classifier="trainable"), run_record(**settings))
        site_step(made, round_, "x", None, Message({"weights": made.networks.initial}))
        assert seen == pytest.approx([0.01 * 0.99**e for e in exponents], rel=1e-12)
        site = made.site("x", round_)
        assert site.learning_rate(site.network()) == pytest.approx(sum(seen) / 2, rel=1e-12)
        if round_ == 200:
            assert seen == pytest.approx([1.353330e-3] * 2, rel=1e-6)


def test_a_poly_schedule_falls_to_almost_nothing_in_the_last_round() -> None:
    """(1 - (r - 1) / R)^0.9 in round r of R, whatever lr_decay says; a host that counts on stays there."""
    made = federation(lr_decay=0.5, local_epochs=3, decay_per="poly", rounds=4)
    factors = [made.site("x", round_).settings.lr_factor for round_ in (0, 1, 2, 3, 4, 9)]
    assert factors == pytest.approx([1, 1, 0.75**0.9, 0.5**0.9, 0.25**0.9, 0.25**0.9], rel=1e-12)


def test_what_follows_the_rate_in_a_method_decays_with_the_local_epochs() -> None:
    made = federation(lr_decay=0.5, local_epochs=3, decay_per="epoch")
    assert [made.site("x", round_).settings.lr_factor for round_ in (0, 1, 2)] == [1, 1, 0.125]


@pytest.mark.parametrize(
    ("method", "calls"), [("fedavg", 1), ("fedbm", 1), ("ditto", 2), ("fedrep", 2), ("fedtype", 2)]
)
def test_a_site_keeps_its_optimisers_over_the_rounds(method: str, calls: int) -> None:
    options = {"fedbm": {"generator": False, "classifier": "trainable"}}.get(method, {})
    kept, fresh = (
        Federation(
            ToyBundle(),
            load(method, options),
            run_record(method=method, lr_decay=1.0, keep_optimizer=keep),
        )
        for keep in (True, False)
    )
    down = Message({"weights": kept.networks.initial})
    results = {}
    for name, made in (("kept", kept), ("fresh", fresh)):
        first = site_step(made, 1, "y", None, down)
        before = bits(first.state)
        results[name] = first, site_step(made, 2, "y", first.state, down)
        assert bits(first.state) == before
    assert bits(results["kept"][0].reply) == bits(results["fresh"][0].reply), (
        "the first round is the same"
    )
    assert bits(results["kept"][1].reply) != bits(results["fresh"][1].reply)
    memory = results["kept"][1].state["optimizers"]
    assert len(memory) == calls
    assert all("momentum_buffer" in part for state in memory.values() for part in state.values())
    assert "optimizers" not in results["fresh"][1].state
    score_site(kept, 2, "y", results["kept"][1].state, down, ["test"])


def test_fednova_takes_new_optimisers_only() -> None:
    with pytest.raises(
        InputError, match="--keep-optimizer with method 'fednova'; .*; leave it out"
    ):
        federation("fednova", keep_optimizer=True)


@pytest.mark.parametrize("method", ["fedavg", "fedhelp", "fedcb", "fedprox", "fednova", "scaffold"])
def test_sites_count_the_same_where_the_run_says_so(method: str) -> None:
    options = {
        "fedcb": {"classifier": "trainable"},
        "fedhelp": {"lambda_j": 0, "large": "x", "large_network": ""},
    }
    made, even = (
        Federation(
            ToyBundle(),
            load(method, options.get(method, {})),
            run_record(method=method, site_weights=by),
        )
        for by in ("samples", "uniform")
    )
    server = made.method.init_server(made.host(0), made.networks.initial, {})
    down = made.method.broadcast(made.host(1), server, "x")
    replies = {name: site_step(made, 1, name, None, down).reply for name in ("x", "y")}
    results = [f.aggregate(1, server, replies)["weights"] for f in (made, even)]
    name = "0.weight"
    mean = (
        (replies["x"]["weights"][name] + replies["y"]["weights"][name]) / 2
        if "weights" in replies["x"]
        else None
    )
    if method == "scaffold":  # its own rule is the plain mean
        assert bits(results[0]) == bits(results[1])
        return
    assert bits(results[0]) != bits(results[1])
    if method in ("fedavg", "fedhelp", "fedcb", "fedprox"):
        torch.testing.assert_close(results[1][name], mean, rtol=0, atol=1e-7)


def test_pooling_methods_have_one_participant_with_everybodys_items() -> None:
    made = federation("central")
    assert made.participants == ["central"]
    assert made.names == ["x", "y", "z"]
    assert made.site("central", 1).train.ids == [f"train{i}" for i in range(12)]


def test_how_the_pool_was_split_is_no_matter_for_central() -> None:
    left = federation("central")
    right = federation("central", partition=parts(p=[11, 0, 4, 5, 6], q=[7, 1, 2, 3, 8, 9, 10]))
    results = []
    for made in (left, right):
        server = made.method.init_server(made.host(0), made.networks.initial, {})
        down = made.method.broadcast(made.host(1), server, "central")
        results.append(bits(site_step(made, 1, "central", None, down).reply))
    assert results[0] == results[1]


def test_a_site_may_be_called_central() -> None:
    made = federation(partition=parts(central=[0, 1], other=[2, 3]))
    assert made.site("central", 1).train.ids == ["train0", "train1"]


def test_the_pooled_section_has_all_items_also_those_of_no_site() -> None:
    made = federation(partition=parts(a=[1], b=[2]))
    assert made.pooled("test").ids == [f"test{i}" for i in range(12)]


def test_an_item_that_is_not_in_the_data_is_named() -> None:
    with pytest.raises(
        InputError, match=r"site 'b' has train item 'train99', which is not in the data \(2 such\)"
    ):
        federation(partition=parts(a=[1], b=[2, 99, 98]))


def test_a_task_that_the_method_does_not_support_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class OnlySegmentation(type(load("fedavg"))):
        tasks = ("segmentation",)

    text = "method 'fedavg' on bundle 'toy', a classification task; it supports segmentation"
    with pytest.raises(InputError, match=text):
        Federation(ToyBundle(), OnlySegmentation(), run_record())


# Networks that differ between sites


def test_bodies_are_dealt_in_equal_blocks() -> None:
    """Twenty sites and three networks: 7, 7 and 6."""
    names = [f"s{i}" for i in range(20)]
    dealt = deal("18,20,22", names)
    assert [dealt[name] for name in names] == [
        {"network": n} for n in [18] * 7 + [20] * 7 + [22] * 6
    ]
    assert deal("width=[1, 2], [3, 4]", names[:2]) == {
        "s0": {"width": [1, 2]},
        "s1": {"width": [3, 4]},
    }
    assert deal("resnet20, resnet110,resnet20", names[:3]) == {
        "s0": {"network": "resnet20"}, "s1": {"network": "resnet110"}, "s2": {"network": "resnet20"}
    }  # fmt: skip
    assert deal("", names[:2]) == {"s0": {}, "s1": {}}


@pytest.mark.parametrize("spec", ["=3,4", "net=", "a,[b", "a,,b", "a,null"])
def test_what_is_no_list_of_bodies_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="bodies is VALUE,VALUE,... or ID=VALUE,VALUE,..."):
        deal(spec, ["s0", "s1", "s2"])


def test_more_bodies_than_sites_are_refused() -> None:
    with pytest.raises(InputError, match="bodies=a,b,c for 2 sites"):
        deal("a,b,c", ["s0", "s1"])


class Wide(ToyBundle):
    """A bundle with an id `width`."""

    def __init__(self, width: int | None = None) -> None:
        def network() -> nn.Module:
            return nn.Sequential(
                nn.Linear(8, width), nn.Identity(), nn.ReLU(), nn.Identity(), nn.Linear(width, 3)
            )

        super().__init__(**({} if width is None else {"network": network}))
        vars(self).update(width=width)

    def variant(self, config: dict) -> Wide:  # type: ignore[override]
        return Wide(**config)

    def optimizer(
        self, network: nn.Module, lr: float | None = None, epoch: int = 0
    ) -> torch.optim.Optimizer:
        assert isinstance(network[1], nn.Identity) == (self.width is not None), (
            "the optimiser of another bundle"
        )
        return super().optimizer(network, lr)


def mixed(method: str, **options: object) -> Federation:
    return Federation(Wide(), load(method, options), run_record(config={"image_size": 8}))


def test_sites_have_networks_and_optimisers_of_their_own() -> None:
    made = mixed("fedproto", bodies="width=5,7")
    widths = {name: made.site(name, 1).network()[0].out_features for name in made.names}
    assert widths == {"x": 5, "y": 5, "z": 7}
    sites = {name: made.site(name, 1) for name in made.names}
    assert sites["x"].networks is sites["y"].networks
    assert sites["x"].networks is not sites["z"].networks
    for site in sites.values():
        assert site.common is made.networks is made.host(1).networks
        assert bits(snapshot(site.network())) == bits(dict(site.initial_weights))
        site.settings.optimizer(site.network())
    assert made._architectures["z"].bundle.width == 7
    assert made.networks.fresh()[0].out_features == 6
    same = Federation(Wide(), load("fedproto"), run_record())
    assert all(same.site(name, 1).networks is same.networks for name in same.names)


def test_one_scope_takes_back_what_any_pool_lent() -> None:
    made = mixed("local", bodies="width=5,7")
    site, lent = made.site("z", 1), []
    for _ in range(2):
        with made.scope():
            lent.append((site.model(site.initial_weights), site.common.lease(site.common.initial)))
    assert lent[0][0] is lent[1][0]
    assert lent[0][1] is lent[1][1]


def test_what_leaves_is_checked_for_each_site() -> None:
    """The sites' networks have 4 tensors, the bundle's 9; what leaves is personal neither here nor there."""
    assert (
        mixed("local", bodies="width=5,7").describe_exchange()
        == "0 tensors leave each site, 4 stay"
    )

    @dataclasses.dataclass(frozen=True)
    class Shared(type(load("local"))):
        def personal_names(self, network: nn.Module) -> frozenset[str]:
            personal = {"4.bias"} if network[0].out_features == 7 else set()
            return frozenset(network.state_dict()) - {"4.bias"} | personal

    made = Federation(Wide(), Shared(bodies="width=5,5,7"), run_record())
    with pytest.raises(RunError, match="site 'z': tensor 'control/4.bias' must not leave it"):
        made.message_rules("z").check_reply(Message({"control": {"4.bias": torch.zeros(3)}}))
    assert made.describe_exchange() == "0 to 1 tensors leave each site, 3 to 4 stay"
    reply = Message({"weights": {"4.bias": torch.zeros(3)}})
    made.message_rules("x").check_reply(reply)
    with pytest.raises(RunError, match="site 'z': tensor 'weights/4.bias' must not leave it"):
        made.message_rules("z").check_reply(reply)
    with pytest.raises(
        RunError, match=r"site 'x': 'weights/4.bias' is \(5,\) torch.float32; expected \(3,\)"
    ):
        made.message_rules("x").check_reply(Message({"weights": {"4.bias": torch.zeros(5)}}))


def test_features_of_other_lengths_are_refused_before_round_1() -> None:
    made = mixed("pfedpm", bodies="width=5,7")
    introductions = {name: introduce(made, name) for name in made.names}
    with pytest.raises(InputError, match="features of length 5 at x, y; length 7 at z"):
        made.method.init_server(made.host(0), made.networks.initial, introductions)
    alike = mixed("pfedpm", bodies="width=5,7", feature_size=4)
    introductions = {name: introduce(alike, name) for name in alike.names}
    assert {m.scalars["features"] for m in introductions.values()} == {4}
    alike.method.init_server(alike.host(0), alike.networks.initial, introductions)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("data") / "phantom", per_class=20, size=28
    )


def run(
    phantom: Path, out: Path, method: str, jobs: int = 1, rounds: int = 2, **options: object
) -> dict:
    requested = {
        "method": method, "data": str(phantom), "sites": 3, "partition": "iid", "rounds": rounds, "local_epochs": 1,
        "batch_size": 8, "lr": 0.01,
    }  # fmt: skip
    config = {"network": "small_cnn", "image_size": 28}
    return federate(
        "pneumonia", options=options, config=config, requested=requested, out=out, jobs=jobs
    )


@pytest.mark.slow
def test_a_run_whose_sites_have_other_networks(phantom: Path, tmp_path: Path) -> None:
    """Features of one length; each site's weights are its own network's; workers change nothing."""
    options = {"bodies": "small_cnn,resnet8", "feature_size": 16, "predict": "relation"}
    with pytest.raises(InputError, match="network 'resnet8'; the networks are .*resnet20"):
        run(phantom, tmp_path / "none", "pfedpm", **options)
    assert not (tmp_path / "none").exists()
    options["bodies"] = "small_cnn,resnet20"
    alone, helped = (
        run(phantom, tmp_path / f"jobs{jobs}", "pfedpm", jobs, **options) for jobs in (1, 2)
    )
    assert alone["weights_sha256"] == helped["weights_sha256"]
    weights = load_weights(tmp_path / "jobs1" / "weights.safetensors")
    shapes = {
        name: weights[f"{name}/network.fc.0.weight"].shape
        for name in ("site-1", "site-2", "site-3")
    }
    assert shapes == {"site-1": (16, 72), "site-2": (16, 72), "site-3": (16, 64)}
    assert not any(name.startswith("site-1/network.stages") for name in weights)
    assert all(math.isfinite(value) for value in alone["last"].values())
    with pytest.raises(
        InputError, match="features of length 64 at site-3; length 72 at site-1, site-2"
    ):
        run(phantom, tmp_path / "unlike", "fedproto", bodies="small_cnn,resnet20")


# Cohorts


def test_everybody_takes_part_by_default() -> None:
    assert federation().cohort(1) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.1, 1), (0.34, 3), (0.5, 5), (0.99, 9), (0.01, 1)]
)
def test_a_cohort_is_a_fixed_number_without_repeats(fraction: float, count: int) -> None:
    made = federation(partition=parts(**{f"s{i}": [i] for i in range(10)}), cohort=fraction)
    drawn = [made.cohort(round_) for round_ in range(1, 60)]
    assert all(len(set(cohort)) == len(cohort) == count for cohort in drawn)
    assert {name for cohort in drawn for name in cohort} == set(made.names)
    assert len({tuple(cohort) for cohort in drawn}) > 1
    assert drawn == [made.cohort(round_) for round_ in range(1, 60)]


def test_cohorts_depend_on_the_seed() -> None:
    sites = parts(**{f"s{i}": [i] for i in range(10)})
    left, right = (federation(partition=sites, cohort=0.5, seed=seed) for seed in (0, 1))
    assert [left.cohort(i) for i in range(9)] != [right.cohort(i) for i in range(9)]


# What may leave


def test_the_policy_counts_tensors() -> None:
    assert federation().describe_exchange() == "9 tensors leave each site, 0 stay"
    assert federation("fedbn").describe_exchange() == "4 tensors leave each site, 5 stay"
    assert federation("local").describe_exchange() == "0 tensors leave each site, 9 stay"
    said = "9 tensors of the network leave each site, 0 stay; besides them leave: control"
    assert federation("scaffold").describe_exchange() == said


def test_replies_are_held_to_the_policy() -> None:
    made = federation("fedbn")
    weights = {name: t for name, t in made.networks.initial.items() if not name.startswith("1.")}
    made.message_rules("x").check_reply(Message({"weights": weights}, {"samples": 1}))
    wrong = [
        (
            {**weights, "1.running_mean": torch.zeros(6)},
            "tensor 'weights/1.running_mean' must not leave it",
        ),
        ({**weights, "secret": torch.zeros(1)}, "tensor 'weights/secret' must not leave it"),
        (
            {**weights, "0.bias": torch.zeros(7)},
            r"'weights/0.bias' is \(7,\) torch.float32; expected \(6,\)",
        ),
        (
            {**weights, "0.bias": torch.zeros(6).double()},
            r"'weights/0.bias' is \(6,\) torch.float64",
        ),
        (
            {**weights, "0.bias": torch.full((6,), torch.nan)},
            "'weights/0.bias' has NaN or infinite",
        ),
    ]
    for tensors, text in wrong:
        with pytest.raises(RunError, match=f"site 'x': {text}"):
            made.message_rules("x").check_reply(Message({"weights": tensors}))
    for group in ("control", "features", "scalars"):
        hidden = torch.zeros(() if group == "scalars" else 6)
        with pytest.raises(RunError, match=f"site 'x': tensor '{group}/1.bias' must not leave it"):
            made.message_rules("x").check_reply(Message.from_flat({f"{group}/1.bias": hidden}))
    with pytest.raises(
        RunError, match="'control/0.bias' is in a group that the method's .* does not declare"
    ):
        made.message_rules("x").check_reply(Message({"control": {"0.bias": torch.zeros(6)}}))
    with pytest.raises(RunError, match="'scalars/samples' has NaN"):
        made.message_rules("x").check_reply(Message({}, {"samples": float("nan")}))


def test_groups_of_the_networks_form_are_held_to_it() -> None:
    made = federation("scaffold")
    with pytest.raises(RunError, match="'control/c' is no tensor of the network"):
        made.message_rules("x").check_reply(Message({"control": {"c": torch.zeros(6)}}))
    with pytest.raises(
        RunError, match=r"'control/0.bias' is \(7,\) torch.float32; expected \(6,\)"
    ):
        made.message_rules("x").check_reply(Message({"control": {"0.bias": torch.zeros(7)}}))
    with pytest.raises(RunError, match="'control/0.bias' has NaN"):
        made.message_rules("x").check_reply(
            Message({"control": {"0.bias": torch.full((6,), torch.inf)}})
        )


def test_a_method_that_sends_what_is_personal_is_stopped() -> None:
    class Leaky(type(load("fedbn"))):
        def local_update(self, site, state, down):
            state, reply = super().local_update(site, state, down)
            return state, Message(
                {"weights": {**reply["weights"], **state["weights"]}}, reply.scalars
            )

    made = Federation(ToyBundle(), Leaky(), run_record())
    server = made.method.init_server(made.host(0), made.networks.initial, {})
    with pytest.raises(RunError, match=r"site 'z': tensor 'weights/1\.\w+' must not leave it"):
        site_step(made, 1, "z", None, made.method.broadcast(made.host(1), server, "z"))


# Steps


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_step_gives_state_reply_loss_and_scores(method: str) -> None:
    made = federation(method, local_epochs=2, batch_size=2)
    server = made.method.init_server(
        made.host(0), made.networks.initial, {"x": introduce(made, "x")}
    )
    down = made.method.broadcast(made.host(1), server, "y")
    result = site_step(made, 1, "y", None, down, ("validate",))
    assert result.steps == (
        12 if method == "ditto" else 6
    )  # five items in batches of two, twice, for each network
    assert result.loss > 0
    assert result.cases["validate"].ids == tuple(f"validate{i}" for i in PARTS["y"])
    assert bits([result.state, result.reply]) == bits(
        [(r := site_step(made, 1, "y", None, down)).state, r.reply]
    )
    assert r.cases == {}
    next_round = site_step(made, 2, "y", result.state, down)
    assert bits(next_round.reply) != bits(result.reply)


def test_judging_trains_nothing_and_uses_the_sites_own_model() -> None:
    made = federation("local")
    state = site_step(made, 1, "x", None, Message()).state
    kept = bits(state)
    before, after = (
        score_site(made, 2, "x", s, Message(), ("validate", "test")) for s in (None, state)
    )
    assert set(after) == {"validate", "test"}
    assert bits(after["test"].values) != bits(before["test"].values)
    assert bits(state) == kept
    assert bits(copy_site_weights(made, 2, "x", state, Message())) == bits(state["weights"])
    assert bits(copy_site_weights(made, 2, "x", None, Message())) == bits(made.networks.initial)


def test_global_scores_in_parts_are_those_of_the_whole() -> None:
    made = federation()
    server = made.method.init_server(made.host(0), made.networks.initial, {})
    whole = ScoreGlobal(1, server, "test", 0, 1024).run(made)
    assert len(whole) == 12
    halves = [ScoreGlobal(1, server, "test", i, i + 6).run(made) for i in (0, 6)]
    assert halves[0].ids + halves[1].ids == whole.ids
    joined = torch.cat([part.values["probabilities"] for part in halves])
    torch.testing.assert_close(joined, whole.values["probabilities"])
    assert ScoreGlobal(1, {"weights": {}}, "test", 0, 6).run(federation("local")) is None


class Twice(nn.Module):
    """A layer that is used twice, under one name or under two."""

    def __init__(self, two_names: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        if two_names:
            self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        logits: Tensor = self.head(getattr(self, "second", self.first)(x))
        return logits


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("scaffold", {"server_lr": 0.5}),
        ("feddyn", {"alpha": 1.0}),
        ("feddc", {"alpha": 1.0}),
        ("fednova", {}),
    ],
)
def test_a_shared_layer_is_corrected_under_all_its_names(
    method: str, options: dict[str, float], tmp_path: Path
) -> None:
    """Under its second name, which a network loads last, it would be as it was."""
    final = []
    for two_names in (False, True):
        bundle = ToyBundle(network=partial(Twice, two_names))
        record = run_record(method=method, rounds=2)
        folder = RunFolder.create(tmp_path / f"{two_names}")
        folder.write_run(record, {})
        Simulator(Execution(Federation(bundle, load(method, options), record), folder)).execute()
        final.append(load_weights(folder.path / "weights.safetensors"))
    one, two = final
    assert two.keys() - one.keys() == {"second.weight", "second.bias"}
    assert bits({name: two[name] for name in one}) == bits(one)
    assert bits(two["second.weight"]) == bits(one["first.weight"])
