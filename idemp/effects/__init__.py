"""Effects outside the database: mails, HTTP calls, whatever no transaction takes back.

A handler declares one by name, `ctx.effect("mail.receipt", value)`; it is stored with the handling's outputs, and after
COMMIT the consumer's workers run the function that is registered under that name, at least once, with the output's id as
idempotency key. Without a crash in between it runs once.

>>> from idemp import App, Context, Idempotent
>>> from idemp.effects import EffectRun
>>> app = App("orders", database="sqlite://", broker="local://orders.db")
>>> @app.effect("mail.receipt", max_attempts=10)
... def receipt(value: dict[str, str], run: EffectRun) -> None:
...     print(f"to {value['to']}, as {run.id}")
>>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="order_id"))
... def place(message: dict[str, str], ctx: Context) -> None:
...     ctx.effect("mail.receipt", {"to": message["mail"]})

`idemp.effects.smtp` sends mails, `idemp.effects.http` makes requests.
"""

from __future__ import annotations

from idemp.effects.declared import Effect, EffectRun
from idemp.effects.runner import EffectRound, EffectRunner
from idemp.errors import EffectLater, EffectRefused

__all__ = ["Effect", "EffectLater", "EffectRefused", "EffectRound", "EffectRun", "EffectRunner"]
