from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import path

from tests.integrations.django_shop.models import Payment
from tests.integrations.django_shop.shop import inbox


def pay(request: HttpRequest) -> HttpResponse:
    """Take a payment in the transaction of ATOMIC_REQUESTS."""
    with inbox.joined("shop.pay", key=request.headers["Idempotency-Key"]) as unit:
        if not unit.duplicate:
            payment = Payment.objects.create(key=request.headers["Idempotency-Key"])
            unit.send({"key": payment.key}, to="ledger", type="shop.Paid")
            unit.result = b'{"id": %d}' % payment.id
    if request.GET.get("fail"):
        raise ValueError("after the block")
    return HttpResponse(unit.result, content_type="application/json")


urlpatterns = [path("pay", pay), path("admin/", admin.site.urls)]
