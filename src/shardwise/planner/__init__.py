"""Decide: what every split of every layer costs, the cheapest plan, and a simulated step."""
