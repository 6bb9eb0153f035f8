"""The archive: expired claims as Parquet, verified before anything is deleted; the guard made of it; and the way back.

Example:
    >>> from pathlib import Path
    >>> from idemp.spark.archive import Archive  # Archive(Path("/srv/archive")).runs()
"""

from __future__ import annotations

from idemp.spark.archive.folder import Archive, ArchiveDamaged, Manifest, Run
from idemp.spark.archive.lookup import asking

__all__ = ["Archive", "ArchiveDamaged", "Manifest", "Run", "asking"]
