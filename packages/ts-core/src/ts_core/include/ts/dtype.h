// Element types that kernels are written for, and the switch from a run-time type to a C++ one.
#pragma once

#include <cstdint>
#include <string>

#include "ts/dlpack.h"

namespace ts {

enum class DType : uint8_t {
  kF32,
  kF64,
  kF16,
  kBF16,
  kI8,
  kU8,
  kI16,
  kI32,
  kI64,
  kBool,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kOther,
};

inline DType dtype_of(dl::DataType t) {
  if (t.lanes != 1) return DType::kOther;
  switch (t.code) {
    case dl::kFloat:
      return t.bits == 32   ? DType::kF32
             : t.bits == 64 ? DType::kF64
             : t.bits == 16 ? DType::kF16
                            : DType::kOther;
    case dl::kBfloat:
      return DType::kBF16;
    case dl::kInt:
      return t.bits == 8    ? DType::kI8
             : t.bits == 16 ? DType::kI16
             : t.bits == 32 ? DType::kI32
             : t.bits == 64 ? DType::kI64
                            : DType::kOther;
    case dl::kUInt:
      return t.bits == 8 ? DType::kU8 : DType::kOther;
    case dl::kBool:
      return DType::kBool;
    case dl::kFloat8E4m3fn:
      return DType::kF8E4M3;
    case dl::kFloat8E5m2:
      return DType::kF8E5M2;
    case dl::kFloat8E8m0fnu:
      return DType::kF8E8M0;
    default:
      return DType::kOther;
  }
}

inline const char* name_of(DType t) {
  switch (t) {
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kI8:
      return "int8";
    case DType::kU8:
      return "uint8";
    case DType::kI16:
      return "int16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kBool:
      return "bool";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
    case DType::kF8E5M2:
      return "float8_e5m2";
    case DType::kF8E8M0:
      return "float8_e8m0fnu";
    default:
      return "an unsupported dtype";
  }
}

inline int64_t size_of(DType t) {
  switch (t) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
    case DType::kI16:
      return 2;
    case DType::kOther:
      return 0;
    default:
      return 1;
  }
}

}  // namespace ts
