// What the host step and its kernels agree on: plain numbers and pointers. Mirrors deepspeed/ops/host_step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds {

enum class Dtype : uint8_t { none = 0, fp32 = 1, bf16 = 2, fp16 = 3, fp64 = 4 };

static constexpr size_t nbytes_of(Dtype dtype) {
  return dtype == Dtype::fp64 ? 8 : dtype == Dtype::fp32 ? 4 : dtype == Dtype::none ? 0 : 2;
}

enum class Rule : int32_t { adam = 0, adagrad = 1, lion = 2, sgd = 3, lamb_update = 4, lamb_apply = 5 };

// Sums of squares: a span is 64 groups of 32 rows of 32 lanes (deepspeed/ops/host_step/squares.py has the picture).
constexpr int64_t kLanes = 32;
constexpr int64_t kRows = 32;
constexpr int64_t kGroup = kRows * kLanes;
constexpr int64_t kGroups = 64;
constexpr int64_t kSpan = kGroups * kGroup;

// The numbers of one tensor in one update, rounded to fp32 once. What a rule has no use for is not set.
struct StepNumbers {
  float factor;      // of the gradient
  float l2;          // decay that is added to the gradient or the update; 0: none
  float keep;        // 1 - rate * decay, what the parameter is multiplied by first; 1: nothing
  float rate;
  float eps;
  float beta1, rest1;  // beta and 1 - beta
  float beta2, rest2;
  float correct1, correct2;  // LAMB: what the moments are multiplied by
  bool flag;         // SGD: nesterov; LAMB: eps inside the root
  bool is_first;     // SGD: the momentum starts as the gradient
};

// A range of one tensor; of LAMB at most a span long.
struct StepRange {
  char* param;
  char* grad;
  char* state[2];
  char* values;      // null: none
  float* update;     // LAMB: written by the first pass and read by the second; null: computed twice
  double* squares;   // LAMB, first pass: sums of squares of parameter and update
  Dtype param_dtype, grad_dtype, state_dtype[2], values_dtype;
  bool clears_grad;
  bool streams;      // store `values` around the cache
  int64_t numel;
};

}  // namespace ds
