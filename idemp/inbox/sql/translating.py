"""What an exception of SQLAlchemy in a statement of idemp's own means for the delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from idemp.errors import StoreError, TransientStoreError
from idemp.inbox.sql import failures

if TYPE_CHECKING:
    from types import TracebackType

    from idemp.inbox.sql.places import Places


class Translated:
    """Around such statements: raises what their exceptions mean, and has places looked at anew that were not as remembered.

    Args:
        places: where the statements go.
    """

    def __init__(self, places: Places) -> None:
        self._places = places

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, exc.DBAPIError) and self._places.was_wrong(error):
            raise TransientStoreError(
                "The tables for this id are not as this worker remembered them; it looks, and the delivery runs again.",
                fix="If that goes on, run `idemp db partition CONSUMER` and `idemp doctor`.",
            ) from error
        if isinstance(error, exc.SQLAlchemyError):
            meaning = failures.translate(error) or failures.denied(error)
            if meaning is not None:
                raise meaning from error


class DeniedTold:
    """Around looks that a delivery needs: where the database denies this user one, no message is at fault."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cause = error.__cause__ if isinstance(error, StoreError) else None
        denied = failures.denied(cause) if isinstance(cause, exc.SQLAlchemyError) else None
        if denied is not None:
            raise denied from cause


DENIED_TOLD: Final = DeniedTold()
