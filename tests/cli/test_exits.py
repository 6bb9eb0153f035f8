"""Errors: one short message, the exit code, no password."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from sqlalchemy import make_url

from idemp.cli.exits import MEANINGS

if TYPE_CHECKING:
    from pathlib import Path

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
        (["worker", "../x:app"], 2, "no module '../x'"),
        (["worker", "x..y:app"], 2, "no module 'x..y'"),
        (["worker", "/x:app"], 2, "no module '/x'"),
        (["db", "check", "--database", "postgresql://"], 4, "can't be reached"),
        (["db", "check", "--database", "no url at all"], 3, "can't be read"),
        (["db", "check", "--database", "postgresql+asyncpg://me:secret@host/db"], 3, "asynchronous"),
        (["db", "check", "--database", "postgresql+pg8000://me:secret@host/db"], 3, "Install pg8000"),
        (["db", "check", "--database", "sqlite+pysqlcipher:///x.db"], 3, "or write sqlite://"),
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
        (["dead", "list", "--queue", "a", "--broker", "kafka://me:secret@127.0.0.1:1"], 3, "no adapter for kafka://"),
        (
            ["dead", "list", "--queue", "a", "--broker", "sentinel://me:secret@127.0.0.1:1"],
            3,
            "no adapter for sentinel",
        ),
        (["dead", "list", "--queue", "a", "--broker", "broker"], 3, "no scheme"),
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


def test_recover_says_which_key_it_wants(cli: Cli, empty_shop: Shop) -> None:
    answer = cli("recover", empty_shop.where, "--forget", "order-1")
    assert answer.code == 2
    assert "'order-1' is no key of a decision" in answer.err
    assert 'column "key"' in answer.err


@pytest.mark.parametrize("ending", ["import sys; sys.exit(0)", "exit()", "raise BaseException('no more')"])
@pytest.mark.parametrize(
    "command",
    [
        "worker",
        "relay",
        "doctor",
        "describe",
        "recover",
        "inbox explain 1 --app",
        "inbox redispatch 1 --app",
        "inbox release --all --app",
        "inbox purge",
        "dead list --app",
        "prepared list",
        "broker declare",
    ],
)
def test_module_that_ends_the_process_is_a_configuration_error(
    cli: Cli, empty_shop: Shop, command: str, ending: str
) -> None:
    (empty_shop.folder / "ending_shop.py").write_text(f"{ending}\n")
    answer = cli(*command.split(), "ending_shop:app")
    assert (answer.code, "can't be imported" in answer.err) == (3, True), answer.err


def test_one_consumer_twice_is_a_wrong_command_line(cli: Cli, shop: Shop) -> None:
    assert cli("worker", shop.where, shop.where).code == 2


def test_wrong_setting_names_the_nearest(cli: Cli, empty_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMP_BROKER_ULR", "x")
    answer = cli("db", "check")
    assert answer.code == 3
    assert "IDEMP_BROKER_URL" in answer.err


def test_advice_on_a_transport_helps(cli: Cli, empty_shop: Shop) -> None:
    """Only what an option makes possible is said to be so by it."""
    for url in ("kafka://h", "sqs://", "sentinel://h", "pyamqp://a;kafka://b", "qpid://h", "librabbitmq://h"):
        answer = cli("worker", empty_shop.where, "--broker", url)
        assert (answer.code, "no adapter" in answer.err, "AT_MOST_ONCE" in answer.err) == (3, True, False), answer.err


@pytest.mark.parametrize("password", ["x", "exist", "database", "failed", "p@ss:w/rd"])
def test_letters_of_a_password_change_neither_exit_code_nor_text(cli: Cli, postgresql_url: str, password: str) -> None:
    """Credentials are masked by their place in a URL; nothing else is."""
    url = make_url(postgresql_url).set(password=password, database="no_such_database")
    answer = cli("db", "check", "--database", url.render_as_string(hide_password=False))
    assert (answer.code, 'database "no_such_database" does not exist' in answer.err) == (3, True), answer.err
    assert password not in answer.err or password in {"x", "exist", "database", "failed"}
    away = url.set(port=1).render_as_string(hide_password=False)
    assert cli("db", "check", "--database", away).code == 4


_OPTIONS: Final = {
    "postgresql": [
        "bogus=1",
        "connect_timeout=abc",
        "sslmode=bogus",
        "sslmode=require",
        "options=-c%20bogus%3D1",
        "options=bogus",
        "keepalives=x",
        "service=nope",
        "target_session_attrs=bogus",
    ],
    "mariadb": [
        "bogus=1",
        "connect_timeout=abc",
        "connect_timeout=0",
        "charset=bogus",
        "read_timeout=0",
        "ssl_ca=/nope",
        "ssl_ca=/etc/passwd",
        "collation=nope",
        "sql_mode=BOGUS",
        "init_command=BOGUS",
        "local_infile=x",
    ],
}


@pytest.mark.parametrize("server", _OPTIONS)
def test_options_of_a_url_that_are_refused(cli: Cli, folder: Path, request: pytest.FixtureRequest, server: str) -> None:
    """Neither an outage nor unexpected, whichever command meets them first."""
    url = make_url(request.getfixturevalue(f"{server}_url")).render_as_string(hide_password=False)
    for number, option in enumerate(_OPTIONS[server]):
        named = f"{url}{'&' if '?' in url else '?'}{option}"
        commands = [["db", "check"], ["db", "upgrade"], ["inbox", "list"], ["relay"], ["inbox", "redispatch", "1"]]
        answer = cli(*commands[number % len(commands)], "--database", named)
        assert (answer.code, "Unexpected" in answer.err) == (3, False), (option, answer.err)
        assert "Correct what stands behind the question mark" in answer.err or "No engine can be made" in answer.err
        doctor = cli("doctor", "--database", named)
        assert (doctor.code, "Unexpected" in doctor.err) in {(1, False), (3, False)}, (option, doctor.err)


def test_letters_of_a_password_do_not_hide_who_was_refused(cli: Cli, mariadb_url: str) -> None:
    url = make_url(mariadb_url).set(password="d")
    answer = cli("db", "check", "--database", url.render_as_string(hide_password=False))
    assert (answer.code, "Access denied" in answer.err) == (3, True), answer.err


def test_a_failed_connect_says_nothing_of_commits(cli: Cli, empty_shop: Shop) -> None:
    for arguments in (
        ["db", "check", "--database", "postgresql://me@127.0.0.1:1/db"],
        ["dead", "list", "--queue", "a", "--broker", "pyamqp://127.0.0.1:1//"],
        ["dead", "list", "--queue", "a", "--broker", "stomp://127.0.0.1:1"],
    ):
        answer = cli(*arguments)
        assert (answer.code, "committed" in answer.err) == (4, False), answer.err


def test_sentences_of_a_broker_end_with_one_stop(cli: Cli, rabbitmq_url: str) -> None:
    url = make_url(rabbitmq_url.replace("pyamqp", "sqlite")).set(username="nobody", password="wrong")
    broker = url.render_as_string(hide_password=False).replace("sqlite", "pyamqp")
    answer = cli("dead", "list", "--queue", "a", "--broker", broker)
    assert (answer.code, "logfile. Check" in answer.err) == (3, True), answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["inbox", "list"],
        ["inbox", "explain", "1"],
        ["inbox", "show", "1"],
        ["inbox", "release", "--all"],
        ["inbox", "purge", "--consumer", "shop", "--older-than", "1d"],
        ["db", "check"],
        ["recover", "APP"],
        ["doctor"],
        ["doctor", "APP"],
        ["describe", "APP"],
        ["worker", "APP"],
    ],
    ids=" ".join,
)
def test_a_command_that_reads_makes_no_database(cli: Cli, empty_shop: Shop, arguments: list[str]) -> None:
    answer = cli(*(empty_shop.where if word == "APP" else word for word in arguments))
    assert answer.code != 0 or arguments[0] == "describe"
    assert "idemp db upgrade" in answer.out + answer.err or arguments[0] == "describe"
    assert [file.name for file in empty_shop.folder.glob("shop.db*")] == []


@pytest.mark.parametrize("verb", ["list", "show m-1", "replay --all", "discard --all --yes"])
@pytest.mark.parametrize("named", ["queue", "app"])
def test_a_command_on_dead_letters_makes_no_broker(
    cli: Cli, empty_shop: Shop, monkeypatch: pytest.MonkeyPatch, verb: str, named: str
) -> None:
    """Without a broker that was named, the embedded one of the settings' default would be asked, and made."""
    monkeypatch.delenv("IDEMP_BROKER_URL")
    answer = cli("dead", *verb.split(), *(("--queue", "shop") if named == "queue" else ("--app", empty_shop.where)))
    assert (answer.code, "idemp-broker.db does not exist" in answer.err, "--broker" in answer.err) == (3, True, True)
    assert list(empty_shop.folder.glob("*broker*")) == []


def test_describe_makes_no_broker(cli: Cli, empty_shop: Shop) -> None:
    answer = cli("describe", empty_shop.where)
    assert (answer.code, "not made yet" in answer.out, "redelivers for up to" in answer.out) == (0, True, True)
    assert [file.name for file in empty_shop.folder.iterdir() if file.suffix == ".db"] == []
