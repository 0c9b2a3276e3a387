"""Each request of a batch draws its own way."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from chatsvc.prompt import Sampling

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="comes with the extra 'transformers'")
pytest.importorskip("transformers", reason="comes with the extra 'transformers'")

LOGITS = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
DRAWS = 4000


def drawn(**sampling: float) -> Counter[int]:
    from chatsvc.inference.transformers_sampling import Draw

    draw = Draw(Sampling(max_tokens=1, **{"seed": 3, **sampling}), torch.device("cpu"))
    return Counter(int(draw.race(torch.tensor(LOGITS)).argmax()) for _ in range(DRAWS))


def shares(counts: Counter[int]) -> list[float]:
    return [counts[token] / DRAWS for token in range(4)]


def test_at_temperature_one_a_token_comes_as_often_as_the_model_says():
    assert shares(drawn(temperature=1.0)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_a_higher_temperature_evens_out():
    weights = [share**0.5 for share in (0.5, 0.3, 0.15, 0.05)]
    assert shares(drawn(temperature=2.0)) == pytest.approx([w / sum(weights) for w in weights], abs=0.03)


def test_at_temperature_zero_the_likeliest_comes_always():
    assert drawn(temperature=0.0) == {0: DRAWS}


def test_a_nucleus_keeps_the_likeliest_until_they_fill_it():
    assert shares(drawn(temperature=1.0, top_p=0.7)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert drawn(temperature=1.0, top_p=0.01) == {0: DRAWS}
