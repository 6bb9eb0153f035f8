"""Faults in documents as inbox."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_COLLECTOR: Final = "idemp/inbox/document/collector.py"
_COUCHDB: Final = "idemp/inbox/document/couchdb.py"
_DYNAMODB: Final = "idemp/inbox/document/dynamodb.py"
_STATE: Final = "idemp/inbox/document/state.py"
_INBOX: Final = "tests/inbox/document/test_inbox.py"
_MEMORY: Final = "tests/inbox/document/test_memory.py::TestDocumentInbox"
_SERVERS: Final = "tests/inbox/document/test_conformance.py"

IN_DOCUMENTS: Final = (
    Mutant(
        name="equal-in-python-unwritten",
        file=_STATE,
        old="        return not is_same(self.body(), dict(self._read))\n",
        new="        return self.body() != self._read\n",
        breaks="A change from 1 to true is acked and not written, since Python takes both for equal.",
        tests=(f"{_INBOX}::test_what_python_takes_for_equal_is_a_change_all_the_same",),
    ),
    Mutant(
        name="keys-become-text",
        file=_STATE,
        old="        _check_keys(self.id, self.document)\n",
        new="",
        breaks="A handler that counts under a number as key begins at nothing each time, and nothing says so.",
        tests=(f"{_INBOX}::test_keys_that_json_would_turn_into_text_are_refused",),
    ),
    Mutant(
        name="attachments-are-deleted",
        file=_COUCHDB,
        old='found.get("_attachments", {})',
        new="{}",
        breaks="A handling deletes the files that are attached to its entity's document.",
        tests=(f"{_SERVERS}::TestDocuments::test_what_is_beside_the_body_stays",),
    ),
    Mutant(
        name="attachments-are-deleted-by-the-second-write",
        file=_COUCHDB,
        old='return _Revision.of(self._told(answer, writes=True)["rev"], former.attachments)',
        new='return _Revision.of(self._told(answer, writes=True)["rev"], {})',
        breaks="A program that writes twice after one read deletes the files that are attached to the document.",
        tests=(f"{_SERVERS}::TestDocuments::test_what_is_beside_the_body_stays",),
    ),
    Mutant(
        name="whole-items-are-written",
        file=_DYNAMODB,
        old='self._ask("update_item", writes=True, Key=key, UpdateExpression=expression, **update)',
        new='item = {**key, "revision": {"S": revision}, "body": {"S": content}}\n'
        '        self._ask("put_item", writes=True, Item=item, **_condition(expected))',
        breaks="A handling deletes the attributes that other programs keep in its entity's item.",
        tests=(f"{_SERVERS}::TestInbox::test_nothing_of_others_is_changed",),
    ),
    Mutant(
        name="numbers-are-rounded",
        file=_DYNAMODB,
        old='json.loads(texts["body"], parse_float=_exact, ',
        new='json.loads(texts["body"], ',
        breaks="A price that another program wrote with thirty digits has sixteen after a handling.",
        tests=("tests/inbox/document/test_adapters.py::TestDynamoDB::test_bodies_that_would_not_stay_as_they_are",),
    ),
    Mutant(
        name="empty-field-of-the-users-is-taken",
        file=_STATE,
        old="isinstance(found, dict) and bool(found) and all(",
        new="isinstance(found, dict) and all(",
        breaks="A field of the user's where ids are kept is overwritten instead of refused.",
        tests=(f"{_INBOX}::test_a_field_of_the_users_own_where_ids_are_kept",),
    ),
    Mutant(
        name="deleted-entity-is-revived",
        file=_COLLECTOR,
        old="            if state.revision is not None:\n",
        new="            if attempt.expects is None or state.revision is not None:\n",
        breaks="The collector makes an empty document in the place of one that its owner deleted.",
        tests=(f"{_MEMORY}::test_deleted_entity_is_not_revived",),
    ),
    Mutant(
        name="full-document-unnoticed",
        file="idemp/inbox/watching.py",
        old="if size > NEARLY_FULL * largest and",
        new="if size > largest and",
        breaks="An entity's document fills without a word, until its messages are parked.",
        tests=(f"{_INBOX}::test_a_document_that_fills_is_warned_of_and_refused_with_nothing_lost",),
    ),
    Mutant(
        name="attempt-without-a-document-is-collected",
        file=_COLLECTOR,
        old="            elif not attempt.counted:\n",
        new="            elif attempt.counted:\n",
        breaks="A slow write makes the entity's document, and the outputs that it names are gone.",
        tests=(f"{_INBOX}::test_attempt_that_may_still_make_its_document_is_kept",),
    ),
)
