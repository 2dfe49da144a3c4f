"""Write the hashes of the shipped bundles, by which medfl knows that nobody has changed them since.

python tools/shipped.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "medfl" / "bundle" / "shipped.json"

sys.path.insert(0, str(ROOT))
from medfl.bundle.files import content_sha256, shipped_folders  # noqa: E402 (it lies beside this folder)


def main() -> None:
    """Write the file."""
    hashes = {name: content_sha256(folder) for name, folder in shipped_folders().items()}
    FILE.write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
