// Sums of squares in double, in the order that deepspeed/ops/host_step/squares.py draws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/step.h"
#include "kernels/convert.h"

namespace ds::DS_ISA {
namespace {

// One group, `numel` <= kGroup elements, into its kLanes sums. Missing elements count as zero.
template <typename Value>
inline void group_squares(const Value* __restrict values, size_t numel, double* __restrict sums) {
  double lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = 0.0;
  const size_t whole = numel / kLanes * kLanes;
  for (size_t at = 0; at < whole; at += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(values[at + lane]);
      lanes[lane] += value * value;
    }
  }
  for (size_t at = whole; at < numel; ++at) {
    const double value = static_cast<double>(values[at]);
    lanes[at - whole] += value * value;
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
}

// The sum of a span whose groups' sums are in `sums[kGroups][kLanes]`; those after `groups` are zeros and need not be set.
inline double span_sum(double* sums, int64_t groups) {
  for (int64_t i = groups * kLanes; i < kGroups * kLanes; ++i) sums[i] = 0.0;
  for (int64_t half = kGroups * kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// Sum of squares of at most a span.
double squares(const char* values, Dtype dtype, int64_t numel) {
  alignas(64) double sums[kGroups * kLanes];
  alignas(64) float room[kGroup];
  int64_t groups = 0;
  for (int64_t at = 0; at < numel; at += kGroup, ++groups) {
    const size_t here = static_cast<size_t>(numel - at < kGroup ? numel - at : kGroup);
    double* into = sums + groups * kLanes;
    if (dtype == Dtype::fp64) {
      group_squares(reinterpret_cast<const double*>(values) + at, here, into);
    } else {
      char* from = const_cast<char*>(values) + at * static_cast<int64_t>(nbytes_of(dtype));
      group_squares(as_floats(from, dtype, room, here), here, into);
    }
  }
  return span_sum(sums, groups);
}

}  // namespace
}  // namespace ds::DS_ISA
