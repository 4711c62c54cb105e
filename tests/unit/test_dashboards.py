"""Dashboards and alerts: what they ask for exists, and Prometheus and Grafana take them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import install
import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).resolve().parents[2]
GRAFANA, PROMETHEUS = ROOT / "deploy" / "grafana", ROOT / "deploy" / "prometheus"
PAGES = ("overview", "router", "tenants", "tiers")
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text("utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]

#: What Prometheus itself adds to a series.
SCRAPED = {"job", "instance", "le", "__name__"}

PROMTOOL = install.promtool()
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=install.missing("promtool"))


def page(name: str) -> dict[str, Any]:
    found = json.loads((GRAFANA / f"{name}.json").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def source() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", GRAFANA / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(name: str) -> list[str]:
    """All expressions of a page, with Grafana's variables filled in as it does."""
    texts = [
        target["expr"] for panel in page(name)["panels"] for target in panel.get("targets", ())
    ]
    assert texts
    return [t.replace("$__rate_interval", "1m").replace("$job", ".+") for t in texts]


def all_expressions() -> dict[str, str]:
    rules = {rule["alert"]: rule["expr"] for rule in RULES}
    panels = {f"{name} {at}": e for name in PAGES for at, e in enumerate(asked(name))}
    return rules | panels


def documented() -> dict[str, set[str]]:
    """Metrics → their labels."""
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| `(kvatlas_\w+)` \|([^|]*)\|", text)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if (child := getattr(tree, name, None)) is not None:
            yield from nodes(child)
    for child in getattr(tree, "args", None) or ():
        yield from nodes(child)


def selected(text: str) -> Iterator[tuple[set[str], set[str]]]:
    """Of each series that an expression reads: its names, and the labels that are asked for."""
    for node in nodes(promql_parser.parse(text)):
        if isinstance(node, promql_parser.VectorSelector):
            matchers = node.matchers.matchers
            named = [m.value for m in matchers if m.name == "__name__"]
            names = {node.name} if node.name else {n for v in named for n in v.split("|")}
            yield names, {m.name for m in matchers}


@pytest.mark.parametrize(("where", "text"), all_expressions().items())
def test_what_is_asked_of_prometheus_is_documented(where: str, text: str) -> None:
    known = documented()
    reads = list(selected(text))
    assert reads, where
    for names, labels in reads:
        for name in names:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert base in known, f"{where}: {name}"
            grouped = {
                label
                for node in nodes(promql_parser.parse(text))
                if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
                for label in node.modifier.labels
            }
            assert labels | grouped <= known[base] | SCRAPED, f"{where}: {name}"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_source_makes(name: str) -> None:
    """After a change: python deploy/grafana/dashboards.py."""
    made = source().PAGES[name]()
    assert made == (GRAFANA / f"{name}.json").read_text("utf-8")


def test_there_is_no_other_page() -> None:
    assert sorted(path.stem for path in GRAFANA.glob("*.json")) == sorted(source().PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_grafana_s_own_model_takes_a_page(name: str) -> None:
    found = page(name)
    read = Dashboard.from_json(found)
    assert read.uid == found["uid"] == f"kvatlas-{name}"
    assert read.panels is not None
    assert len(read.panels) == len(found["panels"])
    ids = [panel["id"] for panel in found["panels"]]
    assert ids == sorted(set(ids))
    assert {v["name"] for v in found["templating"]["list"]} == {"datasource", "job"}
    assert "null" not in json.dumps(found)
    boxes = [panel["gridPos"] for panel in found["panels"]]
    places = [(box["x"] + x, box["y"] + y) for box in boxes for x in range(box["w"])
              for y in range(box["h"])]  # fmt: skip
    assert len(places) == len(set(places))  # no panel lies on another
    assert all(x < 24 for x, _ in places)


def test_every_alert_says_what_to_do_and_is_fired_by_a_test() -> None:
    fired = set(re.findall(r'alertname="(\w+)"', (PROMETHEUS / "alerts_test.yml").read_text()))
    names = [rule["alert"] for rule in RULES]
    assert sorted(fired) == sorted(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        for path in re.findall(r"docs/[\w./-]+\.md", rule["annotations"]["description"]):
            assert (ROOT / path).exists(), path


def promtool(*args: object) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_the_alerts_and_they_fire_when_they_should() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", PROMETHEUS / "alerts.yml")
    promtool("test", "rules", PROMETHEUS / "alerts_test.yml")


@needs_promtool
def test_prometheus_takes_every_expression_of_every_page(tmp_path: Path) -> None:
    rules = [
        {"record": f"page:{at}", "expr": text}
        for at, text in enumerate(text for name in PAGES for text in asked(name))
    ]
    path = tmp_path / "pages.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)
