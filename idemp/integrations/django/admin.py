"""Pages of Django's admin: dead letters, and what became of a message."""

from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import path

from idemp.integrations.django.bridge import open_database
from idemp.integrations.django.models import DeadLetter
from idemp.sql.engine import Database
from idemp.sql.records.claims import InboxRecords
from idemp.sql.records.failures import DeadLetters, FailedMessage

MOST: Final = 200  # dead letters of a page


@admin.register(DeadLetter)
class DeadLetterAdmin(admin.ModelAdmin):
    """Dead letters: read them with the permission `view`, replay with `change`, discard with `delete`."""

    def get_urls(self) -> list[Any]:
        """Return the list and the page of one; there is no table that Django's other views could query."""
        view, name = self.admin_site.admin_view, "idemp_deadletter"
        return [
            path("", view(self.changelist_view), name=f"{name}_changelist"),
            path("<int:id>/", view(self.letter), name=f"{name}_change"),
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Return False: dead letters are made by failures."""
        return False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:  # noqa: ARG002
        """Show dead letters, oldest first; with `?q=ID`, what was handled under an id, and what came of it."""
        asked = request.GET.get("q", "").strip()
        with closing(self._open(request)) as database:
            letters = DeadLetters(database).find(limit=MOST)
            accounts, failures = InboxRecords(database).explain(asked) if asked else ([], [])
        dated: dict[str, Any] = {"letters": [(each, _moment(each.at)) for each in letters]}
        dated["accounts"] = [(each, _moment(each.claim.claimed_at)) for each in accounts]
        return self._page(request, "dead_letters", **dated, title="Dead letters", asked=asked, failures=failures)

    def letter(self, request: HttpRequest, id: int) -> HttpResponse:
        """Show a dead letter or a retry, and change it on POST."""
        with closing(self._open(request)) as database:
            letters = DeadLetters(database)
            if id >= 2**63 or not (found := letters.find([id], limit=1, retries=True)):
                raise Http404
            if request.method == "POST":
                return self._change(request, letters, found[0])
        return self._page(request, "dead_letter", title=f"Dead letter {id}", letter=found[0], moment=_moment(found[0].at))

    def _change(self, request: HttpRequest, letters: DeadLetters, letter: FailedMessage) -> HttpResponse:
        replays = "replay" in request.POST
        if not (self.has_change_permission if replays else self.has_delete_permission)(request):
            raise PermissionDenied
        if replays and (letter.committed or letter.late) and "force" not in request.POST:
            text = "Its effects are committed or may be, so a replay could repeat them: check them, then tick “force”."
            self.message_user(request, text, messages.ERROR)
            return redirect("admin:idemp_deadletter_change", letter.id)
        changed = (letters.replay if replays else letters.discard)([letter])
        text = ("made due again" if replays else "discarded") if changed else "not changed: it is dead no more"
        self.log_change(request, DeadLetter(pk=letter.id), text)
        self.message_user(request, f"Dead letter {letter.id}: {text}.")
        return redirect("admin:idemp_deadletter_changelist")

    def _open(self, request: HttpRequest) -> Database:
        """Open the database that Django's routers name for the model."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return open_database(router.db_for_write(DeadLetter))  # a replica would be late, and takes no change

    def _page(self, request: HttpRequest, name: str, **shown: Any) -> HttpResponse:
        context = {**self.admin_site.each_context(request), "opts": self.opts, **shown}
        return TemplateResponse(request, f"admin/idemp/{name}.html", context)


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)
