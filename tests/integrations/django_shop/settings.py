"""Settings of a process; tests in this process change the database with `use`."""

import os
from typing import Any

import pymysql
from sqlalchemy import make_url


def database(url: str, **more: Any) -> dict[str, Any]:
    """Return an entry of DATABASES."""
    made = make_url(url)
    kind = made.get_backend_name()
    if kind == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": made.database, "TEST": {"NAME": f"{made.database}.test"}, **more}
    if kind == "mysql":
        pymysql.install_as_MySQLdb()
    where = {"USER": made.username, "PASSWORD": made.password or "", "HOST": made.host, "PORT": made.port or ""}
    where["OPTIONS"] = dict(made.query)
    return {"ENGINE": f"django.db.backends.{kind}", "NAME": made.database, **where, **more}


DATABASES = {"default": database(os.environ.get("DATABASE_URL", "sqlite:///nowhere.db"))}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "idemp.integrations.django",
    "tests.integrations.django_shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "tests.integrations.django_shop.urls"
SECRET_KEY = "of-a-test"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
USE_TZ = True
ALLOWED_HOSTS = ["*"]
TASKS = {"default": {"BACKEND": "idemp.integrations.django.tasks.IdempBackend", "OPTIONS": {"app": "tasks"}}}
