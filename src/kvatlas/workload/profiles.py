"""Device profiles of your own: ``[[device]]`` tables, in a file or in a cluster.toml."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kvatlas.config import line_of, read
from kvatlas.errors import ConfigError
from kvatlas.workload.device import DEVICES, Device, device

Where = Callable[[str], str]  # place in the file → what an error begins with


class DeviceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device of your own: the fields of `kvatlas.workload.device.Device`. ``like`` names the
    profile whose figures stand where none is given."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    like: str = ""
    flops: dict[str, float] | None = None
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    compute_efficiency: float | None = None
    memory_efficiency: float | None = None
    attention_efficiency: float | None = None
    unhidden: float | None = None
    step_s: float | None = None
    layer_s: float | None = None
    request_s: float | None = None
    link_bytes_per_s: float | None = None
    link_latency_s: float | None = None
    usd_per_hour: float | None = None


class DeviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of profiles alone."""

    device: tuple[DeviceTable, ...] = ()


_TABLES: dict[str, type[msgspec.Struct]] = {"": DeviceFile, "device": DeviceTable}


def with_own(tables: Sequence[DeviceTable], where: Where) -> dict[str, Device]:
    """The known profiles and these. ``where(place)`` says what an error begins with. Raises
    ConfigError for a name that is taken, a figure that is missing and one that cannot be."""
    profiles = dict(DEVICES)
    for index, table in enumerate(tables):
        place = f"device[{index}]"
        if table.name in profiles:
            raise ConfigError(f"{where(f'{place}.name')}: there is a device {table.name!r} already")
        values = {
            field: value
            for field in table.__struct_fields__
            if field not in ("name", "like") and (value := getattr(table, field)) is not None
        }
        try:
            base = msgspec.structs.asdict(device(table.like)) if table.like else {}
            missing = {"flops", "memory_bytes", "memory_bytes_per_s"} - set(base) - set(values)
            if missing:
                raise ConfigError(
                    f"device {table.name!r}: {', '.join(sorted(missing))} missing "
                    '(or say like = "H200")'
                )
            profiles[table.name] = Device(**{**base, **values, "name": table.name})
        except ConfigError as error:
            raise ConfigError(f"{where(place)}: {error}") from error
    return profiles


def read_profiles(path: Path) -> dict[str, Device]:
    """The known profiles and those of a file. Raises ConfigError with file, line and reason."""
    text, file = read(path, DeviceFile, _TABLES)
    return with_own(file.device, lambda place: f"{path}:{line_of(text, place)}")


def profile_text(name: str, like: str, figures: dict[str, float], *, comment: str = "") -> str:
    """One ``[[device]]`` table as TOML."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += ["[[device]]", f'name = "{name}"', f'like = "{like}"']
    # Exponents as TOML wants them: 1e-05, never 1E-5 or a bare 5.
    lines += [f"{field} = {float(f'{value:.4g}')!r}" for field, value in figures.items()]
    return "\n".join(lines) + "\n"


def prefill_flops_per_s(name: str, file: str, precision: str, devices: int) -> float:
    """What so many of a device reach together: the router's prior. ``file``: of profiles, beside
    ours. Raises ConfigError for what is not known."""
    known = read_profiles(Path(file)) if file else DEVICES
    if name not in known:
        raise ConfigError(f"router.device {name!r} is not known: use one of {', '.join(known)}")
    return known[name].compute_rate(precision) * devices
