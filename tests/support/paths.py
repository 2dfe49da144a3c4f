"""Where material lies that is not part of the repository: beside it."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared"
"""Real bundles of the public zoo, real images and other people's losses; tests skip where it is absent."""
