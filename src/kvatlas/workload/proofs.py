"""Where exactness was shown: the engines on which the minimal resume point may be all there is.

A resume that reads less than the engine keeps is a property of the engine's kernels, so it is
believed only where ``kvatlas validate exactness`` has passed: for that engine, version and device,
and for state of that shape (`Layout.state_digest`). Everywhere else the full point is used. The
file that ships with kvatlas holds what we have shown; ``--record`` adds to a file of your own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec

from kvatlas.core.layout import Layout
from kvatlas.errors import ConfigError

MAX_PROOFS_BYTES = 1 << 20


class Runtime(msgspec.Struct, frozen=True):
    """What computes: ``engine`` "vllm", its ``version``, and the ``device`` as the kernels see it
    ("cpu AVX512")."""

    engine: str
    version: str
    device: str

    def digest(self) -> str:
        """Hex digest by which a proof is found."""
        text = msgspec.json.encode(self)
        return hashlib.sha256(b"kvatlas.runtime.1\0" + text).hexdigest()[:16]


class Proof(msgspec.Struct, frozen=True):
    """One passed run. ``runtime`` and ``state`` are digests; the rest is for readers.

    ``same`` counts resumes whose tokens and logprobs did not differ, ``minimal`` those of them
    that loaded the minimal point, ``noticed`` the planted faults, all of which were seen.
    """

    runtime: str
    state: str
    about: Runtime
    model: str
    seed: int
    date: str
    same: int
    minimal: int
    noticed: int


def all_proofs(own: str) -> tuple[Proof, ...]:
    """Those that we ship, and those of the operator's file (directory.proofs), "" for none. Raises
    ConfigError where it is not there, or as `load_proofs`."""
    if own and not Path(own).is_file():
        raise ConfigError(f"directory.proofs: there is no file {own}")
    return load_proofs() + (load_proofs(Path(own)) if own else ())


def load_proofs(path: Path | None = None) -> tuple[Proof, ...]:
    """The proofs in ``path``, none where it does not exist; without one those that we ship.

    Raises `ConfigError` where the file is not what ``validate exactness --record`` writes.
    """
    try:
        if path is None:
            data = resources.files("kvatlas.workload").joinpath("proofs.json").read_bytes()
        else:
            with path.open("rb") as file:
                data = file.read(MAX_PROOFS_BYTES + 1)
    except FileNotFoundError:
        return ()
    if len(data) > MAX_PROOFS_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_PROOFS_BYTES} bytes: no file of proofs")
    try:
        proofs = msgspec.json.decode(data, type=tuple[Proof, ...])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path or 'proofs.json'}: not a file of proofs: {error}") from error
    for proof in proofs:
        if proof.runtime != proof.about.digest():
            raise ConfigError(
                f"{path or 'proofs.json'}: the digest {proof.runtime} is not that of"
                f" {proof.about.engine} {proof.about.version} on {proof.about.device}:"
                " run validate exactness there instead of editing the file"
            )
    return proofs


def add_proof(path: Path, proof: Proof) -> None:
    """Writes ``proof`` into ``path``, in place of an older one of the same kind."""
    kept = [p for p in load_proofs(path) if (p.runtime, p.state) != (proof.runtime, proof.state)]
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode([*kept, proof])) + b"\n")
    scratch.replace(path)


def minimal_shown(layout: Layout, runtime: Runtime, proofs: Iterable[Proof]) -> bool:
    """Whether ``layout`` may be stored and moved with its minimal resume points on ``runtime``."""
    return _shown(layout, runtime, proofs) is not None


def settled(layout: Layout, runtime: Runtime, proofs: Iterable[Proof]) -> tuple[Layout, str]:
    """The layout for ``runtime``, with `Layout.minimal_on` set where the minimal resume point was
    shown there, and why it is so, for people. Unknown fields of ``runtime`` are ""."""
    where = f"{runtime.engine} {runtime.version}, {runtime.device}"
    if not layout.has_minimal():
        why = "no resume is known to read less of it (none does with a draft)"
    elif not runtime.device:
        why = "on which device it runs is not said, so nothing that was shown applies"
    elif (proof := _shown(layout, runtime, proofs)) is None:
        why = f"less was not shown to be enough on {where}: run kvatlas validate exactness there"
    else:
        shown = msgspec.structs.replace(layout, minimal_on=proof.runtime)
        return shown, (
            f"shown on {where}: {proof.minimal} minimal resumes the same to the last bit,"
            f" {proof.noticed} planted faults noticed"
        )
    return msgspec.structs.replace(layout, minimal_on=""), why


def _shown(layout: Layout, runtime: Runtime, proofs: Iterable[Proof]) -> Proof | None:
    if not layout.has_minimal() or layout.engine != runtime.engine:
        return None
    wanted = (runtime.digest(), layout.state_digest())
    found = (p for p in proofs if (p.runtime, p.state) == wanted and p.minimal > 0)
    return next(found, None)
