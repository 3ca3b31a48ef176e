"""Quantize a safetensors file, save it, load it back, and report error and size.

    python quantize_file.py model.safetensors model-nf4.safetensors --codec nf4

Floating tensors of two or more dimensions are packed; the others are copied.
"""

import argparse
import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ts_quant import from_safetensors_dict, quantize, to_safetensors_dict
from ts_quant.codecs import encoding_names


def pack(options: argparse.Namespace) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """Read the file; return tensors and metadata of the packed one, and which of the names are packed."""
    tensors: dict[str, torch.Tensor] = {}
    names = []
    with safe_open(options.source, "pt") as file:
        metadata = dict(file.metadata() or {})
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if tensor.dim() < 2 or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                tensors[name] = tensor
                continue
            how = {"block_size": options.block_size, "double_quant": options.double_quant}
            parts, description = to_safetensors_dict(name, quantize(tensor, options.codec, name=name, **how))
            tensors |= parts
            metadata |= description
            names.append(name)
    return tensors, metadata, names


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--codec", default="nf4", choices=[*encoding_names(), "fp8"])
    parser.add_argument("--block-size", type=int, default=64, help="values per scale (nf4, int8)")
    parser.add_argument("--double-quant", action="store_true", help="quantize the scales too (nf4, int8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    tensors, metadata, names = pack(options)
    save_file(tensors, options.target, metadata)
    del tensors, metadata

    lines, before, after, wrong, whole = [], 0, 0, 0.0, 0.0
    with safe_open(options.source, "pt") as source, safe_open(options.target, "pt") as target:
        stored = {name: target.get_tensor(name) for name in target.keys()}  # noqa: SIM118
        after = sum(tensor.nbytes for tensor in stored.values())
        for name in source.keys():  # noqa: SIM118
            tensor = source.get_tensor(name)
            before += tensor.nbytes
            if name in names:
                loaded = from_safetensors_dict(name, stored, target.metadata())
                lines.append(f"{name}: {loaded}")
                wrong += float((loaded.dequantize(torch.float32) - tensor.float()).square().sum())
                whole += float(tensor.float().square().sum())
    error = (wrong / whole) ** 0.5 if whole else 0.0
    report = {"tensors": len(names), "bytes_before": before, "bytes_after": after, "relative_error": error}
    if options.json:
        print(json.dumps(report))
        return
    print("\n".join(lines))
    print(
        f"{len(names)} tensors packed, {before:,} -> {after:,} bytes, relative error {error:.4f}: "
        f"{options.target}"
    )


if __name__ == "__main__":
    main()
