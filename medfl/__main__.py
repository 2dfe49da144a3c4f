"""`python -m medfl`."""

from __future__ import annotations

import sys

from medfl.cli import main

sys.exit(main())
