"""Django: the inbox in its transactions, handlers on its connection, migrations, a command, and dead letters in the admin.

Add `"idemp.integrations.django"` to INSTALLED_APPS.
"""

from __future__ import annotations

from idemp.errors import needs

with needs("django"):
    from idemp.integrations.django.bridge import AtomicRolledBack, on_django, url_of
    from idemp.integrations.django.inbox import DjangoInbox

__all__ = ["AtomicRolledBack", "DjangoInbox", "on_django", "url_of"]
