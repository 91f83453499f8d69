// The updates. Each line of a loop rounds once, in the order that the twin has (deepspeed/ops/host_step/twin.py).
//
//   a block of 1,024 elements:   16-bit tensors --> fp32 in the first-level cache --> the update --> rounded back
//                                fp32 tensors are updated where they are
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/step.h"
#include "kernels/convert.h"
#include "kernels/squares.h"

namespace ds::DS_ISA {
namespace {

constexpr size_t kBlock = kGroup;
constexpr size_t kChunk = 64;    // elements: loops of a known length, unrolled
constexpr size_t kAhead = 512;   // elements: a processor's own look-ahead stops at each page, and is late after it
constexpr size_t kLineNumel = 64 / sizeof(float);

#define DS_INLINE [[gnu::always_inline]] static inline

// What is updated after some elements: `numel` others, in arrays of the same order.
struct Following {
  const float* at[5];
  size_t numel;
};

template <typename... Value>
DS_INLINE void prefetch(size_t begin, const Value*... arrays) {
  for (size_t line = begin; line < begin + kChunk; line += kLineNumel) (__builtin_prefetch(arrays + line), ...);
}

// `kRun` over all elements, chunk by chunk. `then` null: the arrays go on.
template <auto kRun, typename... Value>
void in_chunks(const StepNumbers& given, size_t numel, const Following* then, Value*... arrays) {
  const StepNumbers n = given;
  size_t at = 0;
  for (; at + kChunk <= numel; at += kChunk) {
    const size_t ahead = at + kAhead;
    if (then == nullptr || ahead < numel) {
      prefetch(ahead, arrays...);
    } else if (ahead - numel < then->numel) {
      for (size_t array = 0; array < sizeof...(arrays); ++array) prefetch(ahead - numel, then->at[array]);
    }
    kRun(n, (arrays + at)..., kChunk);
  }
  if (at < numel) kRun(n, (arrays + at)..., numel - at);
}

template <bool kAddsDecay>
DS_INLINE void adam(const StepNumbers& n, float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
          size_t numel) {
  const float factor = n.factor, l2 = n.l2, keep = n.keep, rate = n.rate, eps = n.eps;
  const float beta1 = n.beta1, rest1 = n.rest1, beta2 = n.beta2, rest2 = n.rest2;
  for (size_t i = 0; i < numel; ++i) {
    float grad = g[i] * factor;
    if (kAddsDecay) grad = p[i] * l2 + grad;
    const float first = m[i] * beta1 + grad * rest1;
    const float second = v[i] * beta2 + grad * grad * rest2;
    m[i] = first;
    v[i] = second;
    p[i] = p[i] * keep - first * rate / (__builtin_sqrtf(second) + eps);
  }
}

template <bool kAddsDecay>
DS_INLINE void adagrad(const StepNumbers& n, float* __restrict p, const float* __restrict g, float* __restrict s, size_t numel) {
  const float factor = n.factor, l2 = n.l2, rate = n.rate, eps = n.eps;
  for (size_t i = 0; i < numel; ++i) {
    float grad = g[i] * factor;
    if (kAddsDecay) grad = p[i] * l2 + grad;
    const float sum = s[i] + grad * grad;
    s[i] = sum;
    p[i] = p[i] - grad * rate / (__builtin_sqrtf(sum) + eps);
  }
}

DS_INLINE void lion(const StepNumbers& n, float* __restrict p, const float* __restrict g, float* __restrict m, size_t numel) {
  const float factor = n.factor, keep = n.keep, rate = n.rate;
  const float beta1 = n.beta1, rest1 = n.rest1, beta2 = n.beta2, rest2 = n.rest2;
  for (size_t i = 0; i < numel; ++i) {
    const float grad = g[i] * factor;
    const float mixed = m[i] * beta1 + grad * rest1;
    const float towards = __builtin_copysignf(rate, mixed);
    const float sign = mixed < 0.0f || mixed > 0.0f ? towards : 0.0f;
    p[i] = p[i] * keep - sign;
    m[i] = m[i] * beta2 + grad * rest2;
  }
}

template <bool kAddsDecay, bool kIsNesterov>
DS_INLINE void sgd(const StepNumbers& n, float* __restrict p, const float* __restrict g, float* __restrict m, size_t numel) {
  const float factor = n.factor, l2 = n.l2, rate = n.rate, beta = n.beta1, rest = n.rest2;
  const bool is_first = n.is_first;
  for (size_t i = 0; i < numel; ++i) {
    float grad = g[i] * factor;
    if (kAddsDecay) grad = p[i] * l2 + grad;
    const float going = m[i] * beta + grad * rest;
    const float momentum = is_first ? grad : going;
    m[i] = momentum;
    const float update = kIsNesterov ? momentum * beta + grad : momentum;
    p[i] = p[i] - update * rate;
  }
}

// LAMB's update of one element out of its moments.
template <bool kAddsDecay, bool kIsEpsInside>
DS_INLINE float lamb_of(const StepNumbers& n, float p, float first, float second) {
  const float corrected = second * n.correct2;
  const float root = kIsEpsInside ? __builtin_sqrtf(corrected + n.eps) : __builtin_sqrtf(corrected) + n.eps;
  const float update = first * n.correct1 / root;
  return kAddsDecay ? update + p * n.l2 : update;
}

template <bool kAddsDecay, bool kIsEpsInside>
DS_INLINE void lamb_update(const StepNumbers& n, const float* __restrict p, const float* __restrict g, float* __restrict m,
                 float* __restrict v, float* __restrict u, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const float grad = g[i] * n.factor;
    const float first = m[i] * n.beta1 + grad * n.rest1;
    const float second = v[i] * n.beta2 + grad * grad * n.rest2;
    m[i] = first;
    v[i] = second;
    u[i] = lamb_of<kAddsDecay, kIsEpsInside>(n, p[i], first, second);
  }
}

template <bool kAddsDecay, bool kIsEpsInside>
DS_INLINE void lamb_again(const StepNumbers& n, float* __restrict p, const float* __restrict m, const float* __restrict v, size_t numel) {
  for (size_t i = 0; i < numel; ++i) p[i] = p[i] - lamb_of<kAddsDecay, kIsEpsInside>(n, p[i], m[i], v[i]) * n.rate;
}

DS_INLINE void lamb_apply(const StepNumbers& n, float* __restrict p, const float* __restrict u, size_t numel) {
  for (size_t i = 0; i < numel; ++i) p[i] = p[i] - u[i] * n.rate;
}

void update_block(Rule rule, const StepNumbers& n, float* p, const float* g, float* const s[2], float* u, size_t numel,
                  const Following* then) {
  const bool adds = n.l2 != 0.0f;
  float *const m = s[0], *const v = s[1];
  switch (rule) {
    case Rule::adam:
      return adds ? in_chunks<adam<true>>(n, numel, then, p, g, m, v) : in_chunks<adam<false>>(n, numel, then, p, g, m, v);
    case Rule::adagrad:
      return adds ? in_chunks<adagrad<true>>(n, numel, then, p, g, m) : in_chunks<adagrad<false>>(n, numel, then, p, g, m);
    case Rule::lion:
      return in_chunks<lion>(n, numel, then, p, g, m);
    case Rule::sgd:
      if (n.flag) {
        return adds ? in_chunks<sgd<true, true>>(n, numel, then, p, g, m) : in_chunks<sgd<false, true>>(n, numel, then, p, g, m);
      }
      return adds ? in_chunks<sgd<true, false>>(n, numel, then, p, g, m) : in_chunks<sgd<false, false>>(n, numel, then, p, g, m);
    case Rule::lamb_update:
      if (n.flag) {
        return adds ? in_chunks<lamb_update<true, true>>(n, numel, then, p, g, m, v, u)
                    : in_chunks<lamb_update<false, true>>(n, numel, then, p, g, m, v, u);
      }
      return adds ? in_chunks<lamb_update<true, false>>(n, numel, then, p, g, m, v, u)
                  : in_chunks<lamb_update<false, false>>(n, numel, then, p, g, m, v, u);
    case Rule::lamb_apply:
      if (u != nullptr) return in_chunks<lamb_apply>(n, numel, then, p, u);
      if (n.flag) {
        return adds ? in_chunks<lamb_again<true, true>>(n, numel, then, p, m, v)
                    : in_chunks<lamb_again<false, true>>(n, numel, then, p, m, v);
      }
      return adds ? in_chunks<lamb_again<true, false>>(n, numel, then, p, m, v)
                  : in_chunks<lamb_again<false, false>>(n, numel, then, p, m, v);
  }
}

constexpr int states_of(Rule rule) {
  return rule == Rule::adam || rule == Rule::lamb_update || rule == Rule::lamb_apply ? 2 : 1;
}

// Scratch of one thread: the fp32 form of what is not fp32, in the first-level cache.
struct Rooms {
  alignas(64) float param[kBlock], grad[kBlock], state[2][kBlock], update[kBlock];
  alignas(64) char values[kBlock * sizeof(float)];
};

// The new parameter in the dtype of `values`. `from` are its floats, rounded to the dtype of the parameter.
inline void write_values(const StepRange& range, size_t at, const float* from, Rooms& rooms, size_t numel) {
  const size_t width = nbytes_of(range.values_dtype);
  char* to = range.values + at * width;
  const bool is_aligned = reinterpret_cast<uintptr_t>(to) % 64 == 0;
  const size_t lines = range.streams && is_aligned ? numel * width / 64 * 64 : 0;
  if (lines == 0) return from_floats(from, to, range.values_dtype, numel);
  from_floats(from, rooms.values, range.values_dtype, numel);
  stream_lines(to, rooms.values, lines);
  std::memcpy(to + lines, rooms.values + lines, numel * width - lines);
}

void step_block(Rule rule, const StepNumbers& n, const StepRange& range, size_t at, size_t numel, Rooms& rooms,
                double* squares_of_param, double* squares_of_update) {
  const bool applies = rule == Rule::lamb_apply;
  const int states = applies && range.update != nullptr ? 0 : states_of(rule);
  char* param_at = range.param + at * nbytes_of(range.param_dtype);
  float* p = as_floats(param_at, range.param_dtype, rooms.param, numel);
  float* s[2] = {nullptr, nullptr};
  for (int i = 0; i < states; ++i) {
    s[i] = as_floats(range.state[i] + at * nbytes_of(range.state_dtype[i]), range.state_dtype[i], rooms.state[i], numel);
  }
  char* grad_at = range.grad + at * nbytes_of(range.grad_dtype);
  const float* g = applies ? nullptr : as_floats(grad_at, range.grad_dtype, rooms.grad, numel);
  float* u = range.update != nullptr ? range.update + at : applies ? nullptr : rooms.update;
  update_block(rule, n, p, g, s, u, numel, nullptr);
  if (range.clears_grad) std::memset(grad_at, 0, numel * nbytes_of(range.grad_dtype));
  if (!applies) {
    for (int i = 0; i < states; ++i) {
      if (range.state_dtype[i] == Dtype::fp32) continue;
      from_floats(s[i], range.state[i] + at * nbytes_of(range.state_dtype[i]), range.state_dtype[i], numel);
    }
  }
  if (rule == Rule::lamb_update) {
    group_squares(p, numel, squares_of_param);
    group_squares(u, numel, squares_of_update);
    return;
  }
  if (range.param_dtype != Dtype::fp32) from_floats(p, param_at, range.param_dtype, numel);
  if (range.values == nullptr) return;
  write_values(range, at, as_floats(param_at, range.param_dtype, rooms.param, numel), rooms, numel);
}

// Elements before the first at which `values` begins a cache line.
inline size_t head_of(const StepRange& range) {
  if (range.values == nullptr || !range.streams) return 0;
  const size_t width = nbytes_of(range.values_dtype);
  const size_t beyond = reinterpret_cast<uintptr_t>(range.values) % 64;
  return beyond == 0 || beyond % width != 0 ? 0 : (64 - beyond) / width;
}

inline float* floats_at(char* place) { return reinterpret_cast<float*>(place); }

inline Following following(const StepRange* next) {
  if (next == nullptr) return {{}, 0};
  return {{floats_at(next->param), floats_at(next->grad), floats_at(next->state[0]), floats_at(next->state[1])},
          static_cast<size_t>(next->numel)};
}

void step(Rule rule, const StepNumbers& n, const StepRange& range, const StepRange* next) {
  const size_t numel = static_cast<size_t>(range.numel);
  const bool is_plain = range.param_dtype == Dtype::fp32 && range.grad_dtype == Dtype::fp32 && range.values == nullptr &&
                        !range.clears_grad && range.state_dtype[0] == Dtype::fp32 &&
                        (states_of(rule) < 2 || range.state_dtype[1] == Dtype::fp32);
  if (is_plain && rule < Rule::lamb_update) {
    float* const s[2] = {floats_at(range.state[0]), floats_at(range.state[1])};
    const Following then = following(next);
    return update_block(rule, n, floats_at(range.param), floats_at(range.grad), s, nullptr, numel, &then);
  }
  Rooms rooms;
  const bool sums = rule == Rule::lamb_update;
  alignas(64) double of_param[kGroups * kLanes], of_update[kGroups * kLanes];
  int64_t groups = 0;
  const size_t head = sums ? 0 : head_of(range);
  size_t at = 0;
  if (head > 0 && head < numel) {
    step_block(rule, n, range, 0, head, rooms, nullptr, nullptr);
    at = head;
  }
  for (; at < numel; at += kBlock, ++groups) {
    const size_t here = numel - at < kBlock ? numel - at : kBlock;
    const int64_t group = sums ? groups * kLanes : 0;
    step_block(rule, n, range, at, here, rooms, of_param + group, of_update + group);
  }
  if (range.values != nullptr && range.streams) end_stream();
  if (sums) {
    range.squares[0] = span_sum(of_param, groups);
    range.squares[1] = span_sum(of_update, groups);
  }
}

}  // namespace
}  // namespace ds::DS_ISA
