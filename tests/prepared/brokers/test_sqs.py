"""Prepared messages whose home is SQS alone, as Moto's server speaks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import ClassVar

import pytest

from idemp.prepared.sqs import SqsHome
from idemp.testing.prepared_conformance import PreparedHomeConformance
from tests.servers.documents import Moto, session

AT_ONCE = timedelta(0)


class TestConformance(PreparedHomeConformance):
    later: ClassVar[timedelta] = timedelta(minutes=15)

    @pytest.fixture
    def home(self, moto: Moto, unique_name: str) -> Iterator[SqsHome]:
        self.open = lambda: SqsHome(unique_name, session=session(), endpoint=moto.url, wait=AT_ONCE)
        with closing(self.open()) as home:
            home.verify()
            yield home

    def reopen(self, home: SqsHome) -> SqsHome:
        return self.open()
