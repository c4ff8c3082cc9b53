"""Transformers' common tests for the presets of LOOPTIM_PRESETS; test_common.py runs it beside their files."""

import os
import unittest

from hf_models import tiny_config
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor

from looptim.hf import LoopedConfig, LoopedForCausalLM, LoopedModel


class Tester:
    """What the common tests ask of a model: a config, inputs, and some sizes."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_attention_heads, vocab_size = 32, 4, 64

    def __init__(self, preset):
        self.model_config = tiny_config(preset, max_length=128)
        self.num_hidden_layers = LoopedConfig.from_model_config(self.model_config).num_hidden_layers

    def get_config(self):
        return LoopedConfig.from_model_config(self.model_config, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"input_ids": ids_tensor([self.batch_size, self.seq_length], self.vocab_size)}


# Where that file is not distributed there is a class without tests, which is not claimed.
MIXINS = [GenerationTesterMixin] if hasattr(GenerationTesterMixin, "test_greedy_generate") else []


class Common(ModelTesterMixin, *MIXINS):
    all_model_classes = (LoopedModel, LoopedForCausalLM)
    all_generative_model_classes = (LoopedForCausalLM,)
    preset: str

    def setUp(self):
        self.model_tester = Tester(self.preset)


for name in os.environ["LOOPTIM_PRESETS"].split(","):
    globals()[f"Test_{name}"] = type(f"Test_{name}", (Common, unittest.TestCase), {"preset": name})
