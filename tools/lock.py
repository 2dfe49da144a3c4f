"""Write docker/torch.txt and docker/requirements-cpu.txt: exact versions with hashes of what a server or a site needs.

    python tools/lock.py UV

PyTorch stands alone and without a hash, since its CPU build comes from another index with files of its own; its CUDA
libraries are left out. The versions hold for Linux and Python 3.10 to 3.13; no index is named.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("flare", "privacy", "encryption")
CUDA = re.compile(r"(nvidia-|cuda-|triton\b)")
HEAD = "# Written by `make lock` for medfl-monai[{extras}]; {what}\n"


def compiled(uv: str) -> list[str]:
    """Return uv's blocks: a requirement with its marker and the lines of hashes that belong to it."""
    asked = [option for extra in EXTRAS for option in ("--extra", extra)]
    options = [
        "--universal",
        "--python-version",
        "3.10",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
    ]
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-emit-index-url",
        *options,
        *asked,
        "pyproject.toml",
    ]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return re.split(r"\n(?=\S)", text.strip())


def main(uv: str) -> int:
    """Write both files and say how many packages they pin."""
    blocks = [block for block in compiled(uv) if not CUDA.match(block)]
    torch = [block.split(" \\")[0] for block in blocks if re.match(r"torch==", block)]
    others = [block for block in blocks if not re.match(r"torch==", block)]
    extras = ",".join(EXTRAS)
    folder = ROOT / "docker"
    (folder / "torch.txt").write_text(
        HEAD.format(extras=extras, what="the build is the index's") + "\n".join(torch) + "\n"
    )
    text = HEAD.format(extras=extras, what="PyTorch is in torch.txt") + "\n".join(others) + "\n"
    (folder / "requirements-cpu.txt").write_text(text)
    print(f"{len(others)} packages with hashes, {', '.join(torch)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
