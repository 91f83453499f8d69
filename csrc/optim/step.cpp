// The host step: every tensor of an update in one call. Python's half is deepspeed/ops/host_step/native.py.
//
//   tensors --cut at spans--> ranges --joined to equal work--> tasks --any thread--> kernels
#include <algorithm>
#include <cmath>
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

Dtype dtype_at(int64_t dtypes, int byte) { return static_cast<Dtype>((dtypes >> (8 * byte)) & 0xff); }

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

StepRange range_of(const ds_step_tensor& t, int64_t begin, int64_t numel, double* squares, bool streams) {
  const auto at = [begin](void* pointer, Dtype dtype) {
    return pointer == nullptr ? nullptr : static_cast<char*>(pointer) + begin * static_cast<int64_t>(ds::nbytes_of(dtype));
  };
  StepRange range{};
  range.param_dtype = dtype_at(t.dtypes, 0);
  range.grad_dtype = dtype_at(t.dtypes, 1);
  range.state_dtype[0] = dtype_at(t.dtypes, 2);
  range.state_dtype[1] = dtype_at(t.dtypes, 3);
  range.values_dtype = dtype_at(t.dtypes, 4);
  range.param = at(t.param, range.param_dtype);
  range.grad = at(t.grad, range.grad_dtype);
  range.state[0] = at(t.state0, range.state_dtype[0]);
  range.state[1] = at(t.state1, range.state_dtype[1]);
  range.values = at(t.values, range.values_dtype);
  range.update = t.update == nullptr ? nullptr : t.update + begin;
  range.squares = squares;
  range.clears_grad = (t.flags & 1) != 0;
  range.streams = streams;
  range.numel = numel;
  return range;
}

std::vector<StepNumbers> all_numbers(Rule rule, const ds_step_tensor* tensors, int64_t count, const double* numbers) {
  std::vector<StepNumbers> all(static_cast<size_t>(count));
  int64_t last_row = -1;
  float last_step = -1.0f;
  for (int64_t i = 0; i < count; ++i) {
    const ds_step_tensor& t = tensors[i];
    if (rule != Rule::lamb_apply) *t.step += 1.0f;
    const bool is_same = t.row == last_row && *t.step == last_step;  // most are: powers are dear
    all[static_cast<size_t>(i)] =
        is_same ? all[static_cast<size_t>(i - 1)] : numbers_of(rule, numbers + t.row * kNumbers, *t.step);
    last_row = t.row;
    last_step = *t.step;
  }
  return all;
}

}  // namespace

void ds_step(int32_t code, const ds_step_tensor* tensors, int64_t count, const double* numbers, int32_t threads) {
  const Rule rule = static_cast<Rule>(code);
  const std::vector<StepNumbers> all = all_numbers(rule, tensors, count, numbers);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += tensors[i].numel;
  const bool streams = total >= kStreamNumel;

  std::vector<Range> ranges;
  std::vector<size_t> begins;  // of tasks among the ranges
  int64_t in_task = ds::kSpan;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t begin = 0; begin < tensors[i].numel; begin += ds::kSpan) {
      const int64_t numel = std::min(ds::kSpan, tensors[i].numel - begin);
      if (in_task + numel > ds::kSpan) {
        begins.push_back(ranges.size());
        in_task = 0;
      }
      in_task += numel;
      ranges.push_back({range_of(tensors[i], begin, numel, nullptr, streams), i});
    }
  }
  begins.push_back(ranges.size());
  std::vector<double> squares(rule == Rule::lamb_update ? 2 * ranges.size() : 0);
  for (size_t i = 0; i < squares.size() / 2; ++i) ranges[i].at.squares = &squares[2 * i];

  const ds::Kernels& kernels = ds::kernels();
  ds::parallel(static_cast<int64_t>(begins.size()) - 1, threads, [&](int64_t task) {
    for (size_t i = begins[static_cast<size_t>(task)]; i < begins[static_cast<size_t>(task) + 1]; ++i) {
      kernels.step(rule, all[static_cast<size_t>(ranges[i].tensor)], ranges[i].at);
    }
  });
  for (size_t i = 0; i < squares.size() / 2; ++i) {
    tensors[ranges[i].tensor].squares[0] += squares[2 * i];
    tensors[ranges[i].tensor].squares[1] += squares[2 * i + 1];
  }
}
