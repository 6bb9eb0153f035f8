"""Faults in event streams as inbox."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_UNIT: Final = "idemp/inbox/stream/unit.py"
_PORT: Final = "idemp/inbox/stream/port.py"
_KNOWN: Final = "idemp/inbox/stream/known.py"
_READING: Final = "tests/inbox/stream/test_reading.py"
_SQL: Final = "idemp/inbox/sql/streams.py"
_MEMORY: Final = "tests/inbox/stream/test_memory.py::TestInMemoryStreams"
_SQLITE: Final = "tests/inbox/stream/test_sql.py::TestSqlite"
_CRASHES: Final = "tests/inbox/stream/test_crash_points.py"

IN_STREAMS: Final = (
    Mutant(
        name="stream-read-again-by-a-late-claim",
        file=_UNIT,
        old="if not self.session.is_open:",
        new="if name:",
        breaks="What a late handler decided is appended behind events that it did not see.",
        tests=(f"{_MEMORY}::test_what_the_handler_saw_is_what_counts",),
    ),
    Mutant(
        name="fold-begins-with-an-equal-state",
        file="idemp/inbox/stream/stream.py",
        old="        return other is not None and is_same(one[0], other[0])\n",
        new="        return other is not None and type(one[0]) is type(other[0]) and bool(one[0] == other[0])\n",
        breaks="A command is decided by the limit of another account, whose class takes both for equal.",
        tests=(f"{_READING}::test_folds_that_can_not_be_kept_see_all_events",),
    ),
    Mutant(
        name="commit-whose-outputs-never-pend",
        file=_UNIT,
        old="self._streams.append(commit, pending=self._pending)",
        new="self._streams.append(commit, pending=False)",
        breaks='With redispatch="pending" a redelivery finds nothing to send, though nothing was sent.',
        tests=(f"{_CRASHES}::test_death_after_some_of_the_outputs",),
    ),
    Mutant(
        name="swallowed-refusal-is-committed",
        file=_UNIT,
        old="        self.flush()\n        claim = self._claim\n",
        new="        claim = self._claim\n",
        breaks="A handler that believes that it rolled back, or committed a part, is committed as a whole.",
        tests=(f"{_MEMORY}::test_refusal_that_was_swallowed_is_raised_at_commit",),
    ),
    Mutant(
        name="versions-count-commits",
        file=_PORT,
        old="return self.first_version + len(self._published)",
        new="return self.first_version + 1",
        breaks="Two events of one stream have one version, or there are gaps between them.",
        tests=(f"{_MEMORY}::test_two_messages_of_one_stream",),
    ),
    Mutant(
        name="what-is-sent-is-an-event",
        file=_PORT,
        old="tuple(output.message for output in self.outputs if output.kind is OutputKind.PUBLISH)",
        new="tuple(output.message for output in self.outputs)",
        breaks="A letter to somebody else changes what an account is.",
        tests=(f"{_MEMORY}::test_appended_is_loaded_as_it_was",),
    ),
    Mutant(
        name="worker-on-streams-passes-for-a-relay",
        file="idemp/inbox/stream/inbox.py",
        old="        del relay\n        self.resending.consumers.update(consumers)\n"
        "        self._beside.beat(worker, relay=False",
        new="        self.resending.consumers.update(consumers)\n        self._beside.beat(worker, relay=relay",
        breaks="Consumers on tables of the same database leave their outputs to a relay that ships nothing.",
        tests=(f"{_MEMORY}::test_nothing_expires",),
    ),
    Mutant(
        name="unrecorded-confirms-stay",
        file="idemp/inbox/resending.py",
        old="            self._confirm(handling, tuple(ids))\n",
        new="            del handling\n",
        breaks="Outputs whose worker died before it recorded their confirms are sent again every minute, for ever.",
        tests=(f"{_MEMORY}::test_what_nobody_recorded_is_sent_once_more",),
    ),
    Mutant(
        name="shared-stream-unnoticed",
        file=_UNIT,
        old=".claim.consumer) != claim.consumer:",
        new=".claim.consumer) is None:",
        breaks="Two consumers whose entities have equal values decide on each other's events, and no log says so.",
        tests=("tests/inbox/test_entities.py::test_consumers_that_share_an_entity_are_warned_of",),
    ),
    Mutant(
        name="streams-read-from-the-beginning",
        file=_KNOWN,
        old="self._streams.load(name, known.commits[-1].number - 1)",
        new="self._streams.load(name)[known.commits[-1].number - 1 :]",
        breaks="The time of a handling grows with the length of its stream.",
        tests=(f"{_READING}::test_a_long_stream_costs_a_handling_as_much_as_a_short_one",),
    ),
    Mutant(
        name="known-commits-of-another-database",
        file=_KNOWN,
        old="if newer and _same(newer[0], known.commits[-1]):",
        new="if newer:",
        breaks="After a restore, a handler decides on events that its stream does not have.",
        tests=(f"{_READING}::test_another_database_behind_the_same_object_is_noticed",),
    ),
    Mutant(
        name="state-shared-between-handlings",
        file="idemp/inbox/stream/stream.py",
        old="start = _copied(known.state[0])",
        new="start = known.state",
        breaks="A handler that changes the state of its stream changes what later handlings decide on.",
        tests=(f"{_READING}::test_what_a_handler_changes_it_changes_for_itself",),
    ),
    Mutant(
        name="later-commits-seen-by-a-handler",
        file=_KNOWN,
        old="return kept.commits[: last.number]",
        new="return kept.commits",
        breaks="A handler sees events that were appended after the version that it claims to have seen.",
        tests=(f"{_READING}::test_what_is_appended_after_the_claim_is_not_seen",),
    ),
    Mutant(
        name="duplicate-told-as-a-conflict",
        file=_SQL,
        old='if violated == "number" and self.find(',
        new='if violated == "number" or self.find(',
        breaks="Whoever asks why an append failed hears of another message, and it was the same one.",
        tests=("tests/inbox/stream/test_sql.py::TestPostgresql::test_taken_id_is_a_duplicate",),
    ),
    Mutant(
        name="lost-answer-of-an-append-untold",
        file=_SQL,
        old="            if not sent:\n",
        new="            if row:\n",
        breaks="An append whose COMMIT may have taken effect is told as one that certainly did not.",
        tests=(f"{_SQLITE}::test_lost_answer_is_told",),
    ),
    Mutant(
        name="confirms-of-all-handlings",
        file=_SQL,
        old='"message_key": mark.claim.id.key,\n                "output_id": output,',
        new='"message_key": mark.claim.id.key,\n                "output_id": marks[0].confirmed[0],',
        breaks="Of several confirmed outputs one is recorded, and the others go out again for ever.",
        tests=(f"{_SQLITE}::test_confirms_are_of_exactly_those",),
    ),
    Mutant(
        name="bodies-as-text-alone",
        file=_SQL,
        old='body = b64decode(kept["base64"]) if "base64" in kept else kept["body"].encode()',
        new='body = (kept["base64"] if "base64" in kept else kept["body"]).encode()',
        breaks="An output that is no text comes back as other bytes.",
        tests=(f"{_SQLITE}::test_outputs_keep_every_property",),
    ),
    Mutant(
        name="type-without-an-entity-accepted",
        file="idemp/startup.py",
        old="        if policy.entity is None:\n",
        new="        if policy.entity == ():\n",
        breaks="A worker starts, and fails of each message.",
        tests=(f"{_CRASHES}::test_a_type_without_an_entity_is_refused_at_start",),
    ),
    Mutant(
        name="unique-ids-of-streams-unchecked",
        file="idemp/inbox/sql/tables.py",
        old="tables = (*self.interned, self.commit)",
        new="tables = self.interned",
        breaks="A worker starts on a table of commits that takes an id twice.",
        tests=("tests/inbox/sql/test_schema.py::test_ids_of_streams_that_are_not_unique_any_more_are_found",),
    ),
)
