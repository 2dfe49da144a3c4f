"""Models that answer about public images: language-image models, MedSAM, trained runs."""
