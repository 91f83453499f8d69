#include <algorithm>
#include <cerrno>
#include <new>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "native.h"

namespace {

constexpr int64_t kSpanBytes = 4 << 20;  // what one thread takes at a time

struct Span {
  char* to;
  const char* from;
  int64_t nbytes;
};

}  // namespace

int32_t ds_copy(void* const* to, const void* const* from, const int64_t* nbytes, int64_t count, int32_t threads) {
  try {
    std::vector<Span> spans;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t at = 0; at < nbytes[i]; at += kSpanBytes) {
        spans.push_back({static_cast<char*>(to[i]) + at, static_cast<const char*>(from[i]) + at,
                         std::min(kSpanBytes, nbytes[i] - at)});
      }
    }
    const ds::Kernels& kernels = ds::kernels();
    ds::parallel(static_cast<int64_t>(spans.size()), threads, [&](int64_t i) {
      kernels.copy(spans[i].to, spans[i].from, static_cast<size_t>(spans[i].nbytes));
    });
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}
