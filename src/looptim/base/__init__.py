"""The floor everything stands on: numerics, files, the console and choices among names; each kit once."""
