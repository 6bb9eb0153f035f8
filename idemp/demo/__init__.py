"""The demo: two consumers, duplicates, killed processes, and a count of lost and doubled effects."""

from idemp.demo.storm import Report, run

__all__ = ["Report", "run"]
