"""Fitting the time model to measurements, and judging it on others that were not fitted.

Per-request runs: the first requests of one run are fitted, the rest of it and every other run are
judged. Tables: settings are split by a seed, one part is fitted and the other judged. Nothing that
is judged is ever fitted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from statistics import fmean, median

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.validate.calibrate_runs import Run, replay
from kvatlas.validate.calibrate_tables import Loop, Row, estimate
from kvatlas.validate.fit import Parameters, Prior, fit
from kvatlas.workload.device import DEVICES, Device

RESAMPLES = 400  # of the bootstrap; the spread is what 5 and 95 % of them fall below

#: What is fitted, and what is believed before: typical figures of published cost models.
_DEVICE = {
    "compute_efficiency": Prior(0.5, 0.4, 0.05, 1.0),
    "memory_efficiency": Prior(0.75, 0.3, 0.1, 1.0),
    "attention_efficiency": Prior(0.6, 0.5, 0.05, 1.0),
    "request_s": Prior(1e-5, 0.8, 1e-7, 1e-3),
}
RUN_PRIORS = {
    "compute_efficiency": Prior(0.6, 0.5, 0.05, 1.0),
    "memory_efficiency": Prior(0.85, 0.2, 0.1, 1.0),
    "attention_efficiency": Prior(0.8, 0.5, 0.05, 1.0),
    "step_s": Prior(1e-3, 1.0, 1e-5, 0.02),
    "request_s": Prior(2e-5, 1.0, 1e-7, 1e-3),
}
TABLE_PRIORS = {
    **_DEVICE,
    "unhidden": Prior(0.3, 0.7, 0.01, 1.0),
    "layer_s": Prior(2e-5, 0.7, 1e-6, 3e-4),
    "link_latency_s": Prior(8e-6, 0.5, 1e-6, 1e-4),
    "first_token_s": Prior(0.03, 0.8, 0.001, 0.5),
    "crowd": Prior(0.1, 0.5, 0.005, 1.0),
}
_LOOP = ("first_token_s", "crowd")  # of the measuring, not of the engine
_TABLE_STEP_S = 5e-4  # the table's rows say layers and requests apart, a step's own cost not

#: Fitted by the tables (all models, GPUs and engines together), and so none of the two runs'.
UNHIDDEN = 0.35

#: Largest bf16 matrix product in TFLOP/s, PyTorch 2.7 with CUDA 12.8, one script for all:
#: github.com/zzc0721/torch-performance-test-data, entries 78 and 162. A data sheet's clock is
#: exceeded by a GeForce card and not reached by a server card at its power limit.
MATMUL_TFLOPS = {"RTX-4090": 164.81, "RTX-PRO-6000": 417.34}


class Error(msgspec.Struct, frozen=True):
    """A relative error and its spread under resampling: from 5 to 95 %."""

    value: float
    low: float
    high: float


class RunErrors(msgspec.Struct, frozen=True):
    """The model beside one part of a run. ``how``: where the parameters come from. Errors are of
    the statistic: mean of the model over mean of the measured, less 1."""

    device: str
    part: str
    how: str
    requests: int
    ttft_mean_s: float
    ttft_mean: Error
    ttft_median: Error
    ttft_p90: Error
    tpot_mean_s: float
    tpot_mean: Error
    tpot_median: Error
    tpot_p90: Error


class RunReport(msgspec.Struct, frozen=True):
    """Everything that was fitted and judged on per-request runs."""

    fitted_on: str
    fitted_requests: int
    parameters: dict[str, dict[str, float]]
    judged: tuple[RunErrors, ...]
    evaluations: int


class TableErrors(msgspec.Struct, frozen=True):
    """Median absolute relative errors of one group of rows."""

    name: str
    rows: int
    settings: int
    ttft: Error
    tpot: Error


class TableReport(msgspec.Struct, frozen=True):
    """Everything that was fitted and judged on tables.

    ``judged``: rows whose setting was not fitted. ``unseen``: the same rows, with nothing of their
    model on their GPU fitted (None where that was not asked for). ``extra``: rows of tables that
    are only judged.
    """

    seed: int
    fitted_rows: int
    parameters: dict[str, dict[str, float]]
    judged: TableErrors
    unseen: TableErrors | None
    families: tuple[TableErrors, ...]
    extra: tuple[TableErrors, ...]
    left_out: dict[str, int]


# Per-request runs ------------------------------------------------------------------------------


def device_figures(parameters: Parameters) -> dict[str, float]:
    """The fitted figures that belong to a device. A numeric derivative may look beyond 1."""
    shares = ("compute_efficiency", "memory_efficiency", "attention_efficiency", "unhidden")
    return {
        name: min(value, 1.0) if name in shares else value
        for name, value in parameters.items()
        if name not in _LOOP
    }


def profile(base: Device, parameters: Parameters, **more: float) -> Device:
    """The device with fitted figures in place of the assumed ones."""
    return msgspec.structs.replace(base, **device_figures(parameters), **more)


def calibrate_runs(
    runs: Sequence[Run], *, fit_requests: int, seed: int, each: bool = True
) -> RunReport:
    """Fit on the first ``fit_requests`` of the first run; judge on its rest and on the others.

    The others are judged three times: with the parameters as they are (what a data sheet says
    scales them), with compute scaled by what both reach in a plain matrix product where that is
    known, and, with ``each``, fitted on their own first requests.
    """
    first = runs[0]
    found, evaluations = fit_run(first, fit_requests)
    parameters = {first.device: found}
    judged = [*judge_run(first, found, fit_requests, "fitted on its first", seed)]
    for run in runs[1:]:
        judged += judge_run(run, found, 0, f"{first.device}, by data sheet", seed)
        moved = by_matmul(found, first.device, run.device)
        if moved is not None:
            judged += judge_run(run, moved, 0, f"{first.device}, by matrix product", seed)
        if each:
            own, more = fit_run(run, fit_requests)
            evaluations += more
            parameters[run.device] = own
            judged += judge_run(run, own, fit_requests, "fitted on its first", seed)
    return RunReport(first.device, fit_requests, parameters, tuple(judged), evaluations)


def by_matmul(parameters: Mapping[str, float], source: str, target: str) -> dict[str, float] | None:
    """Parameters of one device for another, compute by what both reach in a matrix product."""
    if source not in MATMUL_TFLOPS or target not in MATMUL_TFLOPS:
        return None
    reached = MATMUL_TFLOPS[target] / MATMUL_TFLOPS[source]
    sheet = DEVICES[target].flops["bf16"] / DEVICES[source].flops["bf16"]
    scaled = parameters["compute_efficiency"] * reached / sheet
    return {**parameters, "compute_efficiency": min(1.0, scaled)}


def fit_run(run: Run, count: int) -> tuple[dict[str, float], int]:
    """Parameters that bring the model closest to the first ``count`` requests of a run."""
    wanted = run.requests[:count]
    base = DEVICES[run.device]
    slack = 0.1 * fmean(r.ttft_s for r in wanted)  # a first token at once is not to be 1 ms exact
    weight = 10 / math.sqrt(len(wanted))

    def residuals(parameters: Parameters) -> list[float]:
        found = replay(run, profile(base, parameters, unhidden=UNHIDDEN), upto=count)
        out = []
        for (ttft_s, tpot_s), real in zip(found, wanted, strict=True):
            out.append(3 * weight * math.log(tpot_s / real.tpot_s))
            out.append(weight * (ttft_s - real.ttft_s) / (real.ttft_s + slack))
        return out

    # Preemptions make the model jump a little: a wide step looks past that.
    result = fit(residuals, RUN_PRIORS, rounds=6, step=0.08)
    return result.parameters, result.evaluations


def judge_run(
    run: Run, parameters: Parameters, fitted: int, how: str, seed: int
) -> list[RunErrors]:
    """Errors on a run; of one that was fitted in part, on that part and on the rest apart."""
    found = replay(run, profile(DEVICES[run.device], parameters, unhidden=UNHIDDEN))
    parts = [("all", 0, len(found))]
    if 0 < fitted < len(found):
        parts = [("rest", fitted, len(found)), ("fitted", 0, fitted)]
    return [_run_errors(run, found, part, how, seed) for part in parts]


def _run_errors(
    run: Run,
    found: Sequence[tuple[float, float]],
    part: tuple[str, int, int],
    how: str,
    seed: int,
) -> RunErrors:
    name, start, end = part
    real = [(r.ttft_s, r.tpot_s) for r in run.requests[start:end]]
    errors = []
    for which in (0, 1):
        pairs = [(f[which], r[which]) for f, r in zip(found[start:end], real, strict=True)]
        errors.append([_ratio(pairs, statistic, seed) for statistic in (fmean, median, _p90)])
    (ttft, tpot) = errors
    return RunErrors(
        device=run.device,
        part=name,
        how=how,
        requests=len(real),
        ttft_mean_s=fmean(t for t, _ in real),
        ttft_mean=ttft[0],
        ttft_median=ttft[1],
        ttft_p90=ttft[2],
        tpot_mean_s=fmean(t for _, t in real),
        tpot_mean=tpot[0],
        tpot_median=tpot[1],
        tpot_p90=tpot[2],
    )


Statistic = Callable[[Sequence[float]], float]


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _ratio(pairs: Sequence[tuple[float, float]], statistic: Statistic, seed: int) -> Error:
    """Statistic of the model over that of the measured, less 1; requests are resampled."""

    def error(sample: Sequence[tuple[float, float]]) -> float:
        return statistic([a for a, _ in sample]) / statistic([b for _, b in sample]) - 1

    random = Random(seed)
    seen = sorted(error(random.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return _spread(error(pairs), seen)


def _spread(value: float, seen: Sequence[float]) -> Error:
    return Error(value, seen[len(seen) // 20], seen[len(seen) - 1 - len(seen) // 20])


# Tables ----------------------------------------------------------------------------------------


def predict(row: Row, parameters: Parameters) -> tuple[float, float]:
    """(TTFT, TPOT) of a row in seconds, with fitted parameters on its device's data sheet."""
    device = profile(DEVICES[row.device], parameters, step_s=_TABLE_STEP_S)
    return estimate(row, device, Loop(parameters["first_token_s"], parameters["crowd"]))


def split(rows: Sequence[Row], seed: int, share: float) -> tuple[list[Row], list[Row]]:
    """(to fit, to judge): whole settings, ``share`` of them to fit. Raises ConfigError where that
    leaves nothing for one of the two."""
    settings = sorted({row.setting() for row in rows})
    Random(seed).shuffle(settings)
    count = round(len(settings) * share)
    if not 0 < count < len(settings):
        raise ConfigError(
            f"a share of {share:g} fits {count} of {len(settings)} settings: some must be fitted"
            " and some judged"
        )
    chosen = set(settings[:count])
    return (
        [row for row in rows if row.setting() in chosen],
        [row for row in rows if row.setting() not in chosen],
    )


def calibrate_tables(
    rows: Sequence[Row],
    extra: Sequence[Row],
    *,
    seed: int,
    share: float,
    left_out: dict[str, int],
    hold_out: bool = False,
) -> TableReport:
    """Fit a part of the rows, judge on the others; ``extra`` rows are judged and never fitted.

    One set of parameters for everything first, then one per model and engine, then one per family,
    each drawn to the one before. A family without fitted rows keeps the nearest that there is.
    """
    fitted, judged = split(rows, seed, share)
    common = fit_rows(fitted, TABLE_PRIORS, weight=0.3)
    parameters = {"": common, **fit_families(fitted, common)}

    def own(row: Row) -> dict[str, float]:
        return parameters.get(row.family()) or parameters.get(row.kin()) or common

    return TableReport(
        seed=seed,
        fitted_rows=len(fitted),
        parameters=parameters,
        judged=_errors("settings not fitted", judged, own, seed),
        unseen=_errors("model and GPU not fitted", judged, _unseen(fitted, judged), seed)
        if hold_out
        else None,
        families=tuple(_errors(n, r, own, seed) for n, r in sorted(_grouped(judged, Row.family))),
        extra=tuple(_errors(n, r, own, seed) for n, r in sorted(_grouped(extra, Row.family))),
        left_out=left_out,
    )


def fit_rows(
    rows: Sequence[Row], priors: Mapping[str, Prior], *, weight: float = 1.0
) -> dict[str, float]:
    """Parameters for these rows. Errors count as ratios, large ones less than by their square:
    some rows carry things that no step time explains (a warm-up in the first requests)."""

    def residuals(parameters: Parameters) -> list[float]:
        out = []
        for row in rows:
            ttft_s, tpot_s = predict(row, parameters)
            out.append(0.7 * weight * _tamed(math.log(ttft_s / row.ttft_s) / 0.15))
            out.append(weight * _tamed(math.log(tpot_s / row.tpot_s) / 0.08))
        return out

    return fit(residuals, priors, rounds=8).parameters


def _tamed(value: float) -> float:
    """Its square is quadratic near 0 and linear far out (pseudo-Huber)."""
    return math.copysign(math.sqrt(2 * (math.hypot(1, value) - 1)), value)


def fit_families(rows: Sequence[Row], common: Parameters) -> dict[str, dict[str, float]]:
    """Parameters per model and engine, drawn to the common ones, and per family, drawn to those:
    few rows move a family little away from its kin."""
    near = _priors(common)
    kin = {name: fit_rows(some, near, weight=0.5) for name, some in sorted(_grouped(rows, Row.kin))}
    families = {
        name: fit_rows(some, _priors(kin[some[0].kin()], 0.6))
        for name, some in sorted(_grouped(rows, Row.family))
    }
    return {**kin, **families}


def _priors(around: Parameters, spread: float = 1.0) -> dict[str, Prior]:
    return {
        name: msgspec.structs.replace(
            prior,
            value=min(max(around[name], prior.low), prior.high),
            spread=prior.spread * spread,
        )
        for name, prior in TABLE_PRIORS.items()
    }


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> Iterable[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found.items()


def _unseen(fitted: Sequence[Row], judged: Sequence[Row]) -> Callable[[Row], dict[str, float]]:
    """The common parameters, fitted without any row of the same model on the same GPU."""
    pairs = sorted({(row.model, row.device) for row in judged})
    found = {
        pair: fit_rows(
            [row for row in fitted if (row.model, row.device) != pair], TABLE_PRIORS, weight=0.3
        )
        for pair in pairs
    }
    return lambda row: found[row.model, row.device]


def _errors(
    name: str, rows: Sequence[Row], parameters: Callable[[Row], Parameters], seed: int
) -> TableErrors:
    """Median absolute errors; settings are resampled as wholes."""
    by_setting: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        ttft_s, tpot_s = predict(row, parameters(row))
        pair = (abs(ttft_s / row.ttft_s - 1), abs(tpot_s / row.tpot_s - 1))
        by_setting[row.setting()].append(pair)
    groups = list(by_setting.values())
    random = Random(seed)
    draws = [random.choices(groups, k=len(groups)) for _ in range(RESAMPLES)]
    found = []
    for which in (0, 1):
        value = median(pair[which] for group in groups for pair in group)
        seen = sorted(median(p[which] for g in draw for p in g) for draw in draws)
        found.append(_spread(value, seen))
    return TableErrors(name, len(rows), len(groups), *found)
