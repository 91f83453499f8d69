// Kernels: the loops that are compiled once for each instruction set, as a table of functions.
//
// [Note: no shared inline functions] A file under kernels/ may include only headers whose functions are static or built in.
// An inline function of the standard library that is compiled with AVX-512 in one file and without in another is one symbol
// for the linker: it may keep the one that this processor cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/step.h"

namespace ds {

// One block on its way to integers: code = round((value - zero) * inverse), within [low, high].
struct QuantRun {
  const void* values;
  Dtype dtype;
  const float* noise;  // in [0, 1), one for each value: round up when it is below the fraction; null: to the nearest, ties to even
  uint8_t* codes;      // one byte each, or (4 bits) two in a byte, the first in the low half
  int32_t bits;
  float zero, inverse, low, high;
};

// One block on its way back: value = code * scale + zero.
struct DequantRun {
  const uint8_t* codes;
  int32_t bits;
  bool is_signed;  // codes are two's complement, and zero is not added
  float scale, zero;
  void* values;
  Dtype dtype;
};

struct Kernels {
  // nbytes from one place to another, by stores that go around the cache where there are such.
  void (*copy)(char* to, const char* from, size_t nbytes);
  // One range of one tensor of a host step; `next`, or null, is the one that is likely to follow.
  void (*step)(Rule rule, const StepNumbers& numbers, const StepRange& range, const StepRange* next);
  // Sum of squares of at most kSpan elements.
  double (*squares)(const char* values, Dtype dtype, int64_t numel);

  // Keys of the least and the greatest of values [at, at + n): key = bits, with all but the sign turned over when negative.
  void (*span_of)(const void* values, Dtype dtype, int64_t at, int64_t n, int32_t* least, int32_t* most);

  // Values [at, at + n) of a tensor; `at` is even.
  void (*quantize)(const QuantRun& run, int64_t at, int64_t n);
  void (*dequantize)(const DequantRun& run, int64_t at, int64_t n);
};

// Those of the instruction set in use.
const Kernels& kernels();

namespace generic {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

}  // namespace ds
