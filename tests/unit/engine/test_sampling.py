from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from k3ray.engine.request import SamplingParams
from k3ray.engine.sampling import check_sampling, noise, sample, top_ids
from k3ray.errors import BadRequestError

LOGITS = np.array([0.0, 2.0, 1.0, 2.0, -1.0], dtype=np.float32)
GREEDY = SamplingParams(temperature=0.0)


def tokens_of(params: SamplingParams, logits: np.ndarray = LOGITS, draws: int = 4000) -> Counter:
    return Counter(
        sample(logits, params, uniform=noise(seed=5, choice=0, position=i), counts={}).token
        for i in range(draws)
    )


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds, as in Salmon et al. 2011, in plain integers."""
    mask = (1 << 64) - 1
    for _ in range(10):
        low = [counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157]
        counter = [
            (low[1] >> 64) ^ counter[1] ^ key[0],
            low[1] & mask,
            (low[0] >> 64) ^ counter[3] ^ key[1],
            low[0] & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_own_philox_gives_the_published_vector() -> None:
    # Random123's known answer for counter 0, key 0.
    assert philox4x64([0, 0, 0, 0], [0, 0])[0] == 0x16554D9ECA36314C


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
def test_noise_is_philox_of_seed_choice_and_position(seed: int) -> None:
    for choice in (0, 3):
        for position in (0, 1, 8191):
            # numpy steps the counter before the first block.
            word = philox4x64([position + 1, 0, 0, 0], [seed, choice])[0]
            assert noise(seed=seed, choice=choice, position=position) == (word >> 11) / 2**53


def test_noise_is_uniform() -> None:
    values = np.array([noise(seed=9, choice=0, position=i) for i in range(4000)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert np.abs(counts - 400).max() < 80


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert sample(LOGITS, GREEDY, uniform=0.9, counts={}).token == 1


def test_frequencies_follow_the_softmax() -> None:
    for temperature in (0.5, 1.0, 2.0):
        want = np.exp(LOGITS.astype(np.float64) / temperature)
        want /= want.sum()
        got = tokens_of(SamplingParams(temperature=temperature))
        for token, share in enumerate(want):
            assert abs(got[token] / 4000 - share) < 0.03


def test_logprob_is_of_the_unmodified_distribution() -> None:
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias=((4, 50.0),), num_logprobs=3)
    got = sample(LOGITS, params, uniform=0.5, counts={})
    log_total = math.log(sum(math.exp(x) for x in LOGITS.tolist()))
    assert got.token == 4
    assert got.logprob == pytest.approx(-1.0 - log_total, abs=1e-6)
    assert got.logprob == float(np.float32(got.logprob))
    assert [token for token, _ in got.top_logprobs] == [1, 3, 2]
    assert got.top_logprobs[0][1] == pytest.approx(2.0 - log_total, abs=1e-6)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=2), {1, 3}),
        (SamplingParams(top_k=3), {1, 2, 3}),
        (SamplingParams(top_p=1e-9), {1}),
        (SamplingParams(top_p=0.5), {1, 3}),
        (SamplingParams(top_p=0.85), {1, 2, 3}),
        (SamplingParams(min_p=1.0), {1, 3}),
        (SamplingParams(min_p=0.3), {1, 2, 3}),
        (SamplingParams(top_k=4, top_p=0.9, min_p=0.2), {1, 2, 3}),
    ],
)
def test_filters_keep_exactly(params: SamplingParams, allowed: set[int]) -> None:
    assert set(tokens_of(params, draws=800)) == allowed


def test_top_p_prefilter_equals_the_plain_definition() -> None:
    rng = np.random.default_rng(0)
    for case in range(200):
        logits = (rng.standard_normal(97) * rng.uniform(0.1, 6)).astype(np.float32)
        top_p = float(rng.uniform(0.01, 0.999))
        probs = np.exp(logits.astype(np.float64) - logits.max())
        order = np.argsort(-probs, kind="stable")
        count = int(np.searchsorted(np.cumsum(probs[order]), top_p * probs.sum())) + 1
        nucleus = set(order[:count].tolist())
        params = SamplingParams(top_p=top_p)
        for draw in range(20):
            uniform = noise(seed=case, choice=1, position=draw)
            assert sample(logits, params, uniform=uniform, counts={}).token in nucleus


def test_penalties_count_generated_tokens() -> None:
    presence = replace(GREEDY, presence_penalty=1.5)
    assert sample(LOGITS, presence, uniform=0.0, counts={1: 1}).token == 3
    frequency = replace(GREEDY, frequency_penalty=0.4)
    assert sample(LOGITS, frequency, uniform=0.0, counts={1: 1, 3: 3}).token == 1
    assert sample(LOGITS, frequency, uniform=0.0, counts={1: 3, 3: 3}).token == 2


def test_extremes_stay_finite_and_in_range() -> None:
    steep = np.array([-3e38, 3e38, 0.0], dtype=np.float32)
    for uniform in (0.0, 0.5, 1.0 - 2.0**-53):
        assert sample(steep, SamplingParams(), uniform=uniform, counts={}).token == 1
    cold = SamplingParams(temperature=1e-300)
    assert sample(LOGITS, cold, uniform=0.1, counts={}).token == 1
    assert sample(LOGITS, cold, uniform=0.9, counts={}).token == 3


def test_top_ids_orders_ties_by_id() -> None:
    values = np.array([1.0, 3.0, 3.0, 0.0, 3.0])
    assert top_ids(values, 2).tolist() == [1, 2]
    assert top_ids(values, 4).tolist() == [1, 2, 4, 0]
    assert top_ids(values, 9).tolist() == [1, 2, 4, 0, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("presence_penalty", math.inf),
        ("max_tokens", -1),
        ("num_logprobs", 21),
        ("logit_bias", ((512, 1.0),)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_out_of_range_fields_are_named(field: str, value: object) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_sampling(replace(SamplingParams(), **{field: value}), vocab_size=512)
    assert caught.value.fields["param"] == field
