"""A packed weight for tests: int8 codes and a scale per row, decoded by plain PyTorch."""

import torch


class RowInt8(torch.Tensor):
    """Presents a matrix of some dtype; holds bytes."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        self.codes, self.scale = codes, scale
        self.decoded = 0
        return self

    @staticmethod
    def of(weight):
        wide = weight.detach().float()
        scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127.0
        return RowInt8((wide / scale).round().to(torch.int8), scale, weight.dtype)

    @property
    def packed(self):
        return {"codes": self.codes, "scale": self.scale}

    def dequantize(self, dtype=None, *, out=None):
        made = (self.codes.float() * self.scale).to(self.dtype if dtype is None else dtype)
        return made if out is None else out.copy_(made)

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return RowInt8(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return RowInt8(args[0].codes, args[0].scale, args[0].dtype)
        unpack = lambda t: t.dequantize() if isinstance(t, RowInt8) else t  # noqa: E731
        return func(*torch.utils._pytree.tree_map(unpack, args), **(kwargs or {}))
