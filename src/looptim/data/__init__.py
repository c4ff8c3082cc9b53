"""Corpora, tokenizers, packed batches that are pure functions of (seed, step), and synthetic reasoning tasks."""

from ..config import DataConfig
from .dataset import Batch, Dataset, text_of
from .packing import open_data
from .tasks import TASKS, Example, Task, evaluate_exact_match, find_task
from .tokenizer import EOS, Tokenizer

__all__ = [
    "EOS",
    "TASKS",
    "Batch",
    "DataConfig",
    "Dataset",
    "Example",
    "Task",
    "Tokenizer",
    "evaluate_exact_match",
    "find_task",
    "open_data",
    "text_of",
]
