// Between fp32 and the 16-bit floats, a block at a time. To 16 bits: to nearest, ties to even; a NaN stays one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/step.h"

namespace ds::DS_ISA {
namespace {

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13 | ((rest & 0x3ffu) != 0) << 22);
  if (rest >= 0x0400u) return float_of(sign | ((rest << 13) + 0x38000000u));
  const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // x 2^-24, exact
  return float_of(sign | bits_of(small));
}

inline uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more rounds to infinity
  if (rest >= 0x38800000u) return static_cast<uint16_t>(sign | ((rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u) >> 13));
  const float magic = 0.5f;  // its last bit is 2^-24, that of the subnormals: the addition rounds as wanted
  return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + magic) - bits_of(magic)));
}

void bf16_to_float(const uint16_t* __restrict from, float* __restrict to, size_t numel) {
  for (size_t i = 0; i < numel; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
}

void float_to_bf16(const float* __restrict from, uint16_t* __restrict to, size_t numel) {
  for (size_t i = 0; i < numel; ++i) to[i] = bf16_of(from[i]);
}

void fp16_to_float(const uint16_t* __restrict from, float* __restrict to, size_t numel) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= numel; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < numel; ++i) to[i] = float_of_half(from[i]);
}

void float_to_fp16(const float* __restrict from, uint16_t* __restrict to, size_t numel) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= numel; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
#endif
  for (; i < numel; ++i) to[i] = half_of(from[i]);
}

// `numel` elements as floats: in place where they are floats already, else in `room`.
inline float* as_floats(char* from, Dtype dtype, float* room, size_t numel) {
  if (dtype == Dtype::fp32) return reinterpret_cast<float*>(from);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
  if (dtype == Dtype::bf16) {
    bf16_to_float(halves, room, numel);
  } else {
    fp16_to_float(halves, room, numel);
  }
  return room;
}

inline void from_floats(const float* from, char* to, Dtype dtype, size_t numel) {
  if (dtype == Dtype::fp32) {
    std::memcpy(to, from, numel * sizeof(float));
  } else if (dtype == Dtype::bf16) {
    float_to_bf16(from, reinterpret_cast<uint16_t*>(to), numel);
  } else {
    float_to_fp16(from, reinterpret_cast<uint16_t*>(to), numel);
  }
}

// Whole cache lines to a place that is aligned to them, around the cache.
inline void stream_lines(char* to, const char* from, size_t nbytes) {
#if defined(__AVX512F__)
  for (size_t at = 0; at < nbytes; at += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
#elif defined(__AVX2__)
  for (size_t at = 0; at < nbytes; at += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
  }
#else
  std::memcpy(to, from, nbytes);
#endif
}

inline void end_stream() {
#if defined(__AVX2__)
  _mm_sfence();  // such stores are not ordered with those that say "done"
#endif
}

}  // namespace
}  // namespace ds::DS_ISA
