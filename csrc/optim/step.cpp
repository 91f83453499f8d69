// The host step: every tensor of an update in one call. Python's half is deepspeed/ops/host_step/native.py.
//
//   tensors --cut at spans--> ranges --joined to equal work--> tasks --any thread--> kernels
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <new>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "core/step.h"
#include "native.h"

namespace {

using ds::Dtype;
using ds::Rule;
using ds::StepNumbers;
using ds::StepRange;

constexpr int64_t kStreamNumel = 1 << 20;  // fewer elements: their 16-bit copy is read again from the cache

// Order of one row of `numbers`.
enum Number { kRate, kBeta1, kBeta2, kEps, kDecay, kFlag0, kFlag1, kRatio, kFactor, kNumbers };

struct Range {
  StepRange at;
  int64_t tensor;
};

void correct(StepNumbers& n, Rule rule, const double* row, double step) {
  const bool is_corrected = row[kFlag1] != 0.0;
  const double rest1 = is_corrected ? 1.0 - std::pow(row[kBeta1], step) : 1.0;
  const double rest2 = is_corrected ? 1.0 - std::pow(row[kBeta2], step) : 1.0;
  if (rule == Rule::adam) {
    const double root = std::sqrt(rest2);
    n.rate = static_cast<float>(row[kRate] * root / rest1);
    n.eps = static_cast<float>(row[kEps] * root);
  } else {
    n.correct1 = static_cast<float>(1.0 / rest1);
    n.correct2 = static_cast<float>(1.0 / rest2);
  }
}

// The numbers of one tensor at update number `step`.
StepNumbers numbers_of(Rule rule, const double* row, double step) {
  StepNumbers n{};
  n.factor = static_cast<float>(row[kFactor]);
  n.rate = static_cast<float>(row[kRate]);
  n.eps = static_cast<float>(row[kEps]);
  n.beta1 = static_cast<float>(row[kBeta1]);
  n.rest1 = static_cast<float>(1.0 - row[kBeta1]);
  n.beta2 = static_cast<float>(row[kBeta2]);
  n.rest2 = static_cast<float>(1.0 - row[kBeta2]);
  n.keep = 1.0f;
  const bool keeps_less = rule == Rule::lion || (rule == Rule::adam && row[kFlag0] != 0.0);
  if (keeps_less) {
    n.keep = static_cast<float>(1.0 - row[kRate] * row[kDecay]);
  } else {
    n.l2 = static_cast<float>(row[kDecay]);
  }
  n.flag = rule != Rule::adam && row[kFlag0] != 0.0;
  n.is_first = step == 1.0;
  if (rule == Rule::adam || rule == Rule::lamb_update || rule == Rule::lamb_apply) correct(n, rule, row, step);
  if (rule == Rule::lamb_apply) n.rate = static_cast<float>(row[kRate] * row[kRatio]);
  return n;
}

// A range of one tensor, all of it.
StepRange whole_of(const ds_update_tensors& t, int64_t i, bool streams) {
  const auto pointer = [i](void* const* column) { return column == nullptr ? nullptr : static_cast<char*>(column[i]); };
  const auto dtype = [i](const uint8_t* column) { return column == nullptr ? Dtype::none : static_cast<Dtype>(column[i]); };
  StepRange range{};
  range.param = pointer(t.param);
  range.grad = pointer(t.grad);
  range.state[0] = pointer(t.state0);
  range.state[1] = pointer(t.state1);
  range.values = pointer(t.values);
  range.update = t.update == nullptr ? nullptr : t.update[i];
  range.param_dtype = dtype(t.param_dtype);
  range.grad_dtype = dtype(t.grad_dtype);
  range.state_dtype[0] = dtype(t.state0_dtype);
  range.state_dtype[1] = dtype(t.state1_dtype);
  range.values_dtype = dtype(t.values_dtype);
  range.clears_grad = t.clears != nullptr && t.clears[i] != 0;
  range.streams = streams;
  range.numel = t.numel[i];
  return range;
}

// `numel` elements of it, from `begin` on.
StepRange part_of(StepRange range, int64_t begin, int64_t numel) {
  const auto move = [begin](char*& pointer, Dtype dtype) {
    if (pointer != nullptr) pointer += begin * static_cast<int64_t>(ds::nbytes_of(dtype));
  };
  move(range.param, range.param_dtype);
  move(range.grad, range.grad_dtype);
  move(range.state[0], range.state_dtype[0]);
  move(range.state[1], range.state_dtype[1]);
  move(range.values, range.values_dtype);
  if (range.update != nullptr) range.update += begin;
  range.numel = numel;
  return range;
}

struct Work {
  std::vector<Range> ranges;
  std::vector<size_t> begins;  // of tasks among the ranges, and the end
};

Work cut(const ds_update_tensors& t) {
  int64_t total = 0;
  for (int64_t i = 0; i < t.count; ++i) total += t.numel[i];
  Work work;
  int64_t in_task = ds::kSpan;
  for (int64_t i = 0; i < t.count; ++i) {
    const StepRange whole = whole_of(t, i, total >= kStreamNumel);
    for (int64_t begin = 0; begin < whole.numel; begin += ds::kSpan) {
      const int64_t numel = std::min(ds::kSpan, whole.numel - begin);
      if (in_task + numel > ds::kSpan) {
        work.begins.push_back(work.ranges.size());
        in_task = 0;
      }
      in_task += numel;
      work.ranges.push_back({part_of(whole, begin, numel), i});
    }
  }
  work.begins.push_back(work.ranges.size());
  return work;
}

// Counts the steps, too.
std::vector<StepNumbers> all_numbers(Rule rule, const ds_update_tensors& t, const double* numbers) {
  std::vector<StepNumbers> all(static_cast<size_t>(t.count));
  int64_t last_row = -1;
  float last_step = -1.0f;
  for (int64_t i = 0; i < t.count; ++i) {
    float& step = *t.step[i];
    if (rule != Rule::lamb_apply) step += 1.0f;
    const bool is_same = t.row[i] == last_row && step == last_step;  // most are: powers are dear
    all[static_cast<size_t>(i)] = is_same ? all[static_cast<size_t>(i - 1)] : numbers_of(rule, numbers + t.row[i] * kNumbers, step);
    last_row = t.row[i];
    last_step = step;
  }
  return all;
}

void update(Rule rule, const ds_update_tensors& t, const double* numbers, int32_t threads) {
  Work work = cut(t);
  const std::vector<Range>& ranges = work.ranges;
  std::vector<double> squares(rule == Rule::lamb_update ? 2 * ranges.size() : 0);
  for (size_t i = 0; i < squares.size() / 2; ++i) work.ranges[i].at.squares = &squares[2 * i];
  const std::vector<StepNumbers> all = all_numbers(rule, t, numbers);  // last: from here on tensors change

  const ds::Kernels& kernels = ds::kernels();
  ds::parallel(static_cast<int64_t>(work.begins.size()) - 1, threads, [&](int64_t task) {
    for (size_t i = work.begins[static_cast<size_t>(task)]; i < work.begins[static_cast<size_t>(task) + 1]; ++i) {
      const StepRange* next = i + 1 < ranges.size() ? &ranges[i + 1].at : nullptr;
      kernels.step(rule, all[static_cast<size_t>(ranges[i].tensor)], ranges[i].at, next);
    }
  });
  for (size_t i = 0; i < squares.size(); ++i) t.squares[2 * ranges[i / 2].tensor + static_cast<int64_t>(i % 2)] += squares[i];
}

}  // namespace

int32_t ds_update(int32_t code, const ds_update_tensors* tensors, const double* numbers, int32_t threads) {
  try {
    update(static_cast<Rule>(code), *tensors, numbers, threads);
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}
