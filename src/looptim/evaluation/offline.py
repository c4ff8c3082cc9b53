"""Whether the hub is reachable; if not, libraries are told before they retry for minutes."""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.request

VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
FLAGS = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    "evaluate.config": ("HF_EVALUATE_OFFLINE",),
}
"""The same for libraries that have already read these variables."""


def prepare(patience: float = 4.0) -> bool:
    """Whether the hub is reachable. If not, the Hugging Face libraries use only their caches from now on."""
    asked = any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in VARIABLES)
    if not asked and _answers(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), patience):
        return True
    for name in VARIABLES:
        os.environ[name] = "1"
    for module, names in FLAGS.items():
        for name in names:
            if module in sys.modules:
                setattr(sys.modules[module], name, True)
    return False


def _answers(url: str, patience: float) -> bool:
    """Whether any response comes back, through whatever proxy is set."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=patience).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answered.set()

    # A name lookup has no timeout, but its thread can be abandoned.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return answered.is_set()


def home() -> str:
    """The folder of the caches."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache"))
    return os.path.expanduser(os.environ.get("HF_HOME", os.path.join(cache, "huggingface")))
