"""Quantize a safetensors file, report error and size, save, and load it back.

    python quantize_file.py model.safetensors model-nf4.safetensors --codec nf4

Floating tensors of two or more dimensions are packed; the others are copied.
"""

import argparse
import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ts_quant import from_safetensors_dict, quantize, to_safetensors_dict


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--codec", default="nf4", choices=["nf4", "int8"])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    packed_names, before, squared_error, squared = [], 0, 0.0, 0.0
    with safe_open(options.source, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            before += tensor.nbytes
            if tensor.dim() < 2 or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                tensors[name] = tensor
                continue
            packed = quantize(tensor, options.codec, block_size=options.block_size, name=name)
            error = packed.dequantize(torch.float32) - tensor.float()
            squared_error += float(error.square().sum())
            squared += float(tensor.float().square().sum())
            parts, description = to_safetensors_dict(name, packed)
            tensors |= parts
            metadata |= description
            packed_names.append(name)
    save_file(tensors, options.target, metadata)

    with safe_open(options.target, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        loaded = [from_safetensors_dict(name, stored, file.metadata()) for name in packed_names]
    report = {
        "tensors": len(loaded),
        "bytes_before": before,
        "bytes_after": sum(tensor.nbytes for tensor in stored.values()),
        "relative_error": (squared_error / squared) ** 0.5 if squared else 0.0,
    }
    if options.json:
        print(json.dumps(report))
        return
    for name, qt in zip(packed_names, loaded, strict=True):
        print(f"{name}: {qt}")
    print(
        f"{report['tensors']} tensors packed, {report['bytes_before']:,} -> {report['bytes_after']:,} bytes, "
        f"relative error {report['relative_error']:.4f}"
    )


if __name__ == "__main__":
    main()
