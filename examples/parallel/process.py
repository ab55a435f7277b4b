"""What torchrun starts: one of the processes that draw together, with each model that one process has saved."""

import sys
from pathlib import Path

import torch

import fxplug

HERE, OUT = Path(__file__).resolve().parent, Path(sys.argv[1])
sys.path[:0] = [str(HERE), str(HERE.parent / "fashion")]
from drawing import drawn  # noqa: E402

torch.distributed.init_process_group("gloo")
wanted = torch.load(OUT / "wanted.pt", weights_only=True)
pictures = [drawn(fxplug.load(model), wanted["labels"], wanted["steps"]) for model in sys.argv[2:]]
torch.save(pictures, OUT / f"{torch.distributed.get_rank()}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
