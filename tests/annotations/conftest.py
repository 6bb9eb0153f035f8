"""The subject is read by type checkers, never imported."""

from __future__ import annotations

collect_ignore = ["handlers.py"]
