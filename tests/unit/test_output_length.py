"""How long a user's next reply is expected to be."""

import pytest

from chatsvc.scheduler.output_length import OutputEstimator

# Estimates ------------------------------------------------------------------------------------------------------------


def test_a_users_expected_length_follows_its_replies():
    guess = OutputEstimator()
    assert guess.predict("u", 10_000) == OutputEstimator.FIRST_GUESS
    for _ in range(50):
        guess.observe("u", 20)
        guess.observe("v", 800)
    assert guess.predict("u", 10_000) < guess.usual < guess.predict("v", 10_000)
    assert guess.usual == pytest.approx(410, rel=0.1)
    assert guess.predict("v", 100) == 100


def test_the_estimator_forgets_the_users_seen_least_recently():
    guess = OutputEstimator(most_users=10)
    for n in range(100):
        guess.observe(f"u{n}", 10)
    assert len(guess) == 10
