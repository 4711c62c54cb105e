"""Checks of what lies between engines: events, the gateway, pairs, agents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvatlas.core.check_facts import AgentFacts, EngineFacts, Facts, GatewayFacts, PairRow
from kvatlas.core.checks_model import first_difference
from kvatlas.core.findings import Finding, not_applicable, not_shown, ok, wrong

_GATEWAY = ("gateway", "alarms", "workers", "fingerprint", "keys", "routed-hit")
_AGENT = ("agent", "store-keys", "disk")
_FULL_SHARE = 0.98  # of a disk tier's capacity: then each save drops something

# -- events ---------------------------------------------------------------------------------------


def events(engine: EngineFacts) -> Iterator[Finding]:
    """Its KV events are there, alive, of this engine, in sequence, and come again when asked."""
    who, stream = engine.name, engine.stream
    if not engine.events_wanted:
        yield not_applicable("events", who, "the configuration wants none of it")
        return
    if not stream.told:
        why = "it does not say that it publishes KV events"
        yield not_shown("events", who, why, "start it with --kv-events-config")
        return
    if stream.error:
        yield not_shown("events", who, stream.error)
        return
    alive = {"batches": stream.batches, "the canary's blocks": "heard" if stream.heard else "none"}
    if stream.on:
        why = f"its blocks are announced on the stream of {stream.on}"
        change = "give each engine event ports of its own, and correct events in kvatlas.toml"
        yield wrong("event-source", who, why, change, {"asked": who, "announced by": stream.on})
        return
    if not stream.heard:
        cached = engine.asked("again").cached_tokens
        if cached > 0:
            why = f"it resumed {cached} tokens of a canary that its events never told of"
            change = "look at its log for its event publisher, and at what lies between"
            yield wrong("events", who, why, change, alive)
        else:
            yield not_shown("events", who, "it cached no canary, so there was nothing to tell")
        return
    yield ok("events", who, alive)
    yield ok("event-source", who, {"asked": who, "announced by": who})
    yield from _stream(engine)


def _stream(engine: EngineFacts) -> Iterator[Finding]:
    who, stream = engine.name, engine.stream
    if stream.gap or stream.malformed:
        why = stream.gap or f"{stream.malformed} of its events cannot be read"
        change = "look for a proxy or a full queue on the way (hwm); what is lost is replayed"
        yield wrong("event-sequence", who, why, change, {"batches": stream.batches})
    else:
        yield ok("event-sequence", who, {"batches in sequence": stream.batches})
    if stream.replay is None:
        why = "it offers no replay: a gap costs all that is known of it"
        yield not_shown("replay", who, why, "add replay_endpoint to --kv-events-config")
    elif stream.replay:
        change = "open its replay port to the gateway; is another process at that address?"
        yield wrong("replay", who, stream.replay, change, {"asked again": stream.batches})
    else:
        yield ok("replay", who, {"batches again": stream.batches})


# -- the gateway ----------------------------------------------------------------------------------


def gateway(facts: Facts) -> Iterator[Finding]:
    """It answers, serves, and raises no alarm; it watches the engines that it is said to."""
    found = facts.gateway
    if found is None:
        for check in _GATEWAY:
            yield not_applicable(check, "gateway", "none was given")
        return
    if found.error:
        for check in _GATEWAY:
            yield not_shown(check, "gateway", found.error, "start it, or give its URL")
        return
    if not found.ready:
        yield wrong("gateway", "gateway", "it is not ready: no engine is up", "see its /health")
    else:
        yield ok("gateway", "gateway", {"url": found.url, "version": found.version or "not ours"})
    if not found.ours:
        why = "it is none of kvatlas: it raises no alarms and makes no keys"
        yield not_applicable("alarms", "gateway", why)
        yield not_applicable("keys", "gateway", why)
    else:
        yield from _alarms(found)
        yield from _workers(found, facts.engines)
        yield from _fingerprints(found, facts.engines)
        yield from _keys(found, facts.engines)
    yield from _routed(found, facts.engines)


def _alarms(found: GatewayFacts) -> Iterator[Finding]:
    for problem, whom in found.alarms.items():
        for who, why in whom.items():
            change = "see docs/metrics.md for this flag"
            yield wrong("alarms", who, f"{problem}: {why}", change, {"flag": problem})
    if not found.alarms:
        yield ok("alarms", "gateway", {"flags": "none"})
    if found.version and found.own_version and found.version != found.own_version:
        compared = {"gateway": found.version, "this command": found.own_version}
        why = "this command is of another version than the gateway"
        yield wrong("gateway", "gateway", why, "run the gateway's own version", compared)


def _workers(found: GatewayFacts, engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    if found.configured is None:
        yield not_applicable("workers", "gateway", "no configuration was given (--config)")
        return
    same = True
    for name in dict.fromkeys((*found.configured, *found.workers)):
        ours = found.configured.get(name, "")
        theirs = found.workers[name].url if name in found.workers else ""
        if ours.rstrip("/") != theirs.rstrip("/"):
            same = False
            compared = {"configuration": ours or "none", "running gateway": theirs or "none"}
            why = "the running gateway has other engines than the file"
            yield wrong("workers", name, why, "send it SIGHUP, or correct the file", compared)
    dead = {engine.name for engine in engines if engine.error}
    for name, row in found.workers.items():
        if row.feed and name not in dead:
            same = False
            why = f"the gateway does not follow its events: {row.feed}"
            yield wrong("events", name, why, "open its event ports to the gateway")
    if same:
        yield ok("workers", "gateway", {"engines": ", ".join(found.workers)})


def _fingerprints(found: GatewayFacts, engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    for engine in engines:
        row = found.workers.get(engine.name)
        if row is None or not row.fingerprint or engine.fingerprint is None:
            yield not_shown("fingerprint", engine.name, "one of the two is not known")
            continue
        ours = engine.fingerprint.digest().hex()[: len(row.fingerprint)]
        compared = {"gateway": row.fingerprint, "from what it tells now": ours}
        if ours == row.fingerprint:
            yield ok("fingerprint", engine.name, compared)
        elif found.configured is None:
            why = "it depends on the gateway's configuration, which was not given"
            yield not_shown("fingerprint", engine.name, why, "give --config", compared)
        else:
            why = "the gateway keys its prompts under another fingerprint"
            change = "send the gateway SIGHUP: its configuration or the engine changed since"
            yield wrong("fingerprint", engine.name, why, change, compared)


def _keys(found: GatewayFacts, engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Gateway key = engine key: what it looks a prompt up by is what engines' events fill."""
    ids, text = found.ids, found.text
    if ids.error or ids.unkeyed:
        why = ids.error or f"it cannot key a prompt of token ids: {ids.unkeyed}"
        yield not_shown("keys", "gateway", why)
        return
    for engine in engines:
        name = engine.name
        keys = ids.keys.get(name, ())
        if not keys:
            yield not_shown("keys", name, "the gateway has no keys for it")
            continue
        own = found.own_keys.get(name)
        by_text = text.keys.get(name, ())
        held, cached = ids.resume_tokens.get(name, 0), engine.asked("again").cached_tokens
        if own is not None and own != keys:
            compared: dict[str, object] = {
                "gateway": keys[0],
                "from configuration and secret": own[0],
            }
            why = "the gateway makes other keys than its configuration and secret say"
            yield wrong("keys", name, why, "restart the gateway with this file", compared)
        elif text.unkeyed or text.error:
            why = f"it cannot key text: {text.unkeyed or text.error}"
            change = "set tokenizer.path to the model's directory"
            yield wrong("keys", name, why, change, {"text": text.unkeyed or "no answer"})
        elif by_text != keys:
            compared = {"keys of the ids": len(keys), "of their text": len(by_text)}
            at = first_difference(keys, by_text)
            why = f"a text has other keys than its token ids, from block {at} on"
            change = "give the gateway the engine's tokenizer (tokenizer.path)"
            yield wrong("keys", name, why, change, compared)
        elif cached > 0 and held == 0 and engine.events_wanted:
            compared = {"gateway believes": held, "engine resumed": cached}
            why = "the gateway does not know a prefix that the engine resumes from"
            change = "compare block size, layout and salt; see events"
            yield wrong("keys", name, why, change, compared)
        elif cached <= 0:
            yield not_shown("keys", name, "the engine resumed nothing to compare with")
        else:
            yield ok(
                "keys",
                name,
                {"first key": keys[0], "gateway believes": held, "engine resumed": cached},
            )


def _routed(found: GatewayFacts, engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Routed for a prefix: and the engine reports it."""
    check, who = "routed-hit", "gateway"
    again = found.asked("again")
    if again.error:
        yield not_shown(check, who, f"the canary failed: {again.error}")
        return
    first = found.asked("fresh").worker
    compared = {
        "expected": again.expected_tokens,
        "engine reported": again.cached_tokens,
        "sent to": f"{first}, then {again.worker}",
    }
    if not found.ours:
        del compared["expected"], compared["sent to"]
    if again.cached_tokens < 0:
        why = "answers through it do not tell cached tokens"
        yield not_shown(check, who, why, "see hits-told", compared)
    elif again.cached_tokens == 0 and again.expected_tokens > 0:
        why = "routed for a prefix, and the engine reported none"
        change = "compare tokenizer, chat template, block size and salt"
        yield wrong(check, again.worker or who, why, change, compared)
    elif again.cached_tokens == 0:
        why = "the same prompt twice through it, and nothing was resumed"
        change = "a router that goes by the cache is needed (router.policy = price)"
        yield wrong(check, who, why, change, compared)
    elif again.prefilled_by:  # its hit is foreseen where it is computed, and told where it ends
        yield ok(check, who, compared | {"computed by": again.prefilled_by})
    elif found.ours and again.expected_tokens == 0 and any(e.events_wanted for e in engines):
        why = "the engine resumed what the gateway did not foresee"
        yield wrong(check, again.worker or who, why, "see events and keys", compared)
    elif found.ours and abs(again.expected_tokens - again.cached_tokens) * 2 > again.cached_tokens:
        why = "expected and reported hit are far apart"
        yield wrong(check, again.worker or who, why, "compare block size and layout", compared)
    else:
        yield ok(check, who, compared)


# -- pairs and agents -----------------------------------------------------------------------------


def pairs(facts: Facts) -> Iterator[Finding]:
    """What pairs hand over goes over what it should, at what rate."""
    found = facts.gateway
    if found is None or not found.ours or not found.pairs:
        why = found.error if found is not None and found.error else ""
        if why:
            yield not_shown("transport", "gateway", why)
        else:
            yield not_applicable("transport", "gateway", "no pairs hand anything over here")
        return
    for pair in found.pairs:
        yield _pair(pair, found.rdma)


def _pair(pair: PairRow, rdma: dict[str, str]) -> Finding:
    who = f"{pair.prefill} → {pair.decode}"
    rate = f"{pair.bytes_per_s / 1e9:.3f} by {pair.rate_from}" if pair.bytes_per_s else "not known"
    compared = {"expected": pair.expected, "seen": pair.seen or "not known", "GB/s": rate}
    lost = pair.expected == "rdma" and pair.seen == "not rdma"
    if pair.state == "degraded" or lost:
        change = "look at UCX_TLS, GPUDirect and the NICs of both hosts; nothing fell back openly"
        return wrong(
            "transport",
            who,
            pair.why or "its state does not go over RDMA",
            change,
            compared,
            field="seen",
        )
    if pair.expected == "rdma" and pair.seen != "rdma":
        ports = "; ".join(f"{node}: {why}" for node, why in rdma.items() if why)
        why = ports or "too little was handed over to see by which transport"
        return not_shown("transport", who, why, "run an agent on each node", compared)
    if not pair.hand_offs:
        return not_shown("transport", who, "it has handed nothing over yet", "", compared)
    return ok("transport", who, compared)


def agents(facts: Facts) -> Iterator[Finding]:
    """Agents answer, make our keys, and their disks are well."""
    unknown = facts.gateway.error if facts.gateway is not None else ""
    for check in _AGENT if not facts.agents else ():
        if unknown:
            yield not_shown(check, "agents", f"whether there are any is not known: {unknown}")
        else:
            yield not_applicable(check, "agents", "there are none")
    for agent in facts.agents:
        if agent.error:
            for check in _AGENT:
                change = "start it, correct its URL, or give whoever asks the right to read"
                yield not_shown(check, agent.name, agent.error, change)
            continue
        for problem, why in agent.alarms.items():
            yield wrong(
                "agent", agent.name, f"{problem}: {why}", "see docs/metrics.md", {"flag": problem}
            )
        if not agent.alarms:
            yield ok("agent", agent.name, {"url": agent.url, "engines": ", ".join(agent.roots)})
        yield from _store_keys(agent, facts.gateway)
        yield from _disk(agent)


def _store_keys(agent: AgentFacts, gateway: GatewayFacts | None) -> Iterator[Finding]:
    check = "store-keys"
    theirs = sorted({root for root in agent.roots.values() if root})
    if agent.no_own_roots:
        if gateway is None or gateway.error or agent.name not in gateway.agents:
            yield not_shown(check, agent.name, agent.no_own_roots)
        elif not theirs:
            yield not_shown(check, agent.name, "no engine is attached to it")
        else:  # it compares the same, and has the secret
            told = gateway.alarms.get("agent_apart", {})
            apart = {w: why for w, why in told.items() if why.startswith(f"{agent.name}: ")}
            for worker, why in apart.items():
                yield wrong(check, worker, why, "give both the same configuration and secret")
            if not apart:
                compared = {"gateway": "makes its keys", "agent": ", ".join(theirs)}
                yield ok(check, agent.name, compared)
        return
    if not agent.own_roots:
        yield not_applicable(check, agent.name, "its engines name their pages themselves")
    for worker, ours_root in agent.own_roots.items():
        compared = {"gateway's configuration": ours_root, "agent": ", ".join(theirs) or "none"}
        if ours_root in theirs:
            yield ok(check, worker, compared)
        elif not theirs:
            why = f"no engine is attached to {agent.name}"
            yield not_shown(check, worker, why, "start it with the agent's connector", compared)
        else:
            why = f"{agent.name} stores under other keys than the gateway looks up"
            change = "give both the same keys.secret_file, model, dtype, blocks and versions"
            yield wrong(check, worker, why, change, compared)


def _disk(agent: AgentFacts) -> Iterator[Finding]:
    if agent.metrics_error:
        yield not_shown("disk", agent.name, agent.metrics_error)
        return
    tier = agent.tiers.get("disk")
    if tier is None:
        yield not_applicable("disk", agent.name, "it keeps nothing on a disk")
        return
    capacity, held = tier.get("capacity_bytes", 0.0), tier.get("held_bytes", 0.0)
    compared = {"held_bytes": f"{held:.0f}", "capacity_bytes": f"{capacity:.0f}"}
    bad = tier.get("quarantined_bytes", 0.0)
    if bad:
        why = f"{bad:.0f} bytes of its disk could not be read or written"
        change = "look at that disk (dmesg, smartctl), replace it, restart the agent"
        yield wrong("disk", agent.name, why, change, {"quarantined_bytes": f"{bad:.0f}"})
    elif agent.faults:
        first, count = next(iter(agent.faults.items()))
        yield wrong(
            "disk",
            agent.name,
            f"its disk met {first}, {count} times",
            "look at that disk",
            {first: count},
        )
    elif capacity <= 0:
        yield not_shown("disk", agent.name, "it does not tell its capacity", "", compared)
    else:
        full = "" if held < capacity * _FULL_SHARE else "full: what is saved drops something else"
        yield ok("disk", agent.name, compared | ({"note": full} if full else {}))
