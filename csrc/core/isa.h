// Kernels: the loops that are compiled once for each instruction set, as a table of functions.
//
// [Note: no shared inline functions] A file under kernels/ may include only headers whose functions are static or built in.
// An inline function of the standard library that is compiled with AVX-512 in one file and without in another is one symbol
// for the linker: it may keep the one that this processor cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds {

struct Kernels {
  // nbytes from one place to another, by stores that go around the cache where there are such.
  void (*copy)(char* to, const char* from, size_t nbytes);
};

// Those of the instruction set in use.
const Kernels& kernels();

namespace generic {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

}  // namespace ds
