"""A storm in one call: feeds orders, kills workers at random moments, and proves from outside what came of it.

>>> from idemp.demo import Plan
>>> Plan(messages=100, kills=4, seed=1).orders
80
"""

from __future__ import annotations

from idemp.demo.plan import Plan
from idemp.demo.proof import Proof
from idemp.demo.storm import run

__all__ = ["Plan", "Proof", "run"]
