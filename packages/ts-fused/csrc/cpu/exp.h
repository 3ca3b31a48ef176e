// The exponential of sixteen floats, the same bits for every instruction set.
#pragma once

#include "vec.h"

namespace ts::fused::TS_ISA {

// e^x for x <= 0, 0 below -87 (where p would be under 2e-38). x = n ln2 + r; ln2 is split so that
// n * hi is exact. The polynomial is a least-squares fit on |r| <= ln2 / 2; error about 1 ulp.
TS_INLINE Reg exp_of(Reg x) {
  const Reg magic = 12582912.0f - Reg{};  // 1.5 * 2^23: adding it rounds to an integer
  const Reg shifted = x * 1.44269504f + magic;
  const Reg n = shifted - magic;
  const Reg r = (x - n * 0.693115234375f) - n * 3.194618494528623e-05f;
  Reg q = r * 0.0013946504332125187f + 0.008369187824428082f;
  q = q * r + 0.04166626185178757f;
  q = q * r + 0.16666515171527863f;
  q = q * r + 0.5f;
  const Reg e = (q * (r * r) + r) + 1.0f;
  const UintReg power = ((UintReg)shifted - 0x4B400000u + 127u) << 23;  // bits of 2^n
  return select(x < -87.0f, Reg{}, e * (Reg)power);
}

TS_INLINE f32x16 exp16(f32x16 x) {
  for (int k = 0; k < kParts; ++k) x.part[k] = exp_of(x.part[k]);
  return x;
}

}  // namespace ts::fused::TS_ISA
