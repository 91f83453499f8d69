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

#define DS_ABI_VERSION 2
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

// The operators whose code is in this library, comma-separated: names of deepspeed/ops/op_builder/registry.py.
DS_EXPORT const char* ds_operators(void);

// Compiler flags of every file, and those that the kernels in use have besides.
DS_EXPORT const char* ds_flags(void);
DS_EXPORT const char* ds_isa_flags(void);

// Copy `count` blocks of memory, with stores that go around the cache. 0, or -ENOMEM.
DS_EXPORT int32_t ds_copy(void* const* to, const void* const* from, const int64_t* nbytes, int64_t count, int32_t threads);

// Quantise `numel` values, in blocks of `block_numel` (the last may be shorter), to `bits` (8 or 4) each.
//
//   symmetric: code = round(value / scale), two's complement; zeros is not touched
//   else:      code = round((value - zero) / scale), unsigned
//
// dtype: 1 fp32, 2 bf16, 3 fp16. codes: numel bytes, or (numel + 1) / 2 for 4 bits. noise: numel values in [0, 1) to round at
// random, or null. With 4 bits and more than one block, block_numel is even. A block with a value that is not finite gets the
// scale NaN, hence comes back as NaN; so does, if not symmetric, one whose least and greatest differ by more than fp32 holds. A
// block for which 2^bits / size is more than that (size below some 2^-120) gets zeros. -EINVAL for other dtypes, bits or block
// sizes; -ENOMEM.
DS_EXPORT int32_t ds_quantize(const void* values, int32_t dtype, int64_t numel, int64_t block_numel, int32_t bits,
                              int32_t symmetric, const float* noise, uint8_t* codes, float* scales, float* zeros, int32_t threads);

// And back, into `values`.
DS_EXPORT int32_t ds_dequantize(const uint8_t* codes, int64_t numel, int64_t block_numel, int32_t bits, int32_t symmetric,
                                const float* scales, const float* zeros, void* values, int32_t dtype, int32_t threads);

// The tensors of one update, as columns of `count` each; a column that no tensor needs may be null.
struct ds_update_tensors {
  int64_t count;
  const int64_t* numel;
  void* const* param;
  void* const* grad;
  void* const* state0;     // column null: the rule has no state
  void* const* state1;
  void* const* values;     // receives the new parameter, rounded; null: nobody wants it
  float* const* update;    // LAMB: room for the update, numel floats; null where fp32 states give it again
  double* squares;         // LAMB, first pass: two sums for each tensor that are added to, of parameter and update
  float* const* step;      // count of updates; goes up by one (not in LAMB's second pass)
  const uint8_t* param_dtype;  // of each tensor: 1 fp32, 2 bf16, 3 fp16
  const uint8_t* grad_dtype;
  const uint8_t* state0_dtype;
  const uint8_t* state1_dtype;
  const uint8_t* values_dtype;
  const uint8_t* clears;   // 1: write zeros over the gradient
  const int32_t* row;      // of `numbers`
};

// One update by one rule: 0 Adam, 1 Adagrad, 2 Lion, 3 SGD with momentum, 4 and 5 LAMB's two passes.
// A row of `numbers` is 9 doubles: rate, beta1 (momentum), beta2 (dampening), eps, decay, two flags (Adam: decay is
// decoupled, biases are corrected; SGD: nesterov; LAMB: eps inside the root, biases are corrected), LAMB's ratio, factor.
// 0, or -ENOMEM with nothing changed.
DS_EXPORT int32_t ds_update(int32_t rule, const ds_update_tensors* tensors, const double* numbers, int32_t threads);

struct ds_tensor {
  int64_t numel;
  const void* values;
  int64_t dtype;  // 1 fp32, 2 bf16, 3 fp16, 4 fp64
};

// Sum of squares of all elements, in double. 0, or -ENOMEM.
DS_EXPORT int32_t ds_total_of_squares(const ds_tensor* tensors, int64_t count, int32_t threads, double* total);

// --- Files (csrc/io). Reads and writes that go on while the caller does something else. Any thread may call.

// Start an engine of one kind: "io_uring", "libaio" or "threads". Blocks of `block_nbytes` (whole pages) are asked of the system;
// `queue_depth` of them are in flight for each of `threads` threads. `single_submit`: they are handed over one by one.
// `overlap_events`: the queue is filled up whenever one block is done, and not when all are. 0, or a negative errno: this
// system does not have the kind, or has no room for it.
DS_EXPORT int32_t ds_io_open(const char* kind, int64_t block_nbytes, int32_t queue_depth, int32_t threads,
                             int32_t single_submit, int32_t overlap_events, void** engine);

// Wait for all requests and end the threads. Nobody may use the engine meanwhile.
DS_EXPORT void ds_io_close(void* engine);

// Begin to move `nbytes` > 0 bytes between memory and a file. The middle goes through `middle_fd`, the rest, when the middle is
// done, through `edge_fd`; where the middle is not empty of edges, it begins and ends at a page of the file.
// 0, or -ENOMEM.
DS_EXPORT int32_t ds_io_start(void* engine, int32_t is_write, int32_t middle_fd, int32_t edge_fd, int64_t offset,
                              int64_t nbytes, void* address, int64_t middle_start, int64_t middle_nbytes, void** request);

// Wait at most so long; 1 if the request is done.
DS_EXPORT int32_t ds_io_wait(void* request, int64_t microseconds);

// Of a request that is done: 0, or the errno of the failure that lies first in the file (ENODATA: the file ends there), and the
// bytes before it.
DS_EXPORT int32_t ds_io_outcome(const void* request, int64_t* moved_nbytes);

// Free a request that is done.
DS_EXPORT void ds_io_release(void* request);
