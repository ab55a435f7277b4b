"""The documentation answers questions in users' words: the section with the answer is among the first three that BM25 finds."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

import pytest
from doc_blocks import PAGES, ROOT

# what a user types, and the sections that answer it: page#heading
QUESTIONS = {
    "undo a rewrite": ["faq#Undo a rewrite"],
    "unload a lora": ["faq#Unload, disable or remove a LoRA"],
    "remove LoRA from the model": ["faq#Unload, disable or remove a LoRA"],
    "OOM cuda out of memory": ["troubleshooting#Out of memory (OOM)"],
    "how much VRAM do I need 8 GB 12 GB 24 GB": ["faq#What fits into 8, 12 or 24 GB of VRAM"],
    "quantization int8 4bit": ["faq#Quantization: QLoRA, int8, fp8", "guides/exports#Quantised bases (quantization)"],
    "QLoRA": ["faq#Quantization: QLoRA, int8, fp8"],
    "fp8 model": ["faq#Quantization: QLoRA, int8, fp8"],
    "resume training after a crash": ["guides/training#Resume training after a crash"],
    "gradient checkpointing": ["faq#Gradient checkpointing"],
    "merge lora into weights": ["faq#Merge, fuse or bake a LoRA into the weights"],
    "bake lora into checkpoint": ["faq#Merge, fuse or bake a LoRA into the weights"],
    "convert lora to comfyui": ["guides/adapters#ComfyUI", "faq#Convert a LoRA between PEFT, diffusers, kohya and ComfyUI"],
    "convert kohya to diffusers": ["faq#Convert a LoRA between PEFT, diffusers, kohya and ComfyUI"],
    "trigger word": ["faq#Trigger word and regularization images"],
    "network_dim network_alpha": ["faq#network_dim, network_alpha and other names of kohya"],
    "modules_to_save": ["faq#modules_to_save: train the head too"],
    "print_trainable_parameters": ["faq#print_trainable_parameters, requires_grad: freeze the base model"],
    "unmatched keys": ["troubleshooting#Unmatched keys, LoRA keys not loaded"],
    "lora keys not loaded": ["troubleshooting#Unmatched keys, LoRA keys not loaded", "guides/adapters#ComfyUI"],
    "multi-GPU training": ["guides/training#Train on several devices (multi-GPU)"],
    "pytorch Lightning": ["guides/other-trainers#Lightning"],
    "accelerate": ["guides/other-trainers#accelerate"],
    "transformers Trainer": ["guides/other-trainers#transformers.Trainer"],
    "diffusers training script train_text_to_image_lora": ["guides/other-trainers#diffusers' training scripts"],
    "license": ["faq#License"],
    "black image": ["troubleshooting#Black or noisy pictures"],
    "loss is nan": ["troubleshooting#NaN loss"],
    "loss does not go down": ["troubleshooting#The loss does not fall"],
    "adapter has no effect": ["troubleshooting#An adapter has no effect"],
    "nothing matched target_modules": ["troubleshooting#Nothing matched"],
    "torch.compile recompiles": ["troubleshooting#It recompiles"],
    "first call is slow": ["troubleshooting#The first call is slow"],
    "GuardError other resolution": ["troubleshooting#GuardError: another call than the traced one"],
    "pipeline refuses the traced unet": ["troubleshooting#The pipeline refuses the model"],
    "which method lora dora loha lokr": ["guides/methods#Which method when: LoRA, DoRA, LoHa, LoKr and others"],
    "install extras": ["install#Install by extras"],
    "captions folder format dataset": ["faq#How a dataset folder looks: pictures and captions"],
    "sample prompts preview images during training": ["faq#Sample pictures during training"],
    "train several loras at once": ["guides/training#Train many adapters at once"],
    "ship model without diffusers": ["guides/exports#Ship a rewritten model to a machine without diffusers"],
    "export onnx": ["guides/exports#Export to ONNX"],
    "push to huggingface hub": ["guides/hub#The Hugging Face Hub"],
    "resume with another learning rate": ["faq#Resume with another learning rate, or continue from an adapter"],
    "combine two loras": ["guides/adapters#Load, use and combine adapters"],
    "different lora for each image in a batch": ["guides/adapters#A different LoRA for each image in a batch"],
    "freeze the base model requires_grad": ["faq#print_trainable_parameters, requires_grad: freeze the base model"],
    "early stopping patience": ["guides/training#Keys", "reference/keys#train.test"],
    "extract activations of a layer": ["guides/tracing#Extract activations of layers (features)"],
    "speed up inference": ["guides/exports#Speed up inference and training: merge, fuse, compile"],
    "cache text embeddings": ["guides/training#Cache latents and text embeddings"],
    "amd rocm or apple mps": ["faq#CPU, CUDA, AMD ROCm, Apple MPS, Windows"],
    "regularization images prior preservation": ["faq#Trigger word and regularization images"],
    "load safetensors lora into sdxl pipeline": ["guides/pipelines#Load a safetensors LoRA into a pipeline of SDXL or others"],
    "lora strength per block": ["guides/strengths#Strength per block of a LoRA"],
    "change lora weight during sampling": ["guides/strengths#Change the weight of a LoRA during sampling"],
    "extract lora from two checkpoints": ["guides/adapters#Extract an adapter from a checkpoint"],
    "fine-tune text encoder": ["guides/training#Train the text encoder too"],
    "8bit adam optimizer": ["guides/training#Choose an optimizer"],
    "change number of classes": ["guides/passes#Change the number of classes"],
    "deepcache teacache": ["guides/step_caches#Step caches: DeepCache, TeaCache, first-block cache"],
    "tensor parallel": ["guides/parallel#Tensor parallel: split heads and features"],
    "openai api server": ["guides/serve#Serve over HTTP"],
    "train sdxl lora": ["families/sdxl#Stable Diffusion XL (SDXL)", "families/sdxl#Train sdxl: LoRA"],
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A heading of a page, or a name of the API reference, and the text below it up to the next one."""

    place: str
    heading: str
    words: Counter


def split_words(text):
    return re.findall(r"\w+", text.lower())


def read_sections():
    """Yield every section of docs/ and README; comment lines of code are no headings."""
    for page in PAGES:
        name = str(page.relative_to(ROOT)).removeprefix("docs/").removesuffix(".md")
        text = re.sub(r"^---\n.*?^---\n|<!--.*?-->", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        heading, lines, fence = name, [], False
        for line in [*text.splitlines(), "# "]:
            fence ^= line.lstrip().startswith("```")
            if fence or not re.match(r"#{1,6} |::: ", line):
                lines.append(line)
                continue
            if "".join(lines).strip():
                words = Counter(3 * split_words(heading) + split_words("\n".join(lines)))
                yield Section(f"{name}#{heading}", heading, words)
            heading, lines = re.sub(r"^(#+|::: fxplug\.)|`", "", line).strip(), []


SECTIONS = list(read_sections())
LENGTHS = [section.words.total() for section in SECTIONS]
MEAN = sum(LENGTHS) / len(LENGTHS)


def rank(question, k=1.5, b=0.75):
    """Rank the sections by BM25 (Robertson and Zaragoza 2009)."""
    scores = [0.0] * len(SECTIONS)
    for word in split_words(question):
        having = sum(word in section.words for section in SECTIONS)
        rare = math.log(1 + (len(SECTIONS) - having + 0.5) / (having + 0.5))
        for n, section in enumerate(SECTIONS):
            count = section.words[word]
            scores[n] += rare * count * (k + 1) / (count + k * (1 - b + b * LENGTHS[n] / MEAN))
    order = sorted(range(len(SECTIONS)), key=lambda n: -scores[n])
    return [SECTIONS[n].place for n in order if scores[n] > 0]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_section(question):
    places, first = {section.place for section in SECTIONS}, rank(question)[:3]
    assert set(QUESTIONS[question]) <= places, sorted(set(QUESTIONS[question]) - places)
    assert set(first) & set(QUESTIONS[question]), first


def test_there_are_forty_questions_and_a_word_that_no_page_has_finds_nothing():
    assert len(QUESTIONS) >= 40
    assert rank("xyzzyqux") == []


def test_no_two_pages_have_one_title():
    titles = Counter(re.search(r"^# (.+)$", page.read_text("utf-8"), re.MULTILINE)[1] for page in PAGES[1:])
    assert [title for title, count in titles.items() if count > 1] == []
