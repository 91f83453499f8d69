// The C interface of the native library: everything that Python calls, and nothing else is exported.
//
// Conventions: no exception leaves a function; those that can fail return 0 or a negative errno. Lengths are elements unless
// they are called nbytes. `threads` is the most threads of the call, the caller included; results do not depend on it.
// Pointers are to host memory of the given length and must not overlap unless it is said that they may.
//
// A change of a signature here goes with DS_ABI_VERSION and with the ctypes declarations in deepspeed/ops/native.
#pragma once

#include <cstddef>
#include <cstdint>

#define DS_ABI_VERSION 1
#define DS_EXPORT extern "C" __attribute__((visibility("default")))

// DS_ABI_VERSION of the library that was loaded.
DS_EXPORT int32_t ds_abi_version(void);

// The instruction set of the kernels on this processor: "avx512", "avx2" or "generic".
DS_EXPORT const char* ds_isa(void);

// Let kernels of another instruction set run ("generic", "avx2", "avx512"); 0, or -EINVAL where there is none of it, or
// this processor lacks it. For tests and benchmarks: not while another thread is in the library.
DS_EXPORT int32_t ds_set_isa(const char* name);

// Compiler and its version.
DS_EXPORT const char* ds_compiler(void);

// Copy `count` blocks of memory, with stores that go around the cache.
DS_EXPORT void ds_copy(void* const* to, const void* const* from, const int64_t* nbytes, int64_t count, int32_t threads);
