from django.db import models


class Payment(models.Model):
    key = models.CharField(max_length=50)
    cents = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.key


class One(models.Model):
    what = models.CharField(max_length=50, unique=True)

    def __str__(self) -> str:
        return self.what
