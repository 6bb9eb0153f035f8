"""The cases that are run in full: a few in the suite, all of them by command."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from idemp.testing.simulation import Simulation

MINUTE = timedelta(minutes=1)
WINDOW = timedelta(hours=2)
_ALONE: dict[str, Any] = {"relays": 0, "purges": 0, "jumps": (), "crashes": 0}


def small(*, workers: int = 2) -> dict[str, Simulation]:
    """Those of the suite: the small case with everybody and every death, and some with more of one thing."""
    return {
        f"{workers} workers, a relay and a cleaner, a message once, a crash": Simulation(
            workers=workers, copies=1, jumps=(WINDOW,)
        ),
        "a worker and a relay, a message once, a crash": Simulation(workers=1, copies=1, purges=0, jumps=(MINUTE,)),
        f"{workers} workers, a message twice, a crash": Simulation(**{**_ALONE, "workers": workers, "crashes": 1}),
        f"{workers} workers, a message once, a crash and a fault, late claim": Simulation(
            **{**_ALONE, "workers": workers, "copies": 1, "crashes": 1, "faults": 1, "claim": "late", "batch": 1}
        ),
        "a worker and a cleaner, a message twice, a crash": Simulation(
            **{**_ALONE, "workers": 1, "purges": 1, "jumps": (WINDOW,), "crashes": 1}
        ),
        "a worker that does not wait for confirms, two messages, a crash and a fault": Simulation(
            **{**_ALONE, "workers": 1, "messages": 2, "copies": 1, "crashes": 1, "faults": 1, "window": 2}
        ),
        "a worker whose deliveries share a transaction, two messages, a crash and a fault": Simulation(
            **{**_ALONE, "workers": 1, "messages": 2, "copies": 1, "crashes": 1, "faults": 1, "together": 2}
        ),
        f"{workers} workers, a message once, the database fails once, a minute": Simulation(
            **{**_ALONE, "workers": workers, "copies": 1, "outages": 1, "jumps": (MINUTE,)}
        ),
        "a worker, a message once, a crash, and the database fails once, late claim": Simulation(
            **{**_ALONE, "workers": 1, "copies": 1, "crashes": 1, "outages": 1, "claim": "late"}
        ),
        "a worker and a relay, a message once, the database fails once": Simulation(
            **{**_ALONE, "workers": 1, "copies": 1, "relays": 1, "outages": 1}
        ),
        "a worker and a cleaner, a message once, the database fails once": Simulation(
            **{**_ALONE, "workers": 1, "copies": 1, "purges": 1, "jumps": (WINDOW,), "outages": 1}
        ),
        "a worker, a message twice, told to stop, a crash": Simulation(
            **{**_ALONE, "workers": 1, "crashes": 1, "stops": 1}
        ),
        "a worker that does not wait for confirms, two messages, told to stop, a fault": Simulation(
            **{**_ALONE, "workers": 1, "messages": 2, "copies": 1, "stops": 1, "faults": 1, "window": 2}
        ),
        "a worker whose deliveries share a transaction, two messages, told to stop, a crash": Simulation(
            **{**_ALONE, "workers": 1, "messages": 2, "copies": 1, "stops": 1, "crashes": 1, "together": 2}
        ),
        "a worker and a relay that stays dead, a message once, a fault": Simulation(
            **{**_ALONE, "workers": 1, "copies": 1, "relays": 1, "relay_returns": False, "crashes": 1, "faults": 1}
        ),
    }


def full(*, workers: int = 2) -> dict[str, Simulation]:
    """Those by command: larger ones, too."""
    return {
        **small(workers=workers),
        f"{workers} workers, a relay and a cleaner, a message once, a crash, a minute and two hours": Simulation(
            workers=workers, copies=1
        ),
        f"{workers} workers, a message twice, a fault": Simulation(**{**_ALONE, "workers": workers, "faults": 1}),
        "a worker, a relay and a cleaner, a message twice, a crash": Simulation(workers=1),
        f"{workers} workers, a relay and a cleaner, a message twice": Simulation(workers=workers, crashes=0),
        f"{workers} workers, a relay and a cleaner, a message once, a crash, late claim": Simulation(
            workers=workers, copies=1, claim="late"
        ),
        f"{workers} workers, a relay and a cleaner, a message once, a fault": Simulation(
            workers=workers, copies=1, crashes=0, faults=1
        ),
        "a worker that does not wait for confirms and a relay, a message twice, a crash": Simulation(
            workers=1, purges=0, jumps=(MINUTE,), window=2
        ),
        f"{workers} workers that do not wait for confirms, a message twice, a crash": Simulation(
            **{**_ALONE, "workers": workers, "crashes": 1, "window": 2}
        ),
        f"{workers} workers whose deliveries share transactions, two messages, a crash": Simulation(
            **{**_ALONE, "workers": workers, "messages": 2, "copies": 1, "crashes": 1, "together": 2}
        ),
        f"{workers} workers whose deliveries share transactions, a message twice, a crash and a fault": Simulation(
            **{**_ALONE, "workers": workers, "crashes": 1, "faults": 1, "together": 2}
        ),
        "three deliveries that share a transaction and a relay, a crash": Simulation(
            workers=1, messages=3, copies=1, purges=0, jumps=(MINUTE,), together=3
        ),
        f"{workers} workers, a message twice, one is told to stop, a crash": Simulation(
            **{**_ALONE, "workers": workers, "crashes": 1, "stops": 1}
        ),
        "a worker whose deliveries share a transaction, two messages, told to stop, the database fails once": Simulation(
            **{**_ALONE, "workers": 1, "messages": 2, "copies": 1, "stops": 1, "outages": 1, "together": 2}
        ),
        "a worker, a message once, the database fails twice, a minute, one attempt": Simulation(
            **{**_ALONE, "workers": 1, "copies": 1, "outages": 2, "jumps": (MINUTE,), "attempts": 1}
        ),
        f"{workers} workers, a message twice, a crash, and the database fails once": Simulation(
            **{**_ALONE, "workers": workers, "crashes": 1, "outages": 1}
        ),
        "a worker, a relay and a cleaner, a message once, the database fails once": Simulation(
            workers=1, copies=1, crashes=0, outages=1
        ),
        "a worker that does not wait for confirms, two messages, told to stop, the database fails once": Simulation(
            **{**_ALONE, "workers": 1, "messages": 2, "copies": 1, "stops": 1, "outages": 1, "window": 2}
        ),
        f"{workers} workers and a relay that stays dead, a message once, a fault, a minute": Simulation(
            workers=workers, copies=1, purges=0, jumps=(MINUTE,), relay_returns=False, faults=1
        ),
    }


def large(*, workers: int = 2) -> Simulation:
    """One too large to be run in full: two messages, two relays, two deaths, two faults, two outages, one told to stop."""
    return Simulation(
        workers=workers,
        messages=2,
        outputs=2,
        relays=2,
        relay_rounds=2,
        purges=2,
        jumps=(MINUTE, MINUTE, WINDOW),
        crashes=2,
        faults=2,
        outages=2,
        stops=1,
    )


def medium(*, workers: int = 2) -> Simulation:
    """The small case with everybody at once, three copies and a fault beside the death.

    For very many schedules by chance: of a million hardly any comes twice.
    """
    return Simulation(workers=workers, copies=3, faults=1)
