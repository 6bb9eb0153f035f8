"""Processes that end in the middle of a handling, as far as the databases can tell."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Death(BaseException):
    """What such a process ends of."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, cls: type, method: str) -> Iterator[None]:
    """Whoever calls this method in the block dies of it."""

    def die(_: object) -> None:
        raise Death

    with monkeypatch.context() as patch:
        patch.setattr(cls, method, die)
        with pytest.raises(Death):
            yield
