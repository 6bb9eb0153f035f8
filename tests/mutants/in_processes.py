"""Faults in what belongs to one process: connections at a fork, and files that are deleted or replaced."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_FORKS: Final = "tests/forks/test_forks.py"
_REPLACED: Final = "tests/test_replaced_files.py"

IN_PROCESSES: Final = (
    Mutant(
        name="child-keeps-the-parents-transaction",
        file="idemp/inbox/sql/pooling.py",
        old="            record.dbapi_connection = _ParentsConnection()\n",
        new="            continue\n",
        breaks="A child that ends rolls back, or commits, what its parent has begun.",
        tests=(f"{_FORKS}::test_connections_that_the_parent_has_in_use",),
    ),
    Mutant(
        name="child-rolls-back-thread-locals",
        file="idemp/inbox/sql/pooling.py",
        old="            record.dbapi_connection = None\n            raise _parents()\n",
        new="            return\n",
        breaks="A child rolls back the session that another thread of its parent has in a thread-local variable.",
        tests=(f"{_FORKS}::test_connections_that_the_parent_has_in_use",),
    ),
    Mutant(
        name="child-keeps-the-parents-link",
        file="idemp/broker/kombu/link.py",
        old="        sock, self._transport.sock, self._transport.connected = self._transport.sock, None, False\n",
        new="        sock = None\n",
        breaks="A child that closes what it inherited closes the connection of its parent, and may ack its deliveries.",
        tests=(f"{_FORKS}::test_connections_that_the_parent_has_in_use",),
    ),
    Mutant(
        name="children-share-a-name",
        file="idemp/inbox/sql/store.py",
        old="        self.worker = _worker_name()\n        self.upkeep",
        new="        self.upkeep",
        breaks="The end of one child takes the heartbeat of all others back.",
        tests=(f"{_FORKS}::test_connections_that_the_parent_has_in_use",),
    ),
    Mutant(
        name="read-only-sessions-go-back-to-the-pool",
        file="idemp/inbox/sql/pooling.py",
        old="            self._fit_since = time.monotonic()\n            record.invalidate()\n",
        new="            pass\n",
        breaks="After a failover workers and relays ask the old server, which takes no writes, for as long as it lives.",
        tests=("tests/protocol/test_read_only.py::test_sessions_that_stay_read_only_are_left",),
    ),
    Mutant(
        name="child-waits-for-turns-of-the-parent",
        file="idemp/suspects.py",
        old="        self.running = self._loners = 0\n        self._in_company = None\n",
        new="        self._in_company = None\n",
        breaks="A child waits for a handler of its parent before each of its own.",
        tests=(f"{_FORKS}::test_locks_that_the_parent_holds",),
    ),
    Mutant(
        name="sqlite-taken-into-the-child",
        file="idemp/files.py",
        old="    if found is not None and found in _open_here():\n",
        new="    if found is None:\n",
        breaks="A child goes on with SQLite's locks of its parent, which it does not have: its commits may be lost.",
        tests=(f"{_FORKS}::test_sqlite_that_the_parent_has_in_use",),
    ),
    Mutant(
        name="replaced-file-unnoticed",
        file="idemp/files.py",
        old="            if known is not None and identity_of(name) != known:\n",
        new="            if known == (0, 0):\n",
        breaks="A worker goes on in a file that has no name any more; its effects and outputs exist nowhere.",
        tests=(_REPLACED,),
    ),
    Mutant(
        name="log-known-before-it-is-read",
        file="idemp/broker/local/file.py",
        old="        self._file = OpenFile(self._path, self._identity)\n",
        new="        self._file = OpenFile(self._path, self._identity)\n        self._file.look()\n",
        breaks="A worker that starts while a command ends takes SQLite's own removal of the log for a loss, and stops.",
        tests=(f"{_REPLACED}::test_log_that_its_last_connection_takes_along_was_not_replaced",),
    ),
    Mutant(
        name="validator-ends-the-effects",
        file="idemp/effects/runner.py",
        old="        except BaseException as error:  # noqa: BLE001 - judged by whoever waits for it\n",
        new="        except EffectRefused as error:\n",
        breaks="An effect's value that its class refuses by an error of its own ends the worker, again and again.",
        tests=("tests/effects/test_runner.py::test_whatever_a_validator_raises_is_a_failure_of_the_effect",),
    ),
    Mutant(
        name="effects-nobody-can-read",
        file="idemp/effects/declared.py",
        old="        effect.codec.decode(*parse_body(body))\n",
        new="        parse_body(body)\n",
        breaks="A handling commits an effect whose class does not read what it writes: it can never be run.",
        tests=("tests/effects/test_declaring.py::test_refused_before_commit",),
    ),
    Mutant(
        name="effects-held-up-in-silence",
        file="idemp/worker.py",
        old="        if any(runner.held_up for runner in list(self._effect_runners)):\n",
        new="        if self._effect_runners is None:\n",
        breaks="Ten effects that hang stop all others, and `/health` calls the process well.",
        tests=("tests/effects/test_runner.py::test_runs_that_do_not_end_are_told_when_they_hold_up_others",),
    ),
    Mutant(
        name="confirmed-in-a-replaced-file",
        file="idemp/broker/local/file.py",
        old='                raw.execute("COMMIT")\n                self.check_file()\n',
        new='                raw.execute("COMMIT")\n',
        breaks="What was under way while the embedded broker's file was deleted counts as confirmed.",
        tests=(f"{_REPLACED}::test_transaction_that_was_under_way_is_not_confirmed",),
    ),
    Mutant(
        name="delays-wait-for-the-former-clock",
        file="idemp/broker/local/leases.py",
        old="        self._turn_back(self.queues, now)\n        return True\n",
        new="        return True\n",
        breaks="After the machine's clock is set back, retries of the embedded broker wait that much longer.",
        tests=("tests/broker/test_local.py::test_delays_last_their_time_though_the_clock_is_set_back",),
    ),
    Mutant(
        name="committed-to-a-replaced-file",
        file="idemp/inbox/sql/pooling.py",
        old="        if connection is None or isinstance(connection, _ParentsConnection):\n            return\n",
        new="        return\n",
        breaks="A handling that was committed to a deleted SQLite file is acked, and its outputs are sent.",
        tests=(f"{_REPLACED}::test_commit_into_a_file_that_is_gone_fails",),
    ),
    Mutant(
        name="worker-waits-for-a-replaced-broker",
        file="idemp/consuming.py",
        old="                except BrokerReplaced:\n                    raise\n",
        new="",
        breaks="A worker whose broker's file is gone waits for ever for it to come back.",
        tests=(f"{_REPLACED}::test_worker_stops_and_confirms_nothing_more",),
    ),
    Mutant(
        name="forked-child-goes-on",
        file="idemp/forking.py",
        old="    if os.getpid() != process:\n        _end_child(function, None)\n",
        new="",
        breaks="A child that a handler forks and that returns is a second worker, which outlives its parent.",
        tests=("tests/test_forking.py::test_a_child_of_a_handler_ends_where_the_handler_does",),
    ),
    Mutant(
        name="forked-child-emits-into-nothing",
        file="idemp/emitting.py",
        old="if os.getpid() != self._process:",
        new="if False:",
        breaks="What a forked child emits is dropped without a word.",
        tests=("tests/test_forking.py::test_a_child_of_a_handler_ends_where_the_handler_does",),
    ),
)
