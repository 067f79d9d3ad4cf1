"""Sampling completions. Each engine is one function `generate(...) -> list[Rollout]`."""
