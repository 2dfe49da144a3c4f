"""Models that label public images: language-image models, MedSAM, trained runs."""
