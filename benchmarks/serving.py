"""By how much a served module is another than the one that was trained: its outputs, and its log-probabilities as a policy.

python benchmarks/serving.py [--only KIND ...] [--passes PASS ...] [--steps N] [--json FILE] [--write]

A traced model with a pass is trained for a few steps of AdamW in one form (a row), saved and loaded. In each form in which it
is then served (a column) its result in evaluation is compared with that of the module that was trained, in the form in which
it was trained: the largest difference over the largest value, and below it the largest difference of a log-probability.
"0" says that all bits are the same. Reinforcement learning takes the quotient of two such probabilities for 1.

A classifier's log-probabilities are those of its classes. A denoiser's are those of DDIM's next latents with eta 1, the mean
over a sample's values as in DDPO (Black et al. 2023, arXiv 2305.13301), at the step 25 of 50.

as rewritten   as `apply` leaves it, and as `load` gives it      merged     the update added to the weight
fused          lower(fuse="fused")                               compiled   torch.compile of what is as rewritten
parallel       two pretended processes, `ulysses=2`              bfloat16   traced in it, with the weights that were saved
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import models
import torch
from record import write
from timing import difference, error_of
from torch import Tensor, nn

import fxplug
from fxplug.parallel.runtime.pretended import run_simulated

PAGE = Path(__file__).parent.parent / "docs/measured.md"
BEGIN, END = "<!-- serving -->", "<!-- /serving -->"
PASSES = {"lora": {"rank": 8}, "dora": {"rank": 8}, "loha": {"rank": 4}}
STEP = 25  # of 50, where a denoiser's policy is looked at
Run = Callable[..., Any]


class Saved(NamedTuple):
    """A module as `load` gives it, example inputs, and the subject and pass that it was made of."""

    module: Any
    inputs: dict[str, Any]
    subject: models.Subject
    name: str


def run_parallel(saved: Saved) -> Run:
    plan = fxplug.parallel_plan(saved.module, (), saved.inputs, ulysses=2, check=False)
    made = fxplug.parallelize(saved.module, plan)
    return lambda **inputs: run_simulated(plan.ways, lambda rank: made(**inputs))[0]


def run_in_bfloat16(saved: Saved) -> Run:
    model = copy.deepcopy(saved.subject.module).to(torch.bfloat16)
    inputs = {
        k: v.to(torch.bfloat16) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in saved.inputs.items()
    }
    made = rewritten(model, inputs, saved.subject.layers, saved.name).to(torch.bfloat16)
    made.load_state_dict(saved.module.state_dict())
    return lambda **_: made(**inputs)


def rewritten(model: nn.Module, inputs: dict[str, Any], layers: list[str], name: str) -> Any:
    return fxplug.apply(fxplug.trace(model, kwargs=inputs), fxplug.load_pass(name, at=layers, **PASSES[name]))


TRAINED: dict[str, Callable[[Any], Run]] = {
    "as rewritten": lambda module: module,
    "fused": lambda module: fxplug.lower(module, fuse="fused"),
    "compiled": lambda module: torch.compile(module, fullgraph=True),
}
SERVED: dict[str, Callable[[Saved], Run]] = {
    "as rewritten": lambda saved: saved.module,
    "fused": lambda saved: fxplug.lower(saved.module, fuse="fused"),
    "merged": lambda saved: fxplug.lower(saved.module, merge="fold", fuse=None),
    "compiled": lambda saved: torch.compile(saved.module, fullgraph=True),
    "parallel": run_parallel,
    "bfloat16": run_in_bfloat16,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=[*models.SMALL, "small"], nargs="+", default=["vit", "small"])
    parser.add_argument("--passes", choices=PASSES, nargs="+", default=list(PASSES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/measured.md")
    options = parser.parse_args()
    rows = {}
    for kind in options.only:
        subject = models.subject(kind, 2)
        for name in options.passes:
            for form in TRAINED:
                rows[f"{kind}, {name}, {form}"] = found = measure(subject, name, form, options.steps)
                print(f"{kind}, {name}, trained {form}:", {served: cell(each) for served, each in found.items()}, flush=True)
    if options.json:
        write(options.json, {"rows": rows})
    if options.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}", "utf-8")


def measure(subject: models.Subject, name: str, form: str, steps: int) -> dict[str, Any]:
    """What a pass that was trained in a form comes to in each form of serving: two differences, or an error's text."""
    torch.manual_seed(0)
    inputs = subject.inputs
    if "timestep" in inputs:
        inputs = {**inputs, "timestep": torch.full_like(inputs["timestep"], int(scheduler().timesteps[STEP]))}
    new = rewritten(subject.module, inputs, subject.layers, name)
    run = TRAINED[form](new)
    train(new, run, inputs, steps)
    with torch.no_grad():
        wanted = models.output(run(**inputs))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        fxplug.save(new, Path(folder, "saved"))
        for served, make in SERVED.items():
            torch._dynamo.reset()
            try:
                with torch.no_grad():
                    call = make(Saved(fxplug.load(Path(folder, "saved")).eval(), inputs, subject, name))
                    out = models.output(call(**inputs))
                found[served] = (difference(out, wanted), float(log_probability(out, wanted, inputs).abs().max()))
            except Exception as error:  # a form that is not for this model
                found[served] = error_of(error)
    return found


def train(new: Any, run: Run, inputs: dict[str, Any], steps: int) -> None:
    """A few steps towards random targets, with all that the pass added."""
    parameters = [p for key, p in new.named_parameters() if key.partition(".")[0] in {e["name"] for e in new.meta["passes"]}]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    target = torch.randn_like(models.output(new(**inputs)).detach())
    for _ in range(steps):
        loss = (models.output(run(**inputs)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def scheduler() -> Any:
    """DDIM's, with 50 steps."""
    from diffusers import DDIMScheduler

    made = DDIMScheduler()
    made.set_timesteps(50)
    return made


def log_probability(out: Tensor, wanted: Tensor, inputs: dict[str, Any]) -> Tensor:
    """What the served policy gives an action of the trained one, less what that gives itself; for each class, or sample."""
    if "timestep" not in inputs:
        return out.double().log_softmax(-1) - wanted.double().log_softmax(-1)
    latents = next(inputs[name] for name in ("sample", "hidden_states") if name in inputs).double()
    ddim, time = scheduler(), int(scheduler().timesteps[STEP])
    sigma = float(ddim._get_variance(time, time - 1000 // 50)) ** 0.5

    def mean(noise: Tensor) -> Tensor:
        noise = noise[:, : latents.shape[1]].double()  # PixArt gives a variance beside it
        return ddim.step(noise, time, latents, eta=1.0, variance_noise=torch.zeros_like(latents)).prev_sample

    drawn = torch.randn(latents.shape, dtype=latents.dtype, generator=torch.Generator().manual_seed(0))
    apart = (mean(wanted) - mean(out)) / sigma
    return (drawn.square() - (drawn + apart).square()).div(2).flatten(1).mean(1)


def cell(found: Any) -> str:
    """Two differences in few characters."""
    if isinstance(found, str):
        return found
    return "0" if found == (0.0, 0.0) else f"{found[0]:.0e}; {found[1]:.0e}"


def table(rows: dict[str, Any]) -> str:
    """The rows as the page has them; those that were trained compiled are in the JSON."""
    rows = {name: found for name, found in rows.items() if not name.endswith(", compiled")}
    lines = [f"| model, pass, trained | {' | '.join(SERVED)} |", f"|---|{'---|' * len(SERVED)}"]
    lines += [f"| {name} | {' | '.join(cell(found[served]) for served in SERVED)} |" for name, found in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
