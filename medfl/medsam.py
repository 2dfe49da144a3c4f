"""The names by which bundle files know MedSAM."""

from medfl.runs.teachers.medsam import BoxOfMaskd as BoxOfMaskd
from medfl.runs.teachers.medsam import load as load
