"""The worker: one thread that consumes, one that sends what is due, one that shows life; an event loop for `async def`."""

from idemp.app import App
from idemp.worker.loop import Worker

__all__ = ["Worker", "open_worker"]


def open_worker(app: App) -> Worker:
    """Return the worker that the handlers of an app need: with an event loop if any of them is `async def`.

    Raises:
        ConfigurationError: The app has no handlers, or a start-up check has a red finding.

    Example:
        >>> open_worker(App("orders"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the app 'orders' has no handlers: import the modules that define them
    """
    if not app.is_async:
        return Worker(app)
    from idemp.worker.aio import AsyncWorker

    return AsyncWorker(app)
