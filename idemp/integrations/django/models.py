"""A model without a table of its own: the permissions for dead letters."""

from typing import Any

from django.db import models


class NoRows(models.Manager):
    """Finds nothing, so that `dumpdata` asks for no table."""

    def get_queryset(self) -> Any:
        """Return no rows."""
        return super().get_queryset().none()


class DeadLetter(models.Model):
    """Dead letters, as permissions know them: `view` reads and explains, `change` replays, `delete` discards."""

    objects = NoRows()

    class Meta:
        """Options of Django."""

        managed, base_manager_name = False, "objects"
        default_permissions = ("view", "change", "delete")

    def __str__(self) -> str:
        return f"dead letter {self.pk}"
