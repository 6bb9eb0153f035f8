"""Celery in the project: `celery -A tests.integrations.django_shop.celery worker`. Models are imported when Django is set up."""

import os

from celery import Celery

from idemp.integrations.celery import install
from idemp.integrations.django import DjangoInbox

app = Celery("shipping", broker=os.environ.get("SHOP_BROKER", "memory://"), set_as_current=False)
app.conf.update(broker_transport_options={"confirm_publish": True}, include=["tests.integrations.django_shop.shipping"])
inbox = DjangoInbox("shop")
idempotent = install(app, inbox)
