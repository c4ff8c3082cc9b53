"""Corpora, tokenizers, packed batches that are pure functions of (seed, step), and synthetic reasoning tasks."""

from ..config import DataConfig
from .dataset import Batch, Dataset, text_of
from .graded import GRADED, GradedDataset, GradedTask
from .packing import open_data, task_options
from .tasks import TASKS, Example, Task, evaluate_exact_match, find_task
from .tokenizer import EOS, Tokenizer

__all__ = [
    "EOS",
    "GRADED",
    "TASKS",
    "Batch",
    "DataConfig",
    "Dataset",
    "Example",
    "GradedDataset",
    "GradedTask",
    "Task",
    "Tokenizer",
    "evaluate_exact_match",
    "find_task",
    "open_data",
    "task_options",
    "text_of",
]
