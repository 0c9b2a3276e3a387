"""What a request is expected to cost before it runs. Pure.

The door charges this against the user's budget until the real cost is known; then that counts, whatever the end.
"""

from __future__ import annotations

from typing import Final

from chatsvc.limits import ServiceCost

EXPECTED_OUTPUT: Final = 512
"""Tokens that a reply is expected to have when nothing shorter was asked for: more than most replies of chats have, so
that a burst of messages cannot run far ahead of a budget, and far less than their limit."""
CHARS_PER_TOKEN: Final = 3
"""Where no tokenizer is at hand. English has four; other scripts have fewer, and to charge a little more does no harm:
the true count replaces it."""


def expected_cost(cost: ServiceCost, *, prompt_tokens: int, reply_limit: int) -> float:
    """Units of service. No part of the prompt is expected in the cache: what is, costs less in the end."""
    return cost.of_prompt(prompt_tokens, 0) + cost.of_output(min(reply_limit, EXPECTED_OUTPUT))
