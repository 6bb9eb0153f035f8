"""A private ActiveMQ."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import ClassVar

from tests.servers import programs
from tests.servers.process import Server

JAR = "/usr/share/activemq/bin/activemq.jar"
# With them the broker answers over STOMP what its plugins say; Debian's package only recommends them.
LIBRARIES = (Path("/usr/share/java/xstream.jar"), Path("/usr/share/java/jettison.jar"))

CONFIGURATION = """\
<beans xmlns="http://www.springframework.org/schema/beans" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
 xsi:schemaLocation="http://www.springframework.org/schema/beans
 http://www.springframework.org/schema/beans/spring-beans-2.0.xsd
 http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
<broker xmlns="http://activemq.apache.org/schema/core" brokerName="idemp" useJmx="false" dataDirectory="{data}" {attributes}>
 <persistenceAdapter>
  <kahaDB directory="{data}/kahadb" journalMaxFileLength="1mb" cleanupInterval="300"/>
 </persistenceAdapter>
 <plugins>{plugins}</plugins>
 {usage}
 <transportConnectors><transportConnector name="stomp" uri="stomp://127.0.0.1:{port}{options}"/></transportConnectors>
</broker></beans>
"""


class ActiveMQ(Server):
    """An ActiveMQ that speaks STOMP and has every message on the disk before it answers."""

    need = programs.ACTIVEMQ
    attributes: ClassVar[str] = ""
    plugins: ClassVar[str] = "<statisticsBrokerPlugin/>"
    usage: ClassVar[str] = ""
    options: ClassVar[str] = ""

    @property
    def url(self) -> str:
        """Where STOMP is spoken."""
        return f"stomp://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Write the configuration."""
        self.data.mkdir()
        folder = self.base / "lib"
        folder.mkdir()
        for library in LIBRARIES:
            (folder / library.name).symlink_to(library)
        (self.base / "broker.xml").write_text(self.configuration())

    def configuration(self) -> str:
        """What stands in broker.xml."""
        return CONFIGURATION.format(
            data=self.data,
            port=self.port,
            options=self.options,
            attributes=self.attributes,
            plugins=self.plugins,
            usage=self.usage,
        )

    def command(self) -> list[str]:
        """In the foreground, with little memory, and fast to start."""
        return [
            programs.path("java"),
            "-Xmx160m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Dactivemq.home=/usr/share/activemq",
            f"-Dactivemq.base={self.base}",
            "-jar",
            JAR,
            "start",
            f"xbean:file:{self.base / 'broker.xml'}",
        ]

    def check(self) -> None:
        """Shake hands: the port is open before the broker is."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
            sock.sendall(b"CONNECT\naccept-version:1.2\nhost:idemp\n\n\0")
            # One that wants a password says ERROR; it is there, too.
            if not sock.recv(100).startswith((b"CONNECTED", b"ERROR")):
                raise ConnectionError("no answer")
