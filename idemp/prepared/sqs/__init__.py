"""Prepared messages in Amazon SQS. Needs the extra: `pip install 'idemp[sqs]'`."""

from __future__ import annotations

from idemp.prepared.sqs.home import SqsHome

__all__ = ["SqsHome"]
