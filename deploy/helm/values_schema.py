"""Writes values.schema.json: the chart's own values by hand, `workers` and `config` as
kvatlas.config has them, without what the chart writes itself.

    .venv/bin/python deploy/helm/values_schema.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.config import Config, WorkerConfig

CHART = Path(__file__).parent / "kvatlas"
SCHEMA = CHART / "values.schema.json"

#: What a pod decides, not its operator; an empty set stands for the whole table.
WRITTEN_BY_THE_CHART: dict[str, set[str]] = {
    "worker": set(),
    "agent": set(),
    "keys": set(),
    "gateway": {"host", "port", "peers"},
    "tenants": {"file"},
    "admin": {"tokens_file"},
    "tls": {"ca", "cert", "key"},
    "register": {"url", "folder", "advertise", "password_file"},
}

Schema = dict[str, Any]
DIALECT = "http://json-schema.org/draft-07/schema#"  # which every Helm knows


def settings() -> tuple[Schema, Schema]:
    """Schemas of `workers`' items and of `config`."""
    (whole, worker), parts = msgspec.json.schema_components((Config, WorkerConfig))
    tables = _resolved(whole, parts)
    for table, keys in WRITTEN_BY_THE_CHART.items():
        for key in keys:
            del tables["properties"][table]["properties"][key]
        if not keys:
            del tables["properties"][table]
    tables.pop("required")
    return _resolved(worker, parts), tables


def _resolved(schema: Any, parts: dict[str, Schema]) -> Any:
    """Without references, and without words for people, which are in the docs."""
    if isinstance(schema, list):
        return [_resolved(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _resolved(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {
        key: {name: _resolved(one, parts) for name, one in value.items()}
        if key == "properties"
        else _resolved(value, parts)
        for key, value in schema.items()
        if key not in ("title", "description", "default")
    }


def _closed(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _list_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items} | more


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
SECRET: Schema = {"type": "string", "pattern": "^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$"}
FOLDER: Schema = {"type": "string", "pattern": "^/[A-Za-z0-9._/-]+$"}
FOLDER_OR_NONE: Schema = {"type": "string", "pattern": "^(/[A-Za-z0-9._/-]+)?$"}
ADDRESS: Schema = {"type": "string", "pattern": "^([A-Za-z0-9.-]+|\\[[0-9A-Fa-f:.]+\\])$"}
#: No password: the URL stands in a ConfigMap.
REGISTER: Schema = {
    "type": "string",
    "pattern": "^((valkeys?|valkeys?-cluster|rediss?)://([^:@/]+@)?[^@/]+(/[0-9]+)?)?$",
}
PLACED: dict[str, Schema] = {
    "resources": ANY,
    "podAnnotations": ANY,
    "nodeSelector": ANY,
    "tolerations": _list_of(ANY),
    "extraVolumes": _list_of(ANY),
    "extraVolumeMounts": _list_of(ANY),
}


def schema() -> Schema:
    """Of all values."""
    worker, tables = settings()
    return {"$schema": DIALECT, "required": ["workers"]} | _closed(
        **{"global": ANY},  # Helm's own
        image=_closed(
            repository=TEXT | {"minLength": 1},
            tag=TEXT,
            pullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
            pullSecrets=_list_of(ANY),
        ),
        workers=_list_of(worker, minItems=1),
        config=tables,
        secrets=_closed(
            keys=SECRET,
            tenants=SECRET,
            admin=SECRET,
            gatewayTls=SECRET,
            agentTls=SECRET,
            register=SECRET,
        ),
        register=_closed(url=REGISTER, trial=FLAG, image=TEXT | {"minLength": 1}),
        gateway=_closed(
            replicas=POSITIVE,
            port=PORT | {"minimum": 1024},  # it is not root
            leaveAfterS=POSITIVE,
            service=_closed(
                type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, annotations=ANY
            ),
            maxUnavailable=POSITIVE,
            **PLACED,
        ),
        agents=_closed(
            enabled=FLAG,
            engines=_list_of(TEXT | {"minLength": 1}, minItems=1),
            dramGiB=POSITIVE,
            ownMemoryMiB=POSITIVE,
            disk=_closed(path=FOLDER_OR_NONE, sizeGB=COUNT),
            object={"type": "string", "pattern": "^((valkeys?|rediss?|mooncake|s3)://.+)?$"},
            peers=_list_of(ADDRESS),
            socketDir=FOLDER,
            port=PORT,
            peerPort=PORT,
            runAsUser=POSITIVE,
            hostNetwork=FLAG,
            drainTimeoutS=POSITIVE,
            extraArgs=_list_of(TEXT),
            **PLACED,
        ),
        podMonitor=_closed(
            enabled=FLAG,
            labels=ANY,
            interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
            token=_closed(secret=SECRET, key=TEXT),
        ),
        networkPolicy=_closed(
            enabled=FLAG,
            clients=_list_of(ANY),
            monitors=_list_of(ANY),
            nodeCIDRs=_list_of({"type": "string", "pattern": "^[0-9A-Fa-f.:]+/[0-9]{1,3}$"}),
        ),
    )


def text() -> str:
    """Of the file."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), "utf-8")
