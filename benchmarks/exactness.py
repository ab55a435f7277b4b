"""Every model of the zoo, traced and compared bit for bit with eager: `python benchmarks/exactness.py [FILTER] [--json FILE]`.

Prints one line a model; whatever is not exact stands there with its reason: "no graph" is a TraceError, which says what
cannot be one. Below stand those of the exact ones that have modules which are kept whole. Exit code 1 when a graph
is not exact or something else fails.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from pathlib import Path

import fxplug

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from exact import check  # noqa: E402
from record import write  # noqa: E402
from zoo import LEFT_OUT, cases  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default=None, help="part of a name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", default="0/1", help="k/n: every n-th case from the k-th")
    parser.add_argument("--trace-back", action="store_true")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    rows = []
    for case in cases(options.only)[part::parts]:
        start = time.perf_counter()
        try:
            row = check(case)
        except fxplug.TraceError as error:
            row = {"name": case.name, "problems": [str(error)], "refused": [], "no_graph": True}
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", []))
            row = {"name": case.name, "problems": [f"{type(error).__name__}: {error} {notes}"[:600]], "refused": []}
            if options.trace_back:
                traceback.print_exc()
        row["wall"] = round(time.perf_counter() - start, 2)
        rows.append(row)
        verdict = "no graph" if row.get("no_graph") else "NOT EXACT" if row["problems"] else "exact"
        facts = f"{row.get('seconds', 0):6.2f} s {row.get('nodes', 0):6d} nodes {row.get('guards', 0):4d} guards"
        print(f"{row['name']:58s} {verdict:10s} {facts}", flush=True)
        if row.get("leaves"):
            print(f"    kept whole: {', '.join(row['leaves'])}", flush=True)
        for text in row["problems"]:
            print(f"    {text}", flush=True)
        for text in row["refused"]:
            print(f"    refused: {text}", flush=True)
        gc.collect()
    good = sum(not r["problems"] for r in rows)
    without = sum(bool(r.get("no_graph")) for r in rows)
    refused = sum(bool(r["refused"]) for r in rows)
    whole = {r["name"]: r["leaves"] for r in rows if r.get("leaves") and not r["problems"]}
    print(f"\n{good} of {len(rows)} exact, {without} have no graph; {refused} refuse an input by a guard")
    print(f"{len(whole)} of the exact ones have modules that are kept whole{':' * bool(whole)}")
    for name, paths in whole.items():
        print(f"    {name}: {', '.join(paths)}")
    print("left out:")
    for name, reason in sorted(LEFT_OUT.items()):
        print(f"    {name}: {reason}")
    if options.json:
        counts = {"exact": good, "no_graph": without, "of": len(rows), "refusing": refused, "kept_whole": whole}
        write(options.json, {**counts, "rows": rows, "left_out": LEFT_OUT})
    return 0 if good + without == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
