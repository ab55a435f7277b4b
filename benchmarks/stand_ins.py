"""What the tests of diffusers take from the hub, made here: tokenizers, processors, and configurations of text encoders."""

from __future__ import annotations

from typing import Any

import tiny_pipelines
import transformers

TOKENIZERS = (
    "AutoTokenizer", "CLIPTokenizer", "T5TokenizerFast", "T5Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast",
    "GemmaTokenizer", "GemmaTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "BertTokenizer",
    "GPT2Tokenizer", "XLMRobertaTokenizer", "XLMRobertaTokenizerFast", "RobertaTokenizer", "RobertaTokenizerFast",
    "ByT5Tokenizer",
)  # fmt: skip
VISION = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
          "vision_end_token": "<|vision_end|>"}  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.get('text', '') }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(length: int = 64) -> Any:
    made = tiny_pipelines.tokenizer(length, chat_template=CHAT, bos_token="<eos>", extra_special_tokens=VISION)
    for name, token in VISION.items():
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(token))
    return made


def take_tokens(model: Any) -> None:
    """Let a model of words and pictures know pictures by the numbers that the tokenizer here has for them."""
    made = None
    for module in model.modules() if isinstance(model, transformers.PreTrainedModel) else ():
        for name in VISION:
            if hasattr(getattr(module, "config", None), f"{name}_id"):
                made = made or tokenizer()
                setattr(module.config, f"{name}_id", getattr(made, f"{name}_id"))


def t5_config(umt5: bool = False) -> Any:
    kind = transformers.UMT5Config if umt5 else transformers.T5Config
    return kind(vocab_size=1000, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, pad_token_id=0, eos_token_id=1)


def processor(cls: Any) -> Any:
    """Make a processor of words and pictures, of the classes that it is of."""
    name = cls.__name__.removesuffix("Processor")
    pictures = getattr(transformers, f"{'Qwen2VL' if 'Qwen' in name else name}ImageProcessor")()
    made = tokenizer()
    videos = getattr(transformers, f"{name}VideoProcessor", transformers.Qwen2VLVideoProcessor)()
    parts = {"image_processor": pictures, "tokenizer": made, "video_processor": videos}
    return cls(**parts, chat_template=CHAT)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37,
        max_position_embeddings=512,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def gemma3() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    words = {"vocab_size": 1000, "num_key_value_heads": 1, "head_dim": 8, **sizes}
    config = transformers.Gemma3Config(text_config=words, vision_config={"image_size": 14, "patch_size": 14, **sizes})
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def siglip() -> Any:
    config = transformers.SiglipVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, image_size=30, patch_size=2,
    )  # fmt: skip
    return transformers.SiglipVisionModel(config).eval()


MODELS = {
    "BertModel": bert, "Gemma3ForConditionalGeneration": gemma3, "LlamaForCausalLM": llama, "SiglipVisionModel": siglip,
}  # fmt: skip
IMAGE_PROCESSORS = {"SiglipImageProcessor": {"height": 30, "width": 30}, "DPTImageProcessor": {"height": 32, "width": 32}}


def install() -> None:
    """Put them in the place of `from_pretrained`, in this process."""
    for name in TOKENIZERS:
        if (kind := getattr(transformers, name, None)) is not None:
            length = 77 if name == "CLIPTokenizer" else 64  # prior models of CLIP take no other
            kind.from_pretrained = classmethod(lambda cls, *_, length=length, **__: tokenizer(length))
    for name, make in MODELS.items():
        if (kind := getattr(transformers, name, None)) is not None:
            kind.from_pretrained = classmethod(lambda cls, *_, make=make, **__: make())
    for name, size in IMAGE_PROCESSORS.items():
        if (kind := getattr(transformers, name, None)) is not None:
            kind.from_pretrained = classmethod(lambda cls, *_, size=size, **__: cls(size=size))
    for name, umt5 in (("T5EncoderModel", False), ("UMT5EncoderModel", True)):
        kind = getattr(transformers, name)
        kind.from_pretrained = classmethod(lambda cls, *_, umt5=umt5, **__: cls(t5_config(umt5)).eval())
    for name in ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"):
        getattr(transformers, name).from_pretrained = classmethod(lambda cls, *_, **__: processor(cls))
    kind = transformers.Qwen2_5_VLProcessor
    transformers.AutoProcessor.from_pretrained = classmethod(lambda cls, *_, kind=kind, **__: processor(kind))
    transformers.AutoConfig.from_pretrained = classmethod(lambda cls, *_, **__: t5_config())
