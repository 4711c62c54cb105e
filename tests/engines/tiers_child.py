"""An engine with the agent's connector, steered by a test: ``tiers_child.py JOB SRC``.

See `steered_child`. A question says what to do first
(``forget``: drop the engine's own prefix cache, ``die_in_save``: SIGKILL once a unit is copied),
and then which ``runs`` are to be in flight together. The answer has what each of them answered,
the engine's own counts of cached tokens by source, and the connector's counts.
"""

import os
import signal
import sys

from steered_child import serve


def connector_of(llm):
    """The scheduler's side of the connector."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def die_in_save():
    """From now on a save ends the process, as a crash would, after its first unit."""
    from kvatlas.connectors.vllm_copies import Copier

    copy_out = Copier._copy_out

    def copy_and_die(*args):
        copy_out(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    Copier._copy_out = copy_and_die


def together(llm, runs, job):
    """Greedy answers of requests that are in flight together, by id."""
    from vllm import SamplingParams

    engine, found = llm.llm_engine, {}
    for run in runs:
        params = SamplingParams(
            temperature=0,
            max_tokens=run.get("tokens", job["tokens"]),
            ignore_eos=True,
            detokenize=False,
            logprobs=job["logprobs"],
        )
        prompt = {"prompt_token_ids": run["prompt"]}
        if run.get("salt"):
            prompt["cache_salt"] = run["salt"]
        found[run["id"]] = {"id": run["id"], "tokens": [], "logprobs": [], "cached_tokens": 0}
        engine.add_request(run["id"], prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            told, result = output.outputs[0], found[output.request_id]
            new = range(len(result["tokens"]), len(told.token_ids))
            result["cached_tokens"] = output.num_cached_tokens
            result["tokens"] += [int(told.token_ids[i]) for i in new]
            result["logprobs"] += [
                [[token, entry.logprob] for token, entry in sorted(told.logprobs[i].items())]
                for i in new
            ]
    return found


def answer(llm, job, asked):
    from kvatlas.connectors.vllm_greedy import cached_by_source

    if asked["forget"] and not llm.reset_prefix_cache():
        raise RuntimeError("the engine would not drop its prefix cache")
    if asked["die_in_save"]:
        die_in_save()
    before = cached_by_source(llm)
    found = together(llm, asked["runs"], job)
    after = cached_by_source(llm)
    connector = connector_of(llm)
    return {
        "found": found,
        "sources": {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)},
        "counts": connector.counts + connector._agent.counts if connector else {},
    }


if __name__ == "__main__":
    serve(*sys.argv[1:], answer)
