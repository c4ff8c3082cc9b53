"""`python -m looptim`, which is what torchrun starts."""

from .cli import main

main()
