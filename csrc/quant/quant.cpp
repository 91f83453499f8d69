// Blocks of values to integers and back: the arithmetic of a block, and who does which block.
//
//   symmetric     scale = largest size / (2^(bits-1) - 1)        zero = 0
//   else          scale = (greatest - least) / (2^bits - 1)      zero = least
//
// Values are multiplied by 1 / scale, computed once as (2^..-1) / size, so a value may come out one last place from where a
// division would put it. The torch twin does the same operations: deepspeed/ops/quantizer/blocks.py.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "native.h"

namespace {

constexpr int64_t kPiece = 64 << 10;  // elements that one thread takes at a time; even

struct Blocks {
  int64_t numel;
  int64_t block_numel;

  int64_t count() const { return (numel + block_numel - 1) / block_numel; }
  int64_t start(int64_t block) const { return block * block_numel; }
  int64_t length(int64_t block) const { return std::min(block_numel, numel - start(block)); }
};

struct Span {
  int32_t least = std::numeric_limits<int32_t>::max();
  int32_t most = std::numeric_limits<int32_t>::min();

  void add(const Span& other) {
    least = std::min(least, other.least);
    most = std::max(most, other.most);
  }
};

float value_of(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value + 0.0f;  // -0 becomes 0
}

float finite_or_zero(float value) { return std::isfinite(value) ? value : 0.0f; }

struct Scale {
  float scale, zero, inverse, low, high;
  bool is_finite;
};

Scale scale_of(const Span& span, int32_t bits, bool is_symmetric) {
  const float least = value_of(span.least);
  const float most = value_of(span.most);
  const float low = is_symmetric ? -static_cast<float>((1 << (bits - 1)) - 1) : 0.0f;
  const float high = static_cast<float>(is_symmetric ? (1 << (bits - 1)) - 1 : (1 << bits) - 1);
  const float size = is_symmetric ? std::max(most, -least) : most - least;
  if (!std::isfinite(least) || !std::isfinite(most) || !std::isfinite(size)) {
    return {std::numeric_limits<float>::quiet_NaN(), 0.0f, 0.0f, low, high, false};
  }
  return {size / high, is_symmetric ? 0.0f : least, finite_or_zero(high / size), low, high, true};
}

bool is_wrong(int32_t dtype, int64_t numel, int64_t block_numel, int32_t bits) {
  const bool is_split_pair = bits == 4 && block_numel % 2 != 0 && block_numel < numel;
  return dtype < 1 || dtype > 3 || numel < 0 || block_numel < 1 || (bits != 8 && bits != 4) || is_split_pair;
}

class Quantizer {
 public:
  Quantizer(const ds::QuantRun& run, Blocks blocks, bool is_symmetric, float* scales, float* zeros)
      : kernels_(ds::kernels()), run_(run), blocks_(blocks), is_symmetric_(is_symmetric), scales_(scales), zeros_(zeros) {}

  Span span(int64_t at, int64_t n) const {
    Span span;
    kernels_.span_of(run_.values, run_.dtype, at, n, &span.least, &span.most);
    return span;
  }

  Scale scale(int64_t block, const Span& span) const {
    const Scale scale = scale_of(span, run_.bits, is_symmetric_);
    scales_[block] = scale.scale;
    if (!is_symmetric_) zeros_[block] = scale.zero;
    return scale;
  }

  void codes(const Scale& scale, int64_t at, int64_t n) const {
    if (!scale.is_finite) {
      std::memset(run_.codes + (run_.bits == 8 ? at : at / 2), 0, static_cast<size_t>(run_.bits == 8 ? n : (n + 1) / 2));
      return;
    }
    ds::QuantRun run = run_;
    run.zero = scale.zero;
    run.inverse = scale.inverse;
    run.low = scale.low;
    run.high = scale.high;
    kernels_.quantize(run, at, n);
  }

  // Blocks that fit the cache: each is read once.
  void small(int32_t threads) const {
    const int64_t each = std::max<int64_t>(1, kPiece / blocks_.block_numel);
    ds::parallel((blocks_.count() + each - 1) / each, threads, [&](int64_t task) {
      for (int64_t block = task * each; block < std::min((task + 1) * each, blocks_.count()); ++block) {
        const int64_t at = blocks_.start(block);
        const int64_t n = blocks_.length(block);
        codes(scale(block, span(at, n)), at, n);
      }
    });
  }

  // Blocks of many pieces: least and greatest of each piece, then of the block, then the codes piece by piece.
  void large(int32_t threads) const {
    for (int64_t block = 0; block < blocks_.count(); ++block) {
      const int64_t start = blocks_.start(block);
      const int64_t length = blocks_.length(block);
      const int64_t pieces = (length + kPiece - 1) / kPiece;
      std::vector<Span> spans(static_cast<size_t>(pieces));
      ds::parallel(pieces, threads, [&](int64_t piece) {
        spans[piece] = span(start + piece * kPiece, std::min(kPiece, length - piece * kPiece));
      });
      Span whole;
      for (const Span& span : spans) whole.add(span);
      const Scale found = scale(block, whole);
      ds::parallel(pieces, threads, [&](int64_t piece) {
        codes(found, start + piece * kPiece, std::min(kPiece, length - piece * kPiece));
      });
    }
  }

 private:
  const ds::Kernels& kernels_;
  const ds::QuantRun run_;
  const Blocks blocks_;
  const bool is_symmetric_;
  float* const scales_;
  float* const zeros_;
};

}  // namespace

int32_t ds_quantize(const void* values, int32_t dtype, int64_t numel, int64_t block_numel, int32_t bits, int32_t symmetric,
                    const float* noise, uint8_t* codes, float* scales, float* zeros, int32_t threads) {
  if (is_wrong(dtype, numel, block_numel, bits)) return -EINVAL;
  const ds::QuantRun run = {values, static_cast<ds::Dtype>(dtype), noise, codes, bits, 0.0f, 0.0f, 0.0f, 0.0f};
  const Quantizer quantizer(run, {numel, block_numel}, symmetric != 0, scales, zeros);
  try {
    if (block_numel <= kPiece) {
      quantizer.small(threads);
    } else {
      quantizer.large(threads);
    }
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}

int32_t ds_dequantize(const uint8_t* codes, int64_t numel, int64_t block_numel, int32_t bits, int32_t symmetric,
                      const float* scales, const float* zeros, void* values, int32_t dtype, int32_t threads) {
  if (is_wrong(dtype, numel, block_numel, bits)) return -EINVAL;
  const Blocks blocks = {numel, block_numel};
  const ds::Kernels& kernels = ds::kernels();
  // Tasks of about a piece: some blocks, or a piece of one.
  const int64_t each = std::max<int64_t>(1, kPiece / block_numel);
  const int64_t pieces = (block_numel + kPiece - 1) / kPiece;
  const int64_t tasks = (blocks.count() + each - 1) / each * pieces;
  const auto dequantize = [&](int64_t task) {
    const int64_t first = task / pieces * each;
    const int64_t piece = task % pieces * kPiece;
    for (int64_t block = first; block < std::min(first + each, blocks.count()); ++block) {
      const int64_t n = std::min(kPiece, blocks.length(block) - piece);
      if (n <= 0) continue;
      const float zero = symmetric != 0 ? 0.0f : zeros[block];
      const ds::DequantRun run = {codes, bits, symmetric != 0, scales[block], zero, values, static_cast<ds::Dtype>(dtype)};
      kernels.dequantize(run, blocks.start(block) + piece, n);
    }
  };
  try {
    ds::parallel(tasks, threads, dequantize);
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}
