"""Faults as patches of the source text. `python -m tests.seeded` says which ones do not apply any more."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A patch, and the test that fails with it.

    Attributes:
        path: File below `idemp/`.
        old: Text that occurs there once.
        new: Text that takes its place.
        test: Files, and behind `::` what the name of the test contains.
    """

    path: str
    old: str
    new: str
    test: str


PROMISES = "tests/test_promises.py::test_"
STORE = "tests/sql/test_conformance.py::TestStore::test_"
SCHEDULER = "tests/sql/test_conformance.py::TestScheduler::test_"
OUTPUTS = "tests/test_inbox_outputs.py::test_"
BULK = "tests/bulk/test_bulk.py::test_"
BROKER = "tests/sql/test_conformance.py::TestBroker::test_"
WAITING = "tests/worker/test_waiting.py::test_"
AIO = "tests/worker/test_aio.py::test_"
ASYNC = "tests/test_async_inbox.py::test_"
RABBIT = "tests/brokers/test_rabbitmq.py::test_"
GUARD = "tests/sql/test_guard.py::test_"
DURABLE = "tests/sql/test_durability.py::test_"
EVENTS = "tests/test_cloudevents.py::test_the_data_of_an_event"
DJANGO = "tests/integrations/test_django.py::test_"
HTTP = "tests/integrations/test_asgi.py::test_"
HOOKS = "tests/integrations/test_webhooks.py::test_a_request_is_handled"
CELERY = "tests/integrations/test_celery.py::test_what_a_task_sends::postgresql::"
FASTSTREAM = "tests/integrations/test_faststream.py::test_"
DRAMATIQ = "tests/integrations/test_dramatiq.py::test_"
INTERRUPTED = "tests/test_app.py::test_a_claim_whose_block_is_interrupted"

FAULTS = [
    # Protocol
    Fault(
        "executor.py",
        "            elif answer.verdict is Verdict.CONFLICT:",
        "            elif False:",
        f"{PROMISES}another_payload",
    ),
    Fault("executor.py", '= "pending"  # a duplicate of our own', '= "due"  #', f"{PROMISES}a_lost_answer"),
    Fault(
        "dispatcher.py",
        "if output.sendable and output.id not in outputs:",
        "if output.id not in outputs:",
        f"{PROMISES}effect_once",
    ),
    Fault(
        "dispatcher.py",
        "for id in stored if id not in refused] if refused",
        "for id in stored] if refused",
        f"{PROMISES}nothing_is_marked_sent",
    ),
    Fault(
        "executor.py",
        "if late and handler.parks_late and not handling.forced:",
        "if False:",
        f"{PROMISES}a_message_beyond_the_window",
    ),
    Fault("executor.py", "and not handling.forced:", "and True:", f"{PROMISES}a_message_beyond_the_window"),
    Fault(
        "executor.py",
        "        for handling in handlings:\n            self.renew(handling)\n",
        "",
        "tests/test_batches.py::test_messages_are_fresh",
    ),
    Fault("settler.py", "delay=0.0, deaths=1,", "delay=0.0, deaths=0,", "tests/worker/test_processes.py::test_poison"),
    Fault(
        "settler.py",
        "if handling.handler is None or handling.handler.opted_in else None",
        "",
        f"{WAITING}messages_that_look_alike",
    ),
    Fault(
        "settler.py",
        "            return handling.claim.waiting_identity(handling.delivery.queue)\n",
        '            return message_digest(handling.delivery, "failed")\n',
        f"{WAITING}copies_of_a_message",
    ),
    Fault(
        "envelopes.py",
        "    if UNREADABLE in delivery.properties:",
        "    if False:",
        "tests/test_hostile.py::test_unreadable",
    ),
    Fault(
        "dispatcher.py",
        "    if len(outputs) > 1:  # one of them",
        "    if False:  #",
        f"{PROMISES}nothing_is_marked_sent",
    ),
    Fault(
        "settler.py",
        "                unsettled.append(handling)\n            elif handling.delivery.row is None:",
        "                unsettled.append(handling)\n            if handling.delivery.row is None:",
        "tests/worker/test_loop.py::test_no_message_is_forgotten",
    ),
    Fault("executor.py", "if row is not None and handling.poison:", "if False:", f"{WAITING}what_was_handled"),
    # Deliveries, handlers, contexts
    Fault("handling.py", "self.delivery.row.deaths_alone >= self.retry.attempts\n", "False\n", f"{WAITING}what_was_handled"),
    Fault("handlers.py", 'headers.get(FINGERPRINT) != "none"', "True", "tests/test_hostile.py::test_a_header_says"),
    Fault(
        "handlers.py",
        "again = delivery.redelivered or delivery.row is not None",
        "again = False",
        "tests/test_handlers.py",
    ),
    Fault(
        "handlers.py",
        "        if inspect.isawaitable(result) or inspect.isasyncgen(result):",
        "        if False:",
        "tests/test_handlers.py",
    ),
    Fault("context.py", "self._claim.key, ordinal)", "self._claim.key, 0)", f"{PROMISES}effect_once"),
    Fault("context.py", "if not str(name).startswith(CONTROL)}", "}", "tests/test_messages.py"),
    Fault(
        "context.py",
        'raise HandlerError(OVER)\n        wait = None if delay is None else seconds(delay, "delay")\n        # A',
        'pass\n        wait = None if delay is None else seconds(delay, "delay")\n        # A',
        "tests/test_messages.py tests/test_handlers.py",
    ),
    Fault(
        "context.py",
        "round(time.time() + (wait or 0.0), 3)",
        "round(time.time(), 3)",
        "tests/test_messages.py::test_a_delayed_message",
    ),
    # Identity and messages
    Fault("identity.py", 'and version != "8":', "and True:", "tests/test_identity.py::test_message_keys"),
    Fault(
        "identity.py",
        'digest("idemp.message", scope or "", original)',
        'digest("idemp.message", "", original)',
        "tests/test_identity.py",
    ),
    Fault("identity.py", 'f"b:{text}", text', 'f"i:{int(value)}", text', "idemp/identity.py"),
    Fault("messages.py", "    if len(document) != len(pairs):", "    if False:", "tests/test_messages.py"),
    Fault("messages.py", "return int(exact)", "return int(value)", "tests/test_identity.py::test_equal_numbers"),
    Fault(
        "messages.py", "return max(0, self.deaths - SUSPICIOUS)", "return self.deaths", f"{WAITING}deaths_in_company::postgresql"
    ),
    Fault(
        "identity.py",
        "if EARLIEST <= moment <= latest:",
        "if moment is not None:",
        "tests/test_identity.py::test_a_message_is_as_old",
    ),
    Fault("identity.py", "if not ADDED.fullmatch(str(name))}", "}", "tests/test_identity.py::test_what_waits_undecoded"),
    Fault("identity.py", "return text.lower() if", "return text if", "tests/test_identity.py::test_uuids"),
    Fault("cloudevents.py", 'member_text(delivery.body, "data") or b"null"', "json.dumps(event.get('data')).encode()", EVENTS),
    Fault("identity.py", "    if UPPER_CASE_UUID.search(text):", "    if False:", "tests/test_identity.py::test_fingerprints"),
    # Failures
    Fault("failures.py", "and (own or phase is not Phase.HANDLER)", "", "tests/test_failures.py"),
    Fault("failures.py", "    if open_question and not store.probe():", "    if False:", "tests/test_failures.py"),
    Fault(
        "failures.py",
        '"in flight", Action.RETRY, "another transaction holds the claim", 0, None, 1.0',
        '"in flight", Action.RETRY, "another transaction holds the claim"',
        "tests/test_failures.py",
    ),
    # Store
    Fault(
        "sql/store.py",
        "if stored.type_id not in types or stored.original_id != original:",
        "if stored.original_id != original:",
        f"{STORE}only_the_same",
    ),
    Fault(
        "sql/store.py",
        "known and stored.fingerprint != claim.fingerprint and not claim.skips_conflicts",
        "False",
        f"{STORE}only_the_same",
    ),
    Fault("sql/store.py", "    if row.quarantined_at is not None:", "    if False:", f"{SCHEDULER}only_their_own_fault"),
    Fault("sql/store.py", 'undelayed and resends != "due"', "undelayed", f"{STORE}outputs_in_their_head_start"),
    Fault("sql/store.py", "if output.delay is not None]", "if False]", f"{PROMISES}a_plain_type_runs"),
    Fault(
        "sql/store.py",
        "return claim.made_at is not None and claim.made_at <= self.purged_before(",
        "return False and self.purged_before(",
        f"{SCHEDULER}a_message_is_late",
    ),
    Fault(
        "sql/guard.py", 'raise self.unit.refuse("session.commit()")', "super().commit()", "tests/sql/test_guard.py::test_refused"
    ),
    Fault(
        "sql/guard.py",
        "        if self.error is not None:  # a handler that caught",
        "        if False:  #",
        "tests/sql/test_guard.py::test_refused",
    ),
    Fault(
        "sql/guard.py",
        "        if word in dialect.refused_words and",
        "        if False and",
        "tests/sql/test_guard.py::test_refused",
    ),
    # Scheduler
    Fault(
        "sql/scheduler.py",
        '            message.c.deliveries == bindparam("delivery"),\n        )\n        self._done',
        "        )\n        self._done",
        f"{SCHEDULER}a_late_settle",
    ),
    Fault("sql/scheduler.py", "case((self._gone, 1), else_=0)", "case((self._gone, 0), else_=0)", f"{SCHEDULER}a_suspect"),
    Fault("sql/scheduler.py", "message.c.deaths - 1)", "message.c.deaths)", f"{SCHEDULER}only_a_death"),
    Fault(
        "sql/scheduler.py",
        "counted, where=message.c.due_at.is_(None))",
        '{"due_at": None}, where=message.c.due_at.is_(None))',
        f"{SCHEDULER}a_copy_counts",
    ),
    Fault(
        "sql/retention.py",
        'inbox.c.claimed_at >= bindparam("reached"), ~unsent)',
        'inbox.c.claimed_at >= bindparam("reached"))',
        f"{SCHEDULER}claims_with_pending",
    ),
    Fault(
        "sql/scheduler.py",
        "            if leased:\n                connection.execute(self._keep, leased)\n",
        "",
        f"{SCHEDULER}a_heartbeat",
    ),
    Fault("sql/broker.py", "message.c.history.is_(None), ", "", f"{WAITING}the_broker_of_tables"),
    Fault("sql/broker.py", "row.deliveries > 1", "False", f"{BROKER}acknowledged_messages"),
    Fault("sql/broker.py", "min(limit, self._prefetch - len(self.leased))", "limit", f"{BROKER}a_receiver_holds"),
    Fault("sql/broker.py", "connection.execute(self._keep,", "(self._keep,", f"{BROKER}messages_are_held"),
    Fault("sql/broker.py", "own=not outage)", "own=True)", f"{BROKER}an_outage"),
    # Worker, inbox, app
    Fault(
        "worker/intake.py",
        "(self._aside if delivery.redelivered else taken)",
        "taken",
        "tests/worker/test_loop.py::test_redelivered_messages",
    ),
    Fault(
        "worker/shell.py",
        "min(self.settings.lease / 3, BEAT)",
        "self.settings.lease",
        "tests/worker/test_loop.py::test_a_worker_is_alive",
    ),
    Fault(
        "worker/lifecycle.py",
        "if self.stopping:  # what was interrupted has made",
        "if False:  #",
        "tests/worker/test_starts.py::test_a_worker_may_be_stopped",
    ),
    Fault(
        "worker/reload.py",
        "        _forget(changed)\n",
        "",
        "tests/worker/test_reload.py::test_a_change_starts",
    ),
    Fault(
        "worker/relay.py",
        "        self._scheduler.refuse(refused)\n",
        "",
        "tests/worker/test_loop.py::test_the_relay_brings",
    ),
    Fault(
        "joining.py",
        "        session.rollback()\n",
        "        pass\n",
        "tests/test_app.py::test_a_claim_whose_block_raises",
    ),
    Fault("joining.py", "    except BaseException:  # a task that", "    except KeyError:  # a task that", INTERRUPTED),
    Fault(
        "joining.py",
        "    if store.database.dialect.autocommits(connection):",
        "    if False:",
        "tests/test_app.py::commits_each",
    ),
    Fault("inbox.py", 'given["headers"] = {**headers, **marks}', "pass", "tests/test_app.py::test_a_model_with_headers"),
    Fault("initiation.py", "        if self._begun:", "        if False:", "tests/test_app.py::test_an_initiation_begins_once"),
    Fault(
        "context.py",
        "isinstance(value, str) and len(value.encode())",
        "len(str(value).encode())",
        "tests/test_app.py::take_over_only",
    ),
    Fault("worker/intake.py", "            self.held += taken\n", "", "tests/worker/test_loop.py::test_rows_are_kept_in_hand"),
    Fault(
        "worker/intake.py",
        "self.suspect_due, self._next_rows = False, 0.0",
        "self._next_rows = 0.0",
        f"{WAITING}a_suspect_and_fresh",
    ),
    Fault("worker/tasks.py", "        self._places -= places\n", "", f"{AIO}places_of_plain::postgresql"),
    Fault(
        "worker/tasks.py",
        "elif now - self._asked > BLOCKED and not self._warned:",
        "elif False:",
        f"{AIO}a_handler_that_blocks::postgresql",
    ),
    # The fast path and asynchronous drivers
    Fault(
        "sql/fast.py",
        "CASE current_setting('idemp.mark',true) WHEN '{mark}' THEN",
        "CASE '' WHEN '' THEN",
        f"{GUARD}committed_below_sqlalchemy::postgresql",
    ),
    Fault("sql/fast.py", "WHERE purged_before>=", "WHERE purged_before<", f"{PROMISES}a_message_beyond::postgresql"),
    Fault(
        "sql/aio.py",
        "        if self._database.dialect.is_open(self.connection):",
        "        if False:",
        f"{ASYNC}a_transaction_that_was_left::postgresql",
    ),
    Fault("sql/aio.py", "        if tx.connection.invalidated:", "        if False:", f"{AIO}a_cancellation_inside::postgresql"),
    # RabbitMQ
    Fault(
        "brokers/rabbitmq/receiver.py",
        "together = [tag for tag in tags if tag < lowest]",
        "together = tags",
        "tests/brokers/test_conformance.py::acknowledged_messages",
    ),
    Fault(
        "brokers/rabbitmq/publisher.py",
        "                alone = True  # one by one",
        "                pass  #",
        f"{RABBIT}headers_that_fit",
    ),
    Fault(
        "brokers/rabbitmq/receiver.py",
        "            link.channel.basic_qos(0, self._prefetch, False)\n",
        "",
        "tests/brokers/test_conformance.py::a_receiver_holds",
    ),
    Fault(
        "brokers/rabbitmq/publisher.py",
        "        if outputs is not self._outputs:",
        "        if True:",
        "tests/brokers/test_conformance.py::messages_that_were_begun",
    ),
    Fault(
        "brokers/rabbitmq/link.py",
        "                self.properties[UNREADABLE] = b64encode",
        "                self.properties['x'] = b64encode",
        f"{RABBIT}what_can_be_read",
    ),
    Fault(
        "initiation.py",
        "                self._work.outputs = answer.outputs\n",
        "                pass\n",
        "tests/test_app.py::test_a_second_initiation",
    ),
    # Lazy commits
    Fault("executor.py", "        if not found:\n", "        if True:\n", f"{DURABLE}commits_that_are_lost"),
    Fault("executor.py", "handling.lazy or handling.verdict is Verdict.DUPLICATE", "handling.lazy", f"{DURABLE}no_duplicate"),
    Fault("sql/fast.py", "SELECT pg_logical_emit_message(true,'idemp','')", "SELECT 1", f"{DURABLE}no_duplicate"),
    Fault("sql/store.py", "found.found in (None, at)", "True", f"{DURABLE}what_was_claimed_anew"),
    Fault("sql/store.py", "(claim.made_at or 0.0) * 1e6) > 1", "0) > 1", f"{DURABLE}a_claim_that_looks"),
    Fault("sql/store.py", "            dialect.let_commit_wait(connection)\n", "            pass\n", f"{DURABLE}no_duplicate"),
    Fault("initiation.py", "not all(store.read_back([claim]))", "False", f"{DURABLE}no_duplicate"),
    Fault("prepared/barrier.py", "dialect.let_commit_wait(connection)", "dialect", f"{DURABLE}no_duplicate"),
    # MariaDB and MySQL
    Fault("sql/mysql.py", "= 1062, 1205, 1305", "= 1205, 1062, 1305", f"{STORE}only_the_same_message::mariadb"),
    Fault("sql/scheduler.py", "if refusal.own and row.early:", "if False:", f"{SCHEDULER}an_output_whose_queue"),
    Fault("sql/scheduler.py", "if turned_back or not self._begun:", "if False:", f"{SCHEDULER}nothing_waits_for_longer"),
    # Chunks
    Fault("bulk/core.py", "handling.claimer == run and not again", "handling.claimer == run", f"{BULK}each_row_has_one"),
    Fault("bulk/core.py", ".read_back(list(handlings.values()))", ".read_back([])", f"{DURABLE}no_duplicate"),
    Fault(
        "bulk/sets.py",
        "        self._store.finish(tx, [])\n",
        "        fresh and self._store.finish(tx, [])\n",
        f"{DURABLE}no_duplicate",
    ),
    Fault("bulk/sets.py", "i.original_id=s.original_id AND ({same})", "i.original_id=s.original_id", f"{BULK}each_row_has_one"),
    Fault("bulk/sets.py", "theirs |= self._late(", "self._late(", f"{BULK}rows_older"),
    Fault("bulk/sets.py", "get_byte({key},6)>>4 IN (7,8)", "get_byte({key},6)>>4 IN (8)", f"{BULK}a_set_stores"),
    Fault("bulk/sets.py", "inherit(properties, inherited, {})", "pass", "tests/bulk/test_readings.py::test_all_ways"),
    Fault("bulk/sets.py", "self._handler.decode(delivery)", "pass", f"{BULK}a_set_gets_no_row"),
    Fault(
        "bulk/core.py",
        "message = read_delivery(delivery)",
        "message = delivery",
        f"{BULK}a_row_with_odd::postgresql",
    ),
    Fault("sql/store.py", 'if row["wait"] is not None:', "if True:", f"{BULK}outputs_wait"),
    # CloudEvents, doctor, telemetry
    Fault("identity.py", "    if SOURCE in properties:\n", "    if False:\n", "tests/test_cloudevents.py::test_both_modes"),
    Fault("cloudevents.py", "if attributes[name] != own[name]:", "if False:", "tests/test_cloudevents.py::test_what_is_no_event"),
    Fault(
        "sql/records/waiting.py",
        "if queue.overdue > OVERDUE and not queue.held:",
        "if False:",
        "tests/cli/test_doctor.py::test_a_queue_that",
    ),
    Fault(
        "telemetry/tracing.py",
        "if first.is_valid else []",
        "if False else []",
        "tests/telemetry/test_tracing.py::test_a_duplicate_links",
    ),
    Fault(
        "handling.py",
        'return "dead" if self.parked else "retry"',
        'return "retry"',
        "tests/telemetry/test_metrics.py::test_what_a_worker",
    ),
    # Outputs without a worker
    Fault(
        "sql/guard.py",
        "        _prove(connection, dialect, name)\n",
        "",
        "tests/test_app.py::test_a_block_that_catches::postgresql",
    ),
    Fault("sql/guard.py", "    if not same:\n", "    if False:\n", "tests/test_app.py::test_a_block_whose_statement::mariadb"),
    Fault(
        "sql/postgresql.py", "concat({MARKED},'/{name}')", "'/{name}'", "tests/test_app.py::test_blocks_are_nested::postgresql"
    ),
    Fault("inbox.py", "if output.id in pending]", "]", f"{OUTPUTS}what_is_not_committed"),
    Fault("sql/store.py", "return not row.body and", "return not row.body or", f"{STORE}an_empty_message"),
    Fault("executor.py", "emitted[:-1], emitted[-1].body", "emitted, emitted[-1].body", f"{OUTPUTS}a_type_that"),
    Fault(
        "sql/records/claims.py",
        "    if row.kind == RESULT:\n        return",
        "    if False:\n        return",
        f"{OUTPUTS}a_duplicate_gets",
    ),
    Fault("joining.py", "unit.stored, unit.result = answer.outputs, answer.result", "pass", f"{OUTPUTS}a_caller_sends"),
    Fault("joining.py", "outputs)], grace or 0.0)", "outputs)], 0.0)", f"{OUTPUTS}a_caller_sends"),
    Fault(
        "worker/relay_thread.py",
        "if self._thread is not None and self._thread.is_alive():",
        "if self._thread is not None:",
        f"{OUTPUTS}the_relay_thread_survives",
    ),
    Fault(
        "worker/relay_thread.py",
        "raise_red(check_broker(store.database, broker.identity))",
        "pass",
        f"{OUTPUTS}a_relay_to_another",
    ),
    # What a user's first week meets
    Fault(
        "joining.py",
        "        session.rollback()\n        raise",
        "        raise",
        "tests/test_app.py::test_an_initiation_that_cannot",
    ),
    Fault("joining.py", "    if unit.duplicate:", "    if False:", "tests/test_app.py::test_an_initiation_joins"),
    Fault("sql/guard.py", 'raise BlockEnded("session.commit()")', "return", "tests/test_app.py::test_a_block_that_ends"),
    Fault("failures.py", " or isinstance(error, TimedOut)", "", "tests/worker/test_timeouts.py::test_a_time_out_does_not_count"),
    Fault(
        "handlers.py",
        "if limit.expired() or took > self.timeout:  #",
        "if False:  #",
        "tests/worker/test_timeouts.py::test_an_async_handler::postgresql",
    ),
    Fault(
        "executor.py",
        "if (took := time.monotonic() - start) > timeout:",
        "if False and (took := 0):",
        "tests/worker/test_timeouts.py::test_a_plain_handler",
    ),
    Fault("events.py", "RUNNING.get()", "()", "tests/telemetry/test_logs.py::test_each_line"),
    Fault(
        "integrations/alembic.py",
        'PARTITION.sub("", name) not in own',
        "True",
        "tests/integrations/test_alembic.py::test_tables_in_a_schema::postgresql",
    ),
    Fault("bulk/lines.py", "isinstance(id, bool) or", "", "tests/bulk/test_file.py::test_each_line"),
    # Django
    Fault("integrations/django/inbox.py", "            bridge.check(connection)\n", "", f"{DJANGO}an_error_that_was_caught"),
    Fault("integrations/django/inbox.py", "    if unit.stored:", "    if False:", f"{DJANGO}a_function_runs_once"),
    Fault("integrations/django/inbox.py", "durable=durable),", "savepoint=False),", f"{DJANGO}an_outer_transaction"),
    Fault("integrations/django/bridge.py", "        self._bridge.check(self.connection)\n", "", f"{DJANGO}a_handler_that_spoils"),
    Fault("integrations/django/bridge.py", "[(ids, hook, True)", "[(ids, hook, _)", f"{DJANGO}hooks_of_on_commit"),
    Fault("integrations/django/bridge.py", '"do_rollback", ', "", f"{DJANGO}an_outer_transaction"),
    Fault(
        "integrations/django/admin.py",
        "self.has_change_permission if replays else self.has_delete_permission",
        "self.has_view_permission",
        f"{DJANGO}the_pages",
    ),
    Fault(
        "integrations/django/tasks.py", ".total_seconds()) if task.run_after", ".total_seconds()) if False", f"{DJANGO}tasks_run"
    ),
    # HTTP
    Fault("joining.py", "        unit.close()", "        pass", f"{HTTP}background_tasks::sqlite"),
    Fault("integrations/_capture.py", "is None or context.closed else", "is None else", f"{HTTP}background_tasks::sqlite"),
    Fault(
        "integrations/asgi.py", "frozenset({401, 403, 408, 409,", "frozenset({401, 403, 408,", f"{HTTP}what_is_not_final::sqlite"
    ),
    Fault("integrations/asgi.py", "[:32]", "[:0]", f"{HTTP}a_key_has::sqlite"),
    Fault("integrations/asgi.py", '{key}" if len(key) <= 220 else', '{key}"[:255] if True else', f"{HTTP}keys"),
    Fault("integrations/asgi.py", "sha256(head + body)", "sha256(body)", f"{HTTP}a_key_has::sqlite"),
    Fault("integrations/asgi.py", "                await do(commit)", "                pass", f"{HTTP}a_key_has::sqlite"),
    Fault("integrations/asgi.py", "unsure = self._committing and", "unsure = False and", f"{HTTP}an_error_of_a_commit::sqlite"),
    Fault(
        "integrations/asgi.py",
        "                    return await self._fail(error)\n                #",
        "                    pass\n                #",
        f"{HTTP}what_cannot_be",
    ),
    Fault(
        "integrations/asgi.py",
        "self._end(ConnectionError(f",
        "self._end() if status else (ConnectionError(f",
        f"{HTTP}what_is_not_final::sqlite",
    ),
    Fault("integrations/webhooks.py", "> WINDOW", "> 9 * WINDOW", f"{HOOKS}::stripe"),
    Fault("integrations/webhooks.py", 'f"{id}.{stamp}.".encode() + body', 'f".{stamp}.".encode() + body', f"{HOOKS}::standard"),
    Fault("integrations/webhooks.py", "if not any(", "if not given and any(", f"{HOOKS}::github"),
    # Celery, on servers
    Fault("integrations/celery.py", "if unit else producer", "if False else producer", f"{CELERY}redis"),
    Fault("integrations/celery.py", "        with capturing(None):", "        with capturing(current()):", f"{CELERY}rabbitmq"),
    Fault("integrations/celery.py", 'key = f"{key}#{nesting}"', "pass", f"{CELERY}redis"),
    Fault(
        "integrations/celery.py",
        "return inbox.relay()",
        "return None",
        "tests/integrations/test_celery.py::test_the_relay::postgresql",
    ),
    # FastStream
    Fault(
        "integrations/faststream.py",
        "captured_into(self.owner.outlet) if self.msg is None",
        "None if self.msg is None",
        f"{FASTSTREAM}a_subscriber_that_fails",
    ),
    Fault(
        "integrations/faststream.py",
        "            return None if self.unit.duplicate else await call_next(message)",
        "            result = None if self.unit.duplicate else await call_next(message)\n"
        "        await self.block.__aexit__(None, None, None)\n        self.unit = None\n        return result",
        f"{FASTSTREAM}a_reply",
    ),
    Fault(
        "integrations/faststream.py",
        "        self.message, self.error, until =",
        "        await message.ack()\n        self.message, self.error, until =",
        f"{FASTSTREAM}processes_that_are_killed::postgresql",
    ),
    Fault(
        "integrations/faststream.py",
        "if outage and self.owner.relaying and",
        "if False and",
        f"{FASTSTREAM}each_message::postgresql",
    ),
    # dramatiq
    Fault("integrations/dramatiq.py", "if unit := current(self):", "if unit := None:", f"{DRAMATIQ}a_message_under"),
    Fault("integrations/dramatiq.py", "_marked(actor) is not run:", "actor.fn is not run:", f"{DRAMATIQ}methods"),
    Fault("integrations/dramatiq.py", "if not _is_outage(error):", "if error:", f"{DRAMATIQ}a_retry"),
    Fault("integrations/dramatiq.py", "each.after_process_message = partial(self._follow, each)", "pass", f"{DRAMATIQ}actors"),
    Fault("integrations/dramatiq.py", "if call.is_dead(error):", "if False:", f"{DRAMATIQ}actors"),
    Fault("integrations/dramatiq.py", "fate(error) is Fate.HOLD or", "False or", f"{DRAMATIQ}a_database"),
]
