"""Bodies stay byte for byte what the client sent (maximhq/bifrost#3362), and errors say where."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import RequestError
from kvatlas.service.body import (
    Usage,
    asks_for_report,
    has_extras,
    pairs_itself,
    parse,
    parse_answer,
    splice,
    usage_of,
    with_usage,
    without_extras,
)

# Three tools, nested schemas, number texts that a re-encoding would change, raw and escaped text.
TOOLS = (
    rb'{ "model":"m" ,"messages":[{"role":"user","content":"caf\u00e9 '
    + "caf\u00e9 \U0001f9ed".encode()
    + rb' \/ \u65e5"}],"tools":[{"type":"function","function":{"name":"b","parameters":'
    rb'{"z":1.0,"a":1,"big":9007199254740993,"huge":123456789012345678901234567890,"e":1e2}}},'
    rb'{"type":"function","function":{"name":"a","parameters":{"required":["y","x"],"n":null}}},'
    rb'{"unknown_field":{"b":[ 1 , 2.50 ],"a":-0.0}}],"stream":true'
)


def test_inserting_a_field_moves_no_byte_of_the_rest() -> None:
    raw = TOOLS + b"}"
    out = splice(raw, parse(raw), {"stream_options": with_usage(None, raw)})
    assert out == b'{"stream_options":{"include_usage":true},' + raw[1:]
    assert json.loads(out) == {**json.loads(raw), "stream_options": {"include_usage": True}}


def test_a_field_that_is_there_changes_alone() -> None:
    options = rb'{"continuous_usage_stats":false,"x":1.0,"include_usage":false}'
    raw = TOOLS + rb',"stream_options":' + options + rb',"seed":1.50}'
    body = parse(raw)
    out = splice(raw, body, {"stream_options": with_usage(body["stream_options"], raw)})
    before, after = (msgspec.json.decode(x, type=dict[str, msgspec.Raw]) for x in (raw, out))
    assert list(before) == list(after)
    for name, value in before.items():
        if name != "stream_options":
            assert bytes(after[name]) == bytes(value)
    expected = b'{"continuous_usage_stats":false,"x":1.0,"include_usage":true}'
    assert bytes(after["stream_options"]) == expected


@pytest.mark.parametrize("value", [b"null", b"{}"])
def test_empty_stream_options_are_replaced(value: bytes) -> None:
    raw = b'{"stream":true,"stream_options":' + value + b',"a":1.0}'
    body = parse(raw)
    out = splice(raw, body, {"stream_options": with_usage(body["stream_options"], raw)})
    assert out == b'{"stream":true,"stream_options":{"include_usage":true},"a":1.0}'


@pytest.mark.parametrize(
    ("extra", "left"),
    [
        (b'{"kv_cache_report_mode":"full"}', b"{}"),
        (b'{"a":1.0, "kv_cache_report_mode" : "full","b":[1 ,2]}', b'{"a":1.0,"b":[1 ,2]}'),
        (rb'{"kv_cache_report\u005fmode":"full","a":1}', b'{"a":1}'),
        (b'{"kv_cache_report_mode":{"x":1}}', b"{}"),
        (b'{"kv_transfer_params":"x","a":1}', b'{"a":1}'),
        (rb'{"a":1,"ec_transfer\u005fparams":["x"]}', b'{"a":1}'),
    ],
)
def test_extras_that_are_not_a_clients_to_say_are_taken_out(extra: bytes, left: bytes) -> None:
    raw = TOOLS + b',"vllm_xargs":' + extra + b"}"
    body = parse(raw)
    assert has_extras(body)
    assert asks_for_report(body) == ("kv_cache_report_mode" in str(body))
    assert pairs_itself(body) == ("transfer_params" in str(body))
    out = splice(raw, body, {"vllm_xargs": without_extras(raw)})
    assert not has_extras(parse(out))
    assert not pairs_itself(parse(out))
    after = msgspec.json.decode(out, type=dict[str, msgspec.Raw])
    assert bytes(after["vllm_xargs"]) == left


@pytest.mark.parametrize("extra", [b"null", b"{}", b"[]", b'"kv_cache_report_mode"', b'{"a":1}'])
def test_other_extras_are_left_alone(extra: bytes) -> None:
    assert not has_extras(parse(b'{"vllm_xargs":' + extra + b"}"))


def test_splicing_into_an_empty_object() -> None:
    assert splice(b" {} ", {}, {"cache_salt": "s"}) == b'{"cache_salt":"s"}'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=10), json_values, max_size=6), st.booleans(), st.text())
def test_splice_sets_the_fields_and_nothing_else(
    body: dict[str, object], ascii_only: bool, salt: str
) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    out = splice(raw, parse(raw), {"cache_salt": salt, "model": {"k": [1]}})
    assert json.loads(out) == {**body, "cache_salt": salt, "model": {"k": [1]}}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "truncated"),
        (b'{"model":"m",}', "byte 13"),
        (b'{"model" "m"}', "byte 9"),
        (b'{"model":"m"} trailing', "trailing characters"),
        (b'{"model":NaN}', "byte 9"),
        (b"[1]", "list, not an object"),
        (b'"text"', "str, not an object"),
        (b"null", "NoneType, not an object"),
        (b'{"model":"\xff\xfe"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "byte 0"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b"--boundary\r\n", "byte"),
    ],
)
def test_bad_bodies_are_refused_with_the_place(raw: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        parse(raw)
    assert caught.value.status == 400
    assert caught.value.code == "bad_json"


def usage(**fields: object) -> Usage | None:
    answer = parse_answer(json.dumps({"usage": fields}).encode())
    assert answer is not None
    return usage_of(answer)


def test_usage_as_vllm_and_sglang_report_it() -> None:
    details = {"cached_tokens": 1500}
    found = usage(prompt_tokens=2000, completion_tokens=50, prompt_tokens_details=details)
    assert found == Usage(2000, 50, 1500)
    assert usage(prompt_tokens=5, completion_tokens=1, prompt_tokens_details=None) == Usage(5, 1)
    embeddings = usage(prompt_tokens=5, total_tokens=5)
    assert embeddings == Usage(prompt_tokens=5)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": 2000, "prompt_tokens_details": {"cached_tokens": 2001}},
        {"prompt_tokens_details": {"cached_tokens": 1}},
        {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": -1}},
        {"prompt_tokens": -1},
        {"prompt_tokens": 1 << 60, "prompt_tokens_details": {"cached_tokens": 1 << 60}},
        {"prompt_tokens": 10**400, "prompt_tokens_details": {"cached_tokens": 10**400}},
        {"prompt_tokens": "10"},
        {"prompt_tokens": True},
        {"prompt_tokens": 10, "completion_tokens": 1.5},
    ],
)
def test_impossible_figures_are_violations(fields: dict[str, object]) -> None:
    """The invariant of sgl-project/sglang#25972: 0 <= cached <= prompt."""
    found = usage(**fields)
    assert found is not None
    assert found.violation


def test_answers_without_usage() -> None:
    assert parse_answer(b"[1]") is None
    assert parse_answer(b"{") is None
    for text in (b"{}", b'{"usage":null}'):
        answer = parse_answer(text)
        assert answer is not None
        assert usage_of(answer) is None
    odd = parse_answer(b'{"usage":3}')
    assert odd is not None
    assert usage_of(odd) == Usage(violation="usage is no object")
