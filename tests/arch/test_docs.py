"""The documentation and the code say the same: each list in a page is compared with its source."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from house import DOCS, PACKAGE, ROOT, constant_arguments, modules, pages, parsed, shown

from kvatlas import config, errors
from kvatlas.cli.main import build_parser
from kvatlas.config_tracing import TracingConfig
from kvatlas.core.router import BLIND
from kvatlas.service.admin import Safety
from kvatlas.service.agent_metrics import AgentMetrics
from kvatlas.service.assembly import Assembly
from kvatlas.service.chat_messages import Reason
from kvatlas.service.cluster_metrics import ClusterMetrics
from kvatlas.service.metrics import GatewayMetrics
from kvatlas.service.rdma_ports import RdmaPorts
from kvatlas.service.tracing_export import Exporter
from kvatlas.service.trust_metrics import TrustMetrics


def rows(page: str, pattern: str) -> list[str]:
    """First cells of table rows, in backquotes, that match ``pattern`` as a whole."""
    cells = re.findall(r"(?m)^\| (?:\d+ \| )?`([^`]+)`", (DOCS / page).read_text("utf-8"))
    return [cell for cell in cells if re.fullmatch(pattern, cell)]


def tables() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    return ((name, table) for name, table in config._TABLES.items() if name)


def source(module: str) -> str:
    return (PACKAGE / module).read_text("utf-8")


# -- configuration --------------------------------------------------------------------------------


def test_every_key_of_the_file_is_documented_with_its_default() -> None:
    text = (DOCS / "configuration.md").read_text("utf-8")
    documented = dict(re.findall(r"(?m)^\| `(\w+\.\w+)` \| (`[^`]*`|needed) \| \S", text))
    expected = {}
    for name, table in tables():
        for field in msgspec.structs.fields(table):
            default = field.default
            if default is msgspec.NODEFAULT:
                shown_default = "needed"
            else:
                shown_default = f"`{msgspec.json.encode(default).decode()}`"
            expected[f"{name}.{field.name}"] = shown_default
    assert documented == expected


def test_the_example_loads_and_shows_every_key_with_its_default() -> None:
    path = ROOT / "examples" / "kvatlas.toml"
    loaded = config.load(path)
    text = path.read_text("utf-8")
    for name, table in tables():
        listed = name in ("worker", "agent")
        block = text.rpartition(f"[[{name}]]")[2] if listed else text
        for field in msgspec.structs.fields(table):
            assert re.search(rf"(?m)^#?{field.name} = ", block), f"{name}.{field.name}"
        if not listed:
            assert getattr(loaded, name) == table()


def test_the_configurations_in_pages_load(tmp_path: Path) -> None:
    found = 0
    for page in pages():
        for block in re.findall(r"(?ms)^```toml\n(.*?)^```", page.read_text("utf-8")):
            (tmp_path / "kvatlas.toml").write_text(block)
            assert config.load(tmp_path / "kvatlas.toml").worker, shown(page)
            found += 1
    assert found >= 2


# -- errors ---------------------------------------------------------------------------------------


def test_every_error_is_documented_and_drawn() -> None:
    tree = {
        name
        for name, thing in inspect.getmembers(errors, inspect.isclass)
        if issubclass(thing, errors.KvatlasError) and thing is not errors.KvatlasError
    }
    assert set(rows("errors.md", r"\w+Error")) == tree
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    assert drawn == tree


def test_every_code_of_the_envelope_is_documented() -> None:
    calls = (("RequestError", "code"), ("envelope", "code"), ("_Refusal", 2), ("_fail", 2))
    codes = {
        code
        for path in modules()
        for callee, argument in calls
        for code in constant_arguments(parsed(path), callee, argument)
    }
    chosen = re.findall(r'code = "(\w+)" if \w+ else "(\w+)"', source("service/relay.py"))
    assert chosen
    codes |= {code for pair in chosen for code in pair}
    text = (DOCS / "errors.md").read_text("utf-8")
    documented = set(re.findall(r"(?m)^\| \d{3} \| `(\w+)` \|", text))
    assert codes == documented


def test_every_reason_for_load_alone_is_documented() -> None:
    reasons = set(get_args(Reason))
    reasons |= set(BLIND)
    steering = PACKAGE / "service/steering.py"
    reasons |= set(constant_arguments(parsed(steering), "Prompt", "reason"))
    reasons |= set(re.findall(r'reason = "(\w+)"', steering.read_text("utf-8")))
    text = (DOCS / "errors.md").read_text("utf-8").partition("routed by load alone\n")[2]
    documented = set(re.findall(r"(?m)^\| `(\w+)` \|", text))
    assert reasons == documented


# -- metrics, flags, pages ------------------------------------------------------------------------


async def test_every_metric_is_documented() -> None:
    worker = config.WorkerConfig(name="away", url="http://127.0.0.1:1")
    assembly = Assembly(config.Config(worker=(worker,)))
    await assembly.start()
    metrics = GatewayMetrics()
    metrics.registry.register(ClusterMetrics(assembly))
    metrics.registry.register(Exporter(TracingConfig()))
    empty: dict[str, object] = {}
    status: dict[str, object] = {"tiers": empty, "loaded_tokens": empty, "moved_bytes": empty}
    status |= {"counts": empty, "engines": empty, "errands": empty}
    status |= {"busy": 0, "staged": 0, "draining": False}
    families = [*metrics.registry.collect(), *AgentMetrics(lambda: status, RdmaPorts).collect()]
    for prefix in ("kvatlas", "kvatlas_agent"):
        families += TrustMetrics(Safety().guard, prefix=prefix).collect()
    registered = [f"{f.name}_total" if f.type == "counter" else f.name for f in families]
    await assembly.close()
    documented = rows("metrics.md", r"kvatlas_\w+")
    assert sorted(documented) == sorted(registered)


def test_every_flag_of_health_is_documented() -> None:
    flags = set()
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Problems":
                assert isinstance(node.value, ast.Dict)
                flags |= {k.value for k in node.value.keys if isinstance(k, ast.Constant)}
        text = path.read_text("utf-8")
        flags |= set(re.findall(r'(?:flags\.append\(|problems\[)"(\w+)"', text))
    assert {"hit_gap", "engine_down", "draining"} <= flags
    text = (DOCS / "metrics.md").read_text("utf-8").partition("## Flags")[2]
    assert set(re.findall(r"(?m)^\| `(\w+)", text.partition("\n## ")[0])) == flags


def test_every_page_of_the_gateway_is_documented() -> None:
    pages_served = {
        match
        for path in ("service/gateway.py", "service/assembly.py")
        for match in re.findall(r'"(/[a-z/]+)": self\.', (PACKAGE / path).read_text("utf-8"))
    }
    assert "/ready" in pages_served
    text = (DOCS / "metrics.md").read_text("utf-8")
    documented = set(re.findall(r"(?m)^\| `(/[a-z/]+)", text))
    assert documented == pages_served


# -- commands and targets -------------------------------------------------------------------------


def commands() -> list[str]:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices)
    raise AssertionError("no commands")


def test_every_command_is_documented() -> None:
    documented = re.findall(r"(?m)^\| `kvatlas ([a-z-]+)` \|", (DOCS / "index.md").read_text())
    assert sorted(documented) == sorted(commands())


def test_what_the_pages_tell_to_run_exists() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8")))
    known = set(commands()) | {"COMMAND"}
    for page in pages():
        for block in re.findall(r"`+[^`]+`+", page.read_text("utf-8")):
            for told in re.findall(r"(?m)(?:^`*|&& |; )make ([a-z-]+(?: [a-z-]+)*)", block):
                assert set(told.split()) <= targets, f"{shown(page)}: make {told}"
            for told in re.findall(r"(?m)^`*(?:\.venv/bin/)?kvatlas ([a-z-]+)", block):
                assert told in known, f"{shown(page)}: kvatlas {told}"


# -- modules and links ----------------------------------------------------------------------------


def test_architecture_lists_every_module_once() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    listed = re.findall(r"(?m)^- `([\w/]+\.(?:py|cpp))`: \S", text)
    files = [*modules(), *PACKAGE.rglob("*.cpp")]
    there = [p.relative_to(PACKAGE).as_posix() for p in files if p.read_text("utf-8").strip()]
    assert sorted(listed) == sorted(there)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text("utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_files_named_in_pages_exist() -> None:
    for page in pages():
        for name in re.findall(
            r"`((?:docs|tests|examples|core|service)/[\w./-]+)`", page.read_text()
        ):
            candidates = (ROOT / name, PACKAGE / name)
            assert any(path.exists() for path in candidates), f"{shown(page)}: {name}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


# -- pages that follow others ---------------------------------------------------------------------


def test_the_page_of_commands_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    again = "python docs/reference.py writes it anew"
    assert (DOCS / "cli.md").read_text("utf-8") == made.page(), again


def test_getting_started_has_the_same_commands_in_both_languages() -> None:
    def blocks(page: str) -> list[str]:
        return re.findall(r"(?ms)^```.*?^```", (DOCS / page).read_text("utf-8"))

    assert blocks("getting-started.zh.md") == blocks("getting-started.md")
