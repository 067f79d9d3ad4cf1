"""What may be typed short: `reward=python:my_reward.py:score`, and names of one's own in `reward.weights`."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config.validation import OPEN

PYTHON = "reward=python:"


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line as Hydra reads them."""
    found = []
    for argument in arguments:
        if argument.startswith(PYTHON):
            place = argument.removeprefix(PYTHON)
            found += ["reward=python", f"reward.python={place if place.startswith('[') else repr(place)}"]
        elif argument.startswith(tuple(OPEN)):
            # Hydra adds a key that the schema lacks only when told to.
            found.append(f"++{argument}")
        else:
            found.append(argument)
    return found
