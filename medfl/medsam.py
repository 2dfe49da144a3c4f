"""The names by which bundle files know MedSAM."""

from medfl.runs.teachers.medsam import BoxOfMaskd as BoxOfMaskd, load as load
