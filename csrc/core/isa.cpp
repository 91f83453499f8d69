#include "core/isa.h"

#include <cerrno>
#include <cstring>

#include "native.h"

namespace ds {
namespace {

struct Isa {
  const char* name;
  const Kernels* table;
  const char* flags;
};

bool runs(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, "avx512") == 0) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  }
  if (std::strcmp(name, "avx2") == 0) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  }
#endif
  return std::strcmp(name, "generic") == 0;
}

// Best first.
constexpr Isa kIsas[] = {
#if defined(DS_HAS_avx512)
    {"avx512", &avx512::table, DS_FLAGS_avx512},
#endif
#if defined(DS_HAS_avx2)
    {"avx2", &avx2::table, DS_FLAGS_avx2},
#endif
    {"generic", &generic::table, DS_FLAGS_generic},
};

const Isa* best() {
  for (const Isa& isa : kIsas) {
    if (runs(isa.name)) return &isa;
  }
  return nullptr;  // not reached: generic runs everywhere
}

const Isa* in_use = best();

}  // namespace

const Kernels& kernels() { return *in_use->table; }

}  // namespace ds

int32_t ds_abi_version(void) { return DS_ABI_VERSION; }

const char* ds_isa(void) { return ds::in_use->name; }

int32_t ds_set_isa(const char* name) {
  for (const ds::Isa& isa : ds::kIsas) {
    if (std::strcmp(isa.name, name) == 0 && ds::runs(name)) {
      ds::in_use = &isa;
      return 0;
    }
  }
  return -EINVAL;
}

const char* ds_isa_flags(void) { return ds::in_use->flags; }
