"""What each policy is for, on a handful of blocks; checkpoint prices; predictions of next turns."""

from __future__ import annotations

import msgspec
import pytest

from kvatlas.core.policy import checkpoints
from kvatlas.core.policy.attention import Attention, AttentionScores
from kvatlas.core.policy.base import Facts, Heat, Key, Policy
from kvatlas.core.policy.checkpoints import ENDS, ENDS_AND_JUNCTIONS, PROMPT_END, ZERO, Spacing
from kvatlas.core.policy.gdsf import Gdsf
from kvatlas.core.policy.lru_sink import LruSink
from kvatlas.core.policy.objective import Objective
from kvatlas.core.policy.prefix_tree import PrefixTree
from kvatlas.core.policy.registry import make_policy
from kvatlas.core.policy.s3fifo import S3Fifo
from kvatlas.core.policy.speculative import Speculative
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError
from kvatlas.workload.models import load_layout


def chain(
    policy: Policy, *keys: int, now: float = 0.0, uses: int = 0, saves_s: float = 0.0
) -> None:
    for index, key in enumerate(keys):
        heat = Heat.SINK if index == 0 else Heat.COLD
        parent = keys[index - 1] if index else None
        policy.added(key, Facts(1, parent, index, 0.0, heat, uses), now)


# -- strategy 1 -----------------------------------------------------------------------------------


def test_lru_sink_goes_by_class() -> None:
    policy = LruSink(live_s=10.0)
    chain(policy, 0, 1, 2, 3, now=0.0)
    chain(policy, 10, 11, 12, now=50.0)
    policy.touched(1, 51.0)  # a second use: shared
    assert policy.evict(1, 52.0) == [2], "cold before shared; 3 was the window of a request"
    assert policy.evict(1, 52.0) == [11], "which ended: it is cold, but came to be so later"
    assert policy.evict(1, 52.0) == [3]
    assert policy.evict(1, 52.0) == [1]
    assert policy.evict(1, 52.0) == [12], "the exempt are all that is left, and more than half"
    assert policy.evict(1, 52.0) == [0], "of the sinks the one that was used longest ago"


def test_sinks_and_windows_stay_below_their_share() -> None:
    policy = LruSink(live_s=100.0, exempt_share=1.0)
    chain(policy, 0, 1, 2)
    assert policy.evict(10, 1.0) == [1]
    assert policy.evict(10, 99.0) == []
    assert policy.evict(10, 100.0) == [2], "its request has ended"
    assert policy.evict(10, 1e9) == [], "a sink stays for ever"


def test_each_tier_has_its_own_queue() -> None:
    assert type(make_policy("lru_sink", Tier.HBM)).__name__ == "LruSink"
    assert type(make_policy("lru_sink", Tier.DRAM)).__name__ == "Lru"
    lowest = make_policy("lru_sink", Tier.DISK)
    lowest.added(1, Facts(uses=5), 0.0)
    lowest.added(2, Facts(uses=0), 1.0)
    lowest.added(3, Facts(uses=2), 2.0)
    assert lowest.evict(2, 3.0) == [2, 3], "by reference count"


# -- strategy 2 -----------------------------------------------------------------------------------

SCORES = {
    "format": "kvatlas.attention-scores.1",
    "model": "SmolLM2-135M",
    "statistic": "attention",
    "trained": True,
    "source": "a test",
    "block_tokens": 64,
    "from_start": [9.0, 1.5],
    "last": 4.0,
    "middle": 0.5,
}


def scores(**changed: object) -> AttentionScores:
    return AttentionScores.decode(msgspec.json.encode(SCORES | changed), "scores.json")


def test_attention_keeps_what_is_looked_at() -> None:
    policy = Attention(scores(by_key={"12": 20.0}))
    chain(policy, 10, 11, 12, 13, 14)
    assert policy.evict(5, 0.0) == [13, 11, 14, 10, 12]


def test_the_end_moves_on() -> None:
    policy = Attention(scores())
    chain(policy, 0, 1, 2, 3)
    policy.added(4, Facts(1, 3, 4), 1.0)
    assert policy.evict(2, 1.0) == [2, 3], "3 was the last, and is no longer"


@pytest.mark.parametrize(
    ("changed", "model", "told"),
    [
        ({}, "SmolLM2-135M", ""),
        ({}, "smollm2-135m", ""),
        ({}, "deepseek-v4-flash", "measured on SmolLM2"),
        ({"trained": False}, "SmolLM2-135M", "random weights"),
        ({"model": "deepseek-v4-flash"}, "deepseek-v4-flash", "by its indexer"),
        (
            {"model": "deepseek-v4-flash", "statistic": "csa_selection"},
            "deepseek-v4-flash",
            "",
        ),
    ],
)
def test_statistics_speak_for_their_own_model_alone(
    changed: dict[str, object], model: str, told: str
) -> None:
    answer = scores(**changed).speaks_for(model)
    assert told in answer
    assert answer.startswith("not known") == bool(told)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "other"},
        {"middle": -1.0},
        {"from_start": [float("1e999")]},
        {"block_tokens": 0},
        {"statistic": "guess"},
        {"surprise": 1},
        {"from_start": "no list"},
    ],
)
def test_scores_that_are_none(changed: dict[str, object]) -> None:
    data = msgspec.json.encode(SCORES | changed).replace(b"null", b"1e999")
    with pytest.raises(ConfigError, match=r"scores\.json"):
        AttentionScores.decode(data, "scores.json")
    with pytest.raises(ConfigError, match=r"x: no attention scores"):
        AttentionScores.decode(b"{", "x")


# -- strategy 3, and others that know the tree ----------------------------------------------------


def test_prefix_tree_weighs_use_against_age() -> None:
    policy = PrefixTree(half_life_s=100.0)
    for root, times in ((1, 8), (2, 1)):
        policy.added(root, Facts(), 0.0)
        for _ in range(times):
            policy.touched(root, 0.0)
    policy.added(3, Facts(), 150.0)
    assert policy.evict(1, 150.0) == [2], "used twice long ago, against once just now"
    policy.added(4, Facts(), 1000.0)
    assert policy.evict(1, 1000.0) == [3]
    assert policy.evict(1, 1000.0) == [1], "even nine uses grow old"


def test_nodes_adapt_their_size() -> None:
    policy = PrefixTree(fine_blocks=1, coarse_blocks=3)
    chain(policy, 0, 1, 2, 3, 4)
    assert policy.evict(1, 0.0) == [4], "used once: one block at a time"
    for key in (0, 1, 2, 3):
        policy.touched(key, 1.0)
    assert policy.evict(1, 1.0) == [3, 2, 1], "a shared run goes as a node"
    policy.added(5, Facts(1, 0, 1), 2.0)
    assert policy.evict(1, 2.0) == [5], "which ends where uses differ"
    for wrong in ({"fine_blocks": 0}, {"fine_blocks": 5}, {"half_life_s": 0.0}):
        with pytest.raises(ValueError, match="half-life"):
            PrefixTree(**wrong)  # type: ignore[arg-type]


def test_a_pin_ends_a_node() -> None:
    policy = PrefixTree(coarse_blocks=4)
    chain(policy, 0, 1, 2, 3, uses=1)
    assert policy.evict(4, 0.0, lambda key: key != 1) == [3, 2]
    assert len(policy) == 2


def test_gdsf_keeps_what_is_dear_per_byte() -> None:
    policy = Gdsf()
    for key, (size, saves) in enumerate([(1, 1.0), (10, 5.0), (1, 3.0)]):
        policy.added(key, Facts(size, None, 0, saves), 0.0)
    assert policy.evict(1, 0.0) == [1], "half a second per byte"
    policy.touched(0, 1.0)  # clock 0.5 + 2 * 1.0
    policy.added(4, Facts(1, None, 0, 2.0), 1.0)  # 0.5 + 2.0: equal, but came later
    assert policy.evict(1, 1.0) == [0]


def test_s3fifo_remembers_and_filters() -> None:
    policy = S3Fifo()
    for key in range(10):
        policy.added(key, Facts(), 0.0)
    for _ in range(2):
        policy.touched(0, 0.0)
    assert policy.evict(3, 0.0) == [1, 2, 3], "0 was used twice and is in the main queue"
    policy.added(1, Facts(), 1.0)  # the ghost knows it: main queue
    for key in range(20, 24):
        policy.added(key, Facts(), 1.0)
    gone: list[Key] = policy.evict(10, 2.0)
    assert gone == [4, 5, 6, 7, 8, 9, 20, 21, 22, 23]
    assert policy.evict(2, 2.0) == [0, 1]


# -- checkpoints ----------------------------------------------------------------------------------


def test_the_price_of_spacing() -> None:
    """DESIGN: one resume point per 256 tokens is 19.8 kB a token against 3.9 of KV."""
    flash = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")
    assert round(flash.bytes_per_token() / 1000, 1) == 3.9
    assert round(checkpoints.bytes_per_token(flash, 256) / 1000, 1) == 19.8
    assert round(checkpoints.bytes_per_token(flash, 4096) / 1000, 1) == 4.8
    assert round(checkpoints.break_even_tokens(flash)) == 1058
    assert round(checkpoints.break_even_tokens(flash, minimal=False)) == 4005
    for wrong in (0, -256, 100):
        with pytest.raises(ConfigError, match="multiple of the grid"):
            checkpoints.bytes_per_token(flash, wrong)


@pytest.mark.parametrize(
    ("spacing", "positions"),
    [
        (ZERO, ()),
        (PROMPT_END, (768,)),
        (ENDS, (768, 1280)),
        (ENDS_AND_JUNCTIONS, (512, 768, 1280)),
        (Spacing(every_tokens=512), (512, 1024)),
        (Spacing(every_tokens=256), (256, 512, 768, 1024, 1280)),
    ],
)
def test_positions(spacing: Spacing, positions: tuple[int, ...]) -> None:
    """A prompt of 1,024 tokens resumes at 768: its last token is computed anew."""
    assert spacing.positions(256, 1024, 300, seen=(600, 5000)) == positions


def test_short_requests_have_no_positions() -> None:
    everything = Spacing(True, True, True, 256)
    assert everything.positions(256, 1, 0, seen=(0, 255)) == ()
    assert everything.positions(256, 256, 0) == ()
    assert everything.positions(256, 257, 0) == (256,)
    with pytest.raises(ConfigError, match="every 100 tokens"):
        Spacing(every_tokens=100).positions(256, 1000, 0)


def test_what_a_request_costs_to_keep() -> None:
    flash = load_layout("deepseek-v4-flash", engine="vllm", kv_dtype="fp8")
    priced = checkpoints.price(flash, ENDS, 8192, 1000)
    assert priced.points == 2
    assert priced.chain_bytes == 3850.25 * 8960
    assert priced.total_bytes == priced.chain_bytes + 2 * 4_074_496
    llama = load_layout("llama-3.1-70b", engine="vllm")
    assert checkpoints.price(llama, ENDS, 8192, 1000).points == 0


# -- the objective --------------------------------------------------------------------------------


def test_goals_weigh_in_the_order_of_the_seed() -> None:
    objective = Objective()
    base = objective.value(saved=0.5, moving=0.1, decode_slower=0.1, hbm_used=0.5)
    steps = [
        objective.value(saved=0.6, moving=0.1, decode_slower=0.1, hbm_used=0.5) - base,
        objective.value(saved=0.5, moving=0.0, decode_slower=0.1, hbm_used=0.5) - base,
        objective.value(saved=0.5, moving=0.1, decode_slower=0.0, hbm_used=0.5) - base,
        objective.value(saved=0.5, moving=0.1, decode_slower=0.1, hbm_used=0.4) - base,
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > 0
    for wrong in ((1.0, 2.0, 0.0, 0.0), (-1.0, -2.0, -3.0, -4.0), (float("nan"),), (8, 4, 2, 3)):
        with pytest.raises(ConfigError, match="objective weights"):
            Objective(*wrong)


# -- strategy 4 -----------------------------------------------------------------------------------


def converse(ahead: Speculative, name: int, turns: int, start: float, gap_s: float) -> None:
    now, turn = start, 0
    for n in range(turns):
        keys = [name * 1000 + i for i in range(n + 1)]
        turn = ahead.arrived(keys, now, place="a")
        assert turn == n + 1
        ahead.ended(keys, turn, now, place="a")
        now += gap_s


def test_next_turns_are_predicted_when_most_came_so_far() -> None:
    ahead = Speculative(confidence_min=0.6)
    assert ahead.due(0.0) == []
    for name in range(20):
        converse(ahead, name, 5, 100.0 * name, 10.0)
    keys = [7, 8]
    ahead.ended(keys, 1, 5000.0, place="a")
    at = ahead.next_due()
    assert at is not None
    assert 5008.0 <= at <= 5010.0, "before most of the next turns, which came after 10 s"
    assert ahead.due(5000.0) == []
    (prediction,) = ahead.due(at)
    assert (prediction.keys, prediction.to) == ((7, 8), "a")
    assert 0.6 <= prediction.confidence <= 1.0
    assert ahead.due(at + 1) == []
    assert ahead.arrived([7, 8, 9], at + 2, place="a") == 2
    assert (ahead.predicted, ahead.came_true) == (1, 1)


def test_one_time_prompts_teach_it_silence() -> None:
    ahead = Speculative(confidence_min=0.6, horizon_s=10.0)
    for n in range(100):
        ahead.ended([n], 1, 20.0 * n)
    assert ahead.due(1e6) == []
    assert ahead.next_due() is None


def test_a_budget_is_kept_and_memory_has_a_limit() -> None:
    ahead = Speculative(confidence_min=0.0, ends_max=100)
    for n in range(1000):
        ahead.ended([10 * n, 10 * n + 1], 1, 0.0)
    assert len(ahead) == 100
    assert len(ahead.due(1.0, blocks_max=5)) == 3
    assert len(ahead.due(1.0)) == 97
    ahead.ended([], 1, 2.0)
    for wrong in ({"confidence_min": 2.0}, {"early": 0.0}, {"ends_max": 0}, {"horizon_s": 0.0}):
        with pytest.raises(ValueError, match="shares"):
            Speculative(**wrong)  # type: ignore[arg-type]
