"""A hundred requests at once: garments with adapters of their own, of which the UNet sees few calls.

Each request is a call of the pipeline in examples/fashion, with a scheduler, a number of steps and a guidance of its own. Bags
and boots need the LoRA that knows them, at a rank of 8, 4 or 2; the other garments have it, or an adapter of random weights, or
none. `--quick` asks for ten of four steps.
"""

import logging
import sys
import tempfile
from pathlib import Path

import diffusers
import torch
from safetensors.torch import load_file

import fxplug
from fxplug.serving import Engine, Request

QUICK, HERE = "--quick" in sys.argv, Path(__file__).resolve().parent / "fashion"
sys.path.insert(0, str(HERE))
from garments import CLASSES  # noqa: E402
from judge import recognised  # noqa: E402
from traffic import SCHEDULERS, make_pipeline, make_store  # noqa: E402

diffusers.utils.logging.set_verbosity_error()
logging.getLogger("fxplug.serving").setLevel(logging.ERROR)

pipe, folder = make_pipeline(slots=4), Path(tempfile.mkdtemp())
store, random_ones = make_store(folder, pipe, 3, kinds=["lora", "lora", "loha"])
for rank in (8, 4, 2):
    fxplug.resize_adapter(HERE / "lora.safetensors", folder / f"boots{rank}.safetensors", rank=rank)

requests = []
for n in range(10 if QUICK else 100):
    caption, boots = CLASSES[n % 10], f"boots{(8, 4, 2)[n % 3]}"
    adapters = {boots: 1.0} if caption in CLASSES[8:] or n % 4 == 0 else {random_ones[n % 3]: 0.5} if n % 4 == 1 else {}
    call = {"prompt": caption, "num_inference_steps": 4 if QUICK else 6 + n % 7, "output_type": "pt"}
    requests.append(Request(call=call, adapters=adapters, scheduler=SCHEDULERS[n % 4], seed=n))

engine = Engine(pipe, store=store, rows=16)
pictures = {id(ticket.request): ticket.result().images for ticket in engine.generate(requests)}
store.close()

classifier = fxplug.rewrite(HERE / "classifier.yaml").module.eval()
classifier.load_state_dict(load_file(HERE / "classifier.safetensors"), strict=False)
images = torch.cat([pictures[id(request)] for request in requests])
shares = list(recognised(classifier, images, [request.call["prompt"] for request in requests]).values())
print(f"recognised of the old classes {sum(shares[:8]) / 8:.1%}, of the new {sum(shares[8:]) / 2:.1%}")
made = engine.caller.made[id(pipe.unet)]
asked = sum(request.call["num_inference_steps"] for request in requests)
print(f"{len(requests)} requests of {asked} steps in {made} calls of the UNet, with {len(store.list())} adapters in 4 slots")
