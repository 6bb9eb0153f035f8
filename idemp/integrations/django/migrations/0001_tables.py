"""idemp's tables, by the revisions of its own migrations."""

from contextlib import closing
from typing import Any

from django.db import migrations, models

from idemp.integrations.django.bridge import open_database
from idemp.sql.schema import upgrade


def create_tables(_apps: Any, schema_editor: Any) -> None:
    """Create the tables, or upgrade them; on SQLite in two files."""
    with closing(open_database(schema_editor.connection.alias)) as database:
        upgrade(database)


class Migration(migrations.Migration):
    """Tables by connections of idemp's own, which take a lock; the model brings permissions alone."""

    atomic = False  # on SQLite a transaction here would have the only write lock
    operations = (
        migrations.RunPython(create_tables, migrations.RunPython.noop),
        migrations.CreateModel(
            "DeadLetter",
            fields=[("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"))],
            options={"managed": False, "base_manager_name": "objects", "default_permissions": ("view", "change", "delete")},
        ),
    )
