"""CIFAR-100: small colour pictures of a hundred kinds of thing, in the batches that torchvision keeps."""

from dataclasses import replace
from functools import partial

from medfl.datasets import cifar10
from medfl.datasets.base import sheet
from medfl.datasets.phantoms.phantom import draw_stacks
from medfl.datasets.readers.stacks import CIFAR100, write_cifar

# The fine labels, which are in alphabetical order.
_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
    plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CLASSES = tuple(_NAMES.split())

DATASET = replace(
    cifar10.DATASET,
    **sheet("cifar100"),
    classes=CLASSES,
    concepts=tuple(name.replace("_", " ") for name in CLASSES),
    layouts=(cifar10.batches_layout(CIFAR100, len(CLASSES)),),
    draw=draw_stacks(len(CLASSES), 3, partial(write_cifar, CIFAR100)),
)
