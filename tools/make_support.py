"""Write docs/support.md: which architectures train wrapped as the plain model does, from runs made now.

Usage: python tools/make_support.py (some minutes on two cores). The runs are those of
packages/trainstream/tests/test_architectures.py, all of them: five steps of a tiny random model with every
layer type of its class, compared with the plain model by losses, by every gradient and by every weight.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
sys.path.insert(0, str(ROOT / "packages" / "trainstream" / "tests"))

HEAD = """# Supported architectures

Made by `python tools/make_support.py` with transformers {transformers}, PEFT {peft} and PyTorch {torch},
on a CPU.

"yes": five steps of a tiny random model in float32, with every layer type of its class, agree with the plain
model, with weights resident and paged (one block recomputed, the activations of others offloaded): losses
within 1e-5, every gradient of every step and every trained weight, by name, within 1e-4 of its norm. Under
nf4 the plain model has the decoded values; "full, nf4" trains whole layers between packed ones. LoRA is on
all linear layers. Packing: documents in one row do not reach each other, by the model's own masks or with
those of `isolate_documents`, which the Trainer and `trainstream finetune` call; other models are refused.

| architecture | full | LoRA | full, nf4 | LoRA, nf4 | matrices packed | documents packed in rows |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    """Run every case and write the page; exit status 1 says that one failed."""
    import torch
    from architectures import ARCHITECTURES, PLACES, compare, isolated

    from ts_core.errors import OptionError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[str] = []
    failed = 0
    for name in ARCHITECTURES:
        cells = []
        packed = 0
        for codec, training in itertools.product(("none", "nf4"), ("full", "LoRA")):
            problems = []
            for place in PLACES:
                try:
                    packed = max(packed, compare(name, training, codec, place))
                except Exception as error:
                    problems.append(f"{place}: {str(error).splitlines()[0]}")
            failed += len(problems)
            cells.append("; ".join(problems) or "yes")
        try:
            rows_packed = "yes" if isolated(name) else "yes, with `isolate_documents`"
        except OptionError:
            rows_packed = "refused"
        rows.append(f"| {name} | {' | '.join(cells)} | {packed} | {rows_packed} |")
        print(rows[-1], flush=True)
    versions = {package: version(package).split("+")[0] for package in ("transformers", "peft", "torch")}
    PAGE.write_text(HEAD.format(**versions) + "\n".join(rows) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
