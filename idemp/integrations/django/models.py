"""A model without a table of its own: the permissions for dead letters."""

from django.db import models


class DeadLetter(models.Model):
    """Dead letters, as permissions know them: `view` reads and explains, `change` replays, `delete` discards."""

    class Meta:
        """Options of Django."""

        managed = False
        default_permissions = ("view", "change", "delete")

    def __str__(self) -> str:
        return f"dead letter {self.pk}"
