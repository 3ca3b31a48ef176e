// Argument checks for bindings. Messages read "[op] argument: expected ..., given ...".
// std::invalid_argument becomes ValueError in Python, ts::type_error TypeError, std::runtime_error
// RuntimeError; the Python layer turns them into the library's own classes where it matters.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ts {

struct type_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail_value(const char* op, const std::string& argument,
                                    const std::string& expected, const std::string& given) {
  throw std::invalid_argument("[" + std::string(op) + "] " + argument + ": expected " + expected +
                              ", given " + given);
}

[[noreturn]] inline void fail_type(const char* op, const std::string& argument,
                                   const std::string& expected, const std::string& given) {
  throw type_error("[" + std::string(op) + "] " + argument + ": expected " + expected + ", given " +
                   given);
}

inline void check(bool ok, const char* op, const char* argument, const std::string& expected,
                  const std::string& given) {
  if (!ok) fail_value(op, argument, expected, given);
}

}  // namespace ts
