"""Marks of tests whose other database is of one kind, since the question does not come up with the other one."""

from __future__ import annotations

from typing import Final

import pytest

ON_POSTGRESQL: Final = pytest.mark.parametrize("shop", ["postgresql"], indirect=True, scope="package")
ON_MARIADB: Final = pytest.mark.parametrize("shop", ["mariadb"], indirect=True, scope="package")
