"""A load on an engine: garments asked for at random times, each with adapters, a scheduler, steps and guidance of its own.

Requests arrive as a Poisson process, and name adapters by Zipf's law: the second most wanted half as often as the first. Each
is a call of the pipeline in examples/fashion; the engine makes their calls of the UNet jointly, each sample with its adapters.
Time is the processor's, which other programs on the machine do not take; where nothing is to do it goes on to the next request.
`--quick` asks for few pictures of few steps.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import diffusers

from fxplug.serving import Engine

sys.path.insert(0, str(Path(__file__).resolve().parent / "fashion"))
from traffic import STEPS, draw_requests, make_pipeline, make_store, run_load  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, value in (("requests", 100), ("rate", 4.0), ("adapters", 120), ("slots", 16), ("rows", 16), ("seed", 0)):
    parser.add_argument(f"--{name}", type=type(value), default=value)
parser.add_argument("--quick", action="store_true")
given = parser.parse_args()
diffusers.utils.logging.set_verbosity_error()
logging.getLogger("fxplug.serving").setLevel(logging.ERROR)
count, kept, steps = (8, 6, STEPS[:1]) if given.quick else (given.requests, given.adapters, STEPS)
pipe = make_pipeline(given.slots)
with tempfile.TemporaryDirectory() as folder:
    store, names = make_store(Path(folder), pipe, kept)
    with store:
        engine = Engine(pipe, store=store, rows=given.rows)
        print(run_load(engine, draw_requests(count, given.rate, names, given.seed, steps)))
