"""An authority, certificates of parts, and servers that have them."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from kvatlas.cli.certs import issue, make_ca
from kvatlas.config_tls import TlsConfig
from kvatlas.dataplane.tls import Part, Trust

HOSTS = ("127.0.0.1", "localhost")


class Authority:
    """One cluster's, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_ca(folder)

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def config(self, part: str, name: str = "one", **more: object) -> TlsConfig:
        cert, key = issue(self.folder, part, name, HOSTS)
        return TlsConfig(self.ca, str(cert), str(key), **more)  # type: ignore[arg-type]

    def trust(self, part: Part, name: str = "one", **more: object) -> Trust:
        return Trust(self.config(part, name, **more), part)

    def expired(self, part: str, name: str = "old") -> tuple[Path, Path]:
        begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
        return issue(self.folder, part, name, HOSTS, days=1, begins=begins)

    def asking(self, part: str | None = None, name: str = "asker") -> ssl.SSLContext:
        """As a client that believes this authority, with a certificate of its own or none."""
        made = ssl.create_default_context(cafile=self.ca)
        if part is not None:
            made.load_cert_chain(*issue(self.folder, part, name, HOSTS))
        return made
