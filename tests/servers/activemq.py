"""A private ActiveMQ that speaks STOMP, and has each message on the disk before it answers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tests.servers.process import Server, find

JAR = Path("/usr/share/activemq/bin/activemq.jar")
CONFIGURATION = """\
<beans xmlns="http://www.springframework.org/schema/beans" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
 xsi:schemaLocation="http://www.springframework.org/schema/beans
 http://www.springframework.org/schema/beans/spring-beans-2.0.xsd
 http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
<broker xmlns="http://activemq.apache.org/schema/core" brokerName="test" useJmx="false" dataDirectory="{base}" {attributes}>
 <persistenceAdapter><kahaDB directory="{base}/kahadb" journalMaxFileLength="1mb" cleanupInterval="300"/></persistenceAdapter>
 {usage}
 <transportConnectors><transportConnector name="stomp" uri="stomp://127.0.0.1:{port}"/></transportConnectors>
</broker></beans>
"""


class Activemq(Server):
    attributes: ClassVar[str] = ""
    usage: ClassVar[str] = ""

    @property
    def url(self) -> str:
        return f"stomp://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        find("java", "default-jre-headless")
        find("activemq", "activemq", "/usr/share/activemq/bin")
        text = CONFIGURATION.format(base=self.base, port=self.port, attributes=self.attributes, usage=self.usage)
        (self.base / "broker.xml").write_text(text)

    def command(self) -> Sequence[str]:
        small = ["-Xmx160m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        home = ["-Dactivemq.home=/usr/share/activemq", f"-Dactivemq.base={self.base}"]
        return [
            str(find("java", "default-jre-headless")),
            *small,
            *home,
            "-jar",
            str(JAR),
            "start",
            f"xbean:file:{self.base}/broker.xml",
        ]

    def check(self) -> object:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"CONNECT\naccept-version:1.2\nhost:test\n\n\0")
            if not connection.recv(100).startswith(b"CONNECTED"):
                raise ConnectionError("no answer")
            return True
