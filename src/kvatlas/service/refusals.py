"""Why a request gets no engine, in words for its client."""

from __future__ import annotations

import math

from kvatlas.core.records import Refusal
from kvatlas.core.router import Decision
from kvatlas.errors import RequestError


def not_taken(decision: Decision, refusal: Refusal) -> RequestError:
    """Admission said no: why, and when to ask again."""
    after_s = math.ceil(refusal.retry_after_s)
    if refusal.reason == "in_flight_max":
        text = "as many requests are in flight as may be (admission.in_flight_max)"
        return RequestError(text, status=503, code="in_flight_max", retry_after_s=after_s)
    text = (
        f"no engine is predicted to give the first token within {decision.ttft_slo_s:.3g} s: the "
        f"soonest, {refusal.soonest}, after {refusal.ttft_s:.3g} s, for others wait there"
    )
    return RequestError(text, status=429, code="slo_unreachable", retry_after_s=after_s)


def not_whole(why: str) -> RequestError:
    """No engine here serves a request that is not split."""
    if why == "no_pair":
        text = "no two halves of a pair may meet, and no engine serves whole requests"
        return RequestError(text, status=503, code="no_pair")
    if why == "proxy":
        text = "a proxy carries a request to one engine, and no engine here serves whole requests"
        return RequestError(text, status=503, code="no_pair")
    text = (
        f"{why!r}: such a request cannot be split over a pair, and no engine here serves it alone"
    )
    return RequestError(text, code="not_pairable", param=why)
