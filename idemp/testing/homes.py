"""The conformance suite of homes of prepared messages."""

from __future__ import annotations

from collections.abc import Callable

from idemp.messages import Output
from idemp.prepared.ports import Home, Prepared

__all__ = ["HomeConformance"]


def _prepared(key: str = "7") -> Prepared:
    properties = {"message_id": f"id-{key}", "type": "stock.Reserve", "headers": {"idemp-causation-id": key, "x": "größe"}}
    return Prepared(
        "orders", key, Output(f"0000000{key}-0000-8000-8000-000000000000", "send", "", "stock", properties, b'"\xc3\xa9"')
    )


class HomeConformance:
    """What each home has to do. Subclass it in a test module, with two fixtures.

    `open_home` opens the home of the app `orders`, in a process of its own; `pass_time` lets seconds pass.

    Example:
        >>> class TestTable(HomeConformance):
        ...     pass
    """

    def test_a_message_waits_until_its_check_is_due(
        self, open_home: Callable[[], Home], pass_time: Callable[[float], None]
    ) -> None:
        prepared = _prepared()
        open_home().prepare(prepared, 60.0)
        assert list(open_home().lease(10)) == []
        pass_time(61)
        (found,) = open_home().lease(10)
        assert (found.app, found.key, found.checks, found.output) == ("orders", "7", 0, prepared.output)

    def test_one_checker_gets_it_and_another_after_a_while(
        self, open_home: Callable[[], Home], pass_time: Callable[[float], None]
    ) -> None:
        open_home().prepare(_prepared(), 0.0)
        first, second = open_home(), open_home()
        assert len(first.lease(10)) == 1
        assert list(second.lease(10)) == []
        pass_time(61)
        assert len(second.lease(10)) == 1

    def test_what_its_producer_ended_is_never_checked(
        self, open_home: Callable[[], Home], pass_time: Callable[[float], None]
    ) -> None:
        home, prepared = open_home(), _prepared()
        home.prepare(prepared, 60.0)
        home.end(prepared)
        pass_time(61)
        assert list(open_home().lease(10)) == []

    def test_what_a_checker_ended_is_gone(self, open_home: Callable[[], Home], pass_time: Callable[[float], None]) -> None:
        home = open_home()
        for key in "123":
            home.prepare(_prepared(key), 0.0)
        found = home.lease(10)
        assert {each.key for each in found} == {"1", "2", "3"}
        for each in found:
            if each.key != "2":
                home.end(each)
        pass_time(61)
        assert [each.key for each in open_home().lease(10)] == ["2"]

    def test_checks_are_counted(self, open_home: Callable[[], Home], pass_time: Callable[[float], None]) -> None:
        home = open_home()
        home.prepare(_prepared(), 0.0)
        for count in range(3):
            (found,) = home.lease(10)
            assert found.checks == count
            home.postpone(found, 30.0)
            assert list(home.lease(10)) == []
            pass_time(31)

    def test_a_commit_can_be_repeated(self, open_home: Callable[[], Home], pass_time: Callable[[float], None]) -> None:
        home, prepared = open_home(), _prepared()
        home.prepare(prepared, 60.0)
        home.commit(prepared)
        home.commit(prepared)
        home.end(prepared)
        home.end(prepared)
        pass_time(61)
        assert list(open_home().lease(10)) == []
