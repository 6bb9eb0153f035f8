"""The storm on document stores at the suite's size."""

from __future__ import annotations

import pytest

from tests.servers.rabbitmq import RabbitMQ
from tests.storms.documents.storm import Storm, as_json

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("server", "fixture"), [("couchdb", "pouchdb"), ("dynamodb", "moto")])
def test_effects_once_and_outputs_of_the_run_that_counted_while_workers_die(
    server: str, fixture: str, own_rabbitmq: RabbitMQ, request: pytest.FixtureRequest
) -> None:
    """Two accounts for all, so that runs lose against one another, and leave orphans."""
    where = f"{server} {request.getfixturevalue(fixture).url}"
    report = Storm(where, own_rabbitmq, messages=100, seed=7).run(kills=5)
    assert report.promises_held, str(as_json(report))
    assert (report.kills, report.outputs_expected) == (5, 200)
    assert report.orphans_collected, "the collector was tried"
