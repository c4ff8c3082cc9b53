"""Matched-compute comparisons over transitions and seeds: one TOML file, one folder of results."""
