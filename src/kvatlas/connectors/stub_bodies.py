"""What the stub engine's answers look like: vLLM 0.32's chunks, whole answers and metrics."""

from __future__ import annotations

import time

import msgspec

from kvatlas.connectors.stub import Generation, StubEngine

_encode = msgspec.json.encode


class TextForm:
    """/v1/completions. The constant parts of a chunk are encoded once per request."""

    chunk_object = "text_completion"

    def __init__(self, answer_id: str, model: str) -> None:
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        head = {
            "id": answer_id,
            "object": self.chunk_object,
            "created": self._created,
            "model": model,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['

    def opening(self) -> bytes:
        return b""

    def piece(self, text: str, *, last: bool = False) -> bytes:
        """The event of one token; ``last`` says why it ends."""
        choice = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if last else None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        return self._head + _encode(choice) + b"]}\n\n"

    def usage(self, generation: Generation) -> dict[str, object]:
        made = generation.made_tokens
        return {
            "prompt_tokens": generation.prompt_tokens,
            "total_tokens": generation.prompt_tokens + made,
            "completion_tokens": made,
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        }

    def closing(self, generation: Generation) -> bytes:
        return self._head + b'],"usage":' + _encode(self.usage(generation)) + b"}\n\n"

    def whole(self, text: str, generation: Generation) -> dict[str, object]:
        """The body of an answer that is not streamed."""
        choice = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
        return self._body("text_completion", choice, generation)

    def _body(
        self, kind: str, choice: dict[str, object], generation: Generation
    ) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": [choice],
            "usage": self.usage(generation),
            "kv_transfer_params": generation.handed_over,
        }


class ChatForm(TextForm):
    """/v1/chat/completions: a role chunk first, then one chunk per token."""

    chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._head + _encode(choice) + b'],"prompt_token_ids":null,"prompt_text":null}\n\n'

    def piece(self, text: str, *, last: bool = False) -> bytes:
        """The event of one token; ``last`` says why it ends."""
        choice: dict[str, object] = {
            "index": 0,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": "length" if last else None,
        }
        if last:
            choice["stop_reason"] = None
        choice["token_ids"] = None
        return self._head + _encode(choice) + b"]}\n\n"

    def whole(self, text: str, generation: Generation) -> dict[str, object]:
        """The body of an answer that is not streamed."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        return self._body("chat.completion", choice, generation)


def metrics_text(engine: StubEngine, started: float) -> str:
    """Prometheus text under vLLM's names: those that a router reads."""
    numbers = engine.numbers()
    lines: list[str] = []

    def family(name: str, kind: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# TYPE {name.removesuffix('_total')} {kind}")
        for label, value in samples:
            labels = f'engine="0",{label}model_name="{engine.model_name}"'
            lines.append(f"{name}{{{labels}}} {float(value)}")

    family("vllm:num_requests_running", "gauge", ("", numbers.running))
    family("vllm:num_requests_waiting", "gauge", ("", numbers.waiting))
    family("vllm:kv_cache_usage_perc", "gauge", ("", numbers.usage))
    asleep = {"awake": not engine.sleeping, "weights_offloaded": engine.sleeping}
    states = [(f'sleep_state="{name}",', float(on)) for name, on in asleep.items()]
    family("vllm:engine_sleep_state", "gauge", *states)
    family("vllm:prefix_cache_queries_total", "counter", ("", numbers.queried_tokens))
    family("vllm:prefix_cache_hits_total", "counter", ("", numbers.hit_tokens))
    family("vllm:prompt_tokens_total", "counter", ("", numbers.prompt_tokens))
    family("vllm:generation_tokens_total", "counter", ("", numbers.output_tokens))
    ends = {"length": numbers.finished, "abort": numbers.aborted}
    reasons = [(f'finished_reason="{name}",', float(count)) for name, count in ends.items()]
    family("vllm:request_success_total", "counter", *reasons)
    moved = engine.pairs.moved
    for name, total in (
        ("bytes_transferred", moved.size_bytes),
        ("xfer_time_seconds", moved.seconds),
    ):
        family(f"vllm:nixl_{name}_sum", "counter", ("", total))
        family(f"vllm:nixl_{name}_count", "counter", ("", moved.transfers))
    family("vllm:nixl_num_failed_transfers_total", "counter", ("", moved.failures))
    info = ",".join(f'{key}="{value}"' for key, value in engine.cache_info().items())
    lines += [
        "# TYPE vllm:cache_config_info gauge",
        f"vllm:cache_config_info{{{info}}} 1.0",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started}",
        "",
    ]
    return "\n".join(lines)
