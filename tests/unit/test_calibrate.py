"""``bench/calibrate.py``: what was put into step times is found in them, and becomes the weights of ``[service]``."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from calibrate import Fit, Sample, fit

A, B, C, D = 0.027, 0.00024, 0.0004, 9e-7


def sample(prompt, sequences, kv, *, a=A, b=B, c=C, d=D):
    seconds = a + b * prompt + c * sequences + d * kv
    return Sample(steps=1, prompt_tokens=prompt, sequences=sequences, kv_tokens=kv, seconds=seconds)


WORK = [(0, 1, 64), (0, 8, 512), (0, 32, 2048), (0, 8, 8192), (0, 32, 32_768), (64, 1, 64), (1024, 1, 1024)]


def test_the_parts_of_a_step_are_found_in_how_long_steps_take():
    found = fit([sample(*work) for work in WORK])
    assert (found.a, found.b, found.c, found.d) == pytest.approx((A, B, C, D), rel=1e-6)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_no_part_of_a_step_is_negative():
    found = fit([sample(*work, c=-0.0002) for work in WORK])
    assert found.c == 0
    assert min(found.a, found.b, found.d) >= 0


def test_a_part_that_was_never_seen_alone_costs_nothing_rather_than_anything():
    found = fit([sample(0, 4, 400), sample(0, 4, 400), sample(100, 1, 100)])
    assert min(found.a, found.b, found.c, found.d) >= 0
    assert found.error < 0.01


def test_an_output_token_costs_its_share_of_the_step_and_a_prompt_token_what_it_is_read_for():
    found = Fit(a=A, b=B, c=C, d=0.0, error=0.0)
    cost = found.cost(batch=27, reply_tokens=256, cached_s=B / 10)
    assert cost.prompt == 1
    assert cost.cached == pytest.approx(0.1)
    assert cost.output == pytest.approx((A / 27 + C) / B, abs=0.01)
    # What stands in the KV cache is read again for each token of the reply, cached or not.
    heavy = Fit(a=A, b=B, c=C, d=D, error=0.0).cost(batch=27, reply_tokens=256, cached_s=B / 10)
    assert heavy.cached > cost.cached
    assert heavy.output < cost.output
