"""Fashion-MNIST: grey pictures of garments, in idx files like those of MNIST."""

from dataclasses import replace

from medfl.datasets import mnist
from medfl.datasets.base import sheet
from medfl.datasets.phantoms.phantom import draw_stacks

DATASET = replace(
    mnist.DATASET,
    **sheet("fmnist"),
    layouts=(mnist.idx_layout("FashionMNIST"),),
    draw=draw_stacks(10, 1, mnist.idx_writer("FashionMNIST")),
)
