from typing import Any

from idemp.integrations.django import DjangoInbox
from tests.integrations.django_shop.models import Payment

inbox = DjangoInbox("shop")


@inbox.once("shop.take", key="key")
def take(key: str, cents: int = 0) -> dict[str, Any]:
    payment = Payment.objects.create(key=key, cents=cents)
    inbox.unit.send({"key": key}, to="ledger", type="shop.Paid")
    return {"id": payment.id, "cents": (cents,)}
