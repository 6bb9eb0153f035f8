"""One project with Django and Celery: a view whose task is stored with its claim, and a task that uses Django's ORM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import RequestFactory

from tests.integrations.test_django import Payment, Shop, close, shop
from tests.servers.databases import query
from tests.worker.test_loop import wait_for

from tests.integrations.django_shop.celery import app, inbox  # isort: skip - when Django is set up
from tests.integrations.django_shop.shipping import order  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["postgresql"], indirect=True)]
__all__ = ["shop"]


@pytest.fixture
def worker(shop: Shop, url: str, vhost: str, tmp_path: Path) -> Iterator[Path]:
    """Start a worker; return its log."""
    environment = {**os.environ, "DATABASE_URL": url, "SHOP_BROKER": vhost, "SHOP_KILLED": str(tmp_path)}
    environment["DJANGO_SETTINGS_MODULE"] = "tests.integrations.django_shop.settings"
    command = ["-m", "celery", "-A", "tests.integrations.django_shop.celery", "worker", "-c", "2", "-l", "INFO"]
    app.conf.broker_url = vhost
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
        yield tmp_path / "log"
        process.terminate()
        process.wait(30)
    app.pool.force_close_all()
    close(inbox)


def test_a_view_and_its_task(shop: Shop, url: str, worker: Path) -> None:
    """The view's transaction stores the task; the task is killed between COMMIT and send, and runs once."""
    ask = RequestFactory()
    answers = [order(ask.post("/order", headers={"Idempotency-Key": key})).content for key in ("7", "7", "8")]
    assert answers[0] == answers[1] != answers[2]
    rows = ["7", "8", "note 7", "note 8", "shipped 7", "shipped 8"]
    wait_for(lambda: sorted({*Payment.objects.values_list("key", flat=True)}) == rows)
    wait_for(lambda: not query(url, "SELECT 1 FROM idemp_pending"))
    assert [key for key in Payment.objects.values_list("key", flat=True).order_by("key") if "note" not in key] == [
        "7",
        "8",
        *rows[4:],
    ]
    claims = query(url, "SELECT convert_from(original_id, 'UTF8') FROM idemp_inbox")
    assert {f"s:{json.loads(answer)['task']}" for answer in answers} < {id for (id,) in claims}
    assert worker.read_text().count("SIGKILL") >= 2
