"""Errors: one short message, the exit code, no password."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from idemp.cli.exits import MEANINGS

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Shop


def test_help_documents_the_exit_codes(cli: Cli) -> None:
    text = " ".join(cli("--help").out.split())
    for code, meaning in MEANINGS.items():
        assert f"{int(code)} {meaning}" in text


def test_every_verb_has_help_and_json(cli: Cli) -> None:
    groups = {
        (): ["demo", "worker", "relay", "doctor", "describe"],
        ("db",): ["upgrade", "check", "sql"],
        ("inbox",): ["list", "show", "explain", "redispatch", "discard", "purge", "erase"],
        ("dead",): ["list", "show", "replay", "discard"],
        ("broker",): ["declare", "rebuild"],
    }
    for group, verbs in groups.items():
        for verb in verbs:
            answer = cli(*group, verb, "--help")
            assert answer.code == 0
            assert "--json" in answer.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["db", "chek"], 2, "check"),
        (["worker", "no_such_module:app"], 2, "no_such_module"),
        (["worker", "json:app"], 2, "no App in it"),
        (["worker", "json"], 2, "MODULE:APP"),
        (["db", "check", "--database", "postgresql://"], 4, "can't be reached"),
        (["db", "check", "--database", "no url at all"], 3, "can't be read"),
        (["db", "check", "--database", "oracle://me:secret@host/db"], 3, "oracle"),
        (["db", "check", "--database", "postgresql://me:secret@127.0.0.1:1/db"], 4, "can't be reached"),
        (["db", "check"], 3, "idemp db upgrade"),
        (["inbox", "list"], 3, "idemp db upgrade"),
        (["relay"], 3, "idemp db upgrade"),
        (["dead", "list"], 2, "--queue"),
        (["dead", "list", "--queue", "none"], 3, "does not exist"),
        (["dead", "list", "--queue", "a", "--broker", "pyamqp://me:secret@127.0.0.1:1//"], 4, "127.0.0.1:1"),
        (["dead", "list", "--queue", "a", "--broker", "redis://:secret@127.0.0.1:1/0"], 3, "may lose messages"),
        (["dead", "list", "--queue", "a", "--broker", "pyampq://me:secret@127.0.0.1:1//"], 3, "Did you mean 'pyamqp'?"),
    ],
)
def test_exit_codes(cli: Cli, shop_folder: None, arguments: list[str], code: int, words: str) -> None:
    plain = cli(*arguments)
    assert plain.code == code, plain.err
    assert words in plain.err
    assert "Traceback" not in plain.err
    as_json = cli(*arguments, "--json")
    assert as_json.code == code
    assert as_json.error["exit_code"] == code
    assert words in as_json.error["message"] + as_json.error.get("fix", "")
    assert "secret" not in plain.err + as_json.err


@pytest.fixture
def shop_folder(empty_shop: Shop) -> None:
    """A directory without tables."""


def test_nearest_module_and_app_are_named(cli: Cli, empty_shop: Shop) -> None:
    assert f"Did you mean {empty_shop.module!r}?" in cli("describe", f"{empty_shop.module}x:app").err
    answer = cli("describe", f"{empty_shop.module}:apps")
    assert answer.code == 2
    assert "Did you mean 'app'?" in answer.err
    assert cli("describe", f"{empty_shop.module}:order").code == 2


def test_at_most_once_transport_is_refused(cli: Cli, empty_shop: Shop) -> None:
    answer = cli("worker", empty_shop.where, "--broker", "redis://127.0.0.1:1/0", "--json")
    assert (answer.code, answer.error["kind"]) == (3, "GuaranteeError")


def test_misspelt_transport_is_no_question_of_guarantees(cli: Cli, empty_shop: Shop) -> None:
    answer = cli("worker", empty_shop.where, "--broker", "pyampq://127.0.0.1:1//")
    assert (answer.code, "Did you mean 'pyamqp'?" in answer.err) == (3, True)
    assert "ALLOW_AT_MOST_ONCE" not in answer.err


def test_unreachable_broker_ends_the_worker(cli: Cli, empty_shop: Shop) -> None:
    cli("db", "upgrade")
    answer = cli("worker", empty_shop.where, "--broker", "pyamqp://127.0.0.1:1//", "--json")
    assert (answer.code, answer.error["kind"]) == (4, "BrokerUnavailable")


def test_missing_tables_end_the_worker(cli: Cli, empty_shop: Shop) -> None:
    answer = cli("worker", empty_shop.where)
    assert answer.code == 3
    assert "idemp db upgrade" in answer.err


def test_two_handlers_for_one_type_are_refused(cli: Cli, empty_shop: Shop) -> None:
    file = empty_shop.folder / f"{empty_shop.module}.py"
    file.write_text(file.read_text() + '\n@app.handler(dict, type="shop.Ping")\ndef again(message): ...\n')
    answer = cli("worker", empty_shop.where, "--json")
    assert (answer.code, answer.error["kind"]) == (3, "ConfigurationError")
    assert "two handlers" in answer.error["message"]


def test_module_that_fails_is_a_configuration_error(cli: Cli, empty_shop: Shop) -> None:
    (empty_shop.folder / "broken_shop.py").write_text("1 / 0\n")
    answer = cli("worker", "broken_shop:app")
    assert answer.code == 3
    assert "ZeroDivisionError" in answer.err
    assert "ZeroDivisionError" in cli("worker", "broken_shop:app", "--traceback").err.split("broken_shop.py")[1]
    (empty_shop.folder / "needy_shop.py").write_text("import no_such_library\n")
    answer = cli("worker", "needy_shop:app")
    assert answer.code == 3
    assert "Install 'no_such_library'" in answer.err


def test_one_consumer_twice_is_a_wrong_command_line(cli: Cli, shop: Shop) -> None:
    assert cli("worker", shop.where, shop.where).code == 2


def test_wrong_setting_names_the_nearest(cli: Cli, empty_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMP_BROKER_ULR", "x")
    answer = cli("db", "check")
    assert answer.code == 3
    assert "IDEMP_BROKER_URL" in answer.err
