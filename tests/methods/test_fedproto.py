"""FedProto against its equations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.prototype_exchange import distances
from medfl.methods._parts.prototypes import collect
from medfl.methods.fedproto import nearest
from medfl.networks.heads import features_and_output
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, judged, sgd, simulate

METHOD = load("fedproto")
CLASSES = Task("classification", ("p", "q", "r"))


class Scaled(nn.Module):
    """Feature s * x, then a linear layer that starts at 0 (and has no say: the tests' loss is 0)."""

    def __init__(self, d: int = 2) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(d, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scale * x)


def nothing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0 * output.sum()


def table(prototypes: dict) -> dict:
    return {c: value.tolist() for c, value in prototypes.items()}


def test_two_rounds_by_hand() -> None:
    """Feature h = s x, s = 1, rate 0.5, lambda = 2, no other loss. a: x = (1, 1), class 0. b: (3, 1) class 0, (2, 0)
    class 1.

    Round 1: no prototypes, nothing moves. Replies (1, 1); (3, 1) and (2, 0). Server: C_0 = (2, 1), C_1 = (2, 0).
    Round 2, a: l = 2 mean((h - C)^2) = (s - 2)^2 + (s - 1)^2, derivative at 1: -2; s = 2. Reply (2, 2).
    b: l = 2 * mean over 2 items and 2 entries = 1/2 [(3s - 2)^2 + (s - 1)^2 + (2s - 2)^2 + 0], derivative at 1: 3;
    s = -0.5. Replies (-1.5, -0.5) and (-1, 0). Server: C_0 = (0.25, 0.75), C_1 = (-1, 0).
    """
    data = {
        "a": (torch.tensor([[1.0, 1]]), torch.tensor([0])),
        "b": (torch.tensor([[3.0, 1], [2, 0]]), torch.tensor([0, 1])),
    }
    toy = Toy(data, Scaled, nothing, sgd(0.5))
    method = load("fedproto", lam=2.0)
    first, second = (simulate(method, toy, rounds) for rounds in (1, 2))
    assert table(first.server["prototypes"]) == {"0": [2, 1], "1": [2, 0]}
    assert [second.states[name]["weights"]["scale"].item() for name in "ab"] == [2, -0.5]
    assert table(second.server["prototypes"]) == {"0": [0.25, 0.75], "1": [-1, 0]}


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_lambda_zero_is_local_training_bit_for_bit(classes: Toy, settings: dict) -> None:
    """Check 1; the models, and what the classifier is judged by."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    method, local = load("fedproto", lam=0.0, predict="classifier"), load("local")
    shared, alone = simulate(method, toy, 3), simulate(local, toy, 3)
    for name in toy.names:
        assert bits(shared.states[name]["weights"]) == bits(alone.states[name]["weights"])
        assert bits(judged(method, toy, shared, name)) == bits(judged(local, toy, alone, name))
    pulled = simulate(METHOD, toy, 2)
    assert bits(pulled.states) != bits(simulate(local, toy, 2).states)


def replies(counts: dict[str, int], values: dict[str, float]) -> dict[str, Message]:
    return {
        name: Message(
            {"prototypes": {"1": torch.tensor([values[name]])}, "counts": {"1": torch.tensor(n)}}
        )
        for name, n in counts.items()
    }


def test_the_server_takes_the_plain_mean_over_owners(classes: Toy) -> None:
    """Check 2: (1 + 5) / 2 = 3, by samples (3 * 1 + 5) / 4 = 2; with equal counts both are 3. Never divided again."""
    by_samples = load("fedproto", weights="samples")
    for counts, expected in (({"a": 3, "b": 1}, 2), ({"a": 2, "b": 2}, 3)):
        sent = replies(counts, {"a": 1, "b": 5})
        plain, weighted = (
            m.aggregate(classes.host(), {"prototypes": {}}, sent, 3) for m in (METHOD, by_samples)
        )
        assert table(plain["prototypes"]) == {"1": [3]}
        assert table(weighted["prototypes"]) == {"1": [expected]}
    same = METHOD.aggregate(
        classes.host(), {"prototypes": {}}, replies({"a": 1, "b": 9}, {"a": 7, "b": 7}), 3
    )
    assert table(same["prototypes"]) == {"1": [7]}


def test_the_gradient_of_the_pull() -> None:
    """Check 3: d/dh = lambda 2 (h - g_y) / (B d), seen at the scale s as the sum of that times x."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 2, 1, 0])
    prototypes = {str(c): torch.randn(4, generator=generator) for c in (0, 1)}
    toy = Toy({"a": (x, y)}, lambda: Scaled(4), nothing, sgd(1.0))
    with toy.networks.scope():
        site = toy.site("a")
        state, _ = load("fedproto", lam=0.7).local_update(
            site, METHOD.init_site(site), Message({"prototypes": prototypes})
        )
    owned = y < 2  # class 2 has no prototype: no pull
    target = torch.stack([prototypes[str(int(c))] for c in y[owned]])
    gradient = (0.7 * 2 * (x[owned] - target) / (5 * 4) * x[owned]).sum()
    torch.testing.assert_close(1 - state["weights"]["scale"], gradient)


def test_the_upload_is_own_classes_times_d() -> None:
    """Check 4: |C_i| d floats; 20 sites of 4 classes with d = 50 send 4,000."""
    generator, data = torch.Generator().manual_seed(0), {}
    for i in range(20):
        own = torch.randperm(10, generator=generator)[:4]
        data[f"site{i:02}"] = (torch.randn(8, 6, generator=generator), own.repeat(2))
    network = lambda: nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 10))  # noqa: E731
    outcome = simulate(METHOD, Toy(data, network, cross_entropy))
    sent = {
        name: sum(t.numel() for t in reply.flat().values())
        for name, reply in outcome.replies.items()
    }
    assert set(sent.values()) == {200}
    assert sum(sent.values()) == 4000
    assert outcome.server["prototypes"].keys() <= {str(c) for c in range(10)}
    assert all(set(message.tensors) <= {"prototypes"} for message in outcome.down.values())


def test_replies_are_the_trained_models_class_means(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2)
    for name in classes.names:
        with classes.networks.scope():
            model = classes.networks.lease(outcome.states[name]["weights"])
            means, _ = collect(model, classes.site(name).train, 4, 3, torch.device("cpu"))
        for c, sent in outcome.replies[name]["prototypes"].items():
            assert bits(sent) == bits(means[int(c)])


def test_a_class_without_a_present_owner_keeps_its_prototype() -> None:
    toy = Toy(blobs({"a": 4, "b": 4}, labels={"a": (0,), "b": (1,)}), classifier(), cross_entropy)
    outcome = simulate(METHOD, toy, 2, [["a", "b"], ["b"]])
    first, second = (server["prototypes"] for server in outcome.history[1:])
    assert set(first) == set(second) == {"0", "1"}
    assert bits(first["0"]) == bits(second["0"])
    assert bits(first["1"]) != bits(second["1"])
    assert bits(outcome.states["a"]) == bits(simulate(METHOD, toy, 1).states["a"])


def test_nearest_by_hand() -> None:
    """Feature (1, 1): mean squares to (1, 3), (1, 1), (0, 0) are 2, 0, 1; class 1 is not the site's."""
    network = nn.Sequential(nn.Identity(), nn.Linear(2, 3))
    prototypes = torch.tensor([[1.0, 3], [1, 1], [0, 0]])
    x = torch.ones(1, 2)
    logits = nearest(network, prototypes, torch.tensor([True, False, True]))(x)
    assert logits.tolist() == [[-2, -32, -1]]


def test_a_site_is_judged_by_the_nearest_prototype_of_its_own_classes() -> None:
    data = blobs({"a": 8, "b": 9}, labels={"a": (0, 2)})
    toy = Toy(data, classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4)
    outcome = simulate(METHOD, toy, 2)
    x = data["b"][0]
    for name, allowed in (("a", [0, 2]), ("b", [0, 1, 2])):
        with toy.networks.scope():
            site = toy.site(name)
            down = METHOD.broadcast(toy.host(), outcome.server, name)
            network = METHOD.predictor(site, outcome.states[name], down).eval()
            plain = site.model(outcome.states[name]["weights"]).eval()
            with torch.no_grad():
                got, (values, _) = network(x).argmax(1), features_and_output(plain, x)
            by_classifier = (
                load("fedproto", predict="classifier")
                .predictor(site, outcome.states[name], down)
                .eval()
            )
            assert torch.equal(by_classifier(x), plain(x))
        far = torch.stack(
            [(values - outcome.server["prototypes"][str(c)]).square().mean(1) for c in allowed], 1
        )
        assert got.tolist() == [allowed[i] for i in far.argmin(1).tolist()]
    with toy.networks.scope():
        assert METHOD.global_predictor(toy.host(), outcome.server) is None


def test_a_network_with_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(InputError, match="each of the 3 classes"):
        METHOD.adapt(nn.Linear(4, 1), CLASSES)
    with pytest.raises(InputError, match="'0' is Conv2d"):
        METHOD.adapt(nn.Sequential(nn.Conv2d(1, 3, 1)), CLASSES)


def test_distances_to_prototypes_by_hand() -> None:
    """Prototypes 0: (0, 0), 1: (3, 4), 2: (0, 1). Site a has means of 0 at (0, 0) and of 1 at (3, 0), b of 2 at (0, 1).

    Own: 0, 4 and 0, mean 4/3. Others at the site: a0-1: 5, a1-0: 3, mean 4. Missing: a0-2: 1, a1-2: sqrt(9 + 1),
    b2-0: 1, b2-1: sqrt(9 + 9).
    """
    prototypes = {"0": torch.zeros(2), "1": torch.tensor([3.0, 4.0]), "2": torch.tensor([0.0, 1.0])}
    replies = {
        "b": Message({"prototypes": {"2": torch.tensor([0.0, 1.0])}}),
        "a": Message({"prototypes": {"0": torch.zeros(2), "1": torch.tensor([3.0, 0.0])}}),
        "c": Message({}, {"samples": 3}),
    }
    found = distances(prototypes, replies)
    assert found["own class"] == pytest.approx(4 / 3)
    assert found["other classes of the site"] == pytest.approx(4)
    assert found["classes missing at the site"] == pytest.approx((1 + 10**0.5 + 1 + 18**0.5) / 4)
    assert load("fedproto").observed({"prototypes": prototypes}, replies) == found
    assert distances({}, replies) == {}
