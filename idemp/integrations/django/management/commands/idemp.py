"""`manage.py idemp`: idemp's command line, on a database of `settings.DATABASES`."""

import os
import runpy
import sys
from argparse import REMAINDER
from typing import Any

from django.core.management import BaseCommand

from idemp.integrations.django import url_of


class Command(BaseCommand):
    """Run `python -m idemp` in this process, with the URL of a database of Django's."""

    help = "Run a command of idemp, such as `worker shop.worker:app` or `dead list`, on a database of DATABASES."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        """Take all arguments after the options of Django."""
        parser.add_argument("--database", default="default", metavar="ALIAS", help="Alias of the database; before the command.")
        parser.add_argument("arguments", nargs=REMAINDER, metavar="…", help="A command of idemp and its arguments.")

    def handle(self, *_: Any, database: str, arguments: list[str], **__: Any) -> None:
        """Put the URL into the environment, which processes of a worker inherit, and run the command."""
        os.environ["IDEMP_DATABASE_URL"] = url_of(database).render_as_string(hide_password=False)
        sys.argv = ["idemp", *(arguments or ["--help"])]
        runpy.run_module("idemp", run_name="__main__")
