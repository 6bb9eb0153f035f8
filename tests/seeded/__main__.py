"""Check that every seeded fault still applies: its text occurs once."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.seeded.faults import FAULTS

ROOT = Path(__file__).parents[2]

stale = [fault for fault in FAULTS if (ROOT / "idemp" / fault.path).read_text().count(fault.old) != 1]
for fault in stale:
    print(f"idemp/{fault.path}: this does not occur once: {fault.old!r}")
sys.exit(bool(stale))
