"""Faults in what relays take and for how long, in whose outputs are whose, and in where copies end."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_BROKERS: Final = "tests/inbox/sql/test_brokers.py"
_TWO: Final = "tests/e2e/test_two_brokers.py"
_COMMANDS: Final = "tests/cli/test_printed_commands.py"
_PUBLISHER: Final = "tests/broker/kombu/test_publisher.py"
_REDISPATCH: Final = "tests/protocol/test_redispatch.py"
_PREVIOUS: Final = "tests/protocol/test_windows.py::TestPrevious"

IN_RELAYING: Final = (
    Mutant(
        name="relay-takes-other-brokers-outputs",
        file="idemp/inbox/sql/leases.py",
        old="Locking(due.where(broker.owns(pending)))",
        new="Locking(due)",
        breaks="A relay sends outputs to a broker that they do not belong to, and records them as confirmed.",
        tests=(f"{_BROKERS}::TestLeases",),
    ),
    Mutant(
        name="any-brokers-relay-is-alive",
        file="idemp/inbox/sql/liveness.py",
        old="relays.where(broker.owns(worker)).limit(1)",
        new="relays.limit(1)",
        breaks="A delivery is acked with pending outputs that no relay sends: the one that lives serves another broker.",
        tests=(f"{_BROKERS}::TestLife",),
    ),
    Mutant(
        name="outputs-of-no-broker",
        file="idemp/inbox/sql/unit.py",
        old="else Due.after(store.clock.now(), relay_after, store.broker_id)",
        new="else Due.after(store.clock.now(), relay_after)",
        breaks="Outputs for a named broker are left to the relay of another one.",
        tests=(f"{_BROKERS}::TestLeases",),
    ),
    Mutant(
        name="second-broker-takes-the-name",
        file="idemp/inbox/sql/brokers.py",
        old="    if stored is not None and stored != identity:",
        new="    if stored is None:",
        breaks="Two brokers share a name in silence, and each relay ships the other's outputs.",
        tests=(f"{_BROKERS}::TestNames",),
    ),
    Mutant(
        name="brokers-of-one-cluster-are-one",
        file="idemp/broker/kombu/link.py",
        old="""return f"RabbitMQ cluster {cluster!r}, virtual host {host!r}" if cluster""",
        new="""return f"RabbitMQ cluster {cluster!r}, virtual host {'/'!r}" if cluster and host""",
        breaks="Two virtual hosts pass for one broker.",
        tests=(f"{_TWO}::test_second_broker_without_a_name_is_refused_at_start",),
    ),
    Mutant(
        name="command-makes-a-broker",
        file="idemp/cli/wiring.py",
        old="    if found.broker_url is not None and (path := missing_file(found.broker_url)) is not None:",
        new="    if found.broker_url is None and (path := missing_file('local:')) is not None:",
        breaks="A relay without a broker's URL makes an embedded broker in the folder and ships there.",
        tests=(f"{_COMMANDS}::test_no_broker_is_made_where_none_is_named",),
    ),
    Mutant(
        name="relay-waits-longer-than-its-lease",
        file="idemp/relay.py",
        old="self._timeout = lease / 2",
        new="self._timeout = lease * 2",
        breaks="While a relay waits for confirms, another one takes and sends the same outputs.",
        tests=("tests/test_relay.py::test_relay_gives_up_waiting_before_its_lease_ends",),
    ),
    Mutant(
        name="lease-counted-from-before-the-wait",
        file="idemp/inbox/sql/leases.py",
        old='connection.execute(self._lease, {"ids": ids, **self._moments.said("until", ahead + lease)})',
        new='connection.execute(self._lease, {"ids": ids, "until": wanted["now"] + lease})',
        breaks="A lease is over when it is given, after a wait for the table: two relays send the same outputs.",
        tests=(
            "tests/inbox/sql/test_upkeep.py::TestPending::test_a_lease_is_counted_from_after_the_wait_for_its_turn",
        ),
    ),
    Mutant(
        name="queues-drop-what-is-over-a-limit",
        file="idemp/broker/kombu/topology.py",
        old='        "x-overflow": "reject-publish",\n',
        new="",
        breaks="Where a policy limits queues, a confirmed message pushes an older one out.",
        tests=(f"{_PUBLISHER}::test_queues_of_an_app_drop_nothing_where_an_operator_limits_them",),
    ),
    Mutant(
        name="channel-kept-after-a-timeout",
        file="idemp/broker/kombu/publisher.py",
        old="            self._discard()\n        if link is not None and link.blocked:",
        new="        if link is not None and link.blocked:",
        breaks="Messages go over a channel on which half a message may stand.",
        tests=(f"{_PUBLISHER}::test_channel_is_not_used_again_after_a_timeout",),
    ),
    Mutant(
        name="copies-channel-kept-after-a-timeout",
        file="idemp/broker/kombu/posting.py",
        old='            self._lose(Refusal("timeout", "no confirm in time"))',
        new="""\
            self._answers.update(dict.fromkeys(self._confirms.waiting, Refusal("timeout", "no confirm in time")))""",
        breaks="Copies of retried and parked messages go over a channel on which half a message may stand.",
        tests=("tests/broker/kombu/test_outstanding.py::test_connection_of_copies_is_not_used_again_after_a_timeout",),
    ),
    Mutant(
        name="copy-redispatches-what-its-dispatcher-has-in-hand",
        file="idemp/protocol.py",
        old="return due_at is not None and timedelta(0) < due_at - self.consumer.clock.now() <= longest",
        new="return False",
        breaks="Where threads share a flow that keeps itself going, one duplicate costs a copy of each tick for ever.",
        tests=(f"{_REDISPATCH}::TestMarksInAnotherThread",),
    ),
    Mutant(
        name="copy-acked-before-its-outputs-are-confirmed",
        file="idemp/protocol.py",
        old="            if left or any(output.id in pending for output, _ in refused):",
        new="            if any(output.id in pending for output, _ in refused):",
        breaks="A copy is acked though its outputs have no confirm and no relay lives.",
        tests=(f"{_REDISPATCH}::TestMarksInAnotherThread::test_nothing_is_sent_again",),
    ),
    Mutant(
        name="former-release-finds-no-outputs",
        file="idemp/steps.py",
        old="        if outputs and not self.store.per_entity:\n",
        new="        if outputs and self.store.per_entity:\n",
        breaks="While two releases run, the former one acks what the new one has handled and not sent.",
        tests=(f"{_PREVIOUS}::test_former_release_acks_nothing_that_is_unconfirmed",),
    ),
    Mutant(
        name="copies-under-former-ids-not-erased",
        file="idemp/inbox/sql/erasing.py",
        old=".where(*claim, copied.c.output_id.in_(",
        new=".where(*claim, copied.c.message_key == inbox.c.message_key, copied.c.output_id.in_(",
        breaks="Personal data that was erased stands under a former id.",
        tests=(f"{_PREVIOUS}::test_copies_under_a_former_id_are_erased_with_the_outputs",),
    ),
)
