"""Tests that Django's own runner runs, with its renamed database."""

import uuid

from django.db import connection
from django.test import TestCase, TransactionTestCase

from tests.integrations.django_shop.models import Payment
from tests.integrations.django_shop.shop import inbox, take


class Committed(TransactionTestCase):
    def test_once(self) -> None:
        assert "test" in str(connection.settings_dict["NAME"])
        key = str(uuid.uuid4())
        assert take(key) == take(key)
        assert Payment.objects.count() == 1

    def test_a_request(self) -> None:
        inbox.prepare("shop.pay")
        connection.settings_dict["ATOMIC_REQUESTS"] = True
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        first, second = (self.client.post("/pay", headers=headers) for _ in range(2))
        connection.settings_dict["ATOMIC_REQUESTS"] = False
        assert first.content == second.content
        assert Payment.objects.count() == 1


class RolledBack(TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        inbox.prepare("shop.take")
        super().setUpClass()

    def test_once(self) -> None:
        with self.captureOnCommitCallbacks() as hooks:
            assert take("same") == take("same")
        assert len(hooks) == 2
        assert Payment.objects.count() == 1

    def test_once_more(self) -> None:
        self.test_once()  # the claim was rolled back with the test
