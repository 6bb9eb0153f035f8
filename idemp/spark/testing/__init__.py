"""For your own tests of pipelines: a session that starts fast, faults on purpose, clusters and a Kafka on one machine.

>>> from idemp.spark.testing import Fault
>>> Fault("kill", "after commit", partition=0).how
'kill'

Needs `idemp[spark,testing]`; the mock Kafka needs confluent-kafka, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from idemp.spark.testing.checkpoints import lose_checkpoint, replay_last_batch
    from idemp.spark.testing.clusters import SPECULATION, standalone
    from idemp.spark.testing.drivers import Ended, run_driver
    from idemp.spark.testing.faults import fired_in, inject
    from idemp.spark.testing.kafka import MockKafka, mock_kafka
    from idemp.spark.testing.plans import Fault, Fired, Place
    from idemp.spark.testing.sessions import local_session

# Each is imported at its first use, so that one can be had without what another needs.
_LAZY = {
    "SPECULATION": "clusters",
    "Ended": "drivers",
    "Fault": "plans",
    "Fired": "plans",
    "MockKafka": "kafka",
    "Place": "plans",
    "fired_in": "faults",
    "inject": "faults",
    "local_session": "sessions",
    "lose_checkpoint": "checkpoints",
    "mock_kafka": "kafka",
    "replay_last_batch": "checkpoints",
    "run_driver": "drivers",
    "standalone": "clusters",
}

__all__ = [
    "SPECULATION",
    "Ended",
    "Fault",
    "Fired",
    "MockKafka",
    "Place",
    "fired_in",
    "inject",
    "local_session",
    "lose_checkpoint",
    "mock_kafka",
    "replay_last_batch",
    "run_driver",
    "standalone",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("idemp"):
            raise
        raise ConfigurationError(f"{name} needs {error.name}.", fix="pip install 'idemp[spark,testing]'") from error
