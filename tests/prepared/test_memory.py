"""Prepared messages and barriers in memory keep the ports' promises."""

from __future__ import annotations

import pytest

from idemp.prepared import InMemoryBarrier, InMemoryHome
from idemp.testing import BarrierConformance, DecidingHomeConformance


class TestInMemoryHome(DecidingHomeConformance):
    @pytest.fixture
    def home(self) -> InMemoryHome:
        return InMemoryHome()


class TestInMemoryBarrier(BarrierConformance):
    @pytest.fixture
    def barrier(self) -> InMemoryBarrier:
        return InMemoryBarrier()
