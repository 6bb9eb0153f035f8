"""The app of the storm."""

from __future__ import annotations

import os

from tests.documents import open_database, shop

app, documents = shop(open_database(os.environ.get("IDEMP_TEST_DOCUMENTS", "couchdb http://localhost carts")))
