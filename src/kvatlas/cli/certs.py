"""``kvatlas certs``: a certificate authority for one cluster, and tokens of its operators."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import ipaddress
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvatlas.config_tls import RIGHTS
from kvatlas.dataplane.tls import Identity, life_of
from kvatlas.errors import ConfigError
from kvatlas.lasting import whole_file

PARTS = ("gateway", "agent", "engine", "client")
CA_DAYS = 365.0
DAYS = 30.0
_CA_CERT, _CA_KEY = "ca.pem", "ca.key"
_EARLY = datetime.timedelta(minutes=5)  # clocks of a cluster differ
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

_EPILOG = """\
  kvatlas certs init ca                                        ca/ca.pem, ca/ca.key
  kvatlas certs issue ca --part gateway --name front --host gw.example --host 10.0.0.1
  kvatlas certs issue ca --part agent --name node0 --host 10.0.0.2
  kvatlas certs issue ca --part client --name ops              ca/client-ops.pem, ca/client-ops.key
  kvatlas certs show ca/client-ops.pem
  kvatlas certs token ops --right read                         for [admin] tokens_file

Keys are written for their owner alone. ca.key signs for every part: keep it off the nodes.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "certs",
        description="Certificates by which the parts of a cluster know each other.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(dest="what", metavar="init|issue|show|token", required=True)
    made = what.add_parser("init", help="a new authority in an empty place")
    made.add_argument("folder", type=Path, metavar="DIR")
    made.add_argument("--days", type=float, default=CA_DAYS, help="its life (%(default)g)")
    issued = what.add_parser("issue", help="key and certificate of one part")
    issued.add_argument("folder", type=Path, metavar="DIR", help="the authority's")
    issued.add_argument("--part", choices=PARTS, required=True)
    issued.add_argument("--name", required=True, help="as in kvatlas://PART/NAME")
    issued.add_argument(
        "--host", action="append", default=[], metavar="H", help="name or IP address; repeatable"
    )
    issued.add_argument("--days", type=float, default=DAYS, help="its life (%(default)g)")
    issued.add_argument("--out", type=Path, metavar="DIR", help="where it goes (default: DIR)")
    shown = what.add_parser("show", help="whose a certificate is, and how long it holds")
    shown.add_argument("file", type=Path, metavar="FILE")
    token = what.add_parser("token", help="a token of an operator, and its line in the file")
    token.add_argument("name", metavar="NAME")
    token.add_argument("--right", choices=RIGHTS, default="read", help="%(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError (exit status 2) for files that are there already, or cannot be used."""
    if args.what == "init":
        cert, _ = make_ca(args.folder, days=args.days)
        print(f"{cert}: [tls] ca of every part")
    elif args.what == "issue":
        cert, key = issue(
            args.folder, args.part, args.name, args.host, days=args.days, out=args.out
        )
        print(f'cert = "{cert}"\nkey = "{key}"')
    elif args.what == "show":
        print(show(args.file))
    else:
        text, line = make_token(args.name, args.right)
        print(f"token: {text}\nline of [admin] tokens_file: {line}")
    return 0


def make_ca(folder: Path, *, days: float = CA_DAYS) -> tuple[Path, Path]:
    """A new authority's certificate and key. Raises ConfigError."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvatlas cluster CA")])
    usage = _usage(signs=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    built = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _write(folder, _CA_CERT, _CA_KEY, built, key)


def issue(
    folder: Path,
    part: str,
    name: str,
    hosts: Sequence[str] = (),
    *,
    days: float = DAYS,
    out: Path | None = None,
    begins: datetime.datetime | None = None,
) -> tuple[Path, Path]:
    """Certificate and key of a part, in place of those of the same name: whoever runs with them
    takes the new ones up. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: letters, digits, '.', '_' and '-', at most 128")
    if part != "client" and not hosts:
        raise ConfigError(f"--host: where is {part} {name} reached? its certificate says so")
    ca, ca_key = _authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    uri = str(Identity(part, name))
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri), *map(_host, hosts)])
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if part != "client":
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{part} {name}"[:64])])
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    built = (
        _builder(subject, ca.subject, key.public_key(), days, begins)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(own, critical=False)
        .add_extension(signer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    stem = f"{part}-{name}"
    return _write(out or folder, f"{stem}.pem", f"{stem}.key", built, key, replace=True)


def show(path: Path) -> str:
    """Whose it is, and how long it holds, for people. Raises ConfigError."""
    life = life_of(path)
    told = x509.load_pem_x509_certificates(path.read_bytes())[0]
    left_days = (life.ends_s - time.time()) / 86400
    holds = f"{left_days:.1f} days left" if left_days > 0 else "EXPIRED"
    lines = [
        f"identity: {life.identity or 'none: an authority, or not of a cluster'}",
        f"hosts:    {', '.join(_hosts(told)) or '-'}",
        f"issuer:   {told.issuer.rfc4514_string()}",
        f"serial:   {told.serial_number:x}",
        f"holds:    {told.not_valid_before_utc:%Y-%m-%d %H:%M} … "
        f"{told.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, {holds}",
        f"sha256:   {told.fingerprint(hashes.SHA256()).hex()}",
    ]
    return "\n".join(lines)


def make_token(name: str, right: str) -> tuple[str, str]:
    """A token, and the line that stands for it in a file that is worth nothing to a thief."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: letters, digits, '.', '_' and '-', at most 128")
    token = secrets.token_urlsafe(32)
    return token, f"{name} {right} {hashlib.sha256(token.encode()).hexdigest()}"


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    begins: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    if not 0 < days <= 3660:
        raise ConfigError(f"--days {days:g}: above 0, at most 3660")
    start = begins or datetime.datetime.now(datetime.UTC) - _EARLY
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        cert = x509.load_pem_x509_certificate((folder / _CA_CERT).read_bytes())
        key = serialization.load_pem_private_key((folder / _CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: no authority: {error}: kvatlas certs init") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / _CA_KEY}: not made by kvatlas certs init")
    return cert, key


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9*]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", text):
        raise ConfigError(f"--host {text!r}: a host name or an IP address is wanted, no port")
    return x509.DNSName(text)


def _hosts(told: x509.Certificate) -> list[str]:
    try:
        names = told.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    found = names.get_values_for_type(x509.DNSName)
    return [*found, *map(str, names.get_values_for_type(x509.IPAddress))]


def _write(
    folder: Path,
    cert: str,
    key: str,
    built: x509.Certificate,
    secret: ec.EllipticCurvePrivateKey,
    *,
    replace: bool = False,
) -> tuple[Path, Path]:
    """The key first: whoever sees the new certificate finds its key."""
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    paths = folder / cert, folder / key
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in () if replace else paths:
            if path.exists():
                raise ConfigError(f"{path} is there already: it is not overwritten")
        with whole_file(paths[1]) as file:
            file.write(secret.private_bytes(pem, form, plain))
        with whole_file(paths[0]) as file:
            file.write(built.public_bytes(pem))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return paths
