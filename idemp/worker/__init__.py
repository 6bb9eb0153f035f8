"""The worker: one thread that consumes, one that sends what is due, one that shows life; an event loop for `async def`."""

from idemp.worker.shell import RelayProcess
from idemp.worker.worker import Worker

__all__ = ["RelayProcess", "Worker"]
