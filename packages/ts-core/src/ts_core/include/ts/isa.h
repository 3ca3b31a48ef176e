// Which instruction set the CPU kernels of this process use.
// Sources listed under ISA_SOURCES in CMake are compiled once per set with TS_ISA defined to
// `portable`, `avx2` or `avx512`; inside them, wrap everything in `namespace TS_ISA { ... }`,
// include only C headers and ts/numeric.h, and pick a variant outside with TS_ISA_CALL.
#pragma once

#include <stdexcept>
#include <string>

namespace ts {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

inline Isa best_isa() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const Isa best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      return Isa::kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
      return Isa::kAvx2;
    return Isa::kPortable;
  }();
  return best;
#else
  return Isa::kPortable;
#endif
}

inline Isa& isa_state() {
  static Isa chosen = best_isa();
  return chosen;
}

inline Isa isa() { return isa_state(); }

inline const char* name_of(Isa value) {
  return value == Isa::kAvx512 ? "avx512" : value == Isa::kAvx2 ? "avx2" : "portable";
}

// For tests: every variant must give the same results. Refuses a set this CPU lacks.
inline void set_isa(const std::string& name) {
  for (Isa value : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (name == name_of(value)) {
      if (static_cast<int>(value) > static_cast<int>(best_isa()))
        throw std::invalid_argument("[set_isa] name: expected a set this CPU has (best is " +
                                    std::string(name_of(best_isa())) + "), given " + name);
      isa_state() = value;
      return;
    }
  }
  throw std::invalid_argument("[set_isa] name: expected portable, avx2 or avx512, given " + name);
}

}  // namespace ts

// Calls NS::<variant>::function(...) for the chosen set.
#if defined(__x86_64__)
#define TS_ISA_CALL(ns, function, ...)                                   \
  (::ts::isa() == ::ts::Isa::kAvx512 ? ns::avx512::function(__VA_ARGS__) \
   : ::ts::isa() == ::ts::Isa::kAvx2 ? ns::avx2::function(__VA_ARGS__)   \
                                     : ns::portable::function(__VA_ARGS__))
#define TS_DECLARE_ISA(declaration) \
  namespace portable {              \
  declaration;                      \
  }                                 \
  namespace avx2 {                  \
  declaration;                      \
  }                                 \
  namespace avx512 {                \
  declaration;                      \
  }
#else
#define TS_ISA_CALL(ns, function, ...) (ns::portable::function(__VA_ARGS__))
#define TS_DECLARE_ISA(declaration) \
  namespace portable {              \
  declaration;                      \
  }
#endif
