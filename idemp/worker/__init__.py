"""The worker: one thread that consumes, one that sends what is due, one that shows life."""

from idemp.worker.loop import Worker

__all__ = ["Worker"]
