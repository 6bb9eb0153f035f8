"""The Django app `idemp`."""

from django.apps import AppConfig


class IdempConfig(AppConfig):
    """Configuration of the app, which has migrations, the command `idemp`, and pages of the admin."""

    name, label = "idemp.integrations.django", "idemp"
    default_auto_field = "django.db.models.BigAutoField"
