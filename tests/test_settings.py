"""Settings: code, then file, then environment, then arguments; what is unknown is an error that names the nearest."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from idemp import App, Idempotent
from idemp.broker.memory import InMemoryBroker
from idemp.errors import ConfigurationError
from idemp.inbox.memory import InMemoryStore
from idemp.settings import Settings, load_settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment without idemp."""
    for name in list(os.environ):
        if name.startswith("IDEMP_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_precedence(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().prefetch == 20
    (directory / "idemp.toml").write_text("prefetch = 1\nthreads = 2\n")
    assert (load_settings().prefetch, load_settings().threads) == (1, 2)
    monkeypatch.setenv("IDEMP_PREFETCH", "3")
    assert (load_settings().prefetch, load_settings().threads) == (3, 2)
    assert (load_settings(prefetch=4).prefetch, load_settings(prefetch=None).prefetch) == (4, 3)


def test_pyproject(directory: Path) -> None:
    (directory / "pyproject.toml").write_text('[tool.other]\nx = 1\n[tool.idemp]\nrelay_after = "2m"\n')
    assert load_settings().relay_after == timedelta(minutes=2)
    (directory / "idemp.toml").write_text('relay_after = "3m"\n')
    assert load_settings().relay_after == timedelta(minutes=3)


def test_file_by_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "other.toml").write_text("threads = 7\n")
    (directory / "idemp.toml").write_text("threads = 2\n")
    monkeypatch.setenv("IDEMP_CONFIG", str(directory / "other.toml"))
    assert load_settings().threads == 7
    monkeypatch.setenv("IDEMP_CONFIG", str(directory / "missing.toml"))
    with pytest.raises(ConfigurationError, match=r"missing\.toml"):
        load_settings()


@pytest.mark.parametrize("content", ["threads = ", "\xff"])
def test_file_that_is_no_toml(directory: Path, content: str) -> None:
    (directory / "idemp.toml").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="can't be read"):
        load_settings()


def policy_of(settings: Settings) -> Any:
    app = App("shop", store=InMemoryStore(), broker=InMemoryBroker(), settings=settings)
    app.handler(dict, type="shop.Sell", policy=Idempotent(key="id", retention="9d", attempts=1, claim="late"))(
        lambda message: None
    )
    app.start()
    return app.registry.find_by_name("shop.Sell").policy


def test_policy_from_code_file_environment_arguments(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says one thing more, option by option."""
    assert policy_of(load_settings()).retention == timedelta(days=9)
    (directory / "idemp.toml").write_text('[messages."shop.Sell"]\nretention = "8d"\nattempts = 2\nkey = "no"\n')
    monkeypatch.setenv("IDEMP_MESSAGES", json.dumps({"shop.Sell": {"attempts": 3, "key": {"header": "x-id"}}}))
    policy = policy_of(load_settings(messages={"shop.Sell": {"key": "sku"}}))
    assert (policy.claim, policy.retention, policy.attempts, policy.key.name) == (
        "late", timedelta(days=8), 3, "field:sku",
    )  # fmt: skip


def test_tables_of_file_and_environment_are_not_mixed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "idemp.toml").write_text(
        '[messages."shop.Sell"]\nattempts = 2\nkey = {header = "x-id"}\nfingerprint = {except = ["at"]}\n'
    )
    monkeypatch.setenv("IDEMP_MESSAGES", '{"shop.Sell": {"key": {"field": "id"}, "fingerprint": {"fields": ["id"]}}}')
    policy = policy_of(load_settings())
    assert (policy.key.name, policy.fingerprint.mode, policy.attempts) == ("field:id", "fields", 2)


def test_unknown_names(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"'thread'\. Did you mean 'threads'"):
        load_settings(thread=1)
    (directory / "idemp.toml").write_text("prefech = 1\n")
    with pytest.raises(ConfigurationError, match=r"'prefech'\. Did you mean 'prefetch'"):
        load_settings()
    (directory / "idemp.toml").unlink()
    monkeypatch.setenv("IDEMP_DATABASE_ULR", "sqlite://")
    with pytest.raises(
        ConfigurationError, match=r"IDEMP_DATABASE_ULR is no setting\. Did you mean 'IDEMP_DATABASE_URL'"
    ):
        load_settings()


def test_environment_of_tests_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMP_TEST_POSTGRESQL_URL", "postgresql://nowhere")
    assert load_settings().prefetch == 20


@pytest.mark.parametrize(
    ("name", "value"), [("IDEMP_PREFETCH", "many"), ("IDEMP_MESSAGES", "{"), ("IDEMP_RELAY_AFTER", "soon")]
)
def test_wrong_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError):
        load_settings()


@pytest.mark.parametrize("name", ["threads", "prefetch", "max_body_bytes"])
def test_bounds(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        load_settings(**{name: 0})


def test_policy_for_a_type_without_handler(directory: Path) -> None:
    (directory / "idemp.toml").write_text('[messages."shop.Sel"]\nidempotent = true\n')
    with pytest.raises(ConfigurationError, match=r"'shop\.Sel', which has no handler here. Did you mean 'shop\.Sell'"):
        policy_of(load_settings())


def test_passwords_are_not_shown() -> None:
    settings = load_settings(database_url="postgresql://me:secret@db/shop", broker_url="pyamqp://me:secret@mq//")
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("header", "whole"),
    [
        ("messages.shop.Sell", "shop.Sell"), ("messages.billing.TakePayment", "billing.TakePayment"),
        ("messages.billing.cards.Take", "billing.cards.Take"), ('messages."billing".Take', "billing.Take"),
    ],
)  # fmt: skip
def test_type_names_without_quotes_are_an_error(directory: Path, header: str, whole: str) -> None:
    (directory / "idemp.toml").write_text(f"[{header}]\nidempotent = true\nkey = {{header = 'x-id'}}\n")
    with pytest.raises(ConfigurationError) as raised:
        load_settings()
    name = whole.partition(".")[0]
    where = directory / "idemp.toml"
    assert str(raised.value) == f"Message type '{name}': write [messages.\"{whole}\"], with quotes, in {where}."


def test_type_names_that_were_taken_apart_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: dict[str, Any] = {"shop": {"Sell": {"attempts": 3}}}
    with pytest.raises(ConfigurationError, match=r'write \[messages\."shop\.Sell"\].* in the settings'):
        policy_of(Settings(messages=apart))
    monkeypatch.setenv("IDEMP_MESSAGES", json.dumps(apart))
    with pytest.raises(ConfigurationError, match=r'write \{"shop\.Sell": .*, in IDEMP_MESSAGES'):
        load_settings()


def test_tables_that_are_options_are_no_types(directory: Path) -> None:
    (directory / "idemp.toml").write_text(
        '[messages.Sell]\nkey = {header = "x"}\nfingerprint = {except = ["a"]}\nretry_delays = {first = "1s"}\n'
    )
    assert load_settings().messages["Sell"]["key"] == {"header": "x"}


@pytest.mark.parametrize("name", ["shop.Sell", "another.apps.Type"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('retentoin = "7d"', "unknown option 'retentoin'. Did you mean 'retention'"),
        ("fingerprnt = {except = []}", "unknown option 'fingerprnt'. Did you mean 'fingerprint'"),
        ("attempts = 0", "attempts: Input should be greater than or equal to 1"),
        ("attempts = true", "attempts: a number, not true"), ("retry_jitter = true", "retry_jitter: a number, not true"),
        ('retry_on = ["ValueEror"]', "retry_on: 'ValueEror' is no exception class"),
    ],
)  # fmt: skip
def test_wrong_policies_say_where_they_stand(directory: Path, name: str, line: str, said: str) -> None:
    for file, place, prefix in (("pyproject.toml", " [tool.idemp]", "tool.idemp."), ("idemp.toml", "", "")):
        (directory / file).write_text(f'[{prefix}messages."{name}"]\n{line}\n')
        with pytest.raises(ConfigurationError) as raised:
            load_settings()
        assert str(raised.value).startswith(f'{directory / file}{place} [messages."{name}"]: {said}')


def test_wrong_policies_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMP_MESSAGES", '{"shop.Sell": {"attempt": 3}}')
    with pytest.raises(ConfigurationError, match=r"^IDEMP_MESSAGES \[messages\.\"shop\.Sell\"\]: .*mean 'attempts'"):
        load_settings()


def test_what_only_code_and_file_together_get_wrong_says_so(directory: Path) -> None:
    (directory / "idemp.toml").write_text('[messages."shop.Sell"]\nretry_on = ["ValueError"]\n')
    app = App("shop", store=InMemoryStore(), broker=InMemoryBroker(), settings=load_settings())
    app.handler(dict, type="shop.Sell", policy=Idempotent(refuse_on=[ValueError]))(lambda message: None)
    with pytest.raises(ConfigurationError, match="the code and the settings say together"):
        app.start()


def test_exceptions_of_another_app_need_not_be_importable(directory: Path) -> None:
    (directory / "idemp.toml").write_text('[messages."other.Type"]\nretry_on = ["not_here.errors.Gone"]\n')
    assert policy_of(load_settings()).retry_on == ()
    (directory / "idemp.toml").write_text('[messages."shop.Sell"]\nretry_on = ["not_here.errors.Gone"]\n')
    with pytest.raises(ConfigurationError, match=r"'shop\.Sell'.*can't be imported"):
        policy_of(load_settings())


@pytest.mark.parametrize("name", ["ending.Gone", "..ending.Gone"])
def test_modules_of_exceptions_may_do_anything_when_imported(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (directory / "ending.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(directory))
    (directory / "idemp.toml").write_text(f'[messages."shop.Sell"]\nretry_on = ["{name}"]\n')
    with pytest.raises(ConfigurationError, match=r"'shop\.Sell'.*can't be imported"):
        policy_of(load_settings())


def test_wrong_settings_say_where_they_stand(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "idemp.toml").write_text("prefetch = true\nthreads = 0\nprefech = 1\n")
    monkeypatch.setenv("IDEMP_OUTPUT_ATTEMPTS", "0")
    monkeypatch.setenv("IDEMP_THREADS", "2")  # wins over the file's
    with pytest.raises(ConfigurationError) as raised:
        load_settings(relay_after="soon")
    file = directory / "idemp.toml"
    assert set(str(raised.value).removesuffix(".").split("; ")) == {
        f"{file}: prefetch: a number, not true", f"{file}: unknown option 'prefech'. Did you mean 'prefetch'?",
        "IDEMP_OUTPUT_ATTEMPTS: Input should be greater than or equal to 1",
        "Settings: relay_after: 'soon' is no duration", "write 30s, 15m, 12h or 7d",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["{", "", "[]", "null", '{"shop.Sell": 3}'])
def test_messages_that_are_no_json_object(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("IDEMP_MESSAGES", value)
    with pytest.raises(ConfigurationError, match=r"^IDEMP_MESSAGES"):
        load_settings()
