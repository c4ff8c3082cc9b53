"""The floor that everything stands on: numerics, files, the console, and choices among names."""
