"""What can happen to a streaming query's checkpoint while the query is stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

from idemp.errors import ConfigurationError


def replay_last_batch(checkpoint: Path) -> int:
    """Have the query run its last micro-batch again when it is started: forget that it was committed.

    It is what a driver leaves behind that dies between the sink's work and its own note of it. Spark replays the last
    micro-batch only.

    Args:
        checkpoint: the query's `checkpointLocation`.

    Returns:
        The micro-batch's number.

    Raises:
        ConfigurationError: no micro-batch was committed there.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     commits = Path(folder, "commits")
        ...     commits.mkdir()
        ...     _ = [(commits / name).write_text("v1") for name in ("8", "9", "10", ".10.crc")]
        ...     replay_last_batch(Path(folder)), sorted(file.name for file in commits.iterdir())
        (10, ['8', '9'])
    """
    commits = checkpoint / "commits"
    numbers = [int(file.name) for file in commits.glob("[0-9]*") if file.name.isdigit()]
    if not numbers:
        raise ConfigurationError(
            f"No micro-batch was committed below {checkpoint}.", fix="Name the query's checkpointLocation."
        )
    last = max(numbers)
    (commits / f"{last}").unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)  # else Spark takes the new file for a broken one
    return last


def lose_checkpoint(checkpoint: Path) -> None:
    """Delete a query's checkpoint: started again, the query reads everything once more, under another query id.

    Raises:
        ConfigurationError: it is none; nothing was deleted.

    Example:
        >>> lose_checkpoint(Path("/no/such/folder"))
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: /no/such/folder is no checkpoint of a streaming query. ...
    """
    if not (checkpoint / "metadata").is_file() or not (checkpoint / "offsets").is_dir():
        raise ConfigurationError(
            f"{checkpoint} is no checkpoint of a streaming query.", fix="Name the query's checkpointLocation."
        )
    shutil.rmtree(checkpoint)
