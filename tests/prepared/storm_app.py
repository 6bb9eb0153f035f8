"""What the relays of the storm load."""

from __future__ import annotations

import os

from tests.prepared import Shop

url, shop = (os.environ.get(name, "sqlite:///unused.db") for name in ("IDEMP_DATABASE_URL", "STORM_SHOP"))
app = Shop(url, shop, check_after=1).app
