"""From a configuration to an adapter file for PEFT, a checkpoint for timm and a program, without a line of Python."""

import subprocess
import sys
from pathlib import Path

CONFIG = """\
model: {timm: vit_tiny_patch16_224, options: {depth: 4, img_size: 64}}
inputs: {x: [2, 3, 64, 64]}
passes:
  - lora: {at: qkv, rank: 4}
"""


def with_fxplug(out: Path) -> str:
    return f"""\
fxplug sites {out}/model.yaml
fxplug rewrite {out}/model.yaml --out {out}/saved --no-verify
fxplug diff {out}/saved
fxplug export {out}/saved --to peft --out {out}/adapter
fxplug adapters inspect {out}/adapter {out}/model.yaml
fxplug export {out}/saved --to timm --out {out}/model.safetensors
fxplug export {out}/saved --to pt2 --out {out}/model.pt2
"""


def check(out: Path) -> None:
    out.mkdir(parents=True)
    (out / "model.yaml").write_text(CONFIG)
    for line in with_fxplug(out).splitlines():
        done = subprocess.run([sys.executable, "-m", *line.split()], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        print(f"$ {line}\n{done.stdout.splitlines()[0]}")


if __name__ == "__main__":
    check(Path(sys.argv[1] if sys.argv[1:] else "out/command_line"))
