"""Local: no federation."""

from __future__ import annotations

from dataclasses import replace

import torch

from medfl.core.message import Message
from medfl.methods import load
from medfl.runtimes.federation import Federation
from medfl.runtimes.step import site_step
from tests.support.toy import Toy, ToyBundle, bits, blobs, judged, run_record, sgd, simulate

METHOD = load("local")


def test_one_step_by_hand() -> None:
    """x = 2, y = 1, f(w) = (2 w - 1)^2 / 2, rate 0.1: from 0 by -2 to 0.2; then by (0.4 - 1) 2 = -1.2 to 0.32."""
    data = {name: (torch.full((1, 1), 2.0).double(), torch.ones(1).double()) for name in "ab"}
    toy = Toy(data, lambda: torch.nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.1))
    toy.networks.initial["weight"].zero_()
    for rounds, value in ((1, 0.2), (2, 0.32)):
        outcome = simulate(METHOD, toy, rounds)
        assert abs(outcome.states["a"]["weights"]["weight"].item() - value) < 1e-15


def test_it_is_fedavg_with_one_site_bit_for_bit(classes: Toy) -> None:
    toy = replace(classes, data={"b": classes.data["b"]}, optimizer=sgd(0.1, momentum=0.9))
    alone, averaged = simulate(METHOD, toy, 4), simulate(load("fedavg"), toy, 4)
    assert bits(alone.states["b"]["weights"]) == bits(averaged.server["weights"])
    assert bits(judged(METHOD, toy, alone, "b")) == bits(judged(load("fedavg"), toy, averaged, "b"))


def steps(method: str, cohort: float, **options: object) -> dict[str, list[int]]:
    """Return each site's optimiser updates in four rounds of two local epochs, 0 where it was not drawn."""
    federation = Federation(
        ToyBundle(), load(method, options), run_record(cohort=cohort, local_epochs=2, batch_size=2)
    )
    host, initial = federation.host(0), federation.networks.initial
    server = federation.method.init_server(host, initial, {})
    done: dict[str, list[int]] = {name: [] for name in federation.names}
    for round_ in range(1, 5):
        cohort_, down = federation.cohort(round_), federation.method.broadcast(host, server, "x")
        for name, counts in done.items():
            counts.append(
                site_step(federation, round_, name, None, down).steps if name in cohort_ else 0
            )
    return done


def test_every_site_takes_as_many_steps_as_in_fedavg() -> None:
    """Rounds x epochs x batches, with a cohort in the rounds for which a site is drawn; `everyone` always."""
    whole = {"x": [4] * 4, "y": [6] * 4, "z": [4] * 4}  # 3, 5 and 4 items in batches of 2, twice
    assert steps("local", 1.0) == steps("fedavg", 1.0) == whole
    assert steps("local", 0.67) == steps("fedavg", 0.67) != whole
    assert steps("local", 0.67, everyone=True) == whole


def test_the_others_data_and_number_are_no_matter(classes: Toy) -> None:
    whole = simulate(METHOD, classes, 3)
    fewer = simulate(METHOD, replace(classes, data={"b": classes.data["b"]}), 3)
    other = simulate(
        METHOD, replace(classes, data={**classes.data, "a": blobs({"a": 31}, seed=9)["a"]}), 3
    )
    for outcome in (fewer, other):
        assert bits(outcome.states["b"]) == bits(whole.states["b"])
    assert bits(other.states["a"]) != bits(whole.states["a"])


def test_nothing_is_sent_in_either_direction(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert message.num_bytes == 0
        assert bits(message) == bits(Message())
    assert not any(tensors for tensors in outcome.server.values())
    with classes.networks.scope():
        assert METHOD.global_predictor(classes.host(), outcome.server) is None
        assert METHOD.personal_names(classes.networks.fresh()) == set(classes.initial)


def test_every_site_starts_from_the_common_weights_and_is_judged_by_its_own(classes: Toy) -> None:
    before = simulate(METHOD, classes, 1, cohorts=[["a"]])
    assert bits(judged(METHOD, classes, before, "c")) == bits(classes.initial)
    assert bits(judged(METHOD, classes, before, "a")) == bits(before.states["a"]["weights"])
    assert bits(before.states["a"]["weights"]) != bits(classes.initial)
    assert METHOD.judged == "personal"


def test_statistics_of_batch_norm_stay_local(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2)
    means = [outcome.states[name]["weights"]["1.running_mean"] for name in classes.names]
    assert not torch.equal(means[0], means[1])
