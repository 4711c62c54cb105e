"""Table [register] of kvatlas.toml: where a cluster keeps what must outlive its processes."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote, urlsplit

import msgspec

from kvatlas.core.register_values import CLUSTER_NAME
from kvatlas.errors import ConfigError

EMBEDDED = "embedded"
PORT = 6379
HOSTS_MAX = 32
_DATABASE_MAX = 65_535
_LIVES = 3.0  # beats that a member may miss, at least
_ALIASES = {"redis": "valkey", "rediss": "valkeys"}
_KINDS = ("valkey", "valkeys", "unix", "valkey-cluster", "valkeys-cluster")
_FORMS = (
    '"embedded", valkey://HOST:PORT, unix:///PATH or valkey-cluster://HOST:PORT,HOST:PORT; '
    "valkeys:// and valkeys-cluster:// with TLS"
)

Beat = Annotated[float, msgspec.Meta(ge=0.05, le=60)]
Life = Annotated[float, msgspec.Meta(ge=0.5, le=600)]


class RegisterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``url`` "": none, this gateway is alone. "embedded": a Valkey that kvatlas starts itself, for
    the processes of one machine, with its data in ``folder``; else the URL of one.

    ``name`` is the cluster's: all its gateways and agents have the same, and the same key secret.
    ``advertise``: where the others reach this gateway. ``ca``, ``cert`` and ``key`` are for
    connections with TLS, "" takes those of [tls]; ``password_file`` keeps the password out of the
    URL. A member says every ``beat_s`` that it lives, and is taken for gone after ``ttl_s``.
    """

    url: str = ""
    folder: str = "kvatlas-register"
    name: str = "kvatlas"
    advertise: str = ""
    password_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    beat_s: Beat = 1.0
    ttl_s: Life = 10.0
    deadline_s: Beat = 1.0

    @property
    def on(self) -> bool:
        return bool(self.url)


class Place(msgspec.Struct, frozen=True):
    """Which servers a URL means, and how to come in: ``hosts`` with their ports, or the ``path`` of
    a Unix socket."""

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False
    cluster: bool = False

    def __str__(self) -> str:
        """Without the password."""
        kind = ("valkeys" if self.tls else "valkey") + ("-cluster" if self.cluster else "")
        hosts = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        return f"{kind}://{hosts}" if hosts else f"unix://{self.path}"


def place_of(url: str) -> Place:
    """Raises ConfigError, without the password, for what is no URL of a server."""
    kind, sep, rest = url.partition("://")
    kind = _ALIASES.get(kind, kind)
    if not sep or kind not in _KINDS:
        raise ConfigError(f"register.url: {kind!r} is none of {_FORMS}")
    if kind == "unix":
        if not rest.startswith("/") or "?" in rest:
            raise ConfigError(
                f"register.url: unix://{rest}: the whole path is wanted, unix:///PATH"
            )
        return Place(path=unquote(rest))
    login, _, rest = rest.rpartition("@")
    hosts, _, database = rest.partition("/")
    username, _, password = login.partition(":")
    cluster = kind.endswith("-cluster")
    at = f"register.url: {kind}://{rest}"
    if not re.fullmatch(r"\d{0,5}", database) or int(database or 0) > _DATABASE_MAX:
        raise ConfigError(f"{at}: {database!r} is no number of a database")
    if cluster and int(database or 0):
        raise ConfigError(f"{at}: a cluster has one database, 0")
    each = tuple(_host_of(host, at) for host in hosts.split(","))
    if len(each) > (HOSTS_MAX if cluster else 1):
        raise ConfigError(
            f"{at}: {len(each)} servers: {HOSTS_MAX} of a cluster, or one, can be named"
        )
    return Place(
        hosts=each,
        username=unquote(username),
        password=unquote(password),
        database=int(database or 0),
        tls=kind.startswith("valkeys"),
        cluster=cluster,
    )


def trusting(config: RegisterConfig, ca: str, cert: str, key: str) -> RegisterConfig:
    """With these files, of [tls], where it has none of its own."""
    return msgspec.structs.replace(
        config, ca=config.ca or ca, cert=config.cert or cert, key=config.key or key
    )


def fault_of(config: RegisterConfig, *, secret: bool) -> tuple[str, str]:
    """The key that cannot be so, and why; two empty texts where all is well. ``secret``: is there
    one that all members can have?"""
    if not config.on:
        return "", ""
    if config.url != EMBEDDED:
        try:
            place = place_of(config.url)
        except ConfigError as error:
            return "register.url", str(error)
        if place.username and place.password and config.password_file:
            return "register.password_file", "register: a password in the URL, and one in a file"
    if not re.fullmatch(CLUSTER_NAME, config.name):
        return "register.name", (
            f"register.name: {config.name!r}: up to 64 letters, digits, '.', '_' and '-' are wanted"
        )
    if config.ttl_s < _LIVES * config.beat_s or config.ttl_s < 2 * config.deadline_s:
        return "register.ttl_s", (
            f"register.ttl_s is {config.ttl_s:g}: at least {_LIVES:g} times register.beat_s, and "
            "twice register.deadline_s, or one late answer makes a member a stranger"
        )
    if bool(config.cert) != bool(config.key):
        return "register.cert", "register.cert and register.key need each other"
    if not secret:
        return "register", (
            "register: members prove by keys.secret_file that they are of one cluster: name it"
        )
    if config.advertise and not re.fullmatch(r"https?://[^/\s?#@]+", config.advertise):
        return "register.advertise", (
            f"register.advertise: {config.advertise!r} is not of the form http://host:port"
        )
    return "", ""


def _host_of(text: str, at: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.netloc != text or parts.query or port == 0 or re.search(r"\s", text):
        raise ConfigError(f"{at}: {text!r} is not of the form HOST:PORT")
    return host, PORT if port is None else port
