"""Fashion-MNIST: grey pictures of garments, in idx files like those of MNIST."""

from dataclasses import replace

from medfl.datasets import mnist
from medfl.datasets.phantoms.phantom import draw_stacks

DATASET = replace(
    mnist.DATASET,
    name="fmnist",
    title="Fashion-MNIST: ten kinds of garment",
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    concepts=(
        "T-shirt",
        "trousers",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    folders=("fmnist", "FashionMNIST", "fashion-mnist"),
    layouts=(mnist.idx_layout("FashionMNIST"),),
    licence="MIT",
    source="https://github.com/zalandoresearch/fashion-mnist",
    citation="Xiao, Rasul, Vollgraf: Fashion-MNIST: a novel image dataset for benchmarking machine learning "
    "algorithms. arXiv:1708.07747 (2017)",
    draw=draw_stacks(10, 1, mnist.idx_writer("FashionMNIST")),
    downloads=mnist.idx_downloads(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        {
            "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
)
