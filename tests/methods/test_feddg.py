"""FedDG's exchange of amplitudes against NumPy's Fourier transform, and what leaves a site."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from medfl.core.errors import InputError
from medfl.methods import load
from medfl.methods.feddg import mean_amplitude, mixed
from tests.support.toy import Toy, bits, cross_entropy, sgd, simulate


def images(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def block(size: int, frequencies: int) -> slice:
    """Return the middle of an axis after fftshift."""
    return slice(size // 2 - frequencies, size // 2 + frequencies + 1)


@pytest.mark.parametrize("frequencies", [0, 1, 2])
@pytest.mark.parametrize("space", [(8, 8), (7, 10), (6, 5, 9)])
def test_mixed_images_are_those_of_numpy(space: tuple[int, ...], frequencies: int) -> None:
    """Shifted, as the paper's code has it, its block in the middle; real part of the inverse."""
    x = images((3, 2, *space))
    target = images((3, 2, *[2 * frequencies + 1] * len(space)), 1).abs()
    degree = torch.tensor([0.0, 0.3, 1.0]).double()
    axes = tuple(range(2, x.ndim))
    spectrum = np.fft.fftn(x.numpy(), axes=axes) / np.prod(space)
    amplitude, phase = np.fft.fftshift(np.abs(spectrum), axes), np.angle(spectrum)
    middle = (slice(None), slice(None), *(block(size, frequencies) for size in space))
    part = degree.numpy().reshape(3, *[1] * (x.ndim - 1))
    amplitude[middle] = (1 - part) * amplitude[middle] + part * target.numpy()
    expected = np.fft.ifftn(np.fft.ifftshift(amplitude, axes) * np.exp(1j * phase), axes=axes)

    found = mixed(x.clone(), target, degree, frequencies)
    np.testing.assert_allclose(found, expected.real * np.prod(space), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[0], x[0], rtol=0, atol=1e-12)


def test_brightness_is_taken_over_and_structure_stays() -> None:
    """With `frequencies` 0 the block is the mean of an image, its amplitude how bright it is."""
    x = images((1, 1, 8, 8)) + 5
    bright = mixed(x.clone(), torch.full((1, 1, 1, 1), 9.0).double(), torch.ones(1).double(), 0)
    torch.testing.assert_close(bright - bright.mean(), x - x.mean())
    assert bright.mean().item() == pytest.approx(9)


def picture_sites(counts: dict[str, int], size: int = 8) -> Toy:
    data = {}
    for seed, (name, count) in enumerate(counts.items()):
        x = images((count, 2, size, size), seed).float() + 3 * seed
        data[name] = (x, torch.arange(count) % 3)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
        )

    return Toy(data, network, cross_entropy, sgd(0.1), batch_size=4)


def test_a_site_sends_one_mean_of_few_numbers_and_gets_the_others() -> None:
    toy = picture_sites({"a": 6, "b": 5, "c": 7})
    outcome = simulate(load("feddg"), toy, 2)
    for name in toy.names:
        sent = outcome.replies[name]["amplitude"]
        assert {key: tuple(mean.shape) for key, mean in sent.items()} == {"mean": (2, 3, 3)}
        spectra = np.abs(np.fft.fftn(toy.data[name][0].double().numpy(), axes=(2, 3))) / 64
        expected = np.fft.fftshift(spectra.mean(0), (1, 2))[:, 3:6, 3:6]
        np.testing.assert_allclose(sent["mean"], expected, rtol=1e-5, atol=1e-6)
        others = [other for other in toy.names if other != name]
        received = outcome.down[name]["amplitudes"]
        assert bits(list(received.values())) == bits(
            [outcome.replies[other]["amplitude"]["mean"] for other in others]
        )


def test_nothing_leaves_a_site_of_few_images() -> None:
    toy = picture_sites({"a": 6, "b": 4})
    outcome = simulate(load("feddg"), toy, 2)
    assert "amplitude" not in outcome.replies["b"]
    assert outcome.down["a"]["amplitudes"] == {}
    assert len(outcome.down["b"]["amplitudes"]) == 1
    assert outcome.states["b"] == {}


def test_without_changed_images_it_is_fedavg_bit_for_bit() -> None:
    toy = replace(picture_sites({"a": 6, "b": 9}), optimizer=sgd(0.1, momentum=0.9))
    neutral = simulate(load("feddg", probability=0), toy, 3)
    average = simulate(load("fedavg"), toy, 3)
    assert bits(neutral.server["weights"]) == bits(average.server["weights"])
    assert bits(neutral.replies) == bits(average.replies)
    changed = simulate(load("feddg"), toy, 3)
    assert bits(changed.server["weights"]) != bits(average.server["weights"])
    # in round 1 nobody knows another's look
    one = [simulate(load(name), toy, 1).server["weights"] for name in ("feddg", "fedavg")]
    assert bits(one[0]) == bits(one[1])


def test_images_too_small_for_the_block_are_refused() -> None:
    toy = picture_sites({"a": 6}, size=4)
    with pytest.raises(InputError, match="feddg at site 'a', whose batches are"):
        mean_amplitude(toy.site("a"), 2)
