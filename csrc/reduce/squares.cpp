// Sum of squares of many tensors; Python's half is deepspeed/ops/host_step/squares.py.
#include <algorithm>
#include <cerrno>
#include <new>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "core/step.h"
#include "native.h"

namespace {

constexpr int64_t kSpansPerTask = 4;

struct Span {
  const char* values;
  ds::Dtype dtype;
  int64_t numel;
};

double total_of(const ds_tensor* tensors, int64_t count, int32_t threads) {
  std::vector<Span> spans;
  for (int64_t i = 0; i < count; ++i) {
    const auto dtype = static_cast<ds::Dtype>(tensors[i].dtype);
    for (int64_t begin = 0; begin < tensors[i].numel; begin += ds::kSpan) {
      spans.push_back({static_cast<const char*>(tensors[i].values) + begin * static_cast<int64_t>(ds::nbytes_of(dtype)), dtype,
                       std::min(ds::kSpan, tensors[i].numel - begin)});
    }
  }
  const int64_t last = static_cast<int64_t>(spans.size());
  std::vector<double> sums(spans.size());
  const ds::Kernels& kernels = ds::kernels();
  ds::parallel((last + kSpansPerTask - 1) / kSpansPerTask, threads, [&](int64_t task) {
    for (int64_t i = task * kSpansPerTask; i < std::min(last, (task + 1) * kSpansPerTask); ++i) {
      const Span& span = spans[static_cast<size_t>(i)];
      sums[static_cast<size_t>(i)] = kernels.squares(span.values, span.dtype, span.numel);
    }
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

int32_t ds_total_of_squares(const ds_tensor* tensors, int64_t count, int32_t threads, double* total) {
  try {
    *total = total_of(tensors, count, threads);
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}
