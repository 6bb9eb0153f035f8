"""The cases of the conformance suites, one module for each part of a port.

Use them through `idemp.testing.store_conformance` and `idemp.testing.broker_conformance`.
"""

from __future__ import annotations

import pytest

# Before they are imported, so that a case that fails shows its values in the suites of third parties, too.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{part}"
        for part in (
            *("claims", "records", "relays", "retention", "identities", "instances"),
            *("publishing", "settling", "looking", "reopening"),
        )
    )
)
