"""The pipeline on real Spark: each id handled once in total, parked rows exactly the bad ones."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import delete, insert, make_url, select, text, update

from idemp import ConfigurationError, Inbox, Settings
from idemp.policy import Idempotent
from idemp.process import Process
from idemp.sql.records.claims import InboxRecords
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.schema import upgrade
from tests.bulk import readings
from tests.bulk.test_readings import handle_online
from tests.servers.java import java_options
from tests.spark import shop as shop_module
from tests.spark.conftest import ROOT, Shop, parked
from tests.worker.test_loop import wait_for
from tests.world import effect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["postgresql"], indirect=True)]
APP = "tests.spark.shop:app"
MESSAGES = int(os.environ.get("IDEMP_TEST_MESSAGES", "1000"))
ROWS = "id string, type string, time double, headers map<string,string>, body binary"


def rows(ids: list[str], **fields: str) -> list[tuple[Any, ...]]:
    return [(each, "shop.Order", None, None, json.dumps({"order_id": each, **fields}).encode()) for each in ids]


def frame(spark: SparkSession, data: list[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(data, ROWS)


def ids(count: int, prefix: str = "o") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def once(*expected: str) -> Counter[str]:
    return Counter(dict.fromkeys(expected, 1))


def test_a_backfill_adds_up_and_its_parked_rows_are_an_input(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    from idemp.bulk.lines import readable
    from idemp.spark import sink
    from idemp.spark.parked import read_parked

    online(tables)("online")
    data = rows([*ids(300), *ids(50), "online", "bad-1", "bad-2"])
    data += [
        ("o-7", "shop.Order", None, None, b'{"order_id": "other"}'),
        ("broken", "shop.Order", None, None, b"{"),
        (None, "shop.Order", None, None, b"{}"),
    ]
    data += [(f"k{n}", "shop.Keyed", None, None, b'{"order_id": %d}' % (n % 5)) for n in range(20)]
    folder = tmp_path / "parked"
    backfill = sink(APP, parked=str(folder), run="backfill", rows=100)
    assert dict(backfill.run(frame(spark, data)).counts) == {"new": 305, "replay": 0, "duplicate": 66, "conflict": 1, "parked": 4}
    assert dict(backfill.run(frame(spark, data)).counts) == {"new": 0, "replay": 305, "duplicate": 66, "conflict": 1, "parked": 4}
    assert tables.effects() == once("online", *ids(300), *(f"keyed-{n}" for n in range(5)))
    assert parked(spark, folder) == Counter({"o-7": 2, "bad-1": 2, "bad-2": 2, "broken": 2, None: 2})  # of both attempts
    # Equal rows are one; some are corrected, and the others stay open.
    open_rows = {row.id: readable(row.asDict()) for row in read_parked(spark, str(folder)).collect()}
    assert open_rows.keys() == {"o-7", "bad-1", "bad-2", "broken", None}
    lines = [json.dumps({**open_rows[id], "body": open_rows[id]["body"].replace("bad", "good")}) for id in ("bad-1", "bad-2")]
    lines.append(json.dumps({**open_rows["broken"], "body": '{"order_id": "bad-3"}'}))
    replayed = sink(APP, parked=str(folder)).replay(spark, lines)
    assert dict(replayed.counts) == {"new": 2, "replay": 0, "duplicate": 0, "conflict": 0, "parked": 1}
    assert {row.id: bytes(row.body) for row in read_parked(spark, str(folder)).where("id IS NOT NULL").collect()} == {
        "o-7": b'{"order_id": "other"}',
        "broken": b'{"order_id": "bad-3"}',
    }
    # A file that appears while a replay runs, because another run is about to commit its attempt, stays open.
    sink(APP, parked=str(folder), run="late").run(frame(spark, rows(["bad-late"])))
    late = list(folder.glob("run=late/*/*.parquet"))
    for file in late:
        file.rename(tmp_path / file.name)
    assert sink(APP, parked=str(folder)).replay(spark).counts["new"] == 0
    for file in late:
        (tmp_path / file.name).rename(file)
    assert {row.id for row in read_parked(spark, str(folder)).collect()} == {"o-7", "broken", "bad-late", None}
    for line, said in (("{", "line 1 is not a parked row"), (json.dumps(open_rows["bad-1"]), "is not open")):
        with pytest.raises(ConfigurationError, match=said):
            sink(APP, parked=str(folder)).replay(spark, [line])
    assert tables.effects() == once("online", *ids(300), *(f"keyed-{n}" for n in range(5)), "good-1", "good-2")


def test_dry_runs_adoption_and_silence(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    from idemp.spark import sink

    data = frame(spark, rows(ids(20)))
    assert sink(APP, parked=str(tmp_path / "p"), dry_run=True).run(data).counts["new"] == 20
    assert (tables.count("inbox"), (tmp_path / "p").exists()) == (0, False)
    assert sink(APP, parked=str(tmp_path / "p"), adopt=True).run(data.where("id < 'o-15'")).counts["new"] == 7
    silent = sink(APP, parked=str(tmp_path / "p"), dispatch="never").run(data)
    assert (silent.counts["new"], silent.counts["duplicate"], silent.outputs) == (13, 7, 13)
    assert (len(tables.effects()), tables.count("output"), tables.count("pending")) == (13, 13, 0)


def test_sets_run_in_the_database(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    from idemp.bulk import SqlSet
    from idemp.spark import sink

    own = SqlSet(effects=["INSERT INTO effect (what) SELECT body ->> 'order_id' FROM {fresh}"])
    found = sink(APP, parked=str(tmp_path), sets={"shop.Order": own}).run(frame(spark, rows([*ids(500), *ids(500)])))
    assert (found.counts["new"], found.counts["duplicate"], tables.effects()) == (500, 500, once(*ids(500)))


def test_a_python_worker_that_is_killed_costs_nothing(
    spark: SparkSession, tables: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that kills its worker whenever it is handled is parked, and no other one."""
    from idemp.spark import progress, sink

    monkeypatch.setattr(progress, "EVERY", 0.2)
    lines: list[str] = []
    data = [*rows(ids(500)), *rows(["killer"], kills=f"worker:{tmp_path}/killed"), *rows(["bad"])]
    data += rows(["poison-1", "poison-2"], kills="always")
    found = sink(APP, parked=str(tmp_path / "parked"), run="killed", rows=50, tasks=4).run(
        frame(spark, data), progress=lines.append
    )
    assert (tmp_path / "killed").exists()
    assert (found.rows, found.counts["new"] + found.counts["replay"]) == (504, 501)
    assert tables.effects() == once("killer", *ids(500))
    kept = {row.id: row.rule for row in spark.read.parquet(str(tmp_path / "parked")).collect()}
    assert kept == {"bad": "handler", "poison-1": "poison", "poison-2": "poison"}
    assert any(
        re.fullmatch(r"[1-3] of 4 tasks, [\d,]+ rows handled, [\d,]+ a second, about [\d,]+ s left", line) for line in lines
    )


def test_spark_s_kafka_source_has_the_messages_that_are_handled_online(
    spark: SparkSession, tables: Shop, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame in its shape, whose headers have what a producer's library writes there."""
    from idemp.spark import sink

    messages = readings.messages()
    handle_online(tables.database, messages)
    expected = readings.stored(tables.database)
    with tables.database.engine.begin() as connection:
        for table in (effect, *(getattr(tables.database.tables, name) for name in ("pending", "output", "inbox"))):
            connection.execute(delete(table))
    monkeypatch.setattr(readings.app, "process", Process(None, Settings(database_url=url)))
    log = spark.createDataFrame([kafka(number, *message) for number, message in enumerate(messages)], KAFKA)
    backfill = sink("tests.bulk.readings:app", parked=str(tmp_path), run="kafka")
    found = backfill.run(log)
    assert (found.counts["new"], found.outputs) == (len(messages), 2 * len(messages))
    assert readings.stored(tables.database) == expected


KAFKA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "headers array<struct<key: string, value: binary>>"
)


def kafka(offset: int, properties: dict[str, Any], body: bytes) -> tuple[Any, ...]:
    """Return a message as Spark's Kafka source has it."""
    said = {name: properties[name] for name in ("message_id", "type", "correlation_id") if name in properties}
    if "content_type" in properties:
        said["content-type"] = properties["content_type"]
    headers = [(name, value.encode()) for name, value in (said | properties["headers"]).items()]
    made = datetime.fromtimestamp(properties["timestamp"], UTC)
    return None, body, "shop", offset % 3, offset // 3, made, 0, headers


def test_spark_submit_runs_a_backfill_on_executors(tables: Shop, url: str, tmp_path: Path) -> None:
    """The app is a Python file beside; its executor has a database user of its own, and is killed, with its JVM."""
    (tmp_path / "freight.py").write_text("from tests.spark.shop import app\n\n__all__ = ['app']\n")
    lines = [json.dumps({"id": id, "order_id": id}) for id in [*ids(1_000), "bad"]]
    lines.append(json.dumps({"id": "killer", "order_id": "killer", "kills": f"executor:{tmp_path}/killed"}))
    (tmp_path / "orders.jsonl").write_text("\n".join(lines))
    with tables.database.engine.begin() as connection:
        connection.execute(text("CREATE ROLE freight LOGIN"))
        connection.execute(text("GRANT USAGE ON SCHEMA public TO freight"))
        connection.execute(text("GRANT ALL ON ALL TABLES IN SCHEMA public TO freight"))
        connection.execute(text("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO freight"))
        connection.execute(text('ALTER TABLE effect ADD COLUMN "by" name DEFAULT current_user'))
    options = {
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.executorEnv.PGUSER": "freight",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": java_options(),
        "spark.executor.extraJavaOptions": java_options(),
        "spark.ui.enabled": "false",
    }
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local-cluster[1,1,1024]"]
    command += ["--py-files", str(tmp_path / "freight.py"), *(f"--conf={name}={value}" for name, value in options.items())]
    command += [
        str(ROOT / "examples" / "spark" / "submit.py"),
        "pipeline",
        "backfill",
        "freight:app",
        str(tmp_path / "orders.jsonl"),
    ]
    command += ["--format", "json", "--of-type", "shop.Order", "--parked", str(tmp_path / "parked"), "--master", "", "--json"]
    user = str(make_url(url).username)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "IDEMP_DATABASE_URL": url.replace(f"{user}@", ""),
        "PGUSER": user,
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(command, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    answers = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, answers["rows"], answers["parked"]) == (1, 1_002, 1), done.stderr[-2_000:]
    assert answers["new"] + answers["replay"] == 1_001
    assert (tmp_path / "killed").exists()
    assert tables.effects() == once("killer", *ids(1_000))
    with tables.database.engine.connect() as connection:
        assert set(connection.scalars(text('SELECT "by" FROM effect'))) == {"freight"}


def test_spark_connect_runs_the_same(spark: SparkSession, tables: Shop, url: str, tmp_path: Path) -> None:
    """A client without a JVM, and a stream whose batches run at the server."""
    script = f"""
import json
from pathlib import Path
from idemp.spark import Columns, reconcile, session, sink
from idemp.bulk.lines import readable
from idemp.spark.parked import read_parked
from tests.spark.test_spark import APP, ROWS, ids, rows, write

def handle(spark):
    data = spark.createDataFrame([*rows(ids(200)), *rows(["bad"])], ROWS)
    found = sink(APP, parked="{tmp_path}/parked", run="connect", rows=100).run(data, progress=print)
    assert (found.counts["new"], found.counts["parked"]) == (200, 1), found
    (line,) = [readable(row.asDict()) for row in read_parked(spark, "{tmp_path}/parked").collect()]
    lines = [json.dumps(line | {{"body": '{{"order_id": "good"}}'}})]
    assert sink(APP, parked="{tmp_path}/parked").replay(spark, lines).counts["new"] == 1
    assert read_parked(spark, "{tmp_path}/parked").count() == 0
    found = reconcile(APP, data)
    assert (found.counts["handled"], found.counts["conflict"]) == (200, 1), found

def stream(spark, run):
    write(Path("{tmp_path}/files"), "0", ids(50, "late"))
    columns = Columns(id="get_json_object(value, '$.order_id')", body="value")
    orders = sink(APP, columns, parked="{tmp_path}/parked", run=run)
    lines = spark.readStream.text("{tmp_path}/files").writeStream.foreachBatch(orders)
    lines.option("checkpointLocation", "{tmp_path}/checkpoint").trigger(availableNow=True).start().awaitTermination()

with session(master="sc://127.0.0.1:{spark.conf.get("spark.connect.grpc.binding.port")}") as spark:
    handle(spark)
    try:
        stream(spark, None)
    except Exception as error:
        assert "has to name its run" in str(error), error
    else:
        raise AssertionError("a stream without a run has started")
    stream(spark, "stream")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IDEMP_DATABASE_URL": url}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert tables.effects() == once("good", *ids(200), *ids(50, "late"))


def test_postgresql_may_restart_in_the_middle(
    spark: SparkSession, open_shop: Callable[[str], Shop], tmp_path: Path, kind: str
) -> None:
    from idemp.spark import sink
    from idemp.sql.engine import Database
    from tests.servers.postgresql import Postgresql

    base = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"idemp-{os.getpid()}"
    with Postgresql(base) as server:
        database = Database(server.url)
        upgrade(database)
        database.close()
        tables = open_shop(server.url)
        outcome: list[Any] = []
        run = sink(APP, parked=str(tmp_path / "parked"), run="restarted", rows=200)
        thread = threading.Thread(target=lambda: outcome.append(run.run(frame(spark, rows([*ids(3_000), "bad"])))))
        thread.start()
        wait_for(lambda: tables.count("inbox"), 120)
        assert tables.count("inbox") < 3_000
        tables.database.close()
        server.restart()
        thread.join(180)
        assert (outcome[0].rows, parked(spark, tmp_path / "parked")) == (3_001, once("bad"))
        assert tables.effects() == once(*ids(3_000))
        tables.database.close()
    shutil.rmtree(base)


def online(tables: Shop) -> Callable[[str], Any]:
    """Return what handles a message as a consumer does that leaves its outputs to a relay."""
    handle = Inbox(tables.database.engine).wrap(
        shop_module.ship, message=shop_module.Order, consumer="shop", policy=Idempotent(retention="7d")
    )
    relay = SqlScheduler(tables.database, "relay", 30.0)

    def consume(id: str) -> Any:
        relay.beat("relay")
        return handle(json.dumps({"order_id": id}).encode(), {"message_id": id})

    return consume


def write(folder: Path, name: str, names: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"order_id": each}) + "\n" for each in names))


def test_streams_replay_and_lose_their_checkpoints(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    """Beside them, the same messages come from a broker."""
    from idemp.spark import Columns, sink

    count, files = MESSAGES, tmp_path / "files"
    names = ids(count)
    consume_one, seen = online(tables), []

    def consume() -> None:
        seen.extend(map(consume_one, random.Random(1).sample(names, count)))

    def start(checkpoint: str, where: str) -> Any:
        own = sink(APP, Columns(id="get_json_object(value, '$.order_id')", body="value"), parked=str(tmp_path / where), rows=500)
        stream = spark.readStream.option("maxFilesPerTrigger", 1).text(str(files))
        return (
            stream.writeStream.foreachBatch(own)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    write(files, "0", [*names[: count // 2], "bad-0"])
    consumer = threading.Thread(target=consume)
    consumer.start()
    start("one", "p-one").awaitTermination()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    write(files, "1", [*names[count // 2 :], "bad-1"])
    both = [start("one", "p-one"), start("two", "p-two")]  # two queries over the same files at once
    for query in both:
        query.awaitTermination()
    start("copy", "p-one").awaitTermination()  # the second batch runs again
    shutil.rmtree(tmp_path / "one")
    start("one", "p-wiped").awaitTermination()
    consumer.join()
    assert (len(seen), tables.effects()) == (count, once(*names))
    for where, times in (("p-one", 2), ("p-two", 1), ("p-wiped", 1)):  # nothing that one query parked is removed by another
        assert parked(spark, tmp_path / where) == Counter({"bad-0": 1, "bad-1": times})


def test_secrets_are_in_no_plan_and_in_no_event_log(
    spark: SparkSession, open_shop: Callable[[str], Shop], url: str, tmp_path: Path
) -> None:
    from idemp.spark import read, reconcile, sink, snapshot

    open_shop(make_url(url).set(password="open-sesame").render_as_string(hide_password=False))
    data = frame(spark, rows(ids(10)))
    sink(APP, parked=str(tmp_path)).run(data)
    found = reconcile(APP, data)
    assert found.clean
    with snapshot(shop_module.app.settings) as moment:
        inbox = read(spark, "inbox", moment)
        assert (inbox.count(), "sesame" in inbox._jdf.queryExecution().toString(), "sesame" in repr(moment)) == (10, False, False)
    logs = list(Path(spark.conf.get("spark.eventLog.dir").removeprefix("file://")).rglob("*"))
    texts = [each.read_text() for each in logs if each.is_file()]
    assert any("mapInArrow" in each or "MapInArrow" in each for each in texts)
    assert not any("sesame" in each for each in texts)


def test_tables_are_read_as_of_one_moment(
    spark: SparkSession, tables: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idemp.spark import read, reading, sink, snapshot

    monkeypatch.setattr(reading, "PAGES", 7)
    run = sink(APP, parked=str(tmp_path))
    run.run(frame(spark, rows(ids(1_500))))
    with snapshot(shop_module.app.settings) as moment:
        assert sum(pages for *_, pages in moment.pages["inbox"]) > 14
        run.run(frame(spark, rows(ids(500, "later"))))
        found = {name: read(spark, name, moment) for name in ("inbox", "outputs", "messages")}
        assert {name: each.count() for name, each in found.items()} == {"inbox": 1_500, "outputs": 1_500, "messages": 0}
        assert found["inbox"].select("consumer", "type").distinct().collect() == [("shop", "shop.Order")]
        assert found["outputs"].where("pending").join(found["inbox"], "message_key").count() == 1_500
    with pytest.raises(Exception, match="snapshot"):
        read(spark, "inbox", moment).count()


def test_planted_gaps_are_found_and_nothing_else(spark: SparkSession, tables: Shop, tmp_path: Path) -> None:
    from pyspark.sql import functions as f

    from idemp.spark import Gap, read, reconcile, sink, snapshot

    now, count = time.time(), 10 * MESSAGES
    number, kind = f.col("n"), f.col("n") % 1_000
    body = f.concat(f.lit('{"order_id": "'), number, f.lit('"}')).cast("binary")
    times = {
        10: now - 10, 11: now - 30 * 86_400, 15: (now - 7_200) * 1e6, 16: float("nan"), 17: -1.0, 18: now + 3 * 3_600,
        19: (now - 7_200) * 1e6, 20: (now - 7_200) * 1e3, 21: None, 22: now - 6 * 86_400, 23: now - 7.5 * 86_400,
    }  # fmt: skip
    at = f.lit(now - 7_200)
    for each, moment in times.items():
        at = f.when(kind == each, moment).otherwise(at)
    log = spark.range(count).withColumnRenamed("id", "n").select(
        f.when(kind != 8, f.concat(f.lit("id-"), number)).alias("id"), f.lit("shop.Order").alias("type"), at.alias("time"),
        f.lit(None).cast("map<string,string>").alias("headers"), f.when(kind == 9, f.lit("{").cast("binary")).otherwise(body).alias("body"), "n",
    )  # fmt: skip
    log.write.parquet(str(tmp_path / "log"))
    log = spark.read.parquet(str(tmp_path / "log"))
    other = f.lit('{"order_id": "other"}').cast("binary")
    lost = (1, *range(20, 24))
    handled = log.where(~kind.isin(4, 5, 8, 9, 10, 11, *range(15, 19), *lost))
    handled = handled.withColumn("body", f.when(kind == 3, other).otherwise(f.col("body")))
    unsent = log.where(kind == 0).withColumn("id", f.concat(f.lit("unsent-"), number))
    keyed = [spark.createDataFrame([(*row, 0) for row in _keyed(each, now - 3_600)], f"{ROWS}, n bigint") for each in (7, 8)]
    adopted = sink(APP, parked=str(tmp_path / "p"), adopt=True).run(
        handled.unionByName(unsent).unionByName(keyed[0]).unionByName(keyed[1])
    )
    assert adopted.counts["new"] == adopted.rows
    # A producer may write any header, even one that looks as if it came from a row of the database.
    claimed = {"idemp-properties": json.dumps({"message_id": "id-12", "type": "shop.Order"}), "idemp-due": "1"}
    forged = spark.createDataFrame(
        [("id-forged", "shop.Order", now - 7_200, claimed, b'{"order_id": "12"}', 0)], f"{ROWS}, n bigint"
    )
    sent = (
        log.unionByName(log.where(kind == 2).withColumn("body", other)).unionByName(log.where(kind == 12)).unionByName(keyed[0])
    ).unionByName(forged)
    _plant(tables, now, count, {row.original_id: row for row in _claims(spark, snapshot, read)})
    least = dict.fromkeys(("shop.Keyed", *shop_module.KEYS), 1)
    result = reconcile(APP, sent.drop("n"), until=time.time(), produces=least)

    def planted(*kinds: int) -> set[str]:
        return {f"id-{n + each}" for n in range(0, count, 1_000) for each in kinds}

    expected = {
        Gap.LOST: planted(*lost) | {"id-forged"},
        Gap.MISDATED: planted(15, 16, 17, 18),
        Gap.CONFLICT: planted(2, 3),
        Gap.DEAD: planted(4),
        Gap.UNSENT: {f"unsent-{n}" for n in range(0, count, 1_000)},
        Gap.INCOMPLETE: planted(13, 14),
        Gap.UNDISPATCHED: planted(6, 7),
    }
    each, rows = count // 1_000, [row for row in result.gaps.collect() if row.gap != Gap.UNUSABLE.value]
    own = [row for row in rows if row.id.startswith(("id-", "unsent-"))]
    assert {gap: {row.id for row in own if row.gap == gap.value} for gap in Gap if gap is not Gap.UNUSABLE} == expected
    counts = {gap.value: len(ids) for gap, ids in expected.items()}
    counts["incomplete"] += 4
    counts["unsent"] += 5
    assert {gap: result.counts[gap] for gap in counts} == counts
    assert (result.counts["unusable"], result.counts["waiting"], result.counts["forgotten"]) == (2 * each, 2 * each, each)
    assert (result.counts["handled"], result.clean) == (count - 21 * each + 1, False)

    # The ids of all kinds of keys, in the log or only in the inbox, are those that commands take.
    rows = [row for row in rows if row not in own]
    claims = InboxRecords(tables.database)
    kinds = [*(f"incomplete {type}" for type in least), *(f"unsent {type}" for type in (*least, "shop.Order"))]
    assert Counter(f"{row.gap} {row.type}" for row in rows) == once(*kinds)
    assert {row.error for row in rows} == {None, "0 of 1 outputs are stored"}
    assert [[claim.message_key for claim in claims.find(row.id)] for row in rows] == [[row.key] for row in rows]

    # A claim after the end of a log, a message before its begin and other types are not judged.
    pair = log.where("n IN (1, 12)").withColumn("time", f.when(number == 12, now - 3_600).otherwise(f.col("time")))
    window = reconcile(APP, pair.unionByName(keyed[0]), since=now - 4_000, type="shop.Order")
    assert (window.clean, window.counts["handled"], sum(window.counts.values())) == (True, 2, 2)
    for empty, last in ((sent.where("false"), None), (pair, now - 86_400)):
        with pytest.raises(ConfigurationError, match="nothing can be compared"):
            reconcile(APP, empty, until=last)
    with pytest.raises(ConfigurationError, match="produces: no handler of shop takes messages of type 'shop.Odrer'"):
        reconcile(APP, sent, produces={"shop.Odrer": 1})


def _keyed(number: int, at: float) -> list[tuple[Any, ...]]:
    """Return a message for each kind of key."""
    body = b'{"shop": "north", "number": %d, "order_id": %d}' % (number, number)
    messages = [(f"{type}-{number}", type, at, {"x-id": f"i:{number}"}, body) for type in ("shop.Keyed", *shop_module.KEYS)]
    event = {"specversion": "1.0", "id": f"event-{number}", "source": "/shop", "type": "shop.Order"}
    return [*messages, (None, None, at, {f"ce-{name}": value for name, value in event.items()}, body)]


def _claims(spark: SparkSession, snapshot: Any, read: Any) -> list[Any]:
    with snapshot(shop_module.app.settings) as moment:
        found = read(spark, "inbox", moment).where("decode(original_id, 'UTF-8') RLIKE '^s:id-([0-9]*)[03467]$'")
        rows: list[Any] = found.selectExpr("substring(decode(original_id, 'UTF-8'), 3) AS original_id", "message_key").collect()
    return rows


def _plant(tables: Shop, now: float, count: int, claims: dict[str, Any]) -> None:
    """Store dead letters, retries and outputs that wait."""
    own = tables.database.tables
    shop = tables.database
    with shop.engine.begin() as connection:
        consumer = connection.scalar(select(own.name.c.id).where(own.name.c.kind == "consumer"))
        messages, outputs, pending = [], [], []
        texts = {"kind": "publish", "exchange": "", "routing_key": "x", "mandatory": True, "headers": b"{}", "body": b"{}"}
        for n in range(0, count, 1_000):
            for each, due in ((4, None), (5, now + 60)):
                headers = json.dumps({"message_id": f"id-{n + each}", "type": "shop.Order"}).encode()
                body = b'{"order_id": "%d"}' % (n + each)
                messages.append({"queue": "shop", "headers": headers, "body": body, "history": b"[]", "due_at": due})
            late, recent = now - 3_600, now - 60
            for each, ordinal, due, given_up in (
                (6, 0, late, None), (7, 0, recent, now), (0, 0, recent, None), (13, 1, None, None), (14, 0, recent, None),
            ):  # fmt: skip
                key = claims[f"id-{n + each}"].message_key
                place = {"consumer_id": consumer, "message_key": key, "ordinal": ordinal, "output_id": key}
                if each != 14:
                    outputs.append({**place, **texts})
                if due is not None:
                    pending.append({**place, "due_at": due, "quarantined_at": given_up})
        connection.execute(update(own.identity).values(purged_before=now - 8 * 86_400))
        connection.execute(insert(own.message), messages)
        connection.execute(insert(own.output), outputs)
        connection.execute(insert(own.pending), pending)
