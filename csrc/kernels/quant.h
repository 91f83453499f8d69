// Quantisation of a run of values to integers, and back: the loops of quant/quant.cpp, which does the arithmetic of a block.
//
// Values are fp32, bf16 or fp16 in memory and fp32 in between. Loops are plain, over tiles that stay in the first cache, and
// written so that the compiler turns them into vectors of any width: no branch, no call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/isa.h"
#include "kernels/convert.h"

namespace ds::DS_ISA::quant {
namespace {

constexpr int64_t kTile = 1024;

// Floats compare as their keys do: -NaN < -inf < numbers < inf < NaN.
inline int32_t key_of(float value) {
  const int32_t bits = static_cast<int32_t>(bits_of(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Values [at, at + n) as floats, in `room` unless they are floats already.
inline const float* loaded(const void* values, Dtype dtype, int64_t at, int64_t n, float* room) {
  char* const place = static_cast<char*>(const_cast<void*>(values)) + at * static_cast<int64_t>(nbytes_of(dtype));
  return as_floats(place, dtype, room, static_cast<size_t>(n));  // which does not write to it
}

void span_of(const void* values, Dtype dtype, int64_t at, int64_t n, int32_t* least, int32_t* most) {
  alignas(64) float room[kTile];
  int32_t low = INT32_MAX;
  int32_t high = INT32_MIN;
  for (int64_t start = 0; start < n; start += kTile) {
    const int64_t count = n - start < kTile ? n - start : kTile;
    const float* const tile = loaded(values, dtype, at + start, count, room);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t key = key_of(tile[i]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
  }
  *least = low;
  *most = high;
}

constexpr float kRounder = 0x1.8p23f;  // adding it and taking it away rounds a small number to an integer, ties to even

inline float nearest(float value) { return (value + kRounder) - kRounder; }

inline float clamped(float value, float low, float high) {
  const float raised = value < low ? low : value;
  return raised > high ? high : raised;
}

void quantize(const QuantRun& run, int64_t at, int64_t n) {
  alignas(64) float room[kTile];
  alignas(64) float tile[kTile];
  alignas(64) int8_t codes[kTile];
  for (int64_t start = 0; start < n; start += kTile) {
    const int64_t count = n - start < kTile ? n - start : kTile;
    const float* const values = loaded(run.values, run.dtype, at + start, count, room);
    if (run.noise == nullptr) {
      for (int64_t i = 0; i < count; ++i) tile[i] = nearest((values[i] - run.zero) * run.inverse);
    } else {
      const float* noise = run.noise + at + start;
      for (int64_t i = 0; i < count; ++i) {
        const float exact = (values[i] - run.zero) * run.inverse;
        const float near = nearest(exact);
        const float floor = near - (near > exact ? 1.0f : 0.0f);
        tile[i] = floor + (noise[i] < exact - floor ? 1.0f : 0.0f);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      codes[i] = static_cast<int8_t>(static_cast<int32_t>(clamped(tile[i], run.low, run.high)));
    }
    if (run.bits == 8) {
      std::memcpy(run.codes + at + start, codes, static_cast<size_t>(count));
      continue;
    }
    uint8_t* pairs = run.codes + (at + start) / 2;  // `at` and kTile are even
    if (count % 2) codes[count] = 0;                // count < kTile then
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
      pairs[i] = static_cast<uint8_t>((codes[2 * i] & 0xf) | (codes[2 * i + 1] << 4));
    }
  }
}

void dequantize(const DequantRun& run, int64_t at, int64_t n) {
  alignas(64) float tile[kTile];
  for (int64_t start = 0; start < n; start += kTile) {
    const int64_t count = n - start < kTile ? n - start : kTile;
    if (run.bits == 8) {
      const uint8_t* codes = run.codes + at + start;
      if (run.is_signed) {
        for (int64_t i = 0; i < count; ++i) tile[i] = static_cast<float>(static_cast<int8_t>(codes[i]));
      } else {
        for (int64_t i = 0; i < count; ++i) tile[i] = static_cast<float>(codes[i]);
      }
    } else {
      const uint8_t* pairs = run.codes + (at + start) / 2;
      const int32_t flip = run.is_signed ? 8 : 0;  // (nibble ^ 8) - 8 extends the sign
      for (int64_t i = 0; i < count / 2; ++i) {
        tile[2 * i] = static_cast<float>(((pairs[i] & 0xf) ^ flip) - flip);
        tile[2 * i + 1] = static_cast<float>(((pairs[i] >> 4) ^ flip) - flip);
      }
      if (count % 2) tile[count - 1] = static_cast<float>(((pairs[count / 2] & 0xf) ^ flip) - flip);
    }
    if (run.is_signed) {
      for (int64_t i = 0; i < count; ++i) tile[i] = tile[i] * run.scale;
    } else {
      for (int64_t i = 0; i < count; ++i) tile[i] = tile[i] * run.scale + run.zero;
    }
    char* const place = static_cast<char*>(run.values) + (at + start) * static_cast<int64_t>(nbytes_of(run.dtype));
    from_floats(tile, place, run.dtype, static_cast<size_t>(count));
  }
}

}  // namespace
}  // namespace ds::DS_ISA::quant
