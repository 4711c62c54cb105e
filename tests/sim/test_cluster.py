"""cluster.toml: what is refused, with the line; the example; profiles and roles."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvatlas.errors import ConfigError
from kvatlas.sim.cluster import TABLES, default_cluster, load_cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.toml"
PAIR = '[[engine]]\nname = "p"\nrole = "prefill"\ndevices = 4\n'
PLAIN = (
    '[[engine]]\nmodel = "16"\nblocks = 100\nprefill_tokens_per_s = 8000\ndecode_step_s = 0.02\n'
)


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "missing required field `engine`"),
        ("engine = []\n", 1, "name at least one"),
        ("[[engine]]\ncount = 0\n", 2, ">= 1"),
        ("[[engine]]\ncount = 5000\n", 2, "<= 1024"),
        ("[[engine]]\ndevices = 99999999999999999999\n", 2, "<= 4096"),
        ("[[engine]]\ncont = 2\n", 2, "did you mean 'count'?"),
        ("[[engine]]\n\ndevice = 'H900'\n", 1, "unknown device 'H900'"),
        ("[[engine]]\nmodel = 'no-such-model'\n", 1, "neither a known model"),
        ("[[engine]]\nmodel = '0'\n", 1, "plain block size"),
        ("[[engine]]\nmodel = '16'\nblocks = 9\n", 1, "give prefill_tokens_per_s"),
        ("[[engine]]\nmodel = '16'\nprefill_tokens_per_s = 1.0\n", 1, "blocks"),
        (
            "[[engine]]\nblocks = 9\nprefill_tokens_per_s = nan\ndecode_step_s = 1.0\n",
            1,
            "prefill_tokens_per_s is nan: give a number above 0",
        ),
        ("[[engine]]\nblocks = 9\nprefill_tokens_per_s = 9.0\n", 1, "together"),
        ("[[engine]]\n", 1, "leave no room for KV: use more devices, or fewer bits"),
        ("[[engine]]\nblocks = 99999999999\n", 1, "at most"),
        ("[[engine]]\ndevices = 8\nretention_tokens = 100\n", 1, "multiple of the grid"),
        ("[[engine]]\ndevices = 8\nprecision = 'fp3'\n", 1, "precision"),
        ("[[engine]]\ndevices = 8\nlink = 'rope'\n", 1, "unknown link 'rope'"),
        ("[[engine]]\ndevices = 8\nname = 'a b'\n", 3, "use letters"),
        (
            "[[engine]]\ndevices=8\n[[engine]]\nname = 'x'\ndevices=8\n[[engine]]\ndevices=8\n",
            6,
            "",
        ),
        (PAIR, 1, 'role "prefill" needs role "decode"'),
        (PAIR + '[[engine]]\nrole="decode"\nmodel="llama-3.1-70b"\ndevices=8\n', 1, "differ"),
        (PLAIN + 'role="prefill"\nname="p"\n' + PLAIN + 'role="decode"\n', 1, "how many bytes"),
        ("[[engine]]\ndevices=8\n[[device]]\nname='H200'\n", 4, "already"),
        ("[[engine]]\ndevices=8\n[[device]]\nname='x'\n", 3, "missing"),
        ("[[engine]]\ndevices=8\n[[link]]\nname='x'\n", 3, "give bytes_per_s"),
        ("[[engine]]\ndevices=8\n[[link]]\nname='x'\nlike='y'\n", 5, "unknown link 'y'"),
        ("[[engine]]\ndevices=8\n[[link]]\nname='x'\nbytes_per_s=-1.0\n", 3, "above 0"),
        (
            "[[engine]]\ndevices=8\n[[link]]\nname='x'\nlike='RDMA-400G'\nbackground_share=1.0\n",
            3,
            "background_share",
        ),
        ("[[engine]]\ndevices=8\n[network]\nlatency_s=inf\n", 4, "latency_s"),
        ("[router]\npolicy = 'best'\n[[engine]]\n", 2, "use one of price, round_robin"),
        ("[[engine]]\nrole = 'both'\n", 2, "use one of combined, prefill, decode"),
        ("[router.knobs]\ntemperature = nan\n[[engine]]\n", 2, "knobs.temperature"),
        ("[gateway]\npoll_s = 1e-9\n[[engine]]\n", 2, ">= 0.01"),
        (
            "[[device]]\nname = 'x'\nlike = 'H200'\nmemory_bytes = 0\n[[engine]]\n",
            1,
            ": device 'x': m",
        ),
        ("[[engine\n", 1, "TOML"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, what: str
) -> None:
    told = refused(tmp_path, text)
    assert told.startswith(f":{line}: "), told
    assert what in told
    assert "\n" not in told


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(tmp_path / "none.toml")


def test_the_example_loads_and_shows_every_key_with_its_default() -> None:
    cluster = load_cluster(EXAMPLE)
    assert len(cluster.members) == 8
    text = EXAMPLE.read_text("utf-8")
    for name, table in TABLES.items():
        for field in msgspec.structs.fields(table) if name not in ("", "device", "link") else ():
            shown = rf"(?m)^(# )?({field.name} = |\[{name}\.{field.name}\])"
            assert re.search(shown, text), f"{name}.{field.name}"
    for table in (cluster.router, cluster.network, cluster.directory):
        assert table == type(table)()
    default = default_cluster()
    assert msgspec.structs.replace(cluster, gateway=default.gateway) == default
    assert cluster.gateway == default.gateway


def test_more_room_than_the_weights_leave_is_not_promised() -> None:
    """Every device of an engine holds all of its state, beside its share of the weights."""
    member = default_cluster().members[0]
    spec, compute = member.spec, member.layout.compute
    assert spec.device is not None
    assert spec.shape is not None
    assert compute is not None
    weights = spec.shape.weight_bytes(compute, "fp8", "fp4") + 2 * spec.shape.head
    assert 145e9 < weights < 165e9
    used = spec.blocks * 1_002_240 + weights / 2
    assert 0.899 * spec.device.memory_bytes < used <= 0.9 * spec.device.memory_bytes


def test_own_devices_and_links(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[[engine]]\ndevice = 'mine'\ndevices = 4\nlink = 'slow'\nper_node = 2\ncount = 3\n"
        "[[device]]\nname = 'mine'\nlike = 'H200'\nmemory_bytes = 96000000000\n"
        "[[link]]\nname = 'slow'\nlike = 'RDMA-400G'\nbackground_share = 0.25\n"
    )
    members = load_cluster(path).members
    assert [member.node for member in members] == ["engine-node0", "engine-node0", "engine-node1"]
    assert members[0].link.background_share == 0.25
    assert members[0].link.bytes_per_s == 45e9
    assert members[0].spec.device is not None
    assert members[0].spec.device.memory_bytes == 96_000_000_000
    assert load_cluster(path).devices() == 12


@pytest.mark.parametrize("engines", [0, -1, 5000])
def test_the_default_cluster_has_limits_too(engines: int) -> None:
    with pytest.raises(ConfigError, match="--engines"):
        default_cluster(engines=engines)
