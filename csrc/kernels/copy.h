// Copying memory that nobody reads soon. A plain store first reads the line it overwrites; these do not, and the cache keeps
// what it has. Four pages are read side by side: one stream alone does not keep the memory busy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ds::DS_ISA {
namespace {

#if defined(__AVX2__)

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kPages = 4;

inline void copy_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kLine / 2));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + kLine / 2), high);
#endif
}

void copy(char* to, const char* from, size_t nbytes) {
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (nbytes < head + kPages * kPage) {
    std::memcpy(to, from, nbytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kPages * kPage <= nbytes; at += kPages * kPage) {
    for (size_t in_page = 0; in_page < kPage; in_page += kLine) {
      for (size_t page = 0; page < kPages; ++page) {
        const size_t place = at + page * kPage + in_page;
        copy_line(to + place, from + place);
      }
    }
  }
  _mm_sfence();  // such stores are not ordered with those that say "done"
  std::memcpy(to + at, from + at, nbytes - at);
}

#else

void copy(char* to, const char* from, size_t nbytes) { std::memcpy(to, from, nbytes); }

#endif

}  // namespace
}  // namespace ds::DS_ISA
