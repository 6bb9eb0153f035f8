"""Settings and options of message types: code, then file, then environment, then command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from idemp import App, ConfigurationError, Idempotent, Key, Policy, Retry, Settings
from idemp.policy import configured
from idemp.sql.engine import Database
from tests.cli.test_commands import run


class Pay(BaseModel):
    __message_type__ = "shop.Pay"
    id: int
    other: int


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return tmp_path


def policy(code: Policy | None = None) -> Any:
    app = App("billing")
    app.handler(Pay, policy=code)(lambda message: None)
    app.configure()
    return app.handlers["shop.Pay"].policy


def test_later_sources_replace_options_one_by_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = Idempotent(key="other", retention="1d", batch=2, late="handle")
    (folder / "idemp.toml").write_text('[messages."shop.Pay"]\nkey = "id"\nretention = "2d"\nbatch = 3\n')
    assert policy(code) == Idempotent(key="id", retention="2d", batch=3, late="handle")
    os.environ["IDEMP_MESSAGES"] = '{"shop.Pay": {"retention": "3d", "batch": 4}}'
    assert policy(code) == Idempotent(key="id", retention="3d", batch=4, late="handle")
    (folder / "billing.py").write_text(
        "from tests.test_settings import Pay\nfrom idemp import App\napp = App('billing')\napp.handler(Pay)(lambda message: None)\n"
    )
    assert run("--set", "shop.Pay.batch=5", "--set", "lease=7s", "describe", "billing", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    (message,) = told["messages"]
    assert (message["key"], message["retention"], message["batch"], told["settings"]["lease"]) == ("id", 259_200, 5, 7)


def test_an_option_is_replaced_as_a_whole(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[tool.idemp.messages."shop.Pay"]\nkey = {header = "x-id"}\n')
    assert policy().key == Key.header("x-id")
    os.environ["IDEMP_MESSAGES"] = '{"shop.Pay": {"key": {"digest": true}}}'
    assert policy().key == Key.digest()


def test_settings_of_a_file(folder: Path) -> None:
    (folder / "idemp.toml").write_text('database_url = "sqlite:///file.db"\ngroup = 7\nlease = "10s"\n')
    os.environ["IDEMP_LEASE"] = "20s"
    settings = Settings(group=8)
    assert (settings.database_url, settings.lease, settings.group) == ("sqlite:///file.db", 20, 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Policy()),
        ({"retry": {"attempts": 3, "delays": ["1s"]}}, Policy(retry=Retry(attempts=3, delays=["1s"]))),
        ({"idempotent": True}, Idempotent()),
        ({"key": ["id", "other"]}, Idempotent(key=("id", "other"))),
        ({"key": {"message_id": True}}, Idempotent(key=Key.message_id())),
        ({"previous": {"type": "shop.Paid", "key": {"header": "x"}}}, None),
        ({"previous": "none"}, Idempotent(previous="none")),
    ],
)
def test_options_of_a_type(options: dict[str, Any], expected: Policy | None) -> None:
    found = configured(Policy(), options, "shop.Pay")
    assert expected is None or found == expected
    assert expected is not None or found.previous.key == Key.header("x")  # type: ignore[attr-defined]


def test_a_type_is_opted_out_by_configuration() -> None:
    assert configured(Idempotent(key="id"), {"idempotent": False, "batch": 3}, "shop.Pay") == Policy()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keys": "id"}, "keys is not an option: did you mean key?"),
        ({"x" * 9: "id"}, "is not an option: there are"),
        ({"batch": "many"}, "batch='many' has to be a whole number"),
        ({"retention": "soon"}, "not a duration"),
        ({"retry": {"attempt": 3}}, "a table of attempts, delays and jitter"),
        ({"retry": 3}, "a table of attempts, delays and jitter"),
        ({"key": {"cookie": "x"}}, "cookie"),
        ({"key": {"header": "x", "digest": True}}, "is not a key"),
        ({"previous": {}}, "name the change"),
        ({"idempotent": "yes", "key": "id"}, "idempotent='yes' has to be true or false"),
        ({"idempotent": 1}, "idempotent=1 has to be true or false"),
        ({"retention": 10**400}, "not a duration"),
        ({"retry": {"jitter": "a"}}, "jitter='a'"),
    ],
)
def test_options_of_no_use_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        configured(Policy(), options, "shop.Pay")


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("idemp.toml", "lesae = 1", "idemp.toml: lesae is not a setting: did you mean lease?"),
        ("idemp.toml", "lease = ", "idemp.toml cannot be read"),
        ("idemp.toml", "messages = 1", "has to be a table of options"),
        ("idemp.toml", 'messages."shop.Pay" = 1', "has to be a table of options"),
        ("idemp.toml", 'group = "many"', "group"),
        ("idemp.toml", "health_port = 70000", "health_port"),
        ("idemp.toml", "[messages.shop.Pay]\nkey = 'id'", r'quote names with dots: \[messages."shop.Pay"\]'),
        ("idemp.toml", "a = " + "[" * 60_000, "idemp.toml"),
        ("pyproject.toml", "[tool]\nidemp = 5", "has to be a table"),
        ("pyproject.toml", "[tool.idemp]\nbroker = 1", "pyproject.toml: broker is not a setting: did you mean broker_url?"),
    ],
)
def test_files_of_no_use_are_refused(folder: Path, file: str, content: str, match: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ConfigurationError, match=match):
        Settings()


def test_two_files_are_refused(folder: Path) -> None:
    (folder / "idemp.toml").write_text("")
    (folder / "pyproject.toml").write_text("[project]\nname = 'shop'\n")
    assert Settings().group == 20
    (folder / "pyproject.toml").write_text("[tool.idemp]\n")
    with pytest.raises(ConfigurationError, match="keep one of them"):
        Settings()


def test_variables_of_no_use_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for nonsense in ("key=id", "[" * 60_000):
        os.environ["IDEMP_MESSAGES"] = nonsense
        with pytest.raises(ConfigurationError, match="IDEMP_MESSAGES is not JSON"):
            Settings()
    os.environ["IDEMP_MESSAGES"] = "{"
    with pytest.raises(ConfigurationError, match="IDEMP_MESSAGES is not JSON"):
        Settings()
    del os.environ["IDEMP_MESSAGES"]
    for each in ("lease", "=1", ".key=1", "shop.Pay.=1"):
        assert run("--set", each, "describe", "x") == 2
        assert "write NAME=VALUE" in capsys.readouterr().err


def test_no_password_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(database_url="postgresql://user:pass@word@host/shop?password=other", broker_url="amqp://host/?a=other")
    shown = json.dumps(App("billing", settings=settings).describe())
    assert "postgresql://***@host/shop" in shown
    assert not any(secret in shown for secret in ("pass", "word", "other"))


def test_a_refused_configuration_is_refused_again_and_options_of_others_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "idemp.toml").write_text('[messages."shop.Pay"]\nkey = "nothing"\n')
    app = App("billing")
    app.handler(Pay)(lambda message: None)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="not a field of Pay"):
            app.configure()
        assert sorted(app.handlers) == ["shop.Pay"]
    (folder / "idemp.toml").write_text('[messages."shop.Other"]\nkey = "id"\n')
    (folder / "other.py").write_text("from idemp import App\napp = App('billing')\n")
    assert run("describe", "other") == 0
    assert capsys.readouterr().out.startswith("configured, and not handled by this app: shop.Other\n")
    (folder / "idemp.toml").write_text('[messages."shop.Other"]\nkye = "id"\n')
    (folder / "another.py").write_text("from idemp import App\napp = App('billing')\n")
    assert run("describe", "another") == 3
    assert "kye is not an option: did you mean key?" in capsys.readouterr().err
    assert run("describe", "./billing.py") == 3
    assert "names no module" in capsys.readouterr().err


def test_an_empty_variable_is_not_set(folder: Path) -> None:
    (folder / "idemp.toml").write_text('database_url = "sqlite:///file.db"\n')
    for name in Settings.model_fields:
        os.environ[f"IDEMP_{name.upper()}"] = ""
    assert Settings() == Settings(database_url="sqlite:///file.db")
    with pytest.raises(ConfigurationError, match=r"\(Could not parse SQLAlchemy URL from .*\): write it as in"):
        Database("")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("x = 1\nx / 0\n", "ZeroDivisionError: division by zero ({}/shop_case.py, line 2)\n"),
        ("\nimport json\njson.loads('{')\n", "({}/shop_case.py, line 3)\n"),
        ("import shop_models\n", "({}/shop_models.py, line 2)\n"),
        ("x = (\n", "SyntaxError: '(' was never closed (shop_case.py, line 1)\n"),
        ("raise SystemExit('no')\n", "SystemExit: no ({}/shop_case.py, line 1)\n"),
    ],
)
def test_an_app_that_cannot_be_imported_names_the_line(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, end: str
) -> None:
    (folder / "shop_models.py").write_text("from idemp import Idempotent\nIdempotent(\n    late=True)\n")
    (folder / "shop_case.py").write_text(text)
    assert run("describe", "shop_case") == 3
    said = capsys.readouterr().err
    assert said.startswith("idemp: shop_case cannot be imported: ")
    assert said.endswith(end.format(folder))


@pytest.mark.parametrize("key", [Key.of("id"), Key.of(("id", "other")), Key.header('x-"id"'), Key.digest(), Key.message_id()])
def test_a_key_is_printed_as_a_file_and_the_command_line_take_it(
    folder: Path, capsys: pytest.CaptureFixture[str], key: Key
) -> None:
    (folder / "keyed.py").write_text(
        "from tests.test_settings import Pay\nfrom idemp import App\napp = App('billing')\napp.handler(Pay)(lambda message: None)\n"
    )
    (folder / "idemp.toml").write_text(f'[messages."shop.Pay"]\nkey = {key}\nprevious = {{type = "shop.Paid", key = {key}}}\n')
    assert policy().key in (key, key.option, key.names)
    sys.modules.pop("keyed", None)
    assert run("describe", "keyed") == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert (printed["key"], Key.described(key.descriptor)) == (str(key), key)
    assert printed["previous"] == f'{{consumer = "billing", type = "shop.Paid", key = {key}}}'
    (folder / "idemp.toml").unlink()
    for name in ("key", "previous"):
        sys.modules.pop("keyed", None)
        capsys.readouterr()
        assert run("--set", f"shop.Pay.{name}={printed[name]}", "describe", "keyed", "--json") == 0
    assert json.loads(capsys.readouterr().out)["messages"][0]["key"] == key.option


def test_no_text_of_settings_has_a_password(folder: Path) -> None:
    settings = Settings(database_url="postgresql://shop:open-sesame@db/shop", broker_url="amqp://shop:open-sesame@mq")
    assert "sesame" not in f"{settings} {settings!r}"
