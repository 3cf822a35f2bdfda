"""Fixtures of the whole suite: random targets of the Qwen3 architecture, small enough for a CPU."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflow_lightning.drafter import Drafter, DrafterConfig, DrafterDims
from dflow_lightning.relay import Relay
from dflow_lightning.target import FrozenTarget

ROOT = Path(__file__).resolve().parents[1]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def random_target(folder: Path, *, seed: int = 0, num_layers: int = 4, scale: float = 8.0) -> Path:
    """Save a random target with a byte-level tokenizer of 261 tokens in a vocabulary of 320.

    `scale` sharpens the logits, so that greedy ties are rare and sampling is not uniform.
    """
    torch.manual_seed(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = token_decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL,
    )
    tokenizer.chat_template = (ROOT / "data/build/chat_template.jinja").read_text()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory) -> Path:
    """The folder of a random target of four layers."""
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir) -> FrozenTarget:
    """That target, loaded."""
    return FrozenTarget.load(str(tiny_target_dir))


@pytest.fixture
def tiny_drafter(tiny_target) -> Drafter:
    """A random drafter of two layers and blocks of four, with weights that make drafts vary."""
    torch.manual_seed(1)
    config = DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1, 2])
    drafter = Drafter(DrafterDims.resolve(config, tiny_target)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return drafter


@pytest.fixture
def tiny_relay(tiny_drafter) -> Relay:
    """A relay whose last layer is not zero, so that it changes drafts."""
    torch.manual_seed(2)
    relay = Relay(tiny_drafter.dims.hidden_size, 96)
    with torch.no_grad():
        for parameter in relay.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return relay.eval()


@pytest.fixture(scope="session")
def half_trained(tiny_target_dir):
    """A DFlow module that drafts well early in one text and badly later, with the text it saw."""
    from training import make_module, one_text, train

    module = make_module(tiny_target_dir)
    batch = one_text(module, [3, 5, 7, 9], 60)
    train(module, batch, 40)
    return module.eval(), batch
